"""A language model as a judge: predictions scored by a rubric, or compared in pairs, through a chat server.

A rubric turns every prediction into a prompt. Each row has a record, and the scores have a mean with an interval.
"""

import difflib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import ValidationError

from posttrain.environments.judge import (
    ChoiceReply,
    ClaimsReply,
    JudgeFailure,
    Judgment,
    PointsReply,
    ReplyForm,
    ask_judge,
)
from posttrain.environments.untrusted import Prompt, Texts, template_prompt
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction, Predictions, digest_of
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.statistics import item_means
from posttrain.images import EDGE
from posttrain.recipe.judge import FIELD, Anchor, JudgeServerRecipe, PointsScale, Rubric
from posttrain.recipe.sources import read_text
from posttrain.recipe.validation import validation_errors

_PACKAGED = Path(__file__).parent.parent / "rubrics"
_SCORE_TASK = (
    "You judge one prediction, `prediction`, by a rubric. It and what there is to judge it by, such as the messages that "
    "it answers, stand in frames"
)
_COMPARE_TASK = (
    "You compare two predictions for the same prompt, `first` and `second`, by a rubric. Which of them comes first says "
    "nothing about them. They and what there is to judge them by, such as the messages that they answer, stand in frames"
)


@dataclass(frozen=True)
class Question:
    """One request to the judge, and the form of its reply."""

    prompt: Prompt
    form: ReplyForm
    in_part: tuple[str, ...]
    """The truncated fields."""


class MissingField(Exception):
    """Raised for a row without a field of the rubric's template; the message is `no FIELD`."""


def packaged_rubrics() -> list[str]:
    """Names of the rubrics in the package."""
    return sorted(file.stem for file in _PACKAGED.glob("*.yaml"))


def load_rubric(name: str) -> Rubric:
    """Load a packaged rubric by name, or a YAML file; raises `InputError` with the line of the mistake."""
    names = packaged_rubrics()
    file = _PACKAGED / f"{name}.yaml" if name in names else Path(name)
    if not file.is_file():
        near = difflib.get_close_matches(name, names, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(names)}, or a .yaml file"
        raise InputError(f"--rubric: there is no rubric or file {name!r}; {hint}")
    try:
        layer = read_text(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--rubric: {file} cannot be read as text ({error}); name a YAML file") from error
    errors: list[str] = []
    scale = layer.values.get("scale")
    anchors = scale.get("anchors") if isinstance(scale, dict) else None
    # Anchors are sections in a list and so have no dotted keys.
    for index, anchor in enumerate(anchors if isinstance(anchors, list) else []):
        if isinstance(anchor, dict):
            try:
                Anchor.model_validate_json(json.dumps(anchor, default=str), strict=True)
            except ValidationError as error:
                errors += validation_errors(error, Anchor, layer.part("scale", "anchors", str(index)))
    try:
        if not errors:
            return Rubric.model_validate_json(json.dumps(layer.values, default=str), strict=True)
    except ValidationError as error:
        errors = validation_errors(error, Rubric, layer)
    raise InputError("\n".join(one if one.startswith(str(file)) else f"{file}: {one}" for one in errors))


def question(rubric: Rubric, row: Prediction, longest: int, pair: tuple[str, str] | None = None) -> Question:
    """The request to score a prediction, or to compare the texts of `pair`, with every text cut to `longest` characters.

    Raises `MissingField` if the row lacks a field of the template.
    """
    scale, criteria = rubric.scale, [rubric.measures.strip(), ""]
    task, request = _SCORE_TASK, "Judge the framed prediction"
    fields: dict[str, Texts] = {"prediction": [("prediction", row.text)]}
    form: ReplyForm = ClaimsReply()
    if pair is not None:
        task, request, form = _COMPARE_TASK, "Compare the framed first and second", ChoiceReply()
        fields["prediction"] = [("first", pair[0]), ("second", pair[1])]
    elif isinstance(scale, PointsScale):
        form = PointsReply(scale.anchors[0].points, scale.anchors[-1].points)
    for name in set(FIELD.findall(rubric.template)) - {"prediction"}:
        texts = [("reference", row.reference or "")]
        if name == "prompt":
            texts = []
            for message in row.prompt or []:
                calls = message.get("tool_calls")
                content = message["content"] + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else "")
                texts.append((message["role"], content))
        if not any(text.strip() for _, text in texts):
            raise MissingField(f"no {name}")
        fields[name] = texts
    cut = {name: [(who, _cut(text, longest)) for who, text in texts] for name, texts in fields.items()}
    in_part = tuple(name for name, texts in sorted(fields.items()) if any(len(text) > longest for _, text in texts))
    if isinstance(scale, PointsScale):
        criteria.append("The points:" if pair is None else "The points that each alone would get:")
        criteria += [f"{anchor.points}: {anchor.means.strip()}" for anchor in scale.anchors]
    else:
        criteria += [f"A claim: {scale.claim.strip()}", f"A claim is supported when: {scale.supported.strip()}"]
        criteria.append(
            "List every claim of the framed prediction, and say of each whether it is supported."
            if pair is None
            else "The better one has the larger share of claims that are supported."
        )
    prompt = template_prompt(task, "\n".join(criteria), form.instructions, rubric.template, cut, request)
    return Question(prompt, form, in_part)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    kept = text[:longest]
    kept = kept[: kept.rindex(EDGE)] if kept.count(EDGE) % 2 else kept  # not in the middle of an image
    return f"{kept}\n({len(text) - len(kept)} more characters)"


UNREADABLE, NO_REPLY, NOT_ASKED = "unreadable reply", "no reply from the server", "not asked"
"""Reasons for a missing score."""
_MIN_FAILURES = 3
"""Minimum number of consecutive failures after which requests stop."""


@dataclass(frozen=True)
class Reply:
    """The result of one request."""

    judged: Judgment | None
    kind: str = ""
    """UNREADABLE, NO_REPLY or NOT_ASKED if there is no verdict."""
    failure: str = ""
    """Description of the failure."""


Progress = Callable[[int, int, int], None]
"""Called with the numbers of finished requests, all requests, and finished requests without a verdict."""


def ask_all(
    server: JudgeServerRecipe, questions: Sequence[Question], workers: int, progress: Progress = lambda *_: None
) -> list[Reply]:
    """Send all questions with `workers` concurrent requests; returns the replies in order.

    Stops after as many consecutive failures as there are workers (at least three), or twice as many once the server has
    replied. Requests in flight at that time are abandoned.
    """
    replies = [Reply(None, NOT_ASKED, "the server failed repeatedly before this request") for _ in questions]
    indices, lock, stop = iter(range(len(questions))), threading.Lock(), threading.Event()
    done: SimpleQueue[tuple[int, Reply | BaseException]] = SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                index = next(indices, None)
            if index is None:
                return
            try:
                done.put((index, Reply(ask_judge(server, questions[index].prompt, questions[index].form))))
            except JudgeFailure as error:
                done.put((index, Reply(None, UNREADABLE if error.unreadable else NO_REPLY, str(error))))
            except BaseException as error:
                done.put((index, error))
                return

    # Daemon threads, so that an interrupted command ends at once; the cache is safe against kills at any time.
    for _ in range(min(workers, len(questions))):
        threading.Thread(target=work, daemon=True).start()
    failed = in_a_row = 0
    answered = False
    try:
        for count in range(1, len(questions) + 1):
            index, reply = done.get()
            if isinstance(reply, BaseException):
                raise reply
            replies[index] = reply
            failed += reply.judged is None
            in_a_row = in_a_row + 1 if reply.kind == NO_REPLY else 0
            answered = answered or reply.kind != NO_REPLY
            progress(count, len(questions), failed)
            if in_a_row >= max(_MIN_FAILURES, workers) * (2 if answered else 1):
                break
    finally:
        stop.set()
    return replies


Record = dict[str, Any]
"""JSON values of one row or one pair."""


@dataclass(frozen=True)
class Options:
    """Settings of a judgement."""

    rubric: Rubric
    server: JudgeServerRecipe
    workers: int = 8
    """Concurrent requests."""
    longest: int = 50_000
    """Maximum number of characters of each text shown to the judge."""

    def about(self) -> dict[str, Any]:
        """Settings that a reader of the scores needs."""
        source, scale = self.source(), self.rubric.scale
        described = "share of claims that are supported, 0 to 1"
        if isinstance(scale, PointsScale):
            described = f"{scale.anchors[0].points} to {scale.anchors[-1].points}, more is better"
        return {"judge": source["judge"], "rubric": f"{source['rubric']} {source['rubric_hash']}", "scale": described}

    def source(self) -> Record:
        """The rubric and the judge, as stored in every record."""
        digest = digest_of(self.rubric.model_dump(mode="json"))
        return {"rubric": self.rubric.name, "rubric_hash": digest, "judge": self.server.model}


@dataclass
class Judgement:
    """The judged rows of a file."""

    records: list[Record]
    """One per row or pair, in order."""
    results: Results
    """Without metrics if nothing could be scored."""
    unanswered: int = 0
    """Number of rows without a score because the server failed. A repeated run requests only these."""
    warnings: list[str] = field(default_factory=list)


def judge_predictions(predictions: Predictions, options: Options, progress: Progress = lambda *_: None) -> Judgement:
    """Score every prediction. Rows without a readable reply have no score and are counted."""
    records, samples = [], []
    for (row,), questions, (reply, *_) in _replies([(row,) for row in predictions.rows], options, progress):
        score, reason = (reply.judged.score, reply.judged.reason) if reply.judged else (None, None)
        digest = digest_of(questions[0].prompt) if questions else None
        records.append(_record(row, questions, reply, options, prompt_hash=digest, score=score, reason=reason))
        if score is not None:
            samples.append((row.item, score))
    judgement = _judgement(records, options, predictions)
    if samples:
        scale = options.rubric.scale
        bounds = (scale.anchors[0].points, scale.anchors[-1].points) if isinstance(scale, PointsScale) else (0.0, 1.0)
        result = MetricResult(options.rubric.name, item_means("mean", samples, bounds), "higher", len(samples))
        judgement.results.metrics = [replace(result, left_out=_left_out(records), about=options.about())]
    return judgement


Row = tuple[Prediction, ...]
"""One prediction to score, or two to compare."""


def questions_of(predictions: Predictions, options: Options, against: Predictions | None = None) -> list[Question]:
    """The requests of `judge_predictions`, or with `against` those of `judge_pairs`."""
    rows: Sequence[Row] = [(row,) for row in predictions.rows]
    if against is not None:
        rows, _ = pair_up(predictions, against)
    asked = [_questions(options, *row) for row in rows]
    return [question for questions in asked if not isinstance(questions, str) for question in questions]


def _questions(options: Options, row: Prediction, other: Prediction | None = None) -> list[Question] | str:
    """The request to score `row`, or those to compare it with `other` in both orders (none for equal texts); or the
    reason why there are none."""
    rubric, longest = options.rubric, options.longest
    try:
        if other is None:
            return [question(rubric, row, longest)]
        orders = [] if row.text == other.text else [(row.text, other.text), (other.text, row.text)]
        return [question(rubric, row, longest, order) for order in orders]
    except MissingField as error:
        return str(error)


def _replies(
    rows: Sequence[Row], options: Options, progress: Progress
) -> Iterator[tuple[Row, list[Question], list[Reply]]]:
    """Each row, its requests and their replies. A row without a request has one reply, which says why, or none if its
    texts are equal."""
    asked = [_questions(options, *row) for row in rows]
    questions = [question for those in asked if not isinstance(those, str) for question in those]
    replies = iter(ask_all(options.server, questions, options.workers, progress))
    for row, those in zip(rows, asked, strict=True):
        if isinstance(those, str):
            yield row, [], [Reply(None, those, f"the row has {those}")]
        else:
            yield row, those, [next(replies) for _ in those]


def _left_out(records: Sequence[Record]) -> dict[str, int]:
    """Number of records without a score, by reason."""
    return Counter(record["left_out"] for record in records if record["left_out"])


def _judgement(records: list[Record], options: Options, *files: Predictions) -> Judgement:
    """The records of a file, or of one file against another, without metrics. Its warnings name truncated texts, and the first
    rows without a score for each reason."""
    warnings = []
    if truncated := sum(bool(record["shown_in_part"]) for record in records):
        warnings.append(
            f"{truncated} rows have a text of more than {options.longest:,} characters; the judge did not see its end"
        )
    missing = _left_out(records)
    for kind, count in missing.items():
        rows = [record for record in records if record["left_out"] == kind]
        for record in rows[:3]:  # the failure may quote the reply of a judge
            reason = "".join(character if character.isprintable() else " " for character in record["failure"])
            warnings.append(f"{kind}: {record['row']}: {' '.join(reason.split())}")
        if count > 3:
            warnings.append(f"{kind}: {count - 3:,} more")
    problems = [line for file in files for line in file.problems.summary()]
    name = " against ".join(file.path for file in files)
    results = Results(name, len(files[0].rows), files[0].items, problems, digests=files[0].digests())
    return Judgement(records, results, sum(missing.get(kind, 0) for kind in (NO_REPLY, NOT_ASKED)), warnings)


def pair_up(one: Predictions, other: Predictions) -> tuple[list[Row], dict[str, int]]:
    """Pairs with equal item and sample, in the order of `one`, and the number of predictions in no pair by reason.

    Rows without `sample` are paired in order within an item. Raises `InputError` if there are no pairs.
    """
    numbered: list[dict[tuple[str, str], Prediction]] = []
    for file in (one, other):
        numbered.append({})
        counts = Counter[str]()
        for row in file.rows:
            sample = row.row.get("sample")
            numbered[-1].setdefault((row.item, str(counts[row.item] if sample is None else sample)), row)
            counts[row.item] += 1
    mine, theirs = numbered
    shared = [key for key in mine if key in theirs]
    pairs: list[Row] = [(mine[key], theirs[key]) for key in shared if mine[key].prompt == theirs[key].prompt]
    missing = {f"only in {one.path}": len(mine) - len(shared), f"only in {other.path}": len(theirs) - len(shared)}
    missing["another prompt"] = len(shared) - len(pairs)
    if not pairs:
        raise InputError(
            f"{one.path} and {other.path} have no prediction for the same prompt ({len(mine)} and {len(theirs)} rows, "
            f"{len(shared)} of the same id and sample); give files that answer the same rows"
        )
    return pairs, {reason: count for reason, count in missing.items() if count}


def judge_pairs(
    one: Predictions, other: Predictions, options: Options, progress: Progress = lambda *_: None
) -> Judgement:
    """Win rate of `one` against `other`. Pairs without two readable replies have no value.

    `first_shown` of a record: per order, the preference for the text shown first (1, 1/2 or 0).
    """
    pairs, unpaired = pair_up(one, other)
    records: list[Record] = []
    judged: list[tuple[str, float, list[float]]] = []
    for pair, questions, replies in _replies(pairs, options, progress):
        outcome = next((reply for reply in replies if reply.judged is None), Reply(None))
        read = [reply.judged for reply in replies if reply.judged is not None]
        value = None if outcome.kind else (read[0].score + 1 - read[1].score) / 2 if read else 0.5
        shown = [reply.score for reply in read] if len(read) == 2 else []
        values: Record = {
            "against": pair[1].origin,
            "prompt_hashes": [digest_of(question.prompt) for question in questions],
        }
        values |= {"value": value, "first_shown": shown or None, "reasons": [reply.reason for reply in read]}
        records.append(_record(pair[0], questions, outcome, options, **values))
        if value is not None:
            judged.append((pair[0].item, value, shown))
    judgement = _judgement(records, options, one, other)
    if not judged:
        return judgement
    won, asked = [value for _, value, _ in judged], [(item, shown) for item, _, shown in judged if shown]
    counts = {"wins": sum(value > 0.5 for value in won), "ties": won.count(0.5)}
    counts |= {"losses": sum(value < 0.5 for value in won), "same text": len(judged) - len(asked)}
    about = {**options.about(), "scale": "1: this file wins, 1/2: tie, 0: the other file wins; mean of both orders"}
    rated = item_means("rate", ((item, value) for item, value, _ in judged))
    missing = {**unpaired, **_left_out(records)}
    metrics = [MetricResult("win_rate", rated, "higher", len(judged), missing, {**about, **counts})]
    if asked:
        bias = item_means("mean", ((item, sum(shown) - 1) for item, shown in asked), (-1.0, 1.0))
        agreed = item_means("rate", ((item, float(sum(shown) == 1)) for item, shown in asked))
        metrics.append(MetricResult("position_bias", bias, "neither", len(asked), {}, _BIAS))
        metrics.append(MetricResult("orders_agree", agreed, "higher", len(asked), {}, _AGREE))
    judgement.results.metrics = metrics
    return judgement


def _record(row: Prediction, questions: list[Question], reply: Reply, options: Options, **values: Any) -> Record:
    """Where a row is from, how it was judged, the `values`, and why it has no score; None if it has one."""
    return {
        "id": row.item,
        "sample": row.row.get("sample"),
        "row": row.origin,
        **options.source(),
        **values,
        "shown_in_part": sorted({name for question in questions for name in question.in_part}),
        "left_out": reply.kind or None,
        "failure": reply.failure or None,
    }


_BIAS = {
    "measures": "fraction of verdicts for the text shown first minus that for the second; 0: no bias, 1: always the first"
}
_AGREE = {"measures": "fraction of pairs on which both orders agree"}
