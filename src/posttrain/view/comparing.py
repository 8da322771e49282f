"""The page that compares runs: curves together, paired differences, and the recipe keys that differ."""

import math
from collections.abc import Sequence
from typing import Any

from posttrain.runs.panels import DOMAINS, MetricLook, Series, is_trained, limits_of, series_of
from posttrain.runs.sources import Bundle, Source, bundles_of, mean_over_seeds, shared_metrics
from posttrain.view.charts import counts_of, levels_of, reference_of

_DASHES = 4


def bundled(sources: Sequence[Source], apart: bool) -> list[Bundle]:
    """What is compared: groups of seeds, or each run if they are `apart`."""
    return [Bundle(source.name, (source,)) for source in sources] if apart else bundles_of(sources)[0]


def charts_of_runs(sources: Sequence[Source], apart: bool = False) -> list[dict[str, Any]]:
    """A chart per metric that runs share, with a curve per run or per group of seeds; as `charts.charts_of`."""
    bundles = bundled([source for source in sources if source.lines], apart)
    metrics, _ = shared_metrics(bundles) if bundles else ([], [])
    charts = (_chart(metric, bundles) for metric in metrics)
    return [{**chart, "id": f"chart-{number}"} for number, chart in enumerate(charts) if chart["curves"]]


def _chart(metric: MetricLook, bundles: Sequence[Bundle]) -> dict[str, Any]:
    curves = []
    for number, bundle in enumerate(bundles):
        look = {"color": DOMAINS[number % len(DOMAINS)], "dash": number // len(DOMAINS) % _DASHES}
        found = [series for one in bundle.sources if (series := series_of(one.lines, metric.key)) is not None]
        if found and len(found) == len(bundle.sources):
            trained = all(is_trained(one.lines, metric.key) for one in bundle.sources)
            curve = _curve(metric, bundle, found)
            curves += (
                [{"key": f"{metric.key} {bundle.label}", "trained": trained, **look, **curve}] if curve["x"] else []
            )
    where = f", {metric.what}" if metric.what else ""
    panel = metric.panel
    shared = [levels_of(one.lines, metric.key) for bundle in bundles for one in bundle.sources]
    levels = [level for level in shared[0] if all(level in one for one in shared)]
    levels += reference_of(panel)
    look = {"title": f"{panel.title}{where}", "unit": panel.unit, "percent": panel.percent, "whole": panel.whole}
    return {"section": "Curves", **look, "log": panel.logarithmic, "curves": curves, "levels": levels}


def _curve(metric: MetricLook, bundle: Bundle, found: Sequence[Series]) -> dict[str, Any]:
    if len(found) > 1:
        mean = mean_over_seeds(found, rate=metric.panel.percent)
        limits = {"low": list(map(_finite, mean.low)), "high": list(map(_finite, mean.high))}
        counts = {"n": [len(found)] * len(mean.steps)}
        return {"label": bundle.title, "x": mean.steps, "y": mean.values, "nonfinite": [], **limits, **counts}
    (series,) = found
    curve: dict[str, Any] = {
        "label": bundle.title,
        "x": series.steps,
        "y": series.values,
        "nonfinite": series.nonfinite,
    }
    held_out = counts_of(bundle.sources[0].lines)
    limits_at = {step: (low, high) for step, low, _, high in limits_of(bundle.sources[0].lines, metric.key)}
    if limits_at:
        curve["low"] = [limits_at.get(step, (None, None))[0] for step in series.steps]
        curve["high"] = [limits_at.get(step, (None, None))[1] for step in series.steps]
        curve["n"] = [held_out.get(step) for step in series.steps]
    return curve


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def paired(sources: Sequence[Source], apart: bool = False) -> dict[str, Any]:
    """What `posttrain compare` says about the runs: its table, notes and sentence. Every other side against the first."""
    from posttrain.evaluation.compare import compare
    from posttrain.evaluation.sides import read_sides

    bundles = bundled(sources, apart)
    if len(bundles) == 1 < len(sources):
        return {"alone": True}
    words = [f"{bundle.label}={','.join(str(one.path) for one in bundle.sources)}" for bundle in bundles]
    comparison = compare(read_sides(words), common=True)
    warnings = [f"warning: {line}" for line in comparison.warnings]
    return {
        "alone": False,
        "table": comparison.table(),
        "notes": [*comparison.details, *warnings],
        "sentence": comparison.sentence(),
    }
