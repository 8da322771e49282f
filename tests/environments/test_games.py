"""Properties of every built-in game, in every format and observation."""

import os
import subprocess
import sys

import pytest

from posttrain.environments.game import Game, play
from posttrain.recipe.components import ENVIRONMENTS, environment_class, environment_recipe
from posttrain.seeds import random_stream

WHOLE = [name for name in ENVIRONMENTS if issubclass(environment_class(name), Game)]

VARIANTS = [
    {"type": "bandit"},
    {"type": "bandit", "max_turns": 2, "format": {"thinking": True, "prime": True}},
    {"type": "frozen_lake"},
    {"type": "frozen_lake", "slippery": False, "size": 5, "format": {"thinking": True, "actions_per_turn": 3}},
    {"type": "frozen_lake", "observation": "local"},
    {"type": "sokoban", "num_boxes": 2, "dim_x": 7, "observation": "local"},
    {"type": "frozen_lake", "observation": "both", "format": {"actions_per_turn": 2, "prime": True}},
    {"type": "sokoban"},
    {"type": "sokoban", "num_boxes": 2, "dim_x": 7, "observation": "coordinates", "format": {"thinking": True}},
    {"type": "word_sort"},
    {"type": "sokoban", "player_moves": 3, "format": {"actions_per_turn": 4, "separator": ","}},
]


def _make(values):
    recipe = environment_recipe(values)
    return environment_class(recipe.type)(recipe)


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_the_environment_validates(values):
    recipe = environment_recipe(values)
    environment_class(recipe.type).validate(recipe, range(40))


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_random_answers_are_well_formed_and_cover_all_actions(values):
    environment = _make(values)
    environment.reset(0)
    base = len(environment.actions) ** environment.format.actions_per_turn
    parsed = [
        environment.format.parse(environment.random_answer((i + 0.5) / base), environment.actions) for i in range(base)
    ]
    assert len(set(parsed)) == base
    assert {len(actions) for actions in parsed} == {environment.format.actions_per_turn}
    assert environment.random_answer(0.0).startswith(environment.primer)
    assert environment.random_answer(1 - 1e-16)


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_same_answers_same_episode_and_an_instance_can_be_used_again(values):
    environment = _make(values)
    for seed in range(10):
        draws = random_stream("test", seed).random(20)
        environment.reset(seed)
        answers = [environment.random_answer(float(draw)) for draw in draws]
        assert play(environment, seed, answers) == play(_make(values), seed, answers)


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_only_the_last_step_reports_success_and_none_follows_it(values):
    environment = _make(values)
    steps = play(environment, 1)
    assert [isinstance(step.info.get("success"), bool) for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) <= environment.recipe.max_turns
    with pytest.raises(RuntimeError, match="over"):
        environment.step(environment.format.render(["Up"]))
    with pytest.raises(RuntimeError, match="over"):
        environment.expert()


@pytest.mark.parametrize("name", WHOLE)
def test_a_rejected_answer_costs_the_penalty_of_the_recipe_and_returns_the_reason(name):
    cheap, dear = (_make({"type": name, "max_turns": 2, "format": {"penalty": penalty}}) for penalty in (-0.25, -2.0))
    cheap.reset(0)
    dear.reset(0)
    first, second = cheap.step("nonsense"), dear.step("nonsense")
    assert first.reward - second.reward == pytest.approx(1.75)
    assert first.info["rejected"] == "no <answer>"
    assert first.messages[0]["content"].startswith("Rejected: no <answer>.\n")
    assert not first.terminated
    assert not first.truncated


def test_seeds_differ():
    for name in WHOLE:
        environment = _make({"type": name})
        assert len({str(environment.reset(seed)) for seed in range(50)}) > {"bandit": 1, "word_sort": 12}.get(name, 40)


def test_environments_import_neither_torch_nor_transformers():
    code = (
        "import sys; from posttrain.recipe.components import environment_class, environment_names\n"
        "for name in [n for n in environment_names() if environment_class(n).self_contained]:\n"
        "    environment_class(name).validate(environment_class(name).Recipe(), range(3))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_random_numbers_and_maps_do_not_depend_on_the_hash_seed(capsys):
    code = (
        "from posttrain.recipe.components import environment_class, environment_names\n"
        "from posttrain.environments.game import play\n"
        "for name in [n for n in environment_names() if environment_class(n).self_contained]:\n"
        "    game = environment_class(name)(environment_class(name).Recipe())\n"
        "    print([(game.reset(seed), play(game, seed)) for seed in range(20)])"
    )
    exec(code, {})
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == capsys.readouterr().out
