"""Baseline policies are in the final table with their scores, in the order of the environment."""

from types import SimpleNamespace

from posttrain.data.held_out import TaskSplit
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.recipe.rl import RlRecipe
from posttrain.runs.tables import START
from posttrain.training.evaluators import EpisodeEvaluator
from posttrain_memory.environment import Memory
from posttrain_memory.recipe import MemoryRecipe


def test_baseline_policies_are_rows_of_the_final_table(tmp_path):
    environment = MemoryRecipe.model_validate({"worlds": {"notes": 4, "filler": (0, 0)}})
    manager = SimpleNamespace(environment=EnvironmentFactory(environment), rollout=None, model_name="model")
    tasks = TaskSplit(range(9), range(50, 51), range(5, 11))
    evaluator = EpisodeEvaluator(manager, RlRecipe(environment=environment), tasks, tmp_path)
    lines = evaluator.baselines()
    assert set(lines) == {"random", *Memory.scripted_baselines, "optimal"}
    rows = evaluator.rows({**lines, START: {"n": 6, "success": 0.5}})
    assert [row.policy for row in rows][:2] == ["random policy", Memory.scripted_baselines[0]]
    assert [row.policy for row in rows][-2:] == [START, "optimal policy"]
    optimal = rows[-1]
    assert (optimal.success, optimal.n) == (1.0, 6)
    assert optimal.scores
    assert all(value == 1.0 and low < high for value, low, high in optimal.scores.values())
