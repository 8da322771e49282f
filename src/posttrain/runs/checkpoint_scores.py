"""What each evaluation of a run found: overall, by score of the environment, and beside it what training was paid.

Training and held-out scores that part are the first sign of a policy that games its reward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.recipe.rollout import SCORES
from posttrain.runs.tables import Table

Limits = tuple[float, float, float]
"""Mean and its 95% interval."""


@dataclass(frozen=True)
class Checkpoint:
    """One evaluation on the held-out seeds of the curve."""

    step: int
    overall: Limits
    """Success, or the mean return where the environment knows no success."""
    scores: Mapping[str, Limits]
    """What the environment reports besides, by name."""
    training: float | None
    """Mean return of the training episodes since the evaluation before; None where there were none."""


def checkpoint_scores(lines: Sequence[Mapping[str, Any]]) -> list[Checkpoint]:
    """The evaluations among the lines of a metrics log, in order of step; empty where nothing was played."""
    played = [line for line in lines if line["kind"] == "evaluation" and line.get(_overall(lines)) is not None]
    found: list[Checkpoint] = []
    for line in sorted({line["step"]: line for line in played}.values(), key=lambda line: line["step"]):
        since = found[-1].step if found else -1
        paid = [
            other["rollout/return"]
            for other in lines
            if other["kind"] == "train"
            and since < other["step"] <= line["step"]
            and other.get("rollout/return") is not None
        ]
        names = [
            key.removeprefix(SCORES)
            for key in line
            if key.startswith(SCORES) and not key.endswith(("_low", "_high")) and line[key] is not None
        ]
        scores = {name: _limits(line, f"{SCORES}{name}") for name in names}
        training = math.fsum(paid) / len(paid) if paid else None
        found.append(Checkpoint(line["step"], _limits(line, _overall(lines)), scores, training))
    return found


def score_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The names of the scores of any of them, each once."""
    return list(dict.fromkeys(name for one in checkpoints for name in one.scores))


def overall_name(lines: Sequence[Mapping[str, Any]]) -> str:
    """What `Checkpoint.overall` is, in words."""
    return "success" if _overall(lines) == "success" else "mean return"


def score_table(lines: Sequence[Mapping[str, Any]]) -> Table | None:
    """A row for each evaluation; None for fewer than two."""
    table = scores_of_runs({"": lines})
    if table is None or len(table.rows) < 2:
        return None
    return replace(table, title="", words=(), headings=table.headings[1:], rows=[row[1:] for row in table.rows])


def scores_of_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table | None:
    """A row for each evaluation of each run, by the name of the run; None where nothing was evaluated."""
    found = {name: checkpoint_scores(lines) for name, lines in runs.items()}
    found = {name: checkpoints for name, checkpoints in found.items() if checkpoints}
    if not found:
        return None
    names = score_names([one for checkpoints in found.values() for one in checkpoints])
    overall = dict.fromkeys(overall_name(runs[name]) for name in found)
    rows = [
        (
            name,
            str(one.step),
            *(_cell(one.scores.get(score)) for score in names),
            *(_cell(one.overall if own == overall_name(runs[name]) else None) for own in overall),
            "–" if one.training is None else f"{one.training:.3f}",
        )
        for name, checkpoints in found.items()
        for one in checkpoints
    ]
    counts = {line["n"] for name in found for line in runs[name] if line["kind"] == "evaluation" and line.get("n")}
    n = f", n = {' or '.join(str(count) for count in sorted(counts))}" if counts else ""
    note = (
        f"Held-out seeds of the curve{n}, on which the best checkpoint is chosen; in brackets 95% "
        "intervals over seeds. `training return` is the mean over the training episodes since the row before."
    )
    headings = ("run", "step", *names, *(f"overall {own}" for own in overall), "training return")
    return Table("Scores by checkpoint", headings, rows, note, words=("run",))


def _overall(lines: Sequence[Mapping[str, Any]]) -> str:
    knows = any(line["kind"] == "evaluation" and line.get("success") is not None for line in lines)
    return "success" if knows else "return"


def _limits(line: Mapping[str, Any], key: str) -> Limits:
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    return line[key], math.nan if low is None else low, math.nan if high is None else high


def _cell(limits: Limits | None) -> str:
    if limits is None:
        return "–"
    return f"{limits[0]:.3f}" + ("" if math.isnan(limits[1]) else f" [{limits[1]:.3f}, {limits[2]:.3f}]")
