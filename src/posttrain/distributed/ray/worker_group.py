"""The workers that a learner calls, and the handling of calls during which a worker dies."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.distributed.ray.monitor import KILLED, HeartbeatSender, dead_machine
from posttrain.errors import RunError, WorkersLost
from posttrain.runs.metrics import record_event

_RETRY_SECONDS = 0.2
_MACHINE_CHECKS = 20
"""Number of checks, half a second apart, for a dead machine before its worker is restarted elsewhere."""
_RESTART_SECONDS = 3600.0
"""Maximum wait for a worker to restart, for instance until another machine joins the cluster."""


WorkerHandle = tuple[str, Any]
"""A worker that the launching process created: its name in messages and its Ray actor."""


class WorkerDied(Exception):
    """A worker died before it returned from a call."""


class StateLost(RunError):
    """A worker died, and its state exists only in checkpoints."""

    def __init__(self, worker: str, pid: int) -> None:
        super().__init__(f"{worker} died, and the run can only continue from its last checkpoint")
        self.worker, self.pid = worker, pid

    def __reduce__(self) -> tuple[Any, ...]:
        return StateLost, (self.worker, self.pid)


class WorkerClient:
    """Calls a worker across restarts of its process. Methods may be called from any thread."""

    def __init__(self, handle: WorkerHandle, monitor: Any, heartbeat: HeartbeatSender) -> None:
        """`heartbeat` reports the calls that are in flight to the monitor."""
        self.name, self.actor = handle
        self.monitor, self.heartbeat = monitor, heartbeat
        self.restarts = 0
        """Number of deaths noticed by this client."""
        self._lock = threading.Lock()
        self.pid = self._wait_for_process("has not started")
        """Id of the worker's current process."""

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """The result of a method, called again after every restart of the worker. `what` describes the call in messages."""
        while True:
            restart = self.restarts
            try:
                return self.call_once(what, method, *arguments)
            except WorkerDied as error:
                self.wait_for_restart(restart, error)

    def call_once(self, what: str, method: str, *arguments: Any) -> Any:
        """The result of a method. Raises WorkerDied if the worker dies before it returns."""
        import ray

        with self._in_flight(what):
            return ray.get(getattr(self.actor, method).remote(*arguments))

    async def call_once_async(self, what: str, method: str, *arguments: Any) -> Any:
        """As `call_once`, for an event loop."""
        with self._in_flight(what):
            return await getattr(self.actor, method).remote(*arguments)

    @contextlib.contextmanager
    def _in_flight(self, what: str) -> Iterator[None]:
        """Report a call to the monitor, and replace Ray's errors by the worker's, or WorkerDied."""
        with self.heartbeat.in_flight(self.name, what):
            try:
                yield
            except Exception as error:
                raise unwrap_ray_error(error) from error

    def wait_for_restart(self, restart: int, error: WorkerDied) -> None:
        """Wait until the worker runs again after the death of its process number `restart`, raised as `error`.

        The first caller records the death. Raises WorkersLost if workers have died too often or the worker does not
        restart.
        """
        import ray

        with self._lock:
            if self.restarts != restart:
                return
            sentence, too_many = ray.get(self.monitor.record_death.remote(self.name, self._death_reason(), self.pid))
            if too_many:
                raise WorkersLost(
                    f"{sentence}, too often in one run, so it stops; find the cause, then continue with --resume"
                ) from error
            since = time.monotonic()
            self.pid = self._wait_for_process(sentence)
            self.restarts += 1
            record_event(f"{sentence}; it was restarted after {time.monotonic() - since:.0f} s")

    def _wait_for_process(self, sentence: str) -> int:
        """Wait for the worker's process and return its id. Raises WorkersLost, beginning with `sentence`, if none starts."""
        import ray

        since = time.monotonic()
        with self._in_flight("start"):
            while True:
                try:
                    return ray.get(self.actor.get_pid.remote())
                except Exception as error:
                    cause = unwrap_ray_error(error)
                    if not isinstance(cause, WorkerDied) or time.monotonic() - since > _RESTART_SECONDS:
                        raise WorkersLost(f"{sentence}, and {self.name} could not be started: {cause}") from error
                    time.sleep(_RETRY_SECONDS)

    def _death_reason(self) -> str:
        """The reason for the death: the worker's machine, which Ray notices only after some seconds, or only its
        process.
        """
        import ray

        status = ray.get(self.monitor.statuses.remote()).get(self.name)
        node, restarted = status.heartbeat.node if status is not None else "", self.actor.get_pid.remote()
        for _ in range(_MACHINE_CHECKS):
            if reason := dead_machine(node):
                return reason
            if ray.wait([restarted], timeout=0.5)[0]:
                with contextlib.suppress(Exception):
                    ray.get(restarted)
                    break
                restarted = self.actor.get_pid.remote()
        return dead_machine(node) or KILLED


def call_in_parts(workers: Sequence[WorkerClient], items: Sequence[Any], what: str, method: str) -> list[Any]:
    """The results of a method for all `items`, in order. Each worker gets a contiguous part of them, all at once."""
    each = -(-len(items) // len(workers)) or 1
    parts = [list(items[start : start + each]) for start in range(0, len(items), each)]
    with ThreadPoolExecutor(len(workers)) as pool:
        calls = [
            pool.submit(worker.call, f"{len(part)} {what}", method, part)
            for worker, part in zip(workers, parts, strict=False)
        ]
        return [result for call in calls for result in call.result()]


def unwrap_ray_error(error: Exception) -> Exception:
    """The error that the worker raised, or WorkerDied for Ray's errors about dead actors, nodes and lost objects."""
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError

    if isinstance(error, RayActorError | NodeDiedError | ObjectLostError):
        return WorkerDied(" ".join(str(error).split())[:300])
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, Exception) and not isinstance(cause, RayTaskError) else error
