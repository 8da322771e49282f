import io
import re

import pytest
from rich.console import Console

from posttrain.runs.metrics import Progress, duration, rate
from tests.terminal import lines_of

TRAIN = {"rollout/success": 0.25, "rollout/return": -0.5, "speed/tokens_per_second": 1234.5}
EVALUATION = {"success": 0.5, "success_low": 0.4, "success_high": 0.6, "n": 128, "return": 0.75}


def test_without_a_terminal_each_update_is_one_plain_line() -> None:
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


def test_an_evaluation_on_rows_names_its_rows() -> None:
    out = io.StringIO()
    found = {"validation/loss": 0.61, "validation/accuracy": 0.6, "validation/rows": 50}
    limits = {"validation/accuracy_low": 0.46, "validation/accuracy_high": 0.72}
    with Progress(9, "ranking", console=Console(file=out, width=40)) as progress:
        progress.update(3, {"loss/preference": 0.7, "preference/accuracy": 0.5625, "preference/margin": 0.1})
        progress.update(3, {**found, **limits})
        progress.update(4, {"loss/nll": 1.5, "optimizer/gradient_norm": 0.1234})
        progress.update(4, {"validation/loss": 0.75, "validation/loss_low": 0.7, "validation/loss_high": 0.8})
        progress.update(5, {"return": 0.5, "return_low": 0.25, "return_high": 0.75, "n": 9})
    trained, evaluated, supervised, measured, played = out.getvalue().splitlines()[1:]
    assert trained.startswith("step 3/9  loss 0.7000  accuracy 56%  margin 0.100  left ")
    assert evaluated == "step 3/9  evaluation  validation loss 0.6100  accuracy 60.0% [46.0, 72.0]  rows 50"
    assert supervised.startswith("step 4/9  loss 1.5000  gradient 0.123  left ")
    assert measured == "step 4/9  evaluation  validation loss 0.7500 [0.7000, 0.8000]"
    assert played == "step 5/9  evaluation  n 9  return 0.500 [0.250, 0.750]"


@pytest.mark.parametrize("width", [80, 120])
def test_in_a_terminal_the_history_stays_above_one_live_line(width: int) -> None:
    out = io.StringIO()
    long = {"rollout/success": 0.25, "rollout/return": -0.5, "loss/policy": -1e-9, "optimizer/gradient_norm": 1234.5}
    with Progress(2000, "rl tossing", console=Console(file=out, force_terminal=True, width=width)) as progress:
        progress._live.refresh()
        assert lines_of(out.getvalue(), width)[-1].endswith("step 0/2000  time left: estimating")
        progress.update(3, EVALUATION | {"return_low": 0.5, "return_high": 1.0})
        progress.update(4, long | {"speed/tokens_per_second": 123456.0})
        progress.message("[bold]not markup")
        progress.played(7, 12)
        progress._live.refresh()
        *history, live = lines_of(out.getvalue(), width)
    evaluation = ["step 3/2000  evaluation  success 50.0% [40.0, 60.0]  n 128", "return 0.750 [0.500, 1.000]"]
    step = "step 4/2000  success 25.0%  return -0.500  loss 0.0000  gradient 1.23e+03"
    if width == 80:
        assert history == [evaluation[0], f"    {evaluation[1]}", step, "[bold]not markup"]
    else:
        assert history == ["  ".join(evaluation), f"{step}  tokens/s 123,456", "[bold]not markup"]
    assert re.search(r"step 4/2000  time left: \d+:\d\d  evaluated", live)
    assert live.endswith("evaluated 7 of 12")
    assert lines_of(out.getvalue(), width) == history  # The live line is removed at the end.


def test_a_long_title_leaves_room_for_the_state() -> None:
    out = io.StringIO()
    with Progress(2000, "rl " + "x" * 90, console=Console(file=out, force_terminal=True, width=80)) as progress:
        progress.played(100, 1200)
        progress._live.refresh()
        (live,) = lines_of(out.getvalue(), 80)
    assert live.endswith("step 0/2000  time left: estimating  evaluated 100 of 1200")


def test_the_display_is_removed_when_training_fails() -> None:
    out = io.StringIO()
    with pytest.raises(KeyError), Progress(20, "t", console=Console(file=out, force_terminal=True)):
        raise KeyError
    assert "\x1b[?25h" in out.getvalue()


def test_remaining_time_counts_only_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("posttrain.runs.metrics.time.monotonic", lambda: now[0])
    with Progress(30, "t", start_step=10, console=Console(file=io.StringIO())) as progress:
        assert progress.time_left() == "estimating"
        now[0] += 60
        progress.update(15, {})
        assert progress.time_left() == "3:00"
        progress.update(30, {})
        assert progress.time_left() == "0:00"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (86399, "23:59:59")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_format_of_a_rate_without_interval_or_value() -> None:
    assert rate({"success": 0.1}, "success") == "10.0%"
    assert rate({"success": 0.1, "success_low": None, "success_high": 1.0}, "success") == "10.0%"
    assert rate({"success": 0.1, "success_low": float("nan"), "success_high": float("nan")}, "success") == "10.0%"
    assert rate({}, "success") == "-"


@pytest.mark.parametrize(
    ("report", "what"),
    [
        (Progress.played, "evaluated"),
        (Progress.sampled, "sampled"),
        (Progress.trained, "trained on"),
        (Progress.updated, "made update"),
    ],
)
def test_a_long_evaluation_or_step_says_how_far_it_is(report, what, monkeypatch) -> None:
    """A line every five seconds in a pipe."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(9, "tossing", console=Console(file=out, width=40)) as progress:
        for done in range(1, 13):
            now[0] += 1
            report(progress, done, 12)
    assert out.getvalue().splitlines()[1:] == [f"{what} 5 of 12", f"{what} 10 of 12"]


def test_if_the_evaluation_is_the_whole_run_its_episodes_move_the_bar():
    out = io.StringIO()
    with Progress(9, "tossing", console=Console(file=out, force_terminal=True, width=80), unit="episode") as progress:
        progress.played(3, 9)
        progress.played(9, 9)
    assert "episode 9/9" in out.getvalue()
    assert "evaluated" not in out.getvalue()
