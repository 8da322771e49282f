"""What a trial's metrics say: its learning curve on held-out data, the evaluation that counts, and its limits."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RunError
from posttrain.recipe.study import Limit, Objective

Line = Mapping[str, Any]


class NotMeasured(RunError):
    """A run that came to its end and has not a single value of a metric that the study is judged by."""


@dataclass(frozen=True)
class Outcome:
    """The evaluation of a run that counts."""

    step: int
    """The step it was made after."""
    value: float
    """The objective."""
    limited: dict[str, float]
    """Metric of a limit -> its value there."""
    beyond: dict[str, float]
    """The same -> how far it is beyond its limit; at most 0 where it is within."""

    @property
    def feasible(self) -> bool:
        """Whether every limit is kept."""
        return all(distance <= 0 for distance in self.beyond.values())


def curve(lines: Sequence[Line], objective: Objective) -> list[tuple[int, float]]:
    """(step, value) of the evaluations after the start that have a value, in order."""
    found = [(line["step"], line.get(objective.metric)) for line in _evaluations(lines) if line["step"] > 0]
    return [(step, float(value)) for step, value in found if value is not None]


def outcome(lines: Sequence[Line], objective: Objective) -> Outcome:
    """The best evaluation after the start, the first of equals, with its limits.

    The start is left out: all trials share it, so it says nothing of a trial. Raises `RunError` where no evaluation
    has a value, `NotMeasured` where none has the metric at all, or a limit's metric is not there.
    """
    points = curve(lines, objective)
    if not points:
        raise _nothing_measured(lines, objective.metric)
    sign = 1 if objective.direction == "maximize" else -1
    step, value = max(points, key=lambda point: sign * point[1])
    limited = {metric: _limited(lines, metric, step) for metric in objective.within}
    beyond = {metric: _beyond(limited[metric], limit) for metric, limit in objective.within.items()}
    return Outcome(step, value, limited, beyond)


def _evaluations(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "evaluation"]


def _limited(lines: Sequence[Line], metric: str, step: int) -> float:
    at = next(line for line in _evaluations(lines) if line["step"] == step)
    if at.get(metric) is not None:
        return float(at[metric])
    before = max((line["step"] for line in _evaluations(lines) if line["step"] < step), default=-1)
    found = [line.get(metric) for line in lines if line["kind"] == "train" and before < line["step"] <= step]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    if not numbers:
        known = sorted({key for line in lines if line["kind"] == "train" for key in line if key.startswith("policy/")})
        raise NotMeasured(f"neither evaluations nor training steps have {metric} of objective.within{_such_as(known)}")
    return math.fsum(numbers) / len(numbers)


def _beyond(value: float, limit: Limit) -> float:
    return value - limit.max if limit.max is not None else (limit.min or 0.0) - value


def _nothing_measured(lines: Sequence[Line], metric: str) -> RunError:
    after = [line for line in _evaluations(lines) if line["step"] > 0]
    if not after:
        return RunError("it made no evaluation after its start")
    if any(metric in line for line in after):
        return RunError(f"{metric} was never a number")
    names = ("validation/", "success", "return", "score/")
    known = [key for key in after[-1] if key.startswith(names) and not key.endswith(("_low", "_high"))]
    # The nearest names first: a mistyped one is the usual cause.
    near = difflib.get_close_matches(metric, known, len(known) or 1, 0.7)
    return NotMeasured(
        f"its evaluations have no {metric}{_such_as([*near, *(key for key in known if key not in near)])}"
    )


def _such_as(known: Sequence[str]) -> str:
    return f"; they have {', '.join(known[:6])}" if known else ""
