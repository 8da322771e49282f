"""The recipes of the published experiments take steps with the packaged model, with and without thinking."""

import pytest

from posttrain.cli.main import main
from posttrain.runs.metrics import read_metrics

SMALL = ["model.path=packaged:smollm2-135m", "model.dtype=auto", "model.gradient_checkpointing=false", "steps=2"]
SMALL += ["name=small", "engine.slots=16", "rollout.groups_per_step=2", "rollout.tokens_per_turn=24"]
SMALL += ["learner.tokens_per_batch=3200", "rollout.tokens_per_episode=1200", "evaluation.every=0"]
SMALL += ["evaluation.seeds.count=2", "evaluation.final_seeds.count=4"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("thinking", ["true", "false"])
@pytest.mark.parametrize("environment", ["bandit", "sokoban", "frozen_lake"])
def test_a_recipe_takes_steps(environment, thinking, tmp_path):
    words = [*SMALL, f"runs={tmp_path}", f"environment.format.thinking={thinking}"]
    if environment != "bandit":
        words.append("rollout.episodes_per_group=2")
    assert main(["rl", f"recipes/ragen/{environment}.yaml", *words]) == 0
    lines = [line for line in read_metrics(tmp_path / "small" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]
    assert (tmp_path / "small" / "model" / "model.safetensors").is_file()
