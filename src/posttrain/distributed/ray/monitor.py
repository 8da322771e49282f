"""Worker heartbeats, hang detection and the count of worker deaths.

Every worker sends a `Heartbeat` to the `WorkerMonitor` actor, from its own thread (`HeartbeatSender`). The launching
process reads the monitor and replaces workers that hang (`find_hangs`).
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.distributed.hangs import place_of


@dataclass(frozen=True)
class PendingCall:
    """A call to another worker that has not returned."""

    target: str
    """Name of the called worker."""
    what: str
    """Description of the call, for messages."""
    seconds: float
    """Time since the call."""


@dataclass(frozen=True)
class Heartbeat:
    """A worker's report about itself."""

    name: str
    pid: int
    node: str
    """Ray's id of its machine."""
    progress: int
    """Counter that grows with every piece of work."""
    position: str
    """Source position of the main thread."""
    calls: Sequence[PendingCall] = ()


@dataclass
class WorkerStatus:
    """The last heartbeat of a worker, its age, and the time since the worker's last progress."""

    heartbeat: Heartbeat
    silent: float
    """Seconds since the last heartbeat."""
    stalled: float
    """Seconds without progress, up to the last heartbeat."""


@dataclass(frozen=True)
class Hang:
    """A worker that hangs while others wait for it."""

    name: str
    sentence: str
    started: bool = True
    """Whether the worker has a process that can be killed."""


def find_hangs(statuses: Mapping[str, WorkerStatus], limit: float) -> list[Hang]:
    """Workers that are silent or without progress for `limit` seconds while others wait for them.

    In a chain of waiting workers only the last one hangs. A silent learner always counts as hung, because the whole run
    waits for it.
    """
    hangs: dict[str, Hang] = {}
    for name, worker in statuses.items():
        if name.startswith("learner") and worker.silent >= limit:
            hangs[name] = Hang(name, f"{_describe(name, worker)}, and the run waits for it")
        for call in worker.heartbeat.calls:
            # The calls of a silent worker are as old as its last heartbeat.
            if call.seconds + worker.silent < limit or worker.silent >= limit:
                continue
            chain, target = [_describe_call(name, call)], call.target
            seen = {name}
            while target in statuses and target not in seen and statuses[target].silent < limit:
                seen.add(target)
                further = [c for c in statuses[target].heartbeat.calls if c.seconds >= limit]
                if not further:
                    break
                chain.append(_describe_call(target, further[0]))
                target = further[0].target
            last = statuses.get(target)
            if last is None and target not in hangs:
                reason = f"{target} has not started: no machine of the cluster has room for it, or it starts slowly"
                hangs[target] = Hang(target, "; ".join([*chain, reason]), started=False)
            if last is not None and target not in hangs and max(last.silent, last.stalled) >= limit:
                hangs[target] = Hang(target, "; ".join([*chain, _describe(target, last)]))
    return list(hangs.values())


def _describe_call(name: str, call: PendingCall) -> str:
    return f"{name} waits for {call.target} ({call.what}) for {call.seconds:.0f} s"


def _describe(name: str, worker: WorkerStatus) -> str:
    if worker.silent > worker.stalled or worker.silent > 5:
        return f"{name} has sent no heartbeat for {worker.silent:.0f} s"
    return f"{name} has made no progress for {worker.stalled:.0f} s, in {worker.heartbeat.position}"


KILLED = "died: its process was killed or crashed"
"""Reason for a death if the worker's machine is still alive."""


def dead_machine(node: str) -> str:
    """The reason for a death if the machine with Ray's id `node` is dead; empty if it is alive or unknown."""
    import ray

    state = next((state for state in ray.nodes() if state["NodeID"] == node), None)
    if state is None:
        return ""
    address, refused = state["NodeManagerAddress"], False
    if state["Alive"]:
        # Ray takes up to half a minute to notice that the daemon of a machine is gone.
        try:
            socket.create_connection((address, state["NodeManagerPort"]), timeout=1).close()
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
    return f"died with its machine {address}" if refused or not state["Alive"] else ""


@dataclass
class WorkerMonitor:
    """The actor that receives all heartbeats and counts deaths. Its methods are short and run one at a time."""

    max_restarts: int
    last: dict[str, tuple[Heartbeat, float, float]] = field(default_factory=dict)
    """By worker: the last heartbeat, the time of its arrival, and that of the last progress."""
    stopping: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    counted: dict[tuple[str, int], str] = field(default_factory=dict)
    """Name and process id of the workers whose death was counted or is not to be -> their machine, if it is known."""
    unreported: list[str] = field(default_factory=list)
    """Deaths of idle workers, which were not noticed by a caller and have not been reported yet."""

    def heartbeat(self, heartbeat: Heartbeat) -> tuple[bool, list[str]]:
        """Receive a heartbeat. Returns whether the worker has to stop and, for learner 0, unreported deaths."""
        now = time.monotonic()
        progressed: float | None = None
        if self.counted.get((heartbeat.name, heartbeat.pid)) == heartbeat.node:
            return False, []  # it outlives the daemon of its machine by seconds, and has been replaced
        if heartbeat.name in self.last:
            before, _, progressed = self.last[heartbeat.name]
            # The run itself notices the deaths of learners and critics, and kills the others of them.
            if before.pid != heartbeat.pid and not heartbeat.name.startswith(("learner", "critic")):
                # The worker died while it was idle and was restarted before its next call.
                sentence, _, first = self._count(heartbeat.name, dead_machine(before.node) or KILLED, before.pid)
                if first:
                    self.unreported.append(f"{sentence}; it was idle and was restarted")
            if replace(heartbeat, position="", calls=()) != replace(before, position="", calls=()):
                progressed = None
        self.last[heartbeat.name] = (heartbeat, now, now if progressed is None else progressed)
        unreported: list[str] = []
        if heartbeat.name == "learner 0":
            unreported, self.unreported = self.unreported, []
        stop = heartbeat.name in self.stopping
        self.stopping.discard(heartbeat.name)
        return stop, unreported

    def stop(self, names: Sequence[str]) -> None:
        """Stop workers with the response to their next heartbeat."""
        self.stopping |= {*names}

    def statuses(self) -> dict[str, WorkerStatus]:
        """The status of every worker."""
        now = time.monotonic()
        return {
            name: WorkerStatus(heartbeat, now - received, received - progressed)
            for name, (heartbeat, received, progressed) in self.last.items()
        }

    def set_reason(self, name: str, reason: str) -> None:
        """Set the reason for the next death of a worker that is about to be killed, and discard its last heartbeat."""
        self.reasons[name] = reason
        self.last.pop(name, None)

    def expect_deaths(self, names: Sequence[str]) -> None:
        """Do not count the deaths of the current processes of these workers, which are about to be replaced."""
        known = [self.last[name][0] for name in names if name in self.last]
        self.counted |= {(one.name, one.pid): one.node for one in known}

    def record_death(self, name: str, reason: str, pid: int) -> tuple[str, bool]:
        """Count the death of a process once. Returns a sentence about it and whether there have been too many deaths."""
        sentence, too_many, _ = self._count(name, reason, pid)
        self.last.pop(name, None)
        return sentence, too_many

    def _count(self, name: str, reason: str, pid: int) -> tuple[str, bool, bool]:
        first = (name, pid) not in self.counted
        sentence = f"{name} {self.reasons.pop(name, reason)}"
        if first:
            before = self.last[name][0] if name in self.last else None
            self.counted[name, pid] = before.node if before is not None and before.pid == pid else ""
            self.deaths.append(sentence)
        return sentence, len(self.deaths) > self.max_restarts, first

    def all_deaths(self) -> list[str]:
        """All deaths so far, in order."""
        return list(self.deaths)


class HeartbeatSender:
    """Sends the heartbeats of this process to the monitor, from its own thread."""

    def __init__(self, monitor: Any, name: str, seconds: float) -> None:
        """`monitor`: handle of the `WorkerMonitor` actor; `seconds`: time between two heartbeats."""
        self.monitor, self.name, self.seconds = monitor, name, seconds
        self.progress = 0
        self._calls: dict[tuple[str, int], tuple[str, float]] = {}
        self._numbers = 0
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident or 0
        self._position, self._moves = "", 0
        self.on_stop: Any = None
        """Called in the thread when the monitor stops the worker."""
        self.on_event: Any = None
        """Called in the thread with a sentence for the user; set it together with `on_stop`."""
        self.extra_progress: Any = None
        """A function whose value grows with the work, added to `progress`."""
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    @contextmanager
    def in_flight(self, target: str, what: str) -> Iterator[None]:
        """Report a call to `target`, which returns at the end of the block."""
        with self._lock:
            self._numbers += 1
            call = target, self._numbers
            self._calls[call] = (what, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]
                self.progress += 1

    def _run(self) -> None:
        import ray

        node, pid = ray.get_runtime_context().get_node_id(), os.getpid()
        while True:
            try:
                response = self.monitor.heartbeat.remote(self._heartbeat(node, pid))
                if self.on_stop is not None:
                    stop, sentences = ray.get(response, timeout=60)
                    for sentence in sentences:
                        self.on_event(sentence)
                    if stop:
                        self.on_stop()
            except Exception:
                pass  # the monitor has ended with the run, or is slow
            time.sleep(self.seconds)

    def _heartbeat(self, node: str, pid: int) -> Heartbeat:
        now = time.monotonic()
        with self._lock:
            pending = [(target, what, now - since) for (target, _), (what, since) in self._calls.items()]
            progress = self.progress
        calls = []
        for target in dict.fromkeys(target for target, _, _ in pending):
            to_target = [(what, seconds) for name, what, seconds in pending if name == target]
            what = to_target[0][0] if len(to_target) == 1 else f"{len(to_target)} requests"
            calls.append(PendingCall(target, what, max(seconds for _, seconds in to_target)))
        position = place_of(self._main)[0]
        if position != self._position:
            self._position, self._moves = position, self._moves + 1
        extra = self.extra_progress() if self.extra_progress is not None else 0
        return Heartbeat(self.name, pid, node, progress + self._moves + extra, position, calls)
