"""The critic: values of the state before each sampled token, for any packing."""

import numpy as np
import pytest
import torch

from posttrain.models.critic import Critic
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from tests.conftest import save_tiny_model


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A directory of a reward model, untrained, with a head that is not zero."""
    folder = tmp_path_factory.mktemp("reward")
    RewardModel(ModelRecipe(path=str(save_tiny_model(folder / "base", "qwen3"))), seed=5).export(folder / "model")
    return folder / "model"


def streams():
    """Two answers to one prompt, and a stream of two turns."""
    draws = np.random.default_rng(0)
    prompt = draws.integers(3, 250, 6)
    ids = [np.concatenate([prompt, draws.integers(3, 250, n)]) for n in (4, 7)] + [draws.integers(3, 250, 12)]
    sampled = [np.arange(10) >= 6, np.arange(13) >= 6, np.isin(np.arange(12), [3, 4, 8, 9, 10])]
    return ids, sampled


def test_a_value_is_the_score_of_the_tokens_before(reward_model):
    recipe = ModelRecipe(path=str(reward_model))
    ids, sampled = streams()
    with torch.no_grad():
        values = Critic(recipe).values(ids, sampled)
        judge = RewardModel(recipe, new_head=False)
        places = [(row, place) for row, mask in zip(ids, sampled, strict=True) for place in np.flatnonzero(mask)]
        before = [judge.rewards([row[:place]], [np.arange(place) == place - 1]) for row, place in places]
    torch.testing.assert_close(values, torch.cat(before), atol=1e-5, rtol=1e-5)
    assert values.dtype == torch.float32
    assert len(values) == sum(mask.sum() for mask in sampled)
    assert values.std() > 1e-3


@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=2)])
def test_a_critic_from_a_language_model_starts_at_zero_and_learns(lora, tiny_model):
    critic = Critic(ModelRecipe(path=str(tiny_model), lora=lora))
    values = critic.values(*streams())
    assert not values.any()
    ((values - 1) ** 2).sum().backward()
    gradients = {name: p.grad for name, p in critic.trainable() if p.grad is not None}
    assert any("score" in name and gradient.abs().max() > 0 for name, gradient in gradients.items())


def test_bfloat16_weights_give_float32_values(reward_model):
    values = Critic(ModelRecipe(path=str(reward_model), dtype="bfloat16")).values(*streams())
    assert values.dtype == torch.float32
    assert values.std() > 1e-3


def test_values_of_a_reward_model_are_scaled_as_its_rewards_are(tiny_model, tmp_path):
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=5)
    model.set_statistics(0.25, 0.5)
    model.export(tmp_path / "model")
    critic = Critic(ModelRecipe(path=str(tmp_path / "model")))
    with torch.no_grad():
        raw = critic.values(*streams())
        critic.values_in_reward_units = True
        torch.testing.assert_close(critic.values(*streams()), (raw - 0.25) / 0.5)
