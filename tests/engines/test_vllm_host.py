"""vLLM's host over an engine that samples fixed tokens."""

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.host import Host
from posttrain.engines.vllm.settings import Settings, engine_arguments
from posttrain.recipe.rollout import SamplingRecipe


class MadeAsyncEngine:
    """Samples 5, 6, 7, in outputs of `interval` tokens or in one output at the end, as the parameters say."""

    def __init__(self, interval=1, experts=False):
        self.experts = experts
        self.outputs = 0
        self.interval = interval
        self.aborted = []

    async def abort(self, name):
        self.aborted.append(name)

    async def generate(self, prompt, parameters, name, lora_request=None):
        interval = 3 if parameters.output_kind == "final" else self.interval
        parts = [[5, 6, 7][start : start + interval] for start in range(0, 3, interval)]
        for part in parts:
            self.outputs += 1
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in part]
            done = part[-1] == 7
            # Of three prompt tokens and all sampled ones but the last, at two layers.
            experts = np.arange(20, dtype=np.uint8).reshape(5, 2, 2) if self.experts and done else None
            output = SimpleNamespace(token_ids=part, logprobs=logprobs, routed_experts=experts)
            yield SimpleNamespace(num_cached_tokens=2, outputs=[output], finished=done)


@pytest.fixture
def answered(monkeypatch):
    """Samples one completion with a host over the given engine."""
    kinds = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **keys: SimpleNamespace(**keys)))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=kinds))

    def answer(engine, stream, stop_strings=()):
        host = Host(Settings("m", stream=stream), engine, has_gpu=True)
        host.version, host._tokenizer = 4, SimpleNamespace(decode=lambda ids: "".join(map(str, ids)))
        job = {"prompt_ids": [1, 2, 3], "seed": 0, "max_tokens": 8, "end_tokens": [7], "stop_strings": stop_strings}
        return asyncio.run(host.generate(job | SamplingRecipe().model_dump()))

    return answer


@pytest.mark.parametrize(("stream", "outputs"), [(False, 1), (True, 3)])
def test_answers_return_whole_where_weights_change_between_requests_alone(stream, outputs, answered):
    engine = MadeAsyncEngine()
    found = answered(engine, stream)
    assert found["ids"] == [5, 6, 7]
    assert found["versions"] == [4, 4, 4]
    assert (found["stop_reason"], found["reused"]) == ("end_token", 2)
    assert engine.outputs == outputs


def test_tokens_after_a_stop_string_are_left_out(answered):
    assert engine_arguments(Settings("m", stream=False), has_gpu=True)["stream_interval"] > 1
    assert engine_arguments(Settings("m", stream=True), has_gpu=True)["stream_interval"] == 1
    engine = MadeAsyncEngine(interval=2)
    found = answered(engine, stream=False, stop_strings=["5"])
    assert (found["ids"], found["logprobs"], found["stop_reason"]) == ([5], [-0.5], "stop_string")
    assert engine.aborted == ["request-0"]


@pytest.mark.parametrize("stream", [False, True])
def test_experts_come_with_the_last_tokens(stream, answered):
    assert "experts" not in answered(MadeAsyncEngine(), stream)
    shape, numbers = answered(MadeAsyncEngine(experts=True), stream)["experts"]
    policy = SimpleNamespace(routing=SimpleNamespace(layers=[1]))
    experts = VllmEngine._experts(SimpleNamespace(policy=policy), shape, numbers)
    assert experts.tolist() == [[[4 * token + 2, 4 * token + 3]] for token in range(5)]
    cut = answered(MadeAsyncEngine(experts=True), stream, ["6"])
    assert ("experts" in cut, cut["ids"]) == (False, [5, 6])
