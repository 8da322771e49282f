"""The normaliser that a recipe names for rewards of units, and what there is to say about it."""

import json
from pathlib import Path

from posttrain.credit.units.normaliser import Normaliser
from posttrain.credit.units.params import FitKey, key_in, key_of, read_normaliser, same
from posttrain.errors import InputError
from posttrain.recipe.unit_credit import LearnedCredit, UnitCreditRecipe
from posttrain.training.reward_scorer import RewardScorer

WEAK = 0.05
"""R² below which the position says next to nothing."""


def open_normaliser(recipe: UnitCreditRecipe, scorer: RewardScorer) -> tuple[Normaliser | None, list[str]]:
    """The fit of the recipe, None where it names none, and a message where the fit explains next to nothing.

    `InputError` where it is not to be had, or is of other units than the reward model's.
    """
    if not isinstance(recipe, LearnedCredit) or recipe.normaliser is None:
        return None, []
    units = scorer.model.units
    assert units is not None
    path = Path(recipe.normaliser)
    if path.is_dir():
        run = path if (path / "normaliser").is_dir() else path.parent  # a run, or the model that it exported
        path = run / "normaliser" / "params.json"
    try:
        key, found = read_normaliser(path, key_in(recipe.fit) if recipe.fit is not None else None)
    except InputError as error:
        raise InputError(f"unit_credit.normaliser, unit_credit.fit: {error}") from error
    own = key_of(key.model, key.dataset, units.segmenter)
    if not same(key, own):
        raise InputError(
            f"unit_credit.normaliser: {path} has the fit {key}, but {scorer.source.path} rewards units of {own.method}, "
            f"threshold {own.threshold}; fit it anew with `posttrain fit-normalizer`"
        )
    return found, _doubts(path, key)


def _doubts(path: Path, key: FitKey) -> list[str]:
    """What R² says, where `posttrain fit-normalizer` left it beside the fit."""
    try:
        r2 = json.loads((path.parent / f"{key.dataset}.json").read_text(encoding="utf-8"))["r2"]["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # a published file, or one that was written by hand, has no R²
    if r2 is not None and r2 >= WEAK:
        return []
    return [
        f"unit_credit.normaliser: the place of a unit explains next to nothing of its mean reward in {key} (R² "
        f"{'none' if r2 is None else f'{r2:.3f}'}); look at plots/normaliser.png of the reward model's run"
    ]
