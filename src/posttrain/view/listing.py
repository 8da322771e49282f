"""The list of runs: those in a folder, summarized lazily, filtered and sorted, with the runs of a recipe as one line over its seeds.

Summaries are cached by the times and sizes of the files of a run.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.intervals import seed_mean
from posttrain.runs.log import kind_of
from posttrain.runs.metrics import parse_line
from posttrain.runs.reader import complete_lines, is_file, open_file, read_json
from posttrain.runs.sources import PER_RUN_KEYS, common_name
from posttrain.runs.storage import STARTED
from posttrain.runs.tables import Interval
from posttrain.terminal import printable

State = Literal["running", "finished", "failed", "stopped", "reading"]
"""`reading`: the files of the run have not been read yet."""
_MOST_POINTS = 40
"""Points of a sparkline."""

METRICS = (
    ("success", "rollout/success", "success", True, True),
    ("test/accuracy", "preference/accuracy", "accuracy", True, True),
    ("validation/accuracy", "preference/accuracy", "accuracy", True, True),
    ("return", "rollout/return", "return", False, True),
    ("test/loss", "loss/nll", "loss", False, False),
    ("validation/loss", "loss/nll", "loss", False, False),
    ("", "rollout/success", "success", True, True),
    ("", "rollout/return", "return", False, True),
    ("", "loss/preference", "loss", False, False),
    ("", "loss/nll", "loss", False, False),
)
"""Held-out metric, training metric, name, whether it is a rate, whether larger is better: the first known one is listed."""


@dataclass(frozen=True)
class Summary:
    """One line of the list of runs."""

    name: str
    """Path below the folder, with slashes."""
    path: Path
    state: State = "stopped"
    reason: str = ""
    """Why the run failed, or what could not be read."""
    stage: str = "–"
    model: str = "–"
    environment: str = "–"
    seed: int | None = None
    step: int = 0
    steps: int | None = None
    metric: str = ""
    percent: bool = False
    larger_is_better: bool = True
    best: Interval | None = None
    """The result on the final held-out data if `final`, else the best evaluation so far."""
    final: bool = False
    n: int | None = None
    best_step: int | None = None
    """The step of the evaluated weights, where the final result has one."""
    random: float | None = None
    optimal: float | None = None
    spark: tuple[float, ...] = ()
    curve: str = ""
    """What the sparkline shows."""
    changed: float = 0.0
    """Time of the last change, in seconds since the epoch."""
    group: str = ""
    """Digest of the recipe without its seed and name."""
    parts: tuple[str, ...] = ("run", "episodes")
    """The pages of the run."""
    pipeline: str = ""
    """The pipeline that the run is a stage of."""
    recipe: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def value(self, key: str) -> str:
        """The value of a dotted key of the recipe as text; a dash if it has none."""
        value: Any = self.recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)[:200]

    @property
    def when(self) -> str:
        """The local time of the last change."""
        return datetime.fromtimestamp(self.changed).strftime("%Y-%m-%d %H:%M") if self.changed else ""

    @property
    def points(self) -> str:
        """The sparkline as the points of an SVG polyline, 100 wide and 24 high."""
        low, high = min(self.spark), max(self.spark)
        width, height = 100 / (len(self.spark) - 1), 20 / (high - low) if high > low else 0.0
        middle = 0.5 * (low + high)
        return " ".join(f"{i * width:.1f},{12 - (value - middle) * height:.1f}" for i, value in enumerate(self.spark))


class Scanner:
    """The runs below `folder`, by name. Safe to use from several threads: a summary computed twice is the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache: dict[str, tuple[tuple[Any, ...], Summary]] = {}

    def find(self) -> dict[str, Path]:
        """Name -> directory of every run, without reading the runs."""
        runs: dict[str, Path] = {}
        for path in _runs_below(self.folder, 3):  # pipelines and studies contain runs
            name = printable(path.relative_to(self.folder).as_posix()).replace("\n", "\\n")
            while name in runs:  # a folder may have the name that another is shown by
                name += "′"
            runs[name] = path
        for gone in self._cache.keys() - runs.keys():
            self._cache.pop(gone, None)
        return runs

    def path(self, name: str) -> Path:
        """The directory of the run `name`; InputError if there is none. Names that lead out of the folder are refused."""
        path = self.find().get(name)
        if path is None:
            raise InputError(f"there is no run {name} in {self.folder}; go back to the list of runs")
        return path

    def known(self, name: str) -> Summary | None:
        """The summary that was computed last; None if there is none yet."""
        cached = self._cache.get(name)
        return cached[1] if cached else None

    def stamp(self, path: Path) -> tuple[Any, ...]:
        """A value that changes with the files of the run, and when it starts or ends. The last item: whether it is running."""
        run = RunDirectory(path)
        files = (run.metrics, run.recipe_file, run.failure, path / "results.json", run.episodes)
        return (*map(_stamp, files), run.is_running())

    def summary(self, name: str, path: Path) -> Summary:
        """The current summary; only files that have changed are read again."""
        stamp = self.stamp(path)
        cached = self._cache.get(name)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        summary = summarize(name, RunDirectory(path), running=stamp[-1])
        # A model in the folder is named after the run that exported it.
        for start in (f"{self.folder}/", f"{self.folder.name}/"):
            if summary.model.startswith(start) and summary.model.endswith("/model"):
                summary = replace(summary, model=summary.model.removeprefix(start).removesuffix("/model"))
                break
        self._cache[name] = stamp, summary
        return summary


def _runs_below(folder: Path, levels: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            folders = [
                entry.path
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return
    for path in map(Path, folders):
        if all(os.path.lexists(path / name) for name in ("environment.json", "recipe.yaml")):
            yield path
        elif levels > 1:
            yield from _runs_below(path, levels - 1)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.lstat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size


def summarize(name: str, run: RunDirectory, running: bool) -> Summary:
    """Read the files of a run once. What cannot be read is left out, and `reason` says so."""
    recipe: Mapping[str, Any] = {}
    reason = ""
    try:
        read_json(run.environment_file)
        recipe = run.recipe_values()
    except InputError as error:
        reason = str(error)
    lines = _Lines()
    try:
        with open_file(run.metrics) as file:
            for raw in complete_lines(file, run.metrics):
                lines.add(raw)
    except FileNotFoundError:
        pass
    except InputError as error:
        reason = reason or str(error)
    measured = lines.result()
    ended = lines.final is not None or is_file(run.path / "results.json")
    failure = run.failure_text()
    state: State = "running" if running else "failed" if failure else "finished" if ended else "stopped"
    model, environment = (recipe.get(key) for key in ("model", "environment"))
    steps, seed = recipe.get("steps"), recipe.get("seed")
    played = recipe.get("stage") in ("rl", "distill") or next(run.episodes.glob("step_*"), None) is not None
    shared = {key: value for key, value in recipe.items() if key not in PER_RUN_KEYS}
    return Summary(
        name,
        run.path,
        state,
        failure if state == "failed" else reason or lines.damage,
        str(recipe.get("stage", "–")),
        str(model.get("path", "–")) if isinstance(model, Mapping) else "–",
        str(environment.get("type", "–")) if isinstance(environment, Mapping) else "–",
        seed if isinstance(seed, int) else None,
        lines.step,
        steps if isinstance(steps, int) else None,
        changed=max(_stamp(run.metrics)[0], _stamp(run.environment_file)[0]) / 1e9,
        group=hashlib.sha256(json.dumps(shared, sort_keys=True, default=str).encode()).hexdigest()[:12],
        parts=("run", "episodes") if played else ("run",),
        pipeline=name.rpartition("/")[0] if is_file(run.path.parent / STARTED) else "",
        recipe=recipe,
        **measured,
    )


class _Lines:
    """The part of a metrics log that a summary needs: every evaluation, and a few dozen evenly spaced training lines."""

    def __init__(self) -> None:
        self.step = 0
        self.final: dict[str, Any] | None = None
        self.damage = ""
        self._evaluations: list[dict[str, Any]] = []
        self._policies: dict[str, dict[str, Any]] = {}
        self._trained: list[bytes] = []
        self._seen, self._every = 0, 1

    def add(self, raw: bytes) -> None:
        if kind_of(raw) == b"train":
            if self._seen % self._every == 0:
                self._trained.append(raw)
            self._seen += 1
            self._newest = raw
            if len(self._trained) >= 2 * _MOST_POINTS:
                self._trained, self._every = self._trained[::2], 2 * self._every
            return
        line = self._read(raw)
        if line is None:
            return
        if line["kind"] == "evaluation":
            self._evaluations.append(line)
        elif line["kind"] in ("baseline", "final"):
            self._policies[str(line.get("policy"))] = line
            self.final = line if line["kind"] == "final" else self.final

    def result(self) -> dict[str, Any]:
        """The fields of `Summary` that come from the metrics."""
        trained = [line for raw in self._trained if (line := self._read(raw)) is not None]
        newest = self._read(self._newest) if self._seen else None
        trained += [newest] if newest is not None and newest not in trained else []
        self.step = max((line["step"] for line in trained), default=0)
        final = self.final or {}
        for key, train_key, name, percent, larger in METRICS:
            known = [line for line in self._evaluations if _number(line.get(key)) is not None]
            points = [number for line in trained if (number := _number(line.get(train_key))) is not None]
            if not known and _number(final.get(key)) is None and (key or not points):
                continue
            result: dict[str, Any] = {"metric": name, "percent": percent, "larger_is_better": larger}
            best = final if _number(final.get(key)) is not None else None
            if known and best is None:
                best = (max if larger else min)(known, key=lambda line: line[key])
            if best is not None:
                counted = best.get("n") or best.get("test/rows") or best.get("validation/rows")
                low, high = (_number(best.get(f"{key}_{side}")) for side in ("low", "high"))
                limits = (math.nan if limit is None else limit for limit in (low, high))
                result |= {"best": (best[key], *limits), "final": best is final, "n": counted}
                result["best_step"] = best.get("best_step") if isinstance(best.get("best_step"), int) else None
            for policy in ("random", "optimal"):
                result[policy] = _number(self._policies.get(policy, {}).get(key))
            held_out = [line[key] for line in known]
            trains = len(held_out) < 4 and points
            curve, drawn = (f"{name} in training", points) if trains else (f"held-out {name}", held_out)
            return result | {"spark": tuple(drawn[:: max(1, math.ceil(len(drawn) / _MOST_POINTS))]), "curve": curve}
        return {}

    def _read(self, raw: bytes) -> dict[str, Any] | None:
        try:
            return parse_line(raw)
        except ValueError as error:
            self.damage = f"a line of metrics.jsonl is damaged ({error})"
            return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


# -- the list -----------------------------------------------------------------------------------------------------------

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
