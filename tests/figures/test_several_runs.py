"""Several runs in one figure for each metric; runs that differ by their seed alone as their mean."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.figures.charts import MOST_CURVES, chart_of_runs
from posttrain.figures.draw import draw_charts, encode
from posttrain.figures.plots import compare, plot_files
from posttrain.runs.directory import RunDirectory
from posttrain.runs.intervals import seed_mean
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.panels import Series, metric_of
from posttrain.runs.sources import Source, bundles_of, mean_over_seeds, open_sources, result_table, shared_metrics
from posttrain.runs.tables import Results, write_results
from tests.runs.comparing import make_run

OTHER = {"learning_rate": 1e-3}


def draw_metric(key, bundles):
    """The picture of a metric."""
    metric = metric_of(key)
    return draw_charts([chart_of_runs(metric, bundles, smooth=True)[0]], metric.panel.title, below=True)


def line_of(axes, label):
    return next(line for line in axes.get_lines() if str(line.get_label()) == label)


def seeds(folder, offsets=(0.0, 1.0, 2.0), name="ppo", **keys):
    return [
        make_run(folder, f"{name}-seed{number}", lambda s, extra=extra: s + extra, seed=number, **keys)
        for number, extra in enumerate(offsets)
    ]


def source(name, *lines, **recipe):
    """A run that exists in memory alone. A line: kind, then its values."""
    lines = [{"step": 1, "kind": kind, **values} for kind, values in lines]
    return Source(name, Path(name), lines, {"stage": "sft", "seed": 0, "i": name, **recipe})


def bundled(*sources):
    return bundles_of(sources)[0]


def test_means_are_of_the_steps_that_every_seed_has():
    runs = [Series([1, 2, 3], [1.0, 2.0, 3.0], []), Series([1, 3], [3.0, 5.0], [2])]
    steps, values, low, high = mean_over_seeds(runs)
    assert (steps, values) == ([1, 3], [2.0, 4.0])
    assert np.isnan(low).all(), "two seeds are too few"
    _, _, low, high = mean_over_seeds(runs * 3)
    assert low[0] < 2.0 < high[0]
    _, values, low, high = mean_over_seeds([Series([1], [1.0], []), Series([1], [100.0], [])] * 3, geometric=True)
    assert values == pytest.approx([10.0])
    assert 0 < low[0] < 10 < high[0]


def test_runs_that_differ_only_by_seed_are_one_curve_with_a_band(tmp_path):
    sources = open_sources([*seeds(tmp_path, range(5)), make_run(tmp_path, "other", optimizer=OTHER)])
    bundles, notes = bundles_of(sources)
    titles = [(bundle.title, len(bundle.sources)) for bundle in bundles]
    assert (titles, notes) == ([("ppo, mean of n = 5 seeds", 5), ("other", 1)], [])
    (axes,) = draw_metric("rollout/return", bundles).axes
    assert list(line_of(axes, "ppo, mean of n = 5 seeds").get_ydata()) == pytest.approx([3, 4, 5, 6])
    assert list(line_of(axes, "other").get_ydata()) == [1, 2, 3, 4]
    (band,) = [one for one in axes.collections if "Fill" in type(one).__name__]  # with one seed there is none
    corners = band.get_paths()[0].vertices
    at_first = corners[corners[:, 0] == 1, 1]
    assert (at_first.min(), at_first.max()) == pytest.approx(seed_mean([1.0, 2.0, 3.0, 4.0, 5.0]).limits[1:])
    assert "95% intervals over seeds" in axes.get_title(loc="left")
    # Metrics on a logarithmic axis have geometric means.
    figure = draw_metric("optimizer/gradient_norm", bundles[:1])
    (axes,) = figure.axes
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([math.exp(s) for s in (1, 2, 3, 4)])
    assert "geometric" in axes.get_title(loc="left")
    assert axes.get_yscale() == "log"
    text = "".join(ElementTree.fromstring(encode(figure, "svg").decode()).itertext())
    assert "mathdefault" not in text, "numbers of a logarithmic axis are still set as powers"


def test_the_same_recipe_and_seed_twice_is_not_a_sample(tmp_path):
    sources = open_sources([make_run(tmp_path / place, "a", seed=1) for place in ("x", "y")])
    bundles, notes = bundles_of(sources)
    assert [bundle.title for bundle in bundles] == ["x/a", "y/a"]
    assert "same recipe and seed" in notes[0]


def test_a_recipe_has_the_common_name_of_its_runs():
    for names, label in {
        ("ppo-seed1", "ppo-seed2"): "ppo",
        ("lr1-s10", "lr1-s11"): "lr1",
        ("lr1", "lr1-b"): "lr1",
        ("7", "8"): "7",
        ("grpo", "grpo-again"): "grpo",
    }.items():
        (bundle,) = bundled(*(source(name, seed=number, i="same") for number, name in enumerate(names)))
        assert bundle.label == label


def test_metrics_of_only_one_run_or_of_different_stages_are_omitted_and_reported(tmp_path):
    first, second = open_sources([make_run(tmp_path, "a", seed=1), make_run(tmp_path, "b", optimizer=OTHER)])
    more = replace(first, lines=first.lines.extended([b'{"step": 1, "kind": "train", "policy/kl": 0.5}']))
    metrics, notes = shared_metrics(bundled(more, second))
    keys = ["success", "score/update", "rollout/return", "optimizer/gradient_norm"]
    assert [metric.key for metric in metrics] == keys
    assert "policy/kl" in notes[0]
    assert "--metric" in notes[0]
    lines = [("train", {"loss/total": 1.0, "policy/entropy": 1.0}), ("evaluation", {"validation/loss": 1.0})]
    lines.append(("final", {"test/loss": 1.0}))
    sft, dpo = (source(stage, *lines, stage=stage) for stage in ("sft", "dpo"))
    metrics, notes = shared_metrics(bundled(sft, dpo))
    assert [metric.key for metric in metrics] == ["policy/entropy"]
    assert "loss/total" in notes[0]
    assert "validation/loss" in notes[0]
    assert "not comparable" in result_table(bundled(sft, dpo)).note
    assert "validation/loss" in [metric.key for metric in shared_metrics(bundled(sft, replace(sft, name="b")))[0]]


def test_returns_of_different_rewards_are_in_different_columns(tmp_path):
    for name, given in (("a", "reward model x"), ("b", "reward model y"), ("c", "reward model x")):
        path = make_run(tmp_path, name, ended=False, optimizer={"learning_rate": 1e-3 * (ord(name) - 96)})
        with MetricsLog(RunDirectory.open(path), []) as log:
            log.write(4, "final", {"policy": "trained", "best_step": 4, "return": 0.5, "n": 64})
        write_results(path, Results(return_source=given))
    a, b, c = open_sources([tmp_path / name for name in "abc"])
    table = result_table(bundled(a, b, c))
    assert table.headings == ("run", "checkpoint", "n", "return, reward model x", "return, reward model y")
    assert [row[3:] for row in table.rows] == [("0.500", "–"), ("–", "0.500"), ("0.500", "–")]
    shown, warnings = shared_metrics(bundled(a, b, c))
    assert not {"return", "rollout/return"} & {metric.key for metric in shown}
    assert any("different rewards" in line for line in warnings)
    assert result_table(bundled(a, c)).headings == ("run", "checkpoint", "n", "return")
    assert "rollout/return" in {metric.key for metric in shared_metrics(bundled(a, c))[0]}


def test_the_command_writes_a_figure_for_each_metric_and_the_tables(tmp_path):
    paths = [*seeds(tmp_path), make_run(tmp_path, "other", optimizer=OTHER)]
    files, notes = plot_files(paths, tmp_path / "out", ("png", "svg"))
    names = {path.name for path in files}
    expected = {"success", "score_update", "rollout_return", "optimizer_gradient_norm"}
    assert names == {f"{name}.{form}" for name in expected for form in ("png", "svg")} | {"results.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert notes == []
    assert "<text" in (tmp_path / "out" / "success.svg").read_text()
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| ppo-seed1 | 4 | 200 | 50.0% [40.0, 60.0] |" in text
    assert "| ppo, mean of 3 seeds | – | – | 50.0% |" in text
    assert "| other | 0 | 0.000 [-0.100, 0.100] | 0.000 [-0.100, 0.100] | – |" in text
    again, _ = plot_files(paths, tmp_path / "again", ("svg",), ["success"])
    assert [path.name for path in again] == ["success.svg"]
    assert again[0].read_bytes() == (tmp_path / "out" / "success.svg").read_bytes(), "the same figure is the same file"


def test_an_unknown_metric_names_the_nearest_one(tmp_path):
    path = make_run(tmp_path, "a")
    for metric, message in (("rollout/retur", ".* rollout/return"), ("best_step", "is only measured at the end")):
        with pytest.raises(InputError, match=f"--metric {metric}:? ?{message}"):
            plot_files([path], None, ("svg",), [metric])
    files, _ = plot_files([path], None, ("svg",), ["rollout/return"])
    assert files == [path / "plots" / "rollout_return.svg"]


def test_unfinished_runs_are_reported(tmp_path):
    paths = seeds(tmp_path, offsets=(0.0, 1.0))
    paths += [make_run(tmp_path, "ppo-seed9", steps=2, ended=False, seed=9)]
    empty = make_run(tmp_path, "empty", optimizer=OTHER)
    (empty / "metrics.jsonl").unlink()
    torn = make_run(tmp_path, "torn", optimizer={"learning_rate": 1.0})
    (torn / "metrics.jsonl").write_bytes((torn / "metrics.jsonl").read_bytes()[:-20])
    compared = compare(open_sources([*paths, empty, torn]))
    notes = "\n".join(compared.warnings)
    assert f"{empty} has no metrics yet and is left out" in notes
    assert "ppo-seed9 has done 2 of 4 steps" in notes
    assert "torn has done 4 of 4 steps" in notes, "the line of its result is incomplete"
    assert "ppo-seed0 4, ppo-seed1 4, ppo-seed9 2" in notes
    figure = dict(compared.figures)["rollout_return"]
    assert list(figure.axes[0].get_lines()[0].get_xdata()) == [1, 2]
    with pytest.raises(InputError, match="nothing to plot yet"):
        compare(open_sources([empty]))


def test_no_common_items_and_ambiguous_items_are_errors(tmp_path):
    kl, entropy = ("train", {"policy/kl": 1.0}), ("train", {"policy/entropy": 1.0})
    assert compare([source("a", kl), source("b", entropy)]).figures == []
    with pytest.raises(InputError, match=f"at most {MOST_CURVES}"):
        compare([source(str(i), kl) for i in range(MOST_CURVES + 1)])
    path = make_run(tmp_path, "a")
    with pytest.raises(InputError, match="given twice"):
        open_sources([path, path / ".." / "a"])
    with pytest.raises(InputError, match="is a file"):
        plot_files([path], path / "metrics.jsonl")


def test_names_are_drawn_without_markup():
    lines = [("train", {"policy/kl": 1.0}), ("final", {"success": 0.5})]
    figures = dict(compare([source(name, *lines) for name in ("cost $\\frac$", "a\x1bb", "x" * 200)]).figures)
    text = "".join(ElementTree.fromstring(encode(figures["policy_kl"], "svg").decode()).itertext())
    for expected in ("cost $\\frac$", r"a\x1bb", "x" * 39):
        assert expected in text
    assert "x" * 120 not in text


def test_rows_that_selected_the_checkpoint_are_not_reported_as_test_rows():
    def made(name, final, **data):
        return source(name, ("final", final), data=data)

    rows, played = {"test/loss": 1.0, "test/rows": 5}, {"success": 0.5, "n": 9}
    fresh = made("fresh", rows, test=[{"path": "t.jsonl"}])
    again = made("again", rows, held_out=5, test=[])
    both = made("both", rows | played, held_out=5)
    for sources, included, excluded in (
        ([fresh], "Final held-out data, which selected nothing.", "validation rows"),
        ([made("seeds", played)], "Final held-out data, which selected nothing.", "validation rows"),
        ([again], "The rows of again are validation rows, which also selected the checkpoint", "selected nothing"),
        ([fresh, again, both], "The rows of again, both are validation rows", "which selected nothing"),
        ([fresh, again, both], "all other data selected nothing", "which selected nothing"),
        ([both], "all other data selected nothing", "which selected nothing"),
        ([made(f"r{i}", rows) for i in range(7)], "The rows of r0, r1, r2, r3 and 3 more are", "r4"),
    ):
        note = result_table(bundled(*sources)).note
        assert included in note
        assert excluded not in note


def test_models_that_were_only_evaluated_are_compared_by_their_results():
    def evaluated(name, success):
        line = {"success": success, "success_low": 0.1, "success_high": 0.9, "score/a": 0.5, "n": 7}
        return source(name, ("final", line), stage="evaluate", model=name)

    compared = compare([evaluated("step 13", 0.25), evaluated("step 21", 0.5)])
    assert compared.figures == []
    (table,) = compared.tables
    assert table.headings == ("run", "checkpoint", "n", "success", "a")
    assert table.rows[1] == ("step 21", "–", "7", "50.0% [10.0, 90.0]", "0.500")


def test_a_run_that_cannot_be_read_is_left_out_with_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posttrain.view.report.encode", lambda figure, form: b"<svg/>")
    good, bad = make_run(tmp_path, "a"), make_run(tmp_path, "bad")
    (bad / "metrics.jsonl").write_text("not a line\n" * 2)
    for command in (["plot", "--metric", "success"], ["report", "nowhere"]):
        assert main([*command, str(good), str(bad)]) == 0
        errors = capsys.readouterr().err
        assert "left out: " in errors
        assert "bad/metrics.jsonl" in errors
    assert main(["report", str(bad)]) == 1
