"""Every model is exact or refused: the gate's choices, and the distances of what it chose."""

import asyncio
import json
import warnings

import numpy as np
import pytest
import torch
from benchmarks.harness import tiny_families

from posttrain.engines.local import gate as engine_gate
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.errors import InputError
from posttrain.models import gate
from posttrain.models.critic import Critic
from posttrain.models.forward import base_decoder, path_of
from posttrain.models.packing import PackedLayout, row_length
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from tests.conftest import make_tokenizer
from tests.models import families
from tests.models.families import save_family

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = 1e-3
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": 32,
    "factor": 16.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def saved(kind, folder):
    """The directory of a tiny model of `kind`, whose outputs show mistakes."""
    tokenizer = make_tokenizer()
    tiny_families.save_tiny(kind, folder, len(tokenizer))
    tokenizer.save_pretrained(folder)
    return str(folder)


def saved_llama(folder, original=32, **keys):
    return str(save_family(folder, "llama", max_position_embeddings=original, intermediate_size=64, **keys))


def rows(*counts):
    random = np.random.default_rng(0)
    streams = [random.integers(10, 300, count) for count in counts]
    return streams, [np.arange(count) > 2 for count in counts]


def logprobs(policy, streams, masks):
    return families.logprobs(policy, streams, masks).numpy()


def each_alone(policy, streams, masks):
    return np.concatenate([logprobs(policy, [ids], [mask]) for ids, mask in zip(streams, masks, strict=True)])


def of_transformers(directory, streams, masks):
    """Log-probabilities by transformers, each predicted by a pass over the tokens before it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    scores = []
    with torch.no_grad():
        for ids, mask in zip(streams, masks, strict=True):
            for at in np.flatnonzero(mask):
                before = torch.from_numpy(ids[:at])[None]
                scores.append(model(input_ids=before, use_cache=False).logits[0, -1].log_softmax(-1)[ids[at]])
    return torch.stack(scores).numpy()


def sampled(policy, counts=(9, 30, 50), tokens=10):
    """Streams, masks and log-probabilities of two turns that the local engine samples."""
    engine = LocalEngine(policy, slots=4)
    engine.load_weights(0)

    async def play():
        prompts, turns = [tuple(ids.tolist()) for ids in rows(*counts)[0]], []
        for turn in range(2):
            asked = [Request(p, SamplingRecipe(), 10 * turn + i, tokens) for i, p in enumerate(prompts)]
            answers = await asyncio.gather(*(engine.generate(request) for request in asked))
            turns += zip(prompts, answers, strict=True)
            prompts = [p + answer.ids + (11, 12, 13) for p, answer in zip(prompts, answers, strict=True)]
        return turns

    turns = asyncio.run(play())
    streams = [np.array(prompt + answer.ids) for prompt, answer in turns]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, (prompt, _) in zip(streams, turns, strict=True)]
    return engine, streams, masks, np.concatenate([np.array(answer.logprobs) for _, answer in turns])


PATHS = {
    "llama": (True, "paged"),
    "gemma2": (True, "paged"),  # soft caps, windows
    "gemma4_text": (True, "paged"),  # heads of several sizes
    "gpt_oss": (True, "paged"),  # sinks
    "deepseek_v3": (True, "paged"),  # values narrower than keys
    "qwen3_5_text": (True, "cached"),
    "lfm2": (True, "cached"),
    "stablelm": (False, "cached"),
    "bloom": (False, "cached"),
    "llama4_text": (False, "cached"),
    "nemotron_h": (False, "whole"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_packed_rows_engine_and_transformers_agree(kind, tmp_path):
    directory = saved(kind, tmp_path)
    policy = Policy(directory)
    engine, streams, masks, theirs = sampled(policy)
    assert (path_of(policy.model).packed, engine._parts.kind) == PATHS[kind]
    if kind == "stablelm":  # caches of single sequences have no limit
        with pytest.raises(InputError, match=r"engine\.cache_bytes"):
            LocalEngine(policy, cache_bytes=1 << 20)
    ours = logprobs(policy, streams, masks)
    assert np.abs(ours - theirs).max() < LIMIT
    assert np.abs(ours - each_alone(policy, streams, masks)).max() < LIMIT
    few, their_masks = rows(40, 25)
    few[1][:15] = few[0][:15]
    assert np.abs(logprobs(policy, few, their_masks) - of_transformers(directory, few, their_masks)).max() < LIMIT


@pytest.mark.parametrize("kind", ["qwen3_5_text", "stablelm", "gemma2"])
def test_gradients_do_not_depend_on_neighbours(kind, tmp_path):
    policy = Policy(saved(kind, tmp_path))
    streams, masks = rows(40, 25, 33)
    streams[1][:15] = streams[0][:15]
    masks[1][:20] = False

    def gradients(groups):
        policy.model.zero_grad()
        for group in groups:
            scores = policy.score([streams[i] for i in group], [masks[i] for i in group], 1.0, 64)
            scores.logprobs.sum().backward()
        return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}

    packed, alone = gradients([(0, 1, 2)]), gradients([(0,), (1,), (2,)])
    assert packed.keys() == alone.keys()
    for name in packed:
        scale = alone[name].abs().max()
        assert (packed[name] - alone[name]).abs().max() <= 1e-4 * scale + 1e-6, name


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_positions_depend_on_a_streams_own_length(rope, tmp_path):
    directory = saved_llama(tmp_path, rope_parameters=rope)
    policy = Policy(directory)
    streams, masks = rows(20, 60, 33, 45)
    streams[3][:30] = streams[1][:30]
    ours = logprobs(policy, streams, masks)
    assert np.abs(ours - of_transformers(directory, streams, masks)).max() < LIMIT
    assert np.abs(ours - each_alone(policy, streams, masks)).max() < LIMIT
    engine, streams, masks, theirs = sampled(policy, (9, 25, 40))
    assert engine._parts.kind == "paged"
    assert np.abs(logprobs(policy, streams, masks) - theirs).max() < LIMIT


def test_reward_prefixes_have_the_frequencies_of_their_length(tmp_path):
    model = RewardModel(saved_llama(tmp_path, rope_parameters=LONGROPE))
    streams, _ = rows(50)
    lengths = np.array([10, 31, 32, 45])
    found = model.prefix_rewards(streams, [lengths])[0]
    for value, length in zip(found, lengths, strict=True):
        ids = np.append(streams[0][:length], model.end_token)
        with torch.no_grad():
            whole = model.rewards([ids], [np.arange(len(ids)) > 0])
        assert abs(float(whole) - value) < 1e-5


@pytest.mark.parametrize(
    ("kind", "named"),
    [("doge",) * 2, ("cpmant",) * 2, ("reformer",) * 2, ("mllama", "mllama_text_model"), ("bert",) * 2],
)
def test_models_that_are_not_causal_are_refused_by_name(kind, named, tmp_path):
    directory, file = saved(kind, tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ({"is_decoder": False} if kind == "bert" else {})))
    with pytest.raises(InputError, match=named):
        Policy(directory)


def test_a_fault_of_packed_attention_is_not_used(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    attend = PackedLayout.attend

    def without_prefix(self, *arguments):
        self.segments = [segment._replace(before=()) for segment in self.segments]
        return attend(self, *arguments)

    monkeypatch.setattr(PackedLayout, "attend", without_prefix)
    with pytest.warns(UserWarning, match="llama"):
        policy = Policy(str(tiny_model))
    assert not path_of(policy.model).packed


def test_a_fault_of_the_engine_is_not_used(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    layout = engine_gate.CachedLayout

    class Shifted(layout):
        def attend_fused(self, layer, heads, kv_heads, kernel, angles, *others):
            return super().attend_fused(layer, heads, kv_heads, kernel, angles[::-1], *others)

        def attend_tokens(self, layer, heads):
            return super().attend_tokens(layer, heads._replace(key=heads.key.flip(-1)))

    monkeypatch.setattr(engine_gate, "CachedLayout", Shifted)
    engine = LocalEngine(tiny_policy, slots=4)
    assert engine._parts.kind == "cached"


def test_verdicts_are_measured_once_for_the_same_weights(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    first = LocalEngine(Policy(str(tiny_model)))
    monkeypatch.setattr(gate, "_exact_path", None)
    monkeypatch.setattr(engine_gate, "_verdict", None)
    again = LocalEngine(Policy(str(tiny_model)))
    assert again._parts.kind == first._parts.kind
    again.policy.model.model.norm.weight.data.mul_(2)
    with pytest.raises(TypeError):
        gate.choose_path(again.policy.model, tmp_path / "gate")


def test_weights_in_bfloat16_are_compared_in_float32(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    seen = []
    outputs = gate._outputs

    def seeing(model, rows):
        seen.append(next(model.parameters()).dtype)
        return outputs(model, rows)

    monkeypatch.setattr(gate, "_outputs", seeing)
    policy = Policy(str(tiny_model), dtype="bfloat16")
    assert seen == [torch.float32]
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["jamba", "falcon_h1"])
def test_adapters_leave_out_weights_that_state_spaces_read(kind, tmp_path):
    directory = saved(kind, tmp_path)
    policy = Policy(directory, lora={"rank": 2})
    policy.score(*rows(30), 1.0, 64).logprobs.sum().backward()
    assert [name for name, parameter in policy.trainable() if parameter.grad is None] == []
    with pytest.raises(InputError, match=r"out_proj|dt_proj"):
        Policy(directory, lora={"rank": 2, "targets": ["out_proj" if kind == "falcon_h1" else "dt_proj"]})


@pytest.mark.parametrize("kind", ["nemotron_h", "mamba2"])
def test_limits_of_time_steps_that_no_short_row_reaches_are_compared(kind, tmp_path):
    directory = saved(kind, tmp_path)
    file = tmp_path / "config.json"
    limits = {"time_step_min": 1e-9, "time_step_limit": [1e-9, 1e9]}
    file.write_text(json.dumps(json.loads(file.read_text()) | limits))
    assert LocalEngine(Policy(directory))._parts.kind == "whole"


def test_a_pass_leaves_no_graph_in_the_model(tmp_path):
    policy = Policy(saved("recurrent_gemma", tmp_path), gradient_checkpointing=True)
    streams, masks = rows(20)
    with policy.training_mode():
        scores = policy.score(streams, masks, 1.0, 64).logprobs
        scores.sum().backward()
    assert np.array_equal(logprobs(policy.replica(), streams, masks), scores.detach().numpy())


def test_passes_of_long_streams_fit_the_batch(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="beyond 32"):
        policy = Policy(saved_llama(tmp_path, rope_parameters=DYNAMIC))
    streams, masks = rows(40, 20, 36)
    streams[2][:30] = streams[0][:30]
    decoder, tokens = policy.model.model, []

    def gradients():
        policy.model.zero_grad()
        scores = policy.score(streams, masks, 1.0, 64).logprobs
        scores.sum().backward()
        return [scores.detach(), *(parameter.grad.clone() for parameter in policy.model.parameters())]

    def count(module, inputs, named):
        tokens.append(named["input_ids"].shape[1])

    decoder.register_forward_pre_hook(count, with_kwargs=True)
    split = gradients()
    assert max(tokens) <= row_length(streams) == 66
    monkeypatch.setattr(PackedLayout, "parts", lambda self: [])
    tokens.clear()
    whole = gradients()
    assert max(tokens) > 200
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba", "xlstm"])
def test_caches_are_continued_by_the_names_that_transformers_uses(kind, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", FutureWarning)
        engine, *_ = sampled(Policy(saved(kind, tmp_path)), (9,), 4)
    assert engine._parts.kind == "cached"


def saved_whole(kind, folder):
    """The directory of a tiny composite model with all of its parts, and with numbers that show mistakes."""
    import transformers

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = tiny_families.shrunk(transformers.CONFIG_MAPPING[kind](), len(tokenizer))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        tiny_families.randomize(model, 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("save", [saved, saved_whole])
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_reward_models_and_critics_read_the_text_of_composite_models(kind, save, tmp_path):
    import transformers

    directory = save(kind, tmp_path / "model")
    streams, masks = rows(20, 33)
    with torch.no_grad():
        model = RewardModel(directory)
        ours = model.rewards(streams, masks)
        assert torch.isfinite(Critic(directory).values(streams, masks)).all()
        policy = Policy(directory, trained=False)
        one, other = (base_decoder(each.model).get_input_embeddings().weight for each in (policy, model))
        assert torch.equal(one, other)
        with policy.as_reference():
            reference = logprobs(policy, streams, masks)
        assert np.array_equal(reference, logprobs(policy, streams, masks))
        model.export(tmp_path / "exported")
        again = RewardModel(tmp_path / "exported", new_head=False).rewards(streams, masks)
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
        scores = torch.stack([theirs(input_ids=torch.from_numpy(ids)[None]).logits[0, 0] for ids in streams])
    assert ours.std() > 1e-2
    assert torch.allclose(ours, again, atol=1e-6)
    assert torch.allclose(ours, scores, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama4", "got_ocr2", "bert"])
def test_models_without_a_head_for_rewards_are_refused_with_the_reason(kind, tmp_path):
    reason = "no linear head `score`" if kind == "bert" else "no AutoModelForSequenceClassification"
    directory = saved(kind, tmp_path)
    for build in (RewardModel, Critic):
        with pytest.raises(InputError, match=reason):
            build(directory)


def test_targets_that_cannot_have_adapters_are_named_with_their_type(tmp_path):
    directory = saved("gpt_oss", tmp_path)
    for target in ("router", "input_layernorm", "sinks"):
        with pytest.raises(InputError, match=rf"'{target}' is of type (GptOssTopKRouter|GptOssRMSNorm|Parameter)"):
            Policy(directory, lora={"rank": 2, "targets": [target]})


KINDS = "jamba mamba2 falcon_h1 lfm2 rwkv xlstm gemma2 gpt_oss mixtral llama4 nemotron_h"
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS.split()]


@pytest.mark.parametrize("kind", ["llama", "stablelm", "qwen3_5_text", "deepseek_v3", *SLOW])
def test_adapters_do_not_change_the_verdict(kind, tmp_path):
    """Adapters that move predictions by nats: packed, alone, the engine and the exported model agree."""
    directory = saved(kind, tmp_path / "model")
    policy = Policy(directory, lora={"rank": 4})
    torch.manual_seed(1)
    with torch.no_grad():
        for name, factor in policy.trainable():
            if "lora_B" in name:
                factor.normal_(0, 0.3)
    _, streams, masks, theirs = sampled(policy, (9, 30), 8)
    ours = logprobs(policy, streams, masks)
    policy.export(tmp_path / "exported")
    exported = logprobs(Policy(str(tmp_path / "exported")), streams, masks)
    with policy.as_reference():
        assert np.abs(ours - logprobs(policy, streams, masks)).max() > 0.5
    assert np.abs(ours - each_alone(policy, streams, masks)).max() < LIMIT
    assert np.abs(ours - theirs).max() < LIMIT
    assert np.abs(ours - exported).max() < LIMIT
    policy.score(streams, masks, 1.0, 64).logprobs.sum().backward()
    assert [name for name, factor in policy.trainable() if factor.grad is None or not factor.grad.any()] == []


def test_a_bfloat16_model_whose_last_norm_is_float32_is_scored_and_trained(tmp_path):
    policy = Policy(saved("mamba", tmp_path), dtype="bfloat16")
    streams, masks = rows(20, 12)
    scores = policy.score(streams, masks, 1.0, 64).logprobs
    scores.sum().backward()
    assert scores.isfinite().all()
    assert all(parameter.grad is not None for _, parameter in policy.trainable())
    with torch.no_grad():
        measured = policy.score(streams, masks, 1.0, 64, measure=lambda logprobs, _: logprobs.max(-1).values).logprobs
    torch.testing.assert_close(measured, scores.detach(), atol=0.1, rtol=0)


def test_a_verdict_belongs_to_all_weights(tiny_model):
    model = Policy(ModelRecipe(path=str(tiny_model), threads=1)).model
    key = gate.verdict_key(model)
    assert gate.verdict_key(model) == key
    weight = next(parameter for parameter in model.parameters() if parameter.numel() > 2_000)
    flat = weight.data.view(-1)
    changes = [
        lambda: flat.__setitem__([1_000, 1_001], flat[[1_001, 1_000]]),
        lambda: weight.data.__setitem__([3, 5], weight.data[[5, 3]]),
        lambda: weight.data.__setitem__((slice(None), [3, 5]), weight.data[:, [5, 3]]),
        lambda: model.register_buffer("bias", torch.tensor([5.0, -5.0])),
        lambda: model.bias.__setitem__([0, 1], model.bias[[1, 0]]),
    ]
    for change in changes:
        change()
        assert gate.verdict_key(model) != key
        key = gate.verdict_key(model)
