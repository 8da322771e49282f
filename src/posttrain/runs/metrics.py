"""The metrics log: append-only JSON lines, one per call, and the sinks that get a copy."""

import difflib
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.recipe.rollout import SCORES
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.panels import PANELS, RATE, Panel
from posttrain.runs.sinks import Sink, open_sink

RESERVED = ("step", "kind", "nonfinite", "time/run")


class MetricsLog:
    """Writes `metrics.jsonl` of `run` and copies each line to the named sinks.

    A line is `{"step", "kind", "time/run", **values}` and, where a value is NaN or infinite, `"nonfinite"`: the keys
    whose value (or a member of it) was written as null. `time/run` is the seconds that the run has worked so far,
    without the pauses between a kill and its resumption. Each line reaches the operating system before `write`
    returns, so a killed process loses none.

    A sink that is not installed is an `InputError`; one that fails later is reported once and dropped.
    """

    def __init__(self, run: RunDirectory, sinks: Sequence[str]) -> None:
        self.run = run
        self._sinks: dict[str, Sink] = {}
        self._file = self._open()
        self._cut_torn_line()
        self._start_clock()
        for name in sinks:
            try:
                self._sinks[name] = open_sink(name, run)
            except InputError:
                self.close()
                raise
            except Exception as error:
                self._drop(name, error, self._last_step())

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line. Values are numbers, text, null or lists of these; numpy scalars are converted."""
        taken = [key for key in RESERVED if key in values]
        if taken:
            raise ValueError(f"metric keys {taken} are set by the log itself")
        nonfinite: list[str] = []
        plain = {key: _plain(value, key, nonfinite) for key, value in values.items()}
        line: dict[str, Any] = {"step": int(step), "kind": kind, "time/run": round(self.seconds, 3), **plain}
        if nonfinite:
            line["nonfinite"] = sorted(set(nonfinite))
        self._append((json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(line["step"], kind, plain)
            except Exception as error:
                self._drop(name, error, line["step"])

    def truncate_after(self, step: int) -> None:
        """Drop all lines of later steps and of the end, atomically, and tell the sinks: a resumed run writes them again."""
        with storage_errors(self.run.metrics):
            content = self.run.metrics.read_bytes()
        kept = [
            raw for raw, line in _parse(self.run.metrics, content) if line["step"] <= step and line["kind"] != "final"
        ]
        self._file.close()
        write_atomically(self.run.metrics, b"".join(kept))
        self._file = self._open()
        self._start_clock()
        for name, sink in list(self._sinks.items()):
            try:
                sink.rewind(step)
            except Exception as error:
                self._drop(name, error, step)

    def close(self) -> None:
        """Sync the file to disk and close the sinks; a second call does nothing."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:
                self._drop(name, error, self._last_step())
        self._sinks.clear()
        if not self._file.closed:
            with storage_errors(self.run.metrics):
                os.fsync(self._file.fileno())
                self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> io.FileIO:
        with storage_errors(self.run.metrics):
            return io.FileIO(self.run.metrics, "a")

    def _append(self, data: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        with storage_errors(self.run.metrics):
            try:
                view = memoryview(data)
                while view:
                    view = view[self._file.write(view) :]
            except OSError:
                self._file.truncate(end)
                raise

    def _cut_torn_line(self) -> None:
        with storage_errors(self.run.metrics):
            content = self.run.metrics.read_bytes()
            self._file.truncate(content.rfind(b"\n") + 1)

    def _start_clock(self) -> None:
        lines = read_metrics(self.run.metrics)
        self._worked = max((line.get("time/run") or 0.0 for line in lines), default=0.0)
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that the run has worked so far."""
        return self._worked + time.monotonic() - self._started

    def _last_step(self) -> int:
        return max((line["step"] for line in read_metrics(self.run.metrics)), default=0)

    def _drop(self, name: str, error: Exception, step: int) -> None:
        self._sinks.pop(name, None)
        message = f"the sink {name!r} failed and was dropped ({type(error).__name__}: {error}); metrics.jsonl goes on"
        print(f"warning: {message}", file=sys.stderr)
        self.write(step, "warning", {"sink": name, "message": message})


class NoLog:
    """The log of a process that writes none, with what training asks of one."""

    seconds = 0.0

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def truncate_after(self, step: int) -> None:
        """Nothing."""

    def __enter__(self) -> "NoLog":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl, without a last line torn by a kill. No file: no lines.

    Raises `RunError` naming the line if another line is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; make it readable") from error
    return [line for _, line in _parse(path, content)]


def _parse(path: Path, content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    found = []
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        if not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
            if not (isinstance(line, dict) and isinstance(line["step"], int) and isinstance(line["kind"], str)):
                raise TypeError("no step and kind")
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}, line {number} is damaged; delete that line and go on") from error
        found.append((raw, line))
    return found


def _plain(value: Any, key: str, nonfinite: list[str]) -> Any:
    """`value` as JSON has it; keys with NaN or infinity are added to `nonfinite`."""
    if isinstance(value, (list, tuple)):
        return [_plain(member, key, nonfinite) for member in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(key)
        return None
    if isinstance(value, (float, bool, int)):
        return value
    raise ValueError(f"metric {key!r} is a {type(value).__name__}; give a number, text, null or a list of these")


_PLAYED = {
    "success": Panel("Success", "success", (), **RATE),
    "return": Panel("Return", "reward per episode", (), from_zero=False),
}
_SCORE = Panel("", "score", ())
_PLAIN = Panel("", "value", (), from_zero=False)
_LOSS = Panel("Loss of the validation rows", "loss", (), from_zero=False)


@dataclass(frozen=True)
class Metric:
    """One metric; `panel` says unit and axis, its curves are not used."""

    key: str
    what: str
    """In words; the key where there are none."""
    panel: Panel

    @property
    def differs_by_stage(self) -> bool:
        """Whether each stage measures something else under this name, such as its own loss."""
        return self.key.startswith("loss/") or "/loss" in self.key

    @property
    def file(self) -> str:
        """A name of a file."""
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in self.key).strip(".") or "metric"


def metric_of(key: str) -> Metric:
    """How the metric `key` is shown; one that nobody knows has its key for a name."""
    base = key.removeprefix("rollout/")
    where = "training episodes" if base != key else "held-out seeds"
    if base in _PLAYED:
        return Metric(key, where, _PLAYED[base])
    if base.startswith(SCORES):
        return Metric(key, where, replace(_SCORE, title=f"Score: {base.removeprefix(SCORES)}"))
    if key.startswith("validation/loss"):
        return Metric(key, key.removeprefix("validation/loss/").removeprefix("validation/loss") or "all", _LOSS)
    for panels in PANELS.values():
        for panel in panels:
            for curve in panel.curves:
                if curve.key == key:
                    return Metric(key, curve.label, panel)
    return Metric(key, "", replace(_PLAIN, title=key))


def known_metrics(present: Iterable[str]) -> list[str]:
    """Those of `present` that are drawn without being asked for, in the order of a report."""
    found = set(present)
    scores = sorted(key for key in found if key.startswith((SCORES, f"rollout/{SCORES}")))
    panels = [curve.key for panels in PANELS.values() for panel in panels for curve in panel.curves]
    ordered = [
        "success",
        "return",
        *scores,
        "validation/loss",
        "rollout/success",
        "rollout/return",
        *panels,
        "loss/nll",
        "loss/preference",
    ]
    return [key for key in dict.fromkeys(ordered) if key in found]


def check_metric(key: str, present: Iterable[str], at_the_end: Iterable[str] = ()) -> None:
    """`InputError` with the nearest right names if `key` is not `present`; `at_the_end` are those without a curve."""
    keys = sorted(present)
    if key in keys:
        return
    if key in at_the_end:
        raise InputError(f"--metric {key} is measured at the end alone; leave --metric out to see it in results.md")
    near = difflib.get_close_matches(key, keys, n=3) or [one for one in keys if key in one][:3] or keys[:3]
    if not near:
        raise InputError(f"--metric {key}: nothing has been measured yet; wait for the first step")
    raise InputError(f"--metric {key}: nothing here has it; there is for example {', '.join(near)}")
