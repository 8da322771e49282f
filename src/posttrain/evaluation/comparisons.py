"""What rewards of compared answers say: how often the better one is ranked first, and how sure the rewards may be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.evaluation.statistics import Estimate, clustered_rate, success_rate
from posttrain.seeds import random_stream


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose predicted probability of the ranking lies in one stretch of [0.5, 1]."""

    low: float
    high: float
    confidence: float
    """Mean predicted probability that the answer with the larger reward is the better one."""
    accuracy: Estimate
    """Share of pairs in which it is."""


def pair_accuracy(margins: Sequence[float]) -> Estimate:
    """Share of pairs whose margin (reward of the better answer minus that of the worse) is above 0; a tie is half."""
    values = np.asarray(margins, dtype=np.float64)
    return clustered_rate(list((np.sign(values) + 1) / 2), len(values))


def ranking_accuracy(good: Sequence[float], bad: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """Chance that a good answer's reward is above a bad one's (area under the ROC curve; Mann and Whitney 1947).

    Over all pairs of a good and a bad answer, a tie counting half; percentile bootstrap interval over answers. Where
    resampling shows no spread, because all pairs come out alike, or cannot, because one side is a single answer, the
    interval is Wilson's with as many trials as the smaller side has answers: no more of the pairs are independent.
    """
    better, worse = np.asarray(good, dtype=np.float64), np.asarray(bad, dtype=np.float64)
    if not len(better) or not len(worse):
        raise ValueError("a ranking needs good and bad answers")
    wins = (better[:, None] > worse[None]) + 0.5 * (better[:, None] == worse[None])
    value, n = float(wins.mean()), len(better) + len(worse)
    if min(wins.shape) == 1 or wins.min() == wins.max():
        return replace(clustered_rate([value] * min(wins.shape), min(wins.shape)), value=value, n=n)
    generator = random_stream("ranking", seed)
    drawn = []
    for _ in range(draws):
        rows, columns = (generator.integers(size, size=size) for size in wins.shape)
        # The mean over a resample is a weighted mean of the table: weights are how often each answer was drawn.
        over = np.bincount(rows, minlength=len(better)) / len(better)
        under = np.bincount(columns, minlength=len(worse)) / len(worse)
        drawn.append(float(over @ wins @ under))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high), n)


def calibration(margins: Sequence[float], bins: int = 5) -> tuple[list[CalibrationBin], float]:
    """Bins of equal width over the predicted probability, and the expected calibration error (Guo et al. 2017).

    A Bradley-Terry model predicts that the answer with the larger reward is better with probability sigmoid(|margin|).
    The error is the mean over pairs of |confidence - accuracy| of their bin; empty bins are left out.
    """
    values = np.asarray(margins, dtype=np.float64)
    confidence = 1 / (1 + np.exp(-np.abs(values)))
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    found, error = [], 0.0
    for number in range(bins):
        inside = place == number
        n = int(inside.sum())
        if not n:
            continue
        right = success_rate(int((values[inside] > 0).sum()), n)
        mean = float(confidence[inside].mean())
        found.append(CalibrationBin(0.5 + number / 2 / bins, 0.5 + (number + 1) / 2 / bins, mean, right))
        error += n / len(values) * abs(mean - right.value)
    return found, error if len(values) else math.nan
