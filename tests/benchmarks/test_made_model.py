"""The small model of benchmarks writes well-formed answers with random skill, and RL improves it."""

import numpy as np
import pytest
import torch
from benchmarks.harness import made_model

import posttrain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made():
    return str(made_model.small())


def test_a_seed_decides_the_weights_and_the_random_state_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(made_model, "PHASES", ((2, 4), (1, 2)))
    monkeypatch.setattr(made_model, "EPISODES", 60)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()

    def made_in(cache, seed):
        monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / cache))
        directory = made_model.small(seed)
        return [(directory / name).read_bytes() for name in ("model.safetensors", "tokenizer.json")]

    weights, tokenizer = made_in("one", 0)
    other_weights, other_tokenizer = made_in("one", 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert made_in("two", 0) == [weights, tokenizer]
    assert made_in("one", 0) == [weights, tokenizer], "the model of another seed was returned"
    assert other_weights != weights
    assert other_tokenizer == tokenizer


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
