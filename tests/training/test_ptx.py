"""Supervised rows in the updates of RL: they add coefficient x their mean loss and gradient, and nothing else."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from posttrain.losses.surrogates import PpoLoss
from posttrain.models.policy import Policy
from posttrain.recipe.loss import EntropyRecipe
from posttrain.recipe.model import LearnerRecipe, ModelRecipe, OptimizerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.objectives import MixedObjective, PolicyObjective, SupervisedObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Updater, means

from . import small
from .preferences import write_jsonl
from .test_batches import sample
from .test_rl import lines, train
from .test_updater import samples as episodes


def rows():
    """Three rows, the last with the prompt and the first tokens of an episode."""
    draws = np.random.default_rng(7)
    made = [sample(draws.integers(3, 250, 6), draws.integers(3, 250, n), "row") for n in (3, 11)]
    ids = episodes()[0].stream.ids
    made.append(sample(ids[:10], [*ids[10:12], *draws.integers(3, 250, 18)], "row"))
    for one in made:
        one.ptx = True
    return made


def gradients(model, samples, objective, monkeypatch, budget=4096, temperature=1.0):
    """Gradients as they stand before they are applied, and the metrics."""
    policy = Policy(ModelRecipe(path=str(model)))
    batches = LearnerRecipe(tokens_per_batch=budget)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(), 1)
    found = small.kept_gradients(monkeypatch)
    forward = token_forward(policy, batches, temperature)
    totals = Updater(policy, optimizer, batches, forward).update(samples, objective)
    return found, means(totals)


@pytest.mark.parametrize(
    "loss", [{"type": "ppo"}, {"type": "ppo", "aggregation": "constant", "constant": 50.0}, {"type": "gspo"}]
)
def test_loss_and_gradient_are_the_sum_of_both(loss, tiny_model, monkeypatch):
    policy = PolicyObjective(RlRecipe(loss=loss).loss, entropy=EntropyRecipe(coefficient=0.01))
    alone, own = gradients(tiny_model, episodes(), policy, monkeypatch)
    taught, supervised = gradients(tiny_model, rows(), SupervisedObjective(), monkeypatch)
    assert max(g.abs().max() for g in taught.values()) > 1e-3
    for budget in (4096, 150):
        mixed, found = gradients(tiny_model, [*episodes(), *rows()], MixedObjective(policy, 0.3), monkeypatch, budget)
        for name, gradient in mixed.items():
            torch.testing.assert_close(gradient, alone[name] + 0.3 * taught[name], atol=2e-6, rtol=1e-4)
        assert found["loss/total"] == pytest.approx(own["loss/total"] + 0.3 * supervised["loss/nll"], rel=1e-4)
        assert found["ptx/loss"] == pytest.approx(supervised["loss/nll"], rel=1e-5)
        for name in ("loss/policy", "policy/entropy", "policy/mismatch"):
            assert found[name] == pytest.approx(own[name], rel=1e-4), name


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.5, 2.0])
def test_the_likelihood_of_rows_does_not_depend_on_the_sampling_temperature(temperature, tiny_model, monkeypatch):
    policy = PolicyObjective(PpoLoss(), entropy=EntropyRecipe(coefficient=0.01))
    alone, own = gradients(tiny_model, episodes(), policy, monkeypatch, temperature=temperature)
    taught, supervised = gradients(tiny_model, rows(), SupervisedObjective(), monkeypatch)
    for budget in (4096, 150):
        together = [row for pair in zip(rows(), episodes(), strict=False) for row in pair] + episodes()[3:]
        mixed, found = gradients(
            tiny_model, together, MixedObjective(policy, 0.3), monkeypatch, budget, temperature=temperature
        )
        assert found["ptx/loss"] == pytest.approx(supervised["loss/nll"], rel=1e-5)
        assert found["policy/entropy"] == pytest.approx(own["policy/entropy"], rel=1e-5)
        for name, gradient in mixed.items():
            torch.testing.assert_close(gradient, alone[name] + 0.3 * taught[name], atol=2e-6, rtol=1e-4)


def test_a_run_reports_the_likelihood_at_temperature_1(tiny_model, tmp_path):
    values = small.recipe_values(tiny_model, tmp_path, ptx=ptx(tmp_path))
    losses = set()
    for temperature in (0.5, 1.0, 1.5):
        rollout = values["rollout"] | {"sampling": {"temperature": temperature}, "filter": {"type": "none"}}
        changes = {"ptx": values["ptx"], "steps": 1, "rollout": rollout, "learner": {"tokens_per_batch": 1500}}
        run, _ = train(tiny_model, tmp_path, name=f"at_{temperature}", **small.two_steps(values) | changes)
        losses.add(round(lines(run, "train")[0]["ptx/loss"], 5))
    assert len(losses) == 1


def test_rows_are_trained_if_no_episode_has_credit(tiny_model, monkeypatch):
    silent = episodes()
    for one in silent:
        one.advantages[:] = 0
    taught, _ = gradients(tiny_model, rows(), SupervisedObjective(), monkeypatch)
    mixed, _ = gradients(tiny_model, [*silent, *rows()], MixedObjective(PolicyObjective(PpoLoss()), 2.0), monkeypatch)
    for name, gradient in mixed.items():
        torch.testing.assert_close(gradient, 2.0 * taught[name], atol=2e-6, rtol=1e-4)


def ptx(folder, **keys):
    texts = [{"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "On a lake."}]}] * 9
    return {
        "data": {"train": write_jsonl(folder / "rows.jsonl", texts), "max_tokens": 200},
        "rows_per_update": 4,
    } | keys


def test_a_run_learns_its_rows(tiny_model, tmp_path):
    learning = {"optimizer": {"learning_rate": 3e-3}, "steps": 4}
    plain, _ = train(tiny_model, tmp_path, name="plain", **learning)
    mixed, _ = train(tiny_model, tmp_path, name="mixed", ptx=ptx(tmp_path), **learning)
    losses = [line["ptx/loss"] for line in lines(mixed, "train")]
    assert losses[-1] < losses[0] - 0.5
    assert "ptx/loss" not in lines(plain, "train")[0]
    # The first step's episodes are the same; its updates are not.
    first, other = lines(plain, "train")[0], lines(mixed, "train")[0]
    assert first["rollout/return"] == other["rollout/return"]
    assert first["optimizer/gradient_norm"] != other["optimizer/gradient_norm"]


@pytest.mark.slow
def test_a_killed_run_resumes_at_the_next_rows(tiny_model, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    changes = {"ptx": ptx(tmp_path), "credit": {"type": "gae"}}
    assert small.run(small.recipe_values(tiny_model, tmp_path / "whole", **changes)) == 0
    killed = small.recipe_values(tiny_model, tmp_path / "killed", **changes)
    assert small.run(killed, die_at=("posttrain.training.rows:FixedRows.batch", 6)) == -9
    assert small.run(killed, resume=True) == 0
    small.assert_same(tmp_path / "whole" / "small", tmp_path / "killed" / "small", stored=False)


@pytest.mark.parametrize("key", [{"held_out": 2}, {"validation": "a.jsonl"}, {"streaming": True}])
def test_keys_of_measured_rows_are_refused(key, tmp_path):
    with pytest.raises(ValidationError, match=rf"data.{next(iter(key))}\n"):
        RlRecipe(ptx={"data": {"train": "rows.jsonl"} | key})


def test_rows_longer_than_a_forward_pass_are_refused():
    with pytest.raises(ValidationError, match=r"`ptx.data.max_tokens` = 5000 .* `learner.tokens_per_batch`"):
        RlRecipe(ptx={"data": {"train": "rows.jsonl", "max_tokens": 5000}})
