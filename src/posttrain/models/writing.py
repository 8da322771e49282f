"""Files of a model, as transformers and peft read them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from posttrain.distributed.sharding import full_tensor
from posttrain.distributed.world import current_world

FILE_BYTES = 4 << 30
"""Most bytes in a file of a sharded model that has more than one tensor."""


def write_weights(model: Any, directory: Path, tensors: dict[str, torch.Tensor] | None, exported: bool = False) -> None:
    """Write the `tensors` of the model, by default all. peft would add the frozen weights of adapted embeddings.
    `exported`: under the names of the family's checkpoints, where each expert has its own matrices, not of its
    modules."""
    has_adapters = hasattr(model, "peft_config")
    keywords = {"save_embedding_layers": False} if has_adapters else {"save_original_format": exported}
    model.save_pretrained(directory, **keywords, **({} if tensors is None else {"state_dict": tensors}))


def write_gathered(model: Any, directory: Path, named: Iterable[tuple[str, torch.Tensor]]) -> Callable[[], None]:
    """Write sharded tensors, which are gathered one at a time, in files of about `FILE_BYTES`, of which rank 0 has one in memory;
    adapters in one file. All ranks call it. Returns a function that writes the last file, and on other ranks does nothing."""
    world, files, whole = current_world(), list[dict[str, int]](), hasattr(model, "peft_config")
    held, size = dict[str, torch.Tensor](), 0

    def write() -> None:
        if files:
            save_file(held, directory / f"model-{len(files)}.safetensors", {"format": "pt"})
        else:
            write_weights(model, directory, dict(held))
        files.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    def write_rest() -> None:
        if not world.is_rank0:
            return
        write()
        if (count := len(files)) == 1:
            return
        # The names that transformers expects, with the index of several files.
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            (directory / (f"model-{number}.safetensors" if number else "model.safetensors")).rename(directory / name)
        size = sum(sum(file.values()) for file in files)
        index = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
        (directory / "model.safetensors.index.json").write_text(text)

    for name, tensor in named:
        gathered = full_tensor(tensor).detach()
        if size and not whole and size + gathered.nbytes > FILE_BYTES:
            world.on_rank0(write)  # the others get its error, and wait for it here
            size = 0
        size += gathered.nbytes
        if world.is_rank0:
            held[name] = gathered.to("cpu", copy=True).contiguous()
    return write_rest
