"""What every training stage shares: the learner, the measurements, the metrics, checkpoints, and the end."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console

from posttrain.distributed.tensors import read_tensors
from posttrain.distributed.world import current
from posttrain.models.base import TrainedModel
from posttrain.recipe.stages import DpoRecipe, RewardRecipe, RlRecipe, SftRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.store import remove_episodes_after
from posttrain.runs import events
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, NoLog
from posttrain.runs.progress import Progress
from posttrain.seeds import derive_seed
from posttrain.training.batches import Sample
from posttrain.training.checkpoint import Checkpoints
from posttrain.training.evaluators import Evaluator
from posttrain.training.interrupts import Interrupts
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Updater

TrainingRecipe = RlRecipe | SftRecipe | RewardRecipe | DpoRecipe
Output = TypeVar("Output")


class Stateful(Protocol):
    """Something whose state belongs in a checkpoint, as plain JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpointable(Protocol):
    """Something whose state belongs in a checkpoint, as tensors and, besides, as plain JSON."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its own tensors, to be written, or read into."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Best:
    """The best checkpoint so far, by the recipe's metric on the held-out seeds of the learning curve."""

    step: int
    value: float


class Trainer(Generic[Output]):
    """The workshop of one training run. `step` is the number of finished steps."""

    def __init__(
        self,
        recipe: TrainingRecipe,
        run: RunDirectory,
        model: TrainedModel,
        forward: Callable[[Sequence[Sample]], Output],
        total_steps: int,
        total_updates: int,
    ) -> None:
        """`forward` is what the model computes for the learner; `total_updates` are those of the whole run."""
        self.recipe = recipe
        self.run = run
        self.total_steps = total_steps
        self.model = model
        self.optimizer = Optimizer(model.trainable(), recipe.optimizer, total_updates)
        self.learner = Updater(model, self.optimizer, recipe.learner, forward)
        self.evaluators: list[Evaluator] = []
        """What is measured on held-out data, for the learning curve and for the final table."""
        self.choice: Callable[[dict[str, Any]], float] | None = None
        """From an evaluation's values, what chooses the best checkpoint (larger is better); None keeps the last."""
        self.messages: list[str] = []
        """What the user should know before the first step."""
        self.checkpoints = Checkpoints(run.checkpoints, run.load_environment()["id"], recipe.checkpoint.keep)
        self.interrupts = Interrupts()
        self.world = current()
        self.log: MetricsLog | NoLog = NoLog()
        self.world.on_rank0(lambda: self._open_log(recipe))
        self.step = 0
        self.finished = False
        """All steps are made: the newest checkpoint is the last one, and the weights may be swapped for the best."""
        self.best: Best | None = None
        self.evaluated = -1
        """The last step that was evaluated for the learning curve."""
        self.stateful: dict[str, Stateful] = {}
        self.checkpointables: dict[str, Checkpointable] = {}
        """Models that learn beside the one that is trained; they may change only where no signal interrupts."""
        self._state: dict[str, Any] = {}
        self.seconds: dict[str, float] = defaultdict(float)

    # -- beginning ----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the newest checkpoint, or from the start where there is none yet."""
        steps = self.world.broadcast(self.checkpoints.steps())
        if not steps:
            self.world.on_rank0(lambda: self._forget_after(-1))
            return
        directory, tensors, state = self.checkpoints.load(steps[-1])
        self.model.restore(directory)
        own, random = self._tensors(), f"random/{self.world.rank}"
        if state["processes"] != self.world.size:
            # Draws of dropout alone, and of processes that are not the same ones.
            torch.manual_seed(derive_seed(self.recipe.seed, "processes", steps[-1], self.world.rank))
            own.pop(random)
        read_tensors(tensors, own)
        if random in own:
            torch.set_rng_state(own[random])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, checkpointable in self.checkpointables.items():
            checkpointable.load_state_dict(state["checkpointables"][name])
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.model.version = state["version"]
        self.learner.skipped_in_a_row = state["skipped_in_a_row"]
        self.best = Best(**state["best"]) if state["best"] else None
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
        self.world.on_rank0(lambda: self._forget_after(self.step))
        self._remember()

    def _open_log(self, recipe: TrainingRecipe) -> None:
        self.log = MetricsLog(self.run, recipe.sinks)

    def _forget_after(self, step: int) -> None:
        self.log.truncate_after(step)
        remove_episodes_after(self.run.episodes, step)

    @contextmanager
    def working(self, title: str) -> Iterator[None]:
        """Signals, display and log around the loop. A stop that was asked for ends with a checkpoint."""
        console = None if self.world.is_rank0 else Console(file=StringIO())
        with self.interrupts, self.log, Progress(self.total_steps, title, self.step, console) as self.progress:
            try:
                self.warn([] if self.evaluated >= 0 else [*recipe_warnings(self.recipe), *self.messages])
                yield
            except KeyboardInterrupt as stop:
                with self.interrupts.critical():
                    saved = "" if self.finished or not self._state else f", saved as {self.save().name}"
                command = f"posttrain {self.recipe.stage} --resume {self.run.path}"
                self.progress.message(f"stopped by {stop} after step {self.step}{saved}; go on with `{command}`")
                raise

    # -- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/<name>` of the step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def begin(self) -> None:
        """The evaluation that is due before the next step, if an interrupted run still owes it, and its checkpoint."""
        owed = self.evaluated
        self.evaluate_if_due()
        if self.evaluated != owed:
            self.save()

    def finish_step(self, metrics: dict[str, Any]) -> None:
        """Count the step, write its line, and remember the state it left. Call it where no signal interrupts."""
        self.step += 1
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["time/step"] = sum(self.seconds.values())
        self.seconds.clear()
        self.log.write(self.step, "train", metrics)
        self.progress.update(self.step, metrics)
        self._remember()
        self.warn(events.drain())

    def warn(self, messages: Sequence[str]) -> None:
        """Show and log what the user should know of the step that was just counted."""
        for message in messages:
            self.progress.message(f"step {self.step}: {message}")
            self.log.write(self.step, "warning", {"message": message})

    def evaluate_and_save(self) -> None:
        """What is due after the step: evaluation, then a checkpoint, which so always holds the evaluation too."""
        improved = self.evaluate_if_due()
        if improved or self.step % self.recipe.checkpoint.every == 0 or self.step == self.total_steps:
            with self.phase("checkpoint"):
                self.save()

    def evaluate_if_due(self) -> bool:
        """Evaluate for the learning curve if this step asks for it and has not been; says whether it is the best yet."""
        every = self.recipe.evaluation.every
        due = self.step in (0, self.total_steps) or (every > 0 and self.step % every == 0)
        return due and self.evaluated != self.step and self._evaluate_curve()

    def _evaluate_curve(self) -> bool:
        values: dict[str, Any] = {}
        with self.phase("evaluation"):
            for measure in self.evaluators:
                values |= measure.curve(self.step)
        value = self.choice(values) if self.choice is not None else 0.0
        improved = self.choice is not None and (self.best is None or value > self.best.value)
        with self.interrupts.critical():
            if values:
                self.log.write(self.step, "evaluation", values)
                self.progress.update(self.step, values)
            self.evaluated = self.step
            if improved:
                self.best = Best(self.step, value)
            self._remember()
        return improved

    def save(self) -> Path:
        """Write a checkpoint of the last finished step."""
        best = self.best.step if self.best else None
        state = self._state | {
            "processes": self.world.size,
            "optimizer": self.optimizer.state_dict(),
            "checkpointables": {
                name: checkpointable.state_dict() for name, checkpointable in self.checkpointables.items()
            },
        }
        return self.checkpoints.save(self.step, self.model, self._tensors(), state, best)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint but the model's; random numbers are those of this process."""
        found = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.tensors().items()}
        for owner, checkpointable in self.checkpointables.items():
            found |= {f"{owner}/{name}": tensor for name, tensor in checkpointable.tensors().items()}
        return found | {f"random/{self.world.rank}": torch.get_rng_state()}

    def _remember(self) -> None:
        """Freeze the state between two steps: a rollout that is given up must leave no trace in a checkpoint."""
        self._state = {
            "step": self.step,
            "evaluated": self.evaluated,
            "version": self.model.version,
            "skipped_in_a_row": self.learner.skipped_in_a_row,
            "best": asdict(self.best) if self.best else None,
            **{name: part.state_dict() for name, part in self.stateful.items()},
        }

    def conclude(self) -> None:
        """Evaluate and save a last step that came before its time, by a guard or by the clock."""
        if self.evaluated != self.step:
            self._evaluate_curve()
            self.save()

    def out_of_time(self, minutes: float | None) -> bool:
        """Whether the run has worked for `minutes`, interruptions left out; says so once it has."""
        if minutes is None or not self.world.broadcast(self.log.seconds >= 60 * minutes):
            return False
        self.progress.message(f"max_minutes = {minutes:g} are over after step {self.step}")
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    def restore_best(self) -> int:
        """Put the best checkpoint's weights into the policy; returns its step."""
        self.finished = True
        step = self.best.step if self.best else self.step
        if step != self.step:
            directory, _, _ = self.checkpoints.load(step)
            self.model.restore(directory)
        return step
