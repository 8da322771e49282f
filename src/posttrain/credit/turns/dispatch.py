"""From what an episode's tokens were paid to credit per token, by way of its turns."""

from collections.abc import Sequence

import numpy as np

from posttrain.credit.turns.gigpo import gigpo
from posttrain.credit.turns.mt_grpo import mt_grpo
from posttrain.credit.turns.turn_returns import minus_others, turn_returns
from posttrain.credit.turns.turns import spread_over_tokens, state_keys, turn_numbers, turn_rewards
from posttrain.recipe.credit_turns import GigpoCredit, MtGrpoCredit, TurnReturnsCredit
from posttrain.rollout.streams import Episode

TurnCredit = TurnReturnsCredit | MtGrpoCredit | GigpoCredit
"""Recipes whose credit is the same for all tokens of a turn."""


def turn_credit(recipe: TurnCredit, episodes: Sequence[Episode], paid: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per episode [n] float64 over its sampled tokens; `paid` per episode [n] float64, their rewards."""
    turns = [turn_numbers(episode) for episode in episodes]
    groups = np.array([episode.group for episode in episodes], dtype=np.int64)
    rewards = [turn_rewards(own, numbers) for own, numbers in zip(paid, turns, strict=True)]
    if isinstance(recipe, TurnReturnsCredit):
        found = turn_returns(rewards, recipe.discount)
        if recipe.baseline == "others":
            found = minus_others(found, groups)
    elif isinstance(recipe, MtGrpoCredit):
        found = mt_grpo(rewards, groups, recipe.turn_weight)
    else:
        states = [state_keys(episode) for episode in episodes]
        found = gigpo(rewards, states, groups, recipe.discount, recipe.step_weight, recipe.divide)
    return [spread_over_tokens(own, numbers) for own, numbers in zip(found, turns, strict=True)]
