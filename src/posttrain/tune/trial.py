"""A trial: a run whose held-out metrics go to Optuna's study while it runs, and whose end does."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.trial import TrialState

from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.recipe.stages import Recipe
from posttrain.recipe.study_file import Study
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.metrics import read_metrics
from posttrain.training.interrupts import Interrupts
from posttrain.tune.outcome import NotMeasured, curve, outcome

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

    from posttrain.stages import run_stage

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


class TrialJob:
    """Trial `trial` of the study `kept`, begun anew or gone on with after a kill."""

    def __init__(self, study: Study, kept: optuna.Study, trial: optuna.Trial, attempt: Attempt) -> None:
        self.study = study
        self.kept = kept
        self.trial = trial
        self.attempt = attempt
        self._reported = set(_frozen(kept, trial).intermediate_values)
        self._pruned = False
        self._damage = ""
        self.unmeasured = ""
        """Why, where the run came to its end without a metric that the study is judged by."""

    @property
    def damaged(self) -> bool:
        """Whether the metrics of the run cannot be read."""
        return bool(self._damage)

    def begin(self, device: str | None) -> None:
        """Start the run, unless it had ended. One that a killed study was about to prune is pruned."""
        if self._reported and self.trial.should_prune():
            self._pruned = True
        self.follow()
        if not self._pruned:
            self.attempt.start(device)

    def follow(self) -> None:
        """Report the evaluations that are new, in order, until one of them prunes the trial."""
        try:
            points = curve(self.attempt.lines(), self.study.recipe.objective)
        except PosttrainError as error:
            self._damage = str(error)
            self.attempt.stop()
            return
        for step, value in points:
            if self._pruned:
                break
            if step not in self._reported:
                self.trial.report(value, step)
                self._reported.add(step)
                self._pruned = self.trial.should_prune()
        if self._pruned:
            self.attempt.stop()

    def end(self) -> None:
        """Tell Optuna what came of it: a value, pruned, or failed with the reason."""
        reason = self._damage or ("" if self._pruned else self.attempt.failure() or "")
        if not self._damage:
            self.trial.set_user_attr("minutes", round(self.attempt.minutes, 3))
        value = None
        if not reason:
            try:
                value = self._measure()
            except PosttrainError as error:
                reason = str(error)
                if isinstance(error, NotMeasured):
                    self.unmeasured = reason
        if reason:
            tell_failure(self.kept, self.trial, reason)
        elif self._pruned:
            self.kept.tell(self.trial, state=TrialState.PRUNED)
        else:
            self.kept.tell(self.trial, value)

    def _measure(self) -> float:
        """The value of the trial; its step and its limits are stored beside it."""
        lines, reached = self.attempt.lines(), max(self._reported, default=0)
        # A pruned run may have gone on a little before it stopped, as long as it took; that must not matter.
        known = [line for line in lines if line["step"] <= reached] if self._pruned else lines
        found = outcome(known, self.study.recipe.objective)
        self.trial.set_user_attr("step", found.step)
        self.trial.set_user_attr("limited", found.limited)
        have = _frozen(self.kept, self.trial).constraints
        for metric, distance in found.beyond.items():
            if metric not in have:
                self.trial.set_constraint(metric, distance)
        return found.value


def tell_failure(kept: optuna.Study, trial: optuna.Trial, reason: str) -> None:
    """Record that the trial failed, and why."""
    trial.set_user_attr("reason", reason)
    kept.tell(trial, state=TrialState.FAIL)


def _frozen(kept: optuna.Study, trial: optuna.Trial) -> Any:
    return kept._storage.get_trial(trial._trial_id)


_SECONDS = 0.25
"""Between two looks at the metrics of the runs."""


class Job(Protocol):
    """A run and what is to be done with what it measures."""

    attempt: Attempt

    def begin(self, device: str | None) -> None:
        """Start the run, unless it is finished or given up."""
        ...

    def follow(self) -> None:
        """Look at what the run has measured since."""
        ...

    def end(self) -> None:
        """The process has ended, or never began."""
        ...


def work(take: Callable[[], Job | None], workers: int, devices: Sequence[str]) -> None:
    """Run what `take` gives until it gives nothing and nothing runs.

    `take` is asked again whenever a worker is free. Ctrl-C and SIGTERM ask the runs to save and stop, wait for them,
    and then raise KeyboardInterrupt; so does every error, with the error.
    """
    active: dict[int, Job] = {}
    with Interrupts() as interrupts:
        try:
            while True:
                with interrupts.critical():
                    _fill(active, take, workers, devices)
                if not active:
                    return
                sentinels = [job.attempt.sentinel for job in active.values() if job.attempt.running]
                if len(sentinels) == len(active):
                    wait(sentinels, timeout=_SECONDS)
                with interrupts.critical():
                    for place, job in list(active.items()):
                        ended = not job.attempt.running
                        job.follow()
                        if ended:
                            job.end()
                            del active[place]
        except BaseException:
            _stop_all([job.attempt for job in active.values()])
            raise


def _fill(active: dict[int, Job], take: Callable[[], Job | None], workers: int, devices: Sequence[str]) -> None:
    while len(active) < workers:
        job = take()
        if job is None:
            return
        place = next(place for place in range(workers) if place not in active)
        active[place] = job
        job.begin(devices[place % len(devices)] if devices else None)


def _stop_all(attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        attempt.stop()
    for attempt in attempts:
        while attempt.running:
            wait([attempt.sentinel], timeout=_SECONDS)
