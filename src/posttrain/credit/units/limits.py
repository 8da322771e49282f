"""Caps on the number of units."""

import heapq
from itertools import pairwise

import numpy as np


def merge_tail(cuts: np.ndarray, most: int) -> np.ndarray:
    """`cuts` [K + 1] of K units with at most `most` left: the first ones stay and the last takes all that follows.

    As in the published code for labelled steps, which forgets the cap for units by entropy.
    """
    return cuts if len(cuts) - 1 <= most else np.concatenate([cuts[:most], cuts[-1:]])


def merge_small(cuts: np.ndarray, most: int) -> np.ndarray:
    """`cuts` [K + 1] of K units with at most `most` left: again and again the unit with the fewest tokens joins the
    smaller of its neighbours; of equal ones, the earlier. O(K log K)."""
    edges = cuts.tolist()
    count = len(edges) - 1
    size = [stop - start for start, stop in pairwise(edges)]
    left, right = list(range(-1, count - 1)), list(range(1, count + 1))
    smallest = [(tokens, unit) for unit, tokens in enumerate(size)]
    heapq.heapify(smallest)
    remaining = count
    while remaining > most:
        tokens, unit = heapq.heappop(smallest)
        if size[unit] != tokens:
            continue  # it has grown, or is gone, since this was written
        before, after = left[unit], right[unit]
        into = before if after == count or (before >= 0 and size[before] <= size[after]) else unit
        gone = unit if into == before else after
        size[into] += size[gone]
        size[gone] = 0
        right[into] = right[gone]
        if right[gone] < count:
            left[right[gone]] = into
        heapq.heappush(smallest, (size[into], into))
        remaining -= 1
    return np.array([*(edges[unit] for unit in range(count) if size[unit]), edges[-1]], dtype=np.int64)
