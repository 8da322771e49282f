"""The training loop of sft, dpo and reward: batches of rows in a fixed order, one update each."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rich.console import Console

from posttrain.data.tokens import TokenRow
from posttrain.training.rows import DataSet
from posttrain.training.trainer import Trainer
from posttrain.training.updater import Objective, Sample, Totals, means

Output = TypeVar("Output")


class SampleBatches(Protocol):
    """Samples in batches of one optimizer step."""

    updates_per_epoch: int

    def batch(self, step: int) -> list[Sample]:
        """Return the samples of update `step`, counted from 0."""
        ...

    def warnings(self) -> list[str]:
        """Problems of rows that were read during training. Called after the last update."""
        ...


class Batches:
    """The rows of a data set as batches of samples."""

    def __init__(self, data: DataSet, to_samples: Callable[[int, TokenRow], list[Sample]]) -> None:
        """`to_samples` gets the index of a row in its batch, and the row."""
        self.data = data
        self.to_samples = to_samples
        self.updates_per_epoch = data.updates_per_epoch

    def batch(self, step: int) -> list[Sample]:
        return [
            sample for number, row in enumerate(self.data.train.batch(step)) for sample in self.to_samples(number, row)
        ]

    def warnings(self) -> list[str]:
        return self.data.train.problems.summary()


def train_on(
    trainer: Trainer[Output],
    batches: SampleBatches,
    objective_for: Callable[[Sequence[Sample]], Objective[Output]],
    resume: bool,
    console: Console,
    learned: Callable[[Totals], None] | None = None,
) -> None:
    """Make the run's updates, evaluate and save on schedule, and finish.

    `objective_for` returns the objective of an update's samples. It may complete them first, for example with reference
    log-probabilities. `learned` gets the metrics of each update as (sum, count), before the checkpoint of its step, and
    may add to them.
    """
    learner, steps = trainer.learner, trainer.settings.steps
    if resume:
        trainer.resume()
    with trainer.working(console):
        trainer.begin()
        while trainer.step < steps:
            with trainer.phase("rows"):
                samples = batches.batch(trainer.step)
                objective = objective_for(samples)
            with trainer.interrupts.critical():
                before = learner.trained_tokens
                with trainer.phase("update"):
                    totals = learner.update(samples, objective)
                if learned is not None:
                    learned(totals)
                metrics = means(totals) | {"optimizer/learning_rate": learner.optimizer.learning_rate}
                metrics["tokens/trained"] = float(learner.trained_tokens - before)
                metrics["speed/tokens_per_second"] = metrics["tokens/trained"] / trainer.seconds["update"]
                trainer.finish_step(metrics)
                over = trainer.step == steps
                trainer.warn([*learner.take_warnings(), *(batches.warnings() if over else [])])
            trainer.evaluate_and_save()
        trainer.finish()
