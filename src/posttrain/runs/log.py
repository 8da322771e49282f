"""A metrics log for figures, tables and pages: training steps as columns of numbers, all other lines as they are."""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import RunError
from posttrain.runs.metrics import parse_line, read_metrics
from posttrain.runs.reader import complete_lines, open_file

Line = dict[str, Any]
Columns = dict[str, np.ndarray]
MOST_METRICS = 10_000
"""Metrics of training steps in a log."""
_CHUNK = 8192
"""Lines that are columns before more are parsed, which bounds the memory."""
_KIND = re.compile(rb'"kind": ?"(\w+)"')


class Log(list[Line]):
    """The lines of a log in order, except those of training steps, which are `columns` of float64 [n].

    `steps`: int64 [n]. A column is NaN at the steps without a number. Texts of training lines are dropped.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        super().__init__()
        self.steps = np.zeros(0, np.int64)
        self.columns: Columns = {}
        self.nonfinite: list[tuple[int, list[str]]] = []
        """(step, metrics that were NaN or infinite) of training steps."""
        self._add(self._split(lines))

    @classmethod
    def of(cls, lines: Iterable[Line]) -> "Log":
        """`lines` if they are a log, else a log of them."""
        return lines if isinstance(lines, Log) else cls(lines)

    def __bool__(self) -> bool:
        return len(self) + len(self.steps) > 0

    def until(self, step: int) -> "Log":
        """The log up to `step`."""
        log, kept = Log(line for line in self if line["step"] <= step), self.steps <= step
        log.steps, log.columns = self.steps[kept], {key: values[kept] for key, values in self.columns.items()}
        log.nonfinite = [(at, keys) for at, keys in self.nonfinite if at <= step]
        return log

    def with_lines(self, lines: Iterable[Line]) -> "Log":
        """The training steps of this log with other lines of other kinds."""
        log = Log(lines)
        log.steps, log.columns, log.nonfinite = self.steps, self.columns, self.nonfinite
        return log

    def extended(self, raws: Iterable[bytes]) -> "Log":
        """The log with more lines; a reader of this one does not see it grow. ValueError for a damaged line."""
        log, parts = Log(self), [(self.steps, self.columns)]
        log.nonfinite = [*self.nonfinite]
        lines = map(parse_line, raws)
        while chunk := list(islice(lines, _CHUNK)):
            parts.append(log._split(chunk))
        log._add(*parts)
        return log

    @property
    def last_step(self) -> int:
        """The last training step; 0 before it."""
        return int(self.steps.max(initial=0))

    def trained(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric of training steps, in order of step, without NaN."""
        values = self.columns.get(key)
        if values is None:
            return self.steps[:0], np.zeros(0)
        known = np.flatnonzero(~np.isnan(values))
        order = known[np.argsort(self.steps[known], kind="stable")]
        return self.steps[order], values[order]

    def total(self, key: str) -> float:
        """The sum of a metric over training steps."""
        return float(np.nansum(self.columns.get(key, np.zeros(0))))

    def _split(self, lines: Iterable[Line]) -> tuple[np.ndarray, Columns]:
        """Append the lines that are not of training steps; returns the others as columns."""
        rows: list[Mapping[str, Any]] = []
        for line in lines:
            (rows if line["kind"] == "train" else self).append(line)
        self.nonfinite += [(row["step"], row["nonfinite"]) for row in rows if row.get("nonfinite")]
        known = {key: None for row in rows for key, value in row.items() if isinstance(value, (int, float))}
        known |= {key: None for row in rows for key in row.get("nonfinite", ())}
        columns: Columns = {key: np.full(len(rows), math.nan) for key in known if key != "step"}
        for number, row in enumerate(rows):
            for key, value in row.items():
                if key in columns and isinstance(value, (int, float)):
                    columns[key][number] = value
        return np.array([row["step"] for row in rows], dtype=np.int64), columns

    def _add(self, *parts: tuple[np.ndarray, Columns]) -> None:
        self.steps = np.concatenate([steps for steps, _ in parts])
        keys = dict.fromkeys(key for _, columns in parts for key in columns)
        if len(keys) > MOST_METRICS:
            raise RunError(
                f"metrics.jsonl has {len(keys):,} metrics, and at most {MOST_METRICS:,} are read; replace the file"
            )
        self.columns = {
            key: np.concatenate([columns.get(key, np.full(len(steps), math.nan)) for steps, columns in parts])
            for key in keys
        }


def kind_of(raw: bytes) -> bytes | None:
    """The kind of a line as `MetricsLog` writes it, without parsing the line; None if it is written otherwise."""
    found = _KIND.search(raw, 0, 64)  # `MetricsLog` writes the kind at the beginning
    return found and found[1]


def progress_of(path: Path) -> tuple[int, bool]:
    """The last training step of a log, and whether it has final results. Other lines are not parsed."""
    newest, ended = b"", False
    try:
        with open_file(path) as file:
            for raw in complete_lines(file, path):
                if (kind := kind_of(raw)) == b"train":
                    newest = raw
                ended |= kind == b"final" or (kind is None and parse_line(raw)["kind"] == "final")
        return (parse_line(newest)["step"] if newest else 0), ended
    except FileNotFoundError:
        return 0, False
    except ValueError as error:
        raise RunError(f"{path} has a damaged line ({error}); delete that line and retry") from error


def read_log(path: Path) -> Log:
    """The complete lines of a metrics.jsonl; empty if there is no file. `RunError` with the number of a damaged line."""
    try:
        with open_file(path) as file:
            return Log().extended(complete_lines(file, path))
    except FileNotFoundError:
        return Log()
    except ValueError:
        return Log(read_metrics(path))  # raises the error with the number of the line
