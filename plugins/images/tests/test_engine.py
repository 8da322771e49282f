"""The local engine: prompts with images, several turns, and the learner's log-probabilities."""

import asyncio
import warnings

import numpy as np
import pytest
import torch
from plugins.images.tests.conftest import part, picture, text
from plugins.images.tests.tiny import FAMILIES

from posttrain.data.messages import messages_of
from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.rollout.transcript import TokenTranscript

DECODING = {"idefics3": "paged", "smolvlm": "paged", "qwen2_5_vl": "paged", "qwen3_vl": "paged", "gemma3": "paged"}


def observation(*images, words="what is it?"):
    return messages_of([{"role": "user", "content": [*map(part, images), text(words)]}], "messages")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_with_the_probabilities_of_the_learner(policy_of, family):
    """Groups that share images, several turns with images, prompts in chunks."""
    policy = policy_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoding of some families is slow
        engine = LocalEngine(policy, slots=4, tokens_per_forward=16)
    assert engine._parts.kind == DECODING[family]
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    first, second = picture(40, 64), picture(90, 48)
    episodes = [
        TokenTranscript(renderer, observation(*images))
        for images in ((first, second), (first, second), (second,), (), (first, first))
    ]

    async def play(number, transcript):
        for turn in range(3):
            request = Request(
                tuple(transcript.context), SamplingRecipe(temperature=1.0), 10 * number + turn, max_tokens=6
            )
            done = await engine.generate(request)
            transcript.answer(done.ids, done.logprobs, done.stop_reason, done.versions)
            later = [picture(20, 70, number)] if turn == 0 else []
            transcript.observe(observation(*later, words="and this?"))

    async def run():
        engine.load_weights(0)
        await asyncio.gather(*(play(number, one) for number, one in enumerate(episodes)))

    asyncio.run(run())
    streams = [stream for one in episodes for stream in one.streams()]
    assert len(streams) == len(episodes)
    with torch.no_grad():
        learned = policy.score([s.ids for s in streams], [s.sampled for s in streams], 1.0, 64).logprobs
    sampled = np.concatenate([s.rollout_logprobs[s.sampled] for s in streams])
    assert np.abs(learned.numpy() - sampled).max() < 1e-4
    assert engine.counters.reused > 0
