"""The local engine: prompts with images, several turns, and the learner's log-probabilities."""

import asyncio
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from plugins.images.tests.conftest import part, picture, text
from plugins.images.tests.tiny import FAMILIES, encoder_of
from safetensors.torch import load

from posttrain.data.messages import messages_of
from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.images import FIRST, KEY_DIGITS, first_id
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.rollout.transcript import TokenTranscript
from tests.training import small

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


EACH = list(product(FAMILIES, (2048, 16)))


@pytest.mark.parametrize("case", small.cases(EACH, [*EACH[::3], EACH[5]]), ids=str)
def test_new_weights_in_flight_reach_images_too(model_of, case):
    """Every token has the log-probability of its version given all before it, when the encoder changes in the middle of an answer
    whose image was already read, or before a later turn."""
    family, budget = case
    policy = Policy(str(model_of(family)), threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = LocalEngine(policy, slots=4, tokens_per_forward=budget)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    transcripts = [TokenTranscript(renderer, observation(picture(40, 64, n), picture(90, 48))) for n in range(3)]
    versions = {0: policy.replica()}
    encoder = {id(one) for one in encoder_of(policy).values()}

    def change():
        if engine.counters.sampled >= 6 * (engine.version + 1) and engine.version < 4:
            version = engine.version + 1
            with torch.no_grad():
                for _, parameter in policy.trainable():
                    if id(parameter) in encoder or version % 2 == 0:  # the encoder alone, then all weights
                        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                        parameter.add_(0.1 * noise)
            versions[version] = policy.replica()
            engine.load_weights(version)

    async def play(number, transcript):
        for turn in range(2):
            request = Request(
                tuple(transcript.context), SamplingRecipe(temperature=1.0), 5 * number + turn, max_tokens=7
            )
            done = await engine.generate(request)
            transcript.answer(done.ids, done.logprobs, done.stop_reason, done.versions)
            transcript.observe(observation(picture(20, 70, number), words="and this?"))

    async def run():
        engine.load_weights(0)
        engine.before_forward = change
        await asyncio.gather(*(play(*one) for one in enumerate(transcripts)))

    asyncio.run(run())
    streams = [stream for one in transcripts for stream in one.streams()]
    ids, masks = [one.ids for one in streams], [one.sampled for one in streams]
    of = np.concatenate([one.versions[one.sampled] for one in streams])
    recorded = np.concatenate([one.rollout_logprobs[one.sampled] for one in streams])
    with torch.no_grad():
        learned = {n: one.score(ids, masks, 1.0, 64).logprobs.numpy() for n, one in versions.items()}
    assert len(set(of.tolist())) >= 3
    assert any(len(set(one.versions[one.turn == turn].tolist())) > 1 for one in streams for turn in range(2))
    own = np.array([learned[version][at] for at, version in enumerate(of.tolist())])
    assert np.abs(own - recorded).max() < 2e-4
    assert np.abs(learned[0] - recorded)[of == 1].max(initial=0) > 1e-2, "an encoder's change shows"


@pytest.mark.parametrize("family", FAMILIES)
def test_other_engines_get_placeholders_and_processed_images(policy_of, family):
    """Spans of placeholders and inputs of the encoder are those of the ids."""
    policy = policy_of(family)
    images = policy.tokenizer.images
    ids = Renderer(policy.tokenizer, policy.end_tokens).prompt(observation(picture(), picture(90, 48)))
    placed = images.placed(ids)
    assert [token for token in placed["prompt_ids"] if token != images.token] == [one for one in ids if one < FIRST]
    for place in placed["images"]:
        inside = [token for start, stop in place["spans"] for token in ids[start:stop]]
        key = place["key"][:KEY_DIGITS]
        assert inside == [first_id(key) + number for number in range(images.processed(key).tokens)]
        sent = load(images.content(place["key"]))
        for name, tensor in images.processed(key).inputs.items():
            assert torch.equal(sent[name].reshape(tensor.shape), tensor)
    assert len({place["key"] for place in placed["images"]}) == 2
