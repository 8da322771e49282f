"""The training loop of the stages that learn from rows: one update per batch, in a fixed order."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rich.console import Console

from posttrain.data.tokens import TokenRow
from posttrain.recipe.stages import RewardRecipe, SftRecipe
from posttrain.training.batches import Sample
from posttrain.training.experts import settings_warnings
from posttrain.training.results import finish, measure_start
from posttrain.training.rows import DataSet, check_margins
from posttrain.training.trainer import Trainer
from posttrain.training.updater import Objective, means

Output = TypeVar("Output")


class SampleBatches(Protocol):
    """Samples in batches of one optimizer step."""

    updates_per_epoch: int

    def batch(self, step: int) -> list[Sample]:
        """Return the samples of update `step`, counted from 0."""
        ...

    def warnings(self) -> list[str]:
        """Return the problems of rows read during training, after the last update."""
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
) -> None:
    """Make the run's updates, measure and save as the recipe says, and finish.

    `objective_for` gives what to minimise on the samples of an update; it may complete them first, for example with
    reference log-probabilities.
    """
    if isinstance(trainer.recipe, RewardRecipe) and isinstance(batches, Batches):
        trainer.messages += check_margins(trainer.recipe, batches.data)
    if isinstance(trainer.recipe, SftRecipe) and trainer.recipe.data is not None and trainer.recipe.environment:
        trainer.messages += settings_warnings(trainer.recipe.environment, trainer.recipe.data.train)
    if resume:
        trainer.resume()
    with trainer.working(f"{trainer.recipe.stage} {trainer.recipe.name}"):
        if trainer.evaluated < 0:
            measure_start(trainer)
        trainer.begin()
        while trainer.step < trainer.total_steps:
            with trainer.phase("rows"):
                samples = batches.batch(trainer.step)
                objective = objective_for(samples)
            with trainer.interrupts.critical():
                before = trainer.learner.trained_tokens
                with trainer.phase("update"):
                    totals = trainer.learner.update(samples, objective)
                metrics = means(totals) | {"optimizer/learning_rate": trainer.optimizer.learning_rate}
                metrics["tokens/trained"] = float(trainer.learner.trained_tokens - before)
                metrics["speed/tokens_per_second"] = metrics["tokens/trained"] / trainer.seconds["update"]
                trainer.finish_step(metrics)
                over = trainer.step == trainer.total_steps
                trainer.warn([*trainer.learner.take_messages(), *(batches.warnings() if over else [])])
            trainer.evaluate_and_save()
        trainer.conclude()
        finish(trainer, console)
