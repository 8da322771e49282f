"""Tensors of a checkpoint on disk, in one format for any number of processes (`torch.distributed.checkpoint`)."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from posttrain.distributed.world import control_group, current


def write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors to `directory`; divided ones by their shares. Every process calls it with the same names."""
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    try:
        with _alone_is_fine():
            dcp.save(dict(tensors), storage_writer=writer, **_how())
    except CheckpointException as error:
        raise _cause(error) from error


def read_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read into the given tensors, in place; they may be divided otherwise than they were when they were written."""
    try:
        with _alone_is_fine():
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(directory), **_how())
    except CheckpointException as error:
        raise _cause(error) from error


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of `directory`, whole, for who looks at them in one process."""
    stored: Any = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    found = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in stored.items()}
    with _alone_is_fine():
        dcp.load(found, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return found


def names_of(directory: Path) -> set[str]:
    """The names of the tensors in `directory`."""
    return set(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """torch warns where there is one process, even where it is told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _how() -> dict[str, Any]:
    return {"no_dist": True} if current().size == 1 else {"process_group": control_group()}


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong in the first process in which something did: a full disk, say."""
    return next((failure[0] for failure in error.failures.values()), error)
