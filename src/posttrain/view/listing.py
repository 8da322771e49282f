"""The list of runs: filtered, sorted, with the runs of a recipe as one line over its seeds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from posttrain.runs.intervals import seed_mean
from posttrain.runs.sources import common_name
from posttrain.runs.tables import Interval
from posttrain.view.scan import Scanner, Summary

SORTS = ("newest", "name", "state", "stage", "model", "environment", "step", "result")
STATES = ("running", "finished", "failed", "stopped")
COLUMNS = ("state", "stage", "model", "environment", "step", "result", "random", "optimal", "curve")
"""The columns of the list by default."""
_PAGE = 60
"""Lines of the list that are shown at once."""


@dataclass(frozen=True)
class Query:
    """What the list shows."""

    text: str = ""
    """Words that the name, stage, model or environment contain."""
    state: str = ""
    sort: str = "newest"
    seeds: bool = True
    """Whether runs that differ by their seed alone are one line."""
    shown: int = _PAGE
    columns: tuple[str, ...] = COLUMNS
    """Some of `COLUMNS`, and dotted keys of recipes."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "Query":
        """The query in an address; invalid values become the default."""
        count = given.get("shown", "")
        return cls(
            given.get("text", "")[:200],
            given.get("state", "") if given.get("state") in STATES else "",
            given.get("sort", "") if given.get("sort") in SORTS else "newest",
            given.get("seeds", "together") != "apart",
            int(count) if count.isdecimal() and len(count) < 7 else _PAGE,
            tuple(dict.fromkeys(given.get("columns", "")[:1000].replace(",", " ").split()))[:30] or COLUMNS,
        )

    def address(self, **changed: Any) -> str:
        """The query as the part of an address after `?`."""
        values = {name: changed.get(name, getattr(self, name)) for name in ("text", "state", "sort", "shown")}
        columns = {} if self.columns == COLUMNS else {"columns": " ".join(self.columns)}
        return urlencode({**values, "seeds": "together" if self.seeds else "apart", **columns})


@dataclass(frozen=True)
class Line:
    """One line of the list: a run, or the runs of one recipe with several seeds."""

    runs: tuple[Summary, ...]
    mean: Interval | None = None
    """Over the results of several seeds."""

    @property
    def first(self) -> Summary:
        return self.runs[0]

    @property
    def label(self) -> str:
        """The name of a run, or the common beginning of the names of its seeds."""
        return self.first.name if len(self.runs) == 1 else common_name([run.name for run in self.runs])


@dataclass(frozen=True)
class Listing:
    """The lines to show, and how many runs there are."""

    lines: list[Line]
    total: int
    matching: int
    unread: int
    """Runs whose files have not been read yet."""


def listed(scanner: Scanner, query: Query, read: float) -> Listing:
    """The list for `query`; at most `read` seconds are spent on runs that have not been read yet, the newest first."""
    newest = sorted(scanner.find().items(), key=lambda item: -_changed(item[1]))
    until, summaries, unread = time.monotonic() + read, [], 0
    for name, path in newest:
        known = scanner.known(name)
        if known is None and time.monotonic() > until:
            unread += 1
            summaries.append(Summary(name, path, "reading", changed=_changed(path)))
        else:
            summaries.append(scanner.summary(name, path))
    words = query.text.lower().split()
    matching = [
        run
        for run in summaries
        if query.state in ("", run.state)
        and all(word in f"{run.name} {run.stage} {run.model} {run.environment}".lower() for word in words)
    ]
    lines = _lines(matching) if query.seeds else [Line((one,)) for one in matching]
    lines.sort(key=lambda line: _place(line, query.sort))
    return Listing(lines[: query.shown], len(summaries), len(matching), unread)


def _changed(path: Path) -> float:
    for name in ("metrics.jsonl", "environment.json"):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _lines(runs: Sequence[Summary]) -> list[Line]:
    """Runs that differ only in their seed as one line, in the order of the first of each."""
    groups: dict[str, list[Summary]] = {}
    for number, run in enumerate(runs):
        parent = run.name.rpartition("/")[0]
        groups.setdefault(f"{parent}/{run.group}" if run.group else f"run {number}", []).append(run)
    lines = []
    for group in groups.values():
        seeds = {run.seed for run in group}
        if len(group) == 1 or None in seeds or len(seeds) < len(group):
            lines += [Line((run,)) for run in group]
            continue
        ordered = tuple(sorted(group, key=lambda run: run.seed or 0))
        values = [run.best[0] for run in ordered if run.best is not None and run.final == ordered[0].final]
        whole = len(values) == len(ordered)
        lines.append(Line(ordered, seed_mean(values, ordered[0].percent).limits if whole else None))
    return lines


def _place(line: Line, sort: str) -> Any:
    run = line.first
    value = line.mean or run.best
    best = None if value is None else (-value[0] if run.larger_is_better else value[0])
    newest = -max(one.changed for one in line.runs)
    order: dict[str, Any] = {
        "name": (line.label.lower(),),
        "state": ((*STATES, "reading").index(run.state), newest),
        "stage": (run.stage, newest),
        "model": (run.model, newest),
        "environment": (run.environment, newest),
        "step": (-run.step, newest),
        "result": (run.metric, best is None, best or 0.0, newest),
    }
    return order.get(sort, (newest,))
