"""Worker processes: started, asked, put to sleep while others are measured, and weighed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.timing import OverLimit, peak_memory, side_environment


class Worker:
    """`python -m MODULE SETTINGS` in a separate process, which may start more; asleep unless it is answering.

    It sees the folder of the benchmarks, `threads` threads and no network of the hub. RuntimeError with the end of its
    log where it dies.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        threads: int,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self._place = tempfile.TemporaryDirectory(prefix="posttrain-benchmark-")
        self._log = Path(self._place.name) / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", module, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._place.name,
                env=side_environment(threads) | dict(environment or {}),
                start_new_session=True,
            )
        try:
            self.version: str = self._answer()["version"]
        except BaseException:
            # Whoever is stopped while this one starts has nothing yet to close.
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, job: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
        """The answer to a job. A worker that takes more than `limit` seconds is ended: OverLimit."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        ended = threading.Event()

        def end() -> None:
            ended.set()
            self._signal(signal.SIGKILL)

        timer = threading.Timer(limit or threading.TIMEOUT_MAX, end)
        timer.daemon = True
        timer.start()
        try:
            answer = self._answer()
        except RuntimeError:
            if ended.is_set():
                raise OverLimit(f"not done after {limit:g} s") from None
            raise
        finally:
            timer.cancel()
        self._signal(signal.SIGSTOP)
        return answer

    def peak_memory(self) -> int:
        """Bytes: the largest resident size of each of its processes, added up; shared pages count in each."""
        return sum(peak_memory(pid) for pid in _session(self.process.pid))

    def processor_seconds(self) -> float:
        """User and system time of all of its threads so far."""
        return sum(_processor_ticks(pid) for pid in _session(self.process.pid)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it and everything it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._place.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            end = self._log.read_text(errors="replace")[-3000:]
            self.close()
            raise RuntimeError(f"{self.module} died:\n{end}")
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        for pid in _session(self.process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _processor_ticks(pid: int) -> int:
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0
    return int(user) + int(system)


def _session(leader: int) -> list[int]:
    """Process ids of the session that `leader` began."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                # After the name, which stands in parentheses: state, parent, group, session.
                session = (directory / "stat").read_text().rpartition(")")[2].split()[3]
            except OSError:
                continue
            if int(session) == leader:
                found.append(int(directory.name))
    return found
