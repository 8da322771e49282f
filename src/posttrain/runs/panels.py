"""Contents of figures: the metrics of every panel, their values in order of step, and their titles."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.metrics import BLUE, GREEN, HELD_OUT, ORANGE, PURPLE, RED, SKY, TRAINING, Curve, Metric, Panel
from posttrain.recipe.reference import metrics_of
from posttrain.recipe.registry import REGISTRIES
from posttrain.recipe.rollout import SCORES
from posttrain.recipe.stages import STAGES
from posttrain.runs.log import Line, Log

MOST_POINTS = 2_000
"""Maximum number of points of a drawn curve, about two per pixel. Longer ones take seconds and gigabytes to draw."""

MEASURED = ("evaluation", "audit")
"""Kinds of the lines with held-out values."""
PHASES = {
    "rollout": BLUE,
    "waited_for_rollout": BLUE,
    "rows": RED,
    "credit": SKY,
    "update": ORANGE,
    "evaluation": GREEN,
    "checkpoint": PURPLE,
}
"""Phases of a step, in the order of their bars, and their colors."""
DOMAINS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
"""Colors of the domains in a panel."""


@dataclass(frozen=True)
class Series:
    """One metric in order of step: steps, values, and the steps at which it was NaN or infinite."""

    steps: list[int]
    values: list[float]
    nonfinite: list[int]


RATE: dict[str, Any] = {"percent": True, "whole": True}
"""Panel settings of rates."""
GUESSING = (0.5, "guessing, 50%")

TITLES = {
    "learning_curve": "Learning curve",
    "metrics_vs_overall": "Scores against the overall score",
    "metrics_vs_step": "Scores against the step",
    "metrics_vs_training": "Scores against the training return",
    "rows": "Training and validation rows",
    "preference": "Preferences",
    "domains": "Domains",
    "audit": "Reward and audit",
    "reward": "Reward",
    "kl": "Kullback-Leibler divergence",
    "entropy": "Entropy and repetition",
    "lengths": "Lengths",
    "critic": "Critic",
    "units": "Units",
    "optimization": "Optimization",
    "time": "Time per phase",
}


@dataclass(frozen=True)
class Sampling:
    """How a run's episodes are sampled, in words for the labels of its curves."""

    training: str = "sampled"
    held_out: str = ""

    @classmethod
    def of(cls, recipe: Mapping[str, Any] | None) -> "Sampling":
        """From the content of recipe.yaml, which has every default. Foreign content may lack the keys."""
        words = {}
        for name, section in (("training", "rollout"), ("held_out", "evaluation")):
            part = (recipe or {}).get(section)
            sampling = part.get("sampling") if isinstance(part, Mapping) else None
            heat = sampling.get("temperature") if isinstance(sampling, Mapping) else None
            if isinstance(heat, int | float) and 0 <= heat < 1e6:
                words[name] = "greedy" if heat == 0 else f"temperature {heat:g}"
        return cls(**words)


def labeled(name: str, how: str) -> str:
    """The label of a curve of episodes that are sampled as `how` says; empty if that is unknown."""
    return f"{name}, {how}" if how else name


def all_metrics() -> dict[str, Metric]:
    """Name -> every declared metric, in the order of the stages and of their sections. Of equal names, the first counts."""
    sections = (section for registry in REGISTRIES.values() for section in registry.sections())
    return _metrics((*sections, *STAGES.values()))


@cache
def _metrics(kinds: tuple[type, ...]) -> dict[str, Metric]:
    """`kinds`: those of the registries and the stages, which a new one changes."""
    metrics: dict[str, Metric] = {}
    for schema in STAGES.values():
        for metric in metrics_of(schema):
            metrics.setdefault(metric.name, metric)
    return metrics


def declared_panels() -> dict[str, list[Panel]]:
    """Figure -> its panels in the order of `TITLES`, with a curve for each metric that names the panel."""
    figures: dict[str, dict[Panel, list[Curve]]] = {name: {} for name in TITLES}
    for metric in all_metrics().values():
        if (panel := metric.panel) is not None:
            curve = Curve(metric.name, metric.meaning, metric.color)
            figures.setdefault(panel.figure, {}).setdefault(panel, []).append(curve)
    return {
        name: [replace(panel, curves=curves) for panel, curves in panels.items()]
        for name, panels in figures.items()
        if panels
    }


def panels_of(name: str, lines: Sequence[Line]) -> list[Panel]:
    """The panels of the figure `name`; some depend on the metrics of the run."""
    if name == "domains":
        return _domain_panels(lines)
    panels = declared_panels().get(name, [])
    if alarms := [line["step"] for line in Log.of(lines) if line["kind"] == name == "audit" and line.get("alarm")]:
        return [replace(panel, title=f"{panel.title}; only the reward rose at step {min(alarms)}") for panel in panels]
    if name != "rows":
        return panels
    look: dict[str, Any] = {"from_zero": False, "smoothed": True}
    held_out = Curve("validation/loss", "validation rows", HELD_OUT)
    nll = Curve("loss/nll", "training rows", TRAINING)
    if not _has_preferences(lines):
        return [Panel("Loss", "nats per token", [nll, held_out], **look), *panels]
    preference = Curve("loss/preference", "training rows", TRAINING)
    return [
        Panel("Preference loss", "loss per row", [preference, held_out], **look),
        Panel("Supervised loss of the chosen answer", "nats per token", [nll], **look),
        *panels,
    ]


LARGEST_DRAWN = 1e300
"""Larger values count as infinite, because the axes of a figure overflow before a float does."""


def series_of(lines: Sequence[Line], key: str) -> Series | None:
    """The metric `key` in order of step; None if no line has it."""
    log = Log.of(lines)
    evaluations = [line for line in log if line["kind"] in MEASURED]
    points = list(zip(*(column.tolist() for column in log.trained(key)), strict=True))
    if measured := [(one["step"], float(one[key])) for one in evaluations if isinstance(one.get(key), (int, float))]:
        points = sorted([*points, *measured], key=itemgetter(0))
    bad = [step for step, keys in log.nonfinite if key in keys]
    bad += [line["step"] for line in evaluations if key in line.get("nonfinite", ())]
    bad += [step for step, value in points if abs(value) >= LARGEST_DRAWN]
    points = [point for point in points if abs(point[1]) < LARGEST_DRAWN]
    if not points and not bad:
        return None
    return Series([step for step, _ in points], [value for _, value in points], sorted(bad))


def limits_of(lines: Sequence[Line], key: str) -> list[tuple[int, float, float, float]]:
    """(step, low, value, high) of the evaluations that have an interval for `key`, in order of step.

    The limits of `success` are `success_low` and `success_high`; those of `validation/loss/medicine` are
    `validation/loss_low/medicine` and `validation/loss_high/medicine`.
    """
    split, metric, *domain = key.split("/", 2) if "/" in key else ("", key)
    low, high = ("/".join([*([split] if split else []), f"{metric}_{side}", *domain]) for side in ("low", "high"))
    return sorted(
        (line["step"], line[low], line[key], line[high])
        for line in Log.of(lines)
        if line["kind"] in MEASURED and None not in (line.get(low), line.get(high), line.get(key))
    )


def keys_of(lines: Sequence[Line]) -> list[str]:
    """Every metric that can be drawn as a curve: those of training, then those of evaluations."""
    log = Log.of(lines)
    keys = dict.fromkeys(log.columns)
    for line in log:
        for key, value in line.items() if line["kind"] in MEASURED else ():
            limit = key.split("/")[0 if key.count("/") == 0 else 1].endswith(("_low", "_high"))
            number = isinstance(value, (int, float)) or key in line.get("nonfinite", ())
            if number and key != "step" and not limit:
                keys[key] = None
    return list(keys)


def is_trained(lines: Sequence[Line], key: str) -> bool:
    """Whether the metric `key` belongs to training steps rather than evaluations."""
    return not any(line["kind"] in MEASURED and key in line for line in Log.of(lines))


def _has_preferences(lines: Sequence[Line]) -> bool:
    """Whether the run learns from preferences, whose loss is per row rather than per token."""
    return not {"loss/preference", "validation/accuracy"}.isdisjoint(keys_of(lines))


def _domain_panels(lines: Sequence[Line]) -> list[Panel]:
    """Curves per domain, for the first `len(DOMAINS)` domains in alphabetical order."""
    keys, panels = keys_of(lines), []
    loss = ("Preference loss", "loss per row") if _has_preferences(lines) else ("Loss", "nats per token")
    for metric, title, unit, look in (
        ("loss", *loss, {}),
        ("accuracy", "Accuracy", "ranking accuracy", {**RATE, "reference": GUESSING}),
    ):
        start = f"validation/{metric}/"
        domains = sorted({key.removeprefix(start) for key in keys if key.startswith(start)})
        shown = domains[: len(DOMAINS)]
        more = f", the first {len(shown)} of {len(domains)} domains" if len(domains) > len(shown) else ""
        curves = [Curve(f"{start}{domain}", domain, color) for domain, color in zip(shown, DOMAINS, strict=False)]
        name = f"{title} of the validation rows{more}"
        panels += [Panel(name, unit, curves, from_zero=False, compared=True, **look)] if curves else []
    return panels


_EPISODE_METRICS = {
    "success": Panel("Success", "success", (), **RATE),
    "return": Panel("Return", "reward per episode", (), from_zero=False),
}
_PLAIN = Panel("", "value", (), from_zero=False)


@dataclass(frozen=True)
class MetricLook:
    """Display settings of one metric. `panel` provides the unit and the axis; its curves are not used."""

    key: str
    what: str
    """The data that it is measured on, as text; may be empty."""
    panel: Panel

    @property
    def file(self) -> str:
        """File name without suffix."""
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in self.key).strip(".") or "metric"


def metric_of(key: str) -> MetricLook:
    """Display settings of the metric `key`. The title of an unknown metric is its key."""
    base = key.removeprefix("rollout/")
    where = "training episodes" if base != key else "held-out seeds"
    if base in _EPISODE_METRICS:
        return MetricLook(key, where, _EPISODE_METRICS[base])
    if base.startswith(SCORES):
        return MetricLook(key, where, Panel(f"Score: {base.removeprefix(SCORES)}", "score", ()))
    if key.startswith("validation/loss"):
        panel = Panel("Validation loss", "loss", (), from_zero=False)
        return MetricLook(key, key.removeprefix("validation/loss").removeprefix("/") or "all", panel)
    drawn = [(panel, curve) for panels in declared_panels().values() for panel in panels for curve in panel.curves]
    look = next((MetricLook(key, curve.label, panel) for panel, curve in drawn if curve.key == key), None)
    return look or MetricLook(key, "", replace(_PLAIN, title=key))


def known_metrics(present: Iterable[str]) -> list[str]:
    """The metrics of `present` that are drawn by default, in the order of the report."""
    available = set(present)
    scores = sorted(key for key in available if key.startswith((SCORES, f"rollout/{SCORES}")))
    panels = [curve.key for panels in declared_panels().values() for panel in panels for curve in panel.curves]
    results = ("success", "return", *scores, "validation/loss", "rollout/success", "rollout/return")
    ordered = [*results, *panels, "loss/nll", "loss/preference"]
    return [key for key in dict.fromkeys(ordered) if key in available]


def check_metric(key: str, present: Iterable[str], final_only: Iterable[str] = ()) -> None:
    """Raise `InputError` with the nearest names if `key` is not in `present`; `final_only` are keys without a curve."""
    keys = sorted(present)
    if key in keys:
        return
    if key in final_only:
        raise InputError(f"--metric {key} is only measured at the end; omit --metric to get it in results.md")
    near = difflib.get_close_matches(key, keys, n=3) or [one for one in keys if key in one][:3] or keys[:3]
    if not near:
        raise InputError(f"--metric {key}: no metrics yet; wait for the first step")
    raise InputError(f"--metric {key}: no run has this metric; did you mean {', '.join(near)}?")
