"""TensorBoard's event files as input of plots."""

import math

import pytest

from posttrain.errors import InputError
from posttrain.figures.plots import compare
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, read_metrics
from posttrain.runs.panels import keys_of, series_of
from posttrain.runs.sources import event_directories, open_sources, read_events
from tests.runs.comparing import make_run


def foreign(directory, values, tag="eval/loss"):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory)) as writer:
        for step, value in values:
            writer.add_scalar(tag, value, step)
    return directory


def test_our_own_tags_are_our_metrics_and_a_resumed_run_has_each_step_once(tmp_path):
    run = RunDirectory(make_run(tmp_path, "own", steps=-1, ended=False))
    with MetricsLog(run, ["tensorboard"]) as log:
        log.write(0, "baseline", {"policy": "random", "success": 0.25})
        log.write(0, "evaluation", {"success": 0.5, "score/update": 0.125, "n": 8})
        for step in (1, 2, 3):
            log.write(step, "train", {"rollout/return": step / 4, "policy/kl": 0.5})
    lines, stored = read_events(run.logs / "tensorboard"), read_metrics(run.metrics)
    for key in ("rollout/return", "policy/kl", "success", "score/update"):
        assert series_of(lines, key) == series_of(stored, key) is not None
    assert {line["kind"] for line in lines} == {"evaluation"}, "which player a baseline is, is not in the file"
    with MetricsLog(run, ["tensorboard"]) as log:
        log.truncate_after(1)
        log.write(2, "train", {"rollout/return": 9.0})
    series = series_of(read_events(run.logs / "tensorboard"), "rollout/return")
    assert dict(zip(series.steps, series.values, strict=True))[2] == 9.0
    assert series.steps == sorted(set(series.steps))


def test_other_tags_keep_their_names_and_a_truncated_file_gives_its_whole_rows(tmp_path):
    lines = read_events(foreign(tmp_path / "a", [(5, 1.0), (10, math.nan), (20, 0.5)]))
    assert keys_of(lines) == ["eval/loss"]
    series = series_of(lines, "eval/loss")
    assert (series.steps, series.values, series.nonfinite) == ([5, 20], [1.0, 0.5], [10])
    file = next(foreign(tmp_path / "b", [(step, 1.0) for step in range(50)]).iterdir())
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 + 3])
    assert 0 < len(series_of(read_events(file), "eval/loss").steps) < 50


def test_a_directory_of_logs_is_one_run_per_log_beside_other_runs(tmp_path):
    for name in ("a", "b"):
        foreign(tmp_path / "logs" / name, [(1, 0.5), (2, 0.25)], "rollout/return")
    assert [path.name for path in event_directories(tmp_path / "logs")] == ["a", "b"]
    sources = open_sources([tmp_path / "logs", make_run(tmp_path, "ours")])
    assert [(source.name, source.stage) for source in sources] == [("a", None), ("b", None), ("ours", "rl")]
    figures = dict(compare(sources).figures)
    labels = [text.get_text() for text in figures["rollout_return"].legends[0].get_texts()]
    assert labels == ["a", "b", "ours"]


def test_a_path_without_events_is_reported(tmp_path):
    for name, content in (("events.out.tfevents.1", b"garbage" * 50), ("notes.txt", b"hello"), ("empty.tfevents", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="has no scalars"):
            open_sources([tmp_path / name])
    (tmp_path / "nothing").mkdir()
    for name, message in (("nowhere", "there is no run at"), ("nothing", "is not a posttrain run")):
        with pytest.raises(InputError, match=message):
            open_sources([tmp_path / name])
