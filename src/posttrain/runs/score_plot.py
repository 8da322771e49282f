"""Scores of the evaluations of a run against the step, the overall score, and the return of training."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posttrain.runs.checkpoint_scores import Checkpoint, checkpoint_scores, overall_name, score_names
from posttrain.runs.drawing import OUTSIDE
from posttrain.runs.panels import DOMAINS, GREY, ORANGE, Line

_OVERALL = "#222222"
_COLORS = tuple(color for color in DOMAINS if color != ORANGE)
"""Orange is training, here as everywhere."""


def draw_scores(lines: list[Line]) -> Figure | None:
    """Three panels, or two where nothing was trained; None where no environment reports scores, or once only."""
    checkpoints = checkpoint_scores(lines)
    names = score_names(checkpoints)
    if len(checkpoints) < 2 or not names:
        return None
    looks = {name: (_COLORS[i % len(_COLORS)], "o^vD"[i // len(_COLORS) % 4]) for i, name in enumerate(names)}
    trained = [one for one in checkpoints if one.training is not None]
    overall = f"overall {overall_name(lines)}"
    count = 3 if len(trained) > 1 else 2
    figure = Figure(figsize=(8, 3.0 * count + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    steps = [float(one.step) for one in checkpoints]
    _scores(axes[0], checkpoints, steps, looks, overall, bars=True)
    _training(axes[0], trained, [float(one.step) for one in trained])
    axes[0].set_title("against the step, 95% intervals as bars")
    axes[0].set_xlabel("step")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    _scores(axes[1], checkpoints, [one.overall[0] for one in checkpoints], looks, None)
    _training(axes[1], trained, [one.overall[0] for one in trained])
    axes[1].set_title("against the overall score; the step of each point stands above")
    axes[1].set_xlabel(overall)
    if count == 3:
        paid = [one.training or 0.0 for one in trained]
        _scores(axes[2], trained, paid, looks, overall)
        axes[2].set_title("against the return of training; the step of each point stands above")
        axes[2].set_xlabel("mean return of training episodes")
    for one in axes:
        one.set_ylabel("score")
    beside = 1.1 if any(not 0 <= (one.training or 0.0) <= 1 for one in trained) else 1.0
    axes[0].legend(**{**OUTSIDE, "bbox_to_anchor": (beside, 1.0)})
    return figure


def _scores(
    axes: Axes,
    checkpoints: Sequence[Checkpoint],
    places: Sequence[float],
    looks: dict[str, tuple[str, str]],
    overall: str | None,
    bars: bool = False,
) -> None:
    """A curve for each score; against anything but the step, points are joined in the order of what they stand over."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    shift = 0.006 * (max(places) - min(places) if bars else 0.0)
    drawn = {**looks, **({overall: (_OVERALL, "o")} if overall else {})}
    for number, (name, (color, marker)) in enumerate(drawn.items()):
        points = [
            (places[i] + shift * (number - len(looks) / 2), found, checkpoints[i].step)
            for i in order
            if (found := checkpoints[i].overall if name == overall else checkpoints[i].scores.get(name)) is not None
        ]
        x, y = [x for x, _, _ in points], [found[0] for _, found, _ in points]
        width = 2.2 if name == overall else 1.4
        axes.plot(
            x, y, color=color, marker=marker, linewidth=width, linestyle="-" if bars else ":", label=name, zorder=3
        )
        if bars:
            lengths = [[max(0.0, f[0] - f[1]) for _, f, _ in points], [max(0.0, f[2] - f[0]) for _, f, _ in points]]
            axes.errorbar(x, y, lengths, fmt="none", ecolor=color, elinewidth=0.9, capsize=2, alpha=0.55)
    axes.set_ylim(-0.04, 1.05 if bars else 1.14)
    if not bars:
        span = (max(places) - min(places)) or 1.0
        beside: dict[int, list[int]] = {}
        for place, one in zip(places, checkpoints, strict=True):
            # Points that stand nearly above each other share a label.
            beside.setdefault(round(30 * (place - min(places)) / span), []).append(one.step)
        for slot, steps in beside.items():
            axes.annotate(
                ", ".join(map(str, steps)), (min(places) + slot * span / 30, 1.0), (0, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center", va="top", fontsize=7, color=GREY,
            )  # fmt: skip


def _training(axes: Axes, trained: Sequence[Checkpoint], places: Sequence[float]) -> None:
    """The return of training, on an axis of its own where it does not lie in [0, 1] as scores do."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    x, paid = [places[i] for i in order], [trained[i].training or 0.0 for i in order]
    look: dict[str, Any] = {"color": ORANGE, "marker": "s", "linestyle": "--", "linewidth": 1.4}
    if all(0 <= value <= 1 for value in paid):
        if paid:
            axes.plot(x, paid, label="training return", **look)
        return
    right = axes.twinx()
    right.plot(x, paid, **look)
    axes.plot([], [], label="training return (right)", **look)
    right.set_ylabel("mean training return", color=ORANGE)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
