"""Declarations of metrics. They stand in the section of a recipe whose code writes them, as its `metrics`.

Documentation, studies, figures and the live page iterate over them; `posttrain.recipe.reference.metrics_of` collects them.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

# The Okabe-Ito palette, which is safe for color blindness, without yellow, which is faint on white.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#6E6E6E"
HELD_OUT, TRAINING, BETTER, WORSE = BLUE, ORANGE, GREEN, RED


@dataclass(frozen=True)
class Curve:
    """One metric on a panel."""

    key: str
    label: str
    color: str = BLUE


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `unit` labels the y axis."""

    title: str
    unit: str
    curves: Sequence[Curve] = ()
    percent: bool = False
    logarithmic: bool = False
    """Whether the y axis is logarithmic if the values span a factor of 20."""
    from_zero: bool = True
    """Whether the y axis starts at zero if no value is negative."""
    whole: bool = False
    """Whether the y axis always spans 0 to 1."""
    smoothed: bool = False
    """Whether long training curves are replaced by their moving mean."""
    reference: tuple[float, str] | None = None
    """A value drawn as a dashed line, and its label."""
    compared: bool = False
    """Whether 95% intervals are bars at the last evaluation only, because bands of many curves hide each other."""
    figure: str = ""
    """Name of the figure that the panel is part of, see `posttrain.runs.panels.TITLES`. In a declaration, `curves` is empty:
    every metric that names the panel is one."""


@dataclass(frozen=True)
class Metric:
    """One metric of `metrics.jsonl`."""

    name: str
    """The key. `*` stands for names that are known at run time, such as those of scores."""
    meaning: str
    """What it measures, and its unit if there is no panel; the label of its curve."""
    panel: Panel | None = None
    """Where it is drawn. None: on no figure."""
    color: str = BLUE

    def matches(self, key: str) -> bool:
        """Whether `key` is this metric."""
        return key == self.name or ("*" in self.name and fnmatch.fnmatchcase(key, self.name))

    @property
    def sentence(self) -> str:
        """Its line in the documentation."""
        return self.meaning if self.panel is None else f"{self.panel.title}: {self.meaning}, {self.panel.unit}"
