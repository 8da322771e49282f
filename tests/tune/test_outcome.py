"""The outcome of a trial's metrics, in closed form and against a plain search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import RunError
from posttrain.recipe.study import Limit, Objective
from posttrain.tune.trial import curve, outcome


def line(step, kind="evaluation", **values):
    return {"step": step, "kind": kind, "time/run": 1.0 * step} | {
        key.replace("__", "/"): v for key, v in values.items()
    }


KL = Objective(metric="return", direction="maximize", within={"policy/kl": Limit(max=0.3)})
LINES = [
    line(0, **{"return": 9.0}),
    line(1, "train", policy__kl=0.1, **{"return": 50.0}),
    line(2, "train", policy__kl=0.2),
    line(2, **{"return": 1.0}),
    line(3, "train", policy__kl=0.3),
    line(4, "train", policy__kl=0.5),
    line(4, **{"return": 2.0}),
    line(5, "train", policy__kl=0.9),
    line(6, "train", policy__kl=0.9),
    line(6, **{"return": 2.0}),
    line(6, "final", **{"return": 70.0}),
]


def test_the_best_evaluation_after_the_start_counts_with_its_limits():
    found = outcome(LINES, KL)
    # The first of equals, at step 4; its KL is the mean of steps 3 and 4.
    assert (found.step, found.value) == (4, 2.0)
    assert found.limited == {"policy/kl": pytest.approx(0.4)}
    assert found.violations == {"policy/kl": pytest.approx(0.1)}


def test_a_limit_on_an_evaluation_metric_reads_the_evaluation():
    limit = {"tokens_per_answer": Limit(min=5)}
    lines = [line(1, **{"return": 1.0}, tokens_per_answer=4.0), line(2, **{"return": 0.0}, tokens_per_answer=9.0)]
    found = outcome(lines, Objective(metric="return", direction="minimize", within=limit))
    assert (found.step, found.violations) == (2, {"tokens_per_answer": -4.0})
    found = outcome(lines, Objective(metric="return", direction="maximize", within=limit))
    assert (found.step, found.violations) == (1, {"tokens_per_answer": 1.0})


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(0, **{"return": 1.0})], "no evaluation after step 0"),
        ([line(1, **{"return": None}, success=1.0)], "return was never a number"),
        ([line(1, success=1.0, success_low=0.5)], "its evaluations have no return; they have success$"),
        ([line(1, "train", policy__entropy=1), line(1, **{"return": 1.0})], "have policy/kl .*they have"),
    ],
)
def test_missing_measurements_are_reported(lines, said):
    with pytest.raises(RunError, match=said):
        outcome(lines, KL)


@given(
    st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=12), st.sampled_from(["minimize", "maximize"])
)
def test_it_equals_a_plain_search(values, direction):
    lines = [line(step, **{"return": value}) for step, value in enumerate(values)]
    objective = Objective(metric="return", direction=direction)
    points = [(step, value) for step, value in enumerate(values) if step > 0 and value is not None]
    assert curve(lines, objective) == points
    if not points:
        with pytest.raises(RunError):
            outcome(lines, objective)
        return
    best = (min if direction == "minimize" else max)(value for _, value in points)
    found = outcome(lines, objective)
    assert found.value == best
    assert found.step == next(step for step, value in points if value == best)
