"""Which groups are worth an update, and the penalty on long answers: pure functions of played episodes."""

import math
from collections.abc import Sequence

import numpy as np

from posttrain.episode import Episode
from posttrain.recipe.credit import OverlongRecipe

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


def age(episode: Episode, version: int) -> int:
    """Optimizer updates between the oldest token of the episode and `version`; 0 without any token."""
    return int((version - episode.versions).max(initial=0))


def ages(episodes: Sequence[Episode], version: int) -> np.ndarray:
    """[n] int32: optimizer updates between each sampled token of `episodes` and `version`."""
    own = [version - episode.versions for episode in episodes]
    return np.concatenate(own) if own else np.empty(0, dtype=np.int32)


def drop_stale(
    episodes: Sequence[Episode], version: int, most: int, smallest_group: int
) -> tuple[list[Episode], int, int]:
    """(those that are learned from, how many were too old, how many were left alone in their group).

    An episode with a token older than `most` updates is dropped; then what is left of a group of which anything was
    dropped and that is smaller than `smallest_group`, since it has nothing to be compared with.
    """
    fresh = [episode for episode in episodes if age(episode, version) <= most]
    sizes: dict[int, int] = {}
    for episode in fresh:
        sizes[episode.group] = sizes.get(episode.group, 0) + 1
    cut = {episode.group for episode in episodes} & {e.group for e in episodes if age(e, version) > most}
    kept = [e for e in fresh if e.group not in cut or sizes[e.group] >= smallest_group]
    return kept, len(episodes) - len(fresh), len(fresh) - len(kept)
