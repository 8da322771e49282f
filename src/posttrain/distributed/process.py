"""Programs that a run starts. Each is a process group, which ends with the block or the object that started it."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02


class ChildProcess:
    """A program in a process group of its own. A context manager, whose end is `kill`.

    Signals of the terminal do not reach it. It ends with this process, even a killed one, if it exits at the end of its
    standard input, which must be a pipe.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it; the arguments are those of `subprocess.Popen`. OSError or ValueError if it cannot be started."""
        self._process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, cwd=folder, start_new_session=True
        )
        self.pid = self._process.pid
        self.stdin: Any = self._process.stdin
        """The pipe to its standard input, if there is one."""
        self.stdout: Any = self._process.stdout
        self.stderr: Any = self._process.stderr

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def code(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        # It is not reaped here, so that no other group gets its id before `kill`.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        while (code := self.code) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, not to other processes of its group."""
        if self.code is None:
            os.kill(self.pid, number)

    def close_pipes(self) -> None:
        """Close its standard input and output."""
        for pipe in (self.stdin, self.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def stop(self, seconds: float) -> int:
        """Close its pipes, `kill` it unless it has ended after `seconds`, and return its exit code."""
        self.close_pipes()
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.kill()

    def kill(self) -> int:
        """Kill all processes of its group, and return its exit code. A second call has no effect."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self.close_pipes()
        return code
