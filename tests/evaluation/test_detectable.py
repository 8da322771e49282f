"""What an evaluation can show, against simulations of the test that the verdict of a run makes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from posttrain.evaluation.paired import paired_test
from posttrain.evaluation.statistics import item_means, mcnemar
from posttrain.recipe.detectable import FEWEST, deviations_shown, mcnemar_power, points_shown


def found(before, after, kind):
    """Whether the verdict says that the model improved: scores [n, episodes] of both."""
    names = [str(item) for item in range(len(before))]
    sides = [
        item_means(kind, ((name, value) for name, row in zip(names, side, strict=True) for value in row))
        for side in (before, after)
    ]
    test = paired_test("success", "higher", sides[:1], sides[1:], names, draws=80)
    return replace(test, corrected=test.p).better_side == "B"


@pytest.mark.parametrize(("items", "episodes"), [(6, 1), (20, 1), (24, 1), (150, 1), (24, 4)])
def test_the_smallest_gain_of_success_is_found_in_four_of_five_runs(items, episodes):
    gain, draws = points_shown(items, episodes), np.random.default_rng(items)
    rates = (1 - gain) / 2, (1 + gain) / 2
    runs = [[draws.random((items, episodes)) < rate for rate in rates] for _ in range(600)]
    assert np.mean([found(*run, "rate") for run in runs]) == pytest.approx(0.8, abs=0.05)


def test_tasks_of_different_difficulty_show_smaller_gains():
    gain, draws, hits = points_shown(24), np.random.default_rng(0), 0
    for _ in range(300):
        level = draws.uniform(0, 1 - gain, (24, 1))
        hits += found(draws.random((24, 1)) < level, draws.random((24, 1)) < level + gain, "rate")
    assert hits / 300 > 0.8


@pytest.mark.parametrize("items", [6, 30])
def test_the_smallest_gain_of_a_return_is_found_in_four_of_five_runs(items):
    gain, draws = deviations_shown(items), np.random.default_rng(items)
    runs = [(np.zeros((items, 1)), draws.normal(gain, 1, (items, 1))) for _ in range(600)]
    assert np.mean([found(*run, "mean") for run in runs]) == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("level", [0.05, 0.05 / 7])
def test_the_power_of_mcnemars_test_is_that_of_its_definition(level):
    """All numbers of items gained and lost, with their probabilities."""
    items, gained, lost = 9, 0.55, 0.1
    power = 0.0
    for up in range(items + 1):
        for down in range(items + 1 - up):
            ways = math.comb(items, up) * math.comb(items - up, down)
            chance = ways * gained**up * lost**down * (1 - gained - lost) ** (items - up - down)
            power += chance * (mcnemar(down, up) < level and up > down)
    assert mcnemar_power(gained, lost, items, level) == pytest.approx(power, abs=1e-12)


def test_six_tasks_are_the_fewest_that_show_anything():
    """As many gains as tasks, without a loss, are the most that there can be."""
    for items in (FEWEST - 1, FEWEST):
        most = [found(np.zeros((items, 1)), np.ones((items, 1)), kind) for kind in ("rate", "mean")]
        assert most == [items == FEWEST] * 2
        assert math.isfinite(points_shown(items)) == math.isfinite(deviations_shown(items)) == (items == FEWEST)
    gains = [points_shown(items) for items in (6, 7, 20, 100, 1000)]
    assert gains == sorted(gains, reverse=True)
