"""Supervised rows in the updates of RL: they add coefficient x their mean loss and gradient, and nothing else."""

import numpy as np
import pytest
import torch

from posttrain.losses.surrogates import PpoLoss
from posttrain.recipe.loss import EntropyRecipe
from posttrain.recipe.model import LearnerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.objectives import MixedObjective, PolicyObjective, SupervisedObjective, token_forward

from . import small
from .preferences import write_jsonl
from .small import lines
from .test_batches import sample
from .test_rl import train
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


def gradients(policy, samples, objective, monkeypatch, budget=4096, temperature=1.0):
    forward = token_forward(policy, LearnerRecipe(), temperature)
    return small.gradients(policy, forward, samples, objective, monkeypatch, budget)


PPO, GSPO = {"type": "ppo"}, {"type": "gspo"}


@pytest.mark.parametrize(
    ("loss", "temperature"),
    [
        *((PPO, 1.0), (PPO | {"aggregation": "constant", "constant": 50.0}, 1.0), (GSPO, 1.0)),
        *((PPO, temperature) for temperature in (0.0, 0.3, 0.5, 2.0)),
    ],
)
def test_loss_and_gradient_are_the_sum_of_both_and_rows_are_at_temperature_1(
    loss, temperature, tiny_policy, monkeypatch
):
    policy = PolicyObjective(RlRecipe(loss=loss).loss, entropy=EntropyRecipe(coefficient=0.01))
    alone, own = gradients(tiny_policy, episodes(), policy, monkeypatch, temperature=temperature)
    taught, supervised = gradients(tiny_policy, rows(), SupervisedObjective(), monkeypatch)
    assert max(g.abs().max() for g in taught.values()) > 1e-3
    expected = {name: alone[name] + 0.3 * taught[name] for name in alone}
    for budget in (4096, 150):
        together = [row for pair in zip(rows(), episodes(), strict=False) for row in pair] + episodes()[3:]
        objective = MixedObjective(policy, 0.3)
        mixed, found = gradients(tiny_policy, together, objective, monkeypatch, budget, temperature)
        torch.testing.assert_close(mixed, expected, atol=2e-6, rtol=1e-4)
        assert found["loss/total"] == pytest.approx(own["loss/total"] + 0.3 * supervised["loss/nll"], rel=1e-4)
        assert found["ptx/loss"] == pytest.approx(supervised["loss/nll"], rel=1e-5)
        for name in ("loss/policy", "policy/entropy", "policy/mismatch"):
            assert found[name] == pytest.approx(own[name], rel=1e-4), name


def test_a_run_reports_the_likelihood_at_temperature_1(tiny_model, tmp_path):
    values = small.recipe_values(tiny_model, tmp_path, ptx=ptx(tmp_path))
    losses = set()
    for temperature in (0.5, 1.0, 1.5):
        rollout = values["rollout"] | {"sampling": {"temperature": temperature}, "filter": {"type": "none"}}
        changes = {"ptx": values["ptx"], "steps": 1, "rollout": rollout, "learner": {"tokens_per_batch": 1500}}
        run, _ = train(tiny_model, tmp_path, name=f"at_{temperature}", **small.two_steps(values) | changes)
        losses.add(round(lines(run, "train")[0]["ptx/loss"], 5))
    assert len(losses) == 1


def test_rows_are_trained_if_no_episode_has_credit(tiny_policy, monkeypatch):
    silent = episodes()
    for one in silent:
        one.advantages[:] = 0
    taught, _ = gradients(tiny_policy, rows(), SupervisedObjective(), monkeypatch)
    mixed, _ = gradients(tiny_policy, [*silent, *rows()], MixedObjective(PolicyObjective(PpoLoss()), 2.0), monkeypatch)
    expected = {name: 2.0 * gradient for name, gradient in taught.items()}
    torch.testing.assert_close(mixed, expected, atol=2e-6, rtol=1e-4)


def ptx(folder, **keys):
    texts = [{"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "On a lake."}]}] * 9
    data = {"train": write_jsonl(folder / "rows.jsonl", texts), "max_tokens": 200}
    return {"data": data, "rows_per_update": 4} | keys


def test_a_run_learns_its_rows(tiny_model, tmp_path):
    few = small.two_steps(small.recipe_values(tiny_model, tmp_path))
    learning = few | {"optimizer": {"learning_rate": 3e-3}, "steps": 4}
    plain, _ = train(tiny_model, tmp_path, name="plain", **learning)
    mixed, _ = train(tiny_model, tmp_path, name="mixed", ptx=ptx(tmp_path), **learning)
    losses = [line["ptx/loss"] for line in lines(mixed, "train")]
    assert losses[-1] < losses[0] - 0.5
    assert "ptx/loss" not in lines(plain, "train")[0]
    # The first step's episodes are the same; its updates are not.
    first, other = lines(plain, "train")[0], lines(mixed, "train")[0]
    assert first["rollout/return"] == other["rollout/return"]
    assert first["optimizer/gradient_norm"] != other["optimizer/gradient_norm"]
