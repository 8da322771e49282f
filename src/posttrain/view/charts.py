"""The charts of a run as data for the browser: curves with their 95% intervals, baselines, and what happened at which step."""

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from posttrain.recipe.rollout import SCORES
from posttrain.runs.metrics import parse_metrics
from posttrain.runs.panels import (
    GREEN,
    GREY,
    HELD_OUT,
    PHASES,
    PURPLE,
    RED,
    SKY,
    TITLES,
    TRAINING,
    Curve,
    Line,
    Panel,
    is_trained,
    keys_of,
    limits_of,
    metric_of,
    panels_of,
    series_of,
)
from posttrain.runs.reader import complete_lines, open_file
from posttrain.runs.tables import START

_LONGEST_MESSAGE = 600
_MOST_LOGS = 8
_GIB = 2**30
"""Runs whose metrics are kept in memory."""
SPEED = Panel("Tokens per second", "tokens per second", [Curve("speed/tokens_per_second", "tokens per second")])
BOUNDS = {"optimal": GREEN, "random": RED}
"""Colors of the baseline policies that bound a result."""


class Logs:
    """Cache of the metrics of recently viewed runs. Only appended bytes are read."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, _Log] = OrderedDict()
        self._lock = Lock()

    def read(self, path: Path) -> list[Line]:
        """All complete lines of the metrics log at `path`; raises `RunError` for a damaged line."""
        with self._lock:
            log = self._kept.pop(path, None) or _Log(path)
            lines = log.read()
            self._kept[path] = log
            while len(self._kept) > _MOST_LOGS:
                self._kept.popitem(last=False)
            return lines


class _Log:
    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._end, self._lines = path, 0, 0, list[Line]()

    def read(self) -> list[Line]:
        try:
            file = open_file(self.path)
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if (status.st_ino, status.st_size >= self._end) != (self._inode, True):
                self._inode, self._end, self._lines = status.st_ino, 0, []  # a resumed run replaced the file
            file.seek(self._end)
            read = 0

            def added() -> Iterator[bytes]:
                nonlocal read
                for raw in complete_lines(file, self.path):
                    read += len(raw)
                    yield raw

            # A new list: a reader of the old one must not see it grow.
            self._lines = [*self._lines, *parse_metrics(self.path, added())]
            self._end += read
        return self._lines


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    kind: str
    """`message`, `guard` or `failure`."""
    text: str


def marks_of(lines: Sequence[Line]) -> list[Mark]:
    """Messages, guards that fired, skipped updates, failed episodes, and values that were NaN or infinite."""
    marks = []
    for line in lines:
        step = line["step"]
        if line["kind"] == "warning":
            text = str(line.get("message", ""))[:_LONGEST_MESSAGE]
            marks.append(Mark(step, "guard" if "guard" in text else "message", text))
        if line.get("nonfinite"):
            names = ", ".join(map(str, line["nonfinite"][:5]))
            marks.append(Mark(step, "failure", f"NaN or infinite: {names}"))
        for key, what in (("optimizer/skipped", "skipped updates"), ("rollout/failed", "failed episodes")):
            if line["kind"] == "train" and isinstance(line.get(key), (int, float)) and line[key] > 0:
                marks.append(Mark(step, "failure", f"{what}: {line[key]:g}"))
    return marks


def charts_of(lines: list[Line]) -> list[dict[str, Any]]:
    """Every chart that the run has data for, in order of importance.

    A chart is `{id, section, title, unit, percent, whole, log, curves, levels}`. A curve is `{key, label, color, x, y}` and,
    if it has intervals, `low`, `high` and `n`; a level is a horizontal line `{label, value, color}`.
    """
    charts = [chart for panel, section in _panels(lines) if (chart := _chart(panel, section, lines)) is not None]
    shown = {curve["key"] for chart in charts for curve in chart["curves"]}
    phases = _phases(lines)
    rest = [key for key in keys_of(lines) if key not in shown and not key.startswith("time/")]
    others = (_chart(Panel(key, "value", [Curve(key, key)], from_zero=False), "Other metrics", lines) for key in rest)
    charts += [*([phases] if phases else []), *(chart for chart in others if chart is not None)]
    return [{**chart, "id": f"chart-{number}"} for number, chart in enumerate(charts)]


def _panels(lines: list[Line]) -> Iterator[tuple[Panel, str]]:
    keys = set(keys_of(lines))
    for key in ("success", "return"):
        if keys & {key, f"rollout/{key}"}:
            look = metric_of(key).panel
            curves = [Curve(f"rollout/{key}", "training episodes", TRAINING), Curve(key, "held-out", HELD_OUT)]
            yield Panel(look.title, look.unit, curves, look.percent, whole=look.whole, from_zero=False), "Results"
    scores = sorted({key.removeprefix("rollout/") for key in keys if key.removeprefix("rollout/").startswith(SCORES)})
    for key in scores:
        curves = [Curve(f"rollout/{key}", "training episodes", TRAINING), Curve(key, "held-out", HELD_OUT)]
        yield Panel(key.removeprefix(SCORES), "score", curves), "Results"
    names = [name for name in TITLES if name not in ("learning_curve", "time") and not name.startswith("metrics_vs")]
    for name in names:
        for panel in panels_of(name, lines):
            if name != "reward" or panel.title != "Return":
                yield panel, "Results" if name in ("rows", "preference") else TITLES[name]
    yield SPEED, "Speed and memory"
    memory = sorted(key for key in keys if key.startswith("memory/"))
    if memory:
        colors = (HELD_OUT, TRAINING, GREEN, PURPLE, RED, SKY, GREY)
        labels = [(key, key.removeprefix("memory/").replace("_", " ")) for key in memory]
        curves = [Curve(key, label, colors[i % 7]) for i, (key, label) in enumerate(labels)]
        yield Panel("Memory, largest so far", "GiB", curves), "Speed and memory"


def _chart(panel: Panel, section: str, lines: list[Line]) -> dict[str, Any] | None:
    curves = [drawn for curve in panel.curves if (drawn := _curve(curve, lines)) is not None]
    if not any(any(curve["y"]) or curve["nonfinite"] for curve in curves):
        return None
    levels = reference_of(panel)
    key = panel.curves[-1].key if panel.curves else ""
    levels += levels_of(lines, key) if section == "Results" else []
    look = {"title": panel.title, "unit": panel.unit, "percent": panel.percent, "whole": panel.whole}
    return {"section": section, **look, "log": panel.logarithmic, "curves": curves, "levels": levels}


def _curve(curve: Curve, lines: list[Line]) -> dict[str, Any] | None:
    series = series_of(lines, curve.key)
    if series is None:
        return None
    drawn = {
        "key": curve.key,
        "label": curve.label,
        "color": curve.color,
        "trained": is_trained(lines, curve.key),
        "x": series.steps,
        "y": [value / _GIB for value in series.values] if curve.key.startswith("memory/") else series.values,
        "nonfinite": series.nonfinite,
    }
    limits = {step: (low, high) for step, low, _, high in limits_of(lines, curve.key)}
    if limits:
        counts = counts_of(lines)
        drawn["low"] = [limits.get(step, (None, None))[0] for step in series.steps]
        drawn["high"] = [limits.get(step, (None, None))[1] for step in series.steps]
        drawn["n"] = [counts.get(step) for step in series.steps]
    return drawn


def counts_of(lines: list[Line]) -> dict[int, Any]:
    """Step -> the number of held-out episodes or rows of its evaluation."""
    evaluations = (line for line in lines if line["kind"] == "evaluation")
    return {line["step"]: line.get("n") or line.get("validation/rows") for line in evaluations}


def reference_of(panel: Panel) -> list[dict[str, Any]]:
    """The line of a panel that needs no measurement, such as guessing. The page adds its value to the label."""
    return (
        [{"label": panel.reference[1].partition(",")[0], "value": panel.reference[0], "color": GREY}]
        if panel.reference
        else []
    )


def levels_of(lines: list[Line], key: str) -> list[dict[str, Any]]:
    """The baseline policies that were measured on the metric `key`, the last measurement of each."""
    found = {line.get("policy"): line.get(key) for line in lines if line["kind"] == "baseline"}
    return [
        {
            "label": str(policy) if policy == START else f"{policy} policy",
            "value": float(value),
            "color": BOUNDS.get(str(policy), GREY),
        }
        for policy, value in found.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


def _phases(lines: list[Line]) -> dict[str, Any] | None:
    """Seconds of a step by phase, each curve on top of the one before it."""
    rows = [line for line in lines if line["kind"] == "train" and isinstance(line.get("time/step"), (int, float))]
    if not rows:
        return None
    steps, base = [row["step"] for row in rows], [0.0] * len(rows)
    curves: list[dict[str, Any]] = []
    for phase, color in (*PHASES.items(), ("other", "#C4C4C4")):
        seconds = [_seconds(row, phase) for row in rows]
        if sum(seconds) > 0.001 * sum(row["time/step"] for row in rows):
            base = [below + value for below, value in zip(base, seconds, strict=True)]
            curves.append(
                {
                    "key": f"time/{phase}",
                    "label": phase.replace("_", " "),
                    "color": color,
                    "trained": False,
                    "x": steps,
                    "y": list(base),
                    "own": seconds,
                    "nonfinite": [],
                }
            )
    look = {"title": "Time per phase", "unit": "seconds per step", "percent": False, "whole": False, "log": False}
    total = sum(sum(curve["own"]) for curve in curves) or 1.0
    for curve in curves:
        curve["label"] = f"{curve['label']}, {sum(curve['own']) / total:.0%}"
    return {"section": "Speed and memory", **look, "stacked": True, "curves": curves, "levels": []}


def _seconds(row: Line, phase: str) -> float:
    if phase != "other":
        value = row.get(f"time/{phase}")
        return float(value) if isinstance(value, (int, float)) else 0.0
    return max(0.0, row["time/step"] - sum(_seconds(row, known) for known in PHASES))
