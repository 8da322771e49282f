"""Which function of a critic's values each credit recipe asks for."""

from collections.abc import Sequence

import numpy as np

from posttrain.credit.turns.bilevel_gae import bilevel_gae
from posttrain.credit.turns.turns import turn_numbers
from posttrain.credit.values import gae
from posttrain.recipe.credit import CriticCredit, ValueCredit
from posttrain.rollout.streams import Episode


def advantages_over_values(
    recipe: CriticCredit, episodes: Sequence[Episode], paid: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Advantages before whitening, per episode [n] float64 over its sampled tokens, as `paid` and `values` are."""
    if isinstance(recipe, ValueCredit):
        return gae(paid, values, recipe.discount, recipe.trace_decay)
    turns = [turn_numbers(episode) for episode in episodes]
    decays = (recipe.trace_decay, recipe.turn_trace_decay)
    return bilevel_gae(paid, values, turns, recipe.discount, recipe.turn_discount, *decays)


def discounted_returns(
    recipe: CriticCredit, episodes: Sequence[Episode], paid: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The rewards that came from each token on, discounted as the recipe's values are: per episode [n] float64."""
    nothing = [np.zeros(len(own)) for own in paid]
    if isinstance(recipe, ValueCredit):
        return gae(paid, nothing, recipe.discount, 1.0)
    turns = [turn_numbers(episode) for episode in episodes]
    return bilevel_gae(paid, nothing, turns, recipe.discount, recipe.turn_discount, 1.0, 1.0)
