"""`model.router_replay`: the experts of a rollout are those of its tokens, and the learner uses them."""

import json

import numpy as np
import pytest
import torch

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.rollout.store import episode_from_record, episode_record
from posttrain.rollout.transcript import StreamBuilder
from tests.models.families import save_family
from tests.rollout.episodes import played
from tests.vllm.asking import answers as generate


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("replay") / "mixtral", "mixtral")


def policy_of(model, **settings):
    return Policy(str(model), threads=1, router_replay=True, **settings)


def chosen(policy, ids):
    """The experts [T, R, k] that the routers choose for a stream alone."""
    with torch.no_grad(), policy.routing.recorded() as routed:
        policy.score([np.array(ids)], [np.arange(len(ids)) > 0], 1.0, 64)
    return routed.stacked()


def sets(experts):
    return np.sort(experts, axis=-1)


def test_the_engine_returns_the_experts_of_all_tokens_but_the_last(model):
    """Also of prompts that another sequence of the group computed, of earlier turns, and of prompts in several passes."""
    policy = policy_of(model)
    engine = LocalEngine(policy, LocalEngineRecipe(slots=3, tokens_per_forward=16))
    rules = tuple(range(10, 34))
    first = [Request((*rules, 40 + seed % 2), SamplingRecipe(), seed, 9) for seed in range(7)]
    answers = generate(engine, first)
    longer = [(*one.prompt_ids, *answer.ids, 5, 6, 7) for one, answer in zip(first, answers, strict=True)]
    again = [Request(prompt, SamplingRecipe(), 50, 6) for prompt in longer]
    engine.load_weights(1)
    later = generate(engine, again)
    assert engine.counters.reused > 0
    for request, answer in zip([*first, *again], [*answers, *later], strict=True):
        ids = [*request.prompt_ids, *answer.ids]
        assert answer.experts.shape == (len(ids) - 1, 2, 2)
        assert np.array_equal(sets(answer.experts), sets(chosen(policy, ids)[:-1]))
    assert generate(LocalEngine(Policy(str(model), threads=1)), first[:1])[0].experts is None


def test_sequences_that_new_weights_interrupt_have_the_experts_of_the_last(model):
    policy = policy_of(model)
    engine = LocalEngine(policy, LocalEngineRecipe(slots=2))
    passes = []

    def change():
        passes.append(1)
        if len(passes) == 5:
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            engine.load_weights(1)

    engine.before_forward = change
    request = Request(tuple(range(10, 30)), SamplingRecipe(), 0, 12)
    (answer,) = generate(engine, [request])
    assert set(answer.versions) == {0, 1}
    ids = [*request.prompt_ids, *answer.ids]
    assert np.array_equal(sets(answer.experts), sets(chosen(policy, ids)[:-1]))


def test_a_stream_has_the_experts_of_its_last_turn(model):
    stream = StreamBuilder()
    stream.append([1, 2, 3])
    stream.append([4, 5], [-1.0, -2.0], 0, [0, 0])
    stream.experts = np.arange(16, dtype=np.int8).reshape(4, 2, 2)
    built = stream.build()
    assert built.experts.shape == (5, 2, 2)
    assert (built.experts[:4] == stream.experts).all()
    assert (built.experts[4] == -1).all()
    stream.append([6, 7])
    assert np.array_equal(stream.build().experts, built.experts)


def test_buffered_episodes_keep_their_experts_and_stored_steps_leave_them_out():
    one = played(3)
    for stream in one.streams:
        stream.experts = np.full((len(stream), 2, 2), -1, np.int8)
        stream.experts[:2] = 3
    record = json.loads(json.dumps(episode_record(one)))
    back = episode_from_record(record)
    for stream, read in zip(one.streams, back.streams, strict=True):
        assert read.experts.dtype == np.int8
        assert np.array_equal(read.experts, stream.experts)
    assert episode_from_record(json.loads(json.dumps(episode_record(one, experts=False)))).streams[0].experts is None
    record["streams"][0]["experts"][2][0] += 1
    with pytest.raises(ValueError, match="reshape"):
        episode_from_record(record)
