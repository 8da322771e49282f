"""Starting the processes of a run on this machine with torch's elastic agent, as `torchrun` does, and hearing how they ended."""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError, RunError

if TYPE_CHECKING:
    from posttrain.recipe.stages import Recipe


MODULE = "posttrain.cli.process"
"""What each process runs."""


def launch(recipe: "Recipe", resume: bool, overwrite: bool) -> None:
    """Run the stage in `recipe.hardware.processes` processes of this machine, and wait for them.

    Raises what one process would have raised: InputError, RunError, KeyboardInterrupt. Ctrl-C and SIGTERM are handed to
    the processes, which save a checkpoint before they end. Where one is killed the others are stopped too.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = recipe.hardware.processes  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory(prefix="posttrain-") as name:
        folder = Path(name)
        job = {"recipe": recipe.model_dump(mode="json"), "resume": resume, "overwrite": overwrite}
        job["debug"] = "--debug" in sys.argv
        (folder / "job.json").write_text(json.dumps(job))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGHUP,SIGQUIT",
        )
        failed: dict[int, Any] = {}
        with _environment(count), _quiet(), _handing_on_signals(folder):
            try:
                elastic_launch(config, sys.executable)("-m", MODULE, name)
            except ChildFailedError as error:
                failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _raise_what_happened(folder, failed, recipe)


def _raise_what_happened(folder: Path, failed: dict[int, Any], recipe: "Recipe") -> None:
    told = [json.loads(file.read_text()) for file in sorted(folder.glob("end-*.json"))]
    if any(end["code"] == 130 for end in told):
        raise KeyboardInterrupt
    again = f"go on with `posttrain {recipe.stage} --resume {recipe.runs}/{recipe.name}`"
    killed = {rank: code for rank, code in failed.items() if code < 0 and not (folder / f"end-{rank}.json").exists()}
    said = [end for end in told if end["message"] and not end["lost"]]
    if said:
        kind = InputError if said[0]["code"] == 2 else RunError
        raise kind(said[0]["message"])
    if killed:
        rank, code = next(iter(killed.items()))
        raise RunError(f"process {rank} of the run was ended by {signal.Signals(-code).name}; {again}")
    if failed:
        rank, code = next(iter(failed.items()))
        raise RunError(f"process {rank} of the run ended with exit code {code}; {again}")


@contextmanager
def _environment(count: int) -> Iterator[None]:
    """What the processes find in theirs: their share of the threads, and the network of this machine alone."""
    given = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}
    if sys.platform == "linux":
        given["GLOO_SOCKET_IFNAME"] = "lo"
    added = {name: value for name, value in given.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's own reports of failures off the terminal: the user reads one sentence instead."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _handing_on_signals(folder: Path) -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM to the processes, and to those that have not begun yet."""

    def hand_on(number: int) -> None:
        (folder / "stop").write_text(str(number))
        for file in folder.glob("pid-*"):
            try:
                os.kill(int(file.read_text()), number)
            except (ProcessLookupError, ValueError):
                continue

    with stop_signals_to(hand_on):
        yield


@contextmanager
def stop_signals_to(hand_on: Callable[[int], None]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM call `hand_on` with their number; in a thread, which gets none, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stops = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: hand_on(number)) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_end(folder: Path, rank: int, error: BaseException | None, message: str, code: int) -> None:
    """Tell the launching process how this one ended."""
    from posttrain.distributed.world import Lost

    end = {"code": code, "message": message, "lost": isinstance(error, Lost)}
    aside = folder / f".end-{rank}"
    aside.write_text(json.dumps(end))
    aside.rename(folder / f"end-{rank}.json")
