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


def test_adapters_in_a_pickle_are_refused_and_not_run(adapters, tmp_path):
    (adapters / "adapter_model.safetensors").unlink()
    (adapters / "adapter_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(InputError, match=r"its weights in adapter_model.bin, .* or with peft for adapters"):
        load_model(ModelRecipe(path=str(adapters)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 3}', "[" * 100_000])
def test_a_malformed_configuration_of_adapters_is_named(adapters, content):
    (adapters / "adapter_config.json").write_text(content)
    with pytest.raises(InputError, match=r"adapter_config.json (cannot be read|has no text)"):
        load_model(ModelRecipe(path=str(adapters)))


def test_damaged_adapters_are_named(adapters):
    file = adapters / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InputError, match=r"the adapters .* could not be loaded"):
        load_model(ModelRecipe(path=str(adapters)))


@pytest.mark.parametrize("end", [[[2]], [{"id": 2}], {"a": 1}, "2", 2.5, [2, None, "x"], True])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_no_ids_are_named(model, end, file):
    if file == "config.json":
        (model / "generation_config.json").unlink()
    change(model / file, {"eos_token_id": end})
    with pytest.raises(InputError, match=r"model.path: "):
        load_end_tokens(str(model), load_tokenizer(ModelRecipe(path=str(model))))


def test_the_error_of_nested_end_tokens_says_what_is_wrong(model):
    (model / "generation_config.json").unlink()
    change(model / "config.json", {"eos_token_id": [[2]]})
    with pytest.raises(InputError, match=r"'eos_token_id': TypeError: Field 'eos_token_id' with value \[\[2\]\]"):
        load_model(ModelRecipe(path=str(model)))


PICKLES = ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "optimizer.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize("name", PICKLES)
def test_weights_in_a_pickle_are_refused_and_not_run(model, tmp_path, name):
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=rf"its weights in {name}, a format that can run code; convert them"):
            load(ModelRecipe(path=str(model)))
    assert not (tmp_path / "ran").exists()


def test_a_pickle_beside_safetensors_is_not_read(model, tmp_path):
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    load_model(ModelRecipe(path=str(model)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../tiny/model.safetensors", "/dev/zero", "absent.safetensors", "", ".."])
def test_an_index_names_files_beside_it_only(model, tmp_path, name, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "tiny")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="which is not a file beside it"):
        load_model(ModelRecipe(path=str(model)))


LARGE = [
    ("num_hidden_layers", 10**7),
    ("num_hidden_layers", -(10**7)),
    ("vocab_size", 10**9),
    ("hidden_size", 10**12),
    ("hidden_size", 1e300),
    ("intermediate_size", 10**9),
    ("num_attention_heads", 10**9),
    ("head_dim", 10**9),
    ("num_labels", 10**9),
    ("hidden_size", float("inf")),
    ("text_config", {"num_hidden_layers": 10**7}),
]


@pytest.mark.parametrize(("key", "value"), LARGE)
def test_a_configuration_larger_than_the_weights_is_refused(model, key, value):
    change(model / "config.json", {key: value})
    for load in (load_model, load_tokenizer, lambda recipe: model_sizes(recipe.path)):
        with pytest.raises(InputError, match=r"which the weights beside it, .* do not have"):
            load(ModelRecipe(path=str(model)))


@pytest.mark.parametrize(("key", "value"), [("hidden_size", -4), ("hidden_size", 8.5), ("num_key_value_heads", 0)])
def test_an_impossible_size_is_refused(model, key, value):
    change(model / "config.json", {key: value})
    with pytest.raises(InputError):
        load_model(ModelRecipe(path=str(model)))


@pytest.mark.parametrize("key", ["audio_chunk_size", "codebook_size", "n_ctx", "n_positions", "max_image_size"])
def test_sizes_of_other_parts_are_not_compared_with_the_weights(model, key):
    change(model / "config.json", {key: 480_000})
    assert load_model(ModelRecipe(path=str(model))).config.hidden_size == 32


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{", '{"a": ' * 100_000])
def test_a_configuration_that_is_no_object_is_refused(model, content):
    (model / "config.json").write_text(content)
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=r"config.json (cannot be read|is not a JSON object)"):
            load(ModelRecipe(path=str(model)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "x.model"])
def test_a_sparse_file_of_a_model_is_not_read(model, name):
    with (model / name).open("ab") as file:
        os.truncate(file.fileno(), 8 << 30)
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=rf"{name} is not a file of at most"):
            load(ModelRecipe(path=str(model)))


def test_a_sparse_header_of_weights_is_refused(model):
    (model / "model.safetensors").write_bytes(b"\xff" * 8)
    os.truncate(model / "model.safetensors", 8 << 30)
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        load_model(ModelRecipe(path=str(model)))


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
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        load_model(ModelRecipe(path=str(adapters)))


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
    with pytest.raises(InputError, match=r"num_hidden_layers|layers"):
        load_model(ModelRecipe(path=str(adapters)))
