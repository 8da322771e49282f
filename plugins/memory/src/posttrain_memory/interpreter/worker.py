"""The isolated side of the interpreter: a process that runs model code in pydantic-monty.

It is started as a script with an empty environment, and exchanges length-prefixed JSON messages with the parent over
a socket on its standard input. It has no access to the vault.

Values of the sandbox become Python objects here rather than in the parent, because a few hundred bytes of code can
build values larger than memory. If they are too large, only this process ends. This module imports nothing from the
package.
"""

import json
import math
import os
import re
import signal
import socket
import sys
from datetime import datetime
from typing import Any

LARGEST = 4 * 1024 * 1024
"""Maximum size of a message, in bytes."""
_NO_VALUE = re.compile(r"<(function|module|class|built-in|coroutine|generator|bound method)\b.*>", re.DOTALL)
"""How the interpreter represents functions, modules and other objects that are not data."""
_LAST = "_"
"""The name of the value of a final expression."""


class Channel:
    """JSON messages over a socket, each prefixed by its length in four bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._read = b""
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

    def receive(self) -> Any:
        """The next message. EOFError at the end of the stream, ValueError if it is too large or not JSON."""
        size = int.from_bytes(self._exactly(4))
        if size > LARGEST:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(self._exactly(size))

    def send(self, message: object) -> None:
        """Send a message. Raises ValueError if it is larger than `LARGEST` or cannot be encoded as JSON."""
        data = self._encode(message).encode()
        if len(data) > LARGEST:
            raise ValueError(f"a message of {len(data)} bytes")
        self.socket.sendall(len(data).to_bytes(4) + data)

    def _exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            piece = self.socket.recv(1 << 17)
            if not piece:
                raise EOFError
            self._read += piece
        message, self._read = self._read[:size], self._read[size:]
        return message


class Unsupported(Exception):
    """The code waits for an external result that is never provided."""


class Unconvertible(Exception):
    """A value of the code cannot be converted."""


class PrintBuffer:
    """Collects printed text, up to `most` characters."""

    def __init__(self, most: int) -> None:
        self.text, self.left_out, self._most = "", 0, most

    def __call__(self, stream: str, text: str) -> None:
        room = self._most - len(self.text)
        self.text += text[:room]
        self.left_out += max(0, len(text) - room)


class JsonConverter:
    """Converts sandbox values to JSON. Text beyond `most` characters in total is replaced by a notice."""

    def __init__(self, most: int) -> None:
        self._left = most

    def value(self, value: object, depth: int = 0) -> object:
        """`value` as JSON; types without a JSON form become text."""
        self._left -= 2
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if abs(value) >= 1 << 256:
                return f"a number of {value.bit_length()} bits"
            self._left -= len(str(value))
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self._text(value)
        if depth >= 20 or self._left <= 0:
            return "…"
        if isinstance(value, dict):
            return self.values(value, depth)
        if isinstance(value, (list, tuple)):
            return self._list(list(value), depth)
        if isinstance(value, (set, frozenset)):
            return self._list(sorted(value, key=repr), depth)
        return self._text(str(value))

    def _text(self, text: str) -> str:
        shown = text[: max(0, self._left)]
        self._left -= len(shown)
        rest = len(text) - len(shown)
        return f"{shown}… ({rest} more characters)" if rest else shown

    def _list(self, values: list[object], depth: int) -> list[object]:
        shown: list[object] = []
        for value in values:
            if self._left <= 0:
                return [*shown, f"… ({len(values) - len(shown)} more)"]
            shown.append(self.value(value, depth + 1))
        return shown

    def values(self, values: dict[Any, object], depth: int = 0) -> dict[str, object]:
        """`values` as a JSON object."""
        shown: dict[str, object] = {}
        for key, value in values.items():
            if self._left <= 0:
                shown["…"] = f"{len(values) - len(shown)} more"
                break
            name = self._text(str(key))
            shown[name] = self.value(value, depth + 1)
        return shown


def confine(settings: dict[str, Any]) -> None:
    """Limit memory and files of this process and its children, and disable core dumps.

    A system without such limits, as Windows, runs no code of a policy: ModuleNotFoundError.
    """
    import resource

    files = ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 128))
    for limit, most in ((resource.RLIMIT_AS, settings["process_bytes"]), *files):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def turn(pool: Any, job: dict[str, Any], settings: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Run the code of a job. Returns a dict with `values`, `printed` and `error` (type, message, line)."""
    printed = PrintBuffer(settings["output_chars"])
    # Failing to get an interpreter process is an internal fault. Everything after that depends on the code.
    with pool.checkout(limits=settings["limits"], os_policy=settings["policy"]) as session:
        values, error = _run_job(session, job, settings, printed, channel)
    text = printed.text + (f"… ({printed.left_out} more characters)" if printed.left_out else "")
    return {"values": values, "printed": text, "error": error}


def _run_job(
    session: Any, job: dict[str, Any], settings: dict[str, Any], printed: PrintBuffer, channel: Channel
) -> tuple[dict[str, object], dict[str, Any] | None]:
    """The values and the error of a job."""
    from pydantic_monty import MontyCrashedError, MontyError

    error = None
    try:
        try:
            last = _drive(session.feed_start(job["code"], print_callback=printed), job["functions"], channel)
        except MontyCrashedError:
            raise
        except MontyError as raised:
            problem: Any = raised
            kind, _, message = problem.display(format="type-msg").partition(": ")
            frames = problem.traceback() if hasattr(problem, "traceback") else []
            error = {"type": kind[:60], "message": message[:400], "line": frames[-1].line if frames else None}
            last = None
        # A limit stops the interpreter mid-operation, so its values cannot be relied on.
        if error and error["type"] in ("TimeoutError", "MemoryError", "RecursionError"):
            return {}, error
        return _values(session, job["functions"], last, settings), error
    except Unsupported:
        return {}, {"type": "NotImplementedError", "message": "waiting", "line": None}
    except Unconvertible:
        return {}, {"type": "ValueError", "message": "a value of the code cannot be shown", "line": None}
    except (MemoryError, RecursionError):
        return {}, {"type": "MemoryError", "message": "", "line": None}
    except MontyError as raised:
        return {}, error or {"type": "Crash", "message": type(raised).__name__, "line": None}


def _drive(at: Any, names: list[str], channel: Channel) -> object:
    """Run the code to its end and return its value. Calls of `names` are forwarded to the parent.

    Stepping through calls here takes a third of the time of registering functions with the interpreter.
    """
    from pydantic_monty import FunctionSnapshot, MontyComplete, NameLookupSnapshot

    while not isinstance(at, MontyComplete):
        if isinstance(at, NameLookupSnapshot):
            if at.variable_name in names:

                def placeholder(*args: object, **kwargs: object) -> object:
                    """A function of the parent that the code mentions without calling it."""
                    raise RuntimeError

                placeholder.__name__ = at.variable_name
                at = at.resume(value=placeholder)
            else:
                at = at.resume()
        elif not isinstance(at, FunctionSnapshot):
            raise Unsupported
        elif at.is_os_function:
            at = at.resume_not_handled()
        elif at.function_name in names and at.object_id is None:
            args, kwargs = _convert(at, "args"), _convert(at, "kwargs")
            at = at.resume(_answer(channel, at.function_name, args, kwargs))
        else:
            at = at.resume({"exc_type": "NameError", "message": f"name {at.function_name[:60]!r} is not defined"})
    return _convert(at, "output")


def _convert(at: Any, name: str) -> Any:
    """A value converted from the interpreter. A failure here is caused by the code."""
    try:
        return getattr(at, name)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        raise Unconvertible from None


def _answer(channel: Channel, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The result or exception of the parent, in the form the interpreter expects."""
    given = (*args, *kwargs.values())
    # NaN and infinity have no JSON form, so they are refused like other types.
    if any(isinstance(value, float) and not math.isfinite(value) for value in given) or not all(
        isinstance(value, str | int | float | None) for value in given
    ):
        return {"exc_type": "TypeError", "message": f"{name} takes texts only"}
    try:
        channel.send({"call": name, "args": args, "kwargs": kwargs})
    except ValueError:
        return {"exc_type": "ValueError", "message": f"{name} takes shorter texts only"}
    answer = channel.receive()
    if "error" in answer:
        return {"exc_type": answer["kind"], "message": answer["error"]}
    return {"return_value": answer["value"]}


def _values(session: Any, names: list[str], last: object, settings: dict[str, Any]) -> dict[str, object]:
    """The code's assignments in order, and the value of its final expression."""
    from pydantic_monty import MontyComplete, MontyError

    try:
        at = session.feed_start("locals()", print_callback=PrintBuffer(0))
        values = _convert(at, "output") if isinstance(at, MontyComplete) else {}
    except MontyError:
        values = {}
    if not isinstance(values, dict):
        values = {}
    values = {str(name): value for name, value in values.items() if name not in names and not str(name).startswith("_")}
    if last is not None:
        values[_LAST] = last
    kept = {name: v for name, v in values.items() if not (isinstance(v, str) and _NO_VALUE.fullmatch(v[:200]))}
    return JsonConverter(settings["output_chars"]).values(kept)


def main() -> None:
    """Process jobs until the parent closes the connection."""
    channel = Channel(socket.socket(fileno=os.dup(0)))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        settings = channel.receive()
        sys.path[:0] = settings["path"]
        confine(settings)
        # Clock and randomness are fixed, so the same code gives the same values on every run.
        settings["policy"] = {
            "datetime": datetime.fromisoformat(settings["now"]),
            "sleep": "zero",
            "random_start": {"seed": settings["seed"]},
        }
        from pydantic_monty import Monty

        pool = Monty(
            min_processes=1,
            max_processes=1,
            max_checkouts_per_worker=settings["turns_per_process"],
            request_timeout=settings["wall_seconds"],
        )
        with pool:
            channel.send({"ready": True})
            while True:
                job = channel.receive()
                # CPU time rather than wall-clock time, so that a busy machine does not end the process.
                signal.setitimer(signal.ITIMER_PROF, settings["processor_seconds"])
                answer = turn(pool, job, settings, channel)
                signal.setitimer(signal.ITIMER_PROF, 0)
                channel.send({"done": answer})
    except (EOFError, ConnectionError):
        return
    except Exception as fault:
        channel.send({"fault": f"{type(fault).__name__}: {fault}"[:1000]})


if __name__ == "__main__":
    main()
