"""Programs that a run starts: they end with their whole group, gently if they read their input, and with this process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from posttrain.distributed.process import ChildProcess

READER = "import sys; print('ready', flush=True); sys.stdin.read(); sys.exit(7)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
OWNER = f"""
import subprocess, sys, time
from posttrain.distributed.process import ChildProcess
child = ChildProcess([sys.executable, "-c", {READER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def started(code, **settings):
    return ChildProcess([sys.executable, "-c", code], stdout=subprocess.PIPE, **settings)


def await_end(pid):
    """Wait until no process has the id, or a zombie that its new parent has not reaped."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return


def test_a_process_that_reads_its_input_ends_by_itself():
    child = started(READER, stdin=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    assert child.code is None
    assert child.stop(60) == 7
    assert (child.code, child.kill()) == (7, 7)


def test_a_process_that_does_not_is_killed_with_its_children():
    with started(PARENT) as child:
        grandchild = int(child.stdout.readline())
        assert child.code is None
        assert child.stop(0.1) == -signal.SIGKILL
    await_end(grandchild)
    assert child.code == -signal.SIGKILL


def test_the_children_of_a_process_that_has_ended_are_killed():
    with started(PARENT.rpartition("time.sleep")[0]) as child:
        grandchild = int(child.stdout.readline())
        assert asyncio.run(child.wait()) == 0
        assert child.code == 0
        os.kill(grandchild, 0)
    await_end(grandchild)


def test_a_signal_ends_the_program_and_is_its_code():
    with started(PARENT) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGABRT)
        assert asyncio.run(child.wait()) == -signal.SIGABRT
    child.send_signal(signal.SIGABRT)


def test_a_process_ends_with_its_killed_parent():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        child = int(owner.stdout.readline())
        owner.kill()
    await_end(child)


def test_a_program_that_cannot_be_started_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        ChildProcess([str(tmp_path / "missing")])
