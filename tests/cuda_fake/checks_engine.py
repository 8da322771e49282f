"""The local engine on a fake GPU: reading prompts, decoding, and the weights that go to vLLM."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import torch

from posttrain.distributed.world import join_world
from posttrain.engines.local import cuda
from posttrain.engines.local.cpu.kernel import PAGE
from posttrain.engines.local.cuda import KeyValueRows
from posttrain.engines.local.engine import LocalEngine, page_bytes
from posttrain.engines.protocol import Request
from posttrain.engines.vllm.engine import VllmEngine, settings_of
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.rollout import SamplingRecipe
from tests.cuda_fake import made
from tests.engines.test_vllm_engine import Made
from tests.vllm.asking import answers


def sampled(engine, tokens, requests=3, prompt=13, **sampling):
    """Completions of `tokens` tokens to prompts of `prompt`. The fake device samples token 1, which ends nothing here."""
    engine.policy.end_tokens = frozenset({999_999})
    prompts = [(5, 6, 7, *range(10 + 20 * i, 7 + prompt + 20 * i)) for i in range(requests)]
    return answers(engine, [Request(ids, SamplingRecipe(**sampling), i, tokens) for i, ids in enumerate(prompts)])


def opened(path, **settings):
    engine = LocalEngine(Policy(made.recipe(path, **settings)), slots=4)
    engine.load_weights(1)
    return engine


def per_token(device, engine, **sampling):
    """Waits and kernels that each further decoded token of all sequences adds."""
    counts = []
    sampled(engine, 1, **sampling)  # joins the weights of projections
    for tokens in (2, 5):
        engine._decoder = None  # nothing is recorded before the passes that are counted
        engine.load_weights(1)
        device.reset()
        assert [len(done.ids) for done in sampled(engine, tokens, **sampling)] == [tokens] * 3
        counts.append((device.sync_count, device.kernel_count))
    return [(more - less) / 3 for less, more in zip(*counts, strict=True)]


SAMPLING = {
    "greedy": ({"temperature": 0.0}, 1),
    "plain": ({}, 1),
    "temperature": ({"temperature": 0.7}, 1),
    "top_p": ({"top_p": 0.9}, 3),
    "min_p": ({"min_p": 0.1, "top_k": 5}, 3),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_decoded_token_waits_for_its_number_alone(device, thin_model, name):
    """The sampled tokens, with their log-probabilities; truncation reads whether it has to sort the vocabulary."""
    sampling, most = SAMPLING[name]
    engine = opened(thin_model)
    waits, kernels = per_token(device, engine, **sampling)
    assert waits <= most, device.syncs
    assert kernels <= 145, device.kernels


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}])
def test_deterministic_kernels_sample_without_sums_that_torch_refuses(device, thin_model, sampling):
    """torch refuses `cumsum` of floating-point numbers then; that of integers, one per pass of `top_p`, is exact."""
    policy = Policy(made.recipe(thin_model))
    assert not settings_of(policy, VllmEngineRecipe()).deterministic
    with join_world(HardwareRecipe(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert settings_of(policy, VllmEngineRecipe()).deterministic
        engine = LocalEngine(policy, slots=4)
        engine.load_weights(1)
        device.reset()
        sampled(engine, 5, **sampling)
    assert device.kernels["cumsum"] == (5 if sampling else 0)
    with join_world(HardwareRecipe()):
        assert not torch.are_deterministic_algorithms_enabled()
        engine.load_weights(1)
        device.reset()
        sampled(engine, 5, **sampling)
    assert device.kernels["cumsum"] == (20 if sampling else 10)


def test_a_recorded_pass_does_not_wait(device, thin_model, monkeypatch):
    waits = []

    def record(run):
        before = device.sync_count
        out = run()
        waits.append(device.sync_count - before)
        return run, out

    monkeypatch.setattr(cuda, "CudaGraphs", lambda: record)
    engine = opened(thin_model)
    sampled(engine, 2 * cuda.RECORDED_AFTER)
    assert waits == [0]


def test_a_replayed_pass_starts_nothing_per_layer_and_samples(device, thin_model, monkeypatch):
    """One upload of all that it reads, and the sampled numbers of all sequences come back."""
    monkeypatch.setattr(cuda, "CudaGraphs", lambda: lambda run: (lambda: None, run()))
    engine = opened(thin_model)
    counts = []
    for tokens in (20, 21):
        sampled(engine, 2 * cuda.RECORDED_AFTER)
        engine.load_weights(1)
        device.reset()
        sampled(engine, tokens)
        counts.append((device.sync_count, device.uploads, Counter(device.kernels)))
    (waits, uploads, kernels), (more_waits, more_uploads, more) = counts
    assert (more_waits - waits, more_uploads - uploads) == (1, 1)
    assert more - kernels == Counter({"copy_": 1})


def test_kernels_per_layer_of_a_decoded_token(device, thin_model, tmp_path):
    counts = []
    for layers in (1, 2):
        engine = opened(made.deeper(thin_model, tmp_path / str(layers), layers))
        counts.append(per_token(device, engine, temperature=0.0)[1])
    assert counts[1] - counts[0] == 9


def test_kernels_do_not_grow_with_the_context(device, thin_model):
    engine = opened(thin_model)
    engine.policy.end_tokens = frozenset({999_999})
    counts = []
    for ids in ((5, 6), tuple(range(3, 103)) * 15):
        engine._decoder = None
        engine.load_weights(1)
        engine._cache.reserve(1600)
        request = Request(ids, SamplingRecipe(temperature=0.0), 0, 4)
        answers(engine, [replace(request, max_tokens=1)])
        device.reset()
        answers(engine, [request])
        counts.append(device.kernel_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"lora": {"rank": 4}}, {"head_dtype": "float32"}])
def test_engines_of_other_models(device, thin_model, settings):
    engine = opened(thin_model, **settings)
    assert isinstance(engine._cache, KeyValueRows) == (settings.get("dtype") != "float32")
    assert [len(done.ids) for done in sampled(engine, 3)] == [3] * 3


def test_a_sleeping_engine_leaves_the_memory_of_its_cache(device, thin_model):
    engine = opened(thin_model)
    before = device.live
    sampled(engine, 3)
    assert device.live > before
    engine.sleep()
    engine._decoder = None
    assert device.live == before


def test_the_cache_stays_within_its_limit(device, thin_model):
    policy = Policy(made.recipe(thin_model))
    limit = 3 * 2 * page_bytes(policy) + 1
    engine = LocalEngine(policy, max_context=PAGE + 20, slots=8, cache_bytes=limit)
    assert engine.capacity == 3
    engine.load_weights(1)
    # Each sequence begins its second page while it is decoded.
    assert [len(done.ids) for done in sampled(engine, 8, requests=7, prompt=PAGE - 3)] == [8] * 7
    stored = [tensor for store in (engine._cache.keys, engine._cache.values) for tensor in store.values()]
    assert limit - 1 == sum(tensor.nbytes for tensor in stored) == engine.counters.cache_bytes
    with pytest.raises(InputError, match=r"engine.cache_bytes .* a sequence of 200 tokens"):
        LocalEngine(policy, max_context=200, cache_bytes=page_bytes(policy))


def test_weights_for_vllm_come_from_the_device(device, thin_model, monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True), raising=False)
    policy = Policy(made.recipe(thin_model, lora={"rank": 4}))
    replica = Made("a")
    monkeypatch.setattr("posttrain.engines.vllm.engine.BUCKET_BYTES", 2**20)
    engine = VllmEngine(policy, VllmEngineRecipe(adapters="merged"), [replica])
    monkeypatch.setattr(replica, "finish_weights", lambda: asyncio.sleep(0, []))
    engine.load_weights(1)
    names = set(dict(policy.weights()))
    assert set(replica.got) == names
    assert {tensor.dtype for tensor in replica.got.values()} == {torch.bfloat16}
    assert len(freed) == 3
    engine.close()
