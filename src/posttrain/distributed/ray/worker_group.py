"""The workers that a learner asks: who they are, and what becomes of a question when one of them dies."""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

from posttrain.distributed.ray.watch import KILLED, Reporter, gone_machine
from posttrain.errors import PosttrainError, WorkersLost
from posttrain.runs import events

_LOOK_AGAIN = 0.2
_LOOKS_FOR_MACHINE = 20
"""Looks, half a second each, at whether a machine is gone before its worker is there again."""
_PATIENCE_SECONDS = 3600.0
"""Longest wait for a worker that is started again, for instance until a machine takes the place of one that is gone."""


@dataclass
class WorkerHandle:
    """A worker as the launching process made it: its name in messages and its actor."""

    name: str
    actor: Any


class Member:
    """A worker, whichever process it is at the moment. Methods may be called from any thread."""

    def __init__(self, seat: WorkerHandle, watch: Any, reporter: Reporter) -> None:
        self.name, self.actor = seat.name, seat.actor
        self.watch, self.reporter = watch, reporter
        self.lives = 0
        """Times that it was found dead."""
        self._lock = threading.Lock()
        self.pid = self._returned("has not begun")
        """The process that it is now."""

    def ask(self, what: str, method: str, *arguments: Any) -> Any:
        """The answer of a method, however often the worker has to be started again; `what` is for people."""
        while True:
            life = self.lives
            try:
                return self.once(what, method, *arguments)
            except Gone as gone:
                self.await_return(life, gone)

    def once(self, what: str, method: str, *arguments: Any) -> Any:
        """The answer of a method; `Gone` where the worker died before it gave one."""
        import ray

        number = self.reporter.begin(self.name, what)
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments))
        except Exception as error:
            raise translated(error) from error
        finally:
            self.reporter.end(self.name, number)

    async def once_awaited(self, what: str, method: str, *arguments: Any) -> Any:
        """As `once`, for an event loop."""
        number = self.reporter.begin(self.name, what)
        try:
            return await getattr(self.actor, method).remote(*arguments)
        except Exception as error:
            raise translated(error) from error
        finally:
            self.reporter.end(self.name, number)

    def await_return(self, life: int, gone: "Gone") -> None:
        """Wait until the worker is there again after the death of its life number `life`; the first to notice tells it.

        Raises WorkersLost where workers have died too often, or none comes back.
        """
        import ray

        with self._lock:
            if self.lives != life:
                return
            sentence, too_many = ray.get(self.watch.died.remote(self.name, self._why(), self.pid))
            if too_many:
                raise WorkersLost(
                    f"{sentence}; that is once more than hardware.max_restarts allows, so the run stops; find out why, "
                    "then go on with --resume"
                )
            since = time.monotonic()
            self.pid = self._returned(sentence)
            self.lives += 1
            events.record(f"{sentence}; it was started again after {time.monotonic() - since:.0f} s")

    def _returned(self, sentence: str) -> int:
        """Wait for its process; WorkersLost, which begins with `sentence`, where none comes."""
        import ray

        since = time.monotonic()
        number = self.reporter.begin(self.name, "that it is there")
        try:
            while True:
                try:
                    return ray.get(self.actor.about.remote())
                except Exception as error:
                    said = translated(error)
                    if not isinstance(said, Gone) or time.monotonic() - since > _PATIENCE_SECONDS:
                        raise WorkersLost(f"{sentence}, and {self.name} could not be started: {said}") from error
                    time.sleep(_LOOK_AGAIN)
        finally:
            self.reporter.end(self.name, number)

    def _why(self) -> str:
        """Whether its machine is gone, which Ray notices only after some seconds, or its process alone."""
        import ray

        about = ray.get(self.watch.known.remote()).get(self.name)
        node, again = about.report.node if about is not None else "", self.actor.about.remote()
        for _ in range(_LOOKS_FOR_MACHINE):
            if said := gone_machine(node):
                return said
            if ray.wait([again], timeout=0.5)[0]:
                with contextlib.suppress(Exception):
                    ray.get(again)
                    break
                again = self.actor.about.remote()
        return gone_machine(node) or KILLED


class Gone(Exception):
    """A worker died before it answered."""


def translated(error: Exception) -> Exception:
    """What Ray raised, as what it was in the worker, or as `Gone`."""
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError

    if isinstance(error, RayActorError | NodeDiedError | ObjectLostError):
        return Gone(" ".join(str(error).split())[:300])
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, PosttrainError | Exception) and not isinstance(cause, RayTaskError):
            return cause
    return error
