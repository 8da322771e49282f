"""Token-level advantages: returns from each sampled token on, and GAE over the critic's values.

Every array runs over the sampled tokens of one episode, in order, across its streams. Environment and tool tokens are
excluded, so they get no credit and do not discount it.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from posttrain.credit.baselines import all_equal, dr_grpo, group_indices, in_company, standardize
from posttrain.recipe.credit import register_credit

Discount = Annotated[float, Field(gt=0, le=1, description="Discount factor per sampled token.")]


@register_credit("reinforce")
def reinforce(rewards: Sequence[np.ndarray], *, discount: Discount = 1.0) -> list[np.ndarray]:
    """A_t = sum over k >= t of discount^(k - t) r_k, with k and t counting sampled tokens.

    Unbiased for discount 1. A smaller discount is deliberately biased towards rewards that follow soon.
    Source: Williams 1992; Sutton et al. 2000, "Policy gradient methods with function approximation".

    `rewards`: per episode [n] float64; `discount` in (0, 1]. Returns per episode [n] float64.
    """
    returns = [np.zeros(len(episode)) for episode in rewards]
    for episode, sums in zip(rewards, returns, strict=True):
        running = 0.0
        for t in range(len(episode) - 1, -1, -1):
            running = float(episode[t]) + discount * running
            sums[t] = running
    return returns


@register_credit("reinforce_pp")
def reinforce_pp(rewards: Sequence[np.ndarray], *, discount: Discount = 1.0) -> list[np.ndarray]:
    """`reinforce`, whitened over all sampled tokens of the batch.

    Biased: mean and standard deviation come from the batch itself.
    Source: Hu et al. 2025, "REINFORCE++", arXiv 2501.03262.

    `rewards`: per episode [n] float64; `discount` in (0, 1]. Returns per episode [n] float64.
    """
    return whiten(reinforce(rewards, discount=discount))


@register_credit("reinforce_pp_baseline", compared_with="group")
def reinforce_pp_baseline(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """A_t = R_i - mean_g at each sampled token of episode i, whitened over the sampled tokens of groups of two or more.

    Biased like `reinforce_pp`. A group of one gets 0 and has no part in the whitening.
    Source: Hu et al. 2025, "REINFORCE++", arXiv 2501.03262, the variant with a group baseline.

    `returns` [N] float64; `groups` [N] int; `lengths` [N] int: sampled tokens. Returns per episode [n] float64.
    """
    credits = dr_grpo(returns, groups)
    advantages = [np.full(length, credit) for credit, length in zip(credits, lengths.tolist(), strict=True)]
    compared = np.flatnonzero(in_company(groups)).tolist()
    for index, whitened in zip(compared, whiten([advantages[index] for index in compared]), strict=True):
        advantages[index] = whitened
    return advantages


def gae(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], discount: float, gae_lambda: float | Sequence[float]
) -> list[np.ndarray]:
    """A_t = sum over k >= t of (discount x gae_lambda)^(k - t) d_k, with d_k = r_k + discount V_{k+1} - V_k.

    k and t count sampled tokens. V after the last token is 0, also for an episode that a limit truncated. With
    `discount` and `gae_lambda` 1, A_t = G_t - V_t, and the policy gradient is unbiased for any values. With the exact
    values of the policy it is unbiased for any `gae_lambda`. Otherwise errors in the values bias it.
    Source: Schulman et al. 2016, "High-dimensional continuous control using GAE", arXiv 1506.02438.

    `rewards` and `values`: per episode [n], in units of reward; `discount` and `gae_lambda` in [0, 1], the latter one
    number or one per episode. Returns per episode [n] float64.
    """
    lambdas = [gae_lambda] * len(rewards) if isinstance(gae_lambda, float | int) else gae_lambda
    advantages = [np.zeros(len(episode)) for episode in rewards]
    for r, v, a, episode_lambda in zip(rewards, values, advantages, lambdas, strict=True):
        running = next_value = 0.0
        for t in range(len(r) - 1, -1, -1):
            value = float(v[t])
            running = float(r[t]) + discount * next_value - value + discount * episode_lambda * running
            a[t], next_value = running, value
    return advantages


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """max(0, 1 - 1 / (alpha x length)): the GAE lambda of an episode of `length` sampled tokens.

    The weights lambda^j of later errors then sum to about alpha x length, a fixed share of every
    episode. Source: Yue et al. 2025, "VAPO", arXiv 2504.05118, length-adaptive GAE, with alpha 0.05.
    """
    return max(0.0, 1.0 - 1.0 / (alpha * length)) if length else 0.0


@register_credit("optimal_token_baseline", compared_with="group")
def optimal_token_baseline(
    rewards: Sequence[np.ndarray], energies: Sequence[np.ndarray], groups: np.ndarray
) -> list[np.ndarray]:
    """A_t = G_t - B_t, B_t = sum over j of W_jt G_jt / sum over j of W_jt, over the group's episodes with a token t.

    G_t is the sum of the rewards from token t on, t counting sampled tokens, and W_t the sum of the energies of the
    tokens up to t: a proxy of the squared norm of the gradient of their log-probability. A baseline that weights
    returns by that norm has the least variance; `opo` is the same baseline for whole episodes, with the length as the
    norm. The energy of a token is 1 - 2 p + sum of p_v^2 over the vocabulary v, p its own probability: the squared norm
    of the gradient with respect to the logits.
    Where no other episode of the group reaches token t, B_t is 0, as in the authors' code. Biased: the baseline
    includes the episode's own return; the bias falls with the size of the group. A group of one gets 0, and so do
    tokens t with equal G_t. Source: Li et al. 2026, "The optimal token baseline", arXiv 2602.07078, with its
    logit-gradient proxy; verl's `optimal_token_baseline`.

    `rewards` and `energies`: per episode [n] float64; `groups` [N] int. Returns per episode [n] float64.
    """
    returns = reinforce(rewards)
    advantages = [np.zeros(len(returns_to_go)) for returns_to_go in returns]
    for index in group_indices(groups):
        weights = {int(i): np.cumsum(energies[i]) for i in index}
        for t in range(max(len(returns[i]) for i in index) if len(index) > 1 else 0):
            reaching = [int(i) for i in index if len(returns[i]) > t]
            values = np.array([returns[i][t] for i in reaching])
            if len(reaching) == 1:
                advantages[reaching[0]][t] = values[0]
                continue
            token_weights = np.array([weights[i][t] for i in reaching])
            total = math.fsum(token_weights.tolist())
            if all_equal(values) or total <= 0:
                continue
            baseline = math.fsum((token_weights * values).tolist()) / total
            for i, value in zip(reaching, values.tolist(), strict=True):
                advantages[i][t] = value - baseline
    return advantages


def whiten(episodes: list[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / (std + 1e-6) over all tokens of `episodes`, each [n], with the population standard deviation.

    Each token counts once, so long episodes count more.
    """
    if not episodes:
        return []
    ends = np.cumsum([len(episode) for episode in episodes])[:-1]
    return np.split(standardize(np.concatenate(episodes), correction=0), ends)


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 - var(G - V) / var(G) over [n] tokens: 1 for perfect values, 0 for constant ones, NaN if all G are equal."""
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / variance if variance > 1e-12 else math.nan
