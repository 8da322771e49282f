"""Which of two predictions for the same prompt a judge finds better, asked in both orders.

A judge that favours what it reads first would favour one file. Every pair is therefore judged twice, with the two
in either order, and its value is the mean of both: 1 where both name the first file's, 0 where both name the other's,
1/2 where they disagree (Zheng et al. 2023, whose conservative rule this is for opposite verdicts).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posttrain.errors import InputError
from posttrain.evaluation.asking import Progress, Reply, ask_all
from posttrain.evaluation.judged import (
    Judgement,
    Options,
    Record,
    empty_results,
    failure,
    left_out,
    located,
    remarks,
    unanswered,
)
from posttrain.evaluation.predictions import Prediction, Predictions
from posttrain.evaluation.rubrics import NotToBeAsked, Question, comparing
from posttrain.evaluation.scores import item_means
from posttrain.evaluation.text_metrics import Measured

Pair = tuple[Prediction, Prediction]


@dataclass(frozen=True)
class Pairing:
    """Predictions of two files for the same prompts."""

    pairs: list[Pair]
    left_out: dict[str, int]
    """Predictions that are in no pair, by reason."""


def pair_up(one: Predictions, other: Predictions) -> Pairing:
    """Pairs of the same item and sample, in the order of `one`; InputError where there is none.

    Where rows have no `sample`, the first of an item goes with the first, and so on.
    """
    mine, theirs = _numbered(one.rows), _numbered(other.rows)
    shared = [key for key in mine if key in theirs]
    pairs = [(mine[key], theirs[key]) for key in shared if mine[key].prompt == theirs[key].prompt]
    missing = {
        f"only in {one.path}": len(mine) - len(shared),
        f"only in {other.path}": len(theirs) - len(shared),
        "another prompt": len(shared) - len(pairs),
    }
    if not pairs:
        raise InputError(
            f"{one.path} and {other.path} have no prediction for the same prompt ({len(mine)} and {len(theirs)} rows, "
            f"{len(shared)} of the same id and sample); name files that answer the same rows"
        )
    return Pairing(pairs, {reason: count for reason, count in missing.items() if count})


def judge_pairs(
    one: Predictions, other: Predictions, options: Options, progress: Progress = lambda *_: None
) -> Judgement:
    """How often the judge finds `one` better than `other`. A pair without two readable replies has no value."""
    pairing = pair_up(one, other)
    asked = [_try(options, pair) for pair in pairing.pairs]
    questions = [question for own in asked if not isinstance(own, str) for question in own]
    replies = iter(ask_all(options.server, questions, options.workers, progress))
    records = []
    for pair, own in zip(pairing.pairs, asked, strict=True):
        told = [] if isinstance(own, str) else [next(replies) for _ in own]
        records.append(_record(pair, own, told, options))
    found = empty_results(one, other)
    missing = {**pairing.left_out, **left_out(records)}
    if any(record["value"] is not None for record in records):
        found.measured = _measured(pairing.pairs, records, missing, options)
    return Judgement(records, found, unanswered(records), remarks(records, options.longest))


def questions_of_pairs(one: Predictions, other: Predictions, options: Options) -> list[Question]:
    """All that `judge_pairs` asks."""
    asked = [_try(options, pair) for pair in pair_up(one, other).pairs]
    return [question for own in asked if not isinstance(own, str) for question in own]


def _numbered(rows: Sequence[Prediction]) -> dict[tuple[str, str], Prediction]:
    """Rows by item and sample, or by item and place within it."""
    found: dict[tuple[str, str], Prediction] = {}
    counts: dict[str, int] = {}
    for row in rows:
        place = counts.get(row.item, 0)
        counts[row.item] = place + 1
        sample = row.row.get("sample")
        found.setdefault((row.item, str(place if sample is None else sample)), row)
    return found


def _try(options: Options, pair: Pair) -> list[Question] | str:
    """The two questions about a pair, none about equal texts, or what the row lacks."""
    first, second = (row.text for row in pair)
    if first == second:
        return []
    try:
        orders = ((first, second), (second, first))
        return [comparing(options.rubric, pair[0], *texts, options.longest) for texts in orders]
    except NotToBeAsked as lacking:
        return str(lacking)


def _record(pair: Pair, asked: list[Question] | str, replies: Sequence[Reply], options: Options) -> Record:
    """`first_shown`: for either order, how much the text shown first is preferred (1, 1/2 or 0)."""
    questions = [] if isinstance(asked, str) else asked
    whole = Reply(None)
    if isinstance(asked, str):
        whole = Reply(None, asked, f"the row has {asked}")
    elif missing := [reply for reply in replies if reply.judged is None]:
        whole = missing[0]
    judged = [reply.judged for reply in replies if reply.judged is not None]
    value = None
    if not whole.kind:
        value = (judged[0].value + 1 - judged[1].value) / 2 if questions else 0.5
    return {
        **located(pair[0]),
        "against": pair[1].origin,
        **options.named(),
        "prompt_hashes": [question.digest for question in questions],
        "value": value,
        "first_shown": [one.value for one in judged] if len(judged) == 2 else None,
        "reasons": [one.reason for one in judged],
        "shown_in_part": sorted({name for question in questions for name in question.in_part}),
        **failure(whole),
    }


def _measured(
    pairs: Sequence[Pair], records: Sequence[Record], missing: dict[str, int], options: Options
) -> list[Measured]:
    judged = [
        (pair[0].item, record) for pair, record in zip(pairs, records, strict=True) if record["value"] is not None
    ]
    values = [record["value"] for _, record in judged]
    asked = [(item, record["first_shown"]) for item, record in judged if record["first_shown"]]
    counts = {
        "wins": sum(value > 0.5 for value in values),
        "ties": values.count(0.5),
        "losses": sum(value < 0.5 for value in values),
        "same text": len(judged) - len(asked),
    }
    about = {**options.about(), "scale": "1 is this file's, 1/2 a tie, 0 the other's, mean of both orders"}
    rated = item_means("rate", ((item, record["value"]) for item, record in judged))
    found = [Measured("win_rate", rated, "higher", len(judged), missing, {**about, **counts})]
    if not asked:
        return found
    bias: Iterable[tuple[str, float]] = ((item, sum(shown) - 1) for item, shown in asked)
    agreed = ((item, float(shown[0] + shown[1] == 1)) for item, shown in asked)
    found.append(Measured("position_bias", item_means("mean", bias), "neither", len(asked), {}, _BIAS))
    found.append(Measured("orders_agree", item_means("rate", agreed), "higher", len(asked), {}, _AGREE))
    return found


_BIAS = {
    "measures": "the share of verdicts for the text shown first less that for the second; 0 is none, 1 always the first"
}
_AGREE = {"measures": "the share of pairs on which both orders say the same"}
