"""Agreement of a judge with a known truth, and biases of its verdicts.

Pairs. Every pair is shown in both orders. Let y be 1 if the judge prefers the text shown first, -1 for the second, 0
for a tie. If a share p of the verdicts follows position, l follows length, s prefers the judge's own text, e
contradicts the truth and the rest follows the truth, then

    E[y] = p + l * (1 if the first is longer, else -1) + s * (1 if the first is the judge's own, else -1) + c * t

with t = 1 if the truth prefers the first text, -1 for the second, and c = 1 - p - l - s - 2 e. Least squares over all
verdicts estimates p, l and s without bias, even if long texts or the judge's own texts are better. Without a truth, l
and s include such differences in quality.

Scores. If a judge decides each claim wrongly with probability e, the expected score of a prediction with a share t of
true claims is t + e (1 - 2 t), so e is the slope of score - t on 1 - 2 t. On a scale of points, the error rate is the
share of scores that differ from the truth, rounded to a point.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain.environments.rewards import BUILT_IN, SCORE, RewardFailure, load_reward
from posttrain.errors import InputError
from posttrain.evaluation.judges import Pair, Record
from posttrain.evaluation.predictions import Prediction
from posttrain.evaluation.results import MetricResult
from posttrain.evaluation.statistics import ItemScores, item_means, item_sums
from posttrain.recipe.judge import PointsScale, Rubric

Truth = Callable[[Prediction], float | None]
"""The true score of a prediction on the scale of the rubric; None if unknown."""


def open_truth(where: str, rubric: Rubric) -> Truth:
    """The truth that `--truth` names.

    Args:
        where: a column with numbers on the scale of the rubric, or a reward function (`module:function`,
            `file.py:function`, `exact`), whose number is in [0, 1]. If it returns several named numbers, the one with
            the rubric's name counts, else `score`.

    Raises:
        InputError: there is no such function.
    """
    low, high = scale_of(rubric)
    if ":" not in where and where not in BUILT_IN:
        return lambda row: _number(row.row.get(where))
    reward = load_reward(where, key="--truth")

    def computed(row: Prediction) -> float | None:
        filled = {} if row.reference is None else {"label": row.reference}
        try:
            scores = reward(row.prompt or [], row.text, {**filled, **row.row}, row.origin)
        except RewardFailure:
            return None
        score = scores.get(rubric.name, scores[SCORE])
        return None if score is None else low + (high - low) * score

    return computed


def scale_of(rubric: Rubric) -> tuple[float, float]:
    """The smallest and the largest score."""
    if isinstance(rubric.scale, PointsScale):
        return rubric.scale.anchors[0].points, rubric.scale.anchors[-1].points
    return 0.0, 1.0


def score_agreement(
    rows: Sequence[Prediction], records: Sequence[Record], truth: Truth, rubric: Rubric
) -> list[MetricResult]:
    """Agreement of the scores in `records`, one per row, with the truth. InputError if no scored row has a truth."""
    judged = [(row, record["score"]) for row, record in zip(rows, records, strict=True) if record["score"] is not None]
    known = [(row, score, true) for row, score in judged if (true := truth(row)) is not None]
    missing = {"no truth": len(judged) - len(known)} if len(known) < len(judged) else {}
    _require(known)
    low, high = scale_of(rubric)
    items = [row.item for row, *_ in known]
    scores, truths = (np.array([one[part] for one in known], dtype=np.float64) for part in (1, 2))
    errors = (scores - truths) / (high - low)
    lengths = np.log2([max(1, len(row.text)) for row, *_ in known])
    if isinstance(rubric.scale, PointsScale):
        wrong = (np.abs(scores - np.floor(truths + 0.5)) > 0).astype(float)
        rate, measures = (
            item_means("rate", zip(items, wrong, strict=True)),
            "fraction of scores that are not the true points",
        )
    else:
        rate = _fit(items, errors, [1 - 2 * truths])
        measures = "rate at which single claims are decided wrongly: slope of score - truth on 1 - 2 truth"
    results = [
        ("error_rate", rate, measures),
        ("mean_error", _fit(items, errors, [np.ones(len(known))]), "score - truth, as a share of the scale"),
        (
            "length_bias",
            _fit(items, errors, [lengths, np.ones(len(known)), truths]),
            "change of that when the length doubles, at equal truth",
        ),
    ]
    if len(set(scores.tolist())) > 1 and len(set(truths.tolist())) > 1:
        ranks = _correlated(items, scores, truths)
        results.append(
            ("rank_correlation", ranks, "Spearman's correlation of scores and truth; ranks are those of all rows")
        )
    return [
        MetricResult(
            name,
            scores,
            "higher" if name == "rank_correlation" else "neither",
            len(known),
            missing,
            {"measures": about},
        )
        for name, scores, about in results
    ]


def pair_agreement(
    pairs: Sequence[Pair], records: Sequence[Record], truth: Truth | None, judges_side: int | None
) -> list[MetricResult]:
    """Biases and errors of the verdicts in `records`, one per pair.

    Args:
        truth: adds `error_rate` and removes differences in quality from the other numbers. InputError if no pair has a
            truth.
        judges_side: the side of the pairs (0 or 1) that the judge's own model wrote; adds `self_preference`.
    """
    judged = [
        (pair, record["first_shown"]) for pair, record in zip(pairs, records, strict=True) if record["first_shown"]
    ]
    known = [(pair, shown, _preferred(pair, truth)) for pair, shown in judged]
    usable = [(pair, shown, better) for pair, shown, better in known if better is not None]
    missing = {"no truth": len(known) - len(usable)} if len(usable) < len(known) else {}
    if truth is not None:
        _require(usable)
    if not usable:
        return []
    items, verdicts, columns = [], [], []
    for pair, shown, better in usable:
        longer = np.sign(len(pair[0].text) - len(pair[1].text))
        for order, preference in zip((1, -1), shown, strict=True):
            items.append(pair[0].item)
            verdicts.append(2 * preference - 1)
            columns.append(
                [1.0, order * longer, order * (0 if judges_side is None else 1 - 2 * judges_side), order * better]
            )
    position, length, self_, true = np.array(columns).T
    y = np.array(verdicts)
    fitted = {"length_bias": [length, position]}
    if judges_side is not None:
        fitted = {"length_bias": [length, self_, position], "self_preference": [self_, length, position]}
    if truth is not None:
        fitted = {name: [*regressors, true] for name, regressors in fitted.items()}
    note = (
        "corrected for differences in quality"
        if truth is not None
        else "includes differences in quality; --truth corrects for them"
    )
    measures = {"length_bias": "for the longer text", "self_preference": "for the judge's own text"}
    results = [
        MetricResult(
            name,
            _fit(items, y, regressors),
            "neither",
            len(y),
            missing,
            {"measures": f"fraction of verdicts {measures[name]} minus that against it, {note}"},
        )
        for name, regressors in fitted.items()
    ]
    if truth is not None:
        wrong = [(pair[0].item, _wrong(shown, better)) for pair, shown, better in usable if better]
        about = {
            "measures": "fraction of verdicts for the text that is worse by the truth; a tie is half of one",
            "pairs of equal truth": len(usable) - len(wrong),
        }
        if wrong:
            results.insert(
                0, MetricResult("error_rate", item_means("rate", wrong), "lower", 2 * len(wrong), missing, about)
            )
    return results


def _preferred(pair: Pair, truth: Truth | None) -> float | None:
    """1 if the truth prefers the first text of the pair, -1 for the second, 0 for neither; None if unknown."""
    if truth is None:
        return 0.0
    first, second = (truth(row) for row in pair)
    return None if first is None or second is None else float(np.sign(first - second))


def _wrong(shown: Sequence[float], better: float) -> float:
    """Mean over both orders of the share of a verdict that goes to the worse text."""
    first = (shown[0] + 1 - shown[1]) / 2
    return 1 - first if better > 0 else first


def _fit(items: Sequence[str], y: np.ndarray, regressors: Sequence[np.ndarray]) -> ItemScores:
    """The coefficient of the first of `regressors` ([n] each) in a least-squares fit of `y` [n], without another
    intercept.
    """
    x = np.stack(regressors, axis=1)
    normal = (x[:, :, None] * x[:, None]).reshape(len(y), -1)
    return item_sums("least_squares", zip(items, np.concatenate([normal, x * y[:, None]], axis=1), strict=True))


def _correlated(items: Sequence[str], a: np.ndarray, b: np.ndarray) -> ItemScores:
    from scipy.stats import rankdata

    x, y = (rankdata(values) for values in (a, b))
    sums = np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)
    return item_sums("correlation", zip(items, sums, strict=True))


def _require(known: Sequence[object]) -> None:
    if not known:
        raise InputError(
            "--truth: no judged row has a truth; name a column with numbers, or a reward function that can score these rows"
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
