"""Disk usage of runs: training state is deleted when a run has ended, and equal weights are stored once."""

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.runs.directory import RunDirectory, partial_path, write_atomically
from posttrain.runs.metrics import read_metrics

MANIFEST = "manifest.json"
STATE = "state.json"
_CHECKPOINT = re.compile(r"^step_(\d+)$")
_SHARED_FROM = 1 << 20
"""Minimum size in bytes of a file to replace by a link."""


def saved_steps(directory: Path) -> list[int]:
    """Steps that have a checkpoint in `directory`, ascending."""
    names = [_CHECKPOINT.match(path.name) for path in directory.glob("step_*")]
    return sorted(int(match[1]) for match in names if match)


def digest_of_file(path: Path) -> str:
    """SHA-256 of the content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete_state(checkpoint: Path) -> None:
    """Delete everything except the policy of a checkpoint. The state is deleted last, so that interrupted calls
    repeat.
    """
    if not (checkpoint / STATE).is_file():
        return
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        policy = {name: digest for name, digest in manifest["files"].items() if name.startswith("policy/")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # damaged; `Checkpoints.verify` reports it when it is loaded
    write_atomically(checkpoint / MANIFEST, json.dumps(manifest | {"files": policy}, indent=1))
    for directory in checkpoint.iterdir():
        if directory.is_dir() and directory.name != "policy":
            shutil.rmtree(directory, ignore_errors=True)
    (checkpoint / STATE).unlink()


def has_state(run: RunDirectory) -> bool:
    """Whether the run can make more steps: it has no checkpoint yet, or the newest one has its training state."""
    steps = saved_steps(run.checkpoints)
    if not steps:
        return True
    try:
        manifest = json.loads((run.checkpoints / f"step_{steps[-1]:06d}" / MANIFEST).read_text())
        return STATE in manifest["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # damaged; `Checkpoints.verify` reports it


def free_space(run: RunDirectory) -> None:
    """Delete the training state of a run that has ended, and store equal weights once. The caller holds its lock."""
    for step in saved_steps(run.checkpoints):
        delete_state(run.checkpoints / f"step_{step:06d}")
    share_equal_files(run)


def share_equal_files(run: RunDirectory) -> None:
    """Replace equal files of `model/` and of the checkpoints' policies by hard links, if the file system supports
    them.
    """
    by_size: dict[int, list[Path]] = defaultdict(list)
    for path in _weights(run):
        by_size[path.stat().st_size].append(path)
    for same_size in by_size.values():
        first_of: dict[str, Path] = {}
        for path in same_size if len({file.stat().st_ino for file in same_size}) > 1 else ():
            first = first_of.setdefault(digest_of_file(path), path)
            if first.samefile(path):
                continue
            aside = partial_path(path)
            try:
                os.link(first, aside)
            except OSError:
                return
            os.replace(aside, path)


def _weights(run: RunDirectory) -> Iterator[Path]:
    folders = [*sorted(run.checkpoints.glob("step_*/policy")), run.path / "model"]
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size >= _SHARED_FROM:
                yield path


@dataclass(frozen=True)
class Usage:
    """Disk usage of a run, in bytes."""

    run: RunDirectory
    total: int
    freed: int
    """Bytes that `free_space` would free: training state and duplicate weights."""
    ended: bool
    """Whether the run has ended, so that its training state is no longer needed."""


def _of_state(parts: tuple[str, ...]) -> bool:
    """Whether a file at `parts` below a run belongs to a directory of training state in a checkpoint."""
    return parts[0] == "checkpoints" and len(parts) > 3 and parts[2] != "policy"


def usage_of(run: RunDirectory) -> Usage:
    """Sizes of the files of a run. A file with several names counts once."""
    files = {path: path.lstat() for path in run.path.rglob("*") if not path.is_dir() or path.is_symlink()}
    total = sum({stat.st_ino: stat.st_size for stat in files.values()}.values())
    state = sum(
        stat.st_size
        for path, stat in files.items()
        if path.name == STATE or _of_state(path.relative_to(run.path).parts)
    )
    weights: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in _weights(run):
        weights[files[path].st_size].setdefault(files[path].st_ino, path)
    repeated = sum(
        size * (len(of_size) - len({digest_of_file(path) for path in of_size.values()}))
        for size, of_size in weights.items()
        if len(of_size) > 1
    )
    return Usage(run, total, state + repeated, has_ended(run))


def has_ended(run: RunDirectory) -> bool:
    """Whether the last execution of a training run finished. Resuming a run deletes its final line."""
    lines = read_metrics(run.metrics)
    return run.report.is_file() and any(line["kind"] == "final" for line in lines)


def runs_in(folder: Path) -> list[RunDirectory]:
    """The runs in `folder`, including those inside pipelines and studies, by name. Runs may be links."""
    # `**` does not follow links.
    patterns = ("**/environment.json", "*/environment.json", "*/*/environment.json")
    markers = sorted({marker for pattern in patterns for marker in folder.glob(pattern)})
    paths = [marker.parent for marker in markers if (marker.parent / "recipe.yaml").is_file()]
    return [RunDirectory(path) for path in paths]


def size_text(size: float) -> str:
    """`size` bytes with a unit, as in 3.6 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
