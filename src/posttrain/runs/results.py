"""Figures of results: the scores of every evaluation, and the final results of several runs with their table.

Scores are shown beside the return of the training episodes: a training return that rises while held-out scores fall is
the first sign of reward hacking.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from posttrain.recipe.rollout import SCORES
from posttrain.runs.comparison import Look, looks
from posttrain.runs.evaluated import checkpoint_of
from posttrain.runs.figures import STYLE, entitle, new_figure, plain
from posttrain.runs.intervals import FEWEST_SEEDS, seed_mean
from posttrain.runs.panels import DOMAINS, GREY, LARGEST_DRAWN, ORANGE, Line, metric_of
from posttrain.runs.sources import Bundle, Source
from posttrain.runs.tables import (
    Checkpoint,
    Interval,
    Table,
    checkpoint_scores,
    interval_of,
    overall_name,
    score_cell,
    score_names,
)

_MAX_NAME = 40
"""Maximum length of the name of a run or score in a figure."""
SCORES_AGAINST = "metrics_vs_"
"""Prefix of the names of the figures of `draw_scores`."""
_OVERALL_COLOR = "#222222"
_COLORS = tuple(color for color in DOMAINS if color != ORANGE)
"""Colors of scores. Orange is reserved for training, as in the other figures."""


def draw_scores(lines: list[Line], against: str) -> Figure | None:
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


_MOST_NAMED = 24
"""With more points than this, only the last point of each run is labeled with its step."""

Runs = Sequence[tuple[str, Look, list[Checkpoint]]]


def draw_scores_of_runs(bundles: Sequence[Bundle]) -> Figure | None:
    """A row of panels per score, a curve per run; None for fewer than two runs with scores."""
    runs = [
        (source.name, look, scores)
        for bundle, look in zip(bundles, looks(len(bundles)), strict=True)
        for source in bundle.sources
        if score_names(scores := checkpoint_scores(source.lines))
    ]
    names = score_names([one for *_, scores in runs for one in scores])
    if len(runs) < 2 or not names:
        return None
    overalls = {overall_name(source.lines) for bundle in bundles for source in bundle.sources}
    overall = f"overall {overalls.pop()}" if len(overalls) == 1 else "overall score"
    trained = sum(one.training is not None for *_, scores in runs for one in scores) > 1
    with matplotlib.rc_context(STYLE):
        columns = 2 if trained else 1
        figure = Figure(figsize=(8, 0.8 + 2.3 * len(names)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(names), columns, squeeze=False, sharex="col", sharey="row")
        for name, row in zip(names, panels, strict=True):
            _panel(row[0], runs, name, training=False)
            row[0].set_ylabel(name)
            if trained:
                _panel(row[1], runs, name, training=True)
        panels[0][0].set_title(f"against the {overall}")
        panels[-1][0].set_xlabel(overall)
        if trained:
            panels[0][1].set_title("against the training return")
            panels[-1][1].set_xlabel("mean return of training episodes")
        entitle(figure, "Scores of the evaluations; points are labeled with their steps")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2 if len(runs) > 1 else 1, frameon=False)
    return figure


def _panel(axes: Axes, runs: Runs, name: str, training: bool) -> None:
    for label, look, checkpoints in runs:
        positions = [(one.training if training else one.overall[0], one) for one in checkpoints if name in one.scores]
        points = [(x_value, one.scores[name][0], one.step) for x_value, one in positions if x_value is not None]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=look.color, marker=look.marker, linestyle=":", linewidth=1.2, label=label)
        for x_value, height, step in (
            points if sum(len(positions) for *_, positions in runs) <= _MOST_NAMED else points[-1:]
        ):
            axes.annotate(str(step), (x_value, height), (3, 3), textcoords="offset points", fontsize=8, color=GREY)
    axes.margins(0.08, 0.2)


_RATES = ("success", "test/accuracy")
_EPISODE_METRICS = ("success", "return")
_ROW_METRICS = ("test/accuracy", "test/loss")
_MAX_LISTED = 4


def final_results(source: Source) -> dict[str, Interval]:
    """Metric -> value in the last `final` line: the best checkpoint of a training run, or the evaluated model."""
    line = _final(source)
    scores = [key for key in line if key.startswith(SCORES) and not key.endswith(("_low", "_high"))]
    keys = [key for key in (*_EPISODE_METRICS, *scores, *_ROW_METRICS) if isinstance(line.get(key), (int, float))]
    return {key: interval_of(line, key) for key in keys}


def result_table(bundles: Sequence[Bundle]) -> Table | None:
    """A table with one row per finished run and per mean over seeds; None if no run has finished."""
    rows: list[tuple[str, str, str, dict[str, Interval]]] = []
    for bundle in bundles:
        ended = [(source, results) for source in bundle.sources if (results := final_results(source))]
        for source, results in ended:
            line = _final(source)
            rows.append(
                (
                    source.name,
                    str(line.get("best_step", evaluated[1] if (evaluated := checkpoint_of(source)) else "–")),
                    str(line.get("n") or line.get("test/rows") or "–"),
                    results,
                )
            )
        if len(ended) > 1:
            rows.append(
                (f"{bundle.label}, mean of {len(ended)} seeds", "–", "–", _mean([results for _, results in ended]))
            )
    if not rows:
        return None
    keys = list(dict.fromkeys(key for *_, results in rows for key in results))
    cells = [(name, step, n, *(_result_cell(key, results.get(key)) for key in keys)) for name, step, n, results in rows]
    note = (
        f"{_data_note(bundles)} `n` is the number of environment seeds, or of rows. Brackets: 95% intervals, for a run "
        f"over environment seeds or rows, for a mean over training seeds from {FEWEST_SEEDS} runs on."
    )
    if "test/loss" in keys and _stages(bundles) > 1:
        note += " Losses of different stages are not comparable."
    headings = ("run", "checkpoint", "n", *(key.removeprefix(SCORES) for key in keys))
    return Table("Final results", headings, cells, note, words=("run",))


def draw_results(bundles: Sequence[Bundle]) -> Figure | None:
    """A panel per metric with a point per run; None for fewer than two finished runs."""
    rows: list[tuple[str, str, dict[str, Interval]]] = []
    for bundle, look in zip(bundles, looks(len(bundles)), strict=True):
        rows += [(one.name, look.color, results) for one in bundle.sources if (results := final_results(one))]
    counts = [key for _, _, results in rows for key in results]
    keys = [key for key in dict.fromkeys(counts) if counts.count(key) > 1]
    if _stages(bundles) > 1:
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
            if key in _RATES:
                axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_yticks(range(len(rows)), [plain(name, _MAX_NAME).replace("$", r"\$") for name, *_ in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
        entitle(figure, "Final results, 95% intervals")
    return figure


def _data_note(bundles: Sequence[Bundle]) -> str:
    """A note on whether the final data also selected the checkpoint: without `data.test`, it is the validation rows."""
    ended = [(source, results) for bundle in bundles for source in bundle.sources if (results := final_results(source))]
    reused = [
        source.name
        for source, results in ended
        if any(key in _ROW_METRICS for key in results) and not _has_test(source)
    ]
    if not reused:
        return "Final held-out data, which selected nothing."
    only_rows = len(reused) == len(ended) and all(key in _ROW_METRICS for _, results in ended for key in results)
    names = ", ".join(reused[:_MAX_LISTED])
    more = f" and {len(reused) - _MAX_LISTED} more" if reused[_MAX_LISTED:] else ""
    return (
        f"Final held-out data. The rows of {names}{more} are validation rows, which also selected the checkpoint, "
        f"because the recipe sets no `data.test`{'' if only_rows else '; all other data selected nothing'}."
    )


def _has_test(source: Source) -> bool:
    data = (source.recipe or {}).get("data")
    return isinstance(data, Mapping) and bool(data.get("test"))


def _stages(bundles: Sequence[Bundle]) -> int:
    return len({source.stage for bundle in bundles for source in bundle.sources} - {None})


def _final(source: Source) -> Mapping[str, Any]:
    return next((line for line in reversed(source.lines) if line["kind"] == "final"), {})


def _mean(results: Sequence[Mapping[str, Interval]]) -> dict[str, Interval]:
    common = [key for key in results[0] if all(key in result for result in results)]
    return {key: seed_mean([result[key][0] for result in results], key in _RATES).limits for key in common}


def _result_cell(key: str, result: Interval | None) -> str:
    if result is None or key not in _RATES:
        return score_cell(result)
    value, low, high = result
    return f"{100 * value:.1f}%" + ("" if math.isnan(low) else f" [{100 * low:.1f}, {100 * high:.1f}]")
