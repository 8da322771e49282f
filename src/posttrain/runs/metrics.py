"""Reports of a running run: the metrics log `metrics.jsonl`, its sinks, the live display, and events.

The log is an append-only file of JSON lines. The sinks of `runs/sinks.py` get a copy of each line.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partialmethod
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.errors import InputError, RunError
from posttrain.redaction import without_secrets
from posttrain.runs.directory import LineLog, RunDirectory
from posttrain.runs.reader import complete_lines, open_file, parse_json
from posttrain.runs.sinks import SINKS, SentRecord, Sink, completion_rows, numbers
from posttrain.terminal import new_console, printable

if TYPE_CHECKING:
    from posttrain.episode import Advantages, Episode

RESERVED = ("step", "kind", "nonfinite", "time/run")
"""Keys that the log sets itself."""
_TYPES = {str, int, float, bool, NoneType, list}
_NUMBERS = {"n", "episodes", "failed", "best_step", "success", "return"}
"""Keys without a slash that have no text."""


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writes `metrics.jsonl` of `run` and copies each line to the named sinks.

    A line is `{"step", "kind", "time/run", **values}`. NaN and infinite values are written as null, and `"nonfinite"`
    lists their keys. `time/run` is the working time of the run in seconds, without the pauses between a kill and the
    resumption. Each line reaches the operating system before `write` returns, so a killed process loses none.

    Raises `InputError` for a sink that is not installed. A sink that fails later is reported once and dropped.
    """

    def __init__(self, run: RunDirectory, sinks: Sequence[str]) -> None:
        self.run = run
        self._sinks: dict[str, Sink] = {}
        self._log = LineLog(run.metrics)
        self._log.cut()
        self._start_clock()
        for name in sinks:
            try:
                self._sinks[name] = SINKS[name](run)
            except InputError:
                self.close()
                raise
            except Exception as error:
                self._drop(name, error)
        try:
            self._sent = SentRecord(run)
        except RunError as error:
            for name in list(self._sinks):
                self._drop(name, error)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line. Values are numbers, strings, None or lists of these; NumPy scalars are converted."""
        if reserved := [key for key in RESERVED if key in values]:
            raise ValueError(f"reserved metric keys: {reserved}")
        nonfinite: list[str] = []
        plain = {key: _plain(value, key, nonfinite) for key, value in values.items()}
        self._step = int(step)
        line: dict[str, Any] = {"step": self._step, "kind": kind, "time/run": round(self.seconds, 3), **plain}
        if nonfinite:
            line["nonfinite"] = sorted(set(nonfinite))
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
        self._log.append(f"{text}\n".encode("utf-8", "backslashreplace"))
        if self._sinks and (sent := numbers(kind, plain)):
            # Each baseline policy has a line at step 0.
            self._send(int(step), f"{kind}/{plain.get('policy', '')}", lambda sink: sink.write(int(step), sent))

    def completions(self, step: int, episodes: Sequence["Episode"], advantages: "Advantages | None" = None) -> None:
        """Send the sinks a table of `episodes`: prompt, completion, reward, mean advantage, group."""
        if self._sinks and episodes:
            rows = completion_rows(episodes, advantages)
            self._send(step, "completions", lambda sink: sink.completions(step, rows))

    def truncate_after(self, step: int) -> None:
        """Atomically drop the final line and all lines after `step`, and rewind the sinks: a resumed run writes them again."""
        with open_file(self.run.metrics) as file:
            raws = list(complete_lines(file, self.run.metrics))
        lines = zip(raws, _parsed(self.run.metrics, raws), strict=True)
        self._log.replace([raw for raw, line in lines if line["step"] <= step and line["kind"] != "final"])
        self._start_clock()
        for name, sink in list(self._sinks.items()):
            try:
                self._sent.rewind(name, step, discarded=sink.rewind(step))
            except Exception as error:
                self._drop(name, error)

    def close(self) -> None:
        """Sync the file to disk and close the sinks; a second call does nothing."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:
                self._drop(name, error)
        self._sinks.clear()
        self._log.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, step: int, kind: str, send: Callable[[Sink], None]) -> None:
        """Call `send` with each sink that did not receive lines of `kind` at `step` from an earlier process."""
        for name, sink in list(self._sinks.items()):
            try:
                if step > self._sent.earlier.get(name, {}).get(kind, -1):
                    send(sink)
                    self._sent.add(name, kind, step)
            except Exception as error:
                self._drop(name, error)

    def _start_clock(self) -> None:
        lines = read_metrics(self.run.metrics)
        self._worked = max((line.get("time/run") or 0.0 for line in lines), default=0.0)
        self._step = max((line["step"] for line in lines), default=0)
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Working time of the run so far, in seconds."""
        return self._worked + time.monotonic() - self._started

    def _drop(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        reason = without_secrets(f"{type(error).__name__}: {error}")
        message = f"the sink {name!r} failed and was dropped ({reason}); metrics.jsonl is still written"
        print(printable(f"warning: {message}"), file=sys.stderr)
        self.write(self._step, "warning", {"sink": name, "message": message})


class NoLog(AbstractContextManager["NoLog"]):
    """Replaces `MetricsLog` on ranks that write no log."""

    seconds = 0.0

    def write(self, *values: Any) -> None:
        """Do nothing."""

    completions = truncate_after = write

    def __exit__(self, *error: object) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl except an incomplete last line; empty if there is no file.

    Raises `RunError` with the line number if another line is damaged.
    """
    try:
        with open_file(path) as file:
            return _parsed(path, complete_lines(file, path))
    except FileNotFoundError:
        return []


def _parsed(path: Path, lines: Iterable[bytes]) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = []
    for number, raw in enumerate(lines, 1):
        try:
            parsed.append(parse_line(raw))
        except ValueError as error:
            raise RunError(f"{path}, line {number} is damaged ({error}); delete that line and retry") from error
    return parsed


MOST_KEYS = 5_000
"""Keys of a line of a metrics log."""


def parse_line(raw: bytes) -> dict[str, Any]:
    """One line of a metrics log. ValueError unless it has a step, a kind, and values of the types that `MetricsLog` writes."""
    line = parse_json(raw, finite=True)
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    if type(line.get("step")) is not int or not 0 <= line["step"] < 1 << 53 or not isinstance(line.get("kind"), str):
        raise ValueError("it has no step and kind")
    if len(line) > MOST_KEYS:
        raise ValueError(f"it has {len(line):,} keys, more than {MOST_KEYS:,}")
    kinds = {*map(type, line.values())}
    if list in kinds:
        kinds |= {type(member) for value in line.values() if type(value) is list for member in value}
    if not kinds <= _TYPES:
        raise ValueError("it has a value that is not a number, a text or a list of these")
    nonfinite = line.get("nonfinite", [])
    if not isinstance(nonfinite, list) or not all(isinstance(key, str) for key in nonfinite):
        raise ValueError("'nonfinite' is not a list of keys")
    for key in (key for key, value in line.items() if type(value) in (str, list)):
        if "/" in key or key in _NUMBERS or key.endswith(("_low", "_high")):
            raise ValueError(f"{key[:80]!r} is not a number")
    return line


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


# -- the live display -------------------------------------------------------------------------------------------------


SECONDS_PER_LINE = 5.0
"""Minimum seconds between lines of progress if the output is not a terminal."""


class Progress:
    """Context manager around a training loop of `total_steps` steps, of which `start_step` are already done.

    Each update prints a line. For a training step, it has success and return, or loss, accuracy and margin, and the
    gradient norm and tokens per second. For an evaluation, it has the results with 95% intervals. On a terminal, a live
    line below shows the step, the time left and the progress within the step or evaluation; it is removed at the end.
    Other output meanwhile must go through `console`. `unit`: the name of a step in the output.
    """

    def __init__(
        self, total_steps: int, title: str, start_step: int = 0, console: Console | None = None, unit: str = "step"
    ) -> None:
        self.total_steps = total_steps
        self.unit = unit
        self.title = title
        self.step = start_step
        self.console = console or new_console(highlight=False)
        self._first_step = start_step
        self._part = ""
        self._printed = 0.0
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._display, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._print(f"{self.title}: {self.unit} {self.step} of {self.total_steps}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Print the values of a training line, or of an evaluation line (`success`, `return`, `validation/...`)."""
        self.step, self._part = step, ""
        head = f"{self.unit} {step}/{self.total_steps}"
        if any(key in values for key in ("success", "return", "validation/loss")):
            self.message("\n".join(self._fitted([head, "evaluation", *_cells(values, _EVALUATION_CELLS)])))
            return
        loss = next((value for key, value in values.items() if key.startswith("loss/")), None)
        cells = [head, *_cells({**values, "loss": loss}, _TRAINING_CELLS)]
        # The live line shows the time left. A step prints one line, so cells that do not fit are left out.
        self.message(self._fitted(cells)[0] if self._live else "  ".join([*cells, f"left {self.time_left()}"]))

    def played(self, done: int, total: int) -> None:
        """Show how many episodes or rows of an evaluation are done; without a terminal, at most one line every five
        seconds.
        """
        self._show_part("evaluated", done, total)
        if self.unit != "step":  # the run consists only of the evaluation
            self.step, self._part = done, ""

    def _show_part(self, what: str, done: int, total: int) -> None:
        self._part = f"{what} {done} of {total}" if done < total else ""
        if self._live is None and self._part and time.monotonic() - self._printed >= SECONDS_PER_LINE:
            self._print(self._part)

    sampled = partialmethod(_show_part, "sampled")
    """Show how many episodes of the next step are sampled, in the way of `played`."""
    trained = partialmethod(_show_part, "trained on")
    """Show on how many samples of the next update the gradient is computed, in the way of `played`."""
    updated = partialmethod(_show_part, "made update")
    """Show how many updates of the next step are made, in the way of `played`."""

    def message(self, text: str) -> None:
        """Print a line above the live display."""
        if self._live is None:
            self._print(text)
        else:
            self.console.print(Text(text))

    def time_left(self) -> str:
        """Time left at the mean speed of this process, as `m:ss` or `h:mm:ss`; `estimating` before the first step."""
        done = self.step - self._first_step
        if done < 1:
            return "estimating"
        return duration((time.monotonic() - self._started) / done * max(0, self.total_steps - self.step))

    def _fitted(self, cells: Sequence[str]) -> list[str]:
        """`cells` in lines not wider than the terminal; lines after the first are indented."""
        if self._live is None:
            return ["  ".join(cells)]
        lines = [cells[0]]
        for cell in cells[1:]:
            longer = f"{lines[-1]}  {cell}"
            lines = [*lines[:-1], longer] if len(longer) <= self.console.width else [*lines, f"    {cell}"]
        return lines

    def _print(self, text: str) -> None:
        # Bypass rich, which would wrap long lines at 80 columns in a log file.
        printable = "".join(character if character.isprintable() else " " for character in text)
        self.console.file.write(printable.rstrip() + "\n")
        self.console.file.flush()
        self._printed = time.monotonic()

    def _display(self) -> Table:
        bar = Table.grid(padding=(0, 1))
        state = [f"{self.unit} {self.step}/{self.total_steps}", f"time left: {self.time_left()}"]
        if self._part:
            state.append(self._part)
        room = self.console.width - len("  ".join(state)) - 2
        bar.add_row(
            Text(self.title[: max(8, room - 11)], style="bold", no_wrap=True, overflow="ellipsis"),
            ProgressBar(
                total=max(1, self.total_steps), completed=self.step, width=min(24, max(1, room - len(self.title)))
            ),
            Text("  ".join(state), style="cyan", no_wrap=True, overflow="ellipsis"),
        )
        return bar


_TRAINING_CELLS = {
    "rollout/success": "success {:.1%}",
    "rollout/return": "return {:z.3f}",
    "loss": "loss {:z.4f}",
    "preference/accuracy": "accuracy {:.0%}",
    "preference/margin": "margin {:.3f}",
    "optimizer/gradient_norm": "gradient {:.3g}",
    "speed/tokens_per_second": "tokens/s {:,.0f}",
}
"""Metric -> its text in a training line. `loss` is the first one: `loss/policy` in RL, the loss of the stage otherwise."""
_EVALUATION_CELLS = {
    "success": "success {:.1%}",
    "n": "n {}",
    "return": "return {:.3f}",
    "validation/loss": "validation loss {:.4f}",
    "validation/perplexity": "perplexity {:.4g}",
    "validation/accuracy": "accuracy {:.1%}",
    "validation/margin": "margin {:.3f}",
    "validation/rows": "rows {}",
}


def _cells(values: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The metrics of `forms` that `values` has, with 95% intervals if known."""
    cells = []
    for key, form in forms.items():
        if values.get(key) is None:
            continue
        limits = [values.get(f"{key}_{side}") for side in ("low", "high")]
        known = [
            form[form.index("{") :].format(limit).rstrip("%")
            for limit in limits
            if limit is not None and not math.isnan(limit)
        ]
        cells.append(form.format(values[key]) + (f" [{', '.join(known)}]" if len(known) == 2 else ""))
    return cells


def duration(seconds: float) -> str:
    """`seconds` as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# -- events -----------------------------------------------------------------------------------------------------------


_events: deque[str] = deque()


def record_event(message: str) -> None:
    """Record an out-of-band event, such as a worker restart, to be reported at the end of the step. Thread-safe."""
    _events.append(message)


def take_events() -> list[str]:
    """Remove and return the messages recorded since the last call, in order."""
    return [_events.popleft() for _ in range(len(_events))]
