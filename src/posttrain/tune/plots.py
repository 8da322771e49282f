"""Figures of a study: history, importance of the searched keys, and parallel coordinates."""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from posttrain.recipe.study import Range, Together
from posttrain.recipe.study_file import Study, shown
from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.runs.figures import STYLE, outside_legend
from posttrain.runs.panels import BLUE, GREEN, GREY, ORANGE, RED
from posttrain.tune.best import best_of, feasible
from posttrain.tune.report import short_names
from posttrain.tune.study import from_storage

_MIN_TRIALS = 4
"""Minimum number of finished trials for importances."""
_MAX_LABEL = 22
"""Maximum number of characters of a tick label."""


def draw_study(study: Study, optuna_study: optuna.Study) -> list[Path]:
    """Draw history.png, importance.png and parallel.png into the `plots` of the study; figures without data are
    skipped.
    """
    trials = optuna_study.get_trials(deepcopy=False)
    drawn = []
    folder = study.directory / "plots"
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
    figures = {"history": draw_history, "importance": draw_importance, "parallel": draw_parallel}
    with matplotlib.rc_context(STYLE):
        for name, draw in figures.items():
            path = folder / f"{name}.png"
            figure = draw(study, trials)
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            title = {"history": "History", "importance": "What matters", "parallel": "All trials"}[name]
            figure.suptitle(f"{title} · {study.recipe.name}", x=0.012, ha="left", fontweight="bold", fontsize=12)
            content = io.BytesIO()
            figure.savefig(content, format="png")
            write_atomically(path, content.getvalue())
            drawn.append(path)
    return drawn


def draw_history(study: Study, trials: Sequence[FrozenTrial]) -> Figure | None:
    """The value of every trial, the best so far, and the pruned, failed and infeasible trials."""
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    within = [trial for trial in finished if feasible(trial)]
    kinds: list[tuple[str, list[FrozenTrial], dict[str, Any]]] = [
        ("finished", within, {"color": BLUE, "marker": "o"}),
        ("exceeds its limits", [t for t in finished if not feasible(t)], {"color": ORANGE, "marker": "D"}),
        ("pruned, last value", [t for t in trials if t.state == TrialState.PRUNED], {"color": GREY, "marker": "v"}),
    ]
    valued = [trial for _, some, _ in kinds for trial in some if trial.value is not None]
    if not valued:
        return None
    figure, axes = _figure(8, 4.6)
    if study.recipe.groups:
        _mark_groups(axes, trials)
    for label, some, look in kinds:
        some = [trial for trial in some if trial.value is not None]
        if some:
            numbers, values = [trial.number for trial in some], [trial.value or 0.0 for trial in some]
            axes.plot(numbers, values, linestyle="", markersize=6, label=label, zorder=3, **look)
    if within:
        better = max if study.recipe.objective.direction == "maximize" else min
        best = [better(t.value or 0.0 for t in within[: place + 1]) for place in range(len(within))]
        ends = [*(trial.number for trial in within), len(trials) - 1]
        axes.step(ends, [*best, best[-1]], where="post", color=GREEN, label="best so far", zorder=2)
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    if failed:
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(failed, [0.0] * len(failed), "x", color=RED, markersize=7, label="failed", **place)
    axes.set_xlabel("trial")
    axes.set_ylabel(_value_name(study))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    outside_legend(axes)
    return figure


def draw_importance(study: Study, trials: Sequence[FrozenTrial]) -> Figure | None:
    """Importance of each key: PED-ANOVA for a search, the range of the means over a key's values for groups."""
    importances = _ranges(study, trials) if study.recipe.groups else _importances(study, trials)
    if not importances:
        return None
    names = sorted(importances, key=lambda name: importances[name])
    figure, axes = _figure(8, 1.5 + 0.42 * len(names))
    bars = axes.barh(names, [importances[name] for name in names], color=BLUE, height=0.6)
    axes.bar_label(bars, [f"{importances[name]:.2g}" for name in names], padding=3, fontsize=9)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    if study.recipe.groups:
        axes.set_xlabel(f"{study.recipe.objective.metric}: best minus worst mean over a key's values, in its group")
    else:
        axes.set_xlabel("share of the variance among good trials (PED-ANOVA)")
    return figure


def draw_parallel(study: Study, trials: Sequence[FrozenTrial]) -> Figure | None:
    """Parallel coordinates: a line per finished trial, colored by its value; the best trial is thick."""
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    names = [name for name in list(study.recipe.spaces) if any(name in trial.params for trial in finished)]
    if len(finished) < 2 or not names:
        return None
    values = [trial.value or 0.0 for trial in finished]
    low, high = min(values), max(values)
    figure, axes = _figure(max(8.0, 1.9 * (len(names) + 1)), 4.8)
    scales = [_Scale(study, name, finished) for name in names]
    colors = matplotlib.colormaps["viridis" if study.recipe.objective.direction == "maximize" else "viridis_r"]
    best = best_of(study, trials)
    for trial in sorted(finished, key=lambda trial: trial is best):
        share = (trial.value or 0.0) - low
        share = share / (high - low) if high > low else 0.5
        points = [scale.place(trial) for scale in scales]
        xs = [x for x, y in enumerate(points) if y is not None] + [len(names)]
        ys = [y for y in points if y is not None] + [share]
        look: dict[str, Any] = {"color": colors(0.92 * share), "linewidth": 1.2, "alpha": 0.75}
        if not feasible(trial):
            look |= {"linestyle": ":"}
        if best is not None and trial.number == best.number:
            look = {"color": RED, "linewidth": 3.0, "zorder": 5}
            axes.plot([], [], **look, label=f"best, trial {trial.number}")
        axes.plot(xs, ys, **look)
    if any(not feasible(trial) for trial in finished):
        axes.plot([], [], color=GREY, linestyle=":", label="exceeds its limits")
    for x, scale in enumerate(scales):
        _draw_axis(axes, x, scale.ticks)
    ends = [(0.0, shown(low)), (1.0, shown(high))] if high > low else [(0.5, shown(low))]
    _draw_axis(axes, len(names), ends)
    axes.set_xlim(-0.15, len(names) + 0.45)
    axes.set_ylim(-0.06, 1.06)
    axes.set_xticks(range(len(names) + 1), [*_broken(short_names(names)), study.recipe.objective.metric])
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    if best is not None or any(not feasible(trial) for trial in finished):
        figure.legend(loc="outside upper right", ncols=2)
    return figure


class _Scale:
    """Maps the values of one key to positions from 0 to 1 on its axis."""

    def __init__(self, study: Study, name: str, trials: Sequence[FrozenTrial]) -> None:
        self.study, self.name = study, name
        searched = study.recipe.spaces.get(name)
        self.range = searched if isinstance(searched, Range) else None
        self.base = _base_value(study, name) if study.recipe.groups else None
        if self.range is not None:
            few = self.range.int and self.range.high - self.range.low <= 4
            parts = int(self.range.high - self.range.low) if few else 4
            self.ticks = [(place / parts, _number(self._at(place / parts))) for place in range(parts + 1)]
            return
        values = [self._value(trial) for trial in trials]
        values = [value for value in values if value is not None]
        self.choices = [value for at, value in enumerate(values) if value not in values[:at]]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.choices):
            self.choices.sort()
        self.ticks = [
            (self._of_choice(place), _cut(shown(value, narrow=True))) for place, value in enumerate(self.choices)
        ]

    def place(self, trial: FrozenTrial) -> float | None:
        """Position of the trial's value; None if the trial has no value."""
        value = self._value(trial)
        if value is None:
            return None
        if self.range is None:
            return self._of_choice(self.choices.index(value))
        low, high = self.range.low, self.range.high
        if self.range.log:
            return math.log(value / low) / math.log(high / low)
        return float((value - low) / (high - low))

    def _value(self, trial: FrozenTrial) -> Any:
        """The value of the key; the value in the recipe if a later group searches it."""
        return from_storage(self.study, trial.params).get(self.name, self.base)

    def _of_choice(self, place: int) -> float:
        return place / (len(self.choices) - 1) if len(self.choices) > 1 else 0.5

    def _at(self, place: float) -> float:
        assert self.range is not None
        low, high = self.range.low, self.range.high
        return low * (high / low) ** place if self.range.log else low + place * (high - low)


def _draw_axis(axes: Axes, x: float, ticks: Sequence[tuple[float, str]]) -> None:
    axes.axvline(x, 0.05, 0.95, color="#222222", linewidth=1.0, zorder=4)
    for y, text in ticks:
        axes.plot([x - 0.02, x], [y, y], color="#222222", linewidth=1.0, zorder=4)
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
        axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=box, zorder=6)


def _importances(study: Study, trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """PED-ANOVA importances (Watanabe et al. 2023) over the finished trials, ignoring limits."""
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    values = {trial.value for trial in finished}
    if len(finished) < _MIN_TRIALS or len(values) < 2:
        return {}
    copy = optuna.create_study(direction=study.recipe.objective.direction)
    copy.add_trials(finished)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importances = optuna.importance.get_param_importances(copy, evaluator=evaluator)
    return importances if all(math.isfinite(value) for value in importances.values()) else {}


def _ranges(study: Study, trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """Key -> range of the means over its values, among the finished trials of its group."""
    ranges: dict[str, float] = {}
    for group in study.recipe.groups:
        members = [t for t in trials if t.user_attrs.get("group") == group.name and t.state == TrialState.COMPLETE]
        for key in group.grid:
            by_value: dict[Any, list[float]] = {}
            for trial in members:
                by_value.setdefault(trial.params[key], []).append(trial.value or 0.0)
            if len(by_value) > 1:
                ranges[f"{key} ({group.name})"] = float(np.ptp([fmean(values) for values in by_value.values()]))
    return ranges


def _base_value(study: Study, key: str) -> Any:
    space = study.recipe.spaces[key]
    value: Any = study.at({}).model_dump(mode="json")
    if isinstance(space, Together):
        return next((c for c in space.together if all(_in(value, k) == v for k, v in c.items())), None)
    return _in(value, key)


def _in(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _mark_groups(axes: Axes, trials: Sequence[FrozenTrial]) -> None:
    """Mark the boundaries between groups."""
    seen: list[str] = []
    for trial in trials:
        name = trial.user_attrs.get("group", "")
        if name in seen:
            continue
        if seen:
            axes.axvline(trial.number - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        seen.append(name)
        place: Any = (trial.number - 0.4, 1.0)
        axes.annotate(name, place, (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _value_name(study: Study) -> str:
    better = "smaller" if study.recipe.objective.direction == "minimize" else "larger"
    return f"{study.recipe.objective.metric} ({better} is better)"


def _broken(names: Sequence[str]) -> list[str]:
    """Break long names into two lines."""
    return [
        name.replace("." if "." in name else "_", ".\n" if "." in name else "_\n", 1) if len(name) > 12 else name
        for name in names
    ]


def _number(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if abs(value) < 1e-2 and value else f"{value:.3g}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"
