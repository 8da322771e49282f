"""What a judge makes of a file of predictions, by a rubric: a record of each row, and the mean with its interval."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from posttrain.environments.judge import JudgeFailure, Judgment, ask_judge
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction, Predictions
from posttrain.evaluation.results import Results
from posttrain.evaluation.rubrics import NotToBeAsked, Question, comparing, judging, rubric_digest, scale_in_words
from posttrain.evaluation.scores import item_means
from posttrain.evaluation.text_metrics import Measured
from posttrain.recipe.judge import JudgeServerRecipe, Rubric

UNREADABLE, SILENT, NOT_ASKED = "unreadable reply", "no answer of the server", "not asked"
"""Why there is no score."""
_AT_LEAST = 3


@dataclass(frozen=True)
class Reply:
    """What became of a question."""

    judged: Judgment | None
    kind: str = ""
    """UNREADABLE, SILENT or NOT_ASKED where the judge said nothing that counts."""
    failure: str = ""
    """One sentence on it."""


Progress = Callable[[int, int, int], None]
"""AlreadyReported the number of questions that are done, of all, and of those without a verdict."""


def ask_all(
    server: JudgeServerRecipe, questions: Sequence[Question], workers: int, progress: Progress = lambda *_: None
) -> list[Reply]:
    """A reply to each question, in their order; `workers` requests are under way at a time.

    A server that fails again and again (for as many questions in a row as there are workers where it never answered,
    for twice as many later) is asked no more; what was under way then is not waited for.
    """
    replies = [Reply(None, NOT_ASKED, "the server failed again and again before its turn came") for _ in questions]
    places, lock, stop = iter(range(len(questions))), threading.Lock(), threading.Event()
    done: SimpleQueue[tuple[int, Reply | BaseException]] = SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                place = next(places, None)
            if place is None:
                return
            try:
                done.put((place, _ask(server, questions[place])))
            except BaseException as error:
                done.put((place, error))
                return

    # Daemons, so that an interrupted command ends at once; the cache takes a death at any instant.
    for _ in range(min(workers, len(questions))):
        threading.Thread(target=work, daemon=True).start()
    failed = in_a_row = 0
    answered = False
    try:
        for count in range(1, len(questions) + 1):
            place, reply = done.get()
            if isinstance(reply, BaseException):
                raise reply
            replies[place] = reply
            failed += reply.judged is None
            in_a_row = in_a_row + 1 if reply.kind == SILENT else 0
            answered = answered or reply.kind != SILENT
            progress(count, len(questions), failed)
            if in_a_row >= max(_AT_LEAST, workers) * (2 if answered else 1):
                break
    finally:
        stop.set()
    return replies


def _ask(server: JudgeServerRecipe, question: Question) -> Reply:
    try:
        return Reply(ask_judge(server, question.prompt, question.form))
    except JudgeFailure as error:
        return Reply(None, UNREADABLE if error.unreadable else SILENT, str(error))


Record = dict[str, Any]
"""JSON values of one row, or of one pair."""


@dataclass(frozen=True)
class Options:
    """How a file is judged."""

    rubric: Rubric
    server: JudgeServerRecipe
    workers: int = 8
    """Requests under way at a time."""
    longest: int = 50_000
    """Characters of each text that the judge is shown."""

    def about(self) -> dict[str, Any]:
        """What a reader has to know of a score."""
        return {
            "judge": self.server.model,
            "rubric": f"{self.rubric.name} {rubric_digest(self.rubric)}",
            "scale": scale_in_words(self.rubric),
        }

    def named(self) -> Record:
        """What every record holds of where its score is from."""
        rubric = self.rubric
        return {"rubric": rubric.name, "rubric_hash": rubric_digest(rubric), "judge": self.server.model}


@dataclass
class Judgement:
    """What came of judging a file."""

    records: list[Record]
    """One of each row (or pair), in their order."""
    results: Results
    """Empty of metrics where nothing could be scored."""
    unanswered: int = 0
    """Rows without a score because the server failed; another try asks for them alone."""
    remarks: list[str] = field(default_factory=list)


def judge_predictions(predictions: Predictions, options: Options, progress: Progress = lambda *_: None) -> Judgement:
    """Every prediction judged by itself. A row without a readable reply has no score and is counted."""
    asked = [_try(options, row) for row in predictions.rows]
    questions = [question for question in asked if isinstance(question, Question)]
    replies = iter(ask_all(options.server, questions, options.workers, progress))
    records, samples = [], []
    for row, question in zip(predictions.rows, asked, strict=True):
        reply = next(replies) if isinstance(question, Question) else Reply(None, question, f"the row has {question}")
        score = None if reply.judged is None else reply.judged.score
        records.append(
            {
                **located(row),
                **options.named(),
                "prompt_hash": question.digest if isinstance(question, Question) else None,
                "score": score,
                "reason": reply.judged.reason if reply.judged else None,
                "shown_in_part": list(question.in_part) if isinstance(question, Question) else [],
                **failure(reply),
            }
        )
        if score is not None:
            samples.append((row.item, score))
    found, told = empty_results(predictions), remarks(records, options.longest)
    if samples:
        scores = item_means("mean", samples)
        if len(scores) > 1 and len(set(scores.values().tolist())) == 1:
            told.append("all prompts have the same mean score: the interval has no width, which is no certainty")
        missing = left_out(records)
        found.measured = [Measured(options.rubric.name, scores, "higher", len(samples), missing, options.about())]
    return Judgement(records, found, unanswered(records), told)


def questions_of(predictions: Predictions, options: Options) -> list[Question]:
    """All that `judge_predictions` asks."""
    return [question for row in predictions.rows if isinstance(question := _try(options, row), Question)]


def _try(options: Options, row: Prediction) -> Question | str:
    """The question about a row, or what the row lacks."""
    try:
        return judging(options.rubric, row, options.longest)
    except NotToBeAsked as lacking:
        return str(lacking)


def located(row: Prediction) -> Record:
    """Where a record is from."""
    return {"id": row.item, "sample": row.row.get("sample"), "row": row.origin}


def failure(reply: Reply) -> Record:
    """Why there is no score; null where there is one."""
    return {"left_out": reply.kind or None, "failure": reply.failure or None}


def left_out(records: Sequence[Record]) -> dict[str, int]:
    """How many records have no score, by reason."""
    kinds = [record["left_out"] for record in records if record["left_out"]]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def unanswered(records: Sequence[Record]) -> int:
    """Records without a score for which the server, and not what it said, is the reason."""
    return sum(record["left_out"] in (SILENT, NOT_ASKED) for record in records)


def empty_results(judged: Predictions, against: Predictions | None = None) -> Results:
    """The results of a file, or of one against another, of which nothing is measured yet."""
    files = [judged] if against is None else [judged, against]
    problems = [line for file in files for line in file.problems.summary()]
    name = " against ".join(file.path for file in files)
    return Results(name, len(judged.rows), judged.items, problems, digests=judged.digests())


def remarks(records: Sequence[Record], longest: int) -> list[str]:
    """Sentences on what stands behind the scores: texts shown in part, and the first rows of each kind left out."""
    told = []
    if in_part := sum(bool(record["shown_in_part"]) for record in records):
        told.append(f"{in_part} rows hold a text of more than {longest:,} characters, whose end the judge did not see")
    for kind, count in left_out(records).items():
        own = [record for record in records if record["left_out"] == kind]
        told += [f"{kind}: {record['row']}: {_printable(record['failure'])}" for record in own[:3]]
        if count > 3:
            told.append(f"{kind}: {count - 3:,} more")
    return told


def _printable(text: str) -> str:
    """On one line and without signs that steer a terminal: it may quote what a judge replied."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


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
    asked = [_try_pairs(options, pair) for pair in pairing.pairs]
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
    asked = [_try_pairs(options, pair) for pair in pair_up(one, other).pairs]
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


def _try_pairs(options: Options, pair: Pair) -> list[Question] | str:
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
        value = (judged[0].score + 1 - judged[1].score) / 2 if questions else 0.5
    return {
        **located(pair[0]),
        "against": pair[1].origin,
        **options.named(),
        "prompt_hashes": [question.digest for question in questions],
        "value": value,
        "first_shown": [one.score for one in judged] if len(judged) == 2 else None,
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
