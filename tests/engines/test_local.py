"""The local engine: exact, deterministic, without repeated computation, and with new weights between two passes."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.rendering import Renderer
from posttrain.engines.local.cache import Segment, longest_prefix, positions_of
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.environments.make import make_env
from posttrain.episode import StopReason
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes
from tests.vllm.asking import GREEDY, answers, learner_logprobs
from tests.vllm.asking import answers as generate

from ..training.letters import Letters


def prompts(count, length=12, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(3, 260, length + i % 5)) for i in range(count)]


@pytest.fixture
def engine(tiny_policy):
    return LocalEngine(tiny_policy, LocalEngineRecipe(slots=4, tokens_per_forward=16))


def test_rollout_logprobs_equal_those_of_the_learner(engine, tiny_policy):
    asked = prompts(6, seed=1)
    answers = generate(engine, [Request(p, SamplingRecipe(temperature=0.7), i, 15) for i, p in enumerate(asked)])
    streams = [np.array([*p, *a.ids]) for p, a in zip(asked, answers, strict=True)]
    sampled = [np.arange(len(s)) >= len(p) for s, p in zip(streams, asked, strict=True)]
    with torch.no_grad():
        scores = tiny_policy.score(streams, sampled, 0.7, positions_per_chunk=7)
    mine = np.concatenate([a.logprobs for a in answers])
    assert np.abs(scores.logprobs.numpy() - mine).max() < 1e-4


def test_the_same_seed_draws_the_same_answer_in_any_batch(tiny_policy):
    request = Request(prompts(1)[0], SamplingRecipe(), 7, 12)
    alone = generate(LocalEngine(tiny_policy, LocalEngineRecipe(slots=1)), [request])[0]
    others = [Request(p, SamplingRecipe(), 100 + i, 12) for i, p in enumerate(prompts(9, seed=3))]
    among = generate(LocalEngine(tiny_policy, LocalEngineRecipe(slots=3)), [*others[:4], request, *others[4:]])[4]
    assert alone.ids == among.ids


def test_prompts_of_groups_are_computed_once_up_to_where_they_differ(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=8))
    prompt = prompts(1, length=40)[0]
    answers = generate(engine, [Request(prompt, SamplingRecipe(), i, 5) for i in range(8)])
    assert engine.counters.prefilled == 40 + 7  # each other episode computes the last prompt token for its own start
    assert engine.counters.reused == 7 * 39
    fresh = generate(LocalEngine(tiny_policy, LocalEngineRecipe(slots=8)), [Request(prompt, SamplingRecipe(), 3, 5)])[0]
    assert answers[3].ids == fresh.ids
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=8))
    rules, one, other = prompts(1, length=30)[0], [7] * 8, [9] * 8
    generate(engine, [Request((*rules, *end), SamplingRecipe(), i, 5) for i, end in enumerate([one, other] * 4)])
    assert engine.counters.prefilled == 30 + 8 + 8 + 6  # the last token once for each other episode


def test_earlier_turns_are_not_computed_again(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=4))
    prompt = prompts(1, length=30)[0]
    first = generate(engine, [Request(prompt, GREEDY, 0, 6)])[0]
    before = engine.counters.prefilled
    longer = (*prompt, *first.ids, 5, 6, 7)
    again = generate(engine, [Request(longer, GREEDY, 1, 6)])[0]
    # The last sampled token was never fed to the model, so it is computed with the new observation.
    assert engine.counters.prefilled - before == 4
    cold = generate(LocalEngine(tiny_policy, LocalEngineRecipe(slots=4)), [Request(longer, GREEDY, 1, 6)])[0]
    assert again.ids == cold.ids
    np.testing.assert_allclose(again.logprobs, cold.logprobs, atol=1e-5)


def test_the_rows_of_a_pass_do_not_depend_on_what_was_sampled_with_older_weights(tiny_policy, monkeypatch):
    """The last bit of a product can depend on the row, so a resumed run would otherwise differ from one that was not."""
    passes, schedule = [], LocalEngine._schedule

    def recorded(engine, slots):
        layout = schedule(engine, slots)
        passes.append([engine._slots[segment.slot].sequence.request.seed for segment in layout.segments])
        return layout

    monkeypatch.setattr(LocalEngine, "_schedule", recorded)
    asked = [Request(p, SamplingRecipe(), i, 2 + i) for i, p in enumerate(prompts(7))]
    used, fresh = (LocalEngine(tiny_policy, LocalEngineRecipe(slots=5)) for _ in range(2))
    generate(used, [Request(p, SamplingRecipe(), 100 + i, 9 - i) for i, p in enumerate(prompts(6, seed=1))])
    of_each = []
    for engine in (used, fresh):
        passes.clear()
        engine.load_weights(version=1)
        generate(engine, asked)
        of_each.append(list(passes))
    assert of_each[0] == of_each[1]


def test_repeated_prompts_hit_the_cache_even_when_all_slots_are_used(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=4))
    requests = [Request(p, GREEDY, i, 1) for i, p in enumerate(prompts(4, length=20))]
    for computed in (sum(len(request.prompt_ids) for request in requests), 4, 4):
        before = engine.counters.prefilled
        generate(engine, requests)
        assert engine.counters.prefilled - before == computed
    reused = engine.counters.reused
    engine.load_weights(version=1)
    generate(engine, requests)
    assert engine.counters.reused == reused, "cached states are dropped when weights change"


def test_a_cancelled_request_frees_its_cache(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=2))
    request = Request(prompts(1, length=20)[0], GREEDY, 0, 3)

    async def run():
        await engine.generate(request)
        given_up = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        before = engine.counters.reused
        await engine.generate(request)
        return engine.counters.reused - before

    assert asyncio.run(run()) == len(request.prompt_ids) - 1


def test_stop_reasons(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=2))
    budget = generate(engine, [Request(prompts(1)[0], SamplingRecipe(), 0, 3)])[0]
    assert budget.stop_reason in (StopReason.TURN_BUDGET, StopReason.END_TOKEN)
    text = tiny_policy.tokenizer.decode(budget.ids[:2])
    stopped = generate(engine, [Request(prompts(1)[0], SamplingRecipe(), 0, 30, stop_strings=(text[-1],))])[0]
    assert stopped.stop_reason is StopReason.STOP_STRING
    assert text[-1] in tiny_policy.tokenizer.decode(stopped.ids)


def test_a_pass_waits_for_every_open_episode(tiny_policy):
    """Batches do not depend on how long an environment takes."""

    def counted(delay):
        engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=4))

        async def episode(number, seconds):
            with engine.episode():
                await asyncio.sleep(seconds)
                return await engine.generate(Request(prompts(4)[number], SamplingRecipe(), number, 6))

        async def run():
            return await asyncio.gather(*(episode(i, delay * (3 - i)) for i in range(4)))

        return asyncio.run(run()), engine.counters.forwards

    (fast, fast_forwards), (slow, slow_forwards) = counted(0.0), counted(0.02)
    assert [a.ids for a in fast] == [a.ids for a in slow]
    assert [a.logprobs for a in fast] == [a.logprobs for a in slow]
    assert fast_forwards == slow_forwards


@pytest.fixture
def policy(tiny_model):
    return Policy(ModelRecipe(path=str(tiny_model)))


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

    found = answers(engine, [Request(prompt, SamplingRecipe(), i, 12) for i, prompt in enumerate(prompts)])
    mixed = 0
    for prompt, answer in zip(prompts, found, strict=True):
        versions = np.array(answer.versions)
        assert sorted(versions.tolist()) == versions.tolist()
        mixed += len(set(answer.versions)) == 2
        request = Request(prompt, SamplingRecipe(), 0, 12)
        before, after = (learner_logprobs(each, request, answer) for each in (old, policy))
        np.testing.assert_allclose(answer.logprobs, np.where(versions == 0, before, after), atol=2e-4)
    assert mixed >= 2, [answer.versions for answer in found]


def test_a_replica_has_separate_weights_and_shares_frozen_ones(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model), lora=LoraRecipe(rank=2)))
    replica = policy.replica()
    mine, its = dict(policy.model.named_parameters()), dict(replica.model.named_parameters())
    assert mine.keys() == its.keys()
    for name, parameter in mine.items():
        assert (parameter.data_ptr() == its[name].data_ptr()) == (not parameter.requires_grad), name


def play(policy, slots, episodes=24, per_seed=1):
    engine, renderer = LocalEngine(policy, slots=slots), Renderer(policy.tokenizer, policy.end_tokens)
    environment, rollout = make_env(Letters, max_turns=4), RolloutRecipe(tokens_per_turn=5, tokens_per_episode=700)
    limits = {"rollout": rollout, "sampling": SamplingRecipe()}
    player = RolloutWorker(engine=engine, renderer=renderer, environment=environment, **limits)
    places = [EpisodeRequest(i // per_seed, i // per_seed, i % per_seed, (0, "test", i)) for i in range(episodes)]
    return collect_episodes(player, places), engine.counters


def test_earlier_turns_stay_in_the_cache_and_episodes_do_not_depend_on_the_number_of_slots(tiny_policy):
    few, counters = play(tiny_policy, 3)
    contexts = sum(len(episode.streams[0]) for episode in few)
    # Every token of a context is computed once, as part of a prompt or of an answer.
    assert counters.prefilled + counters.sampled <= contexts + sum(len(episode.turns) for episode in few)
    many, _ = play(tiny_policy, 64)
    assert [e.streams[0].ids.tolist() for e in few] == [e.streams[0].ids.tolist() for e in many]
    assert [e.seed for e in few] == list(range(24))


def test_a_group_shares_its_prompt_across_episodes_and_turns(tiny_policy):
    played, counters = play(tiny_policy, 8, episodes=8, per_seed=8)
    prompt = played[0].turns[0].start
    continued = sum(len(episode.streams[0]) - prompt for episode in played)
    assert counters.prefilled + counters.sampled <= prompt + 8 + continued + sum(len(e.turns) for e in played)


PIECES = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=8)


@given(sequences=PIECES, prompt=st.lists(st.integers(0, 2), max_size=6).map(tuple))
def test_the_first_of_the_longest_prefixes_is_found(sequences, prompt):
    def as_bytes(ids):
        return np.array(ids, dtype=np.int64).tobytes()

    shared = [max(n for n in range(len(prompt) + 1) if ids[:n] == prompt[:n]) for ids in sequences]
    expected = (shared.index(max(shared)), max(shared)) if any(shared) else (0, 0)
    assert longest_prefix([as_bytes(ids) for ids in sequences], as_bytes(prompt)) == expected


@given(spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_positions_of_segments_follow_each_other(spans):
    segments = [Segment(slot, start, count) for slot, (start, count) in enumerate(spans)]
    expected = [position for start, count in spans for position in range(start, start + count)]
    assert positions_of(segments).tolist() == expected
