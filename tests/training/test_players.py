"""Players without a model stand in the final table, in the order that the environment gives, with their scores."""

from types import SimpleNamespace

from posttrain.recipe.rollout import SeedRange
from posttrain.training.evaluators import START
from posttrain.training.rollout_manager import RolloutManager
from posttrain_memory.environment import Memory
from posttrain_memory.recipe import MemoryRecipe


def test_players_of_the_environment_are_rows_of_the_final_table():
    playing = object.__new__(RolloutManager)
    playing.environment = MemoryRecipe.model_validate({"worlds": {"notes": 4, "filler": (0, 0)}})
    playing.recipe = SimpleNamespace(evaluation=SimpleNamespace(final_seeds=SeedRange(start=5, count=6)))
    lines = playing.baselines()
    assert set(lines) == {"random", *Memory.scripted_baselines, "optimal"}
    rows = playing.rows({**lines, START: {"n": 6, "success": 0.5}})
    assert [row.policy for row in rows][:2] == ["random policy", Memory.scripted_baselines[0]]
    assert [row.policy for row in rows][-2:] == [START, "optimal policy"]
    optimal = rows[-1]
    assert (optimal.success, optimal.n) == (1.0, 6)
    assert optimal.scores
    assert all(value == 1.0 and low < high for value, low, high in optimal.scores.values())
