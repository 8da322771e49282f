"""The run directory, which contains everything that one execution of a recipe produced, and functions that write files.

Files and folders are written atomically (`atomic_file`, `atomic_folder`), logs line by line (`LineLog`), and a write that
fails is a `RunError` with a remedy (`storage_errors`).
"""

import errno
import glob
import hashlib
import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from posttrain import __version__
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.locks import lock, unlock
from posttrain.runs.machine import describe_machine
from posttrain.runs.reader import is_file, open_file, read_json, read_text

if TYPE_CHECKING:
    from posttrain.recipe.stages import Recipe


_LONGEST_FAILURE = 4_000
"""Maximum length of the message in `RunDirectory.failure`."""
_ENVIRONMENT: dict[str, Any] = {
    **dict.fromkeys(("id", "recipe_hash", "started", "command", "python", "platform", "processor"), str),
    "cpus_allowed": int,
    "git": dict | None,
    "packages": dict,
}
"""The keys of environment.json that are read, and their types."""
FORMAT = 1
"""Version of the layout. It is stored in `environment.json` and marks a directory as a run."""


class _Part:
    """A path inside of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", owner: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside `<runs>/<name>`. Use `create` or `open` to get one."""

    path: Path
    recipe_file = _Part("recipe.yaml")
    """The resolved recipe, which can be run again unchanged."""
    environment_file = _Part("environment.json")
    """Machine, versions, command line, recipe hash and the id of the run."""
    metrics = _Part("metrics.jsonl")
    """Append-only metrics, from which all plots and reports are made."""
    episodes = _Part("episodes")
    checkpoints = _Part("checkpoints")
    plots = _Part("plots")
    logs = _Part("logs")
    report = _Part("report.md")
    failure = _Part("failure.txt")
    """The message of the error that ended the run; missing without one, or if the run is running again."""

    @classmethod
    def create(cls, recipe: "Recipe", overwrite: bool = False) -> "RunDirectory":
        """Atomically create `<recipe.runs>/<recipe.name>` with its recipe and environment files.

        Raises `InputError` if the name is used, unless that run recorded nothing, for example because of a wrong model
        path. `overwrite` first deletes a run of that name. It never deletes a run that is being trained, or anything
        that is not a run. Raises `RunError` if the directory cannot be written.
        """
        path = Path(recipe.runs) / recipe.name
        cls.require_free(path, overwrite)
        if is_used(path):
            with cls(path).lock(), storage_errors(path):
                # Rename first, so that an interrupted deletion does not leave half a run under the name.
                trash = partial_path(path)
                path.rename(trash)
                shutil.rmtree(trash)
        remove_partials(path)
        with atomic_folder(path) as aside:
            cls(aside)._fill(recipe)
        return cls(path)

    @classmethod
    def require_free(cls, path: Path, overwrite: bool = False) -> None:
        """InputError if `create` would refuse `path`, or has no folder to write it in."""
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            why = "is not writable" if parent.is_dir() else "is a file"
            raise InputError(f"cannot write {path}: {parent} {why}; set `runs` to a folder that can be written")
        if not is_used(path):
            return
        if path.is_symlink() or not _is_run(path):
            raise InputError(f"{path} exists and is not a posttrain run; choose another `name` or `runs`")
        used = cls(path)
        begun = used.metrics.is_file() and used.metrics.stat().st_size > 0
        begun |= any(any(folder.iterdir()) for folder in (used.episodes, used.checkpoints) if folder.exists())
        if begun and not overwrite:
            raise InputError(
                f"the run {path} exists; continue it with `--resume {path}`, replace it with `--overwrite`, or choose "
                "another `name`"
            )

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """The run at `path`; raises `InputError` if there is none."""
        run = cls(Path(path))
        if not run.path.is_dir():
            raise InputError(f"there is no run at {path}; give the directory of a run, for example `runs/run`")
        if not _is_run(run.path):
            raise InputError(
                f"{path} is not a posttrain run (recipe.yaml or posttrain's environment.json is missing or not a regular "
                "file); give the directory `<runs>/<name>` of a run"
            )
        for folder in (run.episodes, run.checkpoints, run.plots, run.logs, run.path / "normalizer"):
            if folder.is_symlink():  # files would be read and written outside of the run
                raise InputError(f"{folder} is a link; replace it with a directory")
        return run

    def recipe_values(self) -> dict[str, Any]:
        """The content of recipe.yaml, not validated; InputError if it cannot be read or is not a YAML mapping."""
        from posttrain.recipe import sources

        return sources.read_text(read_text(self.recipe_file), str(self.recipe_file)).values

    def failure_text(self) -> str:
        """The content of `failure`, cut, or why it cannot be read; empty without the file."""
        try:
            with open_file(self.failure, most=math.inf) as file:
                return file.read(_LONGEST_FAILURE).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return ""
        except (OSError, InputError) as error:
            return str(error)

    def load_recipe(self, to_run: bool = False) -> "Recipe":
        """The recipe of the run; raises `InputError` if recipe.yaml is damaged or from another version.

        `to_run`: import the environment that the recipe names, except inside `looking`. Otherwise a custom environment
        becomes `environments.unknown`, and no code that the run names is executed.
        """
        from pydantic import TypeAdapter, ValidationError

        from posttrain.recipe.components import looking
        from posttrain.recipe.stages import Recipe

        values = self.recipe_values()
        try:
            with nullcontext() if to_run else looking():
                return TypeAdapter(Recipe).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{self.recipe_file}: key {where!r}: {first['msg']}; correct the key") from error

    def load_environment(self) -> dict[str, Any]:
        """Content of environment.json: machine, versions, `command`, `id`, `recipe_hash`; InputError if one is missing."""
        values = read_json(self.environment_file)
        for key, kind in _ENVIRONMENT.items():
            if not isinstance(values.get(key), kind):
                raise InputError(f"{self.environment_file}: key {key!r} is missing or malformed; restore the file")
        return values

    def saved_step(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return max(saved_steps(self.checkpoints), default=0)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for this process; raises `InputError` with the process id if another process holds the lock.

        The kernel releases the lock when the process ends. Partial files of killed processes are removed.
        """
        file = self.path / ".lock"
        with storage_errors(file):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            if not is_file(file):
                raise InputError(f"{file} is not a regular file; delete it")
            try:
                lock(descriptor)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise InputError(
                    f"process {holder} is training in {self.path}; wait for it, stop it, or choose another `name`"
                ) from error
            # If the run was deleted since the file was opened, this lock has no effect on its successor.
            if not file.exists() or not os.path.samestat(os.fstat(descriptor), file.stat()):
                raise InputError(f"another process has just replaced {self.path}; choose another `name`")
            with storage_errors(file):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            remove_partials(self.path)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Write the message of an error that leaves the block to `failure`. Interrupts do not count as failures."""
        with storage_errors(self.failure):
            self.failure.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            sentence = str(error) if isinstance(error, PosttrainError) else f"{type(error).__name__}: {error}"
            with suppress(RunError):  # the original error matters more than a second one about a full disk
                write_atomically(self.failure, f"{sentence[:_LONGEST_FAILURE]}\n".encode("utf-8", "backslashreplace"))
            raise

    def is_running(self) -> bool:
        """Whether a process of this machine holds the lock; does not lock the run itself."""
        try:
            with open_file(self.path / ".lock") as opened:
                pid, inode = int(opened.read(32)), os.fstat(opened.fileno()).st_ino
        except (OSError, ValueError, InputError):
            return False
        if not process_runs(pid):
            return False
        try:
            held = Path("/proc/locks").read_text()
        except OSError:  # outside Linux, only the process id is available
            return True
        return any(f" {pid} " in line and f":{inode} " in line for line in held.splitlines() if "FLOCK" in line)

    def _fill(self, recipe: "Recipe") -> None:
        for directory in (self.episodes, self.checkpoints, self.plots, self.logs):
            directory.mkdir()
        header = f"# Recipe of a posttrain {__version__} run, with every default written out. Run it again with\n"
        header += f"# posttrain {recipe.stage} recipe.yaml name=ANOTHER\n"
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times faster where there is libyaml
        content = yaml.dump(
            recipe.model_dump(mode="json"), None, dumper, sort_keys=False, allow_unicode=True, width=120
        )
        write_atomically(self.recipe_file, header + content)
        about = {"posttrain_run": FORMAT, "id": uuid.uuid4().hex[:12], "recipe_hash": recipe_hash(recipe)}
        write_atomically(self.environment_file, json.dumps(about | describe_machine(), indent=2) + "\n")


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint in the directory `checkpoints`, ascending."""
    names = [re.fullmatch(r"step_(\d+)", path.name) for path in checkpoints.glob("step_*")]
    return sorted(int(match[1]) for match in names if match)


def exported_model(run: Path) -> Path:
    """The model that the run in the directory `run` has exported; InputError if there is none."""
    model = run / "model"
    if not any((model / name).is_file() for name in ("config.json", "adapter_config.json")):
        if (run / "report.md").is_file():
            stage = RunDirectory(run).recipe_values().get("stage")
            raise InputError(
                f"{run} has ended and its model is deleted; a study keeps that of its best trial (`weights`); train it again "
                f"with `posttrain {stage} {run / 'recipe.yaml'} runs=runs name=again`"
            )
        raise InputError(
            f"{run} has no model yet; wait for its end, continue it with --resume {run}, or use the policy of a checkpoint in "
            f"{run}/checkpoints"
        )
    return model


def model_path(model: str) -> str:
    """The result of `exported_model` if `model` is the directory of a run, otherwise `model`."""
    return str(exported_model(Path(model))) if (Path(model) / "recipe.yaml").is_file() else model


def recipe_hash(recipe: "Recipe") -> str:
    """First 16 hex digits of the SHA-256 of the recipe as canonical JSON; equal recipes have equal hashes."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_used(path: Path) -> bool:
    """Whether `path` is something other than an empty folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return True
    with storage_errors(path):
        return path.is_dir() and any(path.iterdir())


def _is_run(path: Path) -> bool:
    try:
        return "posttrain_run" in read_json(path / "environment.json") and is_file(path / "recipe.yaml")
    except InputError:
        return False


# -- writing files ----------------------------------------------------------------------------------------------------


_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EACCES: "permission denied; make it writable or choose another path",
    errno.EPERM: "permission denied; make it writable or choose another path",
    errno.EROFS: "the file system is read-only; choose another path",
    errno.EFBIG: "the limit of file sizes is reached; raise `ulimit -f`",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
    errno.ENAMETOOLONG: "a name in the path is too long; shorten it",
    errno.ENOTDIR: "a folder in the path is a file; choose another path",
}


def cache_directory() -> Path:
    """Directory for tokens, converted models and compiled kernels: `$POSTTRAIN_CACHE`, or `posttrain` in the user's cache
    directory. InputError if the user has no home directory.
    """
    if base := os.environ.get("POSTTRAIN_CACHE"):
        return Path(base)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"
    except RuntimeError as error:
        raise InputError("this user has no home directory for a cache; set POSTTRAIN_CACHE to a directory") from error


def partial_path(path: Path) -> Path:
    """Temporary path for writing `path`, in the same directory, so that the rename is atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert storage errors inside the block to `RunError` with `path` and a remedy."""
    try:
        yield
    except Exception as error:
        reason = storage_error(error)
        if reason is None:
            raise
        raise RunError(
            f"cannot write {path}: {reason}, then repeat the command; a run continues with `--resume`"
        ) from error


def storage_error(error: BaseException) -> str | None:
    """Cause and remedy of a failed write; None if `error` is not a storage error.

    Libraries that write weights raise other errors: safetensors includes the errno only in the message, and the archive
    writer of torch reports only that fewer bytes were stored than written.
    """
    if isinstance(error, OSError):
        return _REMEDIES.get(error.errno or 0, f"{error.strerror or error}; check the path and the disk")
    if match := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(match[1])
        return _REMEDIES.get(number, f"{os.strerror(number)}; check the path and the disk")
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return "not all bytes could be stored, probably because the disk is full; free some space"
    return None


def sync_directory(path: Path) -> None:
    """Fsync the directory `path`, so that renames in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the block. At its end, the file is fsynced and becomes `path`, and its directory is fsynced.

    Its directory is created. If the block raises, `path` is unchanged. Storage errors are `RunError`s.
    """
    aside = partial_path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill in the block, which becomes `path` at its end. If the block raises, `path` is unchanged.

    `path` may be an empty folder. InputError if another process has filled it meanwhile. Storage errors are `RunError`s.
    """
    aside = partial_path(path)
    with storage_errors(path):
        shutil.rmtree(aside, ignore_errors=True)  # of a killed process with the same id, as in containers
        try:
            aside.mkdir(parents=True)
            yield aside
            try:
                aside.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise InputError(f"another process has just written {path}; choose another name") from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_directory(path.parent)


def write_atomically(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Replace the content of `path` with `content` (bytes, text as UTF-8, or an iterable of bytes) by `atomic_file`."""
    with atomic_file(path) as file:
        file.writelines(
            [content.encode()] if isinstance(content, str) else [content] if isinstance(content, bytes) else content
        )


def remove_partials(path: Path) -> None:
    """Delete what a process that has ended, or this one, left when it wrote `path` or a file below it."""
    beside = path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.partial")
    for part in [*beside, *path.rglob(".*.partial")]:
        match = re.fullmatch(r"\..+\.(\d+)\.partial", part.name)  # with the id of the writing process
        if match and (int(match[1]) == os.getpid() or not process_runs(int(match[1]))):
            if part.is_dir():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink(missing_ok=True)


def process_runs(pid: int) -> bool:
    """Whether a process with this id exists on this machine."""
    if not 0 < pid < 1 << 31:  # 0 and negative ids are groups of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# -- appending lines --------------------------------------------------------------------------------------------------

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link in a run of someone else must not lead to another file."""
_BLOCK = 1 << 16


class LineLog(AbstractContextManager["LineLog"]):
    """A file of lines that end with a newline, to which lines are appended. A context manager.

    A line reaches the operating system before `append` returns, whole or not at all, so a killed process loses none. `lines`
    skips the incomplete last line that a power failure leaves, and `cut` removes it. Storage errors are `RunError`s.
    """

    def __init__(self, path: Path, descriptor: int | None = None, sync_seconds: float | None = math.inf) -> None:
        """Open the log at `path`, which is created if missing.

        descriptor: the log, if it is open already; `path` then only names it.
        sync_seconds: least time between two fsyncs, in seconds, of which a power failure may lose the lines. 0: a line
            is on disk when `append` returns. Infinite: only `close` syncs. None: nothing does.
        """
        self.path = path
        self._sync_seconds = sync_seconds
        self._synced = time.monotonic()
        with storage_errors(path):
            self._descriptor = os.open(path, _FLAGS, 0o644) if descriptor is None else descriptor
            if descriptor is None and self.size == 0 and sync_seconds is not None:
                sync_directory(path.parent)

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    @property
    def torn(self) -> bool:
        """Whether the last line is incomplete."""
        size = self.size
        return size > 0 and self.read(size - 1, size) != b"\n"

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the complete lines from byte `start` on, each after the offset at which it ends."""
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                yield start, line

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`."""
        return os.pread(self._descriptor, stop - start, start)

    def append(self, line: bytes, sync: bool = False) -> int:
        """Append a line, which ends with a newline; returns the offset at which it ends. `sync`: fsync now."""
        start = end = self.size
        try:
            view = memoryview(line)
            while view:
                written = os.pwrite(self._descriptor, view, end)
                view, end = view[written:], end + written
            if sync or (self._sync_seconds is not None and time.monotonic() - self._synced >= self._sync_seconds):
                self.sync()
        except OSError:
            with storage_errors(self.path):
                os.ftruncate(self._descriptor, start)
                raise
        return end

    def cut(self) -> None:
        """Remove an incomplete last line."""
        end, newline = self.size, -1
        while end > 0 and newline < 0:
            start = max(0, end - _BLOCK)
            newline = self.read(start, end).rfind(b"\n")
            end = start if newline < 0 else start + newline + 1
        self.truncate(end)

    def truncate(self, size: int) -> None:
        """Drop all bytes after the first `size`."""
        with storage_errors(self.path):
            if self.size != size:
                os.ftruncate(self._descriptor, size)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Atomically replace all lines."""
        os.close(self._descriptor)
        self._descriptor = -1
        write_atomically(self.path, lines)
        with storage_errors(self.path):
            self._descriptor = os.open(self.path, _FLAGS, 0o644)

    def sync(self) -> None:
        """Fsync the file."""
        os.fsync(self._descriptor)
        self._synced = time.monotonic()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock of the file; other processes wait. A file system without locks has none."""
        with suppress(OSError):
            lock(self._descriptor, wait=True)
        try:
            yield
        finally:
            with suppress(OSError):
                unlock(self._descriptor)

    def close(self) -> None:
        """Sync and close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if self._sync_seconds is not None:
                with storage_errors(self.path):
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
