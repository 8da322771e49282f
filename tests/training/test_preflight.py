"""What is checked before the first update: the exactness of the passes, and the signal of the first episodes."""

import pytest

import posttrain
from posttrain.environments.protocol import Environment
from posttrain.models import gate
from posttrain.models.gate import exactness
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_class
from posttrain.recipe.rl import RlRecipe
from posttrain.runs.metrics import read_metrics
from posttrain.training.tasks import first_episodes

from .preferences import write_jsonl

MIXED = {"rollout/episodes": 64.0, "rollout/failed": 1.0, "rollout/rejected_share": 0.125, "rollout/success": 0.25}
MIXED |= {"rollout/return": 0.25, "reward/group_spread": 0.31, "credit/zero_groups": 0.25}


ROLLOUT = {"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 6, "tokens_per_episode": 400}


def run(tiny_model, tmp_path, name, reward=None, **keys):
    common = {"model": {"path": str(tiny_model), "threads": 1}, "rollout": ROLLOUT, "steps": 1, "plots": False}
    common["evaluation"] = {"every": 1, "seeds": {"count": 2}, "final_seeds": {"count": 4}}
    return posttrain.rl(common | keys, name=name, runs=str(tmp_path), reward=reward)


def preflight(result):
    return [line for line in read_metrics(result.run / "metrics.jsonl") if line["kind"] == "preflight"]


def test_a_run_stores_its_exactness_and_its_first_episodes(tiny_model, tmp_path):
    result = run(tiny_model, tmp_path, "bandit", environment={"type": "bandit"})
    exact, episodes = preflight(result)
    assert exact["message"].startswith("exactness, in nats per token: packed rows from transformers by ")
    assert "decoding from the learner by" in exact["message"]
    assert episodes["step"] == 1
    assert "4 training episodes: 0 failed, 100% of the answers rejected" in episodes["message"]
    assert "of the random policy 50.0%" in episodes["message"]
    [warning] = [line for line in result.warnings if "no signal" in line]
    assert "no answer has the right form" in warning
    assert f"`posttrain sft model.path={tiny_model} environment.type=bandit name=warm`" in warning
    report = (result.run / "report.md").read_text()
    assert exact["message"] in report
    assert episodes["message"] in report


def test_the_command_warms_this_model_up_on_these_tasks(monkeypatch):
    """Without an expert, answers come from rows."""
    silent = MIXED | {"credit/zero_groups": 1.0, "rollout/success": 0.0}
    environment = {"type": "frozen_lake", "size": 5, "slippery": False}
    recipe = RlRecipe(environment=environment, model={"path": "tiny"})
    keys = "environment.type=frozen_lake environment.size=5 environment.slippery=false"
    for words in (keys, "data.train=answers.jsonl"):
        _, [warning] = first_episodes(recipe, silent, {}, [0.0])
        assert f"`posttrain sft model.path=tiny {words} name=warm`" in warning
        monkeypatch.setattr(environment_class("frozen_lake"), "expert", Environment.expert)


def constant(prompt, answer, **row):
    return 0.5


def zero(prompt, answer, **row):
    return 0.0


def letters(prompt, answer, **row):
    return float(sum(map(ord, answer)))


@pytest.mark.parametrize(
    ("reward", "temperature", "key"),
    [
        (constant, 1.0, "environment.reward"),
        (zero, 1.0, "data.train="),
        (letters, 1.0, None),
        (constant, 0.0, "rollout.sampling.temperature"),
    ],
)
def test_a_reward_that_is_the_same_in_each_group_is_no_signal(tiny_model, tmp_path, reward, temperature, key):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"Say {number}."} for number in range(30)])
    rollout = ROLLOUT | {"sampling": {"temperature": temperature}}
    result = run(tiny_model, tmp_path, "text", environment={"prompts": prompts}, reward=reward, rollout=rollout)
    found = [line for line in result.warnings if "no signal" in line]
    assert len(found) == (key is not None)
    keys = ("environment.reward", "data.train=", "rollout.sampling.temperature")
    assert [one for line in found for one in keys if one in line] == [key] * len(found)


def test_only_groups_that_all_agree_without_success_lack_a_signal():
    agreeing = {"credit/zero_groups": 1.0}
    for changed, silent in [
        ({}, False),
        (agreeing, True),
        (agreeing | {"rollout/rejected_share": 1.0}, True),
        (agreeing | {"rollout/success": 1.0}, False),
        ({"credit/zero_groups": None, "reward/group_spread": 0.0}, False),
        (agreeing | {"rollout/success": None}, True),
    ]:
        metrics = {key: value for key, value in (MIXED | changed).items() if value is not None}
        recipe = RlRecipe(environment={"type": "bandit"})
        line, warnings = first_episodes(recipe, metrics, {"success": 0.5}, [0.0, 1.0])
        assert "64 training episodes: 1 failed" in line
        assert bool(warnings) == silent


def test_the_distance_is_measured_and_not_assumed(tiny_model, monkeypatch):
    """A pass that is off by a little, but within the tolerance, shows in the line."""
    usual = gate._outputs
    monkeypatch.setattr(gate, "read_verdict", lambda *rest: None)
    monkeypatch.setattr(gate, "keep_verdict", lambda *rest: None)
    clean = exactness(Policy(tiny_model).model)
    monkeypatch.setattr(gate, "_outputs", lambda model, rows: [one + 1e-5 for one in usual(model, rows)])
    assert "by 1e-05" in exactness(Policy(tiny_model).model)
    assert "by 1e-05" not in clean
