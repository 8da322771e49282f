"""Figures of results: the scores of every evaluation, and the final results of several runs.

Scores are shown beside the return of the training episodes: a training return that rises while held-out scores fall is
the first sign of reward hacking.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from posttrain.figures.draw import STYLE, entitle, new_figure, plain
from posttrain.recipe.metrics import GREY, ORANGE
from posttrain.recipe.rollout import SCORES
from posttrain.runs.log import Line
from posttrain.runs.panels import DOMAINS, LARGEST_DRAWN, metric_of
from posttrain.runs.sources import RATES, Bundle, final_results, returns_differ, stage_count
from posttrain.runs.tables import Checkpoint, Interval, checkpoint_scores, overall_name, score_names

_MAX_NAME = 40
"""Maximum length of the name of a run or score in a figure."""
_OVERALL_COLOR = "#222222"
_COLORS = tuple(color for color in DOMAINS if color != ORANGE)
"""Colors of scores. Orange is reserved for training, as in the other figures."""


def draw_scores(lines: Sequence[Line], against: str) -> Figure | None:
    """The scores of a run's evaluations against `overall` (the overall score), `step`, or `training` (the training return).

    None if the environment reports no scores, or for fewer than two evaluations. The training return needs two
    evaluations after step 0.
    """
    checkpoints = checkpoint_scores(lines)
    trained = [one for one in checkpoints if one.training is not None and abs(one.training) < LARGEST_DRAWN]
    names = score_names(checkpoints)
    shown = trained if against == "training" else checkpoints
    if len(shown) < 2 or not names:
        return None
    looks = {name: (_COLORS[i % len(_COLORS)], "o^vD"[i // len(_COLORS) % 4]) for i, name in enumerate(names)}
    overall = f"overall {overall_name(lines)}"
    figure, (axes,) = new_figure(1)
    by_step, places = against == "step", [_position(one, against) for one in shown]
    _plot_scores(axes, shown, places, looks, None if against == "overall" else overall, by_step)
    if against != "training":
        _plot_training(axes, trained, [_position(one, against) for one in trained])
    axes.set_title("95% intervals as bars" if by_step else "labels above are steps")
    axes.set_xlabel({"overall": overall, "training": "mean return of training episodes"}.get(against, against))
    axes.set_ylabel("score")
    if by_step:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    # A figure legend leaves room for the axis of training returns on the right.
    figure.legend(handles, [plain(text, _MAX_NAME) for text in labels], loc="outside right upper")
    return figure


def _position(one: Checkpoint, against: str) -> float:
    if against == "step":
        return float(one.step)
    return one.overall[0] if against == "overall" else one.training or 0.0


def _plot_scores(
    axes: Axes,
    checkpoints: Sequence[Checkpoint],
    xs: Sequence[float],
    looks: dict[str, tuple[str, str]],
    overall: str | None,
    bars: bool = False,
) -> None:
    """Draw a curve per score at the positions `xs`, joined in order of x.

    `bars`: show 95% intervals, shifted sideways so that they do not overlap. Otherwise label points with their steps.
    """
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    shift = 0.006 * (max(xs) - min(xs) if bars else 0.0)
    drawn = {**looks, **({overall: (_OVERALL_COLOR, "o")} if overall else {})}
    for number, (name, (color, marker)) in enumerate(drawn.items()):
        points = [
            (xs[i] + shift * (number - len(looks) / 2), estimate, checkpoints[i].step)
            for i in order
            if (estimate := checkpoints[i].overall if name == overall else checkpoints[i].scores.get(name)) is not None
        ]
        x, y = [x for x, _, _ in points], [estimate[0] for _, estimate, _ in points]
        width = 2.2 if name == overall else 1.4
        axes.plot(
            x, y, color=color, marker=marker, linewidth=width, linestyle="-" if bars else ":", label=name, zorder=3
        )
        if bars:
            lengths = [[max(0.0, f[0] - f[1]) for _, f, _ in points], [max(0.0, f[2] - f[0]) for _, f, _ in points]]
            axes.errorbar(x, y, lengths, fmt="none", ecolor=color, elinewidth=0.9, capsize=2, alpha=0.55)
    axes.set_ylim(-0.04, 1.05 if bars else 1.14)
    if not bars:
        span = (max(xs) - min(xs)) or 1.0
        labels: dict[int, list[int]] = {}
        for x_value, one in zip(xs, checkpoints, strict=True):
            # Points with nearly the same x share a label.
            labels.setdefault(round(30 * (x_value - min(xs)) / span), []).append(one.step)
        for slot, steps in labels.items():
            axes.annotate(
                ", ".join(map(str, steps)), (min(xs) + slot * span / 30, 1.0), (0, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center", va="top", fontsize=7, color=GREY,
            )  # fmt: skip


def _plot_training(axes: Axes, trained: Sequence[Checkpoint], xs: Sequence[float]) -> None:
    """Draw the training return at the positions `xs`, on a second y axis unless all values lie in [0, 1] like scores."""
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    x, returns = [xs[i] for i in order], [trained[i].training or 0.0 for i in order]
    look: dict[str, Any] = {"color": ORANGE, "marker": "s", "linestyle": "--", "linewidth": 1.4}
    if all(0 <= value <= 1 for value in returns):
        if returns:
            axes.plot(x, returns, label="training return", **look)
        return
    right = axes.twinx()
    right.plot(x, returns, **look)
    axes.plot([], [], label="training return (right)", **look)
    right.set_ylabel("mean training return", color=ORANGE)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)


def draw_results(bundles: Sequence[Bundle]) -> Figure | None:
    """A panel per metric with a point per run; None for fewer than two finished runs."""
    rows: list[tuple[str, str, dict[str, Interval]]] = []
    differ = returns_differ(bundles)
    for number, bundle in enumerate(bundles):
        color = DOMAINS[number % len(DOMAINS)]
        rows += [(one.name, color, results) for one in bundle.sources if (results := final_results(one, differ))]
    counts = [key for _, _, results in rows for key in results]
    keys = [key for key in dict.fromkeys(counts) if counts.count(key) > 1]
    if stage_count(bundles) > 1:
        keys = [key for key in keys if not metric_of(key).differs_by_stage]
    if len(rows) < 2 or not keys:
        return None
    with matplotlib.rc_context(STYLE):
        height = 0.9 + 0.24 * len(rows)
        columns = min(2, len(keys))
        lines = math.ceil(len(keys) / columns)
        figure = Figure(figsize=(8, 0.5 + height * lines), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for axes in panels.flat[len(keys) :]:
            axes.set_visible(False)
        for key, axes in zip(keys, panels.flat, strict=False):
            for row, (_, color, results) in enumerate(rows):
                if key in results:
                    value, low, high = results[key]
                    lengths = (
                        None
                        if math.isnan(low) or math.isnan(high)
                        else [[max(0.0, value - low)], [max(0.0, high - value)]]
                    )
                    axes.errorbar([value], [row], xerr=lengths, fmt="o", color=color, capsize=3, markersize=6)
            axes.set_title(key.removeprefix(SCORES))
            if key in RATES:
                axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_yticks(range(len(rows)), [plain(name, _MAX_NAME).replace("$", r"\$") for name, *_ in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
        entitle(figure, "Final results, 95% intervals")
    return figure
