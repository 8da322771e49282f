"""Plans of tasks and training seeds: their power by simulation and on the board's runs, pilot runs, and the command."""

import json
import math
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml
from benchmarks import power

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.evaluation.paired import paired_test, t_test
from posttrain.evaluation.power import FEWEST_TASKS, Spread, _differing, keys_of_environment, pilot_spread
from posttrain.evaluation.statistics import item_means
from posttrain.recipe.catalogue import recipe_file
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.detectable import FEWEST, POWER
from posttrain.recipe.pipeline import load_pipeline
from posttrain.rollout.store import episodes_file, read_episodes, write_episodes
from posttrain.runs.directory import RunDirectory

BOARD = Path(__file__).parents[2] / "docs" / "results" / "board.jsonl"


def spread_of(results, kind="rate"):
    about = {"source": "runs", "environment": {}, "machine": "", "kind": kind}
    return Spread.of(results, minutes=1.0, minutes_per_episode=None, **about)


def coins():
    """Five runs of 100 tasks that succeed in half of the cases."""
    return [run[:, None] for run in np.random.default_rng(0).binomial(1, 0.5, (5, 100)).astype(float)]


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
    [
        (1, 0.1, 0.0, 1),
        pytest.param(3, 0.1, 0.02, 1, marks=pytest.mark.slow),
        pytest.param(5, 0.07, 0.02, 1, marks=pytest.mark.slow),
        (8, 0.1, 0.05, 4),
    ],
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
        assert spread.least_power(**base) < spread.least_power(**(base | more))
    assert spread.least_power(spread.gain_seen(3, 60), 3, 60) == pytest.approx(POWER, abs=0.01)


QUICK = ("firm_lake", "tools")


@pytest.mark.parametrize(
    "entry", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in power.entries()]
)
def test_every_entry_has_the_planned_power(entry):
    """A loss of 5 points is found in about 80% of comparisons at the planned size, a gain in as many or more: of drawn tasks, and
    of the stored runs; at the size of the board, single runs find what the plan says that they see.
    """
    spread, stored = power.entries()[entry]
    whole = power.population(spread, stored)
    for one, draw in ((spread, power.drawn(spread)), (whole, power.resampled(stored))):
        tasks, found = power.shares(one, draw, 0.05, 2000)
        assert tasks >= FEWEST_TASKS
        assert 0.77 <= min(found) <= 0.84, (tasks, found)
        # Near 1, gains are easier to see.
        assert len(found) == 1 + (spread.mean <= 0.95)
    assert 0.76 <= power.single(whole, power.resampled(stored), 2000)[1] <= 0.84


def test_a_change_of_the_same_tasks_is_harder_to_see():
    """Of 100 tasks that all succeed, 5 fail in every run of the other recipe."""
    spread = replace(power.entries()["bandit"][0], mean=1 - 1e-6, tasks=1e-6, seeds=0.0)
    draws, shown = np.random.default_rng(0), 0
    for _ in range(1000):
        b = np.tile((draws.random(100) >= 0.05).astype(float), (5, 1))
        shown += t_test([1.0] * 5, b.mean(1).tolist(), float(b[0].var()) / 99, 100, True)[1] < 0.05
    assert spread.power(-0.05, 5, 100, same=True) == pytest.approx(shown / 1000, abs=0.04)
    assert spread.power(-0.05, 5, 100) > 0.95


@pytest.mark.parametrize("seeds", [1, 2])
def test_runs_of_one_recipe_are_seldom_found_to_differ(seeds):
    """Seeds of an entry of the board against others."""
    draws, found_any = np.random.default_rng(0), []
    for _, runs in power.entries().values():
        for a in combinations(range(5), seeds):
            for b in combinations([seed for seed in range(5) if seed not in a], seeds):
                tasks = draws.permutation(400)[:150]
                found_any.append(found(runs[list(a)][:, tasks], runs[list(b)][:, tasks]))
    assert len(found_any) > 150
    assert np.mean(found_any) <= 0.06 * (3 - seeds), np.mean(found_any)  # single models of one recipe do differ


def test_the_shipped_spreads_are_those_of_the_board():
    assert len(power.entries()) == 9
    lines = [json.loads(line) for line in BOARD.read_text().splitlines()]
    for entry, (spread, runs) in power.entries().items():
        made = spread_of([run[:, None] for run in runs])
        assert (spread.mean, spread.seeds, spread.tasks) == pytest.approx((made.mean, made.seeds, made.tasks), rel=1e-3)
        minutes = [line["wall_minutes"] for line in lines if line["entry"] == entry]
        assert spread.minutes == pytest.approx(np.median(minutes), rel=1e-3)
        file = recipe_file("memory/board" if entry == "memory" else f"board/{entry}")
        assert spread.environment == keys_of_environment(load_pipeline(str(file), []).stages[-1].recipe)


@pytest.mark.parametrize("name", ["slippery_lake", "bandit"])
def test_the_cheapest_plan_has_the_fewest_training_runs(name, capsys):
    """Final episodes cost little beside a run: the plan takes five seeds, not 30, and says what they cost."""
    assert main(["plan", f"board/{name}", "--detect", "5", "--price", "6"]) == 0
    printed = capsys.readouterr().out
    spread, _ = power.entries()[name]
    tasks = spread.tasks_for(0.05, 5)
    assert (
        f"by 5 training seeds of each recipe and {tasks:,} final tasks: {10 * spread.minutes:,.0f} minutes" in printed
    )
    (row,) = (line.split() for line in printed.splitlines() if line.split()[:1] == ["5"])
    assert row == ["5", f"{tasks:,}", "1", f"{10 * spread.minutes:,.0f}", f"{spread.minutes:,.2f}"]
    assert f"minutes on {spread.machine}, not on this machine" in " ".join(printed.split())
    assert "differ from the recipe" not in printed


def test_the_command_plans_from_stored_and_from_pilot_runs(tiny_model, tmp_path, capsys):
    assert main(["plan", "board/firm_lake", "--detect", "5", "--price", "3"]) == 0
    printed = capsys.readouterr().out
    assert "5 runs of board/firm_lake" in printed
    assert "difference of 5.0 points is shown in 80%" in printed
    # Nobody timed an episode of the board, and its runs were made elsewhere.
    assert "the time of an episode was not measured" in printed
    assert ", not on this machine" in printed
    keys = [f"model.path={tiny_model}", "model.threads=1", f"runs={tmp_path}", "environment.type=word_sort", "steps=1"]
    keys += ["rollout.groups_per_step=2", "rollout.episodes_per_group=2", "evaluation.start=false"]
    keys += ["evaluation.every=1", "evaluation.final_seeds.count=30", "evaluation.episodes_per_seed=2"]
    keys += ["evaluation.sampling.temperature=1", "rollout.tokens_per_turn=8", "evaluation.seeds.count=2"]
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
    assert "differ from the recipe" not in printed
    spread = pilot_spread([Path(pilot) for pilot in pilots.split(",")], load_recipe([], keys, "rl"))
    assert spread.differing == []
    hours = [spread.hours(2, tasks, 1) for tasks in (0, 100, 200)]
    assert hours[2] - hours[1] == pytest.approx(hours[1] - hours[0])
    assert hours[2] > hours[1] > hours[0] > 0
    file = tmp_path / "pilot-0" / "environment.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"cpus_allowed": about["cpus_allowed"] + 1}))
    # The same recipe with another rate is another recipe; guards, an audit and other final tasks leave what is learned.
    assert main(["plan", *keys, "optimizer.learning_rate=0.5", "steps=9", "--pilots", pilots]) == 0
    printed = capsys.readouterr().out
    assert ", not on this machine" in printed
    assert "these runs differ from the recipe in steps, optimizer.learning_rate;" in printed
    same = [
        "guards.patience=7",
        "evaluation.final_seeds.count=50",
        "evaluation.episodes_per_seed=1",
        "seed=9",
        "sinks=[]",
    ]
    file = tmp_path / "pilot-1" / "recipe.yaml"
    values = yaml.safe_load(file.read_text())
    changed = values | {"guards": {"patience": 7}, "audit": {"environment": {"type": "word_sort"}}}
    file.write_text(yaml.safe_dump(changed))
    assert main(["plan", *keys, *same, "--pilots", pilots]) == 0
    assert "differ from the recipe" not in capsys.readouterr().out
    shutil.copytree(tmp_path / "pilot-1", tmp_path / "pilot-2")
    file = tmp_path / "pilot-2" / "recipe.yaml"
    file.write_text(yaml.safe_dump(changed | {"seed": 2, "optimizer": {"learning_rate": 1e-3}}))
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


def test_gains_are_limited_by_tasks_and_given_in_the_unit_of_the_measure():
    spread = spread_of(coins())
    assert spread.tasks_for(1e-4, 2) is None
    assert spread.tasks_for(0.5, 10) == FEWEST_TASKS
    results = [run[:, None] for run in np.random.default_rng(0).normal(0.5, 0.2, (5, 400))]
    returns, recipe = spread_of(results, "mean"), load_recipe([], ["environment.type=word_sort"], "rl")
    assert returns.gain_of(None, recipe) == pytest.approx(0.02, rel=0.1)
    assert returns.gain_of(0.3, recipe) == 0.3
    with pytest.raises(InputError, match=r"at most 1\.1, the range of the returns"):
        returns.gain_of(5.0, recipe)
    assert returns.gain_of(5.0, load_recipe([], ["environment.type=bandit"], "rl")) == 5.0  # whose range is unknown
    rates = spread_of(coins())
    assert (rates.gain_of(None, recipe), rates.gain_of(3.0, recipe)) == (0.05, 0.03)
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
    # A pipeline is planned before its stages are run.
    first = load_recipe([], [f"runs={tmp_path}", "name=d", "environment.type=bandit", "seed=4"], "sft")
    planned, starts = {"model": {"path": f"{tmp_path}/d/model"}}, {f"{tmp_path}/d/model": first.model_dump(mode="json")}
    assert _differing(one, planned) == ["model.path"]
    assert _differing(one, planned, starts=starts) == []
    assert _differing(other, planned, starts=starts) == ["model.path"]
    # An audit that selects the checkpoint counts.
    assert _differing({"audit": 1}, {"audit": 2}) == []
    assert _differing({"audit": 1, "export": "best_by_audit"}, {"audit": 2, "export": "best_by_audit"}) == ["audit"]
