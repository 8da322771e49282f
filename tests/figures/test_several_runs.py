"""Several runs in one figure for each metric; runs that differ by their seed alone as their mean."""

import math
from collections.abc import Sequence
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
from posttrain.runs.tables import write_results
from tests.runs.comparing import make_run


def draw_metric(metric, bundles):
    """The picture of a metric, and warnings."""
    chart, warnings = chart_of_runs(metric, bundles, smooth=True)
    return draw_charts([chart], metric.panel.title, below=True), warnings


def line_of(axes, label):
    return next(line for line in axes.get_lines() if str(line.get_label()) == label)


def seeds(folder: Path, offsets: Sequence[float] = (0.0, 1.0, 2.0), name: str = "ppo", **keys) -> list[Path]:
    return [
        make_run(folder, f"{name}-seed{number}", lambda s, extra=extra: s + extra, seed=number, **keys)
        for number, extra in enumerate(offsets)
    ]


def test_means_are_of_the_steps_that_every_seed_has():
    runs = [Series([1, 2, 3], [1.0, 2.0, 3.0], []), Series([1, 3], [3.0, 5.0], [2])]
    averaged = mean_over_seeds(runs)
    assert (averaged.steps, averaged.values) == ([1, 3], [2.0, 4.0])
    assert np.isnan(averaged.low).all(), "two seeds are too few"
    averaged = mean_over_seeds(runs * 3)
    assert averaged.low[0] < 2.0 < averaged.high[0]
    geometric = mean_over_seeds([Series([1], [1.0], []), Series([1], [100.0], [])] * 3, geometric=True)
    assert geometric.values == pytest.approx([10.0])
    assert 0 < geometric.low[0] < 10 < geometric.high[0]


def test_runs_that_differ_only_by_seed_are_one_curve_with_a_band(tmp_path):
    sources = open_sources([*seeds(tmp_path, range(5)), make_run(tmp_path, "other", optimizer={"learning_rate": 1e-3})])
    bundles, notes = bundles_of(sources)
    assert [(bundle.title, len(bundle.sources)) for bundle in bundles] == [
        ("ppo, mean of n = 5 seeds", 5),
        ("other", 1),
    ]
    assert notes == []
    figure, notes = draw_metric(metric_of("rollout/return"), bundles)
    (axes,) = figure.axes
    assert list(line_of(axes, "ppo, mean of n = 5 seeds").get_ydata()) == pytest.approx([3, 4, 5, 6])
    assert list(line_of(axes, "other").get_ydata()) == [1, 2, 3, 4]
    (band,) = [one for one in axes.collections if "Fill" in type(one).__name__]  # with one seed there is none
    _, low, high = seed_mean([1.0, 2.0, 3.0, 4.0, 5.0]).limits
    corners = band.get_paths()[0].vertices
    at_first = corners[corners[:, 0] == 1, 1]
    assert (at_first.min(), at_first.max()) == pytest.approx((low, high))
    assert "95% intervals over seeds" in axes.get_title(loc="left")


def test_the_same_recipe_and_seed_twice_is_not_a_sample(tmp_path):
    sources = open_sources([make_run(tmp_path / place, "a", seed=1) for place in ("x", "y")])
    bundles, notes = bundles_of(sources)
    assert [bundle.title for bundle in bundles] == ["x/a", "y/a"]
    assert "same recipe and seed" in notes[0]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("ppo-seed1", "ppo-seed2"), "ppo"),
        (("lr1-s10", "lr1-s11"), "lr1"),
        (("lr1", "lr1-b"), "lr1"),
        (("7", "8"), "7"),
        (("grpo", "grpo-again"), "grpo"),
    ],
)
def test_a_recipe_has_the_common_name_of_its_runs(names, label):
    sources = [
        Source(name, Path(name), [], {"stage": "rl", "seed": number, "name": name}) for number, name in enumerate(names)
    ]
    (bundle,), _ = bundles_of(sources)
    assert bundle.label == label


def test_metrics_on_a_logarithmic_axis_have_geometric_means(tmp_path):
    bundles, _ = bundles_of(open_sources(seeds(tmp_path)))
    figure, _ = draw_metric(metric_of("optimizer/gradient_norm"), bundles)
    (axes,) = figure.axes
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([math.exp(s) for s in (1, 2, 3, 4)])
    assert "geometric" in axes.get_title(loc="left")
    assert axes.get_yscale() == "log"


def test_metrics_of_only_one_run_are_omitted_and_reported(tmp_path):
    sources = open_sources([make_run(tmp_path, "a", seed=1), make_run(tmp_path, "b", optimizer={"learning_rate": 1.0})])
    more = sources[0].lines.extended([b'{"step": 1, "kind": "train", "policy/kl": 0.5}'])
    more = [replace(sources[0], lines=more), sources[1]]
    metrics, notes = shared_metrics(bundles_of(more)[0])
    assert [metric.key for metric in metrics] == [
        "success",
        "score/update",
        "rollout/return",
        "optimizer/gradient_norm",
    ]
    assert "policy/kl" in notes[0]
    assert "--metric" in notes[0]


def test_stages_do_not_share_the_axes_of_their_losses():
    def source(stage):
        lines = [{"step": 1, "kind": "train", "loss/total": 1.0, "policy/entropy": 1.0}]
        lines += [{"step": 1, "kind": "evaluation", "validation/loss": 1.0}]
        lines += [{"step": 1, "kind": "final", "test/loss": 1.0}]
        return Source(stage, Path(stage), lines, {"stage": stage, "seed": 0})

    metrics, notes = shared_metrics(bundles_of([source("sft"), source("dpo")])[0])
    assert [metric.key for metric in metrics] == ["policy/entropy"]
    assert "loss/total" in notes[0]
    assert "validation/loss" in notes[0]
    assert "not comparable" in result_table(bundles_of([source("sft"), source("dpo")])[0]).note
    same, _ = shared_metrics(bundles_of([source("sft"), source("sft")])[0])
    assert "validation/loss" in [metric.key for metric in same]


def test_returns_of_different_rewards_are_in_different_columns(tmp_path):
    for name, given in (("a", "reward model x"), ("b", "reward model y"), ("c", "reward model x")):
        path = make_run(tmp_path, name, ended=False, optimizer={"learning_rate": 1e-3 * (ord(name) - 96)})
        with MetricsLog(RunDirectory.open(path), []) as log:
            log.write(4, "final", {"policy": "trained", "best_step": 4, "return": 0.5, "n": 64})
        write_results(path, [], [], return_source=given)
    bundles = bundles_of(open_sources([tmp_path / name for name in "abc"]))[0]
    table = result_table(bundles)
    assert table.headings == ("run", "checkpoint", "n", "return, reward model x", "return, reward model y")
    assert [row[3:] for row in table.rows] == [("0.500", "–"), ("–", "0.500"), ("0.500", "–")]
    shown, warnings = shared_metrics(bundles)
    assert not {"return", "rollout/return"} & {metric.key for metric in shown}
    assert any("different rewards" in line for line in warnings)
    same = bundles_of(open_sources([tmp_path / name for name in "ac"]))[0]
    assert result_table(same).headings == ("run", "checkpoint", "n", "return")
    assert "rollout/return" in {metric.key for metric in shared_metrics(same)[0]}


def test_the_command_writes_a_figure_for_each_metric_and_the_tables(tmp_path):
    paths = [*seeds(tmp_path), make_run(tmp_path, "other", optimizer={"learning_rate": 1e-3})]
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
    with pytest.raises(InputError, match=r"--metric rollout/retur: .* rollout/return"):
        plot_files([path], None, ("svg",), ["rollout/retur"])
    with pytest.raises(InputError, match="only measured at the end"):
        plot_files([path], None, ("svg",), ["best_step"])
    files, _ = plot_files([path], None, ("svg",), ["rollout/return"])
    assert files == [path / "plots" / "rollout_return.svg"]


def test_unfinished_runs_are_reported(tmp_path):
    paths = seeds(tmp_path, offsets=(0.0, 1.0))
    paths += [make_run(tmp_path, "ppo-seed9", steps=2, ended=False, seed=9)]
    empty = make_run(tmp_path, "empty", optimizer={"learning_rate": 1.0})
    (empty / "metrics.jsonl").unlink()
    compared = compare(open_sources([*paths, empty]))
    told = "\n".join(compared.warnings)
    assert f"{empty} has no metrics yet and is left out" in told
    assert "ppo-seed9 has done 2 of 4 steps" in told
    assert "ppo-seed0 4, ppo-seed1 4, ppo-seed9 2" in told
    figure = dict(compared.figures)["rollout_return"]
    assert list(figure.axes[0].get_lines()[0].get_xdata()) == [1, 2]
    with pytest.raises(InputError, match="nothing to plot yet"):
        compare(open_sources([empty]))


def test_a_truncated_line_is_skipped(tmp_path):
    path = make_run(tmp_path, "a")
    metrics = path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    (source,) = open_sources([path])
    assert "final" not in {line["kind"] for line in source.lines}
    assert compare([source]).figures


def test_no_common_items_and_ambiguous_items_are_errors(tmp_path):
    def source(i, key):
        return Source(
            f"r{i}", Path(f"r{i}"), [{"step": 1, "kind": "train", key: 1.0}], {"stage": "sft", "seed": 0, "i": i}
        )

    assert compare([source(0, "policy/kl"), source(1, "policy/entropy")]).figures == []
    with pytest.raises(InputError, match=f"at most {MOST_CURVES}"):
        compare([source(i, "policy/kl") for i in range(MOST_CURVES + 1)])
    path = make_run(tmp_path, "a")
    with pytest.raises(InputError, match="given twice"):
        open_sources([path, path / ".." / "a"])
    with pytest.raises(InputError, match="is a file"):
        plot_files([path], path / "metrics.jsonl")


def test_names_are_drawn_without_markup(tmp_path):
    names = ["cost $\\frac$", "a\x1bb", "x" * 200]
    sources = [
        Source(name, Path("x"), [{"step": 1, "kind": "train", "policy/kl": 1.0}, final], {"stage": "rl", "i": name})
        for name in names
        for final in [{"step": 1, "kind": "final", "success": 0.5}]
    ]
    figures = dict(compare(sources).figures)
    svg = encode(figures["policy_kl"], "svg").decode()
    drawn = "".join(ElementTree.fromstring(svg).itertext())
    assert "cost $\\frac$" in drawn
    assert r"a\x1bb" in drawn
    assert "x" * 39 in drawn
    assert "x" * 120 not in drawn
    figure, _ = draw_metric(metric_of("optimizer/gradient_norm"), bundles_of(open_sources(seeds(tmp_path)))[0])
    drawn = "".join(ElementTree.fromstring(encode(figure, "svg").decode()).itertext())
    assert "mathdefault" not in drawn, "numbers of a logarithmic axis are still set as powers"


def test_rows_that_selected_the_checkpoint_are_not_reported_as_test_rows():
    def source(name, final, **data):
        return Source(
            name, Path(name), [{"step": 1, "kind": "final", **final}], {"stage": "sft", "x": name, "data": data}
        )

    def note(*sources):
        return result_table(bundles_of(sources)[0]).note

    rows, played = {"test/loss": 1.0, "test/rows": 5}, {"success": 0.5, "n": 9}
    fresh = source("fresh", rows, test=[{"path": "t.jsonl"}])
    again = source("again", rows, held_out=5, test=[])
    both = source("both", rows | played, held_out=5)
    untouched = "Final held-out data, which selected nothing."
    assert note(fresh).startswith(untouched)
    assert note(source("seeds", played)).startswith(untouched)
    assert "The rows of again are validation rows, which also selected the checkpoint" in note(again)
    assert "selected nothing" not in note(again)
    mixed = note(fresh, again, both)
    assert "The rows of again, both are validation rows" in mixed
    assert "all other data selected nothing" in mixed
    assert "all other data selected nothing" in note(both)
    many = note(*(source(f"r{i}", rows) for i in range(7)))
    assert "The rows of r0, r1, r2, r3 and 3 more are" in many


def test_models_that_were_only_evaluated_are_compared_by_their_results(tmp_path):
    def source(name, success):
        line = {"step": 0, "kind": "final", "success": success, "success_low": 0.1, "success_high": 0.9, "score/a": 0.5}
        return Source(name, Path(name), [line | {"n": 7}], {"stage": "evaluate", "seed": 0, "model": name})

    compared = compare([source("step 13", 0.25), source("step 21", 0.5)])
    assert compared.figures == []
    (table,) = compared.tables
    assert table.headings == ("run", "checkpoint", "n", "success", "a")
    assert table.rows[1] == ("step 21", "–", "7", "50.0% [10.0, 90.0]", "0.500")


def test_a_run_that_cannot_be_read_is_left_out_with_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, bad = make_run(tmp_path, "a"), make_run(tmp_path, "bad")
    (bad / "metrics.jsonl").write_text("not a line\n" * 2)
    for command in (["plot", str(good), str(bad), "--format", "svg"], ["report", str(good), str(bad), "nowhere"]):
        assert main(command) == 0
        said = capsys.readouterr().err
        assert "left out: " in said
        assert "bad/metrics.jsonl" in said
    assert main(["report", str(bad)]) == 1
