"""Reward models that reward the units of an answer."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part
from posttrain.recipe.units import EntropyUnits, UnitsRecipe


class UnitRewardsRecipe(Part):
    """A reward for each unit of an answer, read at the unit's last token; the answer's score is their aggregate."""

    segmenter: UnitsRecipe
    """What cuts answers into units. `entropy` measures under the language model at `model.path`, which is loaded besides."""
    aggregate: Literal["mean"] = "mean"
    """How the rewards of its units make the score of an answer. `mean`: their mean, over all units."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the regulariser that spreads rewards evenly over the units of an answer; too much of it makes all units alike. 0 is off."""
    entropy_form: Literal["length_fair", "published"] = "length_fair"
    """With H the entropy in nats of the softmax of the rewards of an answer's K units. `length_fair`: adds 1 - H / log K, from 0 (even) to 1, of each answer. `published`: subtracts H / K, which hardly touches answers of many units."""


class StoredUnits(Part):
    """What a reward model keeps of its units in its `config.json`."""

    segmenter: UnitsRecipe
    aggregate: Literal["mean"] = "mean"
    reference: str | None = None
    """`model.path` of the language model whose entropies cut the units; null where none is needed."""


def stored_units(recipe: UnitRewardsRecipe, path: str) -> StoredUnits:
    """What a model trained by `recipe` from the one at `path` keeps."""
    needed = isinstance(recipe.segmenter, EntropyUnits)
    return StoredUnits(segmenter=recipe.segmenter, aggregate=recipe.aggregate, reference=path if needed else None)
