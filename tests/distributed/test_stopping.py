"""A second signal ends a process that is stuck, and files of a killed launcher are removed."""

import signal
import subprocess
import sys
import time

STUCK = """
import posttrain.distributed.stopping as stopping, signal, time
stopping.PATIENCE = 0.5
signal.signal(signal.SIGINT, lambda *_: None)
with stopping.second_signal_ends():
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
"""
KILLED = """
import subprocess, sys, time, pathlib
from posttrain.distributed.stopping import deleted_with_this_process
folder = pathlib.Path(sys.argv[1])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(folder / "pid-0").write_text(str(worker.pid))
with deleted_with_this_process(folder):
    print("ready", flush=True)
    time.sleep(600)
"""


def begun(code, *words):
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_signal_ends_a_process_that_ignores_it():
    process = begun(STUCK)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_a_killed_launcher_leaves_no_files(tmp_path):
    folder = tmp_path / "session"
    folder.mkdir()
    process = begun(KILLED, str(folder))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
