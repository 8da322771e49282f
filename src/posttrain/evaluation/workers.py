"""Copies of one model in several processes, each on its own device, for metrics that score texts independently."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Generic, Literal, TypeVar

from posttrain.distributed.launch import without_current_folder
from posttrain.runs.machine import usable_processors

M = TypeVar("M")
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ModelOptions:
    """Settings for loading and running the models of metrics."""

    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of the weights and of the forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: int = 1
    """Number of copies of each model. On GPUs, each copy takes the next GPU."""
    tokens_per_batch: int = 4096
    """Maximum number of tokens of one forward pass."""


class ModelWorkers(AbstractContextManager["ModelWorkers[M]"], Generic[M]):
    """A model in this process, or a copy in each of several processes, loaded at the first use.

    `load` and the functions of `map` are pickled if there are several processes. Errors propagate.
    """

    def __init__(self, load: Callable[[], M], processes: int = 1) -> None:
        self._load = load
        self._model: M | None = None
        # One pool per process, because each share of the items must run on its own device.
        context = get_context("spawn")
        count = processes if processes > 1 else 0
        with without_current_folder():  # starts multiprocessing's tracker of resources
            self._pools = [ProcessPoolExecutor(1, context, _start, (rank, processes)) for rank in range(count)]

    def __exit__(self, *error: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[M, list[T]], list[R]], items: Sequence[T]) -> list[R]:
        """Results of `function(model, items)` in the order of the items. Each process gets an equal share of them."""
        if not self._pools:
            self._model = self._load() if self._model is None else self._model
            return function(self._model, list(items))
        count = len(self._pools)
        shares = [list(items[rank::count]) for rank in range(count)]
        with without_current_folder():
            pending = [
                (rank, pool.submit(_apply, self._load, function, shares[rank]))
                for rank, pool in enumerate(self._pools)
                if shares[rank]
            ]
        results: list[Any] = [None] * len(items)
        for rank, future in pending:
            results[rank::count] = future.result()
        return results


def _start(rank: int, processes: int) -> None:
    """Assign a share of the cores and a GPU to this process."""
    import torch

    torch.set_num_threads(max(1, len(usable_processors()) // processes))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


_loaded: dict[str, Any] = {}
"""The model of this worker process."""


def _apply(load: Callable[[], M], function: Callable[[M, list[T]], list[R]], items: list[T]) -> list[R]:
    if "model" not in _loaded:
        _loaded["model"] = load()
    return function(_loaded["model"], items)
