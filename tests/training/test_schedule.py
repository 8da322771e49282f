"""The learning rate's schedule at its corners."""

import pytest

from posttrain.recipe.model import OptimizerRecipe
from posttrain.training.optimizer import learning_rate_factor


def factors(total, updates, **keys):
    return [learning_rate_factor(OptimizerRecipe(**keys), u, total) for u in updates]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_to_the_whole_rate(schedule):
    found = factors(10, range(4), schedule=schedule, warmup_updates=3)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_decay():
    at = [2, 6, 10, 99]
    assert factors(10, at, schedule="constant", warmup_updates=2) == [1, 1, 1, 1]
    assert factors(10, at, schedule="linear", warmup_updates=2, final_fraction=0.2) == pytest.approx([1, 0.6, 0.2, 0.2])
    assert factors(10, at, schedule="cosine", warmup_updates=2, final_fraction=0.2) == pytest.approx([1, 0.6, 0.2, 0.2])
    (factor,) = factors(10, [4], schedule="cosine", warmup_updates=2, final_fraction=0.0)
    assert factor == pytest.approx(0.8535533905932737)


def test_a_warm_up_longer_than_the_run_never_divides_by_zero():
    assert factors(3, [0, 3, 5], schedule="cosine", warmup_updates=5) == pytest.approx([1 / 6, 4 / 6, 1.0])
