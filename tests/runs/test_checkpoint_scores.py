"""Scores by checkpoint: the table of a report and its figure."""

import math

import pytest

from posttrain.runs.results import draw_scores
from posttrain.runs.tables import checkpoint_scores, score_table


def line(step, success, **scores):
    found = {"kind": "evaluation", "step": step, "n": 50, "success": success}
    found |= {"success_low": success - 0.1, "success_high": success + 0.1}
    for name, value in scores.items():
        found |= {f"score/{name}": value, f"score/{name}_low": value - 0.2, f"score/{name}_high": value + 0.2}
    return found


def train(step, paid):
    return {"kind": "train", "step": step, "rollout/return": paid}


LINES = [
    line(0, 0.2, retrieval=0.5, update=0.1),
    *(train(step, step / 10) for step in range(1, 5)),
    line(2, 0.4, retrieval=0.6, update=0.3),
    line(4, 0.3, retrieval=0.7),
]


def test_training_is_the_mean_since_the_evaluation_before():
    found = checkpoint_scores(LINES)
    assert [one.step for one in found] == [0, 2, 4]
    assert found[0].training is None
    assert [one.training for one in found[1:]] == pytest.approx([0.15, 0.35])
    assert found[1].scores == {"retrieval": pytest.approx((0.6, 0.4, 0.8)), "update": pytest.approx((0.3, 0.1, 0.5))}


def test_the_table_has_a_row_for_each_evaluation_and_says_what_is_not_known():
    table = score_table(LINES)
    assert table.headings == ("step", "retrieval", "update", "overall success", "training return")
    assert table.rows[0] == ("0", "0.500 [0.300, 0.700]", "0.100 [-0.100, 0.300]", "0.200 [0.100, 0.300]", "–")
    assert table.rows[2][2] == "–"
    assert "n = 50" in table.note


def test_one_evaluation_is_no_table_and_no_figure():
    assert score_table(LINES[:3]) is None
    assert draw_scores(LINES[:3]) is None
    assert checkpoint_scores([train(1, 0.5)]) == []


def test_returns_stand_in_where_there_is_no_success():
    lines = [{"kind": "evaluation", "step": step, "return": float(step)} for step in (0, 1)]
    table = score_table(lines)
    assert table.headings == ("step", "overall mean return", "training return")
    assert math.isnan(checkpoint_scores(lines)[0].overall[1])
    assert draw_scores(lines) is None, "without scores there is nothing to set against them"


def test_the_figure_has_a_curve_for_every_score_in_every_panel():
    figure = draw_scores(LINES)
    steps, overall, training = figure.axes
    labels = [handle.get_label() for handle in steps.get_lines() if not handle.get_label().startswith("_")]
    assert labels == ["retrieval", "update", "overall success", "training return"]
    assert [one.get_xlabel() for one in (steps, overall, training)] == [
        "step",
        "overall success",
        "mean return of training episodes",
    ]
    retrieval = next(one for one in overall.get_lines() if one.get_label() == "retrieval")
    # Sorted by the overall score, which is 0.2, 0.3, 0.4 at the steps 0, 4, 2.
    assert list(retrieval.get_xdata()) == [0.2, 0.3, 0.4]
    assert list(retrieval.get_ydata()) == [0.5, 0.7, 0.6]


def test_many_scores_can_be_told_apart():
    many = {f"kind {i}": i / 10 for i in range(9)}
    figure = draw_scores([line(0, 0.2, **many), line(1, 0.4, **many)])
    curves = [one for one in figure.axes[0].get_lines() if one.get_label().startswith("kind")]
    assert len({(one.get_color(), one.get_marker()) for one in curves}) == 9


def test_a_return_beyond_rates_has_an_axis_of_its_own():
    figure = draw_scores([*LINES, train(5, 3.0), line(5, 0.5, retrieval=0.6)])
    assert "mean training return" in [one.get_ylabel() for one in figure.axes]
