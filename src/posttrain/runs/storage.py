"""Disk usage of runs: training state is deleted when a run has ended, and equal weights are stored once."""

import hashlib
import json
import math
import os
import shutil
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from posttrain.errors import InputError, PosttrainError
from posttrain.runs.directory import RunDirectory, cache_directory, partial_path, saved_steps, write_atomically
from posttrain.runs.machine import usable_processors
from posttrain.runs.reader import is_file, open_file, read_json
from posttrain.runs.tables import read_verdict

MANIFEST = "manifest.json"
STATE = "state.json"
STARTED = "started.json"
"""The file in which a pipeline lists its stages in order."""
_SHARED_FROM = 1 << 20
"""Minimum size in bytes of a file to replace by a link."""


def digest_of_file(path: Path, run: Path | None = None) -> str:
    """SHA-256 of the content, in hex; `run` and errors as for `open_file`."""
    with open_file(path, run, math.inf) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of_files(paths: Sequence[Path], run: Path | None = None) -> list[str]:
    """`digest_of_file` of each file, in as many threads as this process has processors."""
    with ThreadPoolExecutor(len(usable_processors())) as threads:
        return list(threads.map(partial(digest_of_file, run=run), paths))


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


def free_space(run: RunDirectory, start: Path | None = None) -> None:
    """Delete the training state of a run that has ended, and store equal weights once. The caller holds its lock. `start`:
    as for `share_equal_files`.
    """
    for step in saved_steps(run.checkpoints):
        delete_state(run.checkpoints / f"step_{step:06d}")
    share_equal_files(run, start)


def share_equal_files(run: RunDirectory, start: Path | None = None) -> None:
    """Replace equal files of `model/` and of the checkpoints' policies by hard links, if the file system has them.

    `start`: the folder of the model that the run started from. A run that did not improve exports this model again, and then
    its files are links to that folder, which keep their content when that folder is moved or deleted. Only folders of runs
    and of the cache are linked to: nothing writes there in place, which would change the run.
    """
    if start is not None:
        of_run = any((folder / "environment.json").is_file() for folder in start.resolve().parents[:3])
        start = start if of_run or start.resolve().is_relative_to(cache_directory().resolve()) else None
    by_size: dict[int, list[Path]] = defaultdict(list)
    for path in _weights(*([] if start is None else [start]), *_policies(run)):
        by_size[path.stat().st_size].append(path)
    for same_size in by_size.values():
        first_of: dict[str, Path] = {}
        for path in same_size if len({file.stat().st_ino for file in same_size}) > 1 else ():
            digest = digest_of_file(path)
            first = first_of.setdefault(digest, path)
            if first.samefile(path):
                continue
            aside = partial_path(path)
            try:
                os.link(first, aside)
            except OSError:  # no links here, or `start` is on another file system
                first_of[digest] = path
                continue
            os.replace(aside, path)


def _policies(run: RunDirectory) -> list[Path]:
    return [*sorted(run.checkpoints.glob("step_*/policy")), run.path / "model"]


def _weights(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if is_file(path) and path.stat().st_size >= _SHARED_FROM:
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
    step: int = 0
    """The last training step."""
    shared: int = 0
    """Bytes of files that other folders share, which deleting the run would not free."""
    verdict: str = ""
    """Whether the model improved, as far as it is known."""
    problem: str = ""
    """Why its files cannot be read; empty if they can."""


def usage_of(run: RunDirectory) -> Usage:
    """Sizes of the files of a run. A file with several names counts once."""
    files: dict[Path, os.stat_result] = {}
    for path in run.path.rglob("*"):
        with suppress(OSError):  # it was deleted meanwhile
            if not stat.S_ISDIR((status := path.lstat()).st_mode):
                files[path] = status
    names = Counter(status.st_ino for status in files.values())
    links = {status.st_ino: status for status in files.values()}
    total = sum(status.st_size for status in links.values())
    shared = sum(status.st_size for number, status in links.items() if status.st_nlink > names[number])
    state = 0
    for path, status in files.items():
        parts = path.relative_to(run.path).parts
        in_checkpoint = parts[0] == "checkpoints" and len(parts) > 3 and parts[2] != "policy"
        state += status.st_size if in_checkpoint or path.name == STATE else 0
    weights: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in files.keys() & set(_weights(*_policies(run))):
        weights[files[path].st_size].setdefault(files[path].st_ino, path)
    repeated = sum(
        size * (len(same_size) - len({digest_of_file(path) for path in same_size.values()}))
        for size, same_size in weights.items()
        if len(same_size) > 1
    )
    from posttrain.runs.log import progress_of  # imports numpy

    try:
        run.recipe_values()
        # Resuming a run deletes its final line.
        step, final = progress_of(run.metrics)
        verdict = read_verdict(run.path)
        outcome = verdict.outcome if verdict is not None else ""
        return Usage(run, total, state + repeated, final and is_file(run.report), step, shared, outcome)
    except PosttrainError as error:
        return Usage(run, total, state + repeated, False, shared=shared, problem=str(error))


def runs_in(folder: Path) -> list[RunDirectory]:
    """The runs in `folder`, including those inside pipelines and studies, by name. Runs may be links."""
    # `**` does not follow links.
    patterns = ("**/environment.json", "*/environment.json", "*/*/environment.json")
    markers = sorted({marker for pattern in patterns for marker in folder.glob(pattern)})
    paths = [marker.parent for marker in markers if os.path.lexists(marker.parent / "recipe.yaml")]
    return [RunDirectory(path) for path in paths]


def needed_runs(runs: Sequence[RunDirectory]) -> set[Path]:
    """The paths of those `runs` that a recipe of another run names, here and in the folders beside them, or that are stages of
    a pipeline, from which stages may start that have no run yet.
    """
    from posttrain.recipe.sources import texts

    needed = {run.path for run in runs if is_file(run.path.parent / STARTED)}
    folders = {Path("runs").resolve(), *(run.path.resolve().parent for run in runs)} if runs else set()
    others = {one.path.resolve(): one for folder in folders for one in runs_in(folder)}
    named: dict[Path, set[Path]] = {}
    for path, other in others.items():
        with suppress(PosttrainError):
            began = Path(other.load_environment().get("folder") or ".")
            values = {key: value for key, value in other.recipe_values().items() if key != "runs"}
            named[path] = {(began / Path(text).expanduser()).resolve() for text in texts(values)}
    for run in runs:
        own = run.path.resolve()
        if any(own in (text, *text.parents) for path, paths in named.items() if path != own for text in paths):
            needed.add(run.path)
    return needed


def size_text(size: float) -> str:
    """`size` bytes with a unit, as in 3.6 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
