"""What the pages of one run and of several show."""

import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from posttrain.errors import InputError, PosttrainError
from posttrain.figures.charts import Chart, axes_of, chart_of_runs, charts_of, marks_of
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import Log, read_log
from posttrain.runs.panels import Sampling
from posttrain.runs.reader import complete_lines, open_file, read_json
from posttrain.runs.report import Report
from posttrain.runs.sources import Bundle, Source, bundles_of, shared_metrics
from posttrain.view.listing import STARTED, Scanner, Summary


class Logs:
    """Cache of the metrics of recently viewed runs. Only appended lines are read."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[int, int, Log]] = OrderedDict()
        """Path -> inode, bytes that were read, and their log."""
        self._lock = Lock()

    def read(self, path: Path) -> Log:
        """The metrics log at `path`; raises `RunError` for a damaged line."""
        with self._lock:
            inode, end, log = self._kept.pop(path, (0, 0, Log()))
            try:
                file = open_file(path)
            except FileNotFoundError:
                return log
            with file:
                status = os.fstat(file.fileno())
                if status.st_ino != inode or status.st_size < end:  # the file was replaced
                    inode, end, log = status.st_ino, 0, Log()
                file.seek(end)
                lines = list(complete_lines(file, path))
            try:
                log = log.extended(lines) if lines else log
            except ValueError:
                return read_log(path)  # raises the error with the number of the line
            self._kept[path] = inode, end + sum(map(len, lines)), log
            while len(self._kept) > 8:
                self._kept.popitem(last=False)
            return log


def charts(logs: Logs, path: Path) -> dict[str, Any]:
    """The charts of a run, and what happened at which step."""
    log = logs.read(path / "metrics.jsonl")
    sampling = Sampling()
    with suppress(PosttrainError):  # a foreign folder may lack its recipe
        sampling = Sampling.of(RunDirectory.open(path).recipe_values())
    marks = [asdict(mark) for mark in marks_of(log)]
    return {"charts": _numbered(charts_of(log, sampling)), "marks": marks, "axes": axes_of(log)}


def _numbered(charts: Iterable[Chart]) -> list[dict[str, Any]]:
    return [{**chart.values(), "id": f"chart-{number}"} for number, chart in enumerate(charts)]


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline, and where its result is between the ends of an axis that stages with the same metric share."""

    run: Summary
    low: float = 0.0
    high: float = 1.0

    def place(self, value: float | None) -> float | None:
        """Where a value is on the axis, from 0 to 100; None for none."""
        if value is None or not math.isfinite(value):
            return None
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def stages_of(scanner: Scanner, name: str) -> list[Stage]:
    """The stages of the pipeline `name` in their order. InputError if there is no such pipeline."""
    runs = [scanner.summary(one, path) for one, path in scanner.find().items() if one.rpartition("/")[0] == name]
    runs = [run for run in runs if run.pipeline]
    if not runs:
        raise InputError(f"there is no pipeline {name} in {scanner.folder}; go back to the list of runs")
    order = [*read_json(runs[0].path.parent / STARTED)]
    runs.sort(key=lambda run: order.index(run.path.name) if run.path.name in order else len(order))
    stages = []
    for run in runs:
        alike = [one for one in runs if (one.metric, one.percent) == (run.metric, run.percent) and one.best]
        values = [value for one in alike for value in (*(one.best or ()), one.random, one.optimal)]
        known = [value for value in values if value is not None and math.isfinite(value)]
        low, high = (0.0, 1.0) if run.percent or not known else (min(known), max(known))
        stages.append(Stage(run, low, high if high > low else low + 1))
    return stages


def bundled(sources: Sequence[Source], apart: bool) -> list[Bundle]:
    """What is compared: groups of seeds, or each run if they are `apart`."""
    return [Bundle(source.name, (source,)) for source in sources] if apart else bundles_of(sources)[0]


def charts_of_runs(sources: Sequence[Source], apart: bool = False) -> list[dict[str, Any]]:
    """A chart per metric that runs share, with a curve per run or per group of seeds."""
    bundles = bundled([source for source in sources if source.lines], apart)
    charts = (chart_of_runs(metric, bundles)[0] for metric in (shared_metrics(bundles)[0] if bundles else ()))
    return _numbered(chart for chart in charts if chart is not None)


def paired(sources: Sequence[Source], apart: bool = False) -> dict[str, Any]:
    """The comparison that `posttrain compare` prints. Every other side against the first."""
    from posttrain.evaluation.compare import compare
    from posttrain.evaluation.sides import read_sides

    bundles = bundled(sources, apart)
    if len(bundles) == 1 < len(sources):
        return {"alone": True}
    words = [f"{bundle.label}={','.join(str(one.path) for one in bundle.sources)}" for bundle in bundles]
    compared = compare(read_sides(words))
    notes = [*compared.details, *(f"warning: {line}" for line in compared.warnings)]
    return {"alone": False, "table": compared.table(), "notes": notes, "sentence": compared.sentence()}


def facts(logs: Logs, path: Path) -> Report:
    """What a report says about the run. What cannot be read is in `missing`."""
    run = RunDirectory(path)
    report = Report(path.name, str(path))
    try:
        report.read(run, logs.read(run.metrics))
    except PosttrainError as error:
        report.missing.append(str(error))
    return report
