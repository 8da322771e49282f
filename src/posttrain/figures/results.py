"""Figures of the scores of every evaluation.

Scores are shown beside the return of the training episodes: a training return that rises while held-out scores fall is
the first sign of reward hacking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posttrain.figures.draw import new_figure, plain
from posttrain.recipe.metrics import GREY, ORANGE
from posttrain.runs.log import Line
from posttrain.runs.panels import DOMAINS, LARGEST_DRAWN, Sampling, labeled
from posttrain.runs.tables import Checkpoint, Interval, checkpoint_scores, is_share, overall_name, score_names

_MOST_STEPS = 3
"""Steps in a label of close points."""
_COLORS = tuple(color for color in DOMAINS if color != ORANGE)
"""Colors of scores. Orange is reserved for training, as in the other figures."""


def draw_scores(lines: Sequence[Line], against: str, sampling: Sampling = Sampling()) -> Figure | None:
    """The scores of a run's evaluations against `overall` (the overall score), `step`, or `training` (the training return).

    Shares of episodes have a panel, and means of other scores, such as a judge's grades, one below it. None if the
    environment reports no scores, or for fewer than two evaluations. The training return needs two evaluations after
    step 0. `sampling`: how training and held-out episodes are sampled, for the labels.
    """
    checkpoints = checkpoint_scores(lines)
    trained = [one for one in checkpoints if one.training is not None and abs(one.training) < LARGEST_DRAWN]
    names = score_names(checkpoints)
    shown = trained if against == "training" else checkpoints
    if len(shown) < 2 or not names:
        return None
    colors = {name: (_COLORS[i % len(_COLORS)], "o^vD"[i // len(_COLORS) % 4]) for i, name in enumerate(names)}
    curves = [
        _Curve(name, color, marker, [one.scores.get(name) for one in shown], is_share(name, checkpoints))
        for name, (color, marker) in colors.items()
    ]
    overall, success = f"overall {overall_name(lines)}", overall_name(lines) == "success"
    if against != "overall":
        label = labeled(overall, sampling.held_out)
        curves.append(_Curve(label, "#222222", "o", [one.overall for one in shown], success, 2.2))
    groups = [group for share in (True, False) if (group := [curve for curve in curves if curve.share is share])]
    figure, panels = new_figure(len(groups))
    by_step, places = against == "step", [_position(one, against) for one in shown]
    for axes, group in zip(panels, groups, strict=True):
        _plot_scores(axes, group, places, by_step)
        axes.set_ylabel("share of episodes" if group[0].share else "mean score")
    if not by_step:
        _label_steps(panels[0], [one.step for one in shown], places)
    if against != "training":
        _plot_training(panels[0], trained, [_position(one, against) for one in trained], sampling)
    notes = "95% intervals as bars" + ("" if by_step else ", numbers above are steps")
    panels[0].set_title(f"{labeled('Held-out scores', sampling.held_out)}: {notes}")
    names_of_x = {
        "overall": labeled(overall, sampling.held_out),
        "training": labeled("mean return of training episodes", sampling.training),
    }
    panels[-1].set_xlabel(names_of_x.get(against, against))
    if by_step:
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    entries = [entry for axes in panels for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles, labels = [handle for handle, _ in entries], [plain(label, 40) for _, label in entries]
    # A figure legend leaves room for the axis of training returns on the right. In the middle, it is below the title.
    figure.legend(handles, labels, loc="outside right center")
    return figure


@dataclass(frozen=True)
class _Curve:
    """A score at each evaluation."""

    name: str
    color: str
    marker: str
    estimates: Sequence[Interval | None]
    share: bool
    """Whether it is a share of episodes."""
    width: float = 1.4


def _position(one: Checkpoint, against: str) -> float:
    if against == "step":
        return float(one.step)
    return one.overall[0] if against == "overall" else one.training or 0.0


def _plot_scores(axes: Axes, curves: Sequence[_Curve], xs: Sequence[float], by_step: bool) -> None:
    """Draw curves with 95% intervals at the positions `xs`, joined in order of x.

    `by_step`: shift the curves sideways so that their intervals do not overlap.
    """
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    shift = 0.006 * (max(xs) - min(xs)) if by_step else 0.0
    limits: list[float] = []
    for number, curve in enumerate(curves):
        offset = shift * (number - (len(curves) - 1) / 2)
        points = [(xs[i] + offset, estimate) for i in order if (estimate := curve.estimates[i]) is not None]
        x, y = [x for x, _ in points], [value for _, (value, _, _) in points]
        look: dict[str, Any] = {"color": curve.color, "marker": curve.marker, "linewidth": curve.width}
        axes.plot(x, y, linestyle="-" if by_step else ":", label=curve.name, zorder=3, **look)
        lengths = [
            [max(0.0, value - low) for _, (value, low, _) in points],
            [max(0.0, high - value) for _, (value, _, high) in points],
        ]
        axes.errorbar(x, y, lengths, fmt="none", ecolor=curve.color, elinewidth=0.9, capsize=2, alpha=0.55)
        limits += [number for _, estimate in points for number in estimate if not math.isnan(number)]
    if curves[0].share:
        axes.set_ylim(-0.04, 1.05 if by_step else 1.14)
    elif limits:
        room = 0.08 * (max(limits) - min(limits)) or 0.5
        axes.set_ylim(min(limits) - room, max(limits) + (room if by_step else 2 * room))


def _label_steps(axes: Axes, steps: Sequence[int], xs: Sequence[float]) -> None:
    """Write the steps of the points at the positions `xs` below the upper edge. Points that are close share a label, which
    starts at the first of them.
    """
    span = (max(xs) - min(xs)) or 1.0
    labels: list[tuple[float, list[int]]] = []
    for x, step in sorted(zip(xs, steps, strict=True)):
        if labels and (x - labels[-1][0]) / span < 0.03 + 0.016 * len(_listed(labels[-1][1])):
            labels[-1][1].append(step)
        else:
            labels.append((x, [step]))
    for x, listed in labels:
        axes.annotate(
            _listed(listed), (x, 1.0), (-4, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="left", va="top", fontsize=7, color=GREY,
        )  # fmt: skip


def _listed(steps: Sequence[int]) -> str:
    """A few steps as text."""
    first = ", ".join(map(str, steps[:_MOST_STEPS]))
    return first if len(steps) <= _MOST_STEPS else f"{first}, …"


def _plot_training(axes: Axes, trained: Sequence[Checkpoint], xs: Sequence[float], sampling: Sampling) -> None:
    """Draw the training return at the positions `xs`, on a second y axis unless all values lie in [0, 1] like shares."""
    order = sorted(range(len(xs)), key=lambda i: xs[i])
    x, returns = [xs[i] for i in order], [trained[i].training or 0.0 for i in order]
    label = labeled("training return", sampling.training)
    look: dict[str, Any] = {"color": ORANGE, "marker": "s", "linestyle": "--", "linewidth": 1.4}
    if all(0 <= value <= 1 for value in returns):
        if returns:
            axes.plot(x, returns, label=label, **look)
        return
    right = axes.twinx()
    right.margins(y=0.15)  # steps are written along the upper edge
    right.plot(x, returns, **look)
    axes.plot([], [], label=f"{label} (right)", **look)
    right.set_ylabel("mean training return", color=ORANGE)
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
