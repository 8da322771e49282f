"""Who waits for whom and since when, and which of them hang."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Wait:
    """Something asked of another worker and not answered yet."""

    target: str
    what: str
    seconds: float
    """Since it was asked."""


@dataclass(frozen=True)
class Report:
    """What a worker says of itself."""

    name: str
    pid: int
    node: str
    """Ray's id of its machine."""
    progress: int
    """Grows with every piece of work."""
    doing: str
    """Where its main thread is."""
    waits: Sequence[Wait] = ()


@dataclass
class Known:
    """The last report of a worker, and how old it and its progress are."""

    report: Report
    silent: float
    """Seconds since it was heard of."""
    stuck: float
    """Seconds without progress, of a worker that is heard of."""


@dataclass(frozen=True)
class Hang:
    """A worker that others wait for in vain."""

    name: str
    sentence: str
    started: bool = True
    """Whether there is a process of it that can be ended."""


def hangs(known: Mapping[str, Known], limit: float) -> list[Hang]:
    """Workers that hang: silent or without progress for `limit` seconds while others wait for them, and waiting for
    nobody themselves. A learner that is silent hangs in any case, for everybody waits for it."""
    found: dict[str, Hang] = {}
    for name, worker in known.items():
        if name.startswith("learner") and worker.silent >= limit:
            found[name] = Hang(name, f"{_says(name, worker)}, and the run waits for it")
        for wait in worker.report.waits:
            # A silent worker's own waits are as old as its last report.
            if wait.seconds + worker.silent < limit or worker.silent >= limit:
                continue
            chain, target = [_waits(name, wait)], wait.target
            seen = {name}
            while target in known and target not in seen and known[target].silent < limit:
                seen.add(target)
                further = [w for w in known[target].report.waits if w.seconds >= limit]
                if not further:
                    break
                chain.append(_waits(target, further[0]))
                target = further[0].target
            last = known.get(target)
            if last is None and target not in found:
                reason = f"{target} has not begun: no machine of the cluster has room for it, or it is slow to start"
                found[target] = Hang(target, "; ".join([*chain, reason]), started=False)
            if last is not None and target not in found and max(last.silent, last.stuck) >= limit:
                found[target] = Hang(target, "; ".join([*chain, _says(target, last)]))
    return list(found.values())


def _waits(name: str, wait: Wait) -> str:
    return f"{name} waits for {wait.target} ({wait.what}) for {wait.seconds:.0f} s"


def _says(name: str, worker: Known) -> str:
    if worker.silent > worker.stuck or worker.silent > 5:
        return f"{name} has not been heard of for {worker.silent:.0f} s"
    return f"{name} has made no progress for {worker.stuck:.0f} s, in {worker.report.doing}"


@dataclass
class _Heard:
    report: Report
    at: float
    progressed: float


@dataclass
class Watch:
    """The actor that all workers report to. Its methods are short and called one at a time."""

    most_restarts: int
    heard: dict[str, _Heard] = field(default_factory=dict)
    orders: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    counted: set[tuple[str, int]] = field(default_factory=set)
    """Name and process of those that died."""
    news: list[str] = field(default_factory=list)
    """Deaths that nobody noticed who waited for the worker, not told yet."""

    def report(self, report: Report) -> tuple[str, list[str]]:
        """Take a report; returns what the worker is to do: `stop`, or nothing; and, to the first learner, the news."""
        now, before = time.monotonic(), self.heard.get(report.name)
        if before is not None and before.report.pid != report.pid:
            # It was idle when it died, and is there again before anybody asked it something.
            sentence, _, first = self._count(report.name, gone_machine(before.report.node) or KILLED, before.report.pid)
            if first:
                self.news.append(f"{sentence}; it was idle, and was started again")
        same = before is not None and (before.report.pid, before.report.node, before.report.progress) == (
            report.pid,
            report.node,
            report.progress,
        )
        self.heard[report.name] = _Heard(report, now, before.progressed if same and before else now)
        news: list[str] = []
        if report.name == "learner 0":
            news, self.news = self.news, []
        return self.orders.pop(report.name, ""), news

    def order(self, names: Sequence[str], what: str) -> None:
        """Tell workers something with the answer to their next report."""
        self.orders |= dict.fromkeys(names, what)

    def forget(self, name: str) -> None:
        """The worker is gone for now."""
        self.heard.pop(name, None)

    def known(self) -> dict[str, Known]:
        """What is known of everybody."""
        now = time.monotonic()
        return {
            name: Known(heard.report, now - heard.at, heard.at - heard.progressed) for name, heard in self.heard.items()
        }

    def because(self, name: str, reason: str) -> None:
        """Why a worker is about to be killed."""
        self.reasons[name] = reason

    def died(self, name: str, reason: str, pid: int) -> tuple[str, bool]:
        """Count the death of a process, once: returns what to say of it, and whether there have been too many."""
        sentence, too_many, _ = self._count(name, reason, pid)
        self.forget(name)
        return sentence, too_many

    def _count(self, name: str, reason: str, pid: int) -> tuple[str, bool, bool]:
        first = (name, pid) not in self.counted
        sentence = f"{name} {self.reasons.pop(name, reason)}"
        if first:
            self.counted.add((name, pid))
            self.deaths.append(sentence)
        return sentence, len(self.deaths) > self.most_restarts, first

    def all_deaths(self) -> list[str]:
        """Everything that died so far, in order."""
        return list(self.deaths)


KILLED = "died: its process was killed or crashed"
"""Of a worker whose machine is still there."""


def gone_machine(node: str) -> str:
    """What to say of a worker of the machine that Ray calls `node`; nothing where that is alive, or not known."""
    import ray

    state = next((state for state in ray.nodes() if state["NodeID"] == node), None)
    return "" if state is None or state["Alive"] else f"died with its machine {state['NodeManagerAddress']}"


class Reporter:
    """Tells the watch, from a thread of its own, what this process does."""

    def __init__(self, watch: Any, name: str, seconds: float) -> None:
        """`seconds` between two reports."""
        import threading

        self.watch, self.name, self.seconds = watch, name, seconds
        self.progress = 0
        self._waits: dict[tuple[str, int], tuple[str, float]] = {}
        self._numbers = 0
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident or 0
        self._where, self._moved = "", 0
        self.on_stop: Any = None
        """Called in the thread when the watch says so."""
        self.on_news: Any = None
        """Called in the thread with a sentence for the user; set it with `on_stop`."""
        self.more_progress: Any = None
        """A function whose value grows with the work."""
        threading.Thread(target=self._run, daemon=True, name="reporter").start()

    def begin(self, target: str, what: str) -> int:
        """Something is asked of `target`; hand the number to `end` when the answer is there."""
        with self._lock:
            self._numbers += 1
            self._waits[target, self._numbers] = (what, time.monotonic())
            return self._numbers

    def end(self, target: str, number: int) -> None:
        """The answer is there."""
        with self._lock:
            self._waits.pop((target, number), None)
            self.progress += 1

    def _run(self) -> None:
        import ray

        node, pid = ray.get_runtime_context().get_node_id(), _pid()
        while True:
            try:
                answer = self.watch.report.remote(self._report(node, pid))
                if self.on_stop is not None:
                    order, news = ray.get(answer, timeout=60)
                    for sentence in news:
                        self.on_news(sentence)
                    if order == "stop":
                        self.on_stop()
            except Exception:
                pass  # the watch is gone with the run, or slow
            time.sleep(self.seconds)

    def _report(self, node: str, pid: int) -> Report:
        now = time.monotonic()
        with self._lock:
            pending = [(target, what, now - since) for (target, _), (what, since) in self._waits.items()]
            progress = self.progress
        waits = []
        for target in dict.fromkeys(target for target, _, _ in pending):
            own = [(what, seconds) for of, what, seconds in pending if of == target]
            what = own[0][0] if len(own) == 1 else f"{len(own)} requests"
            waits.append(Wait(target, what, max(seconds for _, seconds in own)))
        where = _position(self._main)
        if where != self._where:
            self._where, self._moved = where, self._moved + 1
        more = self.more_progress() if self.more_progress is not None else 0
        return Report(self.name, pid, node, progress + self._moved + more, where, waits)


def _pid() -> int:
    import os

    return os.getpid()


def _position(thread: int) -> str:
    """The innermost function of this package that the thread is in, with its line."""
    import sys

    frame, first = sys._current_frames().get(thread), ""
    while frame is not None:
        path = frame.f_code.co_filename
        place = f"{path.rpartition('posttrain/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        first = first or place
        if "/posttrain/" in path and "/cluster/" not in path:
            return place
        frame = frame.f_back
    return first
