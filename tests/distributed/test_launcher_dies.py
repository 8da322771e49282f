"""The end of a launcher, for real: two interrupts, a signal to the process group, SIGKILL. Several processes, and Ray."""

import os
import random
import shutil
import signal
import time

import pytest

from tests.distributed.launched import Launched
from tests.training import small

HARDWARE = {"processes": {"processes": 2}, "ray": {"ray": "auto"}}


@pytest.fixture(params=HARDWARE)
def launched(request, tiny_model, tmp_path):
    """A run that has done two steps."""
    if request.param == "ray":
        pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")
    made = Launched(tiny_model, tmp_path, HARDWARE[request.param])
    try:
        made.wait_for_step(2)
        yield made
    finally:
        made.end()
        shutil.rmtree(made.ray, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_interrupts_end_a_run_within_ten_seconds(launched):
    for number in (signal.SIGINT, signal.SIGINT):
        os.killpg(launched.process.pid, number)
        time.sleep(0.3)
    started = time.monotonic()
    launched.process.wait(60)
    assert time.monotonic() - started < 10
    assert launched.process.returncode == 130, launched.log.read_text()[-2_000:]
    launched.wait_until_nothing_is_left(30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_the_process_group_leaves_a_checkpoint(launched):
    os.killpg(launched.process.pid, signal.SIGTERM)
    launched.process.wait(120)
    text = launched.log.read_text()
    assert launched.process.returncode == 130, text[-2_000:]
    assert "stopped by SIGTERM after step" in text
    launched.wait_until_nothing_is_left(30)
    steps = launched.finished()
    assert (launched.run / "checkpoints" / f"step_{steps:06d}").is_dir() or any(
        path.name.endswith(str(steps)) for path in (launched.run / "checkpoints").iterdir()
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_launcher_leaves_no_processes_and_no_session_files(launched):
    # At a random moment of a step: some are in the middle of a checkpoint.
    time.sleep(random.random())
    launched.process.kill()
    launched.process.wait()
    seconds = launched.wait_until_nothing_is_left(100)
    print(f"nothing is left after {seconds:.1f} s")
    assert small.metrics(launched.run)
    assert list((launched.run / "checkpoints").glob("step_*"))
