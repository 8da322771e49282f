"""Scores by checkpoint: the table of a report and its figure."""

import itertools
import json
import math

import pytest

from posttrain.figures.plots import compare, draw_evaluated, figures, plot_files
from posttrain.figures.results import draw_scores
from posttrain.runs.evaluated import checkpoint_at, evaluated_checkpoints
from posttrain.runs.log import Log
from posttrain.runs.panels import Sampling
from posttrain.runs.sources import Source, bundles_of, result_table
from posttrain.runs.tables import checkpoint_scores, evaluated_table, score_table
from tests.runs.comparing import make_run


def line(step, success, **scores):
    values = {"kind": "evaluation", "step": step, "n": 50, "success": success}
    values |= {"success_low": success - 0.1, "success_high": success + 0.1}
    for name, value in scores.items():
        high = min(1.0, value + 0.2) if value <= 1 else value + 0.2
        values |= {f"score/{name}": value, f"score/{name}_low": max(0.0, value - 0.2), f"score/{name}_high": high}
    return values


def train(step, paid):
    return {"kind": "train", "step": step, "rollout/return": paid}


TRAINED = [train(step, step / 10) for step in range(1, 5)]
FIRST, *LATER = [
    line(0, 0.2, retrieval=0.5, update=0.1),
    line(2, 0.4, retrieval=0.6, update=0.3),
    line(4, 0.3, retrieval=0.7),
]
LINES = [FIRST, *TRAINED, *LATER]


def test_the_table_has_a_row_for_each_evaluation_and_the_training_since_the_one_before():
    found = checkpoint_scores(LINES)
    assert [one.step for one in found] == [0, 2, 4]
    assert [one.training for one in found] == [None, pytest.approx(0.15), pytest.approx(0.35)]
    assert found[1].scores == {"retrieval": pytest.approx((0.6, 0.4, 0.8)), "update": pytest.approx((0.3, 0.1, 0.5))}
    table = score_table(LINES)
    assert table.headings == ("step", "retrieval", "update", "overall success", "training return")
    assert table.rows[0] == ("0", "0.500 [0.300, 0.700]", "0.100 [0.000, 0.300]", "0.200 [0.100, 0.300]", "–")
    assert table.rows[2][2] == "–"
    assert "n = 50" in table.note


def test_too_few_evaluations_or_scores_give_no_table_or_figure():
    assert score_table(LINES[:3]) is None
    assert draw_scores(LINES[:3], "step") is None
    assert checkpoint_scores([train(1, 0.5)]) == []
    # Two evaluations, of which one is before training.
    assert draw_scores(LINES[:6], "step") is not None
    assert draw_scores(LINES[:6], "training") is None
    returns = [{"kind": "evaluation", "step": step, "return": float(step)} for step in (0, 1)]
    assert score_table(returns).headings == ("step", "overall mean return", "training return")
    assert math.isnan(checkpoint_scores(returns)[0].overall[1])
    assert draw_scores(returns, "step") is None, "without scores there is nothing to set against them"


SCORES, OVERALL, PAID = ["retrieval", "update"], "overall success, greedy", "training return, temperature 0.7"


@pytest.mark.parametrize(
    ("against", "label", "curves"),
    [
        ("step", "step", [*SCORES, OVERALL, PAID]),
        ("overall", OVERALL, [*SCORES, PAID]),
        ("training", "mean return of training episodes, temperature 0.7", [*SCORES, OVERALL]),
    ],
)
def test_a_figure_has_a_curve_for_every_score_in_the_order_of_its_axis(against, label, curves):
    recipe = {"rollout": {"sampling": {"temperature": 0.7}}, "evaluation": {"sampling": {"temperature": 0.0}}}
    figure = draw_scores(LINES, against, Sampling.of(recipe))
    (axes,) = figure.axes
    assert [one.get_label() for one in axes.get_lines() if not one.get_label().startswith("_")] == curves
    assert axes.get_xlabel() == label
    (legend,) = figure.legends
    figure.draw_without_rendering()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert len(axes.containers) == len([curve for curve in curves if curve != PAID]), "held-out scores have intervals"
    (intervals,) = axes.containers[0].lines[2]  # those of retrieval
    assert [0.6 - 0.2, 0.6 + 0.2] in [pytest.approx(list(interval[:, 1])) for interval in intervals.get_segments()]
    if against == "overall":  # 0.2, 0.3, 0.4 at the steps 0, 4, 2
        retrieval = axes.get_lines()[0]
        assert (list(retrieval.get_xdata()), list(retrieval.get_ydata())) == ([0.2, 0.3, 0.4], [0.5, 0.7, 0.6])


@pytest.mark.parametrize("against", ["step", "overall", "training"])
@pytest.mark.parametrize("grade", [0.5, 7.0])
def test_a_judges_mean_is_not_on_the_axis_of_shares(against, grade):
    lines = [line(step, step / 10, retrieval=0.5, judge=grade) for step in (0, 2, 4)]
    figure = draw_scores([*lines, *TRAINED], against)
    shares, means = [axes for axes in figure.axes if axes.get_ylabel() in ("share of episodes", "mean score")]
    for axes, names in ((shares, {"retrieval"}), (means, {"judge"})):
        assert {one.get_label() for one in axes.get_lines()} & {"retrieval", "judge"} == names
    low, high = means.get_ylim()
    assert low < grade - 0.2 < grade + 0.2 < high
    assert shares.get_ylim()[1] < 1.2


def test_the_labels_of_the_steps_do_not_overlap_and_a_long_title_is_whole():
    lines = [line(step, 0.2 + step / 4000, retrieval=0.5) for step in range(0, 2000, 100)]
    lines += [line(step, 0.7, retrieval=0.5) for step in (2000, 2001)]
    lines += [train(step, step - 3000) for step in range(1, 2002, 100)]
    figure = dict(figures("a name of a run " * 6, lines))["metrics_vs_overall"]
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.x0)
    assert len(boxes) > 3
    assert boxes[-1].x1 <= figure.legends[0].get_window_extent().x0
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))
    (returns,) = figure.axes[-1].get_lines()
    assert returns.get_window_extent().y1 < min(box.y0 for box in boxes)
    title = figure.texts[0] if figure.texts else figure._suptitle
    extent = title.get_window_extent()
    assert extent.x1 <= figure.bbox.x1
    assert extent.y0 >= max(axes.get_tightbbox().y1 for axes in figure.axes)
    assert not extent.overlaps(figure.legends[0].get_window_extent())


# -- checkpoints that were evaluated by runs of their own --------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """A run that trained four steps from `base` and exported step 2."""
    run = make_run(tmp_path, "run", model={"path": "base"})
    final = {"kind": "final", "step": 4, "policy": "trained", "best_step": 2}
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*TRAINED, final]))
    return run


def test_separate_evaluations_fill_the_table_of_their_training_run(trained, tmp_path):
    def evaluation(name, model, success, *scores, environment="memory"):
        """A finished run of `posttrain evaluate`."""
        values = dict(zip(("retrieval", "update", "clarification"), scores, strict=False))
        final = line(0, success, **values) | {"kind": "final", "policy": "evaluated"}
        recipe = {"stage": "evaluate", "model": {"path": str(model)}, "environment": {"type": environment}}
        return Source(name, tmp_path / name, [final], recipe)

    last = trained / "checkpoints" / "step_000004" / "policy"
    given = [
        evaluation("late", last, 0.5, 0.9, 0.2, 0.3),
        evaluation("export", trained / "model", 0.6, 0.8, 0.4, 0.4),
        evaluation("before", "base", 0.1, 0.3, 0.0, 0.2),
        evaluation("elsewhere", last, 0.0, environment="bandit"),
        evaluation("other", "some/model", 0.0),
    ]
    lines = evaluated_checkpoints(given)
    assert list(lines) == ["run", "run (2)"]
    table = evaluated_table("run", lines["run"])
    assert table.headings[1:] == ("retrieval", "update", "clarification", "overall success", "training return")
    assert [[cell.split(" ")[0] for cell in row] for row in table.rows] == [
        ["0", "0.300", "0.000", "0.200", "0.100", "–"],
        ["2", "0.800", "0.400", "0.400", "0.600", "0.150"],
        ["4", "0.900", "0.200", "0.300", "0.500", "0.350"],
    ]
    names = ["metrics_vs_overall", "metrics_vs_step", "metrics_vs_training"]
    drawn = draw_evaluated(evaluated_checkpoints(given[:3]), tmp_path / "plots")
    assert [path.name for path in drawn] == [f"{name}.png" for name in names]
    compared = compare(given[:3])
    assert [name for name, _ in compared.figures if name in names] == names
    assert compared.tables[-1].rows == table.rows
    assert [row[1] for row in result_table(bundles_of(given)[0]).rows] == ["4", "2", "–", "4", "–"]


def test_the_step_of_a_model_is_read_from_its_path():
    for model, place in {
        "runs/a/checkpoints/step_000013/policy": ("runs/a", 13),
        "runs/a/checkpoints/step_000013": ("runs/a", 13),
        "lab/agent-exp1-step38": ("lab/agent-exp1", 38),
        "lab/agent": None,
        "nowhere/model": None,
    }.items():
        assert checkpoint_at(model) == place


def test_plots_until_a_step_leave_out_the_rest(trained):
    drawn, _ = plot_files([trained], None, ("svg",), until=2)
    assert {path.parent for path in drawn} == {trained / "plots" / "until_step_2"}
    assert "run, until step 2" in (trained / "plots" / "until_step_2" / "learning_curve.svg").read_text()
    log = Log(LINES).until(2)
    assert ([line["step"] for line in log], log.steps.tolist()) == ([0, 2], [1, 2])
