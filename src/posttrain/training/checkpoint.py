"""Checkpoints: written atomically, verified when read, rotated by the rules of the recipe.

A checkpoint is a directory `step_N` with the policy as transformers or peft saves it, tensors such as the optimizer's in
`tensors`, the trainer's state, and a manifest with the SHA-256 of every file. It is written to a temporary directory, synced
to disk, and renamed. With several processes, each writes its share of the tensors, and rank 0 writes everything else. Any
number of processes can read it. With `checkpoint.asynchronous`, a thread of each process writes copies.
Older checkpoints are reduced to the policy. When the run has ended, the policies of the newest and of the best remain.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from posttrain.distributed.tensors import write_tensors
from posttrain.distributed.world import current_world
from posttrain.errors import InputError
from posttrain.models.policy import TrainedModel
from posttrain.recipe.run import CheckpointRecipe
from posttrain.runs.directory import partial_path, storage_errors, sync_directory, write_atomically
from posttrain.runs.reader import LARGEST, is_file, read_json
from posttrain.runs.storage import MANIFEST, STATE, delete_state, digests_of_files, saved_steps, size_text

_WHOLE = 2
"""Number of latest checkpoints that `keep: all` keeps complete."""


@runtime_checkable
class RemoteState(Protocol):
    """Tensors of a checkpoint that processes of their own hold, write and read. Only rank 0 makes the calls."""

    size: int
    """Bytes in a checkpoint."""

    def write(self, directory: Path) -> None: ...

    def read(self, directory: Path) -> None: ...


class Checkpoints:
    """The checkpoints of one run, in `directory`. `run_id` identifies the run in each of them."""

    def __init__(self, directory: Path, run_id: str, recipe: CheckpointRecipe) -> None:
        self.directory, self.run_id, self.recipe = directory, run_id, recipe
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        self.wait()
        return saved_steps(self.directory)

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def save(
        self,
        step: int,
        model: TrainedModel,
        tensors: Mapping[str, torch.Tensor],
        state: dict[str, Any],
        best: int | None,
        later: bool = False,
        remote: Mapping[str, Callable[[Path], None]] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, then delete or reduce older ones. The one of step `best` is kept.

        `later`: return once everything is copied, and write it in a thread. `remote`: functions by which other processes
        write tensors to a directory, by its name; rank 0 calls them. Raises what an earlier such thread raised.
        """
        self.wait()
        world, target, text = current_world(), self.path(step), json.dumps(state, indent=1)
        aside = world.broadcast(partial_path(target))

        def begin() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

        def conclude(digests: Mapping[Path, str]) -> None:
            (aside / STATE).write_text(text)
            self._seal(aside, step, digests)
            if target.exists():
                shutil.rmtree(target)
            aside.rename(target)
            sync_directory(self.directory)
            self.rotate(best, self.recipe.keep)

        @contextmanager
        def removing_parts() -> Iterator[None]:
            with storage_errors(target):
                try:
                    yield
                except BaseException:
                    if world.is_rank0:
                        shutil.rmtree(aside, ignore_errors=True)
                    raise

        with storage_errors(target):
            world.on_rank0(begin)
            for name, write_there in (remote or {}).items():
                world.on_rank0(partial(write_there, aside / name))
        if not later:
            with removing_parts():
                model.save(aside / "policy")
                digests = write_tensors(aside / "tensors", tensors)
                world.on_rank0(lambda: conclude(digests))
            return target
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        with storage_errors(target):
            save_model = model.save_later(aside / "policy")

        def attempt() -> None:
            try:
                with removing_parts():
                    # Every process has written when this returns, so rank 0 needs no further call of all.
                    digests = write_tensors(aside / "tensors", copies, background=True)
                    save_model()
                    if world.is_rank0:
                        conclude(digests)
            except BaseException as error:
                self._failure = error

        self._writing = threading.Thread(target=attempt, name="checkpoint")
        self._writing.start()
        return target

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete. If writing failed, raises its error on every
        process."""
        if self._writing is None or threading.current_thread() is self._writing:
            return
        self._writing.join()
        self._writing, failure, self._failure = None, self._failure, None
        current_world().raise_any(failure)

    def require_room(self, steps: int, policy: int, state: int) -> None:
        """InputError if the disk has no room for the checkpoints of `steps` steps and the exported model.

        `policy` and `state`: bytes of the policy and of everything else in a checkpoint.
        """
        keep = self.recipe.keep
        whole = 1 + (_WHOLE if keep == "all" else keep)  # a new checkpoint is written before the oldest is deleted
        policies = 2 + (steps // self.recipe.every if keep == "all" else 0)
        files = [path.stat() for path in self.directory.rglob("*") if path.is_file()]
        needed = whole * (policy + state) + policies * policy - sum(stat.st_size for stat in files)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise InputError(
                f"{self.directory} needs {size_text(needed)} for checkpoints and the model, and the disk has "
                f"{size_text(free)} free; free some space (`posttrain runs clean`), lower checkpoint.keep, or choose other `runs`"
            )

    def load(self, step: int) -> tuple[Path, Path, dict[str, Any]]:
        """The directories of the policy and of the tensors, and the trainer's state of `step`, verified."""
        path = self.path(step)
        self.verify(path, resumable=True)
        state = current_world().on_rank0(lambda: read_json(path / STATE, LARGEST, self.directory))
        return path / "policy", path / "tensors", state

    def policy(self, step: int) -> Path:
        """The directory of the policy of `step`, verified."""
        self.wait()
        path = self.path(step)
        self.verify(path)
        return path / "policy"

    def verify(self, path: Path, resumable: bool = False) -> None:
        """Raise InputError unless this run wrote every file of the checkpoint and none has changed. All ranks call it, and
        each reads a share of the files: those that it wrote, if there are as many ranks.

        `resumable`: also raise for a checkpoint that was reduced to its policy.
        """
        world = current_world()
        files, remedy, shares = world.on_rank0(lambda: self._listed(path, resumable))
        mine = [name for name in files if shares[name] == world.rank]

        def damaged() -> str | None:
            there = [name for name in mine if is_file(path / name)]
            found = dict(zip(there, digests_of_files([path / name for name in there], self.directory), strict=True))
            return next((name for name in mine if found.get(name) != files[name]), None)

        if bad := [name for name in world.on_all_ranks(damaged) if name is not None]:
            raise InputError(f"{path / bad[0]} is damaged: its checksum differs; {remedy}")

    def _listed(self, path: Path, resumable: bool) -> tuple[dict[str, str], str, dict[str, int]]:
        """The digests of the checkpoint's files by name, the remedy if one differs, and the rank that reads each."""
        others = [s for s in self.steps() if self.path(s) != path and (self.path(s) / STATE).is_file()]
        remedy = (
            f"add --fall-back to resume from step {others[-1]}" if others else "start the run again with --overwrite"
        )
        try:
            manifest = read_json(path / MANIFEST, run=self.directory)
            files, run_id = manifest["files"], manifest["run"]
        except (InputError, KeyError) as error:
            raise InputError(f"{path / MANIFEST} is missing or damaged ({type(error).__name__}); {remedy}") from error
        if run_id != self.run_id:
            raise InputError(f"{path} is a checkpoint of another run ({run_id}, this one is {self.run_id}); {remedy}")
        if resumable and STATE not in files:
            raise InputError(
                f"{path} contains only the policy, so no run can resume from it; {remedy}, or start a run from "
                f"{path / 'policy'} as `model.path`"
            )
        # Everything in these folders is read. A file beside them, or a hidden one, harms nothing.
        for file in path.glob("*/**/[!.]*" if resumable else "policy/**/[!.]*"):
            if not file.is_dir() and str(file.relative_to(path)) not in files:
                raise InputError(f"{file} is not a file that posttrain wrote to this checkpoint; move it away")
        return files, remedy, _divided(path, files, current_world().size)

    def fall_back(self) -> list[str]:
        """Rename checkpoints newer than the newest intact one to `damaged_step_N`. Returns a message for each.

        InputError if no checkpoint is intact; in this case none is renamed.
        """
        damaged: list[tuple[Path, str]] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                self.verify(path, resumable=True)
            except InputError as error:
                damaged.append((path, str(error).partition(";")[0]))
                continue
            for newer, _ in damaged:
                names = (newer.with_name(f"damaged_{newer.name}{n}") for n in chain([""], map(".{}".format, count(2))))
                with storage_errors(newer):
                    newer.rename(next(unused for unused in names if not unused.exists()))
            return [
                f"{reason}; it is now damaged_{newer.name}, and the run continues from step {step}"
                for newer, reason in damaged
            ]
        raise InputError(
            f"{self.directory} has no intact checkpoint to fall back to; start the run again with --overwrite"
        )

    def _seal(self, aside: Path, step: int, digests: Mapping[Path, str]) -> None:
        """Sync every file and write the manifest last. `digests`: of files that are synced."""
        files = sorted(path for path in aside.rglob("*") if path.is_file() and path not in digests)
        for path in files:
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
        whole = dict(digests) | dict(zip(files, digests_of_files(files), strict=True))
        named = {str(path.relative_to(aside)): whole[path] for path in sorted(whole)}
        write_atomically(aside / MANIFEST, json.dumps({"run": self.run_id, "step": step, "files": named}, indent=1))
        for directory in (path for path in aside.iterdir() if path.is_dir()):
            sync_directory(directory)

    def rotate(self, best: int | None, keep: int | Literal["all"]) -> None:
        """Delete or reduce all but the `keep` latest checkpoints, by the rules of the recipe."""
        for step in self.steps()[: -_WHOLE if keep == "all" else -keep]:
            if self.recipe.keep == "all" or step == best:
                delete_state(self.path(step))
                continue
            # Rename first, so that an interrupted deletion leaves no partial checkpoint under a valid name.
            doomed = partial_path(self.path(step))
            self.path(step).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _divided(path: Path, files: Iterable[str], ranks: int) -> dict[str, int]:
    """The rank that reads each of the files to verify it. A rank's part of the tensors is its own; others are divided by size."""
    sizes = {name: (path / name).stat().st_size if is_file(path / name) else 0 for name in files}
    totals, shares = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda name: ("/__" not in name, -sizes[name], name)):
        part = re.search(r"/__(\d+)_", name)
        rank = int(part[1]) % ranks if part else totals.index(min(totals))
        shares[name], totals[rank] = rank, totals[rank] + sizes[name]
    return shares
