"""Results of an evaluation: metrics with their intervals, and a JSON file from which they can be compared."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from posttrain.errors import InputError
from posttrain.evaluation.statistics import ItemScores, Kind, estimate
from posttrain.runs.directory import write_atomically
from posttrain.runs.intervals import Estimate, within
from posttrain.runs.reader import LARGEST, read_json
from posttrain.runs.tables import Table

Better = Literal["higher", "lower", "neither"]
"""Which values of a metric are better. Metrics with `neither` are not compared."""


@dataclass(frozen=True)
class MetricResult:
    """One metric of a file of predictions."""

    name: str
    scores: ItemScores
    better: Better = "higher"
    texts: int = 0
    """Number of scored texts; an item may have several."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of texts without a score, by reason."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a comparison needs: a signature, a layer, a model."""


FORMAT = 1
_RATIOS = ("rate", "mean", "perplexity")
"""Kinds whose summands are a sum and a count."""


@dataclass
class Results:
    """The metrics of one file of predictions."""

    predictions: str
    rows: int
    items: int
    dropped: Sequence[str] = ()
    """Warnings about rows that are in no metric, and about truncated or empty answers."""
    metrics: list[MetricResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Metric -> why it could not be computed."""
    digests: dict[str, str] = field(default_factory=dict)
    """Item -> digest of its prompt and reference, because other data may use the same ids."""

    def estimates(self) -> dict[str, Estimate]:
        return {one.name: estimate(one.scores) for one in self.metrics}

    def table(self) -> Table:
        """A table with one row per metric."""
        estimates = self.estimates()
        values = [(one, estimates[one.name]) for one in self.metrics]
        rows = [
            (one.name, *estimate_cells(one.scores.kind, value), str(value.n), str(one.texts)) for one, value in values
        ]
        return Table(
            title=self.predictions,
            headings=("metric", "value", "95% interval", "n", "texts"),
            rows=rows,
            note="`n` is the number of prompts; intervals are 95%, over prompts.",
            words=("metric",),
        )

    def details(self) -> list[str]:
        """Messages about the numbers: signatures, layers, models, rows left out."""
        about: dict[str, list[str]] = {}
        for one in self.metrics:
            known = [f"{key} {v:.3g}" if isinstance(v, float) else f"{key} {v}" for key, v in one.about.items()]
            missing = [f"{count} left out: {reason}" for reason, count in one.left_out.items()]
            if text := "; ".join([*known, *missing]):
                about.setdefault(text, []).append(one.name)
        settings = [f"{', '.join(names)}: {text}" for text, names in about.items()]
        return [*settings, *self.dropped]

    def write(self, path: Path) -> None:
        """Atomically write the results to `path` as JSON; raises `RunError` if that fails."""
        numbers = {
            name: [value if math.isfinite(value) else None for value in estimate.limits]
            for name, estimate in self.estimates().items()
        }
        values = {
            "format": FORMAT,
            **vars(self),
            "metrics": {
                one.name: {
                    **dict(zip(("value", "low", "high"), numbers[one.name], strict=True)),
                    "n": len(one.scores),
                    "texts": one.texts,
                    "kind": one.scores.kind,
                    "bounds": one.scores.bounds,
                    "better": one.better,
                    "left_out": dict(one.left_out),
                    "about": dict(one.about),
                }
                for one in self.metrics
            },
            "scores": {
                one.name: {item: summands.tolist() for item, summands in one.scores.items.items()}
                for one in self.metrics
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, ensure_ascii=False, indent=1) + "\n")


def read_results(path: Path) -> tuple[dict[str, MetricResult], dict[str, str]]:
    """The metrics of a results file by name, and the digests of its items; raises `InputError` for an invalid file."""
    try:
        values = read_json(path, LARGEST)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, this version reads {FORMAT}")
        metrics = {}
        for name, about in values["metrics"].items():
            if about["kind"] not in get_args(Kind):
                raise ValueError(f"{name} has the unknown kind {about['kind']!r}")
            items = {item: np.array(summands, dtype=np.float64) for item, summands in values["scores"][name].items()}
            for item, summands in items.items():
                counted = about["kind"] not in _RATIOS or (summands.shape == (2,) and summands[1] > 0)
                if summands.ndim != 1 or not summands.size or not np.isfinite(summands).all() or not counted:
                    raise ValueError(f"{name} of item {item[:40]} is not a valid list of finite numbers")
            if not items:
                raise ValueError(f"{name} has no items")
            bounds = about.get("bounds") and (float(about["bounds"][0]), float(about["bounds"][1]))
            if bounds and not all(within(summands[0] / summands[1], bounds) for summands in items.values()):
                raise ValueError(f"{name} has values outside of its bounds {bounds}")
            if about["better"] not in get_args(Better):
                raise ValueError(
                    f"{name}: `better` is {about['better']!r}, expected one of {', '.join(get_args(Better))}"
                )
            metrics[name] = MetricResult(
                name,
                ItemScores(about["kind"], items, bounds),
                about["better"],
                about["texts"],
                about["left_out"],
                about["about"],
            )
        return metrics, dict(values["digests"])
    except (InputError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{path} is not a valid results file ({type(error).__name__}: {error}); recreate it with `posttrain evaluate text`"
        ) from error


def estimate_cells(kind: str, value: Estimate) -> tuple[str, str]:
    """A value and its interval as text; rates are percentages."""
    few = 2 if abs(value.value) >= 100 else 4
    digits, scale, unit = {"rate": (1, 100, "%"), "mean": (few, 1, "")}.get(kind, (2, 1, ""))
    shown = f"{value.value * scale:.{digits}f}{unit}"
    if math.isnan(value.low):
        return shown, "–"
    return shown, f"[{value.low * scale:.{digits}f}, {value.high * scale:.{digits}f}]"
