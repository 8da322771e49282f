"""Runs model-written code in a pool of isolated processes, with access to selected functions of the parent.

The code runs in pydantic-monty, an interpreter for a subset of Python without file system, network, environment or
imports beyond a few pure modules. Each worker (`worker.py`) is its own process group with an empty environment
and a memory limit, and drives one interpreter process. Messages from a worker are bounded JSON and validated here. A
worker that crashes, hangs or sends anything else is killed and replaced on the next turn.
"""

import importlib.util
import os
import queue
import socket
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.distributed.process import ChildProcess
from posttrain.errors import RunError
from posttrain.recipe.base import BaseConfig, Text
from posttrain_memory.interpreter.worker import Channel
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.tools import call

_RAISED = FileExistsError, FileNotFoundError, NameError, OSError, PermissionError, RuntimeError, TypeError, ValueError
_KINDS = frozenset(kind.__name__ for kind in _RAISED)
"""Types of exception that a `VaultError` may become in the model's code."""
_PROCESS_BYTES = 1 << 30
"""Address space of a worker beyond its values, in bytes. Most of it is reserved and never used."""
_STOPPED = "the code was stopped: it took too much time or memory"
_LIMIT_REACHED = {
    "Crash": _STOPPED,
    "TimeoutError": "TimeoutError: the code took too much time",
    "MemoryError": "MemoryError: the code took too much memory",
}
_SLOW = "TimeoutError: the code was stopped: its calls of tools took too much time; make fewer of them in one block"


class InterpreterLimits(BaseConfig):
    """Resource limits of one block of model code."""

    timeout: float = Field(5.0, gt=0)
    """Maximum execution time, in seconds of the code's own time. Waiting for a tool does not count."""
    tool_timeout: float = Field(20.0, gt=0)
    """Maximum total time of tool calls, in seconds of wall-clock time. Their effects until then remain."""
    memory_bytes: int = Field(67_108_864, ge=1_048_576)
    """Maximum memory of the code's values, in bytes."""
    recursion: int = Field(100, ge=10)
    """Maximum recursion depth."""
    code_chars: int = Field(20_000, ge=1)
    """Maximum length of the code, in characters."""
    calls: int = Field(50, ge=1)
    """Maximum number of tool calls."""
    output_chars: int = Field(20_000, ge=100)
    """Maximum number of returned characters, for the values and for the printed text each. The rest is cut, with a notice."""
    now: Text = "2026-01-01T09:00:00"
    """The fixed time that the code's clock shows, so that runs are reproducible."""
    seed: int = 0
    """Seed of the `random` module."""


class InterpreterFault(RunError):
    """The interpreter failed for a reason other than the model's code."""


@dataclass(frozen=True)
class RunResult:
    """The result of a block of code.

    `values`: top-level assignments in order, as JSON-like values, without names that begin with an underscore; `_` is
    the value of a final expression. `printed`: the output. `error`: one line with the problem and its location, or
    None; the effects before the error remain. `calls`: number of tool calls.
    """

    values: dict[str, object] = field(default_factory=dict)
    printed: str = ""
    error: str | None = None
    calls: int = 0


class Interpreter:
    """A pool of `workers` processes, started on first use. `run` is thread-safe."""

    def __init__(self, limits: InterpreterLimits | None = None, workers: int = 1) -> None:
        self.limits = limits or InterpreterLimits()
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._workers = workers
        self._closed = False
        for _ in range(workers):
            self._free.put(None)

    def run(self, code: str, functions: Mapping[str, Callable[..., object]]) -> RunResult:
        """Run `code`, which may call `functions` by name; they execute here, one at a time.

        A `VaultError` of a function is raised inside the code. Any other exception of a function is a bug on this
        side: it ends the run and is raised here. Raises InterpreterFault if no worker can be started.
        """
        if self._closed:
            raise RuntimeError("the interpreter is closed")
        if len(code) > self.limits.code_chars:
            return RunResult(error=f"the code is longer than {self.limits.code_chars} characters")
        worker = self._free.get()
        try:
            if worker and not worker.alive():
                # The worker died while idle, so the code is not the cause.
                worker.kill()
                worker = None
            worker = worker or _Worker(self.limits)
            return worker.run(code, functions)
        except BaseException:
            # A worker that was interrupted during a turn cannot be reused.
            if worker:
                worker.kill()
            raise
        finally:
            self._free.put(worker if worker and worker.alive() else None)

    def close(self) -> None:
        """Stop all workers."""
        self._closed = True
        for _ in range(self._workers):
            with suppress(queue.Empty):
                worker = self._free.get_nowait()
                if worker:
                    worker.kill()

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """The parent side of one worker process."""

    def __init__(self, limits: InterpreterLimits) -> None:
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        self._channel = Channel(self._socket)
        # The worker does not inherit the parent's environment variables, in particular no API keys. Few malloc arenas
        # keep it within its memory limit.
        environment = {"MALLOC_ARENA_MAX": "2", **{k: v for k, v in os.environ.items() if k == "MONTY_BIN"}}
        with theirs:
            self._process = ChildProcess(
                [sys.executable, "-I", "-B", str(Path(__file__).with_name("worker.py"))],
                stdin=theirs.fileno(),
                environment=environment,
                folder=Path("/"),
            )
        try:
            self._socket.settimeout(180)
            self._channel.send(_settings(limits))
            answer = self._channel.receive()
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            raise InterpreterFault(f"the interpreter does not start ({error or type(error).__name__})") from None
        if answer != {"ready": True}:
            self.kill()
            raise InterpreterFault(f"the interpreter does not start: {answer.get('fault')}")
        self._socket.settimeout(_hang_seconds(limits) + 10)

    def alive(self) -> bool:
        return self._process.code is None

    def kill(self) -> None:
        """Kill the process and everything it started."""
        self._process.kill()
        self._socket.close()

    def run(self, code: str, functions: Mapping[str, Callable[..., object]]) -> RunResult:
        """Run one turn. A worker that violates the protocol is killed, and the turn reports an error of the code."""
        calls, spent = 0, 0.0
        try:
            # A lone surrogate cannot be encoded.
            self._send({"code": code.encode(errors="replace").decode(), "functions": list(functions)})
            while True:
                try:
                    message = self._channel.receive()
                except (OSError, EOFError, ValueError, RecursionError):
                    raise _WorkerFailed from None
                if not isinstance(message, dict):
                    raise _WorkerFailed
                if "done" in message:
                    done = message["done"] if isinstance(message["done"], dict) else {}
                    values, printed, error = done.get("values"), done.get("printed"), done.get("error")
                    if (
                        not isinstance(values, dict)
                        or not isinstance(printed, str)
                        or not isinstance(error, dict | None)
                    ):
                        raise _WorkerFailed
                    return RunResult(values, _plain(printed), _describe_error(error) if error else None, calls)
                if "fault" in message:
                    raise InterpreterFault(f"the interpreter failed: {message['fault']}")
                calls += 1
                begun = time.monotonic()
                answer = self._answer(message, functions, calls)
                spent += time.monotonic() - begun
                if spent > self._limits.tool_timeout:
                    # An exception inside the code could be caught there, so the worker is killed instead.
                    self.kill()
                    return RunResult(error=_SLOW, calls=calls)
                self._send(answer)
        except _WorkerFailed:
            self.kill()
            return RunResult(error=_STOPPED, calls=calls)

    def _answer(
        self, message: dict[str, Any], functions: Mapping[str, Callable[..., object]], n: int
    ) -> dict[str, object]:
        name, args, kwargs = message.get("call"), message.get("args"), message.get("kwargs")
        if not isinstance(name, str) or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise _WorkerFailed
        if n > self._limits.calls:
            return {"error": f"more than {self._limits.calls} calls of tools in one block", "kind": "RuntimeError"}
        try:
            return {"value": call(functions, name, args, kwargs)}
        except VaultError as error:
            return {"error": str(error), "kind": error.kind if error.kind in _KINDS else "ValueError"}

    def _send(self, message: dict[str, object]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise _WorkerFailed from None


class _WorkerFailed(Exception):
    """The worker has exited, timed out, or violated the protocol."""


def _settings(limits: InterpreterLimits) -> dict[str, object]:
    """The settings that a worker receives once."""
    spec = importlib.util.find_spec("pydantic_monty")
    if spec is None or spec.origin is None:
        raise InterpreterFault("the package pydantic_monty is missing; run `pip install 'posttrain[memory]'`")
    return {
        "path": [str(Path(spec.origin).parents[1])],
        "process_bytes": _PROCESS_BYTES + 4 * limits.memory_bytes,
        "turns_per_process": 10_000,
        "wall_seconds": _hang_seconds(limits),
        "processor_seconds": limits.timeout + 1,
        "output_chars": limits.output_chars,
        "now": limits.now,
        "seed": limits.seed,
        "limits": {
            "max_feed_duration_secs": limits.timeout,
            "max_memory": limits.memory_bytes,
            "max_recursion_depth": limits.recursion,
            # Each lookup of a tool's name counts as well, and so does a call above the limit.
            "max_suspensions": 4 * limits.calls + 100,
        },
    }


def _hang_seconds(limits: InterpreterLimits) -> float:
    """Seconds without a message after which a worker counts as hung; generous, because the machine may be busy."""
    return 4 * limits.timeout + 20


def _plain(text: str) -> str:
    """`text` without the control characters that terminals interpret; notes may contain them and code may print them."""
    return "".join("�" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _describe_error(error: dict[str, Any]) -> str:
    """One line for the model: the error, and what to do instead."""
    kind, message, line = str(error.get("type")), str(error.get("message")), error.get("line")
    message = _plain(" ".join(message.split())[:300])
    where = f"line {line}: " if isinstance(line, int) else ""
    if kind in _LIMIT_REACHED:
        return _LIMIT_REACHED[kind]
    if kind == "RuntimeError" and message.startswith("suspension limit"):
        return "RuntimeError: too many calls of tools in one block"
    if kind == "NotImplementedError" and message.startswith("external function"):
        return f"{where}not supported here: a tool inside map, sorted and the like; call it in a plain loop"
    if kind == "NotImplementedError":
        return f"{where}not supported here: {message.rpartition('not yet support ')[2] or message}"
    if kind in ("ModuleNotFoundError", "ImportError"):
        return f"{where}{kind}: {message}; only a few pure modules such as json, re, datetime and math can be imported"
    if kind == "PermissionError" and message.startswith("Permission denied"):
        return f"{where}PermissionError: there are no files here but the notes; use read_file and the other tools"
    return f"{where}{kind}: {message}" if message else f"{where}{kind}"
