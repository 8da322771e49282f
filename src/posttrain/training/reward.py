"""Training a reward model on pairs of answers, and the fit of the location-aware normalizer of unit rewards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from posttrain.credit.units.normalizer import Fit, FitKey, file_with_normalizer, fit_key, fit_normalizer
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.data.tokens import TokenRow, load_rows
from posttrain.distributed.world import single_process
from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.recipe.data import SourceRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.stages import RewardRecipe
from posttrain.recipe.units import stored_units
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.directory import RunDirectory, storage_errors, write_atomically
from posttrain.training.evaluators import choice_of
from posttrain.training.objectives import RewardObjective, reward_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.row_evaluators import PreferenceEvaluator
from posttrain.training.rows import check_rows, load_data, samples_of_compared, train_on
from posttrain.training.trainer import Callbacks, Trainer
from posttrain.training.unit_rewards import WEAK, UnitReader, UnitRewardObjective, unit_reward_forward, unit_rewards
from posttrain.training.updater import Forward, Updater


def train(recipe: RewardRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Callbacks = ()) -> None:
    """Train the reward model; one step is one update on `rows_per_update` pairs."""
    model = RewardModel(recipe.model, recipe.seed)
    renderer = Renderer(model.tokenizer, model.end_tokens)
    data = load_data("pair", recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)
    total = recipe.steps or recipe.epochs * data.updates_per_epoch
    forward: Forward[Any] = reward_forward(model)
    objective = RewardObjective(recipe.loss)
    units = None if recipe.units is None else stored_units(recipe.units, recipe.model.path)
    model.set_units(units)
    if recipe.units is not None and units is not None:
        reader = UnitReader(model, units, recipe.learner.tokens_per_batch)
        # Segment all rows at once in a fixed order, so that a resumed run has the same units.
        reader.remember(samples_of_compared([*data.stored, *data.validation, *data.test]))
        forward, objective = unit_reward_forward(model, reader), UnitRewardObjective(recipe.loss, recipe.units)
    optimizer = Optimizer(model.trainable(), recipe.optimizer, total)
    learner: Updater[Any] = Updater(model, optimizer, recipe.learner, forward)
    evaluator = PreferenceEvaluator(learner, data, recipe.name, lambda samples: objective)
    warnings = [*recipe_warnings(recipe), *data.problems.summary(), *renderer.warnings()]
    if not (data.validation or data.test):
        warnings.append("no validation rows, so no reward statistics are stored with the model")
    trainer = Trainer(
        recipe,
        total,
        run,
        model,
        learner,
        evaluators=[evaluator] if data.validation or data.test else [],
        best_by=choice_of(recipe.evaluation.metric) if data.validation else None,
        warnings=[*warnings, *check_rows(recipe, data), *recipe.too_few(len(data.final))],
        callbacks=callbacks,
    )
    train_on(
        trainer, data, lambda step: samples_of_compared(data.train.batch(step)), lambda _: objective, resume, console
    )
    if recipe.units is not None and data.validation and (run.path / "model").is_dir():
        with single_process() as world:
            if world.is_rank0:
                try:
                    lines = fit_run(run, None)
                except InputError as error:  # the reward model is usable without the normalizer of RL
                    lines = [f"warning: no normalizer was fitted: {error}"]
                for line in lines:
                    console.print(line, highlight=False, markup=False)


def _lines(fit: Fit, key: FitKey, rewards: Sequence[np.ndarray]) -> list[str]:
    """The lines to print about a fit to the rewards of units, by answer."""
    normal, shown = fit.normalizer, (_shown(fit.r2_mean), _shown(fit.r2_std))
    units = f"{sum(map(len, rewards))} units of {len(rewards)} answers, {len(fit.profile.positions)} positions"
    lowest = f"never below {normal.floor * normal.intercept_std:.4f}"
    return [
        f"{key}: {units}",
        f"mean(p)  = {normal.slope_mean:+.4f} log p {normal.intercept_mean:+.4f}   R² {shown[0]}",
        f"sigma(p) = {normal.slope_std:+.4f} log p {normal.intercept_std:+.4f}   R² {shown[1]}, {lowest}",
        *(
            f"warning: the line hardly explains the {what} of rewards by position (R² below {WEAK:g}); see the plot before "
            "you use the fit"
            for what, r2 in (("mean", fit.r2_mean), ("spread", fit.r2_std))
            if not r2 >= WEAK
        ),
    ]


def fit_run(run: RunDirectory, data: str | None) -> list[str]:
    """Score the units of the run's validation pairs, or of the pairs in `data`, with its exported model, and fit. Returns
    lines to print.

    Writes `normalizer/params.json` (the published layout; keeps other fits in the file), `normalizer/DATASET.json`
    (mean, std and count by position, and R²) and `plots/normalizer.png` of the run. Raises `InputError` if the run has
    no unit-level reward model, or if there are no pairs or too few.
    """
    recipe, path = run.load_recipe(), run.path / "model"
    if not isinstance(recipe, RewardRecipe):
        raise InputError(f"{run.path} is a run of stage {recipe.stage}; pass a run of `posttrain reward` with `units`")
    if not path.is_dir():
        raise InputError(
            f"{run.path} has no exported model; finish the run with `posttrain reward --resume {run.path}`"
        )
    trained = recipe.model
    exported = ModelRecipe(path=str(path), device=trained.device, dtype=trained.dtype, threads=trained.threads)
    model = RewardModel(exported, new_head=False)
    units = model.units
    if units is None:
        raise InputError(f"{path} rewards whole answers, so it has no unit rewards to fit; train a model with `units`")
    rows, dataset = _rows(recipe, model, data)
    budget = recipe.learner.tokens_per_batch
    reader = UnitReader(model, units, budget)
    rewards = unit_rewards(model, reader, samples_of_compared(rows), budget, "learner.tokens_per_batch")
    try:
        fit = fit_normalizer(rewards)
    except ValueError as error:
        raise InputError(f"{dataset}: the unit rewards of its {len(rows)} pairs cannot be fitted: {error}") from error
    key = fit_key(recipe.name, Path(dataset).stem, units.segmenter)
    folder = run.path / "normalizer"
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
    params, plot = folder / "params.json", run.plots / "normalizer.png"
    write_atomically(params, file_with_normalizer(params, key, fit.normalizer))
    write_atomically(folder / f"{key.dataset}.json", _details(fit))
    profile, normalizer = fit.profile, fit.normalizer
    grid = np.geomspace(profile.positions[0], 1, 200)
    curves = (grid, normalizer.mean(grid), normalizer.sigma(grid))
    labels = (f"fit, R² {_shown(fit.r2_mean)}", f"fit, R² {_shown(fit.r2_std)}")
    # Imported here: runs that only apply a normalizer do not need matplotlib.
    from posttrain.figures.draw import draw_profile

    draw_profile(plot, str(key), (profile.positions, profile.means, profile.stds, profile.counts), curves, labels)
    return [*_lines(fit, key, rewards), f"params: {params}", f"plot: {plot}"]


def _rows(recipe: RewardRecipe, model: RewardModel, data: str | None) -> tuple[list[TokenRow], str]:
    """The pairs, and the name of their source."""
    renderer, problems = Renderer(model.tokenizer, model.end_tokens), Problems()
    sources = [SourceRecipe(path=data)] if data is not None else recipe.data.validation
    if not sources and recipe.data.held_out:
        held = load_data("pair", recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)
        return held.validation, "held_out"
    if not sources:
        raise InputError("the run has no validation rows; pass a file of pairs with --data")
    by_source = load_rows("pair", recipe.data, sources, None, renderer, "assistant", problems)
    named = "+".join(Path(source.path).stem for source in sources)
    if not any(by_source):
        problems.require_any(", ".join(source.path for source in sources))
    return [row for rows in by_source for row in rows], named


def _details(fit: Fit) -> str:
    """Mean, standard deviation and count by position (three decimals, as published), R² and floor, as JSON."""
    profile = fit.profile
    names = [f"{position:.3f}" for position in profile.positions]
    columns = {"mean": profile.means, "std": profile.stds, "count": profile.counts}
    content: dict[str, object] = {
        name: {place: None if np.isnan(value) else value for place, value in zip(names, values.tolist(), strict=True)}
        for name, values in columns.items()
    }
    r2 = {name: None if np.isnan(r2) else r2 for name, r2 in (("mean", fit.r2_mean), ("std", fit.r2_std))}
    return json.dumps(content | {"r2": r2, "floor": fit.normalizer.floor}, indent=1) + "\n"


def _shown(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.3f}"
