"""Collapse guards: thresholds, patience, state."""

import math

import pytest

from posttrain.recipe.run import GuardRecipe
from posttrain.training.guards import Guards


@pytest.mark.parametrize(
    ("key", "metric", "threshold", "bad", "good"),
    [
        ("max_zero_groups", "credit/zero_groups", 0.8, 0.9, 0.8),
        ("min_reward_spread", "reward/group_spread", 0.1, 0.05, 0.1),
        ("min_entropy", "policy/entropy", 0.1, 0.05, 0.1),
        ("max_gradient_norm", "optimizer/gradient_norm", 10.0, math.inf, 10.0),
        ("max_repeated_share", "policy/repeated_share", 0.5, 0.6, 0.5),
    ],
)
def test_a_guard_fires_after_its_patience(key, metric, threshold, bad, good):
    guards = Guards(GuardRecipe(patience=2, **{key: threshold}))
    assert guards.check({metric: bad}, 1) == []
    assert guards.check({metric: good}, 2) == []
    assert guards.check({metric: bad}, 3) == []
    (sentence,) = guards.check({metric: bad}, 4)
    assert sentence.startswith(f"{metric} = {bad:.4g}")
    assert f"guards.{key} = {threshold:g} since step 3" in sentence
    assert guards.check({metric: bad}, 5) == []
    (again,) = guards.check({metric: bad}, 6)
    assert "since step 3" in again


def test_a_missing_metric_does_not_count_for_a_guard():
    guards = Guards(GuardRecipe(patience=2, min_entropy=0.1))
    guards.check({"policy/entropy": 0.0}, 1)
    assert guards.check({}, 2) == guards.check({"policy/entropy": math.nan}, 3) == []
    assert "since step 1" in guards.check({"policy/entropy": 0.0}, 4)[0]


def test_a_guard_without_threshold_is_off():
    assert (
        Guards(GuardRecipe(patience=1, max_repeated_share=None)).check(
            {"policy/repeated_share": 1.0, "policy/entropy": 0.0}, 1
        )
        == []
    )


def test_counts_survive_a_resume():
    recipe = GuardRecipe(patience=2)
    first, second = Guards(recipe), Guards(recipe)
    first.check({"policy/repeated_share": 1.0}, 7)
    second.load_state_dict(first.state_dict())
    (sentence,) = second.check({"policy/repeated_share": 1.0}, 8)
    assert "since step 7" in sentence
