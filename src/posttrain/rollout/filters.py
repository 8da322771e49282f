"""Filters on groups and episodes, and the overlong penalty: pure functions of finished episodes."""

import math
from collections.abc import Sequence

import numpy as np

from posttrain.episode import Episode
from posttrain.recipe.rollout import OverlongRecipe

Group = list[Episode]


def has_signal(group: Sequence[Episode]) -> bool:
    """Whether the returns of the group differ. If they do not, a group baseline gives no gradient.

    Returns within a relative distance of 1e-6 count as equal.
    Source: dynamic sampling of Yu et al. 2025, "DAPO", arXiv 2503.14476.
    """
    returns = [episode.total_reward for episode in group]
    return bool(returns) and not math.isclose(min(returns), max(returns), rel_tol=1e-6)


def most_uncertain(groups: Sequence[Group], keep: float) -> list[Group]:
    """The share `keep` of `groups` with the largest standard deviation of returns, in the given order.

    The number of groups is rounded up, and at least one group is kept. Groups with a standard deviation of 0 are kept
    only if all groups have 0, so fewer groups than the share may be returned. Ties go to the smaller group id.
    Source: StarPO-S in Wang et al. 2025, "RAGEN", arXiv 2504.20073.
    """
    nonempty = [group for group in groups if group]
    candidates = [group for group in nonempty if has_signal(group)] or nonempty
    # Rounding may make a product such as 0.1 x 30 slightly larger than the integer.
    count = max(1, math.ceil(keep * len(groups) - 1e-9))
    # Sorted, so that groups with the same returns in another order have the same spread to the bit.
    returns = [sorted(episode.total_reward for episode in group) for group in candidates]
    spreads = [float(np.std(r)) if has_signal(g) else 0.0 for g, r in zip(candidates, returns, strict=True)]
    ranked = sorted(zip(candidates, spreads, strict=True), key=lambda pair: (-pair[1], pair[0][0].group))
    chosen = {group[0].group for group, _ in ranked[:count]}
    return [group for group in nonempty if group[0].group in chosen]


def overlong_penalty(sampled_tokens: int, recipe: OverlongRecipe) -> float:
    """Reward to add for an episode's length, from 0 to -penalty, linear over the last `buffer` tokens before `limit`.

    Source: soft overlong punishment of Yu et al. 2025, "DAPO", arXiv 2503.14476, equation 13.
    """
    into_buffer = sampled_tokens - (recipe.limit - recipe.buffer)
    return -recipe.penalty * min(max(into_buffer / recipe.buffer, 0.0), 1.0)


def staleness(episode: Episode, version: int) -> int:
    """Optimizer updates between the oldest sampled token of the episode and `version`; 0 without sampled tokens."""
    return int((version - episode.versions).max(initial=0))


def token_staleness(episodes: Sequence[Episode], version: int) -> np.ndarray:
    """[n] int32: optimizer updates between each sampled token of `episodes` and `version`."""
    parts = [version - episode.versions for episode in episodes]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
