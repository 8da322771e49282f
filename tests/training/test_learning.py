"""Reinforcement learning lifts a small model far above chance, and an algorithm with a fault in it does not.

The model knows the form of an answer and nothing of the tasks, so all skill comes from rewards. The thresholds lie below
the worst of twenty training seeds, which are stored in docs/results/learning_tests.jsonl and made again by

    python -m tests.training.test_learning > docs/results/learning_tests.jsonl
"""

import contextlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.harness import made_model

import posttrain
from posttrain.losses.surrogates import PpoLoss
from posttrain.recipe.loss import LOSSES

LAKE = {"type": "frozen_lake", "size": 2, "slippery": False, "max_turns": 2, "observation": "local"}
TASKS = {
    "bandit": ({"type": "bandit"}, "rloo", 15, 5e-4, 0.0, 0.7),
    "word_sort": ({"type": "word_sort"}, "optimal_token_baseline", 40, 5e-4, 0.1, 0.4),
    "firm lake": (LAKE, "reinforce_pp", 30, 1e-3, 0.02, 0.6),
}
"""Environment, credit, steps, learning rate, weight of the KL penalty, and the success on held-out tasks that must be passed;
chance is 50%, 25% and 29%."""
SEEDS = 20
MEASURED = Path(__file__).parents[2] / "docs" / "results" / "learning_tests.jsonl"


@pytest.fixture(scope="module")
def made():
    return str(made_model.small())


def success_after(task, loss, made, folder, seed=0):
    """Success on 256 held-out tasks after training with `loss`."""
    environment, credit, steps, learning_rate, kl, _ = TASKS[task]
    held_out = {"seeds": {"start": 1_000_000, "count": 1}, "final_seeds": {"start": 2_000_000, "count": 256}}
    recipe = {"name": "learned", "seed": seed, "runs": str(folder), "model": {"path": made, "threads": 1}}
    recipe |= {"environment": environment, "credit": {"type": credit}, "loss": {"type": loss}, "steps": steps}
    recipe["rollout"] = {"groups_per_step": 16, "episodes_per_group": 8, "tokens_per_turn": 10}
    recipe |= {"kl": {"coefficient": kl, "estimator": "k2"}, "learner": {"updates_per_step": 2}, "export": "last"}
    recipe["optimizer"] = {"learning_rate": learning_rate, "warmup_updates": 10}
    recipe["evaluation"] = {"every": 0, "sampling": {"temperature": 1.0}, **held_out}
    result = posttrain.rl(recipe, checkpoint={"every": 1000})
    return next(row["success"] for row in result.evaluation if row["policy"] == "trained")


def flipped_ppo(logprobs, batch):
    """PPO with the sign of the advantages the wrong way round."""
    return PpoLoss().compute(logprobs, replace(batch, advantages=-batch.advantages))[0]


def shifted_ppo(logprobs, batch):
    """PPO whose tokens are shifted by one against their rollout log-probabilities and advantages."""
    return PpoLoss().compute(logprobs.roll(1), batch)[0]


def mixed_up_ppo(logprobs, batch):
    """PPO with the old log-probabilities of another sample."""
    other = batch.rollout_logprobs.flip(0)
    return PpoLoss().compute(logprobs, replace(batch, rollout_logprobs=other, old_logprobs=None))[0]


def test_thresholds_are_below_the_worst_of_the_measured_seeds():
    measured = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    for task, (*_, threshold) in TASKS.items():
        found = {line["seed"]: line["success"] for line in measured if line["task"] == task}
        assert sorted(found) == list(range(SEEDS))
        assert threshold < min(found.values()) - 0.1


@pytest.mark.parametrize("task", ["bandit", *(pytest.param(task, marks=pytest.mark.slow) for task in list(TASKS)[1:])])
def test_it_learns_from_rewards_alone(task, made, tmp_path):
    assert success_after(task, "ppo", made, tmp_path) > TASKS[task][-1]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("loss", [flipped_ppo, shifted_ppo, mixed_up_ppo])
def test_a_faulty_algorithm_does_not_pass(task, loss, made, tmp_path, monkeypatch):
    # Other tests list the registered losses.
    monkeypatch.setattr(LOSSES, "_kinds", {name: LOSSES.find(name) for name in LOSSES.names()})
    posttrain.register_loss(loss.__name__)(loss)
    assert success_after(task, loss.__name__, made, tmp_path) < TASKS[task][-1]


def measure(tasks):
    """Print the success of every task and training seed; starting models differ, too."""
    for task in tasks:
        for seed in range(SEEDS):
            # The progress of the run goes to the other stream.
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                success = success_after(task, "ppo", str(made_model.small(seed % 5)), folder, seed)
            print(json.dumps({"task": task, "seed": seed, "success": success}), flush=True)


if __name__ == "__main__":
    measure(sys.argv[1:] or TASKS)
