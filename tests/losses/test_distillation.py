"""Distillation losses: closed forms, limits, the bin of all other tokens, and gradients on the enumerable decision process."""

import math

import numpy as np
import pytest
import torch

from posttrain.losses.distillation import TAIL_FLOOR, candidate_logprobs, generalized_jsd, reverse_kl_losses
from posttrain.losses.policy import TokenBatch

from ..credit.decision_process import PARAMETERS, log_softmax, trajectories

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
"""A teacher."""
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
"""A policy."""


def kl(one, other):
    return sum(math.exp(a) * (a - b) for a, b in zip(one.tolist(), other.tolist(), strict=True))


def batch_of(rollout, lengths):
    lengths = torch.tensor(lengths)
    return TokenBatch(
        rollout_logprobs=rollout,
        advantages=torch.zeros_like(rollout),
        stream=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        lengths=lengths,
        weights=torch.ones_like(rollout),
    )


def test_the_divergence_is_the_forward_kl_at_0_and_the_reverse_kl_at_1_the_limits_of_the_scaled_one():
    assert float(generalized_jsd(Q, P, 0.0)) == pytest.approx(kl(P, Q), abs=1e-15)
    assert float(generalized_jsd(Q, P, 1.0)) == pytest.approx(kl(Q, P), abs=1e-15)
    small = 1e-6
    assert float(generalized_jsd(Q, P, small)) / small == pytest.approx(kl(P, Q), rel=1e-4)
    assert float(generalized_jsd(Q, P, 1 - small)) / small == pytest.approx(kl(Q, P), rel=1e-4)
    # At one half it is symmetric and at most log 2.
    assert float(generalized_jsd(Q, P, 0.5)) == pytest.approx(float(generalized_jsd(P, Q, 0.5)))
    apart = [torch.tensor(p, dtype=torch.float64).log() for p in ([1 - 1e-12, 1e-12], [1e-12, 1 - 1e-12])]
    assert float(generalized_jsd(*apart, 0.5)) == pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_between_them_it_is_the_weighted_divergence_from_the_mixture(beta):
    mixture = (beta * P.exp() + (1 - beta) * Q.exp()).log()
    expected = beta * kl(P, mixture) + (1 - beta) * kl(Q, mixture)
    assert float(generalized_jsd(Q, P, beta)) == pytest.approx(expected, abs=1e-15)
    assert float(generalized_jsd(P, P, beta)) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_candidates_and_the_rest_bound_the_divergence_from_below(beta):
    draws = torch.Generator().manual_seed(0)
    teacher = torch.log_softmax(3 * torch.randn(5, 40, generator=draws, dtype=torch.float64), 1)
    policy = torch.log_softmax(3 * torch.randn(5, 40, generator=draws, dtype=torch.float64), 1)
    whole = generalized_jsd(policy, teacher, beta)
    last = torch.zeros(5, dtype=torch.float64)
    for k in (1, 5, 20, 39):
        _, ids = teacher.topk(k, 1)
        part = generalized_jsd(candidate_logprobs(policy, ids), candidate_logprobs(teacher, ids), beta)
        assert bool((part <= whole + 1e-12).all())
        assert bool((part >= last - 1e-12).all())  # more candidates refine the bins
        last = part
    # With all tokens but one as candidates, the bin of the rest is that token.
    torch.testing.assert_close(last, whole, rtol=1e-9, atol=1e-12)


def test_the_rest_is_the_mass_of_all_other_tokens_and_is_floored():
    logprobs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [1 - 3e-20, 1e-20, 1e-20, 1e-20]], dtype=torch.float64).log()
    found = candidate_logprobs(logprobs, torch.tensor([[0, 2], [0, 1]]))
    np.testing.assert_allclose(found[0].exp().numpy(), [0.5, 0.15, 0.35])
    assert float(found[1, 2]) == TAIL_FLOOR


def test_without_the_rest_the_policy_could_lower_the_sum_by_leaving_all_candidates():
    teacher = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    away = torch.tensor([[0.01, 0.01, 0.98]], dtype=torch.float64).log()
    ids = torch.tensor([[0, 1]])
    bins = [candidate_logprobs(logprobs, ids) for logprobs in (away, teacher)]
    assert float(generalized_jsd(bins[0][:, :2], bins[1][:, :2], 1.0)) < 0
    assert float(generalized_jsd(*bins, 1.0)) > 1


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_gradient_of_candidates_is_that_of_finite_differences(beta):
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64), 1)
    _, ids = teacher.topk(3, 1)
    target = candidate_logprobs(teacher, ids)

    def loss(values):
        return generalized_jsd(candidate_logprobs(torch.log_softmax(values, 1), ids), target, beta)

    assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize(
    ("teacher", "rollout", "lengths", "settings", "expected"),
    [
        ([-0.5, -2.5, -0.5], None, [2, 1], {}, [-0.5, 0.5, 0.0]),  # the gap of log-probabilities
        ([-1.0, -3.0, -1.5], None, [2, 1], {"discount": 0.5}, [1.0, 2.0, 0.5]),  # discounted inside a stream
        ([0.0, 0.0], [-1.5, -3.0], [2], {"cap": 2.0}, [-math.exp(0.5), -2.0]),  # stale tokens, up to the cap
    ],
)
def test_the_gradient_is_the_advantage_times_the_weight(teacher, rollout, lengths, settings, expected):
    start = [-1.0, -2.0, -0.5] if not settings else [-1.0] * len(teacher)
    logprobs = torch.tensor(start, requires_grad=True)
    data = batch_of(logprobs.detach() if rollout is None else torch.tensor(rollout), lengths)
    reverse_kl_losses(logprobs, torch.tensor(teacher), data, **settings).sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, atol=1e-7)


TEACHER = log_softmax(np.random.default_rng(3).normal(size=PARAMETERS.shape))
"""[STATES, 2] log-probabilities of a teacher of the decision process."""


def expected_gradient(discount: float, behaviour: np.ndarray) -> np.ndarray:
    """[STATES, 2]: the mean over all trajectories of `behaviour` of the gradient of the summed losses."""
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    log_policy = torch.log_softmax(parameters, 1)
    every = trajectories()
    places = torch.tensor([choice for t in every for choice in t.choices])
    logprobs = log_policy[places[:, 0], places[:, 1]]
    teacher, rollout = (torch.from_numpy(table)[places[:, 0], places[:, 1]] for table in (TEACHER, behaviour))
    lengths = [len(t.choices) for t in every]
    chances = torch.tensor([t.probability(behaviour) for t in every], dtype=torch.float64)
    losses = reverse_kl_losses(logprobs, teacher, batch_of(rollout, lengths), discount)
    (losses * torch.repeat_interleave(chances, torch.tensor(lengths))).sum().backward()
    assert parameters.grad is not None
    return parameters.grad.numpy()


def exact_gradient(whole: bool) -> np.ndarray:
    """Gradient of KL(policy, teacher): of sequences if `whole`, else summed over the visited states, whose odds are fixed."""
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    log_policy, teacher = torch.log_softmax(parameters, 1), torch.from_numpy(TEACHER)
    fixed = log_softmax(PARAMETERS)
    total = torch.zeros((), dtype=torch.float64)
    at_state = (log_policy.exp() * (log_policy - teacher)).sum(1)
    for t in trajectories():
        if whole:
            logs = sum(log_policy[choice] for choice in t.choices)
            total = total + t.environment * torch.exp(logs) * (logs - sum(teacher[choice] for choice in t.choices))
        else:
            total = total + t.probability(fixed) * sum(at_state[state] for state, _ in t.choices)
    total.backward()
    assert parameters.grad is not None
    return parameters.grad.numpy()


@pytest.mark.parametrize(("discount", "whole"), [(0.0, False), (1.0, True)])
def test_on_policy_the_gradient_is_unbiased(discount, whole):
    found, exact = expected_gradient(discount, log_softmax(PARAMETERS)), exact_gradient(whole)
    np.testing.assert_allclose(found, exact, atol=1e-12)
    assert np.abs(exact).max() > 0.05


def test_single_tokens_miss_the_gradient_of_whole_sequences_and_importance_weights_correct_for_them():
    assert np.abs(expected_gradient(0.0, log_softmax(PARAMETERS)) - exact_gradient(whole=True)).max() > 1e-3
    # At the first token, whose state no earlier token has led to, the correction is exact.
    found = expected_gradient(0.0, log_softmax(PARAMETERS[:, ::-1].copy()))
    np.testing.assert_allclose(found[0], exact_gradient(whole=False)[0], atol=1e-12)
