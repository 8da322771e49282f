"""Which groups are worth an update, and the penalty on long answers: pure functions of played episodes."""

import math
from collections.abc import Sequence

import numpy as np

from posttrain.recipe.credit import OverlongRecipe
from posttrain.rollout.streams import Episode

Group = list[Episode]


def spread(group: Sequence[Episode]) -> float:
    """Population standard deviation of the group's returns; exactly 0 when all are equal or there are fewer than two."""
    returns = [episode.total_reward for episode in group]
    return float(np.std(sorted(returns))) if has_signal(group) else 0.0


def has_signal(group: Sequence[Episode]) -> bool:
    """Whether the returns of the group are not all equal: without that, a group baseline gives no gradient.

    Returns that differ by rounding alone (1e-6 of the larger) are equal.
    Source: dynamic sampling of Yu et al. 2025, "DAPO", arXiv 2503.14476.
    """
    returns = [episode.total_reward for episode in group]
    return bool(returns) and not math.isclose(min(returns), max(returns), rel_tol=1e-6)


def uncertainty(groups: Sequence[Group], keep: float) -> list[Group]:
    """The share `keep` of `groups` with the largest spread of returns, rounded up, in the order given.

    At least one group is kept. Groups without spread are never kept unless all are without, so fewer than the share
    may come back; what was removed is `len(groups)` less the length of the result. Ties go to the smaller group id.
    Source: StarPO-S in Wang et al. 2025, "RAGEN", arXiv 2504.20073.
    """
    played = [group for group in groups if group]
    candidates = [group for group in played if has_signal(group)] or played
    # A share such as 0.1 x 30 may come out a hair above the whole number that is meant.
    count = max(1, math.ceil(keep * len(groups) - 1e-9))
    best = sorted(candidates, key=lambda group: (-spread(group), group[0].group))[:count]
    chosen = {group[0].group for group in best}
    return [group for group in played if group[0].group in chosen]


def overlong_penalty(sampled_tokens: int, recipe: OverlongRecipe) -> float:
    """Reward to add for an episode's length, 0 to -penalty: linear over the last `buffer` tokens before `limit`.

    Source: soft overlong punishment of Yu et al. 2025, "DAPO", arXiv 2503.14476, equation 13.
    """
    into_buffer = sampled_tokens - (recipe.limit - recipe.buffer)
    return -recipe.penalty * min(max(into_buffer / recipe.buffer, 0.0), 1.0)
