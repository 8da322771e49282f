"""Where metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio. Each loads only when named."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from posttrain.plugins import require_module
from posttrain.runs.directory import RunDirectory


class Sink(Protocol):
    """Receives what the metrics log writes. It may raise anything; the log then drops it."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Record one line; values are JSON values, null where they were not finite."""

    def rewind(self, step: int) -> None:
        """Forget everything after `step`, as far as the sink can: a resumed run writes it again."""

    def close(self) -> None:
        """Send what is pending."""


def open_sink(name: str, run: RunDirectory) -> Sink:
    """The sink called `name` for this run; `InputError` with the pip command if it is not installed."""
    return _SINKS[name](run)


def _load(module: str, sink: str) -> Any:
    return require_module(module, f"sinks: {sink}")


def _numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a line under the names they have in every sink: `kind/key`."""
    return {
        f"{kind}/{key}": value
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class TensorBoardSink:
    """Event files under `logs/tensorboard`."""

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
        # Event files are append-only; TensorBoard hides everything from `purge_step` on in the earlier files.
        self._writer.close()
        # TensorBoard reads files in the order of their names, which begin with the second in which they were begun.
        while int(time.time()) <= self._second:
            time.sleep(0.02)
        self._writer = self._writer_class(self._directory, purge_step=step + 1)
        self._second = int(time.time())

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of the project `posttrain` on the account that is logged in."""

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
        # W&B's own step may never go back; an axis of our own lets a resumed run repeat steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        numbers = _numbers(kind, values)
        if numbers:
            self._run.log({"step": step, **numbers})

    def rewind(self, step: int) -> None:
        """W&B keeps what it has; steps written again appear twice at the same place of the axis."""

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of the local trackio project `posttrain`."""

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
        """Trackio keeps what it has; steps written again appear twice."""

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[RunDirectory], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}
