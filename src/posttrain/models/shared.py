"""Weights of models that several processes of a machine load, in files that they share.

transformers maps the files of a model, so weights that are stored as they are needed take no memory of a process. Those that it
converts, such as experts, of which each has matrices of its own in files, or that it casts, would be whole in every process
until the model is sharded.
"""

import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from posttrain.distributed.world import current_world
from posttrain.runs.directory import cache_directory

SMALL = 1 << 20
"""Parameters of fewer bytes stay in memory."""
_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""Without it, transformers converts weights in threads, ahead of their registration."""


@contextmanager
def shared_weights() -> Iterator[None]:
    """Load a model inside the block. Parameters that transformers makes there are written to files by the first process of each
    machine and mapped by all, which read the others from the model's files. All ranks enter the block; no effect in one process.
    """
    from safetensors.torch import load_file, save_file

    world = current_world()
    if world.size == 1:
        yield
        return
    machines, tokens = zip(*world.gather([(socket.gethostname(), secrets.token_hex(8))]), strict=True)
    leader, number = machines.index(machines[world.rank]), 0
    leads, folder = leader == world.rank, cache_directory() / f"loading-{tokens[leader]}"

    def share(module: torch.nn.Module, name: str, parameter: Any) -> None:
        nonlocal number
        mapped = parameter is None or parameter.is_meta or parameter.untyped_storage().filename is not None
        if mapped or parameter.device.type != "cpu" or parameter.nbytes < SMALL:
            return
        file, number = folder / f"{number}.safetensors", number + 1
        if leads:
            save_file({"weight": parameter.detach().contiguous()}, file)
        parameter.data = load_file(file)["weight"]

    try:
        if leads:
            folder.mkdir(parents=True)
        else:
            world.barrier()
        hook, before = register_module_parameter_registration_hook(share), os.environ.get(_IN_TURN, "0")
        os.environ[_IN_TURN] = "1"
        try:
            yield
        finally:  # also where every process refuses the model
            hook.remove()
            os.environ[_IN_TURN] = before
            if leads:
                world.barrier()
            world.barrier()  # files that are mapped exist until they are not
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)
