"""Weights on their way: cut into buckets of bounded size, each a safetensors file that engines of this machine read."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

Bucket = dict[str, torch.Tensor]
_PREFIX = "posttrain-weights-"
_LOCK = "lock"


def buckets(weights: Iterable[tuple[str, torch.Tensor]], most: int) -> Iterator[Bucket]:
    """The named tensors in their order, in buckets of at most `most` bytes, or of one tensor that is larger."""
    held: Bucket = {}
    size = 0
    for name, tensor in weights:
        own = tensor.numel() * tensor.element_size()
        if held and size + own > most:
            yield held
            held, size = {}, 0
        held[name] = tensor
        size += own
    if held:
        yield held


def write(bucket: Bucket, path: Path) -> None:
    """Write the tensors to `path` as a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket.items()}, path)


class WeightStore:
    """The files of the weights that engines have now. `keep`: they stay until the next ones come, for an engine that is
    started again; else each goes as soon as it was read."""

    def __init__(self, keep: bool, wanted: int) -> None:
        """`wanted`: bytes that will lie here; they are in memory where that has room, else in the temporary directory."""
        self.keep = keep
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * wanted
        parent = memory if roomy else Path(tempfile.gettempdir())
        _sweep(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _held(self.folder)
        self.files: list[Path] = []

    def put(self, bucket: Bucket, name: str) -> Path:
        """The file that holds the bucket from now on."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        write(bucket, path)
        self.files.append(path)
        return path

    def done_with(self, path: Path) -> None:
        """Everyone has read the file."""
        if not self.keep:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the files."""
        for path in self.files:
            path.unlink(missing_ok=True)
        self.files.clear()

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _held(folder: Path) -> BinaryIO:
    """A lock in the folder that lasts as long as this process does."""
    part = folder / "lock.part"
    file = part.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)
    return file


def _sweep(parent: Path) -> None:
    """Remove what processes that were killed left there."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
