"""Charts of one run or of several: the numbers that pictures and the live page draw, with 95% intervals and baselines."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.recipe.metrics import GREEN, GREY, HELD_OUT, PURPLE, RED, SKY, TRAINING, Curve, Panel
from posttrain.recipe.rollout import SCORES
from posttrain.runs.intervals import FEWEST_SEEDS
from posttrain.runs.log import Line, Log
from posttrain.runs.panels import (
    DOMAINS,
    MOST_POINTS,
    PHASES,
    TITLES,
    MetricLook,
    Sampling,
    Series,
    is_trained,
    keys_of,
    labeled,
    limits_of,
    metric_of,
    panels_of,
    series_of,
)
from posttrain.runs.sources import Bundle, mean_over_seeds
from posttrain.runs.tables import START, interval_of

SMOOTHED_STEPS = 11
"""Window of the moving mean in steps; odd, so that the window is centered."""
DASHES = ("-", "--", ":", "-.")
"""Dash patterns of curves. Colors vary first, so a few curves differ only by color."""
MOST_CURVES = len(DOMAINS) * len(DASHES)
"""Maximum number of curves that can be distinguished."""
SCORES_AGAINST = "metrics_vs_"
"""Prefix of the names in `TITLES` of figures that are no charts: scores against something else than the step."""
_LONGEST = 1e12
"""Seconds of the longest phase; a larger number of someone else's log would overflow the sums."""
_FINAL = {
    "success": ("success", "on the final seeds, {:.1%}"),
    "return": ("return", "on the final seeds, {:.3f}"),
    "validation/loss": ("test/loss", "on the final rows, {:.4f}"),
    "validation/accuracy": ("test/accuracy", "on the final rows, {:.1%}"),
}
"""Held-out metric -> the metric of the final table drawn beside it, and what its label says."""


@dataclass(frozen=True)
class Trace:
    """One curve of a chart, its points in order of step."""

    key: str
    label: str
    color: str
    x: np.ndarray
    """[n] int64, the steps."""
    y: np.ndarray
    """[n] float64."""
    trained: bool = False
    """Whether the metric is measured at training steps, so that a moving mean of it makes sense."""
    nonfinite: Sequence[int] = ()
    """Steps at which the metric was NaN or infinite."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """[n], limits of the 95% intervals; None where there is none."""
    n: Sequence[int | None] | None = None
    """[n], held-out episodes or rows, or training seeds, behind each interval."""
    dash: int = 0
    """Index in `DASHES`."""
    own: np.ndarray | None = None
    """[n], the part of y that the curve adds to those below it in a stacked chart."""

    def values(self) -> dict[str, Any]:
        """The curve as JSON values, with at most about `MOST_POINTS` points."""
        kept = thinned(self.y)
        columns = {name: getattr(self, name) for name in ("x", "y", "low", "high", "n", "own")}
        picked = {name: [one[i] for i in kept] for name, one in columns.items() if isinstance(one, list)}
        picked |= {name: one[kept].tolist() for name, one in columns.items() if isinstance(one, np.ndarray)}
        about = {"key": self.key, "label": self.label, "color": self.color, "dash": self.dash, "trained": self.trained}
        return {**about, "nonfinite": list(self.nonfinite), **picked}


@dataclass(frozen=True)
class Chart:
    """The curves on one pair of axes. Flags as in `Panel`."""

    figure: str
    """File name of the picture that shows it, without suffix; empty: only the page does."""
    section: str
    panel: Panel
    traces: Sequence[Trace]
    levels: Sequence[Mapping[str, Any]] = ()
    """Horizontal lines: `label`, `value`, `color`."""
    results: Sequence[tuple[str, int, tuple[float, float, float]]] = ()
    """(label, step, value with limits) of final results."""
    subtitle: str = ""
    """What the metric is, where the title is above the whole figure."""
    note: str = ""
    """How curves are averaged."""
    stacked: bool = False

    def values(self) -> dict[str, Any]:
        """The chart as JSON values for the page."""
        panel = self.panel
        look = {"unit": panel.unit, "percent": panel.percent, "whole": panel.whole, "log": panel.logarithmic}
        title = f"{panel.title}, {self.subtitle.partition(' · ')[0]}" if " · " in self.subtitle else panel.title
        about = {"section": self.section, "title": title, **look, "stacked": self.stacked}
        results = [
            {"label": label, "step": step, "value": value, "low": low, "high": high}
            for label, step, (value, low, high) in self.results
        ]
        curves = [trace.values() for trace in self.traces]
        return {**about, "curves": curves, "levels": list(self.levels), "results": results}


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    kind: str
    """`message`, `guard` or `failure`."""
    text: str


def marks_of(lines: Sequence[Line]) -> list[Mark]:
    """Messages, guards that fired, skipped updates, failed episodes, and values that were NaN or infinite."""
    log = Log.of(lines)
    bad = [*log.nonfinite, *((line["step"], line["nonfinite"]) for line in log if line.get("nonfinite"))]
    marks = [Mark(step, "failure", f"NaN or infinite: {', '.join(map(str, names[:5]))}") for step, names in bad]
    for key, what in (("optimizer/skipped", "skipped updates"), ("rollout/failed", "failed episodes")):
        points = zip(*log.trained(key), strict=True)
        marks += [Mark(int(step), "failure", f"{what}: {value:g}") for step, value in points if value > 0]
    for line in log:
        if line["kind"] == "warning":
            text = str(line.get("message", ""))[:600]
            marks.append(Mark(line["step"], "guard" if "guard" in text else "message", text))
    return sorted(marks, key=lambda mark: mark.step)


def charts_of(lines: Sequence[Line], sampling: Sampling = Sampling()) -> Iterator[Chart]:
    """Every chart that the run has data for, in order of importance. `sampling`: for the labels of training and held-out
    episodes on the same axes.
    """
    log, shown = Log.of(lines), set[str]()
    for figure, section, panel in _panels(log, sampling):
        if (chart := _chart(figure, section, panel, log)) is not None:
            shown |= {trace.key for trace in chart.traces}
            yield chart
    yield from _phases(log)
    for key in keys_of(log):
        if key not in shown and not key.startswith("time/"):
            panel = Panel(key, "value", [Curve(key, key)], from_zero=False)
            chart = _chart("", "Other metrics", panel, log)
            yield from [chart] if chart is not None else []


def axes_of(lines: Sequence[Line]) -> dict[str, tuple[list[int], list[float]]]:
    """What a chart may have on its x axis instead of the step: at each training step, minutes, and the numbers of tokens
    trained and of episodes played until then.
    """
    log, axes = Log.of(lines), {}
    for name, key in (("minutes", "time/run"), ("tokens", "tokens/trained"), ("episodes", "rollout/episodes")):
        steps, values = log.trained(key)
        until = np.maximum.accumulate(values) / 60 if name == "minutes" else np.cumsum(np.maximum(values, 0))
        if len(steps) and until[-1] > 0:
            kept = thinned(until)
            axes[name] = steps[kept].tolist(), until[kept].tolist()
    return axes


def _panels(log: Log, sampling: Sampling) -> Iterator[tuple[str, str, Panel]]:
    """(figure, section, panel)."""
    keys = set(keys_of(log))
    results = [key for key in ("success", "return") if keys & {key, f"rollout/{key}"}]
    bases = {key.removeprefix("rollout/") for key in keys}
    drawn: list[tuple[str, Any]] = []
    for key in [*results, *sorted(key for key in bases if key.startswith(SCORES))]:
        # A reward of 0 or 1 makes success, return and its score one curve.
        numbers = [series_of(log, name) for name in (f"rollout/{key}", key)]
        if any(numbers == other for _, other in drawn):
            continue
        drawn.append((key, numbers))
        look, figure = Panel(key.removeprefix(SCORES), "score", ()), ""
        if key in results:
            look = replace(metric_of(key).panel, from_zero=False, smoothed=True)
            figure = "learning_curve" if key == results[0] else "reward"
        curves = [
            Curve(f"rollout/{key}", labeled("training episodes", sampling.training), TRAINING),
            Curve(key, labeled("held-out seeds", sampling.held_out), HELD_OUT),
        ]
        yield figure, "Results", replace(look, curves=curves)
    for name in TITLES:
        for panel in panels_of(name, log):
            if name != "reward" or panel.title != "Return":
                yield name, "Results" if name in ("rows", "preference") else TITLES[name], panel
    speed, busy = Curve("speed/tokens_per_second", "tokens per second"), Curve("speed/gpu_utilization", "utilization")
    yield "", "Speed and memory", Panel("Tokens per second", "tokens per second", [speed])
    yield "", "Speed and memory", Panel("GPU utilization", "share of a second", [busy], percent=True, whole=True)
    memory = sorted(key for key in keys if key.startswith("memory/"))
    if memory:
        colors = itertools.cycle((HELD_OUT, TRAINING, GREEN, PURPLE, RED, SKY, GREY))
        labels = ((key, key.removeprefix("memory/").replace("_", " ")) for key in memory)
        curves = [Curve(key, label, color) for (key, label), color in zip(labels, colors, strict=False)]
        yield "", "Speed and memory", Panel("Memory, largest so far", "GiB", curves)


def _chart(figure: str, section: str, panel: Panel, log: Log) -> Chart | None:
    """The chart of a panel; None without data, and for metrics that are 0 at every step, such as skipped updates. Results
    are shown also where they are 0."""
    traces = []
    for curve in panel.curves:
        if (series := series_of(log, curve.key)) is not None:
            trace = _of_series(curve.key, curve.label, curve.color, series, log)
            traces.append(replace(trace, y=trace.y / 2**30) if curve.key.startswith("memory/") else trace)
    if not traces or (section != "Results" and not any(trace.y.any() or trace.nonfinite for trace in traces)):
        return None
    levels = levels_of(log, panel.curves[-1].key) if section == "Results" else []
    results = [result for curve in panel.curves for result in _results(log, curve.key)]
    return Chart(figure, section, panel, traces, [*_reference(panel), *levels], results, panel.title)


def _of_series(key: str, label: str, color: str, series: Series, log: Log, dash: int = 0) -> Trace:
    x, y = np.array(series.steps, np.int64), np.array(series.values, np.float64)
    trace = Trace(key, label, color, x, y, is_trained(log, key), series.nonfinite, dash=dash)
    limits = {step: (low, high) for step, low, _, high in limits_of(log, key)}
    if not limits:
        return trace
    low, high = ([limits.get(step, (None, None))[side] for step in series.steps] for side in (0, 1))
    evaluations = (line for line in log if line["kind"] == "evaluation")
    held_out = {line["step"]: line.get("n") or line.get("validation/rows") for line in evaluations}
    return replace(trace, low=low, high=high, n=[held_out.get(step) for step in series.steps])


def _reference(panel: Panel) -> list[dict[str, Any]]:
    """The line of a panel that needs no measurement, such as guessing."""
    if panel.reference is None:
        return []
    return [{"label": panel.reference[1].partition(",")[0], "value": panel.reference[0], "color": GREY}]


def levels_of(lines: Sequence[Line], key: str) -> list[dict[str, Any]]:
    """The baseline policies that were measured on the metric `key`, the last measurement of each, best first.

    The starting model is no level: it was measured on other tasks than the curve, which begins with it.
    """
    key = key.removeprefix("rollout/")
    last = {str(line.get("policy")): line.get(key) for line in Log.of(lines) if line["kind"] == "baseline"}
    last.pop(START, None)
    known = {name: float(v) for name, v in last.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    others = itertools.cycle((GREY, PURPLE, SKY, "#222222"))
    ordered = sorted(known, key=lambda name: -known[name])
    colors = {"optimal": GREEN, "random": RED}
    return [
        {"label": f"{one} policy", "value": known[one], "color": colors.get(one) or next(others)} for one in ordered
    ]


def _results(log: Log, key: str) -> Iterator[tuple[str, int, tuple[float, float, float]]]:
    """The rows of the final table beside the held-out metric `key`, at the steps of their checkpoints: they were measured on
    other tasks than the curve.
    """
    measured, label = _FINAL.get(key, ("", ""))
    for line in log:
        start = line["kind"] == "baseline" and line.get("policy") == START
        if (start or (line["kind"] == "final" and "best_step" in line)) and line.get(measured) is not None:
            value, low, high = interval_of(line, measured)
            limits = (value, value, value) if math.isnan(low) or math.isnan(high) else (value, low, high)
            name = START if start else "result"
            yield f"{name} {label.format(value)}", 0 if start else line["best_step"], limits


def _phases(log: Log) -> Iterator[Chart]:
    """Seconds of a step by phase, each curve on top of the one before it."""
    steps, total = log.trained("time/step")
    if not len(steps):
        return
    total = np.clip(total, 0.0, _LONGEST)
    place = {int(step): number for number, step in enumerate(steps)}
    parts = {}
    for phase in PHASES:
        seconds = np.zeros(len(steps))
        for step, value in zip(*log.trained(f"time/{phase}"), strict=True):
            if (at := place.get(int(step))) is not None:
                seconds[at] = min(max(value, 0.0), _LONGEST)
        parts[phase] = seconds
    # Include the time outside all phases, so that the height is the duration of a step.
    parts["other"] = np.maximum(0.0, total - sum(parts.values()))
    parts = {phase: seconds for phase, seconds in parts.items() if seconds.sum() > 0.001 * total.sum()}
    whole, base, traces = sum(seconds.sum() for seconds in parts.values()) or 1.0, np.zeros(len(steps)), []
    for phase, seconds in parts.items():
        base = base + seconds
        label = f"{phase.replace('_', ' ')}, {seconds.sum() / whole:.0%}"
        traces.append(Trace(f"time/{phase}", label, PHASES.get(phase, "#C4C4C4"), steps, base, own=seconds))
    panel = Panel("Time per phase", "seconds per step", ())
    yield Chart("time", "Speed and memory", panel, traces, stacked=True)


# -- several runs -----------------------------------------------------------------------------------------------------


def chart_of_runs(
    metric: MetricLook, bundles: Sequence[Bundle], smooth: bool = False
) -> tuple[Chart | None, list[str]]:
    """The chart of one metric, with a curve per run or mean over seeds; None if no run has a value.

    Returns warnings about omitted runs too. `smooth`: average moving means, as pictures show them.
    """
    panel, drawn, warnings = metric.panel, [], list[str]()
    for number, bundle in enumerate(bundles):
        curves = [series for source in bundle.sources if (series := series_of(source.lines, metric.key)) is not None]
        if curves and len(curves) < len(bundle.sources):
            missing = len(bundle.sources) - len(curves)
            warnings.append(f"{metric.key}: {bundle.title} is left out because {missing} of its runs have no value")
        elif curves:
            drawn.append((number, bundle, curves))
    trained = all(is_trained(source.lines, metric.key) for _, bundle, _ in drawn for source in bundle.sources)
    averaged = any(len(curves) > 1 for *_, curves in drawn)
    geometric = averaged and panel.logarithmic
    geometric = geometric and all(min(series.values, default=1) > 0 for *_, curves in drawn for series in curves)
    traces = []
    for number, bundle, curves in drawn:
        color, dash = DOMAINS[number % len(DOMAINS)], number // len(DOMAINS) % len(DASHES)
        key = f"{metric.key} {bundle.label}"
        if len(curves) == 1:
            trace = _of_series(metric.key, bundle.title, color, curves[0], Log.of(bundle.sources[0].lines), dash)
            if averaged and trace.low:
                trace = replace(trace, low=None, high=None, n=None)  # not to be mixed up with intervals over seeds
            traces.append(replace(trace, key=key))
            continue
        longest = max(len(series.steps) for series in curves)
        smoothing = smooth and trained and longest > 2 * SMOOTHED_STEPS
        if smoothing:
            curves = [Series(one.steps[2:-2], smoothed(one.values).tolist(), one.nonfinite) for one in curves]
        steps, values, *limits = mean_over_seeds(curves, geometric, panel.percent)
        if not steps:
            warnings.append(f"{metric.key}: {bundle.title} is left out because its runs have no step in common")
            continue
        low, high = ([None if math.isnan(value) else value for value in side] for side in limits)
        nonfinite = sorted({step for series in curves for step in series.nonfinite})
        x, y, n = np.array(steps), np.array(values), [len(curves)] * len(steps)
        traces.append(Trace(key, bundle.title, color, x, y, trained and not smoothing, nonfinite, low, high, n, dash))
    if not traces:
        return None, warnings
    shared = [levels_of(source.lines, metric.key) for _, bundle, _ in drawn for source in bundle.sources]
    levels = [level for level in shared[0] if all(level in one for one in shared)]
    notes = ["geometric means"] if geometric else []
    notes += [f"95% intervals over seeds, from {FEWEST_SEEDS} seeds on"] if averaged else []
    subtitle = f"{metric.what} · {metric.key}" if metric.what else metric.key
    look, levels = replace(panel, smoothed=trained), [*levels, *_reference(panel)]
    return Chart(metric.file, "Curves", look, traces, levels, (), subtitle, " · ".join(notes)), warnings


def smoothed(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Centered moving mean [n - 4] over `SMOOTHED_STEPS` values, without the first two and the last two.

    The mean is centered, because a mean of past steps lags behind and makes a falling loss look too high. The window
    shrinks towards both ends, to five values.
    """
    means = [
        np.lib.stride_tricks.sliding_window_view(np.asarray(values), 2 * reach + 1).mean(1)
        for reach in range(2, min((len(values) - 1) // 2, SMOOTHED_STEPS // 2) + 1)
    ]
    if not means:
        return np.zeros(0)
    *shorter, longest = means
    return np.concatenate([[one[0] for one in shorter], longest, [one[-1] for one in reversed(shorter)]])


def thinned(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Positions of at most about `most` of `values` [n] whose curve looks like that of all.

    Of each of equal parts of the curve, it has the lowest and the highest point, and the first.
    """
    if len(values) <= most:
        return np.arange(len(values))
    per_part = -(-3 * len(values) // most)
    starts = np.arange(0, len(values), per_part)
    parts = [values[start : start + per_part] for start in starts]
    extremes = [starts + [choose(part) for part in parts] for choose in (np.argmin, np.argmax)]
    return np.unique(np.concatenate([starts, *extremes, [len(values) - 1]]))
