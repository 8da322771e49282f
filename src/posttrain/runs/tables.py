"""Tables of results for terminals, reports and results.json."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from posttrain.errors import InputError
from posttrain.recipe.rollout import SCORES
from posttrain.runs.directory import write_atomically
from posttrain.runs.reader import read_json

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from posttrain.runs.log import Line


START = "start of this run"
TRAINED = "trained"
EVALUATED = "evaluated"
"""Policies of the lines `baseline` and `final` of a metrics log: the model before training, the exported one, and that of an evaluation."""
TASKS = {"table": "held-out {} of the table", "curve": "held-out {} of the curve", "training": "training {}"}
"""Part of a run -> the name of its rows or seeds in a report."""
Interval = tuple[float, float, float]
"""A value and the limits of its 95% interval, which are NaN if unknown."""


@dataclass(frozen=True)
class Table:
    """A table of text cells. Columns in `words` are left-aligned; the others hold numbers and are right-aligned."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str
    """The unit that `n` counts, and the kind of intervals."""
    words: tuple[str, ...] = ("policy", "note")
    played: bool = False
    """Whether the rows are policies in an environment."""

    def __post_init__(self) -> None:
        if {len(row) for row in self.rows} - {len(self.headings)}:
            raise ValueError("a row of the table has not one cell for each heading")

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """The table for a rich console. Numbers stay in one piece if the words beside them have room to wrap."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        widths = [max(map(len, column)) + 2 for column in zip(self.headings, *self.rows, strict=True)]
        numbers = self._numbers()
        words = [index for index in range(len(widths)) if index not in numbers]
        # Columns without room are wrapped, never truncated: the last column of words, then the others, then numbers.
        for folding in (words[-1:], words):
            others = sum(width for index, width in enumerate(widths) if index not in folding)
            if others + sum(min(widths[index], 12) for index in folding) <= options.max_width:  # at least 12 characters
                break
        else:
            folding = list(range(len(widths)))
        for index, heading in enumerate(self.headings):
            justify: Literal["left", "right"] = "right" if index in numbers else "left"
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=index not in folding)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        yield table

    def markdown(self) -> str:
        """The table in Markdown."""
        return markdown_table(self.headings, self.rows, self._numbers())

    def _numbers(self) -> list[int]:
        return [column for column, heading in enumerate(self.headings) if heading not in self.words]


UNIMPROVED = "training did not improve on the starting model; `model/` is the starting model"
"""Text for the case that the best checkpoint is that of step 0."""


def headline(lines: Sequence[Mapping[str, Any]]) -> str:
    """The result of a run in one sentence: the metric before and after, with n and 95% intervals; empty without one."""
    policies = {line["policy"]: line for line in lines if line["kind"] in ("baseline", "final") and "policy" in line}
    after = policies.get(TRAINED) or policies.get(EVALUATED) or {}
    for key, name, form, scale, better in _HEADLINES:
        if after.get(key) is None:
            continue
        before = policies.get(START, {})
        data, n = ("rows", after.get("test/rows")) if key.startswith("test/") else ("seeds", after.get("n"))
        where = f"{name} on {n:,} held-out {data}"
        now = _with_limits(after, key, form, scale)
        interval = "" if after.get(f"{key}_low") is None else ", 95% interval"
        if after.get("chosen") == UNIMPROVED:
            return f"Training did not improve on the starting model: {where[0].lower()}{where[1:]} is {now}{interval}."
        if before.get(key) is None:
            return f"{where} is {now}{interval}."
        change = after[key] - before[key]
        if change == 0:
            return f"{where} stayed at {now}{interval}."
        verb = "improved" if (change > 0) == better else "got worse"
        (_, low, high), (_, low_after, high_after) = interval_of(before, key), interval_of(after, key)
        overlap = low <= high_after and low_after <= high  # False for unknown limits
        intervals = "; the 95% intervals overlap" if overlap else interval and f"{interval}s"
        return f"{where} {verb} from {_with_limits(before, key, form, scale)} to {now}{intervals}."
    return ""


_HEADLINES = (
    ("success", "Success", "{:.1f}", 100, True),
    ("return", "The mean return", "{:.3f}", 1, True),
    ("test/accuracy", "Accuracy", "{:.1f}", 100, True),
    ("test/loss", "The loss", "{:.4f}", 1, False),
)
"""Key, name, format, factor, and whether larger is better. The first metric that a run has is its headline."""


def _with_limits(line: Mapping[str, Any], key: str, form: str, scale: float) -> str:
    numbers = interval_of(line, key)
    value, low, high = (form.format(scale * number) for number in numbers)
    value += "%" if scale == 100 else ""
    return value if any(map(math.isnan, numbers)) else f"{value} [{low}, {high}]"


def plain_numbers(text: str) -> str:
    """`text` with powers of ten in short form: 1.4e-5 and 3e6, not 1.4e-05 and 3e+06."""
    power = r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?)0*(\d+)(?!\w)"
    return re.sub(power, lambda match: f"{match[1]}e{match[2].lstrip('+')}{match[3]}", text)


def checkpoint_note(line: Mapping[str, Any]) -> str:
    """Which checkpoint the `final` line of a metrics log is about."""
    chosen = "the starting model" if line["chosen"] == UNIMPROVED else line["chosen"]
    return f"step {line['best_step']}, {chosen}"


POLICY_HEADINGS = ("policy", "success", "mean return", "n", "note")


@dataclass(frozen=True)
class PolicyRow:
    """Result of one policy in an environment. Rates are in [0, 1]; `n` is the number of seeds; None means unknown."""

    policy: str
    success: float | None
    interval: tuple[float, float] | None
    """95% interval of the success rate; None if the rate is exact for these seeds."""
    mean_return: float | None
    n: int
    note: str = ""
    return_interval: tuple[float, float] | None = None
    """95% interval of the mean return; None if it is exact or unknown."""
    scores: Mapping[str, Interval] = field(default_factory=dict)
    """Further scores of the environment, by name."""
    return_source: str = ""
    """What gave the return (`posttrain.recipe.rollout.return_source`); empty if unknown."""

    @classmethod
    def from_values(cls, policy: str, values: Mapping[str, Any], note: str = "") -> "PolicyRow":
        """A row from the values of an evaluation or baseline line: `success`, `return`, their limits, scores and `n`."""

        def limits(name: str) -> tuple[float, float] | None:
            low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
            return None if low is None or high is None or math.isnan(low) else (low, high)

        success, mean_return = ((values.get(name), limits(name)) for name in ("success", "return"))
        scores = {key.removeprefix(SCORES): interval_of(values, key) for key in score_keys(values)}
        source = values.get("return_source", "")
        return cls(policy, *success, mean_return[0], int(values["n"]), note, mean_return[1], scores, source)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `POLICY_HEADINGS`; rates are percentages with one decimal."""
        unknown = (math.nan, math.nan)
        success = None if self.success is None else (self.success, *(self.interval or unknown))
        mean_return = None if self.mean_return is None else (self.mean_return, *(self.return_interval or unknown))
        exact = " exact" if self.success is not None and self.interval is None else ""
        return self.policy, score_cell(success, percent=True) + exact, score_cell(mean_return), str(self.n), self.note


def policy_tables(rows: Sequence[PolicyRow], title: str = "") -> list[Table]:
    """The table of success and return, and one of the further scores if the environment reports any."""
    note = (
        "`n` is the number of environment seeds. Intervals are 95% over seeds; `exact` values are computed for "
        "these seeds, not sampled."
    )
    sampled = [row for row in rows if row.mean_return is not None and (row.success is None or row.interval)]
    if sampled and not any(row.return_interval for row in sampled):
        note += (
            " Mean returns have no interval, because their range is unknown and the seeds are few, or their returns alike; an "
            "environment declares the range in the class method `return_range`."
        )
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    sources = list(dict.fromkeys(row.return_source for row in rows if row.mean_return is not None))
    headings: tuple[str, ...] = POLICY_HEADINGS
    cells = [row.cells for row in rows]
    if len(sources) > 1:
        # Returns from different rewards are not comparable, so each has a column.
        named = tuple(f"mean return, {source}" if source else "mean return" for source in sources)
        headings = (*POLICY_HEADINGS[:2], *named, *POLICY_HEADINGS[3:])
        cells = [
            (*one[:2], *(one[2] if row.return_source == source else "–" for source in sources), *one[3:])
            for row, one in zip(rows, cells, strict=True)
        ]
        note += " Mean returns from different rewards are not comparable, so each reward has a column."
    tables = [Table(title, headings, cells, note, played=True)]
    if names:
        cells = [(row.policy, *(score_cell(row.scores.get(name)) for name in names)) for row in rows]
        note = "Means over the seeds that have the score, with 95% intervals."
        tables.append(Table(f"{title}: scores" if title else "scores", ("policy", *names), cells, note, played=True))
    return tables


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A Markdown table; the columns in `right` are right-aligned."""
    rules = ["---:" if column in right else "---" for column in range(len(headings))]
    body = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(headings), rules, *body])


@dataclass(frozen=True)
class Checkpoint:
    """One evaluation on the held-out seeds of the curve."""

    step: int
    overall: Interval
    """Success rate, or the mean return if the environment does not report success."""
    scores: Mapping[str, Interval]
    """Scores that the environment reports, by name."""
    training: float | None
    """Mean return of the training episodes since the previous evaluation; None if there were none."""


def checkpoint_scores(lines: Sequence["Line"]) -> list[Checkpoint]:
    """The evaluations in the lines of a metrics log, in order of step; empty if no episodes were evaluated."""
    from posttrain.runs.log import Log  # imports numpy, which a wrong path need not wait for

    log = Log.of(lines)
    overall = overall_name(log).removeprefix("mean ")
    evaluated = {line["step"]: line for line in log if line["kind"] == "evaluation" and line.get(overall) is not None}
    steps = sorted(evaluated)
    trained, returns = log.trained("rollout/return")
    ends = trained.searchsorted(steps, side="right")
    checkpoints: list[Checkpoint] = []
    for step, start, end in zip(steps, [0, *ends], ends, strict=False):
        line, since = evaluated[step], returns[start:end].tolist()
        scores = {key.removeprefix(SCORES): interval_of(line, key) for key in score_keys(line) if line[key] is not None}
        training = math.fsum(since) / len(since) if since else None
        checkpoints.append(Checkpoint(step, interval_of(line, overall), scores, training))
    return checkpoints


def score_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The names of all scores of `checkpoints`, without repetition."""
    return list(dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint.scores))


def is_share(name: str, checkpoints: Sequence[Checkpoint]) -> bool:
    """Whether the score `name` is a share of episodes: no mean grade, and no value or limit is outside of [0, 1]."""
    numbers = [number for one in checkpoints for number in one.scores.get(name, ())]
    return name not in ("judge", "score") and all(0 <= number <= 1 for number in numbers if not math.isnan(number))


def overall_name(lines: Sequence[Mapping[str, Any]]) -> str:
    """Name of the metric in `Checkpoint.overall`: `success` or `mean return`."""
    reports_success = any(line["kind"] == "evaluation" and line.get("success") is not None for line in lines)
    return "success" if reports_success else "mean return"


def score_table(lines: Sequence["Line"]) -> Table | None:
    """A table with one row per evaluation; None for fewer than two evaluations."""
    table = scores_of_runs({"": lines})
    if table is None or len(table.rows) < 2:
        return None
    return replace(table, title="", words=(), headings=table.headings[1:], rows=[row[1:] for row in table.rows])


def evaluated_table(name: str, lines: Sequence["Line"]) -> Table | None:
    """`score_table` of checkpoints that were evaluated by separate runs (`evaluated_checkpoints`)."""
    table = score_table(lines)
    if table is None:
        return None
    counts = sorted({line["n"] for line in lines if line["kind"] == "evaluation" and line.get("n")})
    note = (
        f"Separate evaluations, n = {' or '.join(map(str, counts))} tasks. Brackets: 95% intervals over tasks. `training "
        "return`: mean over the training episodes since the previous row."
    )
    return replace(table, title=f"Scores by checkpoint: {name}", note=note)


def scores_of_runs(runs: Mapping[str, Sequence["Line"]]) -> Table | None:
    """A table with one row per evaluation of each run (name -> lines); None if nothing was evaluated."""
    evaluated = {name: checkpoint_scores(lines) for name, lines in runs.items()}
    evaluated = {name: checkpoints for name, checkpoints in evaluated.items() if checkpoints}
    if not evaluated:
        return None
    names = score_names([one for checkpoints in evaluated.values() for one in checkpoints])
    overall = dict.fromkeys(overall_name(runs[name]) for name in evaluated)
    rows = [
        (
            name,
            str(one.step),
            *(score_cell(one.scores.get(score)) for score in names),
            *(score_cell(one.overall if measure == overall_name(runs[name]) else None) for measure in overall),
            "–" if one.training is None else f"{one.training:.3f}",
        )
        for name, checkpoints in evaluated.items()
        for one in checkpoints
    ]
    counts = {line["n"] for name in evaluated for line in runs[name] if line["kind"] == "evaluation" and line.get("n")}
    n = f", n = {' or '.join(map(str, sorted(counts)))}" if counts else ""
    note = (
        f"Held-out seeds of the curve{n}, which also select the best checkpoint. Brackets: 95% intervals over seeds. "
        "`training return`: mean over the training episodes since the previous row."
    )
    headings = ("run", "step", *names, *(f"overall {measure}" for measure in overall), "training return")
    return Table("Scores by checkpoint", headings, rows, note, words=("run",))


def score_keys(line: Mapping[str, Any]) -> list[str]:
    """The keys of a line that are scores of the environment, without their limits."""
    return [key for key in line if key.startswith(SCORES) and not key.endswith(("_low", "_high"))]


def interval_of(line: Mapping[str, Any], key: str) -> Interval:
    """The value of `key` in a metrics line with its limits `key_low` and `key_high`."""
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    return line[key], math.nan if low is None else low, math.nan if high is None else high


def score_cell(interval: Interval | None, percent: bool = False) -> str:
    """`0.500 [0.400, 0.600]`, or `50.0% [40.0, 60.0]`, without the limits if they are NaN; a dash for None."""
    if interval is None:
        return "–"
    value, low, high = (100 * number for number in interval) if percent else interval
    form, unit = (".1f", "%") if percent else (".3f", "")
    return f"{value:{form}}{unit}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


IMPROVED, NOTHING, WORSE, UNSHOWN = "improved", "nothing was learned", "got worse", "not shown"


@dataclass(frozen=True)
class Verdict:
    """Whether a training run changed its held-out measure (`posttrain.evaluation.verdict`)."""

    outcome: str
    """`IMPROVED`, `NOTHING`, `WORSE`, or `UNSHOWN`: measured on too few tasks to show anything."""
    sentence: str
    reasons: Sequence[str] = ()
    """The most likely reasons for `NOTHING` and `WORSE`, by the metrics of the run."""

    @property
    def lines(self) -> list[str]:
        """The sentence, then the reasons."""
        return [self.sentence, *(f"likely reason: {reason}" for reason in self.reasons)]


@dataclass(frozen=True)
class Results:
    """The content of `results.json` in a run directory."""

    tables: Sequence[Table] = ()
    """The final tables."""
    policies: Sequence[PolicyRow] = ()
    """Empty for a run without an environment."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Part of the run -> the rows of files that were its tasks; empty for generated tasks."""
    return_source: str = ""
    """What gave the returns of the model (`return_source`); empty if it is unknown."""
    verdict: Verdict | None = None
    """None for a run that has none."""


_RESULTS = TypeAdapter(Results)


def write_results(directory: Path, results: Results) -> None:
    """Write `results.json` in the run directory."""
    write_atomically(directory / "results.json", json.dumps(asdict(results), indent=1) + "\n")


def read_run_results(directory: Path) -> Results:
    """The final results of a run; empty before its end. InputError for a file of another form."""
    file = directory / "results.json"
    if not os.path.lexists(file):
        return Results()
    try:
        return _RESULTS.validate_python(read_json(file))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{file} has another form ({where}: {first['msg']}); evaluate the model again") from error


def read_verdict(directory: Path) -> Verdict | None:
    """The verdict on a training run; None before its end, and for a run that has none."""
    return read_run_results(directory).verdict


def audit_file(run: Path, step: int) -> Path:
    """The file with the tasks on which an audit of the evaluation of `step` and the reward differ most."""
    return run / "audit" / f"step_{step:06d}.json"


def audit_table(run: Path, step: int) -> Table:
    """These tasks: both scores and the answer at the first evaluation and now, side by side. InputError for a damaged file."""
    file = audit_file(run, step)
    stored = read_json(file, run=run)
    try:
        first, now = (int(at) for at in stored["steps"])
        rows = [
            (
                str(one["task"]),
                *(" to ".join(f"{float(value):.3g}" for value in one[scorer]) for scorer in ("reward", "audit")),
                *(" ".join(str(answer).split())[:400] for answer in one["answers"]),
            )
            for one in stored["apart"]
        ]
        return Table(
            "Where reward and audit differ most",
            ("task", "reward", "audit", f"answer at step {first}", f"answer at step {now}"),
            rows,
            "The tasks on which the reward has risen most against the audit, in standard deviations.",
            words=("task", f"answer at step {first}", f"answer at step {now}"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is damaged ({type(error).__name__}); delete it") from error


def show_line(console: "Console", line: str, indent: int = 0) -> None:
    """Print a sentence: wrapped between words in a terminal, on one line in a file or pipe."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding(Text(line), (0, 0, 0, indent)))
    else:
        console.print(" " * indent + line, markup=False, highlight=False, soft_wrap=True)
