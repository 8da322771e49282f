"""Untrusted model directories: pickles, malformed configurations and archives end in one sentence, and run nothing."""

import json
import os
import pickle
import shutil

import pytest
import torch

from posttrain.errors import InputError
from posttrain.models.files import conversion_of
from posttrain.models.load import load_end_tokens, load_model, load_tokenizer
from posttrain.models.policy import Policy
from posttrain.planning.model_sizes import model_sizes
from posttrain.recipe.model import LoraRecipe, ModelRecipe


@pytest.fixture
def adapters(tiny_model, tmp_path):
    """Saved LoRA adapters of the tiny model."""
    Policy(ModelRecipe(path=str(tiny_model), lora=LoraRecipe(rank=2))).save(tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model."""
    return shutil.copytree(tiny_model, tmp_path / "copy")


def change(file, values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def refused(path, match, *loads):
    for load in loads or (load_model, load_tokenizer):
        with pytest.raises(InputError, match=match):
            load(ModelRecipe(path=str(path)))


def test_adapters_in_a_pickle_are_refused_and_not_run(adapters, tmp_path):
    (adapters / "adapter_model.safetensors").unlink()
    (adapters / "adapter_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    refused(adapters, r"its weights in adapter_model.bin, .* or with peft for adapters", load_model)
    assert not (tmp_path / "ran").exists()


def test_damaged_adapters_and_their_malformed_configuration_are_named(adapters):
    file, config = adapters / "adapter_model.safetensors", adapters / "adapter_config.json"
    file.write_bytes(file.read_bytes()[:200])
    refused(adapters, r"the adapters .* could not be loaded", load_model)
    for content in ("{", "[]", "{}", '{"base_model_name_or_path": 3}', "[" * 100_000):
        config.write_text(content)
        refused(adapters, r"adapter_config.json (cannot be read|is not a JSON object|has no text)", load_model)


@pytest.mark.parametrize("end", [[[2]], [{"id": 2}], {"a": 1}, "2", 2.5, [2, None, "x"], True])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_no_ids_are_named(model, end, file):
    if file == "config.json":
        (model / "generation_config.json").unlink()
    change(model / file, {"eos_token_id": end})
    with pytest.raises(InputError, match=r"model.path: "):
        load_end_tokens(str(model), load_tokenizer(ModelRecipe(path=str(model))))

    if (end, file) == ([[2]], "config.json"):
        refused(model, r"'eos_token_id': TypeError: Field 'eos_token_id' with value \[\[2\]\]", load_model)


PICKLES = ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "optimizer.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize("name", PICKLES)
def test_weights_in_a_pickle_are_refused_and_not_run(model, tmp_path, name):
    (model / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    if name == "pytorch_model.bin":  # not read beside safetensors
        load_model(ModelRecipe(path=str(model)))
    (model / "model.safetensors").unlink()
    refused(model, rf"its weights in {name}, a format that can run code; convert them")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../tiny/model.safetensors", "/dev/zero", "absent.safetensors", "", ".."])
def test_an_index_names_files_beside_it_only(model, tmp_path, name, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "tiny")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(model, "which is not a file beside it", load_model)


LARGE = [("num_hidden_layers", 10**7), ("num_hidden_layers", -(10**7)), ("text_config", {"num_hidden_layers": 10**7})]
LARGE += [("hidden_size", size) for size in (10**12, 1e300, float("inf"))]
LARGE += [(key, 10**9) for key in ("vocab_size", "intermediate_size", "num_attention_heads", "head_dim", "num_labels")]


@pytest.mark.parametrize(("key", "value"), LARGE)
def test_a_configuration_larger_than_the_weights_is_refused(model, key, value):
    change(model / "config.json", {key: value})
    loads = (load_model, load_tokenizer, lambda recipe: model_sizes(recipe.path))
    refused(model, r"which the weights beside it, .* do not have", *loads)


def test_impossible_sizes_and_a_configuration_that_is_no_object_are_refused_and_sizes_of_other_parts_are_not(model):
    config = model / "config.json"
    whole = config.read_text()
    for key in ("audio_chunk_size", "codebook_size", "n_ctx", "n_positions", "max_image_size"):
        change(config, {key: 480_000})
    assert load_model(ModelRecipe(path=str(model))).config.hidden_size == 32
    for key, value in (
        ("hidden_size", -4),
        ("vocab_size", 8.5),
        ("num_attention_heads", -1),
        ("num_key_value_heads", 0),
    ):
        config.write_text(whole)
        change(config, {key: value})
        refused(model, f"{key} {value}" if value else "could not be loaded", load_model)
    for content in ("[" * 100_000, "[]", "{", '{"a": ' * 100_000):
        config.write_text(content)
        refused(model, r"config.json (cannot be read|is not a JSON object)")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "x.model"])
def test_a_sparse_file_of_a_model_is_not_read(model, name):
    with (model / name).open("ab") as file:
        os.truncate(file.fileno(), 8 << 30)
    refused(model, rf"{name} is not a file of at most")
    (model / name).unlink()
    (model / "model.safetensors").write_bytes(b"\xff" * 8)
    os.truncate(model / "model.safetensors", 8 << 30)
    if name == "x.model":
        refused(model, "is not a complete safetensors file", load_model)


def test_a_changed_gguf_file_has_another_conversion(tmp_path):
    file = tmp_path / "model.gguf"
    content = bytearray(os.urandom(3 << 20))
    file.write_bytes(content)
    first, status = conversion_of(file), file.stat()
    assert conversion_of(file) == first
    content[3 << 19] ^= 1
    with file.open("r+b") as opened:  # the same inode, size and time of the last change
        opened.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    assert conversion_of(file) != first
    (tmp_path / "other").mkdir()
    moved = shutil.copy2(file, tmp_path / "other" / "model.gguf")
    assert conversion_of(moved) == conversion_of(file)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": "(([a-z_]+|[a-z0-9_.]+)+)+X"},
        {"target_modules": "(unclosed"},
        {"rank_pattern": {"((a|[a-z])+)+X": 4}},
        {"alpha_pattern": {".*.*.*.*.*.*.*.*X": 4}},
    ],
)
def test_patterns_of_adapters_that_match_without_end_are_refused(adapters, values):
    change(adapters / "adapter_config.json", values)
    refused(adapters, r"adapter_config\.json", load_model)


def test_patterns_of_adapters_name_the_modules_that_they_match(adapters):
    plain = load_model(ModelRecipe(path=str(adapters))).state_dict()
    change(adapters / "adapter_config.json", {"target_modules": r".*\.(self_attn|mlp)\.\w+_proj"})
    again = load_model(ModelRecipe(path=str(adapters))).state_dict()
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.timeout(60)
def test_the_base_of_adapters_is_checked_as_a_model(adapters, model):
    change(model / "config.json", {"num_hidden_layers": 2_000_000})
    change(adapters / "adapter_config.json", {"base_model_name_or_path": str(model)})
    refused(adapters, r"num_hidden_layers|layers", load_model)
