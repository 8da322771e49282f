"""Exports load in the programs that they are for and compute what the model computes; cards have the facts of the run."""

import hashlib

import pytest
import torch
import yaml

from posttrain.cli.main import main
from posttrain.errors import InputError, RunError
from posttrain.publishing import gguf as writer
from posttrain.publishing.card import model_card
from posttrain.publishing.export import export_run
from posttrain.publishing.gguf import load_gguf, pre_tokenizer, write_gguf
from tests.conftest import save_tiny_model

IDS = torch.tensor([[5, 9, 200, 31, 7]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def causal(path, **more):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more)


def metadata(text):
    return yaml.safe_load(text.split("---")[1])


def test_an_export_in_shards_is_the_model(played, tmp_path):
    files = export_run(played, "hf", tmp_path / "out", shard_gigabytes=4e-5)
    shards = [file.name for file in files if file.suffix == ".safetensors"]
    assert len(shards) > 1
    assert (tmp_path / "out/model.safetensors.index.json").is_file()
    assert {"README.md", "recipe.yaml", "config.json", "tokenizer.json"} <= {file.name for file in files}
    assert torch.equal(logits(causal(tmp_path / "out")), logits(causal(played.path / "model")))


def test_the_card_has_results_intervals_baselines_and_the_licence_of_the_base_model(played, folder):
    card = model_card(played)
    found = metadata(card)
    assert found["license"] == "mit"
    assert found["pipeline_tag"] == "text-generation"
    assert "| random policy | 50.0% exact |" in card or "| random policy |" in card
    assert "| optimal policy | 100.0% exact |" in card
    (trained,) = [line for line in card.splitlines() if line.startswith("| trained model")]
    assert "%" in trained
    assert "[" in trained
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe["name"] == "played"
    assert recipe["environment"]["type"] == "bandit"
    assert metadata(model_card(played, "apache-2.0"))["license"] == "apache-2.0"


def test_the_card_has_the_hashes_of_the_data(adapted, folder):
    card = model_card(adapted)
    digest = hashlib.sha256((folder / "rows.jsonl").read_bytes()).hexdigest()
    assert f"| `data.train` | `{folder}/rows.jsonl` | `{digest}` |" in card
    assert metadata(card)["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM" in card


def test_adapters_are_exported_for_peft(adapted, tmp_path):
    from peft import AutoPeftModelForCausalLM

    export_run(adapted, "hf", tmp_path / "out")
    found, expected = (
        logits(AutoPeftModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        for path in (tmp_path / "out", adapted.path / "model")
    )
    assert torch.equal(found, expected)
    with pytest.raises(InputError, match=r"GGUF needs whole weights; train with model\.lora\.export=merged"):
        export_run(adapted, "gguf", tmp_path / "gguf")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "f32"), ("llama", "q8_0"), ("qwen2", "f16"), ("qwen3", "f32"), ("qwen3", "bf16")],
)
def test_a_gguf_file_computes_what_the_model_computes(architecture, kind, tmp_path):
    """Loaded again by transformers, outside of the writer's own check."""
    from transformers import AutoTokenizer

    save_tiny_model(tmp_path / "model", architecture, seed=3)
    check = write_gguf(tmp_path / "model", tmp_path / "out.gguf", kind)
    expected = logits(causal(tmp_path / "model"))
    loaded, ours = load_gguf(tmp_path / "out.gguf", head_dim=8)
    found = logits(loaded)
    limit = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2, "q8_0": 5e-2}[kind]
    assert float((expected - found).pow(2).mean().sqrt() / expected.std()) < limit
    assert check.difference < limit
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Goal, 3 x 14!\n naïve"
    assert ours(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_a_file_that_computes_something_else_is_deleted(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "model", "llama", seed=3)
    original = writer._tensors
    monkeypatch.setattr(writer, "_tensors", lambda model, permuted: original(model, False))
    with pytest.raises(RunError, match=r"the logits of the written file differ by .*% from those of the model"):
        write_gguf(tmp_path / "model", tmp_path / "out.gguf", "f32")
    assert not (tmp_path / "out.gguf").exists()


def test_tokenizers_have_the_names_of_llama_cpp():
    digits = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}],
    }
    assert pre_tokenizer({"model": {"type": "BPE"}, "pre_tokenizer": digits}, "m") == "smollm"
    for pattern, name in ((r"\p{L}+|\p{N}| ?[^\s]+", "qwen2"), (r"\p{L}+|\p{N}{1,3}| ?[^\s]+", "llama-bpe")):
        split = {"type": "Split", "pattern": {"Regex": pattern}}
        steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}
        assert pre_tokenizer({"model": {"type": "BPE"}, "pre_tokenizer": steps}, "m") == name
    with pytest.raises(InputError, match="byte-level BPE tokenizers only"):
        pre_tokenizer({"model": {"type": "Unigram"}}, "m")
    with pytest.raises(InputError, match="no name for how this tokenizer splits text"):
        pre_tokenizer({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Whitespace"}}, "m")


def test_a_gguf_export_has_its_own_card(played, tmp_path, capsys):
    assert main(["export", str(played.path), "--to", "gguf", "--out", str(tmp_path / "out"), "--type", "f32"]) == 0
    assert (tmp_path / "out/played.gguf").is_file()
    card = (tmp_path / "out/README.md").read_text()
    assert metadata(card)["library_name"] == "gguf"
    assert "from_pretrained" not in card
    assert "checked: logits of the loaded file differ by" in capsys.readouterr().out


def test_a_folder_that_is_used_and_an_unknown_form_are_refused(played, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="exists and is not an empty folder; choose another --out"):
        export_run(played, "hf", tmp_path)
    with pytest.raises(InputError, match="--to onnx is not supported; use hf, gguf"):
        export_run(played, "onnx", tmp_path / "out")
