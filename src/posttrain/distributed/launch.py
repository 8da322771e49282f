"""Launch the processes of a run on this machine with torch's elastic agent, like `torchrun`, and report how they end.

Each process writes its exit code and message to a file in a shared temporary folder (`write_end`).
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.distributed.stopping import deleted_with_this_process
from posttrain.errors import InputError, RunError
from posttrain.runs.machine import usable_processors

if TYPE_CHECKING:
    from posttrain.recipe.stages import Recipe


MODULE = "posttrain.cli.process"
"""The module that each process runs."""


def launch(recipe: "Recipe", resume: bool, overwrite: bool) -> None:
    """Run the stage in `recipe.hardware.processes` processes of this machine and wait for them.

    Raises the same errors as a single process: InputError, RunError or KeyboardInterrupt. Ctrl-C and SIGTERM are
    forwarded to the processes, which save a checkpoint before they exit. If one process is killed, the others are
    stopped.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = recipe.hardware.learners  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="posttrain-") as name:
        folder = Path(name)
        # Without an engine that was not given: the processes choose it for their devices.
        excluded = {"engine"} - recipe.model_fields_set
        job = {"recipe": recipe.model_dump(mode="json", exclude=excluded), "resume": resume, "overwrite": overwrite}
        job |= {"debug": "--debug" in sys.argv, "path": sys.path}
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
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        failed: dict[int, Any] = {}

        def forward(number: int) -> None:
            (folder / "stop").write_text(str(number))  # for processes that have not started yet
            for file in folder.glob("pid-*"):
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int(file.read_text()), number)

        variables = {"OMP_NUM_THREADS": str(max(1, len(usable_processors()) // count))}
        unset = {name: value for name, value in variables.items() if name not in os.environ}
        with environment(unset), _quiet(), stop_signals_to(forward), deleted_with_this_process(folder):
            try:
                # `-m` alone would import from the current folder, where files of somebody else may lie beside their run.
                elastic_launch(config, sys.executable)("-P", "-m", MODULE, name)
            except ChildFailedError as error:
                failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _raise_first_error(folder, failed, recipe)


def _raise_first_error(folder: Path, failed: dict[int, Any], recipe: "Recipe") -> None:
    """Raise the error that caused the run to end, if any. `failed`: exit code of each failed rank.

    Errors of ranks that only lost the connection to another rank are consequences, not causes.
    """
    ends = [json.loads(file.read_text()) for file in sorted(folder.glob("end-*.json"))]
    if any(end["code"] == 130 for end in ends):
        raise KeyboardInterrupt
    for end in ends:
        if end["message"] and not end["lost"]:
            raise (InputError if end["code"] == 2 else RunError)(end["message"])
    # Killed processes first: the others may have failed because of them. The agent ends the others by SIGTERM.
    killed = {rank: code for rank, code in failed.items() if code < 0 and not (folder / f"end-{rank}.json").exists()}
    for rank, code in sorted((killed | failed).items(), key=lambda one: (one[1] == -signal.SIGTERM, one[1] >= 0)):
        how = f"was ended by {signal.Signals(-code).name}" if rank in killed else f"ended with exit code {code}"
        hint = f"continue with `posttrain {recipe.stage} --resume {recipe.runs}/{recipe.name}`"
        raise RunError(f"process {rank} of the run {how}; {hint}")


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables.keys() - before:
            del os.environ[name]
        os.environ |= {name: before[name] for name in variables.keys() & before.keys()}


def without_current_folder() -> AbstractContextManager[None]:
    """In this context, Python processes that start import nothing from the current folder because it is current.

    The `posttrain` command does not either: a run of somebody else may have been unpacked there with other files.
    """
    return environment({"PYTHONSAFEPATH": "1"})


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the elastic agent's failure reports, because the user gets one message instead."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def stop_signals_to(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each SIGINT and SIGTERM inside the block.

    Has no effect outside the main thread, because only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stops = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: handle(number)) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_end(folder: Path, rank: int, error: BaseException | None, message: str, code: int) -> None:
    """Record for the launching process how this rank ended. The file appears complete or not at all. On a full disk, the message is
    printed instead."""
    from posttrain.distributed.world import RankLost

    end = {"code": code, "message": message, "lost": isinstance(error, RankLost)}
    temporary = folder / f".end-{rank}"
    try:
        temporary.write_text(json.dumps(end))
        temporary.rename(folder / f"end-{rank}.json")
    except OSError:
        print(message, file=sys.stderr, flush=True)
