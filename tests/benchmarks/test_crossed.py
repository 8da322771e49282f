"""The mean over training seeds and tasks."""

import math

import numpy as np
import pytest
from harness.crossed import crossed_mean

from posttrain.runs.intervals import mean_difference, seed_mean, success_rate


def test_crossed_mean_is_over_training_seeds_and_tasks():
    """Where only one of the two differs, the interval is that of this one alone."""
    draws = np.random.default_rng(0)
    tasks, seeds = (draws.random(50) < 0.7).astype(float), draws.random(8)
    over_tasks, over_seeds = crossed_mean(np.tile(tasks, (8, 1))), crossed_mean(np.tile(seeds[:, None], (1, 50)))
    for found, alone in ((over_tasks, mean_difference(tasks.tolist())), (over_seeds, mean_difference(seeds.tolist()))):
        assert found.n == 8
        assert found.limits == pytest.approx(alone.limits)
    rate = crossed_mean(np.tile(seeds[:, None], (1, 50)), rate=True)
    assert rate.limits == pytest.approx(seed_mean(seeds.tolist(), rate=True).limits, abs=0.01)
    both = crossed_mean(0.5 * tasks[None, :] + 0.5 * seeds[:, None])
    assert both.high - both.low > 0.5 * max(over_tasks.high - over_tasks.low, over_seeds.high - over_seeds.low)
    assert crossed_mean(np.ones((5, 400)), rate=True).limits == success_rate(400, 400).limits
    for table in (np.full((5, 4), 0.3), draws.random((4, 50)), draws.random((5, 1))):
        assert math.isnan(crossed_mean(table).low)
    with pytest.raises(ValueError, match="row per training seed"):
        crossed_mean(np.zeros(3))


@pytest.mark.parametrize(
    ("level", "of_seeds", "of_tasks"), [(0.5, 0.4, 1.0), (2.2, 0.05, 1.5), (6.0, 0.7, 0.5), (3.0, 1.0, 1.0)]
)
def test_crossed_mean_covers_the_truth_with_five_seeds(level, of_seeds, of_tasks):
    """Whether seeds or tasks differ more, and near 100%; Student's t alone covers 88% in the last."""
    draws = np.random.default_rng(0)

    def success(seeds, tasks):
        return 1 / (1 + np.exp(-level - of_seeds * seeds - of_tasks * tasks))

    truth = success(*draws.standard_normal((2, 200_000))).mean()
    hits = 0
    for _ in range(300):
        chance = success(draws.standard_normal((5, 1)), draws.standard_normal((1, 200)))
        found = crossed_mean(draws.random((5, 200)) < chance, rate=True)
        hits += found.low <= truth <= found.high
    assert hits >= 276
