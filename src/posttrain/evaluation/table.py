"""One table of several models: values of all metrics with intervals, and differences from a base model."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import InputError
from posttrain.evaluation.compare import (
    PairedTest,
    check_environments,
    check_prompts,
    check_settings,
    limits_text,
    p_text,
    paired_test,
    value_text,
)
from posttrain.evaluation.results import Better, estimate_cells
from posttrain.evaluation.sides import Run
from posttrain.evaluation.statistics import DRAWS, Kind, estimate, holm
from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.runs.intervals import Estimate
from posttrain.runs.tables import Table

FORMATS = (".md", ".csv", ".tex", ".html")
_ARROWS: dict[Better, str] = {"higher": " ↑", "lower": " ↓", "neither": ""}


@dataclass(frozen=True)
class Entry:
    """One metric of one model."""

    model: str
    metric: str
    kind: Kind
    better: Better
    value: Estimate
    """Value over all items that the model has."""
    test: PairedTest | None
    """Test of this model (B) against the base (A) on their shared items; None for the base, or if nothing can be
    tested.
    """

    @property
    def difference(self) -> str:
        """The difference from the base with its interval, and `*` if it is significant; empty without a test."""
        if self.test is None:
            return ""
        mark = " *" if self.test.better_side else ""
        return f"{value_text(self.test, self.test.difference.value, signed=True)} {limits_text(self.test)}{mark}"


@dataclass(frozen=True)
class ModelTable:
    """The metrics of several models."""

    base: str
    models: list[str]
    metrics: list[str]
    entries: list[Entry]
    """Entries by metric, then by model, without metrics that a model lacks."""
    warnings: list[str]
    """Caveats about the conclusions."""
    details: list[str]
    """Messages about data that was read, left out or not compared."""

    def table(self) -> Table:
        """Models x metrics. A cell contains the value, its interval, and the difference from the base."""
        entries = {(entry.model, entry.metric): entry for entry in self.entries}
        better = {entry.metric: entry.better for entry in self.entries}
        rows = [(name, *(_cell(entries.get((name, metric))) for metric in self.metrics)) for name in self.models]
        headings = ("model", *(f"{metric}{_ARROWS[better[metric]]}" for metric in self.metrics))
        return Table("Models", headings, rows, self._note(), words=("model",))

    def listed(self) -> Table:
        """The same numbers with one row per metric and model, including n and p."""
        rows = [
            (
                f"{entry.metric}{_ARROWS[entry.better]}",
                entry.model,
                "\n".join(estimate_cells(entry.kind, entry.value)),
                str(entry.value.n),
                entry.difference.replace(" [", "\n[") or "–",
                p_text(entry.test.corrected) if entry.test else "–",
                str(entry.test.n) if entry.test else "–",
            )
            for entry in self.entries
        ]
        headings = ("metric", "model", "value", "n", f"minus {self.base}", "p", "shared")
        return Table("", headings, rows, self._note(), words=("metric", "model"))

    def csv(self) -> str:
        """All numbers, unrounded, with a line per metric and model. Rates are in [0, 1]. Unknown values are empty."""
        columns = ["model", "metric", "better", "value", "low", "high", "n", "base", "difference"]
        columns += ["difference_low", "difference_high", "p", "p_corrected", "shared"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for entry in self.entries:
            value, test = entry.value, entry.test
            numbers = [value.value, value.low, value.high, value.n]
            compared: list[object] = [""] * 7
            if test is not None:
                limits = (test.difference.low, test.difference.high)
                compared = [self.base, test.difference.value, *limits, test.p, test.corrected, test.n]
            cells = [entry.model, entry.metric, entry.better, *numbers, *compared]
            writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells])
        return text.getvalue()

    def write(self, path: Path) -> None:
        """Write the table in the format of the suffix of `path`, one of `FORMATS`; raises `RunError` if that fails."""
        if path.suffix == ".csv":
            text = self.csv()
        elif path.suffix == ".md":
            lines = [*self.details, *(f"warning: {line}" for line in self.warnings)]
            text = "\n\n".join([self.table().markdown(), self._note(), *lines]) + "\n"
        else:
            text = (self.table().latex() if path.suffix == ".tex" else self.table().html()) + "\n"
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)

    def _note(self) -> str:
        note = "Brackets: 95% intervals over items. ↑: higher is better, ↓: lower is better."
        tests = sum(entry.test is not None for entry in self.entries)
        if tests:
            note += (
                f" Signed numbers: difference from {self.base} on the items that both have, with its interval; "
                f"* p < 0.05 after Holm's correction for the {tests} differences of this table (McNemar's exact test for "
                "binary scores, else Student's t). They say nothing about models trained with other seeds."
            )
        return note


def require_formats(paths: Sequence[Path]) -> None:
    """Raises `InputError` for a path whose suffix is not in `FORMATS`."""
    for path in paths:
        if path.suffix not in FORMATS:
            raise InputError(f"--out {path} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


def model_table(
    models: Sequence[Run],
    metrics: Sequence[str] | None = None,
    base: str | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> ModelTable:
    """Compute the table of `models`, whose paths are their names.

    Args:
        metrics: the metrics to show, in this order; None shows all in the order of the files.
        base: the model that all others are compared with; None selects the first.
        seed, draws: seed and number of samples of the bootstrap.

    Raises:
        InputError: an unknown metric or base, a metric computed with different settings, or items with equal ids and
            different prompts or references.
    """
    names = [model.path for model in models]
    if base is not None and base not in names:
        raise InputError(f"--base {base} is not a model of the table; use one of {', '.join(names)}")
    known = list(dict.fromkeys(metric for model in models for metric in model.metrics))
    if unknown := [metric for metric in metrics or [] if metric not in known]:
        raise InputError(f"no model has the metric {unknown[0]!r}; the files have {', '.join(known)}")
    chosen = list(dict.fromkeys(known if metrics is None else metrics))
    first = models[0] if base is None else models[names.index(base)]
    details = [line for model in models for line in model.details]
    warnings = check_environments(models)
    for model in models:
        check_prompts([first, model], first.digests.keys() & model.digests.keys())
    entries = []
    for metric in chosen:
        having = [model for model in models if metric in model.metrics]
        warnings += check_settings(metric, having)
        for model in having:
            result = model.metrics[metric]
            details += [f"{model.path}: {metric}: {count} left out: {why}" for why, count in result.left_out.items()]
            test = None if model is first else _test(metric, first, model, details, seed, draws)
            value = estimate(result.scores)
            entries.append(Entry(model.path, metric, result.scores.kind, result.better, value, test))
    corrected = iter(holm([entry.test.p for entry in entries if entry.test]))
    entries = [
        Entry(**{**vars(entry), "test": entry.test.with_correction(next(corrected))}) if entry.test else entry
        for entry in entries
    ]
    return ModelTable(first.path, names, chosen, entries, list(dict.fromkeys(warnings)), list(dict.fromkeys(details)))


def _test(metric: str, base: Run, model: Run, details: list[str], seed: int, draws: int) -> PairedTest | None:
    """The test of `model` against `base`; None with a message in `details` if there is nothing to test."""
    better = model.metrics[metric].better
    if metric not in base.metrics or better == "neither":
        return None
    a, b = (run.metrics[metric].scores for run in (base, model))
    shared = sorted(a.items.keys() & b.items.keys())
    if len(shared) < max(len(a), len(b)):
        counts = f"{len(shared)} shared items of {len(b)}, and of {len(a)} of {base.path}"
        details.append(f"{model.path}: {metric}: {counts}")
    return paired_test(metric, better, [a], [b], shared, seed, draws) if len(shared) > 1 else None


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return "–"
    return "\n".join(part for part in (*estimate_cells(entry.kind, entry.value), entry.difference) if part)
