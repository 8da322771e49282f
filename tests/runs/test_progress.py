import io

import pytest
from rich.console import Console

from posttrain.runs.metrics import Progress, duration

TRAIN = {"rollout/success": 0.25, "rollout/return": -0.5, "speed/tokens_per_second": 1234.5}
EVALUATION = {"success": 0.5, "success_low": 0.4, "success_high": 0.6, "n": 128, "return": 0.75}


@pytest.fixture
def now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("posttrain.runs.metrics.time.monotonic", lambda: clock[0])
    return clock


def test_without_a_terminal_each_update_is_one_plain_line():
    out = io.StringIO()
    with Progress(100, "tossing", start_step=10, console=Console(file=out, width=40)) as progress:
        progress.update(11, TRAIN)
        progress.update(11, EVALUATION)
        progress.message("checkpoint\x1b[31m written")
        progress.update(12, {})
        progress.update(12, {"rollout/success": None})
    lines = out.getvalue().splitlines()
    assert lines[0] == "tossing: step 10 of 100"
    assert lines[1].startswith("step 11/100  success 25.0%  return -0.500  tokens/s 1,234  left ")
    assert lines[2] == "step 11/100  evaluation  success 50.0% [40.0, 60.0]  n 128  return 0.750"
    assert lines[3] == "checkpoint [31m written"
    assert len(lines) == 6
    assert all(line.isprintable() for line in lines)


def test_remaining_time_counts_only_steps_of_this_process(now):
    with Progress(30, "t", start_step=10, console=Console(file=io.StringIO())) as progress:
        assert progress.time_left() == "estimating"
        now[0] += 60
        progress.update(15, {})
        assert progress.time_left() == "3:00"
        progress.update(30, {})
        assert progress.time_left() == "0:00"
    assert [duration(seconds) for seconds in (59.6, 3600, 86399)] == ["1:00", "1:00:00", "23:59:59"]


@pytest.mark.parametrize(
    ("report", "what"),
    [("played", "evaluated"), ("sampled", "sampled"), ("trained", "trained on"), ("updated", "made update")],
)
def test_a_long_evaluation_or_step_says_how_far_it_is(report, what, now):
    """A line every five seconds in a pipe."""
    now[0], out = 0.0, io.StringIO()
    with Progress(9, "tossing", console=Console(file=out, width=40)) as progress:
        for done in range(1, 13):
            now[0] += 1
            getattr(progress, report)(done, 12)
    assert out.getvalue().splitlines()[1:] == [f"{what} 5 of 12", f"{what} 10 of 12"]
