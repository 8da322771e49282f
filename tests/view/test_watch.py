"""`posttrain watch`: the display of a run that another process trains."""

import re
import threading
import time
from io import StringIO

from rich.console import Console

from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.tables import Table, write_results
from posttrain.view.watch import watch_run
from tests.runs.comparing import make_run
from tests.terminal import in_terminal


def watched(path):
    out = StringIO()
    watch_run(path, Console(file=out, highlight=False))
    return out.getvalue()


def test_an_ended_run_prints_its_last_lines_and_its_result(tmp_path):
    path = make_run(tmp_path, "done")
    write_results(path, [Table("done: bandit", ("policy", "success"), [("trained model", "40.0%")], "")], [])
    text = watched(path)
    assert re.search(r"trained model +40\.0%", text)
    assert "step 4/4" in text
    assert "Success on 200 held-out seeds is 40.0%" in text


def test_new_lines_appear_until_the_run_ends(tmp_path):
    path = make_run(tmp_path, "live", steps=2, ended=False)
    run, started, out = RunDirectory(path), threading.Event(), []

    def train():
        with run.lock(), MetricsLog(run, []) as log:
            started.set()
            time.sleep(1)
            log.write(3, "train", {"rollout/return": 3.25})
            log.write(3, "warning", {"message": "entropy is low"})
            time.sleep(1)

    training = threading.Thread(target=train)
    training.start()
    started.wait()
    assert run.is_running()
    out = watched(path)
    training.join()
    assert not run.is_running()
    assert "return 3.250" in out
    assert "step 3: entropy is low" in out
    assert f"{path} stopped after step 3; `posttrain rl --resume {path}` continues it" in out


def test_a_failed_run_ends_with_its_sentence(tmp_path):
    path = make_run(tmp_path, "failed", ended=False)
    try:
        with RunDirectory(path).recording_failure():
            raise ValueError("the reward is not a number")
    except ValueError:
        pass
    assert watched(path).rstrip().endswith("ValueError: the reward is not a number")
    with RunDirectory(path).recording_failure():
        assert not RunDirectory(path).failure.exists()


def test_lines_fit_the_terminal(tmp_path):
    path = make_run(tmp_path, "wide")
    for width in (80, 120):
        code, lines = in_terminal("watch", path, width=width)
        assert code == 0
        assert [line for line in lines if line.startswith("step 4/4")], lines
        assert not [line for line in lines if "\x1b" in line or "time left" in line], lines
