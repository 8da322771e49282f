"""The live display of a training loop; plain lines where there is no terminal."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class Progress:
    """A context manager around a training loop of `total_steps` steps, of which `start_step` are done already.

    In a terminal a few lines follow the run: step and time left; the latest held-out measurement with its 95%
    interval; success and return, or loss, accuracy and margin, of the latest step, its gradient norm and its tokens
    per second. Elsewhere each update is one plain line. `unit`: what a step is called.
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
        """Show the values of a train line, or of an evaluation line (`success`, `return`, `validation/...`)."""
        self.step = step
        is_evaluation = any(key in values for key in ("success", "return", "validation/loss"))
        if is_evaluation:
            self._evaluation, self._evaluated_step = dict(values), step
        else:
            self._training = dict(values)
        if self._live is None:
            if is_evaluation:
                cells = ["evaluation", *_joined(_measured(values))]
            else:
                cells = [*_joined(_trained(values)), f"left {self.time_left()}"]
            self._print("  ".join([f"{self.unit} {step}/{self.total_steps}", *cells]))

    def message(self, text: str) -> None:
        """Print a line; the live display stays below it."""
        if self._live is None:
            self._print(text)
        else:
            self.console.print(Text(text))

    def time_left(self) -> str:
        """Time left at the mean speed of this process, as `m:ss` or `h:mm:ss`; `?` before the first step."""
        done = self.step - self._first_step
        if done < 1:
            return "?"
        return duration((time.monotonic() - self._started) / done * max(0, self.total_steps - self.step))

    def _print(self, text: str) -> None:
        # Written straight out: rich would wrap long lines at 80 columns in a log file.
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
        told: list[Table | Text] = [bar]
        for name, cells, style in (
            (f"held out, step {self._evaluated_step}", _measured(self._evaluation), "bold green"),
            ("training", _trained(self._training), "magenta"),
        ):
            if cells:
                numbers = [Text.assemble((f"{label} ", "dim"), (value, style)) for label, value in cells]
                told.append(Text("  ").join([Text(name), *numbers]))
        return Group(*told)


Cell = tuple[str, str]
"""A label and what is shown beside it."""


def _trained(values: Mapping[str, Any]) -> list[Cell]:
    """What a training step showed."""
    return [
        *_cell("success", values.get("rollout/success"), "{:.1%}"),
        *_cell("return", values.get("rollout/return"), "{:.3f}"),
        *_cell("loss", _loss(values), "{:.4f}"),
        *_cell("accuracy", values.get("preference/accuracy"), "{:.0%}"),
        *_cell("margin", values.get("preference/margin"), "{:.3f}"),
        *_cell("gradient", values.get("optimizer/gradient_norm"), "{:.3g}"),
        *_cell("tokens/s", values.get("speed/tokens_per_second"), "{:,.0f}"),
    ]


def _measured(values: Mapping[str, Any]) -> list[Cell]:
    """What an evaluation found, each with its 95% interval where it has one."""
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
    """`45.3% [37.0, 53.9]`, the interval from `key_low` and `key_high` where they are; `-` without a value."""
    text = _shown(values.get(key), "{:.1%}")
    low, high = values.get(f"{key}_low"), values.get(f"{key}_high")
    return text if low is None or high is None else f"{text} [{100 * low:.1f}, {100 * high:.1f}]"


def duration(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _loss(values: Mapping[str, Any]) -> float | None:
    """The first loss of a train line: `loss/policy` in RL, whatever the stage minimises elsewhere."""
    return next((value for key, value in values.items() if key.startswith("loss/")), None)


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _cell(label: str, value: Any, form: str) -> list[Cell]:
    return [] if value is None else [(label, form.format(value))]


def _number(label: str, values: Mapping[str, Any], key: str, digits: int) -> list[Cell]:
    """A number that is no rate, with its interval where it has one."""
    value, low, high = (values.get(name) for name in (key, f"{key}_low", f"{key}_high"))
    interval = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return [] if value is None else [(label, f"{value:.{digits}f}{interval}")]


def _joined(cells: list[Cell]) -> list[str]:
    return [f"{label} {value}" for label, value in cells]
