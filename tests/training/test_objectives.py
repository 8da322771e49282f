"""What the policy's objective decides over a whole update, before its micro-batches."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from posttrain.episode import Stream
from posttrain.models.forward import TokenScores
from posttrain.recipe.loss import LossRecipe, SftLossRecipe
from posttrain.training.objectives import PolicyObjective, SupervisedObjective
from posttrain.training.updater import Sample, add_totals, means


def sample(advantages, group=0, truncated=False, **fields):
    """A stream of one prompt token and one sampled token per advantage."""
    n = len(advantages)
    sampled = np.array([False] + [True] * n)
    stream = Stream(
        ids=np.arange(n + 1),
        sampled=sampled,
        rollout_logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        rewards=np.zeros(n + 1, dtype=np.float32),
        turn=np.where(sampled, 0, -1).astype(np.int32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
    )
    credit = np.array(advantages, dtype=np.float32)
    return Sample(stream, "a stream", credit, group=group, truncated=truncated, **fields)


def step(objective, samples, parts):
    """Gradient by the log-probability of each token, and metrics, of an update in the micro-batches `parts`."""
    weights, divisor = objective.weigh(samples)
    gradients, totals = [np.zeros(s.sampled_tokens) for s in samples], {}
    for part in parts:
        chosen = [i for i in part if objective.has_signal(samples[i])]
        if not chosen:
            continue
        count = sum(samples[i].sampled_tokens for i in chosen)
        logprobs = torch.full((count,), -1.0, requires_grad=True)
        entropies = torch.full((count,), 0.5)
        loss, metrics = objective(
            TokenScores(logprobs, entropies), [samples[i] for i in chosen], [weights[i] for i in chosen]
        )
        (loss / divisor).backward()
        ends = np.cumsum([samples[i].sampled_tokens for i in chosen])[:-1]
        for i, gradient in zip(chosen, np.split(logprobs.grad.numpy(), ends), strict=True):
            gradients[i] = gradient
        add_totals(totals, metrics)
    return np.concatenate(gradients), means(totals)


def recipe(**keys):
    return TypeAdapter(LossRecipe).validate_python(keys)


SPLITS = [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]]]


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [-1 / 3, -1 / 3, 0, 0, 2 / 3]),
        ("sequence_mean", [-1 / 4, -1 / 4, 0, 0, 1]),
        ("constant", [-1 / 10, -1 / 10, 0, 0, 1 / 5]),
    ],
)
def test_truncated_answers_are_in_neither_the_loss_nor_the_divisor(aggregation, expected, parts):
    samples = [sample([1, 1]), sample([3, 3], truncated=True), sample([-2])]
    constant = {"constant": 10.0} if aggregation == "constant" else {}
    objective = PolicyObjective(recipe(type="ppo", aggregation=aggregation, mask_truncated=True, **constant))
    gradient, metrics = step(objective, samples, parts)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert metrics["policy/truncated_masked"] == pytest.approx(1 / 3)


def test_truncated_answers_count_unless_the_recipe_masks_them():
    samples = [sample([1, 1]), sample([3, 3], truncated=True), sample([-2])]
    gradient, metrics = step(PolicyObjective(recipe(type="ppo")), samples, SPLITS[0])
    np.testing.assert_allclose(gradient, np.array([-1, -1, -3, -3, 2]) / 5, atol=1e-6)
    assert "policy/truncated_masked" not in metrics


@pytest.mark.parametrize("parts", SPLITS)
def test_gpg_makes_up_for_groups_without_advantages(parts):
    samples = [sample([1, 1], group=0), sample([0, 0], group=1), sample([-2], group=0)]
    gradient, _ = step(PolicyObjective(recipe(type="gpg")), samples, parts)
    np.testing.assert_allclose(gradient, 1.5 * np.array([-1, -1, 0, 0, 2]) / 5, atol=1e-6)


@pytest.mark.parametrize("parts", SPLITS)
def test_dft_reports_the_likelihood_too(parts):
    samples = [sample([0, 0]), sample([0, 0]), sample([0])]
    gradient, metrics = step(SupervisedObjective(SftLossRecipe(type="dft")), samples, parts)
    np.testing.assert_allclose(gradient, -np.exp(-1) / 5, atol=1e-6)
    assert metrics["loss/nll"] == pytest.approx(1.0)
    assert metrics["loss/dft"] == pytest.approx(np.exp(-1))
