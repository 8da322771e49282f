"""What each evaluation of a run found: overall, by score of the environment, and beside it what training was paid.

Training and held-out scores that part are the first sign of a policy that games its reward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    checkpoints = checkpoint_scores(lines)
    if len(checkpoints) < 2:
        return None
    names = score_names(checkpoints)
    rows = [
        (
            str(one.step),
            *(_cell(one.scores.get(name)) for name in names),
            _cell(one.overall),
            "–" if one.training is None else f"{one.training:.3f}",
        )
        for one in checkpoints
    ]
    n = next((line.get("n") for line in lines if line["kind"] == "evaluation" and line.get("n")), None)
    note = (
        f"Held-out seeds of the curve{f', n = {n}' if n else ''}, on which the best checkpoint is chosen; in brackets 95% "
        "intervals over seeds. `training return` is the mean over the training episodes since the row before."
    )
    return Table("", ("step", *names, f"overall {overall_name(lines)}", "training return"), rows, note, words=())


def _overall(lines: Sequence[Mapping[str, Any]]) -> str:
    knows = any(line["kind"] == "evaluation" and line.get("success") is not None for line in lines)
    return "success" if knows else "return"


def _limits(line: Mapping[str, Any], key: str) -> Limits:
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    return line[key], math.nan if low is None else low, math.nan if high is None else high


def _cell(limits: Limits | None) -> str:
    return "–" if limits is None else f"{limits[0]:.3f} [{limits[1]:.3f}, {limits[2]:.3f}]"
