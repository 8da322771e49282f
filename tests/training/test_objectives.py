"""Quantities that the policy's objective computes over a whole update, before its micro-batches."""

from copy import copy

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from posttrain.models.forward import TokenScores
from posttrain.recipe.loss import ClipCovRecipe, EntropyRecipe, KlCovRecipe, KlRecipe, LossRecipe, SftLossRecipe
from posttrain.training.objectives import PolicyObjective, SupervisedObjective
from posttrain.training.rows import stream_of
from posttrain.training.updater import Sample, add_totals, means


def sample(advantages, group=0, truncated=False, **fields):
    """A stream of one prompt token and one sampled token per advantage."""
    n = len(advantages)
    sampled = np.array([False] + [True] * n)
    stream = stream_of(np.arange(n + 1), sampled)
    stream.rollout_logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
    credit = np.array(advantages, dtype=np.float32)
    return Sample(stream, "a stream", credit, group=group, truncated=truncated, **fields)


def step(objective, samples, parts, by="logprobs"):
    """Gradient by the log-probability (or entropy) of each token, and metrics, of an update in the micro-batches `parts`, each in
    a process of its own."""
    weights, divisor = objective.weigh(samples)
    gradients, totals = [np.zeros(s.sampled_tokens) for s in samples], {}
    for part in parts:
        chosen = [i for i in part if objective.has_signal(samples[i])]
        if not chosen:
            continue
        count = sum(samples[i].sampled_tokens for i in chosen)
        logprobs = torch.full((count,), -1.0, requires_grad=True)
        entropies = torch.full((count,), 0.5, requires_grad=True)
        loss, metrics = copy(objective)(
            TokenScores(logprobs, entropies), [samples[i] for i in chosen], [weights[i] for i in chosen]
        )
        (loss / divisor).backward()
        if entropies.grad is None:
            entropies.grad = torch.zeros(count)
        ends = np.cumsum([samples[i].sampled_tokens for i in chosen])[:-1]
        found = {"logprobs": logprobs.grad, "entropies": entropies.grad}[by].numpy()
        for i, gradient in zip(chosen, np.split(found, ends), strict=True):
            gradients[i] = gradient
        add_totals(totals, metrics)
    of_all = [count for name, (_, count) in totals.items() if name.endswith(("cov_masked", "_held", "entropy_masked"))]
    assert not of_all or of_all == [sum(one.sampled_tokens for one in samples)]
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
    if aggregation == "token_mean":  # they count unless the recipe masks them
        gradient, metrics = step(PolicyObjective(recipe(type="ppo")), samples, parts)
        np.testing.assert_allclose(gradient, np.array([-1, -1, -3, -3, 2]) / 5, atol=1e-6)
        assert "policy/truncated_masked" not in metrics


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]])
@pytest.mark.parametrize("kind", ["ppo", "reinforce", "gpg"])
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [0, 0, 0, -1 / 4, -1 / 4, 2 / 4, 1 / 4]),
        ("sequence_mean", [0, 0, 0, -1 / 6, -1 / 6, 2 / 3, 1 / 3]),
        ("constant", [0, 0, 0, -1 / 10, -1 / 10, 2 / 10, 1 / 10]),
    ],
)
def test_a_group_without_baseline_is_in_neither_the_loss_nor_the_divisor(aggregation, expected, kind, parts):
    """Groups of 1 and 3, as credit leaves them; the credit of the former may be anything."""
    keys = {"constant": 10.0} if aggregation == "constant" else {}
    for credit in ([0, 0, 0], [5, 5, 5]):
        samples = [sample(credit, has_baseline=False)]
        samples += [sample(advantages, group=1) for advantages in ([1, 1], [-2], [-1])]
        objective = PolicyObjective(recipe(type=kind, aggregation=aggregation, **keys))
        gradient, _ = step(objective, samples, parts)
        np.testing.assert_allclose(gradient, expected, atol=1e-6)
        # The same as without it, also for the penalty and the bonus.
        extra = PolicyObjective(
            recipe(type=kind, aggregation=aggregation, **keys),
            KlRecipe(coefficient=0.5),
            entropy=EntropyRecipe(coefficient=0.5),
        )
        for one in samples:
            one.ref_logprobs = np.full(one.sampled_tokens, -1.5, dtype=np.float32)
        for by in ("logprobs", "entropies"):
            with_it, metrics = step(extra, samples, parts, by)
            others, their_metrics = step(extra, samples[1:], [[0, 1, 2]], by)
            np.testing.assert_allclose(with_it, [0, 0, 0, *others], atol=1e-6)
            assert metrics["loss/policy"] == pytest.approx(their_metrics["loss/policy"])


@pytest.mark.parametrize("parts", SPLITS)
def test_gpg_compensates_for_groups_without_advantages_which_stay_in_the_divisor(parts):
    for kind, factor in (("gpg", 1.5), ("ppo", 1.0)):
        samples = [sample([1, 1], group=0), sample([0, 0], group=1), sample([-2], group=0)]
        gradient, _ = step(PolicyObjective(recipe(type=kind)), samples, parts)
        np.testing.assert_allclose(gradient, factor * np.array([-1, -1, 0, 0, 2]) / 5, atol=1e-6)


@pytest.mark.parametrize("parts", SPLITS)
def test_dft_reports_the_likelihood_too(parts):
    samples = [sample([0, 0]), sample([0, 0]), sample([0])]
    gradient, metrics = step(SupervisedObjective(SftLossRecipe(type="dft")), samples, parts)
    np.testing.assert_allclose(gradient, -np.exp(-1) / 5, atol=1e-6)
    assert metrics["loss/nll"] == pytest.approx(1.0)
    assert metrics["loss/dft"] == pytest.approx(np.exp(-1))


@pytest.mark.parametrize("parts", SPLITS)
def test_only_the_tokens_with_the_highest_entropy_learn(parts):
    entropies = [[0.1, 2.0], [0.3, 0.2], [1.0]]
    samples = [
        sample(advantages, entropies=np.array(own, dtype=np.float32))
        for advantages, own in zip(([1, 1], [1, 1], [-2]), entropies, strict=True)
    ]
    objective = PolicyObjective(recipe(type="ppo"), entropy=EntropyRecipe(top_share=0.4))
    gradient, metrics = step(objective, samples, parts)
    np.testing.assert_allclose(gradient, np.array([0, -1, 0, 0, 2]) / 5, atol=1e-6)
    assert metrics["policy/low_entropy_masked"] == pytest.approx(3 / 5)


def apart():
    """Three streams whose fourth token has by far the largest covariance, and the advantage 4."""
    samples = [sample([0, 0]), sample([-1, 4]), sample([0.5])]
    for one, logprobs in zip(samples, ([-2, -2], [-2, -0.1], [-2]), strict=True):
        one.stream.rollout_logprobs[1:] = logprobs
        one.old_logprobs = one.stream.rollout_logprobs[1:].copy()
    return samples


@pytest.mark.parametrize("parts", SPLITS)
def test_clip_cov_drops_tokens_of_the_whole_update(parts):
    entropy = EntropyRecipe(covariance=ClipCovRecipe(share=0.2, low=1.0, high=10.0))
    random = np.random.default_rng(0)
    gradient, metrics = step(PolicyObjective(recipe(type="cispo"), entropy=entropy, random=random), apart(), parts)
    # Ratios are e^(-1 - old).
    np.testing.assert_allclose(gradient, np.array([0, 0, np.e, 0, -0.5 * np.e]) / 5, rtol=1e-5)
    assert metrics["policy/clip_cov_masked"] == pytest.approx(1 / 5)
    with pytest.raises(ValueError, match="pass `random`"):
        PolicyObjective(recipe(type="ppo"), entropy=entropy).weigh(apart())


@pytest.mark.parametrize("parts", SPLITS)
def test_kl_cov_selects_tokens_of_the_whole_update(parts):
    entropy = EntropyRecipe(covariance=KlCovRecipe(share=0.2, coefficient=3.0))
    plain, _ = step(PolicyObjective(recipe(type="cispo")), apart(), parts)
    gradient, metrics = step(PolicyObjective(recipe(type="cispo"), entropy=entropy), apart(), parts)
    # The present log-probability, -1, is below the old one of the fourth token, -0.1.
    np.testing.assert_allclose(gradient - plain, np.array([0, 0, 0, -3, 0]) / 5, atol=1e-6)
    assert metrics["policy/kl_cov_held"] == pytest.approx(1 / 5)
    assert metrics["loss/kl_cov"] == pytest.approx(0.9 / 3)  # over the streams with an advantage


@pytest.mark.parametrize("parts", SPLITS)
def test_the_bonus_is_a_mean_over_the_tokens_that_get_it(parts):
    bonus = [[False, True], [False, False], [True]]
    samples = [sample([1] * len(own), bonus=np.array(own)) for own in bonus]
    objective = PolicyObjective(recipe(type="ppo"), entropy=EntropyRecipe(coefficient=0.1, tokens="answer"))
    gradient, metrics = step(objective, samples, parts, by="entropies")
    np.testing.assert_allclose(gradient, -0.1 * np.array([0, 1, 0, 0, 1]) / 2, atol=1e-6)
    assert metrics["policy/bonus_entropy"] == pytest.approx(0.5)
    target = PolicyObjective(recipe(type="ppo"), entropy=EntropyRecipe(target=1.0), entropy_coefficient=0.0)
    assert all(target.has_signal(one) for one in (sample([0, 0]), sample([1]))), "streams without credit count, too"
