"""What one player got on each item, as statistics that add up over items, so that any of them can be resampled.

Corpus BLEU is no mean of sentence scores: it is computed from counts that are summed over sentences first. Means,
perplexity and chrF are the same in that respect, so all of them are kept as summands and combined at the end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from posttrain.evaluation.statistics import Estimate, Z, clustered_rate, mean
from posttrain.plugins import require_module
from posttrain.seeds import random_stream

Kind = Literal["rate", "mean", "perplexity", "bleu", "chrf"]
"""`rate` and `mean`: (value, 1) per item. `perplexity`: (nats, tokens). `bleu`, `chrf`: sacrebleu's counts."""

DRAWS = 5_000
"""Bootstrap resamples."""
_ANY = 10**12
"""More trials than there are: how many samples an item had is not known here."""


@dataclass(frozen=True)
class ItemScores:
    """The summands of one metric: item -> [S] float64."""

    kind: Kind
    items: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.items)

    def table(self, names: Sequence[str] | None = None) -> np.ndarray:
        """[n, S] float64: the summands of the items `names`, of all in their order without them."""
        return np.stack([self.items[name] for name in (self.items if names is None else names)])

    def values(self, names: Sequence[str] | None = None) -> np.ndarray:
        """[n] float64: the metric of each item by itself."""
        return combine(self.kind, self.table(names))


def item_means(kind: Literal["rate", "mean"], samples: Iterable[tuple[str, float]]) -> ItemScores:
    """The mean over the samples of each item, so that an item with many samples counts no more than another."""
    found: dict[str, list[float]] = {}
    for item, value in samples:
        found.setdefault(item, []).append(float(value))
    return ItemScores(kind, {item: np.array([math.fsum(own) / len(own), 1.0]) for item, own in found.items()})


def item_sums(kind: Kind, samples: Iterable[tuple[str, Sequence[float]]]) -> ItemScores:
    """The summands [S] of each item, added over its samples."""
    found: dict[str, np.ndarray] = {}
    for item, summands in samples:
        found[item] = found.get(item, 0.0) + np.asarray(summands, dtype=np.float64)
    return ItemScores(kind, found)


def combine(kind: Kind, sums: np.ndarray) -> np.ndarray:
    """The metric [...] of summands [..., S]: sum / count, exp(nats / tokens), BLEU or chrF (0 to 100)."""
    if kind in ("rate", "mean", "perplexity"):
        ratio = sums[..., 0] / sums[..., 1]
        return np.exp(ratio) if kind == "perplexity" else ratio
    metric = sacrebleu_metric(kind)
    flat = sums.reshape(-1, sums.shape[-1])
    found = [metric._compute_score_from_stats([round(count) for count in row]).score for row in flat]
    return np.array(found).reshape(sums.shape[:-1])


def estimate(scores: ItemScores, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """The metric over all items with an interval over items.

    Means have Student's t interval; rates Wilson's with as many trials as the items are worth (`clustered_rate`), at
    least n. Others have a percentile bootstrap interval (Efron 1979), its limits moved away from the value by
    t(0.975, n - 1) / z sqrt(n / (n - 1)), for percentiles are too narrow by that (Hesterberg 2015); of a perplexity,
    by that in its logarithm. A metric of one item that is no rate has NaN for limits.
    """
    from scipy.special import stdtrit

    if not len(scores):
        raise ValueError("no items make no estimate")
    table, n = scores.table(), len(scores)
    value = float(combine(scores.kind, table.sum(0)))
    own = scores.values()
    if scores.kind == "rate":
        known = clustered_rate(own.tolist(), n if np.ptp(own) == 0 else _ANY)
        return Estimate(value, known.low, known.high, n)
    if n == 1:
        return Estimate(value, math.nan, math.nan, 1)
    if scores.kind == "mean":
        return mean(own.tolist())
    limits = np.quantile(combine(scores.kind, resampled_sums(table, seed, draws)), [0.025, 0.975])
    # Of a skewed metric of few items the percentiles may miss the value itself.
    low, high = min(float(limits[0]), value), max(float(limits[1]), value)
    wider = float(stdtrit(n - 1, 0.975)) / Z * math.sqrt(n / (n - 1))
    if scores.kind == "perplexity":
        low, high = (value * float(np.exp(wider * math.log(limit / value))) for limit in (low, high))
        return Estimate(value, low, high, n)
    return Estimate(value, max(0.0, value + wider * (low - value)), min(100.0, value + wider * (high - value)), n)


def resampled_sums(table: np.ndarray, seed: int = 0, draws: int = DRAWS) -> np.ndarray:
    """[draws, S]: sums over items drawn with replacement from `table` [n, S].

    Which items a draw takes depends on n and `seed` alone, so tables of the same items are resampled alike.
    """
    n = len(table)
    generator = random_stream("items", n, seed)
    found = np.empty((draws, table.shape[1]))
    for place in range(draws):
        found[place] = np.bincount(generator.integers(n, size=n), minlength=n) @ table
    return found


@lru_cache(maxsize=2)
def sacrebleu_metric(kind: str) -> Any:
    """sacrebleu's BLEU or chrF as published papers use them; InputError where the package is missing."""
    metrics = require_module("sacrebleu.metrics", f"the metric {kind}")
    return metrics.BLEU() if kind == "bleu" else metrics.CHRF()
