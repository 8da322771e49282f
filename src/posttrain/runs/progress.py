"""The live display of a training loop, or plain lines without a terminal."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class Progress:
    """Context manager around a training loop of `total_steps` steps, of which `start_step` are done already.

    In a terminal it shows a few live lines: the step and the time left; the latest evaluation with its 95% interval;
    and of the latest step success and return, or loss, accuracy and margin, the gradient norm and tokens per second.
    Without a terminal, each update prints one line. `unit`: the name of a step in the output.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        start_step: int = 0,
        console: Console | None = None,
        unit: str = "step",
    ) -> None:
        self.total_steps = total_steps
        self.unit = unit
        self.title = title
        self.step = start_step
        self.console = console or Console(highlight=False)
        self._first_step = start_step
        self._training: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._evaluated_step = start_step
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._display, console=self.console, refresh_per_second=4)
            self._live.start()
        else:
            self._print(f"{self.title}: {self.unit} {self.step} of {self.total_steps}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the values of a training line, or of an evaluation line (`success`, `return`, `validation/...`)."""
        self.step = step
        is_evaluation = any(key in values for key in ("success", "return", "validation/loss"))
        if is_evaluation:
            self._evaluation, self._evaluated_step = dict(values), step
        else:
            self._training = dict(values)
        if self._live is None:
            if is_evaluation:
                cells = ["evaluation", *_joined(_evaluation_cells(values))]
            else:
                cells = [*_joined(_training_cells(values)), f"left {self.time_left()}"]
            self._print("  ".join([f"{self.unit} {step}/{self.total_steps}", *cells]))

    def message(self, text: str) -> None:
        """Print a line above the live display."""
        if self._live is None:
            self._print(text)
        else:
            self.console.print(Text(text))

    def time_left(self) -> str:
        """Estimated time left at the mean speed of this process, as `m:ss` or `h:mm:ss`; `?` before the first step."""
        done = self.step - self._first_step
        if done < 1:
            return "?"
        return duration((time.monotonic() - self._started) / done * max(0, self.total_steps - self.step))

    def _print(self, text: str) -> None:
        # Bypass rich, which would wrap long lines at 80 columns in a log file.
        printable = "".join(character if character.isprintable() else " " for character in text)
        self.console.file.write(printable.rstrip() + "\n")
        self.console.file.flush()

    def _display(self) -> Group:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self.title, style="bold", no_wrap=True, overflow="ellipsis"),
            ProgressBar(total=max(1, self.total_steps), completed=self.step, width=24),
            Text(f"{self.unit} {self.step}/{self.total_steps}"),
            Text(f"left {self.time_left()}", style="cyan"),
        )
        rows: list[Table | Text] = [bar]
        for name, cells, style in (
            (f"held out, step {self._evaluated_step}", _evaluation_cells(self._evaluation), "bold green"),
            ("training", _training_cells(self._training), "magenta"),
        ):
            if cells:
                numbers = [Text.assemble((f"{label} ", "dim"), (value, style)) for label, value in cells]
                rows.append(Text("  ").join([Text(name), *numbers]))
        return Group(*rows)


Cell = tuple[str, str]
"""(label, value)."""


def _training_cells(values: Mapping[str, Any]) -> list[Cell]:
    """Cells of a training line."""
    return [
        *_cell("success", values.get("rollout/success"), "{:.1%}"),
        *_cell("return", values.get("rollout/return"), "{:.3f}"),
        *_cell("loss", _loss(values), "{:.4f}"),
        *_cell("accuracy", values.get("preference/accuracy"), "{:.0%}"),
        *_cell("margin", values.get("preference/margin"), "{:.3f}"),
        *_cell("gradient", values.get("optimizer/gradient_norm"), "{:.3g}"),
        *_cell("tokens/s", values.get("speed/tokens_per_second"), "{:,.0f}"),
    ]


def _evaluation_cells(values: Mapping[str, Any]) -> list[Cell]:
    """Cells of an evaluation line, with 95% intervals if known."""
    return [
        *([("success", rate(values, "success"))] if "success" in values else []),
        *_cell("n", values.get("n"), "{}"),
        *_number("return", values, "return", 3),
        *_number("validation loss", values, "validation/loss", 4),
        *_cell("perplexity", values.get("validation/perplexity"), "{:.4g}"),
        *([("accuracy", rate(values, "validation/accuracy"))] if "validation/accuracy" in values else []),
        *_cell("margin", values.get("validation/margin"), "{:.3f}"),
        *_cell("rows", values.get("validation/rows"), "{}"),
    ]


def rate(values: Mapping[str, Any], key: str) -> str:
    """`45.3% [37.0, 53.9]`, with the interval from `key_low` and `key_high` if present; `-` without a value."""
    text = _shown(values.get(key), "{:.1%}")
    low, high = values.get(f"{key}_low"), values.get(f"{key}_high")
    return text if low is None or high is None else f"{text} [{100 * low:.1f}, {100 * high:.1f}]"


def duration(seconds: float) -> str:
    """`seconds` as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _loss(values: Mapping[str, Any]) -> float | None:
    """The first loss of a training line: `loss/policy` in RL, the loss of the stage otherwise."""
    return next((value for key, value in values.items() if key.startswith("loss/")), None)


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _cell(label: str, value: Any, form: str) -> list[Cell]:
    return [] if value is None else [(label, form.format(value))]


def _number(label: str, values: Mapping[str, Any], key: str, digits: int) -> list[Cell]:
    """A number with its interval if known."""
    value, low, high = (values.get(name) for name in (key, f"{key}_low", f"{key}_high"))
    interval = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return [] if value is None else [(label, f"{value:.{digits}f}{interval}")]


def _joined(cells: list[Cell]) -> list[str]:
    return [f"{label} {value}" for label, value in cells]
