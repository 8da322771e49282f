"""`made:small` writes well-formed answers with random skill, and RL improves it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import posttrain
from posttrain.errors import InputError
from posttrain.models.load import load_tokenizer, resolve_path
from posttrain.recipe.model import ModelRecipe
from posttrain.training import made_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made():
    return str(made_model.small())


def test_the_name_resolves_and_an_unknown_one_is_an_error(made):
    assert resolve_path("made:small") == made
    assert load_tokenizer(ModelRecipe(path="made:small")).chat_template
    with pytest.raises(InputError, match=r"unknown model made:large; available: small"):
        resolve_path("made:large")


def test_making_it_is_deterministic_and_keeps_the_random_state(made, tmp_path, monkeypatch):
    monkeypatch.setattr(made_model, "PHASES", ((2, 4), (1, 2)))
    monkeypatch.setattr(made_model, "EPISODES", 60)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made_model._make(tmp_path / name)
    assert torch.equal(torch.random.get_rng_state(), state)
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_making_it_prints_one_line(tmp_path):
    code = (
        "from posttrain.training import made_model\n"
        "made_model.PHASES, made_model.EPISODES = ((1, 2), (1, 2)), 60\n"
        "made_model.small()\n"
    )
    environment = os.environ | {"POSTTRAIN_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "made:small" in line
    assert len(line) <= 80


@pytest.mark.parametrize("settings", made_model.GAMES, ids=lambda settings: settings["type"])
def test_its_skill_is_that_of_random_play(made, settings):
    keys = dict(settings)
    env = posttrain.make_env(keys.pop("type"), **keys)
    engine = posttrain.LocalEngine(posttrain.Policy(made))
    episodes = posttrain.rollout(engine, env, seeds=range(5000, 5200), max_tokens=12)
    answers = [turn for episode in episodes for turn in episode.turns]
    assert np.mean(["rejected" in turn.info for turn in answers]) < 0.15
    success = posttrain.summarize(episodes).success
    environment = env()
    random = environment.baselines(environment.recipe, range(5000, 5200))["random"].success
    assert success.low - 0.1 < random < success.high + 0.1
