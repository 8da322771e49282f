"""Training a reward model on pairs of answers."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.data.tokens import TokenRow
from posttrain.distributed.world import single_process
from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.recipe.stages import RewardRecipe
from posttrain.recipe.units import stored_units
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.directory import RunDirectory
from posttrain.training.objectives import RewardObjective, reward_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.row_evaluators import PreferenceEvaluator, choice_of
from posttrain.training.rows import Batches, check_rows, load_data, samples_of_row, train_on
from posttrain.training.trainer import Callback, LoopSettings, Trainer
from posttrain.training.unit_normalizer import fit_run
from posttrain.training.unit_rewards import UnitReader, UnitRewardObjective, unit_reward_forward
from posttrain.training.updater import Sample, Updater


def train(
    recipe: RewardRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Sequence[Callback] = ()
) -> None:
    """Train the reward model; one step is one update on `rows_per_update` pairs."""
    model = RewardModel(recipe.model, recipe.seed)
    renderer = Renderer(model.tokenizer, model.end_tokens)
    data = load_data("pair", recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)
    batches = Batches(data, lambda number, row: samples_of_row(row, number))
    total = recipe.steps or recipe.epochs * data.updates_per_epoch
    forward, objective = _forward_and_objective(recipe, model, [*data.stored, *data.validation, *data.test])
    optimizer = Optimizer(model.trainable(), recipe.optimizer, total)
    learner: Updater[Any] = Updater(model, optimizer, recipe.learner, forward)
    evaluator = PreferenceEvaluator(
        learner, data, recipe.name, lambda samples: objective, model=model, renderer=renderer
    )
    warnings = [*recipe_warnings(recipe), *data.problems.summary(), *renderer.warnings()]
    if not (data.validation or data.test):
        warnings.append("no validation rows, so no reward statistics are stored with the model")
    trainer = Trainer(
        LoopSettings.of(recipe, total),
        run,
        model,
        learner,
        evaluators=[evaluator] if data.validation or data.test else [],
        best_by=choice_of(recipe.evaluation.metric) if data.validation else None,
        warnings=[*warnings, *check_rows(recipe, data), *recipe.too_few(len(data.final))],
        callbacks=callbacks,
    )
    train_on(trainer, batches, lambda samples: objective, resume, console)
    if recipe.units is not None and data.validation and (run.path / "model").is_dir():
        with single_process() as world:
            if world.is_rank0:
                try:
                    lines = fit_run(run, None).lines()
                except InputError as error:  # the reward model is usable without the normalizer of RL
                    lines = [f"warning: no normalizer was fitted: {error}"]
                for line in lines:
                    console.print(line, highlight=False, markup=False)


def _forward_and_objective(
    recipe: RewardRecipe, model: RewardModel, rows: Sequence[TokenRow]
) -> tuple[Callable[[Sequence[Sample]], Any], RewardObjective]:
    """Return the forward pass and the objective: one reward per answer, or one per unit of it. `rows`: all stored rows."""
    if recipe.units is None:
        model.set_units(None)
        return reward_forward(model), RewardObjective(recipe.loss)
    units = stored_units(recipe.units, recipe.model.path)
    model.set_units(units)
    reader = UnitReader(model, units, recipe.learner.tokens_per_batch)
    # Segment all rows at once in a fixed order, so that a resumed run has the same units.
    reader.remember([sample for number, row in enumerate(rows) for sample in samples_of_row(row, number)])
    return unit_reward_forward(model, reader), UnitRewardObjective(recipe.loss, recipe.units)
