"""The plot of a normaliser: mean and spread of unit rewards against their place in the answer, and the fit."""

import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from posttrain.runs.drawing import STYLE
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.panels import BLUE, ORANGE

_LARGEST = 90
"""Area of the marker of the position with the most rewards, in square points."""
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

Profile = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Curves = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw_profile(path: Path, title: str, profile: Profile, curves: Curves, labels: tuple[str, str]) -> None:
    """Write the plot to `path` (PNG).

    `profile`: positions in (0, 1], means, standard deviations (NaN where unknown) and counts, [m] each; `curves`:
    positions, fitted means and fitted deviations, [g] each; `labels`: of the two fits. Raises `RunError` when the disk
    refuses.
    """
    positions, means, stds, counts = profile
    grid, *fitted = curves
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 1, sharex=True)
        parts = (("Mean reward", means), ("Standard deviation of rewards", stds))
        for axes, (name, values), line, label in zip(panels, parts, fitted, labels, strict=True):
            known = ~np.isnan(values)
            areas = np.maximum(_LARGEST * counts[known] / counts.max(), 3)
            look = {"color": BLUE, "alpha": 0.55, "linewidths": 0}
            axes.scatter(positions[known], values[known], s=areas, label="units, area: how many", **look)
            axes.plot(grid, line, color=ORANGE, label=label)
            axes.set_title(name)
            axes.set_ylabel("reward")
            axes.legend(loc="best")
        panels[1].set_ylim(bottom=0)
        panels[1].set_xscale("log")
        panels[1].set_xlim(positions[0] / 1.15, 1.15)
        panels[1].xaxis.set_major_locator(FixedLocator([t for t in _TICKS if t >= positions[0] / 1.15]))
        panels[1].xaxis.set_minor_locator(NullLocator())
        panels[1].xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        panels[1].set_xlabel("place of the unit in its answer (unit k of K stands at k / K)")
        figure.suptitle(f"Unit rewards by place · {title}", x=0.012, ha="left", fontweight="bold", fontsize=12)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    with storage_errors(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, content.getvalue())
