"""Cleanup that works even if the rest of a process hangs or dies: after a second signal, or the death of the launcher.

Executed as a script with a folder as its argument, this file waits for the end of its standard input, ends the processes
whose ids are in `FOLDER/pid-*` (negative: process groups), and deletes the folder. As a script, it imports only the standard library.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 6.0
"""Seconds that a process has to exit after a second signal before it is ended."""
_SAVING = 60.0
"""Seconds that processes have to save a checkpoint after their launcher died."""


@contextmanager
def second_signal_ends() -> Iterator[None]:
    """End this process with exit code 130 at most `PATIENCE` seconds after a second SIGINT or SIGTERM inside the block.

    A thread counts the signals, so this works even if the main thread is in a long call or in the clean-up of a
    library. Has no effect outside the main thread, because only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    inlet, outlet = os.pipe()
    os.set_blocking(outlet, False)
    before = signal.set_wakeup_fd(outlet, warn_on_full_buffer=False)

    def count() -> None:
        signals = 0
        while data := os.read(inlet, 16):
            signals += sum(number in (signal.SIGINT, signal.SIGTERM) for number in data)
            if signals >= 2:
                if not ended.wait(PATIENCE):
                    os._exit(130)
                break
        os.close(inlet)

    ended = threading.Event()
    threading.Thread(target=count, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        os.close(outlet)


@contextmanager
def deleted_with_this_process(folder: Path) -> Iterator[None]:
    """Inside the block, a separate process waits for the death of this one. It then stops the processes whose ids are in
    `folder/pid-*` by SIGTERM, so that they save a checkpoint, and deletes `folder`.
    """
    from posttrain.distributed.process import ChildProcess

    with ChildProcess([sys.executable, "-S", __file__, str(folder)], stdin=subprocess.PIPE):
        yield


def _main(folder: Path) -> None:
    while os.read(0, 1):
        pass
    running = [int(file.read_text()) for file in folder.glob("pid-*")]
    for number, seconds in ((signal.SIGTERM, _SAVING), (signal.SIGKILL, 5.0)):
        for process in running:
            with suppress(OSError):
                # A group belongs to a cluster, which has nothing to save, and agents of Ray ignore SIGTERM.
                os.kill(process, number if process > 0 else signal.SIGKILL)
        deadline = time.monotonic() + seconds
        while (running := [process for process in running if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(0.1)
    deadline = time.monotonic() + _SAVING
    while folder.exists() and time.monotonic() < deadline:
        # Processes that are not in the list, such as those of a cluster that is shutting down, may still write to the
        # folder.
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def _runs(process: int) -> bool:
    """Whether a process runs, or, for a negative number, a process of that group."""
    try:
        os.kill(process, 0)
    except OSError:
        return False
    # A zombie does not run. Systems without /proc do not show this.
    known = False
    for file in Path("/proc").glob(f"{process}/stat" if process > 0 else "[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            known = True
            if state != "Z" and (process > 0 or int(group) == -process):
                return True
    return not known


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
