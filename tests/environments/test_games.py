"""Properties of every built-in game, in every format and observation."""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

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


BANDIT_FORMATS = [{"actions_per_turn": 2}, {"penalty": 0.1}, *({"separator": sign} for sign in ("or", " ", "<"))]


def _make(values):
    recipe = environment_recipe(values)
    return environment_class(recipe.type)(recipe)


@pytest.mark.parametrize("values", VARIANTS, ids=str)
def test_the_rules_of_every_game(values):
    """It validates; random answers are well formed and cover all actions; the same answers give the same episode, also of an
    instance that is used again; only the last step reports success, and none follows it."""
    environment = _make(values)
    type(environment).validate(environment.recipe, range(40))
    environment.reset(0)
    base = len(environment.actions) ** environment.format.actions_per_turn
    drawn = [environment.random_answer((i + 0.5) / base) for i in range(base)]
    parsed = [environment.format.parse(answer, environment.actions) for answer in drawn]
    assert len(set(parsed)) == base
    assert {len(actions) for actions in parsed} == {environment.format.actions_per_turn}
    assert environment.random_answer(0.0).startswith(environment.primer)
    assert environment.random_answer(1 - 1e-16)
    for seed in range(10):
        environment.reset(seed)
        answers = [environment.random_answer(float(draw)) for draw in random_stream("test", seed).random(20)]
        assert play(environment, seed, answers) == play(_make(values), seed, answers)
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
    first, second = (play(environment, 0, ["nonsense"])[0] for environment in (cheap, dear))
    assert first.reward - second.reward == pytest.approx(1.75)
    assert first.info["rejected"] == "no <answer>"
    assert first.messages[0]["content"].startswith("Rejected: no <answer>.\n")
    assert not first.terminated
    assert not first.truncated


def test_seeds_differ_and_a_rejected_answer_leaves_the_state():
    for name in WHOLE:
        environment = _make({"type": name})
        start = environment.reset(3).state
        assert start == environment.reset(3).state == environment.step("nonsense").state
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


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bandit", [{"low_risk": {"name": "Dragon"}}, {"low_risk": {"name": "<b>"}}, {"low_risk": {"mean": 0.3}}]),
        ("bandit", [{"arms": 3}, *({"format": wrong} for wrong in BANDIT_FORMATS)]),
        ("frozen_lake", [{"size": 1}, {"frozen_probability": 0}, {"observation": "picture"}]),
        ("frozen_lake", [{"format": {"actions_per_turn": 6}}, {"format": {"actions_per_turn": 0}}]),
        ("sokoban", [{"dim_x": 4, "dim_y": 4}, {"num_boxes": 6}, {"dim_x": 3}, {"boxes": 2}]),
    ],
)
def test_impossible_recipes_are_refused(name, wrong):
    for values in wrong:
        with pytest.raises(ValidationError):
            environment_class(name).Recipe.model_validate(values)
