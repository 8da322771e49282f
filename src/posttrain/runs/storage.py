"""Disk usage of runs: training state is deleted when a run has ended, and equal weights are stored once."""

import hashlib
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory, partial_path, write_atomically
from posttrain.runs.reader import is_file, open_file, read_json

MANIFEST = "manifest.json"
STATE = "state.json"
_CHECKPOINT = re.compile(r"^step_(\d+)$")
_SHARED_FROM = 1 << 20
"""Minimum size in bytes of a file to replace by a link."""


def saved_steps(directory: Path) -> list[int]:
    """Steps that have a checkpoint in `directory`, ascending."""
    names = [_CHECKPOINT.match(path.name) for path in directory.glob("step_*")]
    return sorted(int(match[1]) for match in names if match)


def digest_of_file(path: Path, run: Path | None = None) -> str:
    """SHA-256 of the content, in hex; `run` and errors as for `open_file`."""
    with open_file(path, run, math.inf) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete_state(checkpoint: Path) -> None:
    """Delete everything except the policy of a checkpoint; the state last, so that an interrupted call repeats."""
    if not is_file(checkpoint / STATE):
        return
    try:
        manifest = read_json(checkpoint / MANIFEST)
        policy = {name: digest for name, digest in manifest["files"].items() if name.startswith("policy/")}
    except (InputError, KeyError, AttributeError):
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
        return STATE in read_json(run.checkpoints / f"step_{steps[-1]:06d}" / MANIFEST)["files"]
    except (InputError, KeyError, TypeError):
        return True  # damaged; `Checkpoints.verify` reports it


def free_space(run: RunDirectory) -> None:
    """Delete the training state of a run that has ended, and store equal weights once. The caller holds its lock."""
    for step in saved_steps(run.checkpoints):
        delete_state(run.checkpoints / f"step_{step:06d}")
    share_equal_files(run)


def share_equal_files(run: RunDirectory) -> None:
    """Replace equal files of `model/` and of the checkpoints' policies by hard links, if the file system has them."""
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
            if is_file(path) and path.stat().st_size >= _SHARED_FROM:
                yield path


def size_text(size: float) -> str:
    """`size` bytes with a unit, as in 3.6 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
