"""The local engine: exact, deterministic, and without repeated computation."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.episode import StopReason
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe

GREEDY = SamplingRecipe(temperature=0.0)


def generate(engine, requests):
    async def run():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(run())


def prompts(count, length=12, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(3, 260, length + i % 5)) for i in range(count)]


@pytest.fixture
def engine(tiny_policy):
    return LocalEngine(tiny_policy, LocalEngineRecipe(slots=4, tokens_per_forward=16))


def test_greedy_equals_transformers_generate(engine, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    asked = prompts(6)
    answers = generate(engine, [Request(p, GREEDY, 0, 20) for p in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        assert list(answer.ids) == expected


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


def test_a_prompt_of_a_group_is_computed_once(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=8))
    prompt = prompts(1, length=40)[0]
    answers = generate(engine, [Request(prompt, SamplingRecipe(), i, 5) for i in range(8)])
    assert engine.counters.prefilled == 40 + 7  # each other episode computes the last prompt token for its own start
    assert engine.counters.reused == 7 * 39
    fresh = generate(LocalEngine(tiny_policy, LocalEngineRecipe(slots=8)), [Request(prompt, SamplingRecipe(), 3, 5)])[0]
    assert answers[3].ids == fresh.ids


def test_groups_whose_prompts_differ_at_their_end_compute_the_difference_once(tiny_policy):
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


def test_cached_states_are_dropped_when_weights_change(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=2))
    prompt = prompts(1, length=20)[0]
    generate(engine, [Request(prompt, GREEDY, 0, 3)])
    engine.load_weights(version=1)
    generate(engine, [Request(prompt, GREEDY, 0, 3)])
    assert engine.counters.reused == 0


def test_the_rows_of_a_pass_do_not_depend_on_what_was_sampled_with_older_weights(tiny_policy, monkeypatch):
    """The last bit of a product can depend on the row, so a resumed run would otherwise differ from one that was not."""
    passes, schedule = [], LocalEngine._schedule

    def recorded(engine):
        layout, rows = schedule(engine)
        passes.append([sequence.request.seed for sequence, _ in rows])
        return layout, rows

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


def test_a_full_cache_makes_requests_wait(tiny_policy):
    engine = LocalEngine(tiny_policy, LocalEngineRecipe(slots=2, tokens_per_forward=16))
    answers = generate(engine, [Request(p, SamplingRecipe(), i, 8) for i, p in enumerate(prompts(11))])
    assert all(1 <= len(a.ids) <= 8 for a in answers)
