"""How often credit finds the wrong step, with 95% intervals over solutions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.runs.intervals import Estimate, clustered_rate, mean, mean_difference


@dataclass(frozen=True)
class Found:
    """How well an estimator's credit finds the wrong step of n solutions."""

    lowest: Estimate
    """Share in which the wrong step has the lowest credit; of m steps that are lowest alike, 1 / m."""
    chance: float
    """The mean of 1 / K."""
    of_steps: Estimate
    """`lowest` with the last unit left out, which is no step but the final answer."""
    chance_of_steps: float
    unchanged_of_steps: float
    unchanged: float
    """The share before the change: how often that step is lowest in the right solution."""
    above_unchanged: Estimate
    auc: Estimate
    """Share of the other steps with more credit; a tie is half. 0.5 by chance."""
    drop: Estimate
    """Share in which the step has less credit in the wrong solution than in the right one; a tie is half."""


def lowest(credits: np.ndarray, step: int) -> float:
    """1 / m where `step` is one of m units with the lowest of the credits [K], else 0."""
    least = credits == credits.min()
    return float(least[step]) / int(least.sum())


def rank(credits: np.ndarray, step: int) -> float:
    """1 + units with less credit than `step` + half of the others with the same."""
    return 1 + float((credits < credits[step]).sum()) + (float((credits == credits[step]).sum()) - 1) / 2


def auc(credits: np.ndarray, step: int) -> float:
    """Share of the other units with more credit than `step`; a tie is half. At least 2 units."""
    return 1 - (rank(credits, step) - 1) / (len(credits) - 1)


def found(wrong: Sequence[np.ndarray], right: Sequence[np.ndarray], steps: Sequence[int]) -> Found:
    """`wrong` and `right`: credits [K_i] of n solutions with and without the wrong step, whose number is in `steps` and
    which is not the last unit."""
    least = [lowest(own, step) for own, step in zip(wrong, steps, strict=True)]
    before = [lowest(own, step) for own, step in zip(right, steps, strict=True)]
    steps_alone = [lowest(own[:-1], step) for own, step in zip(wrong, steps, strict=True)]
    moved = [float(np.sign(w[k] - r[k])) for w, r, k in zip(wrong, right, steps, strict=True)]
    return Found(
        lowest=mean(least, (0.0, 1.0)),
        chance=float(np.mean([1 / len(own) for own in wrong])),
        of_steps=mean(steps_alone, (0.0, 1.0)),
        chance_of_steps=float(np.mean([1 / (len(own) - 1) for own in wrong])),
        unchanged_of_steps=float(np.mean([lowest(own[:-1], step) for own, step in zip(right, steps, strict=True)])),
        unchanged=float(np.mean(before)),
        above_unchanged=mean_difference([a - b for a, b in zip(least, before, strict=True)]),
        auc=mean([auc(own, step) for own, step in zip(wrong, steps, strict=True)], (0.0, 1.0)),
        drop=clustered_rate([(1 - sign) / 2 for sign in moved], len(moved)),
    )


def accuracy(margins: np.ndarray, questions: Sequence[str]) -> Estimate:
    """Share of pairs [P] whose better answer is ranked above the other, a tie is half. Questions count alike, however
    many pairs they have, and the interval is over questions."""
    of_question: dict[str, list[float]] = {}
    for margin, question in zip(((np.sign(margins) + 1) / 2).tolist(), questions, strict=True):
        of_question.setdefault(question, []).append(margin)
    return clustered_rate([float(np.mean(own)) for own in of_question.values()], len(margins))
