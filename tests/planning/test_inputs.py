"""A run whose files are not there says so before torch is imported."""

import subprocess
import sys

import pytest

from posttrain.errors import InputError
from posttrain.planning.inputs import require_inputs
from posttrain.recipe.compose import load_recipe

COMMAND = """
import sys
from posttrain.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sft", "data.train=nosuch.jsonl"], "nosuch.jsonl"),
        (["rl", "environment.type=text_task", "environment.prompts=nosuch.csv"], "nosuch.csv"),
        (["rl", "environment.type=bandit", "model.path=./nosuch"], "model.path: there is no folder ./nosuch"),
        (["dpo", "data.train=.", "data.validation=nosuch/rows.parquet"], "nosuch/rows.parquet"),
        (["rl", "environment.type=bandit", "engine.type=vllm"], "engine.type: vllm is not installed"),
    ],
)
def test_what_is_missing_is_named_without_torch(words, named, tmp_path):
    ended = subprocess.run([sys.executable, "-c", COMMAND, *words], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, named in ended.stderr) == (2, True), ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_vllm_of_another_interpreter_or_server_is_not_looked_for_here():
    for word in ("engine.python=/opt/vllm/bin/python", "engine.urls=[http://10.0.0.2:8700]"):
        require_inputs(load_recipe([], ["environment.type=bandit", "engine.type=vllm", word], "rl"))
    with pytest.raises(InputError):
        require_inputs(load_recipe([], ["environment.type=bandit", "engine.type=vllm"], "rl"))


@pytest.mark.parametrize(
    ("words", "package"),
    [(["sinks=[tensorboard, wandb]"], "wandb"), (["optimizer.type=adamw_8bit"], "bitsandbytes"), ([], None)],
)
def test_packages_of_sinks_and_optimizers_are_looked_for(words, package, monkeypatch):
    recipe = load_recipe([], ["environment.type=bandit", *words], "rl")
    monkeypatch.setattr("posttrain.planning.inputs.find_spec", lambda name: None if name == package else object())
    if package is None:
        require_inputs(recipe)
    else:
        with pytest.raises(InputError, match=rf"needs the package {package}; run `pip install"):
            require_inputs(recipe)
