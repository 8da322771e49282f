"""Weight buckets of bounded size, each a safetensors file that the engines on this machine read."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from posttrain.locks import lock
from posttrain.models.cuda.copies import copied_to_cpu

Bucket = dict[str, torch.Tensor]
_PREFIX = "posttrain-weights-"


def buckets(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Split named tensors, in order, into buckets of at most `max_bytes` bytes. A larger tensor gets its own bucket."""
    bucket: Bucket = {}
    size = 0
    for name, tensor in weights:
        count = tensor.numel() * tensor.element_size()
        if bucket and size + count > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += count
    if bucket:
        yield bucket


class WeightStore:
    """Files of the current weights. With `keep`, they stay until the next update, for engines that are restarted;
    otherwise each is removed after it has been read."""

    def __init__(self, keep: bool, expected_bytes: int) -> None:
        """Create the folder: in shared memory if twice `expected_bytes` are free there, else in the temporary directory."""
        self.keep = keep
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * expected_bytes
        parent = memory if roomy else Path(tempfile.gettempdir())
        # Folders of processes that were killed: their locks are free.
        for folder in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError), (folder / "lock").open("rb") as file:
                lock(file.fileno())
                shutil.rmtree(folder, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        part = self.folder / "lock.part"
        self._lock = part.open("wb")
        lock(self._lock.fileno())  # held until this process exits
        part.rename(self.folder / "lock")
        self.files: list[Path] = []

    def put(self, bucket: Bucket, name: str) -> Path:
        """Write the bucket to a safetensors file of the given relative name and return its path."""
        from safetensors.torch import save_file

        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        save_file(dict(zip(bucket, copied_to_cpu(list(bucket.values())), strict=True)), path)
        self.files.append(path)
        return path

    def discard(self, path: Path) -> None:
        """Remove a file that all engines have read, unless files are kept."""
        if not self.keep:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files."""
        for path in self.files:
            path.unlink(missing_ok=True)
        self.files.clear()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
