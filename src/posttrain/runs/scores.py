"""What each evaluation of a run found: overall, by score of the environment, and beside it what training was paid.

Training and held-out scores that part are the first sign of a policy that games its reward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.recipe.rollout import SCORES
from posttrain.runs.panels import DOMAINS, GREY, ORANGE, Line
from posttrain.runs.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


_OVERALL = "#222222"
_COLORS = tuple(color for color in DOMAINS if color != ORANGE)
"""Orange is training, here as everywhere."""


def draw_scores(lines: list[Line]) -> "Figure | None":
    """Three panels, or two where nothing was trained; None where no environment reports scores, or once only."""
    checkpoints = checkpoint_scores(lines)
    names = score_names(checkpoints)
    if len(checkpoints) < 2 or not names:
        return None
    looks = {name: (_COLORS[i % len(_COLORS)], "o^vD"[i // len(_COLORS) % 4]) for i, name in enumerate(names)}
    trained = [one for one in checkpoints if one.training is not None]
    overall = f"overall {overall_name(lines)}"
    count = 3 if len(trained) > 1 else 2
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from posttrain.runs.figures import OUTSIDE

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
    axes: "Axes",
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


def _training(axes: "Axes", trained: Sequence[Checkpoint], places: Sequence[float]) -> None:
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
