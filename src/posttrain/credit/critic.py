"""Advantages from the values of a critic: GAE over tokens, or over turns and the tokens within them.

Arrays run over the sampled tokens of one episode, in order, across its streams.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from posttrain.credit.returns import gae, length_adaptive_lambda, whiten
from posttrain.credit.turns import turn_indices, turn_starts
from posttrain.episode import Episode
from posttrain.recipe.credit import Credit, register_credit

Arrays = Sequence[np.ndarray]
"""Per episode [n] float64, sampled tokens only."""


class CriticCredit(Credit):
    """Credits that need a critic."""

    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the sampled tokens of the step."""

    def compute(self, episodes: Sequence[Episode], rewards: Arrays, values: Arrays) -> list[np.ndarray]:
        """Per episode [n] float64. `values`: of the state before each sampled token."""
        advantages = self.estimate(episodes, rewards, values)
        return whiten(advantages) if self.whiten else advantages

    def estimate(self, episodes: Sequence[Episode], rewards: Arrays, values: Arrays) -> list[np.ndarray]:
        """Advantages before whitening: per episode [n] float64."""
        raise NotImplementedError

    def returns(self, episodes: Sequence[Episode], rewards: Arrays) -> list[np.ndarray]:
        """Monte Carlo returns from each sampled token on, with the recipe's discounts: per episode [n] float64."""
        raise NotImplementedError

    def targets(self, episodes: Sequence[Episode], rewards: Arrays, values: Arrays) -> list[np.ndarray]:
        """Targets of the critic, A + V with the advantages before whitening: per episode [n] float64."""
        return _added(self.estimate(episodes, rewards, values), values)


@register_credit("gae")
class ValueCredit(CriticCredit):
    """Generalized advantage estimation with a critic."""

    type: Literal["gae"] = "gae"
    """`gae`: generalized advantage estimation, as in PPO."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor (gamma) per sampled token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda within the episode. 1: Monte Carlo returns. 0: one-step TD."""
    critic_lambda: float | None = Field(None, ge=0, le=1)
    """GAE lambda of the critic's targets. 1, as in VAPO: the targets are Monte Carlo returns for any lambda of the policy. Null: the lambda of the policy."""
    length_alpha: float | None = Field(None, gt=0)
    """Length-adaptive GAE lambda of VAPO: an episode of n sampled tokens has 1 - 1 / (length_alpha x n), at least 0, instead of `gae_lambda`. VAPO uses 0.05. Null: off."""

    def _check(self) -> None:
        if self.length_alpha is not None and self.gae_lambda != type(self).model_fields["gae_lambda"].default:
            raise ValueError(
                "`length_alpha` sets the GAE lambda from the length; remove `gae_lambda` or `length_alpha`"
            )

    def estimate(self, episodes: Sequence[Episode], rewards: Arrays, values: Arrays) -> list[np.ndarray]:
        """`gae`."""
        alpha, lambdas = self.length_alpha, self.gae_lambda
        if alpha is None:
            return gae(rewards, values, self.discount, lambdas)
        return gae(rewards, values, self.discount, [length_adaptive_lambda(len(r), alpha) for r in rewards])

    def returns(self, episodes: Sequence[Episode], rewards: Arrays) -> list[np.ndarray]:
        """GAE with lambda 1 and values of 0."""
        return gae(rewards, [np.zeros_like(one) for one in rewards], self.discount, 1.0)

    def targets(self, episodes: Sequence[Episode], rewards: Arrays, values: Arrays) -> list[np.ndarray]:
        """A + V. With `critic_lambda`, A has that lambda instead of the policy's (decoupled GAE).

        At 1 the targets are the Monte Carlo returns, so errors of the values do not bias them, while a smaller
        `gae_lambda` still reduces the variance of the policy gradient. Source: Yuan et al. 2025, "What's behind PPO's
        collapse in long-CoT? Value optimization holds the secret", arXiv 2503.01491; used in Yue et al. 2025, "VAPO",
        arXiv 2504.05118.
        """
        if self.critic_lambda is None:
            return super().targets(episodes, rewards, values)
        return _added(gae(rewards, values, self.discount, self.critic_lambda), values)


@register_credit("bilevel_gae")
class BilevelValueCredit(CriticCredit):
    """Generalized advantage estimation on two levels, turns and tokens, with a critic."""

    type: Literal["bilevel_gae"] = "bilevel_gae"
    """`bilevel_gae`: GAE over turns, then over the tokens of each turn."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor per sampled token, within a turn."""
    turn_discount: float = Field(0.95, gt=0, le=1)
    """Discount factor per turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda within a turn. 1: Monte Carlo returns. 0: one-step TD."""
    turn_gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda between turns."""

    def estimate(self, episodes: Sequence[Episode], rewards: Arrays, values: Arrays) -> list[np.ndarray]:
        """`bilevel_gae`."""
        turns, discounts = [turn_indices(episode) for episode in episodes], (self.discount, self.turn_discount)
        return bilevel_gae(rewards, values, turns, *discounts, self.gae_lambda, self.turn_gae_lambda)

    def returns(self, episodes: Sequence[Episode], rewards: Arrays) -> list[np.ndarray]:
        """Bi-level GAE with both lambdas 1 and values of 0."""
        turns, values = [turn_indices(episode) for episode in episodes], [np.zeros_like(one) for one in rewards]
        return bilevel_gae(rewards, values, turns, self.discount, self.turn_discount, 1.0, 1.0)


def bilevel_gae(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    turns: Sequence[np.ndarray],
    discount: float,
    turn_discount: float,
    gae_lambda: float,
    turn_gae_lambda: float,
) -> list[np.ndarray]:
    """GAE in which returns decay by `discount` g per token within a turn and by `turn_discount` h per turn.

    Turns, from the last: B_k = sum over the turn's tokens of g^(t - b) r_t + g^(e - b) C_k - V_b, where b and e are the
    first and last token of turn k. C_k = h (V_b' + turn_gae_lambda x B_{k+1}) is the return expected after the turn,
    with b' the first token of turn k + 1; C is 0 after the last turn. Tokens of turn k, from its last:
    A_e = r_e + C_k - V_e and A_t = r_t + g V_{t+1} - V_t + g x gae_lambda x A_{t+1}.

    Source: bi-level GAE of RAGEN (Wang et al. 2025, arXiv 2504.20073, algorithm.bi_level_gae), with three differences.
    Turn boundaries are explicit, instead of wherever a reward is not zero. Rewards within a turn (a KL penalty) count
    once. The turn level uses the value before a turn's first token; the published one uses the value before its last
    token, which is known to be the last only after it was sampled, so it is biased even with exact values. With both
    lambdas and g equal to 1 and rewards at turn ends, the two agree: A_t = sum of h^(j - k) r_j - V_t.

    With all four numbers 1, unbiased for any values. With discounts 1 and the exact values of the policy, unbiased for
    any lambdas. Otherwise errors in the values bias it, and discounts bias it deliberately. With a single turn it is
    plain `gae`.

    `rewards`, `values`: per episode [n] float64, the reward of each sampled token and the value of the state before it.
    `turns`: per episode [n] int, from `turn_indices`. All four numbers are in [0, 1]. Returns per episode [n] float64.
    """
    advantages = [np.zeros(len(episode)) for episode in rewards]
    for r, v, t, a in zip(rewards, values, turns, advantages, strict=True):
        expected, stop = 0.0, len(r)
        for start in reversed(turn_starts(t).tolist()):
            turn_return = next_value = expected
            running, decay = 0.0, 1.0
            for k in range(stop - 1, start - 1, -1):
                reward, value = float(r[k]), float(v[k])
                # The step from the last token to the next turn has no token discount and no token lambda: decay is 1.
                running = reward + decay * next_value - value + decay * gae_lambda * running
                turn_return = reward + decay * turn_return
                a[k], next_value, decay = running, value, discount
            first = float(v[start])
            expected = turn_discount * (first + turn_gae_lambda * (turn_return - first))
            stop = start
    return advantages


def _added(advantages: Arrays, values: Arrays) -> list[np.ndarray]:
    return [a + v for a, v in zip(advantages, values, strict=True)]
