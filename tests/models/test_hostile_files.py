"""Untrusted model directories: pickles, malformed configurations and archives end in one sentence, and run nothing."""

import json
import pickle
import shutil

import pytest

from posttrain.errors import InputError
from posttrain.models.load import load_end_tokens, load_model, load_tokenizer
from posttrain.models.policy import Policy
from posttrain.recipe.model import LoraRecipe, ModelRecipe


@pytest.fixture
def adapters(tiny_model, tmp_path):
    """Saved LoRA adapters of the tiny model."""
    Policy(ModelRecipe(path=str(tiny_model), lora=LoraRecipe(rank=2))).save(tmp_path / "adapters")
    return tmp_path / "adapters"


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_adapters_in_a_pickle_are_refused_and_not_run(adapters, tmp_path):
    (adapters / "adapter_model.safetensors").unlink()
    (adapters / "adapter_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(InputError, match=r"has no adapter_model.safetensors, .* convert them to safetensors"):
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
def test_end_tokens_that_are_no_ids_are_named(tiny_model, tmp_path, end, file):
    model = shutil.copytree(tiny_model, tmp_path / "copy")
    if file == "config.json":
        (model / "generation_config.json").unlink()
    values = json.loads((model / file).read_text()) | {"eos_token_id": end}
    (model / file).write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"model.path: "):
        load_end_tokens(str(model), load_tokenizer(ModelRecipe(path=str(model))))


def test_the_error_of_nested_end_tokens_says_what_is_wrong(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "copy")
    (model / "generation_config.json").unlink()
    values = json.loads((model / "config.json").read_text()) | {"eos_token_id": [[2]]}
    (model / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"'eos_token_id': TypeError: Field 'eos_token_id' with value \[\[2\]\]"):
        load_model(ModelRecipe(path=str(model)))


def test_weights_in_a_pickle_are_refused_and_not_run(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "copy")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(InputError, match="could not be loaded"):
        load_model(ModelRecipe(path=str(model)))
    assert not (tmp_path / "ran").exists()
