"""A run in a process of its own: whatever becomes of it, the study goes on and knows why it ended."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.recipe.stages import Recipe
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.metrics import read_metrics

STOP_SECONDS = 300.0
"""A run that was asked to stop and has not is killed after this long: it may be within an update, or saving."""
_LOCK_SECONDS = 120.0
"""How long a run waits for a process of a killed study that is still saving its checkpoint."""


class Attempt:
    """The run of `recipe`, begun anew, or gone on with where its directory is there already."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.run = RunDirectory(Path(recipe.runs) / recipe.name)
        self._process: Any = None
        self._reasons: Connection | None = None
        self._told: str | None = None
        self._stopped: float | None = None
        self._lines: tuple[int, list[dict[str, Any]]] = (-1, [])

    @property
    def finished(self) -> bool:
        """Whether the run came to its end; the report is the last thing that it writes."""
        return self.run.report.is_file()

    @property
    def running(self) -> bool:
        """Whether its process is there. One that does not stop when asked to is killed after `STOP_SECONDS`."""
        if self._process is None:
            return False
        if self._stopped is not None and time.monotonic() - self._stopped > STOP_SECONDS:
            self._process.kill()
        return bool(self._process.is_alive())

    @property
    def sentinel(self) -> Any:
        """What becomes ready when the process ends."""
        return self._process.sentinel

    def start(self, device: str | None) -> None:
        """Start the process, unless the run is finished. `device`: what it sees as CUDA_VISIBLE_DEVICES.

        Raises `RunError` where the directory holds a run of another recipe, or cannot be written.
        """
        if not self.run.path.exists():
            RunDirectory.create(self.recipe)
        elif recipe_hash(RunDirectory.open(self.run.path).load_recipe()) != recipe_hash(self.recipe):
            raise RunError(f"{self.run.path} is a run of another recipe; give the study another `name`")
        if self.finished:
            return
        context = multiprocessing.get_context("forkserver")
        # Imported once for all runs; nothing of it touches a GPU, which processes that are forked could then not use.
        context.set_forkserver_preload(["torch", "transformers", "peft", f"posttrain.training.{self.recipe.stage}"])
        variables = dict(os.environ) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        self._reasons, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(str(self.run.path), variables, theirs))
        self._process.start()
        theirs.close()

    def stop(self) -> None:
        """Ask the run to stop: it saves a checkpoint and ends. A second call does nothing."""
        if self._process is not None and self._stopped is None:
            self._stopped = time.monotonic()
            self._process.terminate()

    def lines(self) -> list[dict[str, Any]]:
        """The metrics so far; `RunError` where they are damaged."""
        file = self.run.metrics
        size = file.stat().st_size if file.is_file() else 0
        if size != self._lines[0]:
            self._lines = (size, read_metrics(file))
        return self._lines[1]

    def failure(self) -> str | None:
        """Why the ended run did not come to its end, in one line; None where it did."""
        code = self._process.exitcode if self._process is not None else 0
        if code == 0 and self.finished:
            return None
        if self._told is None and self._reasons is not None:
            try:
                self._told = self._reasons.recv() if self._reasons.poll() else ""
            except (EOFError, OSError):
                self._told = ""
        if self._told:
            return " ".join(self._told.split())
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, as the system does where memory runs out"
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}; see {self.run.logs / 'output.txt'}"

    def forget_weights(self) -> None:
        """Delete the checkpoints and the exported model; metrics, recipe and report stay."""
        for directory in (self.run.checkpoints, self.run.path / "model"):
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def minutes(self) -> float:
        """Minutes that the run has worked so far, interruptions left out."""
        return max((line.get("time/run") or 0.0 for line in self.lines()), default=0.0) / 60


def _work(path: str, variables: Mapping[str, str], reasons: Connection) -> None:
    """What the process does: go on with the run at `path`, and tell why not."""
    os.setpgid(0, 0)  # Ctrl-C reaches the study, which stops its runs itself, each once
    os.environ.clear()
    os.environ.update(variables)
    run = RunDirectory.open(path)
    log = os.open(run.logs / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _stop_with_parent()
    from rich.console import Console

    from posttrain.training.stage import run_stage

    code = 1
    try:
        _await_lock(run)
        run_stage(_in_place(run), resume=True, console=Console(width=140))
        code = 0
    except PosttrainError as error:
        print(f"posttrain: {error}", flush=True)
        reasons.send(str(error))
    except KeyboardInterrupt:
        reasons.send("stopped by a signal")
    except BaseException as error:
        traceback.print_exc()
        reasons.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    raise SystemExit(code)


def _in_place(run: RunDirectory) -> Recipe:
    """The run's recipe, at the place where the run is now."""
    return run.load_recipe().model_copy(update={"runs": str(run.path.parent), "name": run.path.name})


def _stop_with_parent() -> None:
    """Stop as by a signal once the study is gone, however it went: a run that nobody watches would hold its GPU."""
    study = multiprocessing.parent_process()
    assert study is not None

    def wait() -> None:
        study.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _await_lock(run: RunDirectory) -> None:
    """Wait while the process of a killed study still saves its checkpoint."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            with run.lock():
                return
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
