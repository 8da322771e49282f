"""Outcome-level advantages: the return of an episode minus a baseline, one number per episode.

All sums use `math.fsum`, which rounds once, so results are bit-identical for any order of episodes and groups.

`returns` [N] float64: sum of an episode's rewards. `groups` [N] int: group id. `lengths` [N] int: sampled tokens.
`greedy`: group id -> return of the group's greedy episode. Every baseline returns advantages [N] float64.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from posttrain.episode import Episode
from posttrain.errors import RunError
from posttrain.recipe.credit import Credit, register_credit

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""
SCORE = "score"
"""The name of the reward itself among the scores that a reward function reports."""
RETURN = "return"
"""The name of the return in the weights of `gdpo`."""


@register_credit("grpo", compared_with="group")
def grpo(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A_i = (R_i - mean_g) / (std_g + 1e-6), with the sample standard deviation (n - 1) of group g.

    Biased: dividing by the group's own standard deviation weights tasks by their difficulty, and changes the direction
    of the gradient if returns take more than two values. A group of one, or with equal returns, gets 0.
    Source: Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, outcome supervision.
    """
    return by_group(groups, lambda index: standardize(returns[index], correction=1))


@register_credit("dr_grpo", compared_with="group")
def dr_grpo(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean_g.

    Unbiased up to the factor (n - 1) / n in a group of n, because R_i is part of its own baseline: it is `rloo` times
    that factor. Groups of different sizes have different factors. A group of one gets 0. The published algorithm also
    divides the loss by a constant, see `loss.aggregation: constant`.
    Source: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783.
    """
    return by_group(groups, lambda index: center(returns[index]))


@register_credit("rloo", compared_with="group")
def rloo(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A_i = R_i - mean of the other returns of the group = n / (n - 1) (R_i - mean_g).

    Unbiased: the baseline does not depend on episode i. A group of one has no other returns and gets 0.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024, "Back to
    basics", arXiv 2402.14740.
    """
    return by_group(groups, lambda index: center(returns[index]) * len(index) / max(len(index) - 1, 1))


@register_credit("opo", compared_with="group")
def opo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A_i = R_i - (sum_j l_j R_j / sum_j l_j), over the episodes j of the group, l_j their sampled tokens.

    Biased: the baseline includes the episode's own return and length. The bias falls with the size of the group. A
    group of one, or with equal returns, gets 0. Each group needs at least one sampled token.
    Source: Hao et al. 2025, "On-policy RL with optimal reward baseline", arXiv 2505.23585.
    """
    advantages = np.zeros(len(returns))
    for index in group_indices(groups):
        values, weights = returns[index], lengths[index]
        if not all_equal(values):
            advantages[index] = values - math.fsum((values * weights).tolist()) / float(weights.sum())
    return advantages


@register_credit("remax")
def remax(returns: np.ndarray, groups: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = R_i - return of one greedy episode of the same task.

    Unbiased: the greedy episode does not depend on the sampled ones. Works with groups of one. A KL penalty in the
    reward is part of R_i but not of the greedy return, which only shifts the baseline.
    Source: Li et al. 2023, "ReMax", arXiv 2310.10505. RunError for a group without greedy return.
    """
    missing = sorted(set(groups.tolist()) - set(greedy))
    if missing:
        raise RunError(f"credit.type remax needs a greedy episode of every group; group {missing[0]} has none")
    return returns - np.array([greedy[group] for group in groups.tolist()], dtype=np.float64)


@register_credit("brpo", compared_with="batch")
def brpo(returns: np.ndarray) -> np.ndarray:
    """A_i = (R_i - mean_B) / (std_B + 1e-6) over the whole batch B, with the sample standard deviation (n - 1).

    Biased like `grpo`: the divisor is the batch's own standard deviation. A batch of one, or of equal returns, gets 0.
    Source: the batch-relative baseline of the first release of RAGEN, Wang et al. 2025, arXiv 2504.20073.
    """
    return standardize(returns, correction=1)


@register_credit("arpo")
def arpo(returns: np.ndarray) -> np.ndarray:
    """A_i = R_i.

    Unbiased, with the full variance that a baseline would reduce.
    Source: Williams 1992, "Simple statistical gradient-following algorithms"; the name is that of RAGEN's first
    release.
    """
    return returns.astype(np.float64)


@register_credit("maxrl", compared_with="group", nonnegative=True)
def maxrl(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A_i = (R_i - mean_g) / mean_g, for returns of 0 or more; 0 in a group whose returns are all equal, such as all 0.

    For returns of 0 and 1, the mean of A_i grad log pi(i) over a group of n estimates the gradient of log p, with p the
    probability of success: it is unbiased for log p cut off after n - 1 terms, -(1 - p) - (1 - p)^2 / 2 - ... -
    (1 - p)^(n - 1) / (n - 1), whose first term is the objective of `rloo`. Hard tasks therefore count more. Other
    returns of 0 or more estimate the gradient of the logarithm of the mean return, with a bias that falls with n.
    Source: Tajwar et al. 2026, "Maximum likelihood reinforcement learning", arXiv 2602.02710, theorem 1 and its
    variance reduction. RunError for a return below 0.
    """
    advantages = np.zeros(len(returns))
    for index in group_indices(groups):
        if returns[index].min() < 0:
            raise RunError(
                f"credit.type maxrl needs returns of 0 or more, and group {groups[index[0]]} has {returns[index].min():g}; "
                "remove penalties from the reward, or use rloo"
            )
        deviations = center(returns[index])
        if deviations.any():
            advantages[index] = deviations / mean(returns[index])
    return advantages


def pass_at_k(returns: np.ndarray, groups: np.ndarray, k: int | None) -> np.ndarray:
    """A_i = mean, over the sets S of k episodes of the group that contain i, of max R in S - max R in S without i.

    Estimates the gradient of the expected best return of k attempts, which is pass@k for returns of 0 and 1: the mean
    of k A_i grad log pi(i) over the group is unbiased, because the best of the others does not depend on episode i.
    With k the size of the group, only its single best episode gets credit: its return minus the second best.
    Source: Tang et al. 2025, "Optimizing language models for inference time objectives using reinforcement learning",
    arXiv 2503.19595, the leave-one-out control variate for pass@k, for groups of k; the mean over sets, for larger
    groups, as in Walder and Karkhanis 2025, "Pass@K policy optimization", arXiv 2505.15201.

    `returns` [N] float64; `groups` [N] int; `k` >= 2, None for the size of each group. A group smaller than k uses its
    size as k, and a group of one gets 0. Returns [N] float64.
    """
    advantages = np.zeros(len(returns))
    for index in group_indices(groups):
        size = len(index)
        chosen = size if k is None else min(k, size)
        if size < 2 or all_equal(returns[index]):
            continue
        order = index[np.argsort(returns[index], kind="stable")]
        ascending = returns[order]
        # Share of the sets in which the best of the other episodes has rank `below`: all remaining members rank
        # lower.
        sets = [math.comb(below, chosen - 2) / math.comb(size - 1, chosen - 1) for below in range(size)]
        for rank, i in enumerate(order.tolist()):
            gains = [(ascending[rank] - ascending[below]) * sets[below] for below in range(rank)]
            advantages[i] = math.fsum(gains)
    return advantages


def gdpo(scores: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A_i = (B_i - mean_B) / (std_B + 1e-6) over the batch, B_i = sum over scores k of w_k (s_ik - mean_g) / (std_g +
    1e-6).

    Each score is normalized separately within the group, so a score with a small spread counts as much as one with a
    large spread, and combinations of scores with the same sum stay distinct. Both are sample standard deviations (n -
    1). A group of one gets 0 and has no part in either. Biased, like `grpo` and `brpo`.
    Source: Liu et al. 2026, "GDPO: Group reward-decoupled normalization policy optimization", arXiv 2601.05242, the
    normalization of each reward, their weighted sum, and the normalization over the batch, over episodes as in TRL
    (`normalize_then_sum`).

    `scores` [N, K] float64, NaN if an episode has no such score: NaN is excluded from the statistics and adds 0.
    `weights` [K] float64; `groups` [N] int. Returns [N] float64.
    """
    parts = np.zeros(scores.shape)
    for index in group_indices(groups):
        for column in range(scores.shape[1]):
            known = index[~np.isnan(scores[index, column])]
            parts[known, column] = standardize(scores[known, column], correction=1)
    sums = np.array([math.fsum(row) for row in (parts * weights).tolist()], dtype=np.float64)
    compared = in_company(groups)
    sums[compared] = standardize(sums[compared], correction=1)
    return sums


def mean(values: np.ndarray) -> float:
    """Mean of [n] values, n > 0; the same bits in any order."""
    return math.fsum(values.tolist()) / len(values)


def all_equal(values: np.ndarray) -> bool:
    """Whether [n] values are equal up to a relative difference of 1e-6, the rounding of float32 rewards."""
    return len(values) == 0 or math.isclose(values.min(), values.max(), rel_tol=1e-6)


def center(values: np.ndarray) -> np.ndarray:
    """[n] values minus their mean; exactly 0 if all are equal, so a group with equal returns has no gradient."""
    if all_equal(values):
        return np.zeros(len(values))
    return values - mean(values)


def standardize(values: np.ndarray, correction: int) -> np.ndarray:
    """[n] values minus their mean, over (standard deviation + 1e-6); exactly 0 if all are equal.

    `correction`: 1 divides the variance by n - 1 (sample), 0 by n (population).
    """
    deviations = center(values)
    if not deviations.any():
        return deviations
    variance = math.fsum((deviations**2).tolist()) / (len(values) - correction)
    return deviations / (math.sqrt(variance) + EPSILON)


def group_indices(groups: np.ndarray) -> Iterator[np.ndarray]:
    """For each distinct id in `groups` [N] int, the indices of its members."""
    for group in np.unique(groups):
        yield np.flatnonzero(groups == group)


def by_group(groups: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[N] float64: what `compute` returns for the indices of the members of each group."""
    values = np.zeros(len(groups))
    for index in group_indices(groups):
        values[index] = compute(index)
    return values


def in_company(groups: np.ndarray) -> np.ndarray:
    """Whether each of the ids in `groups` [N] int is there more than once: [N] bool."""
    _, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return counts[places] > 1


def weighted_scores(
    episodes: Sequence[Episode], returns: np.ndarray, weights: Mapping[str, float] | None
) -> tuple[np.ndarray, np.ndarray]:
    """The scores [N, K] of the episodes, NaN if an episode does not report a score or reports None, and their weights [K], float64.

    Scores come from `info["scores"]` of the last turn; the name `return` stands for the returns [N]. `weights`: score
    name -> weight; None gives every reported score except `score` the weight 1. RunError if no episode reports a
    weighted score, or if there are no weights.
    """
    reported = [dict(episode.turns[-1].info.get("scores", {})) if episode.turns else {} for episode in episodes]
    names = {name for scores in reported for name in scores}
    if weights is None:
        weights = dict.fromkeys(sorted(names - {SCORE}), 1.0)
    # A function that does not apply to any task of the step reports None, and none of its further scores.
    unscored = tuple(f"{name}_" for scores in reported for name, score in scores.items() if score is None)
    missing = sorted(name for name in set(weights) - names - {RETURN} if not name.startswith(unscored))
    if episodes and (missing or not weights):
        wanted = f"no episode of the step has the score {missing[0]!r}" if missing else "no episode reports scores"
        raise RunError(
            f"credit.type gdpo: {wanted}; return a mapping of names to numbers from the reward function, with None for "
            f"those that do not apply, or set credit.weights to the names that it reports ({', '.join(sorted(names | {RETURN}))})"
        )
    columns = [
        returns if name == RETURN else np.array([scores.get(name) for scores in reported], dtype=np.float64)
        for name in weights
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((len(episodes), 0)), np.array(list(weights.values()))


@register_credit("pass_at_k", compared_with="group")
class PassAtKCredit(Credit):
    """The gain of each episode for the best of k attempts at its task."""

    type: Literal["pass_at_k"] = "pass_at_k"
    """`pass_at_k`: the best return of k episodes of the group minus the best without this one, a mean over all sets of k with it."""
    k: int | None = Field(None, ge=2)
    """Number of attempts whose best return is maximized, at most `rollout.episodes_per_group`. Null: the size of the group, so only the single best episode gets credit."""

    def compute(self, returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """[N] float64."""
        return pass_at_k(returns, groups, self.k)

    def problems(self, recipe: Any) -> list[str]:
        """More attempts than episodes."""
        size = recipe.rollout.episodes_per_group
        if self.k is None or self.k <= size:
            return []
        return [
            f"`credit.k` ({self.k}) is more than `rollout.episodes_per_group` ({size}); lower it, or sample more episodes "
            "per group"
        ]


@register_credit("gdpo", compared_with="group")
class GdpoCredit(Credit):
    """Several scores of an episode, each normalized within the group, then added and normalized over the batch."""

    type: Literal["gdpo"] = "gdpo"
    """`gdpo`: sum of (score - mean) / std of the group for each score, then (sum - mean) / std of the batch."""
    weights: dict[str, float] | None = None
    """Weight of each score by name: those that the reward function or the environment reports, and `return` for the return with all penalties and the reward model's score. Null: 1 for each reported score but `score`, which is their combination."""

    def compute(self, episodes: Sequence[Episode], returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """[N] float64."""
        return gdpo(*weighted_scores(episodes, returns, self.weights), groups)

    def problems(self, recipe: Any) -> list[str]:
        """An environment without scores."""
        if recipe.reports_scores or not set(self.weights or {"": 1.0}) - {RETURN}:
            return []
        return [
            "`credit.type: gdpo` learns from several scores of an episode, and the environment "
            f"(`environment.type: {recipe.environment.type}`) reports none; set `credit.weights.return` alone, or use grpo"
        ]

    def warnings(self, recipe: Any) -> list[str]:
        """Rewards without a weight, and filters that do not know the scores."""
        unweighted = recipe.rewards_beside_scores if RETURN not in (self.weights or {}) else []
        warnings = [f"{key} has no effect: credit.weights of gdpo has no weight for `return`" for key in unweighted]
        if recipe.rollout.filter.type != "none":
            warnings.append(
                f"rollout.filter.type {recipe.rollout.filter.type} compares returns, so it drops groups with equal returns "
                "whose scores differ, which credit.type gdpo learns from"
            )
        return warnings
