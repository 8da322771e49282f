"""One real vLLM server: its answers against the local engine's and the learner's, before and after updates and a death."""

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from posttrain.engines.protocol import Request
from posttrain.engines.vllm.engine import open_vllm
from posttrain.engines.vllm.replicas import EngineRefused, HangDetector, ServerReplica
from posttrain.episode import StopReason
from posttrain.errors import RunError
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.runs.metrics import take_events
from tests.vllm.asking import GREEDY, SMALL, WARM, agreed, answers, distance, local_answers, move, prompt, request
from tests.vllm.interpreter import needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]
BOUND = 1e-4
"""Largest distance in nats from the learner's log-probabilities, float32 on both sides."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """In float32, its output projection tied to the embedding."""
    return Policy(ModelRecipe(path=str(save_model(tmp_path_factory.mktemp("models") / "tiny"))))


@pytest.fixture(scope="module")
def engine(policy, tmp_path_factory):
    recipe = VllmEngineRecipe.model_validate(SMALL | {"python": vllm_python()})
    engine = open_vllm(policy, recipe, max_context=256, logs=tmp_path_factory.mktemp("logs"))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _current_weights(engine, policy):
    engine.load_weights(policy.version)


def test_an_update_of_the_weights_takes_effect(engine, policy):
    asked = [request(number) for number in range(4)]
    before = agreed(engine, policy, asked)
    move(policy, seed=1)
    assert [one.ids for one in answers(engine, asked)] == [one.ids for one in before]
    engine.load_weights(policy.version)
    after = agreed(engine, policy, asked)
    assert [one.ids for one in after] != [one.ids for one in before]
    assert {version for one in after for version in one.versions} == {policy.version}
    engine.sleep()


@pytest.mark.parametrize("sampling", [GREEDY, WARM, SamplingRecipe(top_p=0.8, top_k=20, min_p=0.01)])
def test_logprobs_are_the_learners(engine, policy, sampling):
    asked = [request(number, sampling, tokens=40, seed=number) for number in range(6)]
    found = answers(engine, asked)
    assert all(one.ids and len(one.ids) == len(one.logprobs) == len(one.versions) for one in found)
    assert max(distance(policy, *pair) for pair in zip(asked, found, strict=True)) < BOUND


def test_prompts_of_more_than_one_pass_are_read_and_a_seed_names_the_answer(engine, policy):
    asked = [Request(prompt(number, 110), WARM, number, 8) for number in range(8)]
    assert sum(len(one.prompt_ids) for one in asked) > SMALL["tokens_per_forward"]
    found = answers(engine, asked)
    assert max(distance(policy, *pair) for pair in zip(asked, found, strict=True)) < BOUND
    asked = [request(0, WARM, seed=seed) for seed in (1, 2, 2**63 - 1)]
    first = answers(engine, asked)
    assert [one.ids for one in answers(engine, asked[::-1])] == [one.ids for one in first[::-1]]
    assert len({one.ids for one in first}) == 3


def test_answers_stop_like_those_of_the_local_engine(engine, policy):
    free = local_answers(policy, [request(number, tokens=20) for number in range(3)])
    word = policy.tokenizer.decode(list(free[0].ids[3:5]))
    asked = [
        request(0, tokens=20, stop_strings=(word, "never")),
        request(1, tokens=20, stop_strings=("never",)),
        request(2, tokens=1),
        request(2, tokens=5, stop_strings=(policy.tokenizer.decode([free[2].ids[4]]),)),
    ]
    ends = policy.end_tokens
    try:
        policy.end_tokens = frozenset({free[1].ids[2], free[1].ids[6]})
        found, wanted = answers(engine, asked), local_answers(policy, asked)
    finally:
        policy.end_tokens = ends
    assert [(one.ids, one.stop_reason) for one in found] == [(one.ids, one.stop_reason) for one in wanted]
    assert {one.stop_reason for one in found} == {StopReason.STOP_STRING, StopReason.END_TOKEN, StopReason.TURN_BUDGET}


def test_turns_and_groups_share_cached_tokens(engine):
    first = request(5, tokens=8)
    reused = engine.counters.reused
    (answer,) = answers(engine, [first])
    assert engine.counters.reused == reused
    again = Request((*first.prompt_ids, *answer.ids, 9, 10), GREEDY, 2, 4)
    answers(engine, [again])
    assert engine.counters.reused - reused >= 64
    engine.load_weights(engine.version)
    reused = engine.counters.reused
    answers(engine, [again])
    assert engine.counters.reused == reused, "what other weights computed is forgotten"


def test_answers_in_flight_continue_with_new_weights(engine, policy):
    old = policy.version
    # The first one ends early, and then the others are in flight.
    asked = [Request(prompt(3), WARM, seed, 20 if seed == 0 else 160) for seed in range(6)]

    async def ask():
        waiting = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        move(policy, seed=2)
        await asyncio.to_thread(engine.load_weights, policy.version)
        return await asyncio.gather(*waiting)

    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    found = asyncio.run(ask())
    after = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    mixed = [pair for pair in zip(asked, found, strict=True) if set(pair[1].versions) == {old, policy.version}]
    assert mixed
    for one, answer in mixed:
        assert list(answer.versions) == sorted(answer.versions)
        changed = answer.versions.index(policy.version)
        late = Request((*one.prompt_ids, *answer.ids[:changed]), WARM, 3, 160)
        # That of the new weights given all tokens before, those that the old weights sampled too.
        assert distance(policy, late, _part(answer, changed, len(answer.ids))) < BOUND
        policy.model.load_state_dict(before)
        assert distance(policy, one, _part(answer, 0, changed)) < BOUND
        policy.model.load_state_dict(after)


def _part(answer, start, stop):
    """Tokens start to stop - 1 of an answer."""
    columns = (answer.ids, answer.logprobs, answer.versions)
    return type(answer)(*(column[start:stop] for column in columns), answer.stop_reason)


def test_a_weight_that_is_not_received_is_named(engine, policy, monkeypatch):
    some = [pair for pair in policy.weights() if "layers.1.self_attn.k" not in pair[0]]
    monkeypatch.setattr(policy, "weights", lambda: iter(some))
    with pytest.raises(RunError, match=r"lacks 1 weights .*layers\.1\.self_attn\.qkv_proj"):
        engine.load_weights(policy.version)
    monkeypatch.undo()
    engine.load_weights(policy.version)
    agreed(engine, policy, [request(1)])


def test_a_server_elsewhere_gets_weights_as_bytes(engine, policy, monkeypatch):
    (state,) = engine._replicas
    monkeypatch.setenv("POSTTRAIN_VLLM_TOKEN", state.replica._token)
    recipe = VllmEngineRecipe.model_validate(SMALL | {"urls": [state.replica.url]})
    move(policy, seed=3)
    other = open_vllm(policy, recipe, max_context=256)
    other.load_weights(policy.version)
    agreed(other, policy, [request(number) for number in range(3)])
    other.close()
    stranger = ServerReplica("a stranger", state.replica.url, "wrong", 5, same_machine=False)
    with pytest.raises(EngineRefused, match="token"):
        asyncio.run(stranger.call("info"))


@pytest.mark.parametrize("stopped", ["server", "scheduler"])
def test_an_engine_that_hangs_is_restarted(stopped, engine, policy, monkeypatch):
    (state,) = engine._replicas
    monkeypatch.setattr(state, "detector", HangDetector(partial(state.replica.call, "ping"), 20))
    asked = [request(number, WARM, tokens=100, seed=number) for number in range(3)]
    undisturbed, restarts, hung = answers(engine, asked), engine.restarts, state.replica.pid
    children = [int(child) for child in Path(f"/proc/{hung}/task/{hung}/children").read_text().split()]
    names = {Path(f"/proc/{child}/cmdline").read_bytes().partition(b"\0")[0]: child for child in children}
    os.kill(hung if stopped == "server" else names[b"VLLM::EngineCore"], signal.SIGSTOP)
    assert [one.ids for one in answers(engine, asked)] == [one.ids for one in undisturbed]
    assert engine.restarts == restarts + 1
    assert "did not respond" in take_events()[-1]
    assert not os.path.exists(f"/proc/{hung}")


def test_a_killed_engine_is_restarted_and_its_requests_are_repeated(engine, policy):
    asked = [request(number, WARM, tokens=100, seed=number) for number in range(6)]
    undisturbed = answers(engine, asked)
    (state,) = engine._replicas
    killed, restarts = state.replica.pid, engine.restarts
    take_events()

    # It stands still first, for a fast one would have answered before it dies.
    os.kill(killed, signal.SIGSTOP)

    async def ask():
        waiting = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await asyncio.sleep(0.2)
        os.kill(killed, signal.SIGKILL)
        return await asyncio.gather(*waiting)

    found = asyncio.run(ask())
    assert [one.ids for one in found] == [one.ids for one in undisturbed]
    assert max(distance(policy, *pair) for pair in zip(asked, found, strict=True)) < BOUND
    assert engine.restarts == restarts + 1
    assert engine.retried >= 1
    (message,) = take_events()
    assert "restarted" in message
    assert state.replica.pid != killed
    ends = time.monotonic() + 10
    while os.path.exists(f"/proc/{killed}"):
        assert time.monotonic() < ends
        time.sleep(0.1)
