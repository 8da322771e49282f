"""Held-out episodes are played in `evaluation.environment`, with tasks of its own where its rows are of another file."""

import json

import pytest

from posttrain.cli.main import main
from posttrain.environments.protocol import task_split
from posttrain.recipe.compose import load_recipe
from posttrain.rollout.store import read_episodes, stored_steps
from tests.training import letters, small
from tests.training.preferences import write_jsonl

SHORT = ["steps=1", "rollout.groups_per_step=2", "rollout.episodes_per_group=2", "rollout.tokens_per_turn=4"]
SHORT += ["rollout.tokens_per_episode=400", "evaluation.every=1", "evaluation.seeds.count=2"]
SHORT += ["evaluation.final_seeds.count=2"]


def turns_by_split(run):
    return {
        step.split: {len(episode.turns) for episode in read_episodes(step.path).episodes}
        for step in stored_steps(run / "episodes")
    }


@pytest.fixture
def prompts(tmp_path):
    """Two files of prompts with one prompt in common."""
    rows = [{"prompt": f"Say {number}.", "label": str(number)} for number in range(18)]
    return write_jsonl(tmp_path / "train.jsonl", rows[:12]), write_jsonl(tmp_path / "held_out.jsonl", rows[11:])


def test_training_and_evaluation_have_their_own_number_of_turns(tiny_model, tmp_path):
    words = [f"environment.type={letters.__file__}", f"model.path={tiny_model}", f"runs={tmp_path}", "name=two"]
    words += ["environment.max_turns=1", "evaluation.environment.max_turns=3"]
    assert main(["rl", *words, *SHORT]) == 0
    assert turns_by_split(tmp_path / "two") == {"train": {1}, "evaluation": {3}, "final": {3}}
    assert small.lines(tmp_path / "two", "train")[0]["rollout/turns"] == 1
    assert "environment of the evaluations" in (tmp_path / "two" / "report.md").read_text()
    # The trained model in the recipe of its training: the environment of its evaluations.
    again = [str(tmp_path / "two" / "recipe.yaml"), f"model.path={tmp_path / 'two' / 'model'}"]
    assert main(["evaluate", *again]) == 0
    assert turns_by_split(tmp_path / "two-evaluation") == {"final": {3}}
    tables = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("two", "two-evaluation")]
    trained, evaluated = (
        next(row for row in table["policies"] if row["policy"] == name)
        for table, name in zip(tables, ("trained model", "model"), strict=True)
    )
    assert (trained["mean_return"], trained["n"]) == (evaluated["mean_return"], evaluated["n"])


def test_held_out_prompts_come_from_the_file_of_the_evaluations(prompts, tiny_model, tmp_path):
    train, held_out = prompts
    words = ["environment.type=text_task", f"environment.prompts={train}", "environment.reward=exact"]
    words += [f"evaluation.environment.prompts={held_out}", f"model.path={tiny_model}", f"runs={tmp_path}"]
    words += ["name=files"]
    recipe = load_recipe([], words, "rl")
    tasks = task_split(recipe.environment, recipe.evaluation, recipe.seeds)
    assert list(tasks.training) == list(range(11)), "the common prompt is not trained on"
    assert sorted([*tasks.validation, *tasks.test]) == list(range(7))
    assert (len(tasks.validation), len(tasks.test)) == (4, 3)
    assert main(["rl", *words, *SHORT[:-2]]) == 0
    played = {
        step.split: {episode.messages[0]["content"] for episode in read_episodes(step.path).episodes}
        for step in stored_steps(tmp_path / "files" / "episodes")
    }
    assert played["evaluation"] | played["final"] == {f"Say {number}." for number in range(11, 18)}
    assert played["train"] <= {f"Say {number}." for number in range(11)}
    # The same file in both is divided.
    recipe = load_recipe([], [*words[:3], "evaluation.environment.success_reward=0.5"], "rl")
    tasks = task_split(recipe.environment, recipe.evaluation, recipe.seeds)
    assert not set(tasks.training) & {*tasks.validation, *tasks.test}
    assert len({*tasks.training, *tasks.validation, *tasks.test}) == 12


def test_rows_are_evaluated_in_a_separate_environment(tiny_model, tmp_path):
    rows = [{"prompt": f"Say {number}.", "completion": str(number)} for number in range(4)]
    train = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [f"data.train={train}", f"data.cache={tmp_path / 'cache'}", f"model.path={tiny_model}"]
    words += [f"evaluation.environment.type={letters.__file__}", f"runs={tmp_path}", "name=rows", "steps=1"]
    assert main(["sft", *words, *SHORT[3:]]) == 0
    assert all("return" in line for line in small.lines(tmp_path / "rows", "final"))
