import json
import math

import numpy as np
import pytest
from matplotlib.image import imread

from posttrain.cli.main import main
from posttrain.figures import plots
from posttrain.figures.charts import charts_of, smoothed, thinned
from posttrain.runs import panels
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import read_log
from posttrain.runs.metrics import MetricsLog, read_metrics
from posttrain.runs.panels import TITLES, Sampling, limits_of
from posttrain.view import run_pages
from tests.runs.comparing import make_run


def train(step, **changed):
    values = {"rollout/success": 0.5, "rollout/return": 0.25 * step, "reward/group_spread": 0.1}
    values |= {"policy/kl": 0.01 * step, "policy/entropy": 1.0, "rollout/tokens_per_answer": 12.0}
    values |= {"critic/explained_variance": 0.1 * step, "units/per_answer": 4.0 + 0.1 * step}
    values |= {"units/spread": 0.5 - 0.01 * step, "units/negative": 0.3, "units/residual": 1e-7}
    values |= {"optimizer/gradient_norm": 10.0**step, "time/rollout": 2.0, "time/update": 1.0, "time/step": 4.0}
    return {**values, **changed}


def evaluation(success):
    return {"success": success, "success_low": success - 0.1, "success_high": success + 0.1, "n": 64, "turns": 2.0}


def comparing(step):
    """A training line of a preference stage."""
    rewards = {"preference/chosen": 0.1 * step, "preference/rejected": -0.1 * step, "preference/margin": 0.2 * step}
    logprobs = {"policy/chosen_logprob": -1.0, "policy/rejected_logprob": -1.2}
    return {"loss/preference": 0.7 - 0.01 * step, "preference/accuracy": 0.6, **rewards, **logprobs}


def ranked(loss, accuracy):
    """An evaluation line of a preference stage, with two domains."""
    values = {}
    for suffix in ("", "/law", "/medicine"):
        for name, value, half in (("loss", loss, 0.05), ("accuracy", accuracy, 0.1)):
            for part, number in (("", value), ("_low", value - half), ("_high", value + half)):
                values[f"validation/{name}{part}{suffix}"] = number
        values[f"validation/rows{suffix}"] = 20
    return values


def logged(run, *lines):
    with MetricsLog(run, []) as log:
        for line in lines:
            log.write(*line)
    return read_metrics(run.metrics)


def each(steps, kind, make):
    return [(step, kind, make(step)) for step in steps]


def draw_figure(name, lines):
    return dict(plots.figures("run", lines)).get(name)


def lines_of(figure, axes=0):
    return {str(line.get_label()): line for line in figure.axes[axes].lines}


def whiskers(axes):
    """(step, low, high) of the intervals that are bars at their points, without those of results."""
    bars = [one[2][0].get_segments()[0] for one in axes.containers if str(one.get_label()).startswith("_")]
    return [(bar[0][0], *sorted(bar[:, 1])) for bar in bars]


def test_every_plot_is_a_png_of_something_and_those_without_data_are_left_out(run):
    assert plots.draw_plots(run) == []
    logged(run, (1, "train", {"policy/entropy": 1.0}), (1, "warning", {"message": "x"}))
    assert [path.name for path in plots.draw_plots(run)] == ["entropy.png"]
    logged(
        run,
        *each(range(1, 6), "train", lambda step: train(step) | comparing(step)),
        *each((0, 3, 5), "evaluation", lambda step: evaluation(0.5) | ranked(0.6, 0.7) | {"score/update": 0.4}),
        *each((0, 3, 5), "audit", lambda step: {"audit/reward_gain": 0.2 * step, "audit/score_gain": 0.0}),
    )
    drawn = plots.draw_plots(run)
    assert [path.name for path in drawn] == [f"{name}.png" for name in TITLES]
    for path in drawn:
        image = imread(path)
        assert image.shape[1] >= 1000
        assert np.ptp(image[..., :3], axis=-1).max() > 0.3  # Something in it is coloured.
    assert sorted(run.plots.iterdir()) == sorted(drawn)


def test_held_out_rows_have_a_band_and_domains_their_interval_at_the_end(run):
    lines = logged(
        run,
        *each(range(1, 6), "train", comparing),
        *each((0, 3, 5), "evaluation", lambda step: ranked(0.7 - 0.02 * step, 0.5 + 0.05 * step)),
    )
    figure = draw_figure("rows", lines)
    assert {"training rows", "validation rows"} <= set(lines_of(figure, 0))
    np.testing.assert_allclose(lines_of(figure, 0)["validation rows"].get_ydata(), [0.7, 0.64, 0.6])
    assert [len(whiskers(axes)) for axes in figure.axes] == [3, 3]
    domains = draw_figure("domains", lines)
    for place, (axes, value, half) in enumerate(zip(domains.axes, (0.6, 0.75), (0.05, 0.1), strict=True)):
        assert set(lines_of(domains, place)) >= {"law", "medicine"}
        bars = [container[2][0].get_segments()[0] for container in axes.containers]
        assert len({float(bar[0][0]) for bar in bars}) == 2  # law and medicine, side by side
        for bar in bars:
            assert bar[0][0] > 5
            assert sorted(bar[:, 1]) == pytest.approx([value - half, value + half])
    assert draw_figure("learning_curve", lines) is None
    for domain in ("law", "law/tax"):
        parts = (("", 0.5), ("_low", 0.4), ("_high", 0.6))
        line = {f"validation/loss{part}/{domain}": value for part, value in parts}
        limits = limits_of([line | {"step": 4, "kind": "evaluation"}], f"validation/loss/{domain}")
        assert limits == [(4, 0.4, 0.5, 0.6)]


def test_an_environment_without_success_has_a_curve_of_returns(run):
    paid = {"return_low": -1.5, "return_high": 0.5, "n": 8}
    figure = draw_figure(
        "learning_curve",
        logged(
            run,
            (0, "baseline", {"policy": "start of this run", "return": -1.0, "n": 8}),
            *each((1, 2), "train", lambda step: {"rollout/return": -0.9 + 0.1 * step}),
            *each((0, 2), "evaluation", lambda step: {"return": -0.5, **paid}),
            (2, "final", {"policy": "trained", "best_step": 2, "return": -0.25, **paid}),
        ),
    )
    (axes,) = figure.axes
    assert axes.get_ylabel() == "reward per episode"
    assert {"training episodes, sampled", "held-out seeds"} <= set(lines_of(figure))
    marked = {container.get_label() for container in axes.containers}
    assert {"result on the final seeds, -0.250", "start of this run on the final seeds, -1.000"} <= marked
    assert whiskers(axes) == [(0, -1.5, 0.5), (2, -1.5, 0.5)]
    drawn = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert drawn["held-out seeds"] == "None"  # two evaluations are points
    assert drawn["training episodes, sampled"] != "None"
    assert axes.get_ylim()[0] <= -1.5
    assert axes.get_ylim()[1] >= 0.5


def test_nan_is_marked_and_nothing_but_nan_can_be_drawn(run):
    bad = (1, "train", dict.fromkeys(train(1), math.nan))
    lines = logged(run, bad, (1, "evaluation", evaluation(0.1)), (0, "evaluation", {"success": math.nan, "n": 0}))
    assert {name for name, _ in plots.figures("run", lines)} >= {"learning_curve", "optimization", "kl"}
    changed = {3: {"policy/kl": math.nan}}
    drawn = lines_of(
        draw_figure("kl", logged(run, *each((2, 3, 4), "train", lambda s: train(s, **changed.get(s, {}))))[1:])
    )
    assert list(drawn["Kullback-Leibler divergence"].get_xdata()) == [2, 4]
    assert list(drawn["NaN or infinite"].get_xdata()) == [3]


def test_the_learning_curve_shows_band_and_baseline_policies(run):
    players = (("random", 0.2), ("optimal", 0.95), ("start of this run", 0.25))
    baselines = [(0, "baseline", {"policy": name, "success": rate, "return": rate, "n": 64}) for name, rate in players]
    points = each((0, 10, 20), "evaluation", lambda step: evaluation(0.3 + step / 100))
    final = {"policy": "trained", "best_step": 10, "success": 0.6, "success_low": 0.5, "success_high": 0.7}
    figure = draw_figure("learning_curve", logged(run, *baselines, *points, (20, "final", final)))
    (axes,) = figure.axes
    drawn = lines_of(figure)
    assert list(drawn["held-out seeds"].get_xdata()) == [0, 10, 20]
    assert list(drawn["held-out seeds"].get_ydata()) == pytest.approx([0.3, 0.4, 0.5])
    assert list(drawn["optimal policy, 95.0%"].get_ydata()) == [0.95, 0.95]
    assert drawn["random policy, 20.0%"].get_linestyle() == "--"
    # The start was measured on other tasks than the curve: a mark, and no line against it.
    assert not [label for label in drawn if label.startswith("start of this run") and "final" not in label]
    marks = {c.get_label(): (c[0].get_xdata()[0], c[0].get_ydata()[0]) for c in axes.containers if c[0] is not None}
    assert marks["start of this run on the final seeds, 25.0%"] == (0, 0.25)
    assert marks["result on the final seeds, 60.0%"] == (10, 0.6)
    expected = [(step, 0.2 + step / 100, 0.4 + step / 100) for step in (0, 10, 20)]
    assert np.array(whiskers(axes)) == pytest.approx(np.array(expected))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "success")


def test_the_command_prints_the_files_it_drew(run, tmp_path, capsys):
    assert main(["plot", str(run.path)]) == 2
    assert "nothing to plot yet" in capsys.readouterr().err
    logged(run, (1, "train", {"policy/entropy": 1.0}))
    assert main(["plot", str(run.path)]) == 0
    assert capsys.readouterr().out.split() == [str(run.plots / "entropy.png")]
    assert main(["plot", str(run.path), "--out", str(tmp_path / "elsewhere"), "--format", "svg"]) == 0
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["entropy.svg"]
    assert main(["plot", str(tmp_path / "nowhere")]) == 2
    assert "no run" in capsys.readouterr().err


def test_long_curves_are_drawn_with_few_points_and_all_extremes(run):
    steps = np.arange(100_000)
    values = np.sin(steps / 500)
    values[31_234], values[77_777] = 40.0, -30.0
    kept = thinned(values)
    assert len(kept) <= panels.MOST_POINTS + 2
    assert {0, 31_234, 77_777, 99_999} <= set(kept.tolist())
    with run.metrics.open("w") as file:
        for step in range(1, 20_001):
            line = {"step": step, "kind": "train", "time/run": 1.0, "rollout/return": step % 7, "policy/entropy": 0.5}
            file.write(json.dumps(line) + "\n")
    drawn = dict(plots.figures("long", read_log(run.metrics)))
    curves = [curve for figure in drawn.values() for axes in figure.axes for curve in axes.get_lines()]
    assert max(len(curve.get_xdata()) for curve in curves) <= panels.MOST_POINTS + 2
    returns = np.asarray(drawn["learning_curve"].axes[0].get_lines()[0].get_ydata())
    assert (returns.min(), returns.max()) == (0, 6)


@pytest.mark.parametrize("count", [0, 4, 5, 11, 40])
def test_the_moving_mean_is_centered_and_shrinks_at_the_ends(count):
    values = [float(i * i % 13) for i in range(count)]
    reach = [min(i, count - 1 - i, 5) for i in range(count)]
    expected = [sum(values[i - r : i + r + 1]) / (2 * r + 1) for i, r in enumerate(reach) if r >= 2]
    assert smoothed(values) == pytest.approx(expected)


def test_a_run_that_never_succeeds_has_a_learning_curve(run):
    figure = draw_figure("learning_curve", logged(run, *each((0, 3), "evaluation", lambda step: evaluation(0.0))))
    assert max(line.get_ydata().max() for line in lines_of(figure).values() if len(line.get_xdata()) == 2) == 0.0


def test_training_and_held_out_episodes_say_how_they_are_sampled(tmp_path):
    evaluation = {"sampling": {"temperature": 0.6}}
    run = RunDirectory.open(make_run(tmp_path, "run", evaluation=evaluation))
    charts = {chart.panel.title: chart for chart in charts_of(read_log(run.metrics), Sampling.of(run.recipe_values()))}
    labels = [trace.label for trace in charts["Success"].traces] + [trace.label for trace in charts["Return"].traces]
    assert sorted(labels) == ["held-out seeds, temperature 0.6", "training episodes, temperature 1"]
    page = run_pages.charts(run_pages.Logs(), run.path)["charts"]
    assert set(labels) <= {curve["label"] for chart in page for curve in chart["curves"]}
    assert Sampling.of({"rollout": {"sampling": {"temperature": 1}}, "evaluation": {}}) == Sampling("temperature 1")
    assert Sampling.of({"evaluation": {"sampling": {"temperature": 0}}}) == Sampling(held_out="greedy")
    assert Sampling.of({"rollout": [], "evaluation": {"sampling": {"temperature": 10**400}}}) == Sampling()
