"""What a judge makes of a file of predictions, by a rubric: a record of each row, and the mean with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.evaluation.asking import NOT_ASKED, SILENT, Progress, Reply, ask_all
from posttrain.evaluation.predictions import Prediction, Predictions
from posttrain.evaluation.results import Results
from posttrain.evaluation.rubrics import NotToBeAsked, Question, judging, rubric_digest, scale_in_words
from posttrain.evaluation.scores import item_means
from posttrain.evaluation.text_metrics import Measured
from posttrain.recipe.judge import JudgeServerRecipe
from posttrain.recipe.rubric import Rubric

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
        score = None if reply.judged is None else reply.judged.value
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
