"""Studies as files: their keys, error messages, and the ready ones."""

import re
from pathlib import Path

import pytest
import yaml

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe.study import grid_of, load_study
from posttrain.tune.report import short_names
from posttrain.tune.study import check_space, distributions, from_storage, to_storage

from .studies import study_values

ROOT = Path(__file__).parents[2]
ROWS = {"stage": "sft", "data": {"train": "a.jsonl", "held_out": 5}}


def load(folder, *overrides, **changes):
    (folder / "s.yaml").write_text(yaml.safe_dump(study_values(**changes), sort_keys=False))
    return load_study(str(folder / "s.yaml"), list(overrides))


def objective(metric, **more):
    return {"metric": metric, "direction": "maximize", **more}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 3}, r"s.yaml line \d+: there is no key steps; write keys.steps"),
        ({"search": {"a": {"low": 1, "high": 2, "logg": True}}}, r"no key search.a.logg; the nearest is search.a.log"),
        ({"search": {"a": {"low": 2, "high": 1}}}, r"line \d+: search.a: `low` \(2\) must be below `high`"),
        ({"search": {"a": {"low": 0, "high": 1, "step": 0.3}}}, "must be a whole number of `step`s"),
        ({"search": {"a": {"low": 1, "high": 2.5, "int": True}}}, "with `int`, `low`, `high` and `step` must be whole"),
        ({"search": {"a": [1]}}, "`a` has too few values"),
        ({"search": {"a": [1, 1]}}, "`a` contains a value twice"),
        ({"search": None}, "exactly one of `search` and `groups`"),
        ({"search": None, "groups": [{"name": "g", "grid": {"a": [1, 2]}}]}, "`trials` has no effect: groups is"),
        ({"search": None, "trials": None, "groups": [{"name": "g", "grid": {"a": {"low": 1, "high": 2}}}]}, "a grid"),
        ({"keys": {"stage": "evaluate"}}, "for stage evaluate; a study searches one of sft, reward, dpo, rl"),
        ({"keys": {"stage": "rl", "name": "x"}}, "name of a trial has no effect"),
        ({"stage": "rl"}, "for stage rl, not tune; run it with `posttrain rl`"),
        ({"start": [{"seed": 1}]}, "`start` gives seed, which is not searched"),
        ({"start": [{"optimizer.learning_rate": 1.0}]}, "start point 1 has .* = 1, which is not from 1e-06 to 0.01"),
        ({"objective": objective("return", within={"policy/kl": {}})}, "exactly one of `max` and `min`"),
        ({"objective": objective("policy/kl")}, "metric: policy/kl is not measured .*success"),
        ({"objective": objective("return", within={"audit/score": {"min": 0}})}, "within: audit/score is not measured"),
        (
            {"keys": {**ROWS, "data": {"train": "a"}}, "objective": objective("validation/loss")},
            "validation/loss.*name `data.validation`",
        ),
        ({"keys": ROWS, "objective": objective("validation/los")}, r"line \d+: .*the nearest is validation/loss$"),
        ({"keys": ROWS, "objective": objective("validation/loss_low")}, "validation/loss_low is not measured"),
        (
            {"keys": ROWS, "objective": objective("validation/loss", within={"policy/kl": {"max": 1.0}})},
            r"line \d+: objective.within: policy/kl is not measured .* or by training steps of stage sft",
        ),
        (
            {"keys": {"stage": "rl", "environment": {"type": "bandit"}, "steps": 4, "evaluation": {"every": 0}}},
            r"evaluation\.every = 0 leaves a trial without an evaluation",
        ),
    ],
)
def test_an_error_is_one_sentence_with_the_location(tmp_path, changes, said):
    with pytest.raises(InputError, match=said) as caught:
        load(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "metric", "limit"),
    [
        ("sft", "validation/loss/code", "loss/nll"),
        ("dpo", "validation/margin", "policy/chosen_logprob"),
        ("reward", "validation/accuracy/code", "validation/loss"),
        ("rl", "score/update", "rollout/score/update"),
        ("rl", "turns", "critic/loss"),
    ],
)
def test_metrics_of_a_stage_may_be_named(tmp_path, stage, metric, limit):
    keys = {**ROWS, "stage": stage} if stage != "rl" else study_values()["keys"]
    study = load(tmp_path, keys=keys, objective=objective(metric, within={limit: {"max": 1.0}}))
    assert list(study.recipe.objective.within) == [limit]


def test_a_key_that_no_recipe_has_is_refused_before_anything_runs(tmp_path):
    study = load(tmp_path, search={"optimizer.learning_rat": [1e-3, 1e-4]})
    with pytest.raises(InputError, match=r"no key optimizer\.learning_rat; the nearest is optimizer.learning_rate"):
        check_space(study)
    study = load(tmp_path, search={"rollout.episodes_per_group": [1, 2]})
    (note,) = check_space(study)
    assert "rollout.episodes_per_group = 1 gives no valid recipe" in note


def test_overrides_reach_every_part_of_a_study(tmp_path):
    words = ["trials=9", "search.optimizer.learning_rate.high=0.5", "search.seed=[1, 2]", "workers=2"]
    words += ["search.kl.coefficient={low: 0.1, high: 1}", "objective.within.policy/kl.max=0.5"]
    words += ["keys.rollout.groups_per_step=3"]
    study = load(tmp_path, *words)
    recipe = study.recipe
    assert (recipe.trials, recipe.workers, recipe.search["seed"]) == (9, 2, [1, 2])
    rate = recipe.search["optimizer.learning_rate"]
    assert (rate.low, rate.high, rate.log) == (1e-6, 0.5, True)
    assert (recipe.search["kl.coefficient"].low, recipe.objective.within["policy/kl"].max) == (0.1, 0.5)
    assert study.at({}).rollout.groups_per_step == 3
    assert list(distributions(study)) == list(recipe.search)


def test_a_point_becomes_a_recipe(tmp_path):
    both = [{"steps": 3, "rollout.groups_per_step": 5}, {"steps": 6, "rollout.groups_per_step": 2}]
    loss = [{"type": "gspo"}, {"type": "ppo", "clip_low": 0.1}]
    study = load(tmp_path, search={"both": {"together": both}, "loss": loss, "model.lora": [None, {"rank": 4}]})
    point = {"both": both[1], "loss": loss[1], "model.lora": {"rank": 4}}
    assert from_storage(study, to_storage(point)) == point
    assert all(isinstance(value, str) for value in to_storage(point).values())
    recipe = study.at(point, Path("somewhere"), "0003", seed=7)
    assert (recipe.steps, recipe.rollout.groups_per_step, recipe.loss.clip_low) == (6, 2, 0.1)
    assert (recipe.model.lora.rank, recipe.seed, recipe.runs, recipe.name) == (4, 7, "somewhere", "0003")
    with pytest.raises(InputError, match=r"rollout.groups_per_step=0"):
        study.at({"rollout.groups_per_step": 0})


READY = {"rlhf/tune_sft": 20, "rlhf/tune_reward": 20, "rlhf/tune_dpo": 15, "rlhf/tune_ppo": 20, "ragen/search": 28}


@pytest.mark.parametrize(("name", "count"), READY.items())
def test_the_ready_studies_resolve(name, count, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["tune", f"recipes/{name}.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f": {count} trials of " in said
    assert "gives no valid recipe" not in said
    study = load_study(f"recipes/{name}.yaml", [])
    keys = list(study.recipe.spaces)
    names = short_names(keys)
    assert len(set(names)) == len(keys)
    assert all(f".{key}".endswith(f".{short}") for key, short in zip(keys, names, strict=True))
    if name == "ragen/search":  # the groups of the document
        rows = re.findall(r"^ +(\d+) +(group\d)", said, re.M)
        assert [int(number) for number, _ in rows] == list(range(28))
        assert [[group for _, group in rows].count(f"group{number}") for number in (1, 2, 3, 4)] == [9, 4, 6, 9]
    elif name != "rlhf/tune_dpo":  # it starts from the values of the recipe
        (start,) = study.recipe.start
        assert study.at(start) == study.at({})


@pytest.mark.parametrize("name", ["bandit", "sokoban"])
def test_every_trial_of_the_search_is_possible_and_judged_with_the_same_turns(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = load_study("recipes/ragen/search.yaml", [f"recipe={name}.yaml"])
    for group in study.recipe.groups:
        for point in grid_of(group):
            trial = study.at(point)
            assert (trial.credit.type, trial.model.path) == ("grpo", "Qwen/Qwen2.5-3B-Instruct")
            assert trial.evaluation.environment.max_turns == 5
            assert trial.environment.max_turns == point.get("environment.max_turns", 1 if name == "bandit" else 5)
            turns = max(trial.environment.max_turns, 5)
            assert trial.rollout.tokens_per_episode >= 400 + 400 * turns + 200 * (turns - 1)


@pytest.mark.slow
def test_every_command_of_the_page_resolves(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/how-to/tune.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^posttrain (tune [^\n]+)$", text, re.M)
    assert len(commands) >= 4
    for command in commands:
        words = [word for word in command.partition(" #")[0].split() if word not in ("--resume", "--dry-run")]
        assert main([*words, "--dry-run"]) == 0, (command, capsys.readouterr())
