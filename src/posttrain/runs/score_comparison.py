"""Scores of the evaluations of several runs against their overall score and their return of training."""

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from posttrain.runs.averages import Bundle
from posttrain.runs.checkpoint_scores import Checkpoint, checkpoint_scores, overall_name, score_names
from posttrain.runs.comparison import Look, looks
from posttrain.runs.drawing import STYLE
from posttrain.runs.figure_files import entitle
from posttrain.runs.panels import GREY

_MOST_NAMED = 24
"""With more points than this, only the last of each run has its step beside it."""

Runs = Sequence[tuple[str, Look, list[Checkpoint]]]


def draw_scores_of_runs(bundles: Sequence[Bundle]) -> Figure | None:
    """A row of panels for each score; None for fewer than two runs that were evaluated with scores."""
    runs = [
        (source.name, look, found)
        for bundle, look in zip(bundles, looks(len(bundles)), strict=True)
        for source in bundle.sources
        if score_names(found := checkpoint_scores(source.lines))
    ]
    names = score_names([one for *_, found in runs for one in found])
    if len(runs) < 2 or not names:
        return None
    overalls = {overall_name(source.lines) for bundle in bundles for source in bundle.sources}
    overall = f"overall {overalls.pop()}" if len(overalls) == 1 else "overall score"
    paid = sum(one.training is not None for *_, found in runs for one in found) > 1
    with matplotlib.rc_context(STYLE):
        columns = 2 if paid else 1
        figure = Figure(figsize=(8, 0.8 + 2.3 * len(names)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(names), columns, squeeze=False, sharex="col", sharey="row")
        for name, row in zip(names, panels, strict=True):
            _panel(row[0], runs, name, training=False)
            row[0].set_ylabel(name)
            if paid:
                _panel(row[1], runs, name, training=True)
        panels[0][0].set_title(f"against the {overall}")
        panels[-1][0].set_xlabel(overall)
        if paid:
            panels[0][1].set_title("against the return of training")
            panels[-1][1].set_xlabel("mean return of training episodes")
        entitle(figure, "Scores of the evaluations; beside points their steps")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2 if len(runs) > 1 else 1, frameon=False)
    return figure


def _panel(axes: Axes, runs: Runs, name: str, training: bool) -> None:
    for label, look, checkpoints in runs:
        found = [(one.training if training else one.overall[0], one) for one in checkpoints if name in one.scores]
        points = [(place, one.scores[name][0], one.step) for place, one in found if place is not None]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=look.color, marker=look.marker, linestyle=":", linewidth=1.2, label=label)
        for place, height, step in points if sum(len(found) for *_, found in runs) <= _MOST_NAMED else points[-1:]:
            axes.annotate(str(step), (place, height), (3, 3), textcoords="offset points", fontsize=8, color=GREY)
    axes.margins(0.08, 0.2)
