"""Checkpoint tensors on disk, in one format for any number of processes (`torch.distributed.checkpoint`)."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from posttrain.distributed.world import control_group, current_world
from posttrain.runs.storage import digests_of_files


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor], background: bool = False) -> dict[Path, str]:
    """Write the tensors to `directory`, sharded ones by shard. All ranks call it; a tensor that is not sharded and that all
    ranks name is written once. It returns when all have written, the digest of each rank's file, which the rank computes.
    `background`: in the thread that writes checkpoints."""
    world, writer = current_world(), dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    with _explained():
        dcp.save(dict(tensors), storage_writer=writer, **_process_group(background))

    def digests() -> dict[Path, str]:
        files = list(directory.glob(f"__{world.rank}_*"))
        return dict(zip(files, digests_of_files(files), strict=True))

    return dict(chain.from_iterable(one.items() for one in world.on_all_ranks(digests, background)))


def read_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read into the given tensors in place. Their sharding may differ from that at the time of writing."""
    with _explained():
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(directory), **_process_group())


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of `directory`, whole, in this process alone. For inspection and tests."""
    stored: Any = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in stored.items()}
    with _explained():
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return tensors


@contextmanager
def _explained() -> Iterator[None]:
    """Silence torch's warning about a missing process group, which is issued even with `no_dist=True`, and raise the error
    of the first failed rank, such as a full disk, instead of torch's collection of errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            raise next((failure[0] for failure in error.failures.values()), error) from error


def _process_group(background: bool = False) -> dict[str, Any]:
    return {"no_dist": True} if current_world().size == 1 else {"process_group": control_group(background)}
