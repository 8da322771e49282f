"""LoRA adapters: which matrices they adapt, and that exports, engines and the policy are one model."""

import re

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.errors import InputError
from posttrain.models.adapters import adapted_beside_layers, check_targets
from posttrain.models.policy import Policy
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from tests.models.families import EXPERTS, files, logprobs, moved, save_family, transformers_logprobs
from tests.vllm.asking import WARM, answers, distance

WHOLE = re.compile(r"embed_tokens|lm_head|norm|bias|conv")
ROUTERS = re.compile(r"mlp\.gate\.weight|router")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, there = tmp_path_factory.mktemp("families"), {}

    def save(family, **keys):
        name = f"{family}-{keys}"
        return there.get(name) or there.setdefault(name, save_family(folder / str(len(there)), family, **keys))

    return save


def trained(path, seed=1, **lora):
    """A policy whose adapters have an effect."""
    return moved(Policy(ModelRecipe(path=str(path), lora=LoraRecipe(rank=4, **lora))), seed=seed)


IDS = [np.random.default_rng(length).integers(3, 250, length) for length in (11, 26)]
STREAMS = IDS, [np.arange(len(ids)) > 2 for ids in IDS]


CASES = [(family, "all-linear", "merged") for family in EXPERTS]
CASES += [(family, "all-linear", "adapter") for family in ("qwen3_moe", "mixtral", "phimoe")]
for case in (
    *(("llama", ["lm_head"]), ("qwen2", ["embed_tokens", "lm_head", "q_proj"]), ("llama", ["embed_tokens"])),
    *(("gpt2", ["wte", "c_attn"]), ("gpt2", "all-linear")),
):
    CASES += [(*case, "merged"), (*case, "adapter")]


@pytest.mark.parametrize(("family", "targets", "export"), CASES)
def test_policy_engine_and_export_are_one_model(family, targets, export, saved, tmp_path):
    policy = trained(saved(family), targets=targets, export=export)
    ours = logprobs(policy, *STREAMS)
    with policy.as_reference():
        assert (logprobs(policy, *STREAMS) - ours).abs().max() > 0.1
    policy.export(tmp_path / "exported")
    again = Policy(ModelRecipe(path=str(tmp_path / "exported")))
    torch.testing.assert_close(logprobs(again, *STREAMS), ours, atol=2e-5, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(saved(family) if export == "adapter" else tmp_path / "exported")
    theirs = PeftModel.from_pretrained(base, tmp_path / "exported") if export == "adapter" else base
    torch.testing.assert_close(transformers_logprobs(theirs, *STREAMS), ours, atol=2e-5, rtol=0)
    if export == "adapter":
        request = Request(tuple(IDS[0].tolist()), WARM, 3, 12)
        assert distance(policy, request, *answers(LocalEngine(policy), [request])) < 1e-4
        return
    initial, written, sent = files(saved(family)), files(tmp_path / "exported"), dict(policy.weights())
    assert sorted(sent) == sorted(written)
    assert [name for name in sent if not torch.equal(sent[name], written[name])] == []
    if family in EXPERTS:
        same = [name for name in written if torch.equal(written[name], initial[name])]
        assert [name for name in same if not WHOLE.search(name) and not ROUTERS.search(name)] == []


@pytest.mark.parametrize("later", [False, True])
def test_checkpoints_of_adapted_embeddings_contain_the_adapters_alone(later, saved, tmp_path):
    targets = ["embed_tokens", "lm_head"]
    policy = trained(saved("llama"), targets=targets)
    policy.save_later(tmp_path / "saved")() if later else policy.save(tmp_path / "saved")
    assert sum(tensor.numel() for tensor in files(tmp_path / "saved").values()) == sum(
        parameter.numel() for _, parameter in policy.trainable()
    )
    other = trained(saved("llama"), seed=2, targets=targets)
    other.restore(tmp_path / "saved")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.trainable(), other.trainable(), strict=True))
    assert [name for name, _ in policy.adapter_weights() if "base_layer" in name] == []


TIED = [["lm_head", "q_proj"], ["embed_tokens"], r".*(lm_head|q_proj)", ["model.embed_tokens", "v_proj"]]
REFUSED = [
    ("llama", ["q_proj", "v_porj"], "v_proj"),
    ("llama", ["q_proj", "self_attn.k_prj"], "k_proj"),
    ("llama", "q_proj", "q_proj"),
    ("llama", r".*\.query", "the model has"),
    ("llama", "[", "invalid regular expression"),
    ("llama", [], "the model has"),
    ("llama", ["q_proj", "input_layernorm"], "input_layernorm"),
    ("llama", ["layers.9.self_attn.q_proj"], "q_proj"),
    ("mixtral", ["q_proj", "gate_proj"], "gate_up_proj"),
    ("gpt2", ["c_atn"], "c_attn"),
    ("qwen3_moe", ["q_proj", "gate_proj"], "up_proj"),
    *((family, targets, "tied") for family in ("llama", "qwen2") for targets in TIED),
]


@pytest.mark.parametrize(("family", "targets", "named"), REFUSED)
def test_targets_of_nothing_and_of_tied_weights_are_refused_with_near_names(family, targets, named, saved):
    tied = {"tie_word_embeddings": True} if named == "tied" else {}
    recipe = ModelRecipe(path=str(saved(family, **tied)), lora=LoraRecipe(rank=4, targets=targets))
    for refuse in (Policy, lambda one: check_targets(one, reward=False)):
        with pytest.raises(InputError, match=r"lm_head|embed_tokens" if tied else re.escape(named)) as error:
            refuse(recipe)
        assert str(error.value).startswith("model.lora.targets: ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "targets", "left"),
    [
        ("mixtral", ["q_proj", "v_proj"], ["gate_up_proj", "down_proj"]),
        ("qwen2_moe", ["gate_proj", "q_proj"], ["gate_up_proj", "down_proj"]),
        ("granitemoe", ["down_proj"], ["gate_up_proj"]),
        ("granitemoe", ["gate_up_proj"], None),
        ("mixtral", ["w1", "w2", "w3"], None),
        ("jetmoe", ["input_linear", "output_linear"], None),
        ("llama", ["q_proj"], None),
        ("qwen3_moe", "all-linear", None),
    ],
)
def test_experts_without_adapters_are_a_warning(family, targets, left, saved):
    recipe = ModelRecipe(path=str(saved(family)), lora=LoraRecipe(rank=4, targets=targets))
    warnings = Policy(recipe).warnings
    assert warnings == check_targets(recipe, reward=False)
    assert len(warnings) == (left is not None)
    assert left is None or all(name in warnings[0] for name in left)


def test_a_learner_warns_of_experts_without_adapters(saved):
    from posttrain import Learner

    policy = Policy(str(saved("mixtral")), lora={"rank": 2, "targets": ["q_proj"]})
    with pytest.warns(UserWarning, match="experts"):
        Learner(policy)


def test_adapters_that_vllm_cannot_get_alone(saved):
    assert adapted_beside_layers(trained(saved("llama")).model) == []
    assert adapted_beside_layers(trained(saved("llama"), targets=["lm_head", "q_proj"]).model) == ["lm_head.weight"]
    assert any("experts" in name for name in adapted_beside_layers(trained(saved("mixtral")).model))


def test_adapters_of_experts_have_no_dropout(saved):
    recipe = ModelRecipe(path=str(saved("mixtral")), lora=LoraRecipe(rank=4, dropout=0.1))
    with pytest.raises(InputError, match=r"model\.lora\.dropout"):
        Policy(recipe)
