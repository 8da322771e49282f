"""Rows to which no reward applies, mappings whose keys vary, and runs without evaluations."""

import numpy as np
import pytest

import posttrain
from posttrain.credit.baselines import weighted_scores
from posttrain.engines.local.engine import LocalEngine
from posttrain.environments.rewards import register_reward
from posttrain.episode import Outcome
from posttrain.errors import RunError
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.metrics import read_metrics

from ..rollout.episodes import played
from .preferences import write_jsonl

ROWS = [{"prompt": f"Say {n}.", "kind": "ab"[n % 2], "n": n} for n in range(26)]


def trained(result):
    (stored,) = [step for step in stored_steps(result.run / "episodes") if step.split == "train"]
    return read_episodes(stored.path).episodes


@pytest.fixture
def train(tiny_model, tmp_path):
    """Train two steps on `ROWS` with the given reward and keys; returns the metrics lines by kind and the run."""

    def run(reward, **keys):
        write_jsonl(tmp_path / "rows.jsonl", ROWS)
        recipe = {"environment": {"prompts": f"{tmp_path / 'rows.jsonl'}", "success_reward": None}, "name": "run"}
        recipe |= {"model": {"path": f"{tiny_model}", "threads": 1}, "seeds": {"start": 0, "count": 16}, "steps": 1}
        recipe["rollout"] = {"groups_per_step": 8, "episodes_per_group": 2, "tokens_per_turn": 4}
        held_out = {"seeds": {"start": 24, "count": 2}, "final_seeds": {"start": 16, "count": 8}}
        recipe |= {"evaluation": {"every": 0, **held_out}, "runs": f"{tmp_path}"}
        result = posttrain.rl(recipe | keys, reward=reward)
        lines = read_metrics(result.run / "metrics.jsonl")
        return {line["kind"]: line for line in lines}, result

    return run


def test_rows_without_a_reward_are_no_part_of_updates_returns_and_metrics(train):
    def reward(answer, kind, n):
        return None if kind == "a" else n + len(answer) % 2

    lines, result = train(reward)
    episodes = trained(result)
    assert {ROWS[e.seed]["kind"] for e in episodes} == {"b"}
    assert {e.outcome for e in episodes} == {Outcome.TERMINATED}
    step = lines["train"]
    assert (step["rollout/episodes"], step["rollout/kept"], step["rollout/failed"]) == (16, len(episodes), 0)
    assert step["rollout/unscored"] == 16 - len(episodes) > 0
    assert step["rollout/return"] == pytest.approx(np.mean([e.total_reward for e in episodes]))
    assert step["rollout/return"] >= 1
    assert (lines["final"]["unscored"], lines["final"]["n"], lines["final"]["failed"]) == (4, 4, 0)
    assert lines["final"]["return"] >= 17


def one(answer, kind):
    return 1.0 if kind == "a" else None


def two(answer, n):
    return float(n)


def test_the_functions_that_apply_count_and_the_mean_of_each_is_over_its_rows(train):
    lines, result = train([one, (two, 0.5)])
    episodes = trained(result)
    step = lines["train"]
    of_one = [e for e in episodes if ROWS[e.seed]["kind"] == "a"]
    assert step["rollout/score/one"] == 1.0
    assert step["rollout/score_n/one"] == len(of_one)
    assert "rollout/score_n/two" not in step
    assert step["rollout/score/two"] == pytest.approx(np.mean([e.seed for e in episodes]))
    assert step["rollout/score/score"] == pytest.approx(step["rollout/return"])
    for e in episodes:
        assert e.total_reward == (ROWS[e.seed]["kind"] == "a") + 0.5 * e.seed


def test_a_mapping_whose_keys_vary_logs_what_was_trained(train):
    def reward(answer, n):
        return {"score": n / 16, "even": 1.0} if n % 2 == 0 else {"score": 1.0} if n % 3 else 0.5

    step = train(reward)[0]["train"]
    assert step["rollout/score/score"] == pytest.approx(step["rollout/return"])
    assert step["rollout/score/even"] == 1.0
    assert 0 < step["rollout/score_n/even"] < 16


def test_gdpo_leaves_a_score_out_where_it_does_not_apply(train):
    def reward(answer, kind, n):
        return {"score": 1.0, "length": len(answer), "never": None, "form": None if kind == "a" else n}

    lines, _ = train(reward, credit={"type": "gdpo", "weights": {"length": 1.0, "never": 1.0, "form": 1.0}})
    assert "rollout/score/never" not in lines["train"]
    episodes = [played(seed=n) for n in range(3)]
    for one, scores in zip(episodes, ({"a": None, "b": 1.0}, {"a": 2.0}, {"b": None}), strict=True):
        one.turns[-1].info["scores"] = scores
    values, weights = weighted_scores(episodes, np.zeros(3), None)
    assert weights.tolist() == [1.0, 1.0]
    assert np.array_equal(values, [[np.nan, 1.0], [2.0, np.nan], [np.nan, np.nan]], equal_nan=True)


def test_a_step_or_an_evaluation_without_any_reward_says_so(train):
    lines, _ = train(lambda answer, n: None if n < 16 else 1.0)
    assert lines["train"]["rollout/kept"] == 0
    assert "no reward applies to 16 of 16 episodes" in lines["warning"]["message"]
    with pytest.raises(RunError, match="no reward applies to 8 of 8 episodes"):
        train(lambda answer, n: 1.0 if n < 16 else None, name="other")


def test_rollout_leaves_unscored_episodes_out_with_a_warning(tiny_policy, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    reward = register_reward(lambda answer, n: n if n % 2 else None)
    environment = posttrain.make_env("text_task", prompts=f"{tmp_path / 'rows.jsonl'}", reward=reward)
    with pytest.warns(UserWarning, match="no reward applies to 2 of 4 episodes"):
        episodes = posttrain.rollout(LocalEngine(tiny_policy), environment, range(4), max_tokens=2)
    assert [e.total_reward for e in episodes] == [1.0, 3.0]


def test_a_plain_number_is_logged_once_and_nothing_is_played_at_the_start_without_evaluations(train):
    lines, result = train(lambda answer: len(answer) / 10)
    assert "rollout/return" in lines["train"]
    assert not [key for line in lines.values() for key in line if "score" in key]
    played = {(s.split, s.step): s.episodes for s in stored_steps(result.run / "episodes")}
    assert played == {("train", 1): 16, ("final", 1): 8}
    assert "evaluation" not in lines
