"""A real vLLM server samples prompts with images as the learner scores them."""

import asyncio
import json
import subprocess
from functools import cache

import numpy as np
import pytest
import torch
from plugins.images.tests.conftest import part, picture, text
from plugins.images.tests.test_training import SETTINGS, weights, write_rows
from plugins.images.tests.tiny import encoder_of, save_tiny
from safetensors.torch import load_file

import posttrain
from posttrain.data.messages import messages_of
from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import Request
from posttrain.engines.vllm.engine import open_vllm, sends_adapters
from posttrain.errors import InputError, RunError
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from tests.vllm.asking import GREEDY, SMALL, WARM, answers, distance, learner_logprobs, local_answers, move
from tests.vllm.interpreter import needs_vllm, vllm_python

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]
BOUND = 1e-4
"""Largest distance in nats from the learner's log-probabilities, float32 on both sides."""
FIRST, SECOND, THIRD = picture(40, 64), picture(90, 48), picture(20, 70)


KEYS = SMALL | {"python": vllm_python()}
PACKAGES = {"smolvlm": "num2words", "qwen2_5_vl": "torchvision", "qwen3_vl": "torchvision"}
"""Families that vLLM imports only with a package, which its build for processors is installed without."""


def opened(policy, logs, **keys):
    recipe = VllmEngineRecipe.model_validate(KEYS | keys)
    return open_vllm(policy, recipe, max_context=1024, logs=logs)


def asking(policy, *images, sampling=WARM, seed=1, tokens=12, before=()):
    """A request with these images after the tokens `before`."""
    shown = messages_of([{"role": "user", "content": [*map(part, images), text("what shape?")]}], "messages")
    ids = Renderer(policy.tokenizer, policy.end_tokens).prompt(shown)
    return Request((*before, *ids), sampling, seed, tokens)


@cache
def has(package):
    """Whether the interpreter with vLLM has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([vllm_python(), "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("family", ["idefics3", *PACKAGES])
def test_the_server_samples_with_the_probabilities_of_the_learner(family, tmp_path, monkeypatch):
    if family in PACKAGES and not has(PACKAGES[family]):
        pytest.skip(f"vLLM imports {family} only with {PACKAGES[family]}")
    policy = Policy(str(save_tiny(tmp_path / "model", family, hidden=128)), threads=1)
    engine = opened(policy, tmp_path)
    try:
        asked = [
            asking(policy, *shown, seed=seed)
            for seed, shown in enumerate([(), (FIRST,), (SECOND,), (FIRST, SECOND, THIRD), (SECOND, SECOND)])
        ]
        found = []
        for seed in range(3):
            if seed == 1:
                move(policy, seed=seed)
            if seed == 2:
                for parameter in encoder_of(policy).values():
                    parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                policy.version += 1
                assert distance(policy, asked[0], found[0]) < BOUND
                assert all(distance(policy, *pair) > 1e-3 for pair in zip(asked[1:], found[1:], strict=True))
            engine.load_weights(policy.version)
            found = answers(engine, asked)
            assert max(distance(policy, *pair) for pair in zip(asked, found, strict=True)) < BOUND, seed
        greedy = [asking(policy, shown, sampling=GREEDY) for shown in (FIRST, SECOND)]
        found = answers(engine, greedy)
        assert [one.ids for one in found] == [one.ids for one in local_answers(policy, greedy)]
        assert list(found[0].logprobs) != list(found[1].logprobs)
        # A later turn with another image finds the first image and the first answer in the cache.
        reused = engine.counters.reused
        later = asking(policy, THIRD, before=(*greedy[0].prompt_ids, *found[0].ids))
        [answer] = answers(engine, [later])
        assert distance(policy, later, answer) < BOUND
        assert engine.counters.reused - reused >= 32
        whole = list(policy.weights())
        name = [name for name, _ in whole if "vis" in name][-1]
        monkeypatch.setattr(policy, "weights", lambda: iter([pair for pair in whole if pair[0] != name]))
        with pytest.raises(RunError, match=r"lacks .* weights .*vis"):
            engine.load_weights(policy.version)
    finally:
        engine.close()


def test_answers_in_flight_continue_with_a_new_encoder(tmp_path):
    policy = Policy(str(save_tiny(tmp_path / "model", "idefics3", hidden=128)), threads=1)
    engine = opened(policy, tmp_path)
    asked = [asking(policy, FIRST, SECOND, seed=seed, tokens=700) for seed in range(6)]
    models = [policy.replica()]

    async def ask():
        waiting = asyncio.gather(*map(engine.generate, asked))
        while not waiting.done() and len(models) < 20:  # one of them comes in the middle of answers
            await asyncio.sleep(0.2)
            for parameter in encoder_of(policy).values():
                parameter.data.neg_()
            policy.version += 1
            await asyncio.to_thread(engine.load_weights, policy.version)
            models.append(policy.replica())
        return await waiting

    try:
        engine.load_weights(0)
        found = asyncio.run(ask())
    finally:
        engine.close()
    assert any(len(set(one.versions)) > 1 for one in found), [set(one.versions) for one in found]
    for pair in zip(asked, found, strict=True):
        sampled, own = np.array(pair[1].versions), np.array(pair[1].logprobs)
        for version in set(pair[1].versions):
            far = [np.abs(learner_logprobs(models[at], *pair) - own) for at in (version, abs(version - 1))]
            assert far[0][sampled == version].max() < BOUND < 1e-3 < far[1][sampled == version].max()


@pytest.mark.parametrize("family", PACKAGES)
def test_a_package_that_vllm_lacks_is_named(family, tmp_path):
    if has(PACKAGES[family]):
        pytest.skip(f"vLLM has {PACKAGES[family]} here")
    policy = Policy(str(save_tiny(tmp_path / "model", family, hidden=128)), threads=1)
    with pytest.raises(RunError, match=f"vLLM needs {PACKAGES[family]} for {family}; install it"):
        opened(policy, tmp_path)


def test_a_killed_server_gets_its_images_again(tmp_path):
    policy = Policy(str(save_tiny(tmp_path / "model", "idefics3", hidden=128)), threads=1)
    engine = opened(policy, tmp_path)
    try:
        engine.load_weights(0)
        asked = [asking(policy, FIRST, SECOND, seed=seed) for seed in range(4)]
        before = answers(engine, asked)
        engine._replicas[0].replica._kill()
        assert [one.ids for one in answers(engine, asked)] == [one.ids for one in before]
        assert engine.restarts == 1
    finally:
        engine.close()


def test_two_steps_of_rl_on_text_with_images(tmp_path):
    rows = write_rows(tmp_path / "data", count=12)
    recipe = {
        "model": {"path": str(save_tiny(tmp_path / "model", "idefics3", hidden=128)), "threads": 1},
        "environment": {"type": "text_task", "prompts": str(rows), "reward": f"{__file__}:share_of_e"},
        "engine": KEYS,
        "rollout": {"groups_per_step": 2, "episodes_per_group": 4, "tokens_per_turn": 8, "tokens_per_episode": 400},
        "evaluation": {"every": 0},
        "loss": {"correction": {"weights": "token"}},
        "runs": str(tmp_path),
        "name": "run",
        **SETTINGS,
    }
    posttrain.rl(recipe, steps=2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["policy/mismatch"] < BOUND
        assert step["optimizer/gradient_norm"] > 0
        assert step["tokens/reused"] > 0, "groups share prompts"
    before, after = load_file(tmp_path / "model" / "model.safetensors"), weights(tmp_path / "run")
    assert any("vision" in name and not torch.equal(tensor, before[name]) for name, tensor in after.items())


def share_of_e(prompt, answer, **row):
    return answer.count("e") / max(len(answer), 1)


def test_adapters_of_the_decoder_are_sent_alone_and_those_of_the_encoder_merged(tmp_path):
    path = str(save_tiny(tmp_path / "model", "idefics3", hidden=128))
    lora = {"rank": 4, "alpha": 16}
    policy = Policy(ModelRecipe(path=path, lora=lora, threads=1))
    assert not sends_adapters(policy, VllmEngineRecipe())
    with pytest.raises(InputError, match=r"engine\.adapters: .*vision_model.* is none; use merged"):
        opened(policy, tmp_path, adapters="adapter_only")
    alone = Policy(ModelRecipe(path=path, lora={**lora, "targets": r".*text_model.*(q|v|down)_proj"}, threads=1))
    for trained, sent in ((policy, False), (alone, True)):
        assert sends_adapters(trained, VllmEngineRecipe()) is sent
        engine = opened(trained, tmp_path)
        try:
            asked = [asking(trained, *shown, seed=seed) for seed, shown in enumerate([(), (FIRST,), (SECOND, FIRST)])]
            for seed in (1, 2):
                move(trained, seed=seed)
                engine.load_weights(trained.version)
                found = answers(engine, asked)
                assert max(distance(trained, *pair) for pair in zip(asked, found, strict=True)) < BOUND
        finally:
            engine.close()
