"""Shared state of a training loop: evaluation, checkpoints, logging, interruption, end of the run, collapse guards."""

import math
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console

from posttrain.distributed.tensors import read_tensors
from posttrain.distributed.world import Interrupts, current_world
from posttrain.episode import Advantages, Episode
from posttrain.errors import InputError
from posttrain.evaluation.results import Results
from posttrain.evaluation.verdict import rows_file, unaudited
from posttrain.models.gate import exactness
from posttrain.models.load import resolve_path
from posttrain.models.policy import TrainedModel
from posttrain.plugins import pip_command
from posttrain.recipe.run import BY_AUDIT, TrainedRecipe
from posttrain.rollout.store import episodes_file, read_episodes, remove_episodes_after, stored_steps, write_episodes
from posttrain.runs.directory import RunDirectory, partial_path, storage_errors
from posttrain.runs.evaluated import StartValues
from posttrain.runs.log import read_log
from posttrain.runs.metrics import MetricsLog, NoLog, Progress, read_metrics, take_events
from posttrain.runs.samples import write_samples
from posttrain.runs.storage import free_space, share_equal_files
from posttrain.runs.tables import START, TRAINED, UNIMPROVED
from posttrain.seeds import derive_seed
from posttrain.terminal import new_console
from posttrain.training.checkpoint import Checkpoints, RemoteState
from posttrain.training.evaluators import Evaluator
from posttrain.training.results import report_results
from posttrain.training.updater import Updater

Output = TypeVar("Output")


class Stateful(Protocol):
    """An object whose state belongs in a checkpoint, as plain JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpointable(Stateful, Protocol):
    """An object whose state belongs in a checkpoint, as tensors and plain JSON."""

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """Its tensors, from which a checkpoint is written or into which it is read. `saved`: the `state_dict` to read."""
        ...


class Callback:
    """User functions that a training run calls. Subclass it and override the methods you need.

    With several processes, only rank 0 calls them. An exception stops the run. It leaves the state of the last finished
    step, so the run can be resumed to the same bits; after a KeyboardInterrupt this state is also saved as a checkpoint.
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after each step, counted from 1, with the values of its line in the metrics log. Its evaluation and
        checkpoint follow."""

    def on_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Called after each evaluation of the learning curve. Step 0 is the model before training."""

    def on_episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        """Called after the rollouts of each step of `rl` and `distill`, before the update, with all episodes."""


Callbacks = Sequence[Callback]


@dataclass
class Best:
    """The best checkpoint so far, by the metric of the learning curve."""

    step: int
    value: float
    """Score that selects; larger is better."""
    loss: float | None = None
    """`validation/loss` of the same evaluation, which decides between equal scores; None if it has none."""

    def replaced_by(self, other: "Best") -> bool:
        """Whether the later checkpoint `other` is at least as good: a higher score, or the same score and no higher loss.
        An unknown loss is the highest.
        """
        losses = [math.inf if one.loss is None or math.isnan(one.loss) else one.loss for one in (self, other)]
        return other.value > self.value or (other.value == self.value and losses[1] <= losses[0])


class Trainer(Generic[Output]):
    """Shared state of a training loop: optimizer, evaluation, checkpoints, logging.

    Attributes:
        step: number of finished steps.
        evaluated: the last step that was evaluated for the learning curve; -1 before any.
        best: the best checkpoint so far; None before any, and without `best_by`.
    """

    def __init__(
        self,
        recipe: TrainedRecipe,
        steps: int,
        run: RunDirectory,
        model: TrainedModel,
        learner: Updater[Output],
        *,
        evaluators: Sequence[Evaluator] = (),
        best_by: Callable[[dict[str, Any]], float] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        checkpointables: Mapping[str, Checkpointable] | None = None,
        warnings: Sequence[str] = (),
        callbacks: Callbacks = (),
        start: StartValues | None = None,
        auditor: Callable[[int], tuple[dict[str, Any], list[str], bool]] | None = None,
    ) -> None:
        """Create a trainer.

        Args:
            steps: steps of the whole run.
            model: the model that `learner` trains.
            evaluators: measure the model on held-out data, for the learning curve and for the final table.
            best_by: maps the values of an evaluation to the score that selects the best checkpoint (larger is better).
                Of equal scores, the lower `validation/loss` counts, then the later step. None keeps the last checkpoint.
            stateful: further objects whose state belongs in a checkpoint, by name.
            checkpointables: the same for objects with tensors, here or in other processes (`RemoteState`). They may change
                only inside `interrupts.critical()`.
            warnings: sentences for the user, reported before the first step.
            callbacks: called after each step, evaluation and rollout.
            start: values of the model before training, if the run that trained it has measured them.
            auditor: tests the stored episodes of a step's evaluation against a second scorer. Returns the values of a line
                of the log, warnings, and whether the run ends.
        """
        self.recipe, self.steps, self.run, self.model, self.learner = recipe, steps, run, model, learner
        self.evaluators = list(evaluators)
        self.best_by = best_by
        self.stateful = dict(stateful or {})
        self.checkpointables = dict(checkpointables or {})
        self.remote = {name: each for name, each in self.checkpointables.items() if isinstance(each, RemoteState)}
        self.warnings = [*warnings, *model.warnings]
        self.callbacks = list(callbacks)
        self.start, self.auditor = start, auditor
        self.audit_stops = False
        """Whether only the reward rises, and the recipe ends the run for it."""
        self.checkpoints = Checkpoints(run.checkpoints, run.load_environment()["id"], recipe.checkpoint)
        self.interrupts = Interrupts()
        self.step = 0
        self.evaluated = -1
        self.best: Best | None = None
        self.seconds: dict[str, float] = defaultdict(float)
        """Time of each phase of the current step."""
        self._world = current_world()
        self._log: MetricsLog | NoLog = NoLog()
        self._clock: tuple[int, float] | None = None
        """Step and seconds before this process's first step, if the recipe limits the time."""
        self._world.on_rank0(self._open_log)
        self._finished = False
        """Whether all steps are done. The newest checkpoint is then the last, and the weights may be those of the best."""
        self._lost: list[str] = []
        """Lines that are missing in the log of a resumed run."""
        self._warned: set[tuple[int, str]] = set()
        """Steps and warnings in the log of a resumed run, such as why it stopped; they are not logged again."""
        self._state: dict[str, Any] = {}
        self._random: dict[str, torch.Tensor] = {}
        self._seed_process(0)

    def resume(self) -> None:
        """Continue from the newest checkpoint, or from the start if there is none yet."""
        steps = self._world.broadcast(self.checkpoints.steps())
        if not steps:
            self._world.on_rank0(lambda: self._forget_after(-1))
            return
        directory, tensors, state = self.checkpoints.load(steps[-1])
        self.model.restore(directory)
        targets, random = self._tensors(state["step"], state), random_states(self.model.device)
        same = state["processes"] == self._world.size and state.get("devices") == sorted(random)
        read_tensors(tensors, targets | (self._named(random) if same else {}))
        if same:
            set_random_states(random)
        else:
            self._seed_process(steps[-1])
        self.learner.optimizer.load_state_dict(state["optimizer"])
        for name, checkpointable in self.checkpointables.items():
            checkpointable.load_state_dict(state["checkpointables"][name])
        for name, each in self.remote.items():
            self._world.on_rank0(partial(each.read, tensors.parent / name))
        self.step, self.evaluated, self.audit_stops = state["step"], state["evaluated"], state["audit_stops"]
        self.model.version = state["version"]
        self.learner.skipped_in_a_row = state["skipped_in_a_row"]
        self.best = Best(**state["best"]) if state["best"] else None
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
        self._world.on_rank0(lambda: self._forget_after(self.step))
        self._remember()

    def _seed_process(self, step: int) -> None:
        """Seed torch's global generators with a state that is specific to this process.

        The package itself does not draw from them (dropout has its own counters), but extensions may.
        """
        torch.manual_seed(derive_seed(self.recipe.seed, "process", self._world.rank, step))

    def _named(self, random: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Random states of this process under their names in a checkpoint."""
        return {f"random/{self._world.rank}/{device}": state for device, state in random.items()}

    def _open_log(self) -> None:
        self._log = MetricsLog(self.run, self.recipe.sinks)

    def _forget_after(self, step: int) -> None:
        lines = read_metrics(self.run.metrics)
        kept = [line for line in lines if line["kind"] == "warning" and line["step"] <= step]
        self._warned = {(line["step"], str(line.get("message"))) for line in kept}
        logged = {line["step"] for line in lines if line["kind"] == "train"}
        if lost := len(set(range(1, step + 1)) - logged):
            self._lost = [
                f"{self.run.metrics} lacks {lost} of the {step} steps before the checkpoint: curves, tables and the report "
                "leave them out, and the training is unaffected"
            ]
        self._log.truncate_after(step)
        remove_episodes_after(self.run.episodes, step)

    @contextmanager
    def working(self, console: Console) -> Iterator[None]:
        """Signals, display on `console` and log around the loop. A requested stop saves a checkpoint."""
        console = console if self._world.is_rank0 else new_console(file=StringIO())
        title = f"stage {self.recipe.stage}, run {self.recipe.name}"
        with self.interrupts, self._log, Progress(self.steps, title, self.step, console) as self.progress:
            self.learner.computed = self.progress.trained
            try:
                self._world.on_rank0(self._require_room)
                self.warn([*self._lost, *([] if self.evaluated >= 0 else self.warnings)])
                yield
            except KeyboardInterrupt as stop:
                whole = self._state and not (self._finished or self.interrupts.torn)
                saved = f", saved as {self.save().name}" if whole else ""
                command = f"posttrain {self.recipe.stage} --resume {self.run.path}"
                sentence = f"stopped by {str(stop) or 'KeyboardInterrupt'} after step {self.step}{saved}; continue with `{command}`"
                self.progress.message(sentence)
                stop.add_note(sentence)  # for a launcher that no longer receives this process's output
                raise
            finally:
                self.warn(take_events())

    def _require_room(self) -> None:
        remote = sum(each.size for each in self.remote.values())
        each = self.model.saved_tensors(), self._tensors(1)
        policy, state = (sum(tensor.nbytes for tensor in tensors.values()) for tensors in each)
        self.checkpoints.require_room(self.steps, policy, state + remote)

    def preflight(self, step: int, message: str) -> None:
        """Show and log what was checked before `step`."""
        self.progress.message(message)
        self._log.write(step, "preflight", {"message": message})

    def baseline(self, policy: str) -> dict[str, Any]:
        """The logged values of a baseline policy on the final data; empty if it has none."""
        lines = self._world.on_rank0(lambda: read_metrics(self.run.metrics))
        return next((line for line in lines if line["kind"] == "baseline" and line["policy"] == policy), {})

    def begin(self) -> None:
        """Evaluate before the first step. A resumed run makes up an evaluation that the interrupted run missed."""
        if self.evaluated < 0 and (distances := exactness(self.model.model)):
            self.preflight(0, distances)
        # The results on the final data that the run is compared with: baseline policies and the initial model.
        for evaluator in self.evaluators if self.evaluated < 0 else ():
            for policy, baseline in evaluator.baselines().items():
                self._log.write(0, "baseline", {"policy": policy, **baseline})
        starts = self.recipe.evaluation.every > 0 and getattr(self.recipe.evaluation, "start", True)
        if self.evaluated < 0 and not starts:
            self.evaluated = 0
        elif self.evaluated < 0:
            values: dict[str, Any] = {}
            if self.start is not None:
                self.progress.message(
                    "the result of the initial model on these episodes is taken from the run that trained it"
                )
                values = self.start.final
                finals = [one for one in stored_steps(self.start.run.episodes) if one.split == "final"]
                write_episodes(self.run.episodes, 0, "final", read_episodes(finals[-1].path).episodes)
            else:
                values = self._measure(START, 0, "the initial model")
            if values:
                self._log.write(0, "baseline", {"policy": START, **values})
        evaluated = self.evaluated
        self._evaluate_if_due()
        if self.evaluated != evaluated:
            self.save()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/<name>` of the step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def sampled(self, step: int, episodes: Sequence[Episode]) -> None:
        """Pass the episodes of a step's rollouts to the callbacks."""
        self._call(lambda callback: callback.on_episodes(step, episodes))

    def show_completions(self, step: int, episodes: Sequence[Episode], advantages: Advantages | None = None) -> None:
        """Send the first `tracking.completions` of the step's episodes to the sinks."""
        self._log.completions(step, episodes[: self.recipe.tracking.completions], advantages)

    def finish_step(self, metrics: dict[str, Any]) -> None:
        """Count the step, log its metrics, and copy its state for the next checkpoint. Call it inside `critical()`."""
        self.step += 1
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["time/step"] = sum(self.seconds.values())
        # Peaks so far, in bytes: resident memory of this process, and torch's allocations on its GPU.
        with suppress(ModuleNotFoundError):  # Windows has no such module
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            metrics["memory/process"] = float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if torch.cuda.is_initialized():
            metrics["memory/gpu"] = float(torch.cuda.max_memory_allocated())
            with suppress(Exception):  # without nvidia-ml-py, and on parts of a GPU, there is no such number
                metrics["speed/gpu_utilization"] = torch.cuda.utilization() / 100
        self.seconds.clear()
        self._log.write(self.step, "train", metrics)
        self.progress.update(self.step, metrics)
        self._remember()
        self.warn(take_events())

    def warn(self, messages: Sequence[str]) -> None:
        """Show and log sentences about the step that was just counted."""
        for message in messages:
            self.progress.message(f"step {self.step}: {message}")
            if (self.step, message) not in self._warned:
                self._log.write(self.step, "warning", {"message": message})

    def evaluate_and_save(self, metrics: Mapping[str, Any]) -> None:
        """Pass the `metrics` of this step to the callbacks. Then evaluate and save a checkpoint, each if it is due. The
        checkpoint includes the evaluation. Call it outside `critical()`, with everything that the step changes done."""
        self._call(lambda callback: callback.on_step(self.step, metrics))
        improved = self._evaluate_if_due()
        over = self.audit_stops or self.step == self.steps
        if improved or over or self.step % self.recipe.checkpoint.every == 0:
            with self.phase("checkpoint"):
                self.save(later=self.recipe.checkpoint.asynchronous)

    def _evaluate_if_due(self) -> bool:
        """Evaluate for the learning curve if it is due; returns whether the result is the best so far."""
        every = self.recipe.evaluation.every
        due = every > 0 and (self.step in (0, self.steps) or self.step % every == 0)
        return due and self.evaluated != self.step and self._evaluate()

    def _evaluate(self) -> bool:
        values: dict[str, Any] = {}
        with self.phase("evaluation"):
            if self.step == 0 and self.start is not None and self.start.curve:
                file = episodes_file(self.start.run.episodes, self.start.step, "evaluation")
                if file.is_file():
                    write_episodes(self.run.episodes, 0, "evaluation", read_episodes(file).episodes)
                    values |= self.start.curve
            for evaluator in self.evaluators if not values else ():
                values |= evaluator.curve(self.step, self.progress.played)
            line, warnings = dict[str, Any](), list[str]()
            if (auditor := self.auditor) is not None:
                line, warnings, self.audit_stops = self._world.on_rank0(lambda: auditor(self.step))
        improved, score = False, None
        if self.recipe.export == BY_AUDIT:
            score = line.get("audit/score")
        elif self.best_by is not None:
            score = self.best_by(values)
        if score is not None:
            candidate = Best(self.step, score, values.get("validation/loss"))
            improved = self.best is None or self.best.replaced_by(candidate)
        with self.interrupts.critical():
            if values:
                self._log.write(self.step, "evaluation", values)
                self.progress.update(self.step, values)
            if line:
                self._log.write(self.step, "audit", line)
            self.evaluated = self.step
            if improved:
                self.best = candidate
            self._remember()
        self._call(lambda callback: callback.on_evaluation(self.step, values))
        self.warn(warnings)
        return improved

    def _call(self, function: Callable[[Callback], None]) -> None:
        def work() -> None:
            for callback in self.callbacks:
                function(callback)

        self._world.on_rank0(work)

    def save(self, later: bool = False) -> Path:
        """Write a checkpoint of the last finished step; `later`: in a thread. A signal meanwhile takes effect afterwards, so
        that no part of a checkpoint stays behind.
        """
        best = self.best.step if self.best else None
        state = self._state | {
            "processes": self._world.size,
            "devices": sorted(self._random),
            "optimizer": self.learner.optimizer.state_dict(),
            "checkpointables": {name: each.state_dict() for name, each in self.checkpointables.items()},
        }
        tensors = self._tensors(self.step) | self._named(self._random)
        remote = {name: each.write for name, each in self.remote.items()}
        with self.interrupts.critical():
            return self.checkpoints.save(self.step, self.model, tensors, state, best, later, remote)

    def _tensors(self, step: int, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint of `step` except the model's and the random states. `saved`: its state, to read it."""
        # Before the first step, every process has the same optimizer state.
        state = self.learner.optimizer.tensors(saved and saved["optimizer"]) if step else {}
        tensors = {f"optimizer/{name}": tensor for name, tensor in state.items()}
        for owner, checkpointable in self.checkpointables.items():
            of_owner = checkpointable.tensors(saved and saved["checkpointables"][owner])
            tensors |= {f"{owner}/{name}": tensor for name, tensor in of_owner.items()}
        return tensors

    def _remember(self) -> None:
        """Copy the state between two steps, so that an interrupted rollout leaves no trace in a checkpoint."""
        self._random = random_states(self.model.device)
        self._state = {
            "step": self.step,
            "evaluated": self.evaluated,
            "audit_stops": self.audit_stops,
            "version": self.model.version,
            "skipped_in_a_row": self.learner.skipped_in_a_row,
            "best": asdict(self.best) if self.best else None,
            **{name: part.state_dict() for name, part in self.stateful.items()},
        }

    def out_of_time(self, minutes: float | None) -> bool:
        """Whether the run has worked for `minutes` without interruptions. Reports after step 1 how many will fit."""
        if minutes is None:
            return False
        now, left = self._log.seconds, self.steps - self.step
        if self._clock is None:
            self._clock = self.step, now
        elif left and self.step == self._clock[0] + 1:
            took = now - self._clock[1]
            fit = max(0, min(left, math.ceil((60 * minutes - now) / took)))
            fits = f"all {left} steps left fit" if fit == left else f"about {fit} of the {left} steps left fit"
            self.progress.message(f"a step takes {took:.0f} s here: {fits} in max_minutes = {minutes:g}")
        if not self._world.broadcast(now >= 60 * minutes):
            return False
        self.warn([f"stopped after {self.step} of {self.steps} steps: max_minutes = {minutes:g} have passed"])
        return True

    def _measure(self, policy: str, step: int, name: str) -> dict[str, Any]:
        """The values of the model, named `name`, on the final data. Scores by row are stored for the verdict."""
        values: dict[str, Any] = {}
        for evaluator in self.evaluators:
            self.progress.message(f"{evaluator.cost()} with {name}")
            values |= evaluator.final(step, self.progress.played)
            if (scores := evaluator.row_scores) is not None:
                results = Results(name, len(scores.scores), len(scores.scores), metrics=[scores])
                self._world.on_rank0(partial(results.write, rows_file(self.run, policy)))
        return values

    def finish(self) -> None:
        """Evaluate the exported checkpoint on the final data, and write the model, tables, plots and report."""
        if self.recipe.evaluation.every == 0:
            missed = self.step < self.steps
        elif missed := self.evaluated != self.step:
            self._evaluate()
        if missed:  # a guard or the time limit ended the run early
            self.save(later=self.recipe.checkpoint.asynchronous)
        if self.audit_stops:
            self.warn(["stopped by the audit: only the reward rises; the checkpoints are kept"])
        self._finished = True
        if self.recipe.export == BY_AUDIT and (missing := unaudited(read_log(self.run.metrics))):
            self.warn([missing])
        step = self.step
        which, chosen = "last", "the last one" if self.step >= self.steps else f"the last of {self.steps} planned"
        if self.best is not None and self.recipe.export != "last":
            step = self.best.step
            by = "best by the audit" if self.recipe.export == BY_AUDIT else "best of the curve"
            which, chosen = "best", by if step else UNIMPROVED
        if step != self.step:
            self.model.restore(self.checkpoints.policy(step))
        values = self._measure(TRAINED, self.step, f"the {which} checkpoint, step {step}")
        self.warn(take_events())
        self._log.write(self.step, "final", {"policy": TRAINED, "best_step": step, "chosen": chosen, **values})
        try:
            if samples := [one for evaluator in self.evaluators for one in evaluator.samples()]:
                self._world.on_rank0(partial(write_samples, self.run, samples))
        except Exception as error:  # such as no memory for an engine: pages must not end a run that is complete
            self.warn([f"the pages show no held-out rows: {' '.join(str(error).split())[:200]}"])
        if self.recipe.draws_plots and find_spec("matplotlib") is None:
            self.warn(
                [f"no figures are drawn without matplotlib; run `{pip_command('matplotlib')}`, then `posttrain plot`"]
            )
        directory = self.run.path / "model"
        self.checkpoints.wait()  # not before the evaluation, during which the last checkpoint may be written
        aside = self._world.broadcast(partial_path(directory))

        def replace() -> None:
            shutil.rmtree(directory, ignore_errors=True)
            aside.rename(directory)

        with storage_errors(directory):
            self._world.on_rank0(lambda: shutil.rmtree(aside, ignore_errors=True))
            self.model.export(aside)
            self._world.on_rank0(replace)
        console, plots = self.progress.console, self.recipe.draws_plots
        self._world.on_rank0(lambda: report_results(self.run, self.evaluators, directory, console, plots))
        while_running = self.recipe.checkpoint.keep_state == "while_running"
        start = None
        with suppress(InputError):  # it was moved or deleted meanwhile
            start = Path(resolve_path(self.model.recipe.path)) if step == 0 else None

        def ended() -> None:
            if while_running:
                self.checkpoints.rotate(self.best.step if self.best else None, keep=1)
            (free_space if while_running else share_equal_files)(self.run, start)

        self._world.on_rank0(ended)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's global generators, by device: the CPU, and all accelerators of the type of `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states |= {f"{device.type}:{i}": module.get_rng_state(i) for i in range(module.device_count())}
    return states


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the result of `random_states`."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(torch.device(name)).set_rng_state(state, torch.device(name))
