"""Calls of environments and rewards in daemon threads, so that time-outs and signals hold also for a call that never returns.

A thread cannot be ended from outside. A call that takes too long is given up: its result is ignored, SystemExit is raised
in its thread the next time that it runs Python code, and neither the event loop nor the interpreter waits for it.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.errors import InputError, PosttrainError, RunError

MOST_GIVEN_UP = 256
"""Calls of a process that were given up and still run. One more ends the run."""
_QUICK = 0.002
"""Seconds for which the event loop itself waits for a call that others have to wait for, which saves switching."""
_SLOW = 0.1
"""Share of the time-out after which calls that are made one at a time no longer wait for each other."""

Ended = tuple[Any, BaseException | None]
"""How a call ended: its result, or what it raised."""


class CallTimeout(Exception):
    """A call took longer than its time-out."""


class Call:
    """A call that runs in its own daemon thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Ended] = Future()
        """Its end. It never raises what the call raised: asyncio does not return from a SystemExit."""
        self.future.set_running_or_notify_cancel()
        self.thread = Thread(target=self._run, args=(function,), name="environment", daemon=True)
        self.thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            end: Ended = function(), None
        except BaseException as error:
            end = None, error
        self.future.set_result(end)

    def give_up(self) -> None:
        """Ignore the call from now on. RunError if too many ignored calls still run."""
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(SystemExit))
        _given_up.difference_update([thread for thread in _given_up if not thread.is_alive()])
        _given_up.add(self.thread)
        if len(_given_up) > MOST_GIVEN_UP:
            raise RunError(
                f"{len(_given_up)} calls of environments or rewards took longer than rollout.environment_timeout and have "
                "not returned since; give them time-outs of their own, then resume the run"
            )


_given_up: set[Thread] = set()


@dataclass
class _Queue:
    """The calls of an event loop that are made one at a time."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    overlap: bool = False
    """Whether a slow call ended the order."""


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


def described(error: BaseException, where: str = "") -> str:
    """Type and message of what a call raised, without lone surrogates, which cannot be printed."""
    try:
        return f"{type(error).__name__}{where}: {error}".encode("utf-8", "replace").decode()
    except Exception:
        return type(error).__name__


def ended_in(function: Callable[[], Any], seconds: float | None) -> Ended:
    """As `ended_within`, outside an event loop."""
    call = Call(function)
    try:
        return call.future.result(seconds)
    except TimeoutError:
        call.give_up()
        return None, CallTimeout(f"took longer than {seconds:g} s")


def completed(function: Callable[[], Any], name: str, seconds: float | None = None) -> Any:
    """The result of `ended_in`. InputError, which names the call, if it raised; CallTimeout."""
    result, error = ended_in(function, seconds)
    if isinstance(error, PosttrainError | CallTimeout):
        raise error
    if error is not None:
        raise InputError(f"{name} raised {described(error)}; correct it") from error
    return result


async def ended_within(function: Callable[[], Any], seconds: float | None, one_at_a_time: bool) -> Ended:
    """Call `function` in a daemon thread. The call ends with CallTimeout after `seconds`, although its thread may go on;
    None: no limit.

    Calls that are made `one_at_a_time` in an event loop do not overlap, until one of them takes longer than a tenth of
    `seconds`. RunError if too many calls that were given up still run.
    """
    queue = _queues.setdefault(asyncio.get_running_loop(), _Queue())
    call: Call | None = None
    left = seconds
    if one_at_a_time and not queue.overlap:
        async with queue.turn:
            if not queue.overlap:
                call = Call(function)
                with suppress(TimeoutError):
                    return call.future.result(_QUICK if seconds is None else min(_QUICK, seconds))
                if seconds is not None:
                    left = (1 - _SLOW) * seconds
                await _wait(call, None if seconds is None else _SLOW * seconds)
                queue.overlap = not call.future.done()
    call = call or Call(function)
    await _wait(call, left)
    if not call.future.done():
        call.give_up()
        return None, CallTimeout(f"took longer than {seconds:g} s")
    return call.future.result()


async def _wait(call: Call, seconds: float | None) -> None:
    """Wait until a call ends, at most `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(call.future), seconds)
