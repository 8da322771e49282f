"""The board's rules, the line of a finished run, and the table."""

import json
from pathlib import Path

import board
import numpy as np
import pytest

from posttrain.environments.frozen_lake import FrozenLake
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.stages import RlRecipe

FOLDER = Path(__file__).parents[2]


def load(name, *words):
    return load_pipeline(board.recipe_of(name), list(words))


@pytest.mark.parametrize("name", board.ENTRIES)
def test_entries_keep_the_rules(name):
    assert board.broken_rules(load(name), board.ENTRIES[name]) == []


@pytest.mark.parametrize("name", [pytest.param("arithmetic", marks=pytest.mark.slow), "json_answer"])
def test_no_final_question_is_asked_in_training(name):
    asked = set()
    for stage in load(name).stages:
        recipe = stage.recipe
        if isinstance(recipe, RlRecipe):
            seeds = recipe.seeds.of_generated("seeds")[: recipe.steps * recipe.rollout.groups_per_step]
            final = recipe.evaluation.environment
        else:
            seeds = recipe.experts.seeds.of_generated("experts.seeds")
        environment = EnvironmentFactory(recipe.environment)()
        asked.update(environment.reset(seed).messages[-1]["content"] for seed in seeds)
    held_out = EnvironmentFactory(final)()
    questions = {held_out.reset(seed).messages[-1]["content"] for seed in board.ENTRIES[name].tasks}
    assert len(questions) > 0.9 * board.TASKS
    assert not questions & asked


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("common.model.path=models/other", "warm-up starts from models/other"),
        ("common.evaluation.final_seeds.count=200", "final tasks"),
        ("common.evaluation.final_seeds.start=3000000", "final tasks"),
        ("common.evaluation.sampling.temperature=0", "temperature 0"),
    ],
)
def test_other_recipes_break_them(words, what):
    (broken,) = board.broken_rules(load("bandit", words), board.ENTRIES["bandit"])
    assert what in broken


def test_the_row_of_an_entry(monkeypatch):
    monkeypatch.setattr(board, "TASKS", 40)
    line = {"entry": "bandit", "seed": 3, "success": "10" * 20, "threads": 1, "gflops": 80, "scores": {}}
    line |= {"cpu_minutes": 1, "wall_minutes": 1, "random": 0.5, "before": 0.5, "optimal": 1.0}
    shown = board.tables([line])
    assert "50.0%" in shown
    assert "| 64 traces, random |" in shown
    assert "open, has training seeds 3" in shown
    row = [{**line, "seed": seed} for seed in range(5)]
    assert "missed by" in board.tables(row)
    assert "took 121 processor minutes" in board.tables([*row[:4], {**row[4], "cpu_minutes": 121}])
    assert "open, has training seeds 0, 1, 2, 3, 7" in board.tables([*row[:4], {**row[4], "seed": 7}])


def test_a_row_is_compared_with_the_optimal_policy_on_the_same_tasks():
    recipe = load("slippery_lake").stages[-1].recipe
    tasks = range(2_000_000, 2_000_040)
    optimal = board.optimal_success(recipe, tasks)
    assert optimal == board.optimal_success(recipe, tasks)
    exact = FrozenLake.baselines(recipe.environment, tasks)["optimal"].success
    assert np.mean([int(one) for one in optimal]) == pytest.approx(exact, abs=0.25)
    lost = optimal.replace("1", "0", 1)  # one task of forty
    line = {"entry": "slippery_lake", "success": lost, "success_optimal": optimal, "threads": 1, "gflops": 80}
    line |= {"cpu_minutes": 1, "wall_minutes": 1, "scores": {}, "random": 0.2, "before": 0.4, "optimal": exact}
    assert "difference from optimal > -5%, is -2.5% [-7.6, 2.6]: missed by 2.6 points" in board.tables(
        [{**line, "seed": seed} for seed in range(5)]
    )


def test_the_pages_have_the_tables_of_the_stored_lines():
    lines = board.read_lines(FOLDER / "docs" / "results" / "board.jsonl")
    reached, spent = board.tables(lines).split("\n\n")
    assert reached in (FOLDER / "docs" / "results" / "index.md").read_text()
    page = (FOLDER / "docs" / "results" / "board.md").read_text()
    assert reached in page
    assert spent in page
    for line in lines:
        assert len(board.by_task(line)) == board.TASKS, json.dumps(line)[:80]


def test_final_tasks_that_begin_like_an_imitated_one_are_counted_apart():
    recipe = load("firm_lake")
    first, last = recipe.stages[0].recipe, recipe.stages[-1].recipe
    imitated = set(board.first_prompts(first.environment, range(200_000, 200_320)))
    known = [
        prompt in imitated for prompt in board.first_prompts(last.evaluation.environment, range(2_000_000, 2_000_400))
    ]
    assert 0 < sum(known) < 400
    line = {"entry": "firm_lake", "success": "".join(str(int(one)) for one in known)}
    table = board.seen([line, line])
    assert f"| {sum(known)} | 100.0% to 100.0% | 0.0% to 0.0% |" in table
