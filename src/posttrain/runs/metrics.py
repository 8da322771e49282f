"""The metrics log `metrics.jsonl`, append-only JSON lines, and the optional sinks TensorBoard, W&B and trackio."""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttrain.errors import InputError, RunError
from posttrain.plugins import require_module
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import storage_errors, write_atomically

RESERVED = ("step", "kind", "nonfinite", "time/run")
"""Keys that the log sets itself."""


class MetricsLog:
    """Writes `metrics.jsonl` of `run` and copies each line to the named sinks.

    A line is `{"step", "kind", "time/run", **values}`. NaN and infinite values are written as null, and `"nonfinite"`
    lists their keys. `time/run` is the working time of the run in seconds, without the pauses between a kill and the
    resumption. Each line reaches the operating system before `write` returns, so a killed process loses none.

    Raises `InputError` for a sink that is not installed. A sink that fails later is reported once and dropped.
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
        """Append one line. Values are numbers, strings, None or lists of these; NumPy scalars are converted."""
        reserved = [key for key in RESERVED if key in values]
        if reserved:
            raise ValueError(f"reserved metric keys: {reserved}")
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
        """Atomically drop the final line and all lines after `step`, and rewind the sinks: a resumed run writes them again."""
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
        """Working time of the run so far, in seconds."""
        return self._worked + time.monotonic() - self._started

    def _last_step(self) -> int:
        return max((line["step"] for line in read_metrics(self.run.metrics)), default=0)

    def _drop(self, name: str, error: Exception, step: int) -> None:
        self._sinks.pop(name, None)
        message = f"the sink {name!r} failed and was dropped ({type(error).__name__}: {error}); metrics.jsonl is still written"
        print(f"warning: {message}", file=sys.stderr)
        self.write(step, "warning", {"sink": name, "message": message})


class NoLog:
    """Replaces `MetricsLog` on ranks that write no log."""

    seconds = 0.0

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def truncate_after(self, step: int) -> None:
        """Do nothing."""

    def __enter__(self) -> "NoLog":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl except an incomplete last line; empty if there is no file.

    Raises `RunError` with the line number if another line is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; make it readable") from error
    return [line for _, line in _parse(path, content)]


def _parse(path: Path, content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    parsed = []
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        if not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
            if not (isinstance(line, dict) and isinstance(line["step"], int) and isinstance(line["kind"], str)):
                raise TypeError("no step and kind")
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}, line {number} is damaged; delete that line and retry") from error
        parsed.append((raw, line))
    return parsed


def _plain(value: Any, key: str, nonfinite: list[str]) -> Any:
    """`value` as a JSON value; `key` is added to `nonfinite` for NaN and infinity."""
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
    raise ValueError(f"metric {key!r} is a {type(value).__name__}; give a number, a string, None or a list of these")


class Sink(Protocol):
    """Receives a copy of every line of the metrics log, which drops a sink that raises."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Record one line; `values` are JSON values, None for NaN and infinity."""

    def rewind(self, step: int) -> None:
        """Discard everything after `step` if the sink can: a resumed run writes it again."""

    def close(self) -> None:
        """Flush and close."""


def open_sink(name: str, run: RunDirectory) -> Sink:
    """Open the sink `name` for `run`; raises `InputError` with the pip command if it is not installed."""
    return _SINKS[name](run)


def _load(module: str, sink: str) -> Any:
    return require_module(module, f"sinks: {sink}")


def _numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a line under their names in all sinks, `kind/key`."""
    return {
        f"{kind}/{key}": value
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class TensorBoardSink:
    """Writes event files to `logs/tensorboard`."""

    def __init__(self, run: RunDirectory) -> None:
        _load("tensorboard", "tensorboard")
        self._writer_class = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._directory = str(run.logs / "tensorboard")
        self._writer = self._writer_class(self._directory)
        self._second = int(time.time())

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        for key, value in _numbers(kind, values).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        # Event files are append-only; TensorBoard hides entries of earlier files from `purge_step` on.
        self._writer.close()
        # TensorBoard reads files in the order of their names, which contain the second of their creation.
        while int(time.time()) <= self._second:
            time.sleep(0.02)
        self._writer = self._writer_class(self._directory, purge_step=step + 1)
        self._second = int(time.time())

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to the W&B project `posttrain` of the account that is logged in."""

    def __init__(self, run: RunDirectory) -> None:
        module = _load("wandb", "wandb")
        self._run = module.init(
            project="posttrain",
            name=run.path.name,
            id=run.load_environment()["id"],
            resume="allow",
            dir=str(run.logs),
            config=run.load_recipe().model_dump(mode="json"),
        )
        # W&B's built-in step cannot decrease; a custom axis lets a resumed run repeat steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        numbers = _numbers(kind, values)
        if numbers:
            self._run.log({"step": step, **numbers})

    def rewind(self, step: int) -> None:
        """W&B cannot delete entries, so repeated steps appear twice."""

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """Logs to the local trackio project `posttrain`."""

    def __init__(self, run: RunDirectory) -> None:
        module = _load("trackio", "trackio")
        self._run = module.init(
            project="posttrain",
            name=f"{run.path.name}-{run.load_environment()['id']}",
            resume="allow",
            config=run.load_recipe().model_dump(mode="json"),
        )

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        numbers = _numbers(kind, values)
        if numbers:
            self._run.log(numbers, step=step)

    def rewind(self, step: int) -> None:
        """Trackio cannot delete entries, so repeated steps appear twice."""

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[RunDirectory], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}
