"""A trial: a run in its own process, whose evaluations are reported to Optuna, and its outcome."""

import difflib
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from posttrain.distributed.launch import without_current_folder
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.recipe.stages import Recipe
from posttrain.recipe.study import Objective
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.metrics import read_metrics
from posttrain.runs.reader import is_file

STOP_SECONDS = 300.0
"""A run that does not stop within this time is killed. It may be busy with an update or a checkpoint."""
_LOCK_SECONDS = 120.0
"""Seconds that a run waits for a process of a killed study that is still saving a checkpoint."""


def preloaded(stage: str) -> list[str]:
    """Modules to import once for all runs of a stage. Importing them must not initialize CUDA, or forked processes could
    not use it: so not peft, which imports bitsandbytes."""
    return ["torch", "posttrain.models.load", "transformers", f"posttrain.training.{stage}"]


class Attempt:
    """The run of `recipe` in its own process; resumes if its directory exists."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.run = RunDirectory(Path(recipe.runs) / recipe.name)
        self._process: Any = None
        self._reasons: Connection | None = None
        self._reason: str | None = None
        self._stopped: float | None = None
        self._lines: tuple[int, list[dict[str, Any]]] = (-1, [])

    @property
    def finished(self) -> bool:
        """Whether the run finished; it writes its report last."""
        return is_file(self.run.report)

    @property
    def running(self) -> bool:
        """Whether the process is alive. Kills it if it was asked to stop more than `STOP_SECONDS` ago."""
        if self._process is None:
            return False
        if self._stopped is not None and time.monotonic() - self._stopped > STOP_SECONDS:
            self._process.kill()
        return bool(self._process.is_alive())

    @property
    def sentinel(self) -> Any:
        """A handle that becomes ready when the process ends."""
        return self._process.sentinel

    def start(self, device: str | None) -> None:
        """Start the process, unless the run is finished. `device`: its CUDA_VISIBLE_DEVICES.

        Raises `RunError` if the directory holds a run of another recipe, or cannot be written.
        """
        if not self.run.path.exists():
            RunDirectory.create(self.recipe)
        elif recipe_hash(RunDirectory.open(self.run.path).load_recipe()) != recipe_hash(self.recipe):
            raise RunError(f"{self.run.path} is a run of another recipe; give the study another `name`")
        if self.finished:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preloaded(self.recipe.stage))
        variables = dict(os.environ) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        self._reasons, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_process, args=(str(self.run.path), variables, sender))
        with without_current_folder():
            self._process.start()
        sender.close()

    def stop(self) -> None:
        """Ask the run to save a checkpoint and stop. A second call does nothing."""
        if self._process is not None and self._stopped is None:
            self._stopped = time.monotonic()
            self._process.terminate()

    def lines(self) -> list[dict[str, Any]]:
        """The metrics lines so far; raises `RunError` if they are damaged."""
        file = self.run.metrics
        size = file.stat().st_size if is_file(file) else 0
        if size != self._lines[0]:
            self._lines = (size, read_metrics(file))
        return self._lines[1]

    def failure(self) -> str | None:
        """Why the process ended before the run finished, in one line; None if the run finished."""
        code = self._process.exitcode if self._process is not None else 0
        if code == 0 and self.finished:
            return None
        if self._reason is None and self._reasons is not None:
            try:
                self._reason = self._reasons.recv() if self._reasons.poll() else ""
            except (EOFError, OSError):
                self._reason = ""
        if self._reason:
            return " ".join(self._reason.split())
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, possibly by the kernel because memory ran out"
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}; see {self.run.logs / 'output.txt'}"

    def delete_weights(self, but_model: bool) -> None:
        """Delete checkpoints and, unless `but_model`, the exported model. Metrics, recipe and report stay."""
        for name in ("checkpoints",) if but_model else ("checkpoints", "model"):
            shutil.rmtree(self.run.path / name, ignore_errors=True)

    @property
    def minutes(self) -> float:
        """Working time of the run in minutes, without interruptions."""
        return max((line.get("time/run") or 0.0 for line in self.lines()), default=0.0) / 60


def _run_process(path: str, variables: Mapping[str, str], reasons: Connection) -> None:
    """Entry point of the process: start or resume the run at `path`. Sends the reason of a failure to `reasons`."""
    os.setpgid(0, 0)  # Ctrl-C reaches only the study, which stops every run once
    os.environ.clear()
    os.environ.update(variables)
    run = RunDirectory.open(path)
    log = os.open(run.logs / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    study = multiprocessing.parent_process()
    assert study is not None

    def stop_with_study() -> None:
        study.join()
        os.kill(os.getpid(), signal.SIGTERM)  # no orphaned run occupies a GPU

    threading.Thread(target=stop_with_study, daemon=True).start()
    from posttrain.stages import run_stage
    from posttrain.terminal import new_console

    code = 1
    try:
        _await_lock(run)
        # The run may have moved since it began.
        recipe: Any = run.load_recipe(to_run=True)
        changes: dict[str, Any] = {"runs": str(run.path.parent), "name": run.path.name}
        if recipe.checkpoint.keep_state == "while_running" and recipe.checkpoint.keep != "all":
            # A trial resumes from its newest checkpoint, so an older one would only take space.
            changes["checkpoint"] = recipe.checkpoint.model_copy(update={"keep": 1})
        run_stage(recipe.model_copy(update=changes), resume=True, console=new_console(width=140))
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


def _await_lock(run: RunDirectory) -> None:
    """Wait while a process of a killed study is still saving its checkpoint."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            with run.lock():
                return
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


Line = Mapping[str, Any]


class MissingMetric(RunError):
    """Raised for a finished run without any value of a metric of the objective."""


@dataclass(frozen=True)
class Outcome:
    """The best evaluation of a run."""

    step: int
    """Training step of the evaluation."""
    value: float
    """Value of the objective."""
    limited: dict[str, float]
    """Limited metric -> its value at `step`."""
    violations: dict[str, float]
    """Limited metric -> amount by which its value exceeds the limit; at most 0 if the limit is satisfied."""


def curve(lines: Sequence[Line], objective: Objective) -> list[tuple[int, float]]:
    """(step, value) of the evaluations after step 0 that have a value, in order."""
    values = [(line["step"], line.get(objective.metric)) for line in _evaluations(lines) if line["step"] > 0]
    return [(step, float(value)) for step, value in values if value is not None]


def outcome(lines: Sequence[Line], objective: Objective) -> Outcome:
    """The best evaluation after step 0 (the first one on a tie) with its limited metrics.

    Step 0 is ignored, because all trials share it. Raises `RunError` if no evaluation has a value, and `MissingMetric`
    if none has the metric at all or a limited metric is missing.
    """
    points, name = curve(lines, objective), objective.metric
    if not points:
        after = [line for line in _evaluations(lines) if line["step"] > 0]
        if not after:
            raise RunError("it has no evaluation after step 0")
        if any(name in line for line in after):
            raise RunError(f"{name} was never a number")
        held_out = ("validation/", "success", "return", "score/")
        known = [key for key in after[-1] if key.startswith(held_out) and not key.endswith(("_low", "_high"))]
        # List the nearest names first, as a typo is the usual cause.
        near = difflib.get_close_matches(name, known, len(known) or 1, 0.7)
        raise MissingMetric(f"its evaluations have no {name}{_such_as(list(dict.fromkeys([*near, *known])))}")
    sign = 1 if objective.direction == "maximize" else -1
    step, value = max(points, key=lambda point: sign * point[1])
    limited = {metric: _limited(lines, metric, step) for metric in objective.within}
    violations = {
        metric: limited[metric] - limit.max if limit.max is not None else (limit.min or 0.0) - limited[metric]
        for metric, limit in objective.within.items()
    }
    return Outcome(step, value, limited, violations)


def _evaluations(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "evaluation"]


def _limited(lines: Sequence[Line], metric: str, step: int) -> float:
    """`metric` at the evaluation of `step`, else its mean over the training steps since the evaluation before."""
    measured = {line["step"]: line for line in _evaluations(lines)}
    if (value := measured[step].get(metric)) is not None:
        return float(value)
    before = max((one for one in measured if one < step), default=-1)
    trained = [line for line in lines if line["kind"] == "train"]
    logged = [line.get(metric) for line in trained if before < line["step"] <= step]
    numbers = [float(value) for value in logged if isinstance(value, int | float)]
    if not numbers:
        known = sorted({key for line in trained for key in line if key.startswith("policy/")})
        raise MissingMetric(
            f"neither evaluations nor training steps have {metric} of objective.within{_such_as(known)}"
        )
    return math.fsum(numbers) / len(numbers)


def _such_as(known: Sequence[str]) -> str:
    return f"; they have {', '.join(known[:6])}" if known else ""
