"""New weights for the local engine while answers are in flight."""

import asyncio

import numpy as np
import pytest
import torch

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe


@pytest.fixture
def policy(tiny_model):
    return Policy(ModelRecipe(path=str(tiny_model)))


def logprobs(policy, prompt, ids):
    """Log-probabilities of `ids` after `prompt` by a learner with the policy's weights."""
    stream = np.array([*prompt, *ids])
    with torch.no_grad():
        return policy.score([stream], [np.arange(len(stream)) >= len(prompt)], 1.0, 512).logprobs.numpy()


@pytest.mark.parametrize("budget", [2048, 16])
def test_every_token_has_the_log_probability_of_its_version_given_all_before_it(budget, policy):
    """Also where a prompt is long enough to be computed again in several pieces."""
    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(3, 300, 20 + 9 * i).tolist()) for i in range(4)]
    engine = LocalEngine(policy, LocalEngineRecipe(slots=3, tokens_per_forward=budget))
    engine.load_weights(0)
    old = policy.replica()

    def change():
        if engine.counters.sampled >= 12 and engine.version == 0:
            with torch.no_grad():
                for _, parameter in policy.trainable():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
            engine.load_weights(5)

    engine.before_forward = change

    async def run():
        requests = [Request(prompt, SamplingRecipe(), i, 12) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(engine.generate, requests))

    answers = asyncio.run(run())
    mixed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        versions = np.array(answer.versions)
        assert sorted(versions.tolist()) == versions.tolist()
        mixed += len(set(answer.versions)) == 2
        before, after = (logprobs(each, prompt, answer.ids) for each in (old, policy))
        np.testing.assert_allclose(answer.logprobs, np.where(versions == 0, before, after), atol=2e-4)
    assert mixed >= 2, [answer.versions for answer in answers]


def test_a_replica_has_separate_weights_and_shares_frozen_ones(tiny_model):
    from posttrain.recipe.model import LoraRecipe

    policy = Policy(ModelRecipe(path=str(tiny_model), lora=LoraRecipe(rank=2)))
    replica = policy.replica()
    mine, its = dict(policy.model.named_parameters()), dict(replica.model.named_parameters())
    assert mine.keys() == its.keys()
    for name, parameter in mine.items():
        assert (parameter.data_ptr() == its[name].data_ptr()) == (not parameter.requires_grad), name
