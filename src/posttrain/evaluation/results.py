"""Results of an evaluation as one JSON file that holds the numbers, and the summands that they can be compared by."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from posttrain.errors import InputError
from posttrain.evaluation.scores import ItemScores, estimate
from posttrain.evaluation.statistics import Estimate
from posttrain.evaluation.text_metrics import Better, Measured
from posttrain.runs.files import write_atomically
from posttrain.runs.tables import Table

FORMAT = 1
_FEW = 30
"""Prompts below which intervals are told to be rough."""
_KINDS = ("rate", "mean", "perplexity", "bleu", "chrf")


@dataclass
class Results:
    """What was measured of one file of predictions."""

    predictions: str
    rows: int
    items: int
    dropped: Sequence[str] = ()
    """What was wrong with rows, in sentences: those in no metric, and answers that are cut off or empty."""
    measured: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Metrics that could not be had, and why."""
    digests: dict[str, str] = field(default_factory=dict)
    """Item -> digest of its prompt and reference: items of the same name may come from other data."""

    def estimates(self) -> dict[str, Estimate]:
        return {one.name: estimate(one.scores) for one in self.measured}

    def table(self) -> Table:
        """A row for each metric."""
        rows = []
        found = self.estimates()
        for one in self.measured:
            value = found[one.name]
            rows.append((one.name, *_shown(one.scores.kind, value), str(value.n), str(one.texts)))
        return Table(
            title=self.predictions,
            headings=("metric", "value", "95% interval", "n", "texts"),
            rows=rows,
            note="`n` is prompts; intervals are 95%, over prompts.",
            words=("metric",),
        )

    def remarks(self) -> list[str]:
        """What to know of the numbers: signatures, layers, models, rows left out."""
        about: dict[str, list[str]] = {}
        for one in self.measured:
            known = [f"{key} {_text(value)}" for key, value in one.about.items()]
            missing = [f"{count} left out: {reason}" for reason, count in one.left_out.items()]
            if said := "; ".join([*known, *missing]):
                about.setdefault(said, []).append(one.name)
        few = [one.name for one in self.measured if len(one.scores) < _FEW]
        rough = f"{', '.join(few)}: fewer than {_FEW} prompts, so the interval is a rough one"
        told = [f"{', '.join(names)}: {said}" for said, names in about.items()]
        return [*told, *([rough] if few else []), *self.dropped]

    def write(self, path: Path) -> None:
        """Write `path`, whole or not at all; RunError where the disk refuses."""
        found = self.estimates()
        values = {
            "format": FORMAT,
            "predictions": self.predictions,
            "rows": self.rows,
            "items": self.items,
            "dropped": list(self.dropped),
            "metrics": {
                one.name: {
                    "value": _finite(found[one.name].value),
                    "low": _finite(found[one.name].low),
                    "high": _finite(found[one.name].high),
                    "n": found[one.name].n,
                    "texts": one.texts,
                    "kind": one.scores.kind,
                    "better": one.better,
                    "left_out": dict(one.left_out),
                    "about": dict(one.about),
                }
                for one in self.measured
            },
            "failed": self.failed,
            "digests": self.digests,
            "scores": {
                one.name: {item: summands.tolist() for item, summands in one.scores.items.items()}
                for one in self.measured
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, ensure_ascii=False, indent=1) + "\n")


def read_results(path: Path) -> tuple[dict[str, Measured], dict[str, str]]:
    """The metrics of a results file by name, and its digests of items; InputError for a file that is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, this version reads {FORMAT}")
        found = {}
        for name, about in values["metrics"].items():
            if about["kind"] not in _KINDS:
                raise ValueError(f"{name} is of the unknown kind {about['kind']!r}")
            items = {item: np.array(own, dtype=np.float64) for item, own in values["scores"][name].items()}
            for item, own in items.items():
                counted = about["kind"] in ("bleu", "chrf") or (own.shape == (2,) and own[1] > 0)
                if own.ndim != 1 or not own.size or not np.isfinite(own).all() or not counted:
                    raise ValueError(f"{name} of item {item[:40]} is no list of finite numbers that make a score")
            if not items:
                raise ValueError(f"{name} has no items")
            if about["better"] not in get_args(Better):
                raise ValueError(f"{name} is better {about['better']!r}; known are {', '.join(get_args(Better))}")
            found[name] = Measured(
                name,
                ItemScores(about["kind"], items),
                about["better"],
                about["texts"],
                about["left_out"],
                about["about"],
            )
        return found, dict(values["digests"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no results file ({type(error).__name__}: {error}); write it anew with `posttrain evaluate text`"
        ) from error


def _shown(kind: str, value: Estimate) -> tuple[str, str]:
    few = 2 if abs(value.value) >= 100 else 4
    digits, scale, unit = {"rate": (1, 100, "%"), "mean": (few, 1, "")}.get(kind, (2, 1, ""))
    shown = f"{value.value * scale:.{digits}f}{unit}"
    if math.isnan(value.low):
        return shown, "–"
    return shown, f"[{value.low * scale:.{digits}f}, {value.high * scale:.{digits}f}]"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
