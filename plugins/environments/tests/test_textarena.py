"""The adapter of TextArena: games for one player."""

import random
import re

import pytest

from posttrain.environments.check import check_environment
from posttrain.environments.game import play
from posttrain.environments.make import make_env
from posttrain.errors import InputError

pytest.importorskip("textarena", reason="needs the extra textarena")

ADAPTER = "posttrain_environments.textarena:TextArena"


def guesses(seed):
    """The answers of a binary search, and the last step."""
    environment = make_env(ADAPTER, game="GuessTheNumber-v0")()
    low, high = map(
        int, re.search(r"between (\d+) and (\d+)", environment.reset(seed).messages[-1]["content"]).groups()
    )
    said = []
    while True:
        said.append((low + high) // 2)
        step = environment.step(f"I say [{said[-1]}]")
        if step.terminated:
            return said, step
        hint = step.messages[-1]["content"].lower()
        low, high = (said[-1] + 1, high) if "higher" in hint else (low, said[-1] - 1)


def test_binary_search_wins_and_seeds_differ():
    results = [guesses(seed) for seed in range(6)]
    assert all(step.info["success"] is True and step.reward == 1 for _, step in results)
    assert len({said[-1] for said, _ in results}) > 2
    assert guesses(3)[0] == results[3][0]


def test_global_random_numbers_are_left_alone():
    random.seed(7)
    before = random.getstate()
    guesses(0)
    assert random.getstate() == before


def test_an_invalid_answer_is_rejected():
    steps = play(make_env(ADAPTER, game="GuessTheNumber-v0")(), 0, ["seven", "seven"])
    assert steps[0].info["rejected"] == "invalid move"
    assert steps[-1].terminated
    assert steps[-1].info["success"] is False


@pytest.mark.parametrize("game", ["TowerOfHanoi-v0", "Mastermind-v0", "Sudoku-v0", "2048-v0"])
def test_the_checks_of_every_environment_pass(game):
    check_environment(make_env(ADAPTER, game=game).recipe, range(2))


def test_an_unknown_game_is_one_sentence():
    with pytest.raises(InputError, match="TextArena has no game 'Chess-v9'"):
        make_env(ADAPTER, game="Chess-v9")()
