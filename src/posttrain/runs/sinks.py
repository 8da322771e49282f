"""Copies of the metrics log in TensorBoard, W&B and trackio, with tables of completions.

A sink that raises is dropped by `MetricsLog`, which owns the sinks of a run.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.errors import InputError, RunError
from posttrain.images import readable
from posttrain.plugins import require_module
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.reader import read_json
from posttrain.runs.tables import markdown_table

if TYPE_CHECKING:
    from posttrain.episode import Advantages, Episode

Row = dict[str, str | int | float | bool | None]
"""One row of a table of completions: column -> value."""


class Sink(Protocol):
    """Receives a copy of the metrics log, which drops a sink that raises."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers under their names `kind/key`."""

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        """Record a table of completions. All rows have the same columns."""

    def rewind(self, step: int) -> bool:
        """Discard everything after `step` for a resumed run. False if this is impossible: nothing must be sent twice."""

    def close(self) -> None:
        """Flush and close."""


def numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the log under their names in all sinks: `kind/key`, for baselines `baseline/policy/key`."""
    # A run has a line for each baseline policy at the same step.
    prefix = f"{kind}/{values['policy']}" if kind == "baseline" and "policy" in values else kind
    return {
        f"{prefix}/{key}": value
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def completion_rows(episodes: Sequence["Episode"], advantages: "Advantages | None") -> list[Row]:
    """One row per episode. `reward` is the return, None for an episode without one; `credit` is the mean advantage of its sampled
    tokens, None without advantages."""
    rows: list[Row] = []
    for number, episode in enumerate(episodes):
        prompt, completion = _conversation(episode)
        credit = None
        if advantages is not None and episode.sampled_tokens:
            import numpy as np

            pairs = zip(advantages.values[number], episode.streams, strict=True)
            credit = float(np.concatenate([values[stream.sampled] for values, stream in pairs]).mean())
        rows.append(
            {
                "group": episode.group,
                "task": episode.seed,
                "prompt": prompt,
                "completion": completion,
                "reward": episode.total_reward if episode.has_return else None,
                "credit": credit,
                "success": episode.success,
                "outcome": episode.failure or str(episode.outcome),
            }
        )
    return rows


def _conversation(episode: "Episode") -> tuple[str, str]:
    """The text before the first answer, and the text from it on. Roles are shown if there are several messages."""
    messages = episode.messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if not messages:
        return "", "\n\n".join(turn.answer for turn in episode.turns)

    def text(part: Sequence[Mapping[str, str]]) -> str:
        if len(part) == 1:
            return part[0]["content"]
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in part)

    return readable(text(messages[:first])), readable(text(messages[first:]))


class SentRecord:
    """`logs/sinks.json`: the last step of each kind of line that each sink has received, over all processes of the run."""

    def __init__(self, run: RunDirectory) -> None:
        self._path: Path = run.logs / "sinks.json"
        self._last: dict[str, dict[str, int]] = {}
        if self._path.exists():
            try:
                stored = read_json(self._path)
                self._last = {sink: {kind: int(step) for kind, step in kinds.items()} for sink, kinds in stored.items()}
            except (InputError, ValueError, TypeError, AttributeError) as error:
                raise RunError(
                    f"{self._path} is damaged ({error}); delete it, after which a resumed run sends repeated steps twice"
                ) from error
        self.earlier = {sink: dict(kinds) for sink, kinds in self._last.items()}
        """Sink -> kind -> last step that it had received when the run was resumed. Several later lines of one kind may
        have the same step."""

    def add(self, sink: str, kind: str, step: int) -> None:
        """Record that `sink` has received a line."""
        kinds = self._last.setdefault(sink, {})
        if kinds.get(kind) != step:
            kinds[kind] = step
            write_atomically(self._path, json.dumps(self._last, indent=1) + "\n")

    def rewind(self, sink: str, step: int, discarded: bool) -> None:
        """Record that the run continues after `step`. `discarded`: whether the sink deleted all later lines."""
        kinds = self._last.setdefault(sink, {})
        if discarded:
            kinds |= {kind: min(last, step) for kind, last in kinds.items()}
        self.earlier[sink] = dict(kinds)


class TensorBoardSink:
    """Writes event files to `logs/tensorboard`, and completions to the text tab."""

    def __init__(self, run: RunDirectory) -> None:
        require_module("tensorboard", "sinks: tensorboard")
        self._writer_class = require_module("torch.utils.tensorboard", "sinks: tensorboard").SummaryWriter
        self._directory = str(run.logs / "tensorboard")
        # TensorBoard takes the first start of a session for the start of the run, and discards nothing.
        first = not any(run.logs.glob("tensorboard/events.*"))
        self._writer = self._writer_class(self._directory, purge_step=0 if first else None)
        self._second = int(time.time())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        self._writer.add_text("completions", _markdown(rows), step)

    def rewind(self, step: int) -> bool:
        # Event files are append-only; TensorBoard hides entries of earlier files from `purge_step` on.
        self._writer.close()
        # TensorBoard reads files in the order of their names, which contain the second of their creation. Waiting does
        # not help if the clock was set back.
        deadline = time.monotonic() + 1.5
        while int(time.time()) <= self._second and time.monotonic() < deadline:
            time.sleep(0.02)
        self._writer = self._writer_class(self._directory, purge_step=step + 1)
        self._second = int(time.time())
        return True

    def close(self) -> None:
        self._writer.close()


class _TrackingSink:
    """What W&B and trackio, which has the interface of W&B, have in common."""

    _module: Any
    _run: Any

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        table = self._module.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._log(step, {"completions": table})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def rewind(self, step: int) -> bool:
        return False

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)


class WandbSink(_TrackingSink):
    """Logs to W&B with the settings of `tracking`. W&B reads its environment variables for unset keys."""

    def __init__(self, run: RunDirectory) -> None:
        self._module, recipe = require_module("wandb", "sinks: wandb"), run.load_recipe()
        tracking = recipe.tracking
        self._run = self._module.init(
            project=tracking.project or os.environ.get("WANDB_PROJECT") or "posttrain",
            entity=tracking.entity,
            group=tracking.group,
            name=tracking.run_name or os.environ.get("WANDB_NAME") or run.path.name,
            id=run.load_environment()["id"],
            resume="allow",
            dir=str(run.logs),
            config=recipe.model_dump(mode="json"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        # W&B's built-in step cannot decrease, but evaluations may be logged late, so use a separate step metric.
        self._run.log({"step": step, **values})


class TrackioSink(_TrackingSink):
    """Logs to the local trackio project of `tracking`."""

    def __init__(self, run: RunDirectory) -> None:
        self._module, recipe = require_module("trackio", "sinks: trackio"), run.load_recipe()
        self._run = self._module.init(
            project=recipe.tracking.project or "posttrain",
            group=recipe.tracking.group,
            name=f"{recipe.tracking.run_name or run.path.name}-{run.load_environment()['id']}",
            resume="allow",
            config=recipe.model_dump(mode="json"),
        )


def _markdown(rows: Sequence[Row]) -> str:
    """A table for TensorBoard, which renders Markdown and drops HTML."""

    def cell(value: object) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").splitlines())

    return markdown_table(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])


SINKS: dict[str, Callable[[RunDirectory], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}
"""Name -> what opens the sink for a run; InputError with the pip command if it is not installed."""
