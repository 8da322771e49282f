"""Panels of figures: learning curves of several training seeds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.runs.intervals import seed_mean


def panel(axes: Any, place: tuple[float, float, float, float], size: int, ink: str, faint: str) -> Any:
    """A panel of success rates at `place` in the area of `axes`: left, bottom, width and height as shares of it.

    `size`: of words, in points. `ink` and `faint`: colors of words and of lines.
    """
    made = axes.inset_axes(place)
    made.set_facecolor("none")
    made.set_ylim(-0.03, 1.05)
    made.set_yticks((0, 0.5, 1), ("0%", "50%", "100%"))
    made.tick_params(which="both", colors=ink, labelsize=size, length=3)
    for name, spine in made.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(faint)
    return made


def curve(panel: Any, places: Sequence[float], runs: Sequence[Sequence[float]], color: str, **line: Any) -> None:
    """Mean and 95% interval of success rates [training seeds][points]."""
    points = [seed_mean(list(values), rate=True) for values in zip(*runs, strict=True)]
    panel.plot(places, [point.value for point in points], color=color, **line)
    low, high = (np.array([getattr(point, side) for point in points]) for side in ("low", "high"))
    panel.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
