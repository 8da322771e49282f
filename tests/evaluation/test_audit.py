"""The audit: its level over a run, what it says about planted gaming, and that training cannot read it."""

import json
import pickle

import numpy as np
import pytest

import posttrain
from posttrain.environments.rewards import register_reward
from posttrain.errors import InputError
from posttrain.evaluation.audit import BOTH, LEVEL, NEITHER, REWARD, AuditScores, look
from posttrain.recipe.study import Objective
from posttrain.runs.metrics import read_metrics


def evaluations(draws, looks, reward, audit, tasks=48):
    """Returns and audits of each evaluation: tasks differ, answers are drawn again, both drift by so many deviations."""
    level = draws.normal(size=tasks)
    for step in range(looks + 1):
        returns, audits = (level + draws.normal(size=tasks) + drift * step / looks for drift in (reward, audit))
        yield [{str(task): value for task, value in enumerate(side.tolist())} for side in (returns, 3 * audits)]


def verdicts(draws, looks, reward, audit):
    first, *others = [(returns, AuditScores(audits)) for returns, audits in evaluations(draws, looks, reward, audit)]
    return [look(first, other, looks).verdict for other in others]


@pytest.mark.parametrize(("reward", "audit"), [(0.0, 0.0), (0.8, 0.8)])
def test_a_run_alarms_at_most_at_its_level(reward, audit):
    """Over all evaluations of a run: nothing moves, and both rise by the same number of standard deviations."""
    draws, runs = np.random.default_rng(1), 300
    found = [verdicts(draws, 5, reward, audit) for _ in range(runs)]
    # Three standard errors of a rate of 5% above it.
    most = LEVEL + 3 * (LEVEL * (1 - LEVEL) / runs) ** 0.5
    assert np.mean([REWARD in one for one in found]) <= most
    if not reward:
        assert np.mean([set(one) != {NEITHER} for one in found]) <= most


def test_gaming_is_found_and_learning_is_not_called_gaming():
    draws = np.random.default_rng(2)
    gamed = [verdicts(draws, 5, 2.0, 0.0) for _ in range(40)]
    learned = [verdicts(draws, 5, 2.0, 2.0)[-1] for _ in range(40)]
    assert np.mean([REWARD in one for one in gamed]) > 0.95
    assert np.mean([one == BOTH for one in learned]) > 0.95


def test_the_tasks_with_the_largest_gaps_are_named():
    before = {str(task): float(task % 3) for task in range(30)}
    after = {task: value + 1.0 for task, value in before.items()}
    after |= {"7": before["7"] + 9.0}
    found = look((before, AuditScores(before)), (after, AuditScores(before)), 1)
    assert found.verdict == REWARD
    assert found.apart[0] == "7"


@pytest.mark.parametrize(
    "use",
    [
        float,
        np.asarray,
        list,
        sum,
        pickle.dumps,
        lambda scores: scores["1"],
        lambda scores: scores + 1.0,
        lambda scores: max([scores, scores]),
        lambda scores: np.mean(np.array([1.0, 2.0]) * scores),
        lambda scores: json.dumps({"reward": scores}),
    ],
)
def test_a_planted_use_of_the_scores_fails(use):
    with pytest.raises(TypeError):
        use(AuditScores({"1": 1.0, "2": 2.0}))


def length(prompt, answer, **row):
    return len(answer) / 100


def letters(prompt, answer, **row):
    return float(len({c for c in answer if c.isalpha()}))


def run(tiny_model, tmp_path, name, **more):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(30)))
    keys = {
        "model": {"path": str(tiny_model), "threads": 1},
        "environment": {"prompts": str(prompts)},
        "rollout": {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 8, "tokens_per_episode": 200},
        "evaluation": {"every": 1, "sampling": {"temperature": 1.0}, "metric": "return"},
        "steps": 2,
        "runs": str(tmp_path),
        "name": name,
        "plots": False,
    }
    return posttrain.rl(keys, reward=length, **more)


def test_the_audit_scores_the_same_answers_and_changes_no_bit_of_training(tiny_model, tmp_path):
    plain = run(tiny_model, tmp_path, "plain")
    audited = run(tiny_model, tmp_path, "audited", audit={"environment": {"reward": register_reward(letters)}})
    lines = [line for line in read_metrics(audited.run / "metrics.jsonl") if line["kind"] == "audit"]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        episodes = audited.episodes(line["step"], "evaluation")
        assert line["audit/score"] == pytest.approx(np.mean([letters("", e.turns[-1].answer) for e in episodes]))
        assert line["audit/reward"] == pytest.approx(np.mean([e.total_reward for e in episodes]))
        assert line["audit/n"] == len(episodes)
    timed = ("time/", "speed/", "memory/")
    for one, other in zip(plain.metrics + plain.evaluations, audited.metrics + audited.evaluations, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(timed)} == {
            k: v for k, v in other.items() if not k.startswith(timed)
        }
    # Neither evaluations, which choose checkpoints and feed callbacks and studies, nor stored episodes hold a score.
    assert not any("audit" in key for row in audited.evaluations for key in row)
    scores = [e.total_reward for e in audited.episodes(2, "evaluation")]
    assert scores == [e.total_reward for e in plain.episodes(2, "evaluation")]
    assert lines[-1]["message"] in (audited.run / "report.md").read_text()


def test_no_key_selects_by_the_audit(tiny_model, tmp_path):
    from posttrain.tune.trial import MissingMetric, outcome

    with pytest.raises(InputError, match=r"evaluation\.metric"):
        run(tiny_model, tmp_path, "chosen", evaluation={"every": 1, "metric": "audit/score"})
    lines = [{"kind": "evaluation", "step": 1, "return": 1.0}, {"kind": "audit", "step": 1, "audit/score": 2.0}]
    with pytest.raises(MissingMetric):
        outcome(lines, Objective(metric="audit/score", direction="maximize"))


@pytest.mark.parametrize(
    ("audit", "message"),
    [
        ({}, "one scorer"),
        ({"environment": {"type": "bandit"}}, "same type"),
        ({"environment": {"reward": "exact"}, "path": "rm"}, "one scorer"),
    ],
)
def test_an_audit_has_one_scorer_of_the_same_tasks(tiny_model, tmp_path, audit, message):
    with pytest.raises(InputError, match=message):
        run(tiny_model, tmp_path, "wrong", audit=audit)
