"""Fit the location-aware normalizer of a run's unit-level reward model on pairs."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrain.credit.units.normalizer import (
    Fit,
    FitKey,
    Normalizer,
    file_with_normalizer,
    fit_key,
    fit_normalizer,
    parse_key,
    read_normalizer,
    same,
)
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.data.tokens import TokenRow, load_rows
from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.recipe.data import SourceRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.stages import RewardRecipe
from posttrain.recipe.units import LearnedCredit, UnitCreditRecipe
from posttrain.runs.directory import RunDirectory, storage_errors, write_atomically
from posttrain.training.reward_scorer import RewardScorer
from posttrain.training.rows import load_data, samples_of_row
from posttrain.training.unit_rewards import UnitReader, unit_rewards

WEAK = 0.05
"""R² below which a warning says that positions explain almost nothing."""


def open_normalizer(recipe: UnitCreditRecipe, scorer: RewardScorer) -> tuple[Normalizer | None, list[str]]:
    """The normalizer that the recipe names, or None, and a warning if its fit explains almost nothing.

    Raises `InputError` if it cannot be read, or was fitted to units that differ from those of the reward model.
    """
    if not isinstance(recipe, LearnedCredit) or recipe.normalizer is None:
        return None, []
    units = scorer.model.units
    assert units is not None
    path = Path(recipe.normalizer)
    if path.is_dir():
        run = path if (path / "normalizer").is_dir() else path.parent  # a run, or the model that it exported
        path = run / "normalizer" / "params.json"
    try:
        key, normalizer = read_normalizer(path, parse_key(recipe.fit) if recipe.fit is not None else None)
    except InputError as error:
        raise InputError(f"unit_credit.normalizer, unit_credit.fit: {error}") from error
    expected = fit_key(key.model, key.dataset, units.segmenter)
    if not same(key, expected):
        raise InputError(
            f"unit_credit.normalizer: {path} has the fit {key}, but {scorer.source.path} rewards units of {expected.method}, "
            f"threshold {expected.threshold}; fit it again with `posttrain fit-normalizer`"
        )
    return normalizer, _fit_warnings(path, key)


def _fit_warnings(path: Path, key: FitKey) -> list[str]:
    """A warning about a low R², if `posttrain fit-normalizer` wrote one beside the fit."""
    try:
        r2 = json.loads((path.parent / f"{key.dataset}.json").read_text(encoding="utf-8"))["r2"]["mean"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # published and hand-written files have no R²
    if r2 is not None and r2 >= WEAK:
        return []
    return [
        f"unit_credit.normalizer: the position of a unit hardly explains its mean reward in {key} (R² "
        f"{'none' if r2 is None else f'{r2:.3f}'}); see plots/normalizer.png of the reward model's run"
    ]


@dataclass(frozen=True)
class Fitted:
    """A fit, its data, and its files."""

    fit: Fit
    key: FitKey
    answers: int
    units: int
    params: Path
    plot: Path

    def lines(self) -> list[str]:
        """The lines to print."""
        normalizer = self.fit.normalizer
        tokens = f"{self.units} units of {self.answers} answers, {len(self.fit.profile.positions)} positions"
        lines = [
            f"{self.key}: {tokens}",
            f"mean(p)  = {normalizer.slope_mean:+.4f} log p {normalizer.intercept_mean:+.4f}   R² {_shown(self.fit.r2_mean)}",
            f"sigma(p) = {normalizer.slope_std:+.4f} log p {normalizer.intercept_std:+.4f}   R² {_shown(self.fit.r2_std)}, "
            f"never below {normalizer.floor * normalizer.intercept_std:.4f}",
        ]
        for what, r2 in (("mean", self.fit.r2_mean), ("spread", self.fit.r2_std)):
            if not r2 >= WEAK:
                lines.append(
                    f"warning: the line hardly explains the {what} of rewards by position (R² below "
                    f"{WEAK:g}); see the plot before you use the fit"
                )
        return [*lines, f"params: {self.params}", f"plot: {self.plot}"]


def fit_run(run: RunDirectory, data: str | None) -> Fitted:
    """Score the units of the run's validation pairs, or of the pairs in `data`, with its exported model, and fit.

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
    samples = [sample for number, row in enumerate(rows) for sample in samples_of_row(row, number)]
    rewards = unit_rewards(model, UnitReader(model, units, budget), samples, budget, "learner.tokens_per_batch")
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
    return Fitted(fit, key, len(rewards), sum(map(len, rewards)), params, plot)


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
