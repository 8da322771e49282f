"""What came of several runs: their final results in one table and one figure, with the mean over seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from posttrain.recipe.rollout import SCORES
from posttrain.runs.comparison import Bundle, looks, t_interval
from posttrain.runs.figures import STYLE, entitle, plain
from posttrain.runs.metrics import metric_of
from posttrain.runs.sources import Source
from posttrain.runs.tables import Table

_RATES = ("success", "test/accuracy")
_FIRST = ("success", "return")
_LAST = ("test/accuracy", "test/loss")
_NAME = 40
"""Characters of a run's name beside its points."""
_LIMITS = ("_low", "_high")
_LISTED = 4

Result = tuple[float, float, float]
"""Value and its 95% limits, NaN where there is no interval."""


def final_results(source: Source) -> dict[str, Result]:
    """Metric -> result of the last `final` line of a run: of its best checkpoint, or of the model that was evaluated."""
    line = _final(source)
    scores = [key for key in line if key.startswith(SCORES) and not key.endswith(_LIMITS)]
    keys = [key for key in (*_FIRST, *scores, *_LAST) if isinstance(line.get(key), (int, float))]
    return {key: (line[key], _limit(line, f"{key}_low"), _limit(line, f"{key}_high")) for key in keys}


def result_table(bundles: Sequence[Bundle]) -> Table | None:
    """A row for each run that has ended, and one for each mean over seeds; None where no run has ended."""
    rows: list[tuple[str, str, str, dict[str, Result]]] = []
    for bundle in bundles:
        ended = [(source, found) for source in bundle.sources if (found := final_results(source))]
        for source, found in ended:
            line = _final(source)
            rows.append(
                (
                    source.name,
                    str(line.get("best_step", "–")),
                    str(line.get("n") or line.get("test/rows") or "–"),
                    found,
                )
            )
        if len(ended) > 1:
            rows.append((f"{bundle.label}, mean of {len(ended)} seeds", "–", "–", _mean([found for _, found in ended])))
    if not rows:
        return None
    keys = list(dict.fromkeys(key for *_, found in rows for key in found))
    cells = [(name, step, n, *(_cell(key, found.get(key)) for key in keys)) for name, step, n, found in rows]
    note = (
        f"{_about_the_data(bundles)} `n` is the number of environment seeds, or of rows. In brackets "
        "95% intervals: over seeds of the environment or over rows for a run, Student's t over the runs for a mean of seeds."
    )
    if "test/loss" in keys and _stages(bundles) > 1:
        note += " The losses of different stages are different things."
    headings = ("run", "checkpoint", "n", *(key.removeprefix(SCORES) for key in keys))
    return Table("Final results", headings, cells, note, words=("run",))


def draw_results(bundles: Sequence[Bundle]) -> Figure | None:
    """A panel for each metric, a point for each run; None for fewer than two runs that have ended."""
    rows: list[tuple[str, str, dict[str, Result]]] = []
    for bundle, look in zip(bundles, looks(len(bundles)), strict=True):
        rows += [(one.name, look.color, found) for one in bundle.sources if (found := final_results(one))]
    counts = [key for _, _, found in rows for key in found]
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
            for place, (_, color, found) in enumerate(rows):
                if key in found:
                    value, low, high = found[key]
                    lengths = (
                        None
                        if math.isnan(low) or math.isnan(high)
                        else [[max(0.0, value - low)], [max(0.0, high - value)]]
                    )
                    axes.errorbar([value], [place], xerr=lengths, fmt="o", color=color, capsize=3, markersize=6)
            axes.set_title(key.removeprefix(SCORES))
            if key in _RATES:
                axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_yticks(range(len(rows)), [plain(name, _NAME).replace("$", r"\$") for name, *_ in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
        entitle(figure, "Final results, 95% intervals")
    return figure


def _about_the_data(bundles: Sequence[Bundle]) -> str:
    """Whether choices were made on the data of the results: without `data.test`, rows are those of validation."""
    ended = [(source, found) for bundle in bundles for source in bundle.sources if (found := final_results(source))]
    again = [source.name for source, found in ended if any(key in _LAST for key in found) and not _has_test(source)]
    if not again:
        return "Final held-out data, on which nothing was chosen."
    alike = len(again) == len(ended) and all(key in _LAST for _, found in ended for key in found)
    whose = f"The rows of {', '.join(again[:_LISTED])}" + (
        f" and {len(again) - _LISTED} more" if again[_LISTED:] else ""
    )
    return (
        f"Final held-out data. {whose} are validation rows, on which the checkpoint was chosen too, "
        f"since no `data.test` is named{'' if alike else '; on all other data nothing was chosen'}."
    )


def _has_test(source: Source) -> bool:
    data = (source.recipe or {}).get("data")
    return isinstance(data, Mapping) and bool(data.get("test"))


def _stages(bundles: Sequence[Bundle]) -> int:
    return len({source.stage for bundle in bundles for source in bundle.sources} - {None})


def _final(source: Source) -> Mapping[str, Any]:
    return next((line for line in reversed(source.lines) if line["kind"] == "final"), {})


def _limit(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return math.nan if value is None else value


def _mean(results: Sequence[Mapping[str, Result]]) -> dict[str, Result]:
    common = [key for key in results[0] if all(key in found for found in results)]
    return {key: t_interval([found[key][0] for found in results]) for key in common}


def _cell(key: str, result: Result | None) -> str:
    if result is None:
        return "–"
    value, low, high = result
    if key in _RATES:
        # Student's t knows nothing of where rates end.
        low, high = max(low, 0.0), min(high, 1.0)
        return f"{100 * value:.1f}%" + ("" if math.isnan(low) else f" [{100 * low:.1f}, {100 * high:.1f}]")
    return f"{value:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")
