"""The bandit: its rewards, and success of the better arm."""

import numpy as np
import pytest

from posttrain.environments.bandit import Bandit, BanditRecipe
from posttrain.environments.game import play

RECIPE = BanditRecipe()


def _pulls(recipe, name, seeds):
    environment = Bandit(recipe)
    return [play(environment, seed, [f"<answer>{name}</answer>"])[-1] for seed in seeds]


def test_rewards_have_the_stated_moments_and_arms_are_shuffled():
    low = np.array([step.reward for step in _pulls(RECIPE, "phoenix", range(4000))])
    high = np.array([step.reward for step in _pulls(RECIPE, "dragon", range(4000))])
    assert low.mean() == pytest.approx(0.2, abs=0.01)
    assert low.std() == pytest.approx(0.1, abs=0.01)
    assert high.mean() == pytest.approx(0.325, abs=0.03)
    assert high.std() == pytest.approx(0.40, abs=0.02)
    assert (low > high).mean() == pytest.approx(0.571, abs=0.03)
    low, high = _pulls(RECIPE, "phoenix", range(50)), _pulls(RECIPE, "dragon", range(50))
    assert any(a.reward > b.reward for a, b in zip(low, high, strict=True))
    assert not any(step.info["success"] for step in low)
    assert all(step.info["success"] for step in high)
    environment = Bandit(RECIPE)
    first = []
    for seed in range(400):
        environment.reset(seed)
        first.append(environment.actions[0] == "dragon")
    assert np.mean(first) == pytest.approx(0.5, abs=0.1)


def test_baselines_equal_the_means_of_baseline_policies():
    found = Bandit.baselines(RECIPE, range(10))
    assert (found["random"].success, found["optimal"].success) == (0.5, 1.0)
    assert found["random"].mean_return == pytest.approx((0.2 + 0.325) / 2)
    environment = Bandit(RECIPE)
    wins = []
    for seed in range(2000):
        environment.reset(seed)
        wins.append(environment.step(environment.random_answer(seed / 2000)).info["success"])
    assert np.mean(wins) == pytest.approx(0.5, abs=0.04)
