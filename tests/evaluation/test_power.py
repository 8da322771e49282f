"""Plans of tasks and training seeds: their power by simulation and on the board's runs, pilot runs, and the command."""

import json
import math
import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.evaluation.paired import paired_test
from posttrain.evaluation.power import FEWEST_TASKS, FILE, Spread, _differing, pilot_spread
from posttrain.evaluation.statistics import item_means
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.detectable import FEWEST, POWER
from posttrain.rollout.store import episodes_file, read_episodes, write_episodes
from posttrain.runs.directory import RunDirectory

BOARD = Path(__file__).parents[2] / "docs" / "results" / "board.jsonl"


def spread_of(results, kind="rate"):
    about = {
        "source": "runs",
        "environment": {},
        "minutes": 1.0,
        "minutes_per_episode": None,
        "machine": "",
        "kind": kind,
    }
    return Spread.of(results, **about)


def sides(draws, seeds, tasks, gain, deviation, episodes=1):
    """Success [seeds, tasks] of both recipes: tasks differ, training seeds differ by `deviation`, answers are drawn."""
    level = draws.uniform(0.2, 0.7, tasks)
    for shift in (0.0, gain):
        rate = np.clip(level + shift + draws.normal(0, deviation, (seeds, 1)), 0, 1)
        yield draws.binomial(episodes, rate) / episodes


def found(a, b, draws=60):
    names = [str(task) for task in range(a.shape[1])]
    kind = "rate" if np.isin([*a.flat, *b.flat], (0, 1)).all() else "mean"
    scores = [[item_means(kind, zip(names, run, strict=True)) for run in side] for side in (a, b)]
    test = paired_test("success", "higher", *scores, names, draws=draws, paired=len(a) > 1)
    return test.p < 0.05 and (test.difference.value > 0) == (b.mean() > a.mean())


@pytest.mark.parametrize(
    ("seeds", "gain", "deviation", "episodes"),
    [(1, 0.1, 0.0, 1), (3, 0.1, 0.02, 1), (5, 0.07, 0.02, 1), (8, 0.1, 0.05, 4)],
)
def test_the_planned_tasks_have_the_planned_power(seeds, gain, deviation, episodes):
    """The spread is estimated from many runs; the plan's number of tasks finds the gain about as often as planned."""
    draws = np.random.default_rng(seeds)
    rate = np.clip(draws.uniform(0.2, 0.7, 2000) + draws.normal(0, deviation, (400, 1)), 0, 1)
    played = min(episodes, 2)
    spread = spread_of([np.stack([draws.random(2000) < run for _ in range(played)], 1).astype(float) for run in rate])
    tasks = spread.tasks_for(gain, seeds, episodes)
    trials = [found(*sides(draws, seeds, tasks, gain, deviation, episodes)) for _ in range(250)]
    # Three standard errors around the plan.
    assert POWER - 0.08 <= np.mean(trials) <= POWER + 0.08, (tasks, np.mean(trials))


def test_more_of_anything_never_lowers_the_power():
    spread = spread_of([np.random.default_rng(seed).binomial(1, 0.5, (200, 2)).astype(float) for seed in range(6)])
    for more in ({"seeds": 4}, {"tasks": 90}, {"episodes": 2}, {"gain": 0.11}):
        base = {"gain": 0.1, "seeds": 3, "tasks": 60, "episodes": 1}
        assert spread.power(**base) < spread.power(**(base | more))
    assert spread.power(spread.gain_seen(3, 60), 3, 60) == pytest.approx(POWER, abs=1e-3)


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_board_agrees_with_its_plan(seeds):
    """Seeds of an entry against others, of which some successes are deleted at random: the loss that the plan sees in 80% of
    comparisons is found in about as many. Without a loss, at most the level is.
    """
    lines = [json.loads(line) for line in BOARD.read_text().splitlines()]
    draws, planted, null = np.random.default_rng(0), [], []
    for entry in dict.fromkeys(line["entry"] for line in lines if "success" in line):
        runs = np.array([[int(one) for one in line["success"]] for line in lines if line["entry"] == entry], float)
        spread = spread_of([run[:, None] for run in runs])
        loss = spread.gain_seen(seeds, 150)  # on 150 tasks
        if loss >= runs.mean():
            continue
        for a in combinations(range(5), seeds):
            for b in combinations([seed for seed in range(5) if seed not in a], seeds):
                tasks = draws.permutation(400)[:150]
                one, other = runs[list(a)][:, tasks], runs[list(b)][:, tasks]
                null.append(found(one, other))
                planted.append(found(one, other * (draws.random(other.shape) >= loss / other.mean())))
    assert len(planted) > 150
    assert 0.7 < np.mean(planted) < 0.95, np.mean(planted)
    assert np.mean(null) <= 0.06 * (3 - seeds), np.mean(null)  # single models of one recipe do differ


def test_the_shipped_spreads_are_those_of_the_board():
    stored = [Spread(**one) for one in json.loads(FILE.read_text())]
    assert len(stored) == 9
    lines = [json.loads(line) for line in BOARD.read_text().splitlines()]
    for spread in stored:
        entry = spread.source.split("board/")[1].split()[0]
        runs = [line for line in lines if line["entry"] == entry]
        made = spread_of([np.array([*map(float, line["success"])])[:, None] for line in runs])
        assert (spread.mean, spread.seeds, spread.tasks) == pytest.approx((made.mean, made.seeds, made.tasks), rel=1e-3)


def test_the_command_plans_from_stored_and_from_pilot_runs(tiny_model, tmp_path, capsys):
    assert main(["plan", "board/firm_lake", "--detect", "5", "--price", "3"]) == 0
    printed = capsys.readouterr().out
    assert "5 runs of board/firm_lake" in printed
    assert "difference of 5.0 points is shown in 80%" in printed
    # Nobody timed an episode of the board, and its runs were made elsewhere.
    assert "the time of an episode was not measured" in printed
    assert " minutes\n" not in printed
    assert ", not on this machine" in printed
    keys = [f"model.path={tiny_model}", "model.threads=1", f"runs={tmp_path}", "environment.type=word_sort", "steps=1"]
    keys += [
        "rollout.groups_per_step=2",
        "rollout.episodes_per_group=2",
        "evaluation.start=false",
        "evaluation.every=1",
    ]
    keys += [
        "evaluation.final_seeds.count=30",
        "evaluation.episodes_per_seed=2",
        "evaluation.sampling.temperature=1",
        "plots=false",
    ]
    for seed in (0, 1):
        assert main(["rl", *keys, f"seed={seed}", f"name=pilot-{seed}"]) == 0
    capsys.readouterr()
    pilots = f"{tmp_path}/pilot-0,{tmp_path}/pilot-1"
    # The tiny model never succeeds.
    assert main(["plan", *keys, "--pilots", pilots]) == 2
    assert "all final results are equal" in capsys.readouterr().err
    for seed in (0, 1):
        file = episodes_file(tmp_path / f"pilot-{seed}" / "episodes", 1, "final")
        episodes = read_episodes(file).episodes
        for place, episode in enumerate(episodes):
            episode.turns[-1].info["success"] = (place + seed) % 3 == 0
        write_episodes(file.parent, 1, "final", episodes)
    assert main(["plan", *keys, "--pilots", pilots]) == 0
    printed = capsys.readouterr().out
    assert "2 pilot runs on 30 shared tasks" in printed
    assert "as measured on this machine" in printed
    spread = pilot_spread([Path(pilot) for pilot in pilots.split(",")])
    hours = [spread.hours(2, tasks, 1) for tasks in (0, 100, 200)]
    assert hours[2] - hours[1] == pytest.approx(hours[1] - hours[0])
    assert hours[2] > hours[1] > hours[0] > 0
    file = tmp_path / "pilot-0" / "environment.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"cpus_allowed": about["cpus_allowed"] + 1}))
    assert main(["plan", *keys, "--pilots", pilots]) == 0
    assert ", not on this machine" in capsys.readouterr().out
    # The same recipe with another rate is another recipe.
    shutil.copytree(tmp_path / "pilot-1", tmp_path / "pilot-2")
    file = tmp_path / "pilot-2" / "recipe.yaml"
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(values | {"seed": 2, "optimizer": {"learning_rate": 1e-3}}))
    assert main(["plan", *keys, "--pilots", f"{pilots},{tmp_path}/pilot-2"]) == 2
    assert "differ in optimizer.learning_rate;" in capsys.readouterr().err
    assert main(["plan", *keys, "--pilots", f"{tmp_path}/pilot-0,{tmp_path}/pilot-0"]) == 2
    assert "each with another seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["board/firm_lake", "--detect", "0"], "--detect"),
        (["board/firm_lake", "--detect", "nan"], "--detect"),
        (["board/firm_lake", "--detect", "500"], "at most 100, points of a share"),
        (["board/firm_lake", "--pilots", "runs/none"], "two or more runs"),
        (["environment.type=text_task", "environment.prompts=none.jsonl"], "--pilots"),
        (["environment.type=bandit", "--detekt=5"], "--detect"),
    ],
)
def test_a_plan_without_its_numbers_is_one_sentence(words, message, capsys):
    assert main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_tiny_gain_needs_more_than_there_are():
    spread = spread_of([run[:, None] for run in np.random.default_rng(0).binomial(1, 0.5, (5, 100)).astype(float)])
    assert spread.tasks_for(1e-4, 2) is None
    assert spread.tasks_for(0.5, 10) == FEWEST_TASKS


def test_a_gain_is_in_the_unit_of_the_measure():
    results = [run[:, None] for run in np.random.default_rng(0).normal(0.5, 0.2, (5, 400))]
    returns, recipe = spread_of(results, "mean"), load_recipe([], ["environment.type=word_sort"], "rl")
    assert returns.gain_of(None, recipe) == pytest.approx(0.02, rel=0.1)
    assert returns.gain_of(0.3, recipe) == 0.3
    with pytest.raises(InputError, match=r"at most 1\.1, the range of the returns"):
        returns.gain_of(5.0, recipe)
    assert returns.gain_of(5.0, load_recipe([], ["environment.type=bandit"], "rl")) == 5.0  # whose range is unknown
    rates = spread_of([run[:, None] for run in np.random.default_rng(0).binomial(1, 0.5, (5, 100)).astype(float)])
    assert (rates.gain_of(None, recipe), rates.gain_of(3.0, recipe)) == (0.05, 0.03)


def test_too_few_tasks_show_no_gain():
    rates = spread_of([run[:, None] for run in np.random.default_rng(0).binomial(1, 0.5, (5, 100)).astype(float)])
    assert rates.power(1.0, 1, FEWEST - 1) == 0
    assert rates.gain_seen(1, FEWEST - 1) == rates.gain_seen(5, FEWEST - 1) == math.inf
    assert 0 < rates.gain_seen(5, 40) < rates.gain_seen(1, 40) < 1


def test_pilots_may_start_from_runs_that_differ_in_seed_and_name(tmp_path):
    def trained(name, *keys):
        recipe = load_recipe([], [f"runs={tmp_path}", f"name={name}", "environment.type=bandit", *keys], "sft")
        return f"{RunDirectory.create(recipe).path}/model"

    starts = trained("a", "seed=1"), trained("b", "seed=2"), trained("c", "seed=3", "epochs=7")
    one, two, other = ({"model": {"path": path}, "seed": number} for number, path in enumerate(starts))
    assert _differing(one, two) == []
    assert _differing(one, other) == ["model.path"]
    assert _differing(one, {"model": {"path": "elsewhere"}, "steps": 3}) == ["model.path", "steps"]
