"""Loading models: every form of `model.path`, adapters, exports, and everything that can be wrong."""

import io
import json
import os
import shutil
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.errors import InputError
from posttrain.models.load import load_model, load_tokenizer, resolve_device, resolve_dtype, resolve_path
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.rl import RlRecipe
from posttrain.training.checks import check_recipe
from posttrain.training.stage import precision_notes
from tests.conftest import make_tokenizer, save_tiny_model
from tests.models.families import files, logprobs, moved, save_family, transformers_logprobs

IDS = np.arange(3, 40)
MASK = np.arange(37) > 4


def copy(model, target):
    return shutil.copytree(model, target / "copy")


def test_models_that_are_missing_truncated_or_incomplete_are_named(tiny_model, tmp_path, monkeypatch):
    offline = OSError("no network")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: (_ for _ in ()).throw(offline))
    truncated, incomplete = copy(tiny_model, tmp_path), shutil.copytree(tiny_model, tmp_path / "incomplete")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    tensors = load_file(incomplete / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, incomplete / "model.safetensors", metadata={"format": "pt"})
    for path, message in {
        tmp_path / "nowhere": r"model.path: there is no folder .*nowhere; train the model first",
        "nobody/nothing": r"there is no folder nobody/nothing, it is not in the local cache, .*OSError: no network",
        truncated: r"model.path: .* could not be loaded ",
        incomplete: r"lacks 1 weights, the first of them model.norm.weight",  # not initialized at random
    }.items():
        with pytest.raises(InputError, match=message):
            load_model(ModelRecipe(path=str(path)))
    for path, message in (("packaged:gpt-9", r"gpt-9..*smollm2-135m"), ("missing.gguf", r"missing.gguf")):
        with pytest.raises(InputError, match=message):
            resolve_path(path)


def test_a_tokenizer_without_chat_template_is_named_and_can_be_given_one(tiny_model, tmp_path):
    bare = copy(tiny_model, tmp_path)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"no chat template; .*model.chat_template"):
        load_tokenizer(ModelRecipe(path=str(bare)))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert (
        load_tokenizer(ModelRecipe(path=str(bare), chat_template=str(template))).chat_template == template.read_text()
    )


@pytest.mark.parametrize(
    "entries",
    [
        [(9, struct.pack("<IQ", 0, 1 << 33))],
        [(9, struct.pack("<IQ", 8, 1 << 30))],
        [(8, struct.pack("<Q", 1 << 32))],
        [(9, struct.pack("<IQ", 4, 1 << 22) + bytes(4 << 22)), (9, struct.pack("<IQ", 1, (1 << 22) + 1))],
    ],
    ids=["numbers", "texts", "text", "two"],
)
def test_gguf_metadata_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, entries):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "bomb.gguf"
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    for number, (kind, value) in enumerate(entries):
        content += struct.pack("<Q", 2) + b"k%d" % number + struct.pack("<I", kind) + value
    file.write_bytes(content)
    os.truncate(file, 1 << 26)  # sparse, and little to digest
    peaks = []
    for _ in range(3):  # threads of other tests in this process are measured as well
        tracemalloc.start()
        with pytest.raises(InputError, match=r"metadata of \S+bomb.gguf has more than 8,388,608 values"):
            resolve_path(str(file))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 10 << 20
    file.write_bytes(b"GGUF" + b"\x00" * 64)
    with pytest.raises(InputError, match=r"bomb.gguf could not be read as a GGUF model"):
        resolve_path(str(file))


@pytest.mark.parametrize(("tokens", "rows"), [(["<tool>", "</tool>"], 0), (["<a>", "<b>"], 1), ([], -3)])
def test_tokens_beyond_the_embedding_are_named(tokens, rows, tmp_path):
    tokenizer = make_tokenizer()
    rows += len(tokenizer)
    tokenizer.add_tokens(tokens, special_tokens=True)
    path = save_family(tmp_path / "model", "qwen2", tokenizer, vocab_size=rows)
    beyond = [token for token, number in tokenizer.get_vocab().items() if number >= rows]
    assert beyond
    rows_file = tmp_path / "rows.jsonl"
    rows_file.write_text('{"prompt": "Up?", "completion": "Down"}\n')
    recipe = load_recipe([], [f"model.path={path}", f"data.train={rows_file}"], "sft")
    for load in (Policy, RewardModel, lambda _: check_recipe(recipe)):
        with pytest.raises(InputError, match=r"model\.path: .*resize") as error:
            load(str(path))
        assert all(repr(token) in str(error.value) for token in beyond)


def test_a_token_of_images_needs_no_row_of_the_embedding(tmp_path):
    """Gemma 3 of 1B is published so."""
    tokenizer = make_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    path = save_family(tmp_path / "model", "qwen2", tokenizer, vocab_size=rows)
    with pytest.raises(InputError, match="image_soft_token"):
        Policy(str(path))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_token": "<image_soft_token>"}))
    Policy(str(path))


@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=4), LoraRecipe(rank=4, export="adapter")])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_are_saved_exported_and_sent_bit_for_bit_and_transformers_scores_the_same(lora, architecture, tmp_path):
    path = str(save_tiny_model(tmp_path / "model", architecture))
    policy = moved(Policy(ModelRecipe(path=path, lora=lora)), 0.05)
    mine = logprobs(policy, [IDS], [MASK])
    policy.export(tmp_path / "export")
    if lora is not None and lora.export == "adapter":
        assert json.loads((tmp_path / "export" / "adapter_config.json").read_text())["r"] == 4
        model, sent = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "export"), dict(policy.adapter_weights())
    else:
        model, sent = AutoModelForCausalLM.from_pretrained(tmp_path / "export"), dict(policy.weights())
    torch.testing.assert_close(mine, transformers_logprobs(model, [IDS], [MASK]), atol=1e-4, rtol=0)
    written = files(tmp_path / "export")
    assert sorted(sent) == sorted(written)
    assert [name for name in sent if not torch.equal(sent[name], written[name])] == []
    again = Policy(ModelRecipe(path=str(tmp_path / "export")))
    torch.testing.assert_close(logprobs(again, [IDS], [MASK]), mine, atol=1e-4, rtol=0)
    policy.save(tmp_path / "saved")
    other = Policy(ModelRecipe(path=path, lora=lora), seed=5)
    other.restore(tmp_path / "saved")
    for (name, one), (_, theirs) in zip(policy.trainable(), other.trainable(), strict=True):
        assert torch.equal(one, theirs), name


@pytest.mark.parametrize("kind", [Policy, RewardModel])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_weights_of_experts_restore_bit_for_bit_and_are_exported_as_the_family_names_them(family, kind, tmp_path):
    base = str(save_family(tmp_path / "base", family))
    model, other = moved(kind(base), 0.05), kind(base)
    model.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    model.export(tmp_path / "exported")
    # The policy of a checkpoint is a model, too.
    again = [kind(str(tmp_path / folder)).model.state_dict() for folder in ("saved", "exported")]
    for name, value in model.model.state_dict().items():
        assert all(torch.equal(value, state[name]) for state in (other.model.state_dict(), *again)), name
    names = [set(files(tmp_path / folder)) for folder in ("base", "exported")]
    assert {name for name in names[0] ^ names[1] if "experts" in name} == set()


def test_a_dry_run_checks_the_targets_of_adapters(tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Up?", "completion": "Down"}\n')
    experts = save_family(tmp_path / "experts", "mixtral")

    def lines(path, targets):
        keys = [f"model.path={path}", f"model.lora.targets={targets}", f"data.train={rows}"]
        return check_recipe(load_recipe([], keys, "sft"))

    assert [line for line in lines(tiny_model, "all-linear") if "lora" in line] == []
    for targets in ("[q_proj,v_porj]", "[lm_head]"):
        with pytest.raises(InputError, match=r"model\.lora\.targets"):
            lines(tiny_model, targets)
    assert len([line for line in lines(experts, "[q_proj]") if "model.lora.targets" in line]) == 1


def test_a_missing_gpu_is_an_error_unless_the_device_is_auto(tiny_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"model.device: .*cuda"):
        load_model(ModelRecipe(path=str(tiny_model), device="cuda"))
    assert next(load_model(ModelRecipe(path=str(tiny_model))).parameters()).device.type == "cpu"


def test_the_dtype_is_bfloat16_where_the_hardware_and_the_library_multiply_it(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert resolve_device("auto") == resolve_device("cuda") == gpu
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("auto", gpu) == resolve_dtype(None, gpu) == torch.bfloat16
    assert resolve_dtype(None, cpu) == torch.float32
    for processor, library in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda processor=processor: processor)
        monkeypatch.setattr("posttrain.models.load.onednn_multiplies", lambda dtype, library=library: library)
        assert resolve_dtype("auto", cpu) == (torch.bfloat16 if processor and library else torch.float32)


@pytest.mark.parametrize("slow_path", [True, False])
def test_bfloat16_that_onednn_refuses_takes_the_slow_path_or_is_an_error(slow_path, tiny_model, monkeypatch):
    """As on a processor whose instructions ONEDNN_MAX_CPU_ISA hides: products fail until oneDNN is switched off."""
    switched = []
    plain = torch.nn.functional.linear

    def refused(*arguments):
        if not (switched and slow_path):
            raise RuntimeError("could not create a primitive descriptor for a matmul primitive")
        return plain(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", refused)
    monkeypatch.setattr(torch.backends.mkldnn, "set_flags", switched.append)
    recipe = ModelRecipe(path=str(tiny_model), dtype="bfloat16", device="cpu")
    if slow_path:
        assert next(load_model(recipe).parameters()).dtype == torch.bfloat16
    else:
        with pytest.raises(InputError, match=r"^model.dtype: PyTorch cannot multiply bfloat16 .*; use float32$"):
            load_model(recipe)
    assert switched == [False]


def test_a_run_reports_the_precision_that_is_selected_and_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    def notes(**keys):
        return precision_notes(RlRecipe(environment={"type": "bandit"}, **keys))

    settings = {"model": {"dtype": "auto", "device": "cpu"}, "reward": {"path": "x", "dtype": "bfloat16"}}
    for native, expected in (
        (True, [("dtype auto", "bfloat16")]),
        (False, [("dtype auto", "float32"), ("reward.dtype", "float32")]),
    ):
        monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device, native=native: native)
        assert all(
            key in note and dtype in note for note, (key, dtype) in zip(notes(**settings), expected, strict=True)
        )
    assert notes(model={"device": "cpu"}) == []
    monkeypatch.setattr("posttrain.training.stage.NVIDIA_DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (note,) = notes()
    assert note.startswith("model.device auto is cpu although this machine has an NVIDIA driver: torch ")
    assert "is built without CUDA" in note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert notes() == []
    monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device: True)
    monkeypatch.setattr("posttrain.models.load.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert notes() == ["model.dtype is bfloat16 on NVIDIA H100; set it to float32 for full precision"]


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM


Path({mark!r}).write_text("yes")


class OwnConfig(LlamaConfig):
    model_type = "own"


class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_a_models_files_runs_only_if_the_recipe_says_so(tiny_model, tmp_path, monkeypatch):
    folder, mark = tmp_path / "own", tmp_path / "mark"
    shutil.copytree(tiny_model, folder)
    (folder / "modeling_own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "architectures": ["Own"]}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"model\.trust_remote_code=true"):
        Policy(ModelRecipe(path=str(folder)))
    assert not mark.exists()
    Policy(ModelRecipe(path=str(folder), trust_remote_code=True))
    assert mark.exists()
