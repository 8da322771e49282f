"""Episodes whose tokens are older than the weights that are to learn from them: how old, and which are too old."""

from collections.abc import Sequence

import numpy as np

from posttrain.rollout.streams import Episode


def age(episode: Episode, version: int) -> int:
    """Optimizer updates between the oldest token of the episode and `version`; 0 without any token."""
    return int((version - episode.versions).max(initial=0))


def ages(episodes: Sequence[Episode], version: int) -> np.ndarray:
    """[n] int32: optimizer updates between each sampled token of `episodes` and `version`."""
    own = [version - episode.versions for episode in episodes]
    return np.concatenate(own) if own else np.empty(0, dtype=np.int32)


def without_stale(
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
