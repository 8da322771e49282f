"""The adapter of TextWorld: generated games, the winning policy, rewards and the cache."""

import pytest

from posttrain.environments.check import check_environment
from posttrain.environments.game import play
from posttrain.environments.make import make_env
from posttrain_environments.textworld import TextWorld

pytest.importorskip("textworld", reason="needs the extra textworld")

ADAPTER = "posttrain_environments.textworld:TextWorld"


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("games"))
    return lambda **keys: make_env(ADAPTER, **{"challenge": "treasure_hunter", "cache": cache, **keys})


def test_the_winning_policy_earns_the_whole_score(make):
    steps = play(make()(), 0)
    assert sum(step.reward for step in steps) == pytest.approx(1)
    assert steps[-1].info["success"] is True
    assert "The End" in steps[-1].messages[0]["content"]


def test_the_checks_pass_and_a_game_is_compiled_once(make):
    recipe = make(max_turns=10).recipe
    check_environment(recipe, range(1))
    TextWorld.validate(recipe, range(1))


def test_commands_are_shown_and_random_ones_are_admissible(make):
    environment = make(commands=True)()
    shown = environment.reset(0).messages[-1]["content"]
    listed = shown.rpartition("Commands: ")[2].split(", ")
    assert {environment.random_answer(draw) for draw in (0.0, 0.3, 0.6, 0.999)} <= set(listed)
    assert "$$" not in shown


@pytest.mark.parametrize("answer", ["", "go east\ngo west", "x" * 500])
def test_an_answer_that_is_no_command_is_rejected(make, answer):
    environment = make()()
    environment.reset(0)
    step = environment.step(answer)
    assert "one line of at most 100 characters" in step.info["rejected"]
    assert step.reward == 0


@pytest.mark.slow
@pytest.mark.parametrize("challenge", ["simple", "coin_collector", "cooking"])
def test_every_challenge_is_won(make, challenge):
    TextWorld.validate(make(challenge=challenge).recipe, range(2))


def test_another_seed_is_another_game(make):
    first, other = make()().reset(0), make(games=2)().reset(1)
    assert first != other
    assert make(games=2)().reset(3) == other
