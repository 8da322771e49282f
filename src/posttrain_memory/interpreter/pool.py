"""Runs a model's code: a pool of processes without any access to the host, and functions of ours that it may call.

The code runs in pydantic-monty, an interpreter of a part of Python that has no file system, network, environment or
imports beyond a few pure modules. Each worker (`worker.py`) is a process of its own group with an empty
environment and limits on memory, and it drives one process of the interpreter. What a worker says is a bounded JSON
message, checked here; a worker that crashes, hangs or says anything else is killed, and the next turn gets a new one.
"""

import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.errors import RunError
from posttrain.recipe.base import BaseConfig
from posttrain_memory.interpreter.tools import call
from posttrain_memory.interpreter.worker import Channel
from posttrain_memory.vault.limits import VaultError

_KINDS = frozenset(
    [
        "FileExistsError",
        "FileNotFoundError",
        "NameError",
        "OSError",
        "PermissionError",
        "RuntimeError",
        "TypeError",
        "ValueError",
    ]
)
"""The exceptions as which a model's code sees a `VaultError`."""
_PROCESS_BYTES = 1 << 30
"""Address space of a worker beyond its values, most of it reserved and never used."""
_STOPPED = "the code was stopped: it took too much time or memory"
_SLOW = "TimeoutError: the code was stopped: its calls of tools took too much time; make fewer of them in one block"


class InterpreterLimits(BaseConfig):
    """What one block of a model's code may take."""

    timeout: float = Field(5.0, gt=0)
    """Longest run, in seconds of its own time; waiting for a tool does not count."""
    tool_timeout: float = Field(20.0, gt=0)
    """Longest time of all tools together, in seconds of the clock; what they did until then stays."""
    memory_bytes: int = Field(67_108_864, ge=1_048_576)
    """Most memory of its values, in bytes."""
    recursion: int = Field(100, ge=10)
    """Deepest nesting of calls."""
    code_chars: int = Field(20_000, ge=1)
    """Longest code, in characters."""
    calls: int = Field(50, ge=1)
    """Most calls of tools."""
    output_chars: int = Field(20_000, ge=100)
    """Most characters of the values, and of the printed text, that come back; the rest is cut with a remark."""
    now: str = "2026-01-01T09:00:00"
    """What the clock shows, always, so that a run can be repeated."""
    seed: int = 0
    """Seed of the `random` module."""


class InterpreterFault(RunError):
    """The interpreter itself does not work; no code is to blame."""


@dataclass(frozen=True)
class Ran:
    """What came of a block of code.

    `values`: what it assigned at its top level, in its order, as JSON-like values; names that begin with an underscore
    are left out, and `_` is the value of an expression that ends the code. `printed`: its output. `error`: one line
    that says what went wrong and where, or None; what was assigned and done before stays. `calls`: tools called.
    """

    values: dict[str, object] = field(default_factory=dict)
    printed: str = ""
    error: str | None = None
    calls: int = 0


class Interpreter:
    """A pool of `workers` processes, started when first needed. `run` may be called from many threads at once."""

    def __init__(self, limits: InterpreterLimits | None = None, workers: int = 1) -> None:
        self.limits = limits or InterpreterLimits()
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._workers = workers
        self._closed = False
        for _ in range(workers):
            self._free.put(None)

    def run(self, code: str, functions: Mapping[str, Callable[..., object]]) -> Ran:
        """Run `code`, which may call `functions` by their names; they run here, one after the other.

        A `VaultError` of a function is raised in the code. Any other exception of a function is a fault of ours: it
        ends the run and is raised here. InterpreterFault where no worker can be started.
        """
        if self._closed:
            raise RuntimeError("the interpreter is closed")
        if len(code) > self.limits.code_chars:
            return Ran(error=f"the code is longer than {self.limits.code_chars} characters")
        worker = self._free.get()
        try:
            if worker and not worker.alive():
                # It died while nobody used it, so no code is to blame.
                worker.kill()
                worker = None
            worker = worker or _Worker(self.limits)
            return worker.run(code, functions)
        except BaseException:
            # A worker left in the middle of a turn cannot take another.
            if worker:
                worker.kill()
            raise
        finally:
            self._free.put(worker if worker and worker.alive() else None)

    def close(self) -> None:
        """End all workers."""
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
    """The trusted end of one worker."""

    def __init__(self, limits: InterpreterLimits) -> None:
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        self._channel = Channel(self._socket)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(Path(__file__).with_name("worker.py"))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Nothing of ours, keys of services least of all, is there to be read.
                env=_environment(),
                cwd="/",
                start_new_session=True,
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
            raise InterpreterFault(
                f"the interpreter does not start: {answer.get('fault')}; is pydantic-monty installed?"
            )
        self._socket.settimeout(_wall(limits) + 10)

    def alive(self) -> bool:
        if self._process.returncode is not None:
            return False
        # It is not reaped here, so that its number stays its own until `kill`.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> None:
        """End the process and all that it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()

    def run(self, code: str, functions: Mapping[str, Callable[..., object]]) -> Ran:
        """One turn. A worker that broke its word is dead afterwards, and the code gets the blame."""
        calls, spent = 0, 0.0
        try:
            # A lone surrogate is no text that can be sent.
            self._say({"code": code.encode(errors="replace").decode(), "functions": list(functions)})
            while True:
                message = self._hear()
                if "done" in message:
                    return _ran(message["done"], calls)
                if "fault" in message:
                    raise InterpreterFault(f"the interpreter failed: {message['fault']}")
                calls += 1
                begun = time.monotonic()
                answer = self._answer(message, functions, calls)
                spent += time.monotonic() - begun
                if spent > self._limits.tool_timeout:
                    # An error in the code could be caught by it, and go on as before.
                    self.kill()
                    return Ran(error=_SLOW, calls=calls)
                self._say(answer)
        except _Broken:
            self.kill()
            return Ran(error=_STOPPED, calls=calls)

    def _answer(
        self, message: dict[str, Any], functions: Mapping[str, Callable[..., object]], n: int
    ) -> dict[str, object]:
        name, args, kwargs = message.get("call"), message.get("args"), message.get("kwargs")
        if not isinstance(name, str) or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise _Broken
        if n > self._limits.calls:
            return {"error": f"more than {self._limits.calls} calls of tools in one block", "kind": "RuntimeError"}
        try:
            return {"value": call(functions, name, args, kwargs)}
        except VaultError as error:
            return {"error": str(error), "kind": error.kind if error.kind in _KINDS else "ValueError"}

    def _say(self, message: dict[str, object]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise _Broken from None

    def _hear(self) -> dict[str, Any]:
        try:
            message = self._channel.receive()
        except (OSError, EOFError, ValueError, RecursionError):
            raise _Broken from None
        if not isinstance(message, dict):
            raise _Broken
        return message


class _Broken(Exception):
    """The worker is gone, silent for too long, or said what it never says."""


def _environment() -> dict[str, str]:
    """The environment of a worker: where the interpreter is, if somebody says so, and few arenas, to fit its memory."""
    named = {name: os.environ[name] for name in ("MONTY_BIN",) if name in os.environ}
    return {"MALLOC_ARENA_MAX": "2", **named}


def _settings(limits: InterpreterLimits) -> dict[str, object]:
    """What a worker is told once."""
    found = importlib.util.find_spec("pydantic_monty")
    if found is None or found.origin is None:
        raise InterpreterFault("the package pydantic_monty is missing; run `pip install 'posttrain[memory]'`")
    return {
        "path": [str(Path(found.origin).parents[1])],
        "process_bytes": _PROCESS_BYTES + 4 * limits.memory_bytes,
        "turns_per_process": 10_000,
        "wall_seconds": _wall(limits),
        "processor_seconds": limits.timeout + 1,
        "output_chars": limits.output_chars,
        "now": limits.now,
        "seed": limits.seed,
        "limits": {
            "max_feed_duration_secs": limits.timeout,
            "max_memory": limits.memory_bytes,
            "max_recursion_depth": limits.recursion,
            # Looking up the name of a tool counts too, and so does a call beyond those that are allowed.
            "max_suspensions": 4 * limits.calls + 100,
        },
    }


def _wall(limits: InterpreterLimits) -> float:
    """Seconds until a silent worker counts as hung; long, because others may hold up the machine."""
    return 4 * limits.timeout + 20


def _ran(done: object, calls: int) -> Ran:
    """The checked outcome of a turn."""
    if not isinstance(done, dict):
        raise _Broken
    values, printed, error = done.get("values"), done.get("printed"), done.get("error")
    if not isinstance(values, dict) or not isinstance(printed, str) or not isinstance(error, dict | None):
        raise _Broken
    return Ran(values, _plain(printed), _explained(error) if error else None, calls)


def _plain(text: str) -> str:
    """`text` without the control characters that steer a terminal, which a note may hold and code may print."""
    return "".join("�" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _explained(error: dict[str, Any]) -> str:
    """One line on what went wrong, in words that tell a model what to do instead."""
    kind, message, line = str(error.get("type")), str(error.get("message")), error.get("line")
    message = _plain(" ".join(message.split())[:300])
    where = f"line {line}: " if isinstance(line, int) else ""
    if kind == "Crash":
        return _STOPPED
    if kind == "TimeoutError":
        return "TimeoutError: the code took too much time"
    if kind == "MemoryError":
        return "MemoryError: the code took too much memory"
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
