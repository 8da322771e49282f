"""Every estimator against the exact policy gradient of a process whose episodes are all enumerated.

The expectation is exact too: over every group of 2 and of 3 independent episodes, through `assign`, `token_weights`
and `policy_loss` as training calls them.
"""

from functools import cache

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.credit.returns import optimal_token_baseline
from posttrain.losses.kl import estimate_kl, kl_loss
from posttrain.losses.policy import TokenBatch, policy_loss, token_weights
from posttrain.recipe.credit import CreditRecipe
from posttrain.recipe.loss import LossRecipe

from .decision_process import (
    PARAMETERS,
    binary,
    episode,
    exact_gradient,
    joint_samples,
    log_softmax,
    score,
    trajectories,
)

LOG_POLICY = log_softmax(PARAMETERS)
EXACT = exact_gradient(PARAMETERS)
GREEDY = {0: 2.0}
"""Return of the greedy episode: any number that does not depend on the sampled episodes."""
LOSSES = [
    {"type": "ppo"},
    {"type": "ppo", "clip_high": 0.28, "dual_clip": 3.0},
    {"type": "gspo"},
    {"type": "gspo_token"},
    {"type": "cispo"},
    {"type": "dppo"},
    {"type": "sapo"},
    {"type": "gmpo"},
    {"type": "reinforce"},
]


def expected_gradient(credit: dict, loss: dict, size: int, aggregation: str = "constant") -> np.ndarray:
    """[STATES, 2]: what one update moves the logits by, on average; `constant` divides by the episodes."""
    options = {"aggregation": aggregation} | ({"constant": float(size)} if aggregation == "constant" else {})
    recipe = TypeAdapter(LossRecipe).validate_python(loss | options)
    choices, lengths, weights, advantages = [], [], [], []
    for chosen, probability, values in credited_groups(tuple(credit.items()), size):
        counts = [len(t.choices) for t in chosen]
        per_stream, divisor = token_weights(recipe.aggregation, counts, recipe.constant)
        for trajectory, weight in zip(chosen, per_stream, strict=True):
            choices += trajectory.choices
            weights += [probability * weight / divisor] * len(trajectory.choices)
        lengths += counts
        advantages.append(values)
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    states, tokens = torch.tensor(choices).T
    logprobs = torch.log_softmax(parameters, dim=1)[states, tokens]
    # All groups in one batch: the loss is a sum, so weighing each group by its probability gives the expectation.
    batch = TokenBatch(
        rollout_logprobs=logprobs.detach(),
        advantages=torch.from_numpy(np.concatenate(advantages)),
        stream=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths=torch.tensor(lengths),
        weights=torch.tensor(weights, dtype=torch.float64),
    )
    total, _ = policy_loss(recipe, logprobs, batch)
    total.backward()
    assert parameters.grad is not None
    return -parameters.grad.numpy()


@cache
def credited_groups(credit: tuple, size: int) -> list:
    """(trajectories, probability, advantages of all their sampled tokens) of every group."""
    recipe = TypeAdapter(CreditRecipe).validate_python(dict(credit))
    found = []
    for chosen, probability in joint_samples(size, LOG_POLICY):
        played = [episode(t, LOG_POLICY, i) for i, t in enumerate(chosen)]
        values = compute_advantages(played, recipe, reward_streams(played), GREEDY).values
        flat = [
            v[s.sampled]
            for e, streams in zip(played, values, strict=True)
            for s, v in zip(e.streams, streams, strict=True)
        ]
        found.append((chosen, probability, np.concatenate(flat).astype(np.float64)))
    return found


def relative_error(found: np.ndarray, scale: float = 1.0) -> float:
    return float(np.abs(found - scale * EXACT).max() / np.abs(EXACT).max())


def error_of_direction(found: np.ndarray) -> float:
    """Sine of the angle to the exact gradient: the error that no learning rate corrects."""
    cosine = float((found * EXACT).sum() / np.linalg.norm(found) / np.linalg.norm(EXACT))
    return float(np.sqrt(max(0.0, 1 - cosine**2)))


def test_the_process_is_a_distribution_with_varied_lengths():
    every = trajectories()
    assert sum(t.probability(LOG_POLICY) for t in every) == pytest.approx(1.0, abs=1e-14)
    assert {len(t.choices) for t in every} == {1, 2, 3, 4}
    assert len({(t.choices, t.ids) for t in every}) == len(every) == 19
    assert {max(t.turn) for t in every} == {0, 1}
    assert all((np.array(t.turn) >= 0).tolist() == list(t.sampled) for t in every)
    assert sum(p for _, p in joint_samples(3, LOG_POLICY)) == pytest.approx(1.0, abs=1e-13)


def test_the_enumerated_gradient_is_that_of_the_expected_return():
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    log_policy = torch.log_softmax(parameters, dim=1)
    value = torch.zeros((), dtype=torch.float64)
    for t in trajectories():
        value = value + t.environment * t.total * torch.exp(sum(log_policy[state, token] for state, token in t.choices))
    value.backward()
    assert parameters.grad is not None
    np.testing.assert_allclose(parameters.grad.numpy(), EXACT, atol=1e-13)
    assert np.abs(EXACT).max() > 0.1


REINFORCE = {"type": "reinforce"}
OUTCOMES = [{"type": kind} for kind in ("arpo", "rloo", "remax")]
UNBIASED = [
    *((credit, loss) for credit in OUTCOMES for loss in LOSSES),
    # Ratios of whole streams give every token the mean advantage of its stream, hence their bias where advantages
    # differ inside a stream, which `gspo_token` is there for.
    *((REINFORCE, loss) for loss in LOSSES if loss["type"] not in ("gspo", "gmpo")),
    *(
        ({"type": "turn_returns", "baseline": baseline}, {"type": loss})
        for baseline in ("none", "others")
        for loss in ("reinforce", "ppo", "gspo_token", "cispo")
    ),
]
BIASED = [
    *(
        ({"type": kind}, REINFORCE, "constant")
        for kind in ("grpo", "brpo", "opo", "reinforce_pp", "reinforce_pp_baseline")
    ),
    *((credit, REINFORCE, mean) for credit in OUTCOMES for mean in ("token_mean", "sequence_mean")),
    *((REINFORCE, {"type": loss}, "constant") for loss in ("gspo", "gmpo")),
    *(
        ({"type": kind} | keys, REINFORCE, "constant")
        for kind, keys in (
            ("reinforce", {"discount": 0.8}),
            ("turn_returns", {"baseline": "none", "discount": 0.8}),
            ("mt_grpo", {}),
            ("gigpo", {}),
            ("gigpo", {"divide_by_std": False}),
            ("gigpo", {"divide_by_std": False, "discount": 1.0}),
        )
    ),
]
"""Credit, loss and aggregation."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("credit", "loss"), UNBIASED, ids=str)
def test_unbiased(credit, loss, size):
    # Advantages leave `assign` in float32, and those of rloo in groups of 3 hold halves alone, which are exact there.
    assert relative_error(expected_gradient(credit, loss, size)) < 1e-9


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("credit", "loss", "aggregation"), BIASED, ids=str)
def test_biased_estimators_miss_the_direction(credit, loss, aggregation, size):
    assert error_of_direction(expected_gradient(credit, loss, size, aggregation)) > 0.01


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_dr_grpo_and_gigpo_without_its_second_level_and_divisor_are_unbiased_up_to_a_factor(loss, size):
    # A third is rounded to float32 on its way out of `assign`; in groups of 2 all is exact.
    factor, bound = (size - 1) / size, 1e-9 if size == 2 else 1e-7
    assert relative_error(expected_gradient({"type": "dr_grpo"}, loss, size), factor) < bound
    if loss == REINFORCE:
        gigpo = {"type": "gigpo", "divide_by_std": False, "step_weight": 0.0}
        assert relative_error(expected_gradient(gigpo, loss, size), factor) < 1e-7


def corrected_gradient(correction: dict) -> np.ndarray:
    """[STATES, 2]: expected update with `arpo` if the rollout policy differs from the learner's."""
    log_rollout = log_softmax(
        PARAMETERS + 0.5 * np.array([[1.0, -1.0], [-1.0, 0.5], [0.3, 0.0], [0.0, 1.0], [1.0, 0], [0, 0]])
    )
    every = trajectories()
    choices = torch.tensor([choice for t in every for choice in t.choices])
    lengths = torch.tensor([len(t.choices) for t in every])
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    logprobs = torch.log_softmax(parameters, dim=1)[choices[:, 0], choices[:, 1]]
    per_token = lambda values: torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), lengths)  # noqa: E731
    batch = TokenBatch(
        rollout_logprobs=torch.from_numpy(log_rollout)[choices[:, 0], choices[:, 1]],
        advantages=per_token([t.total for t in every]),
        stream=torch.repeat_interleave(torch.arange(len(every)), lengths),
        lengths=lengths,
        weights=per_token([t.probability(log_rollout) for t in every]),
        old_logprobs=logprobs.detach(),
    )
    recipe = TypeAdapter(LossRecipe).validate_python({"type": "reinforce", "correction": correction})
    policy_loss(recipe, logprobs, batch)[0].backward()
    assert parameters.grad is not None
    return -parameters.grad.numpy()


def test_sequence_weights_correct_for_another_rollout_policy():
    assert relative_error(corrected_gradient({"weights": "sequence", "cap": 1e9})) < 1e-12


@pytest.mark.parametrize(
    "correction",
    [
        {"weights": "token", "cap": 1e9},
        {"weights": "sequence", "cap": 1.5},
        {"weights": "none", "reject": "geometric", "bounds": [0.5, 1.5]},
        {"weights": "sequence", "cap": 1e9, "reject": "sequence", "bounds": [0.5, 2.0]},
    ],
    ids=str,
)
def test_other_corrections_are_biased(correction):
    assert error_of_direction(corrected_gradient(correction)) > 0.01


def mean_of_scores(credit: dict, size: int, every: list) -> np.ndarray:
    """[STATES, 2]: expectation of the mean over a group of advantage x gradient of the log-probability of its tokens."""
    recipe = TypeAdapter(CreditRecipe).validate_python(credit)
    total = np.zeros_like(EXACT)
    for chosen, probability in joint_samples(size, LOG_POLICY, every):
        played = [episode(t, LOG_POLICY, i) for i, t in enumerate(chosen)]
        values = compute_advantages(played, recipe, reward_streams(played)).values
        for t, e, streams in zip(chosen, played, values, strict=True):
            own = streams[0][e.streams[0].sampled]
            assert len(set(own.tolist())) == 1
            total += probability * float(own[0]) * score(t, LOG_POLICY) / size
    return total


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_is_the_gradient_of_a_truncated_log_likelihood(size):
    every = [binary(t) for t in trajectories()]
    chances = [t.probability(LOG_POLICY) for t in every]
    success = sum(c * t.total for c, t in zip(chances, every, strict=True))
    assert 0.2 < success < 0.8
    gradient = sum(c * t.total * score(t, LOG_POLICY) for c, t in zip(chances, every, strict=True))
    # d/dp of -(1 - p) - ... - (1 - p)^(n - 1) / (n - 1), the logarithm of p cut off after n - 1 terms.
    slope = sum((1 - success) ** k for k in range(size - 1))
    found = mean_of_scores({"type": "maxrl"}, size, every)
    np.testing.assert_allclose(found, slope * gradient, atol=2e-7)
    assert np.abs(gradient).max() > 0.1


@pytest.mark.parametrize(("size", "k"), [(2, 2), (3, 2), (3, 3), (2, None), (3, None)])
@pytest.mark.parametrize("rewards", ["many", "binary"])
def test_pass_at_k_is_the_gradient_of_the_best_of_k(rewards, size, k):
    every = trajectories() if rewards == "many" else [binary(t) for t in trajectories()]
    attempts = k or size
    exact = np.zeros_like(EXACT)
    for chosen, probability in joint_samples(attempts, LOG_POLICY, every):
        best = max(t.total for t in chosen)
        exact += probability * best * sum(score(t, LOG_POLICY) for t in chosen)
    found = attempts * mean_of_scores({"type": "pass_at_k", "k": k}, size, every)
    np.testing.assert_allclose(found, exact, atol=2e-7 * attempts)
    assert np.abs(exact).max() > 0.1


def token_baseline_gradient(size: int) -> np.ndarray:
    """[STATES, 2]: the expected mean over a group of the sum over tokens of advantage x score, with exact energies."""
    policy = np.exp(LOG_POLICY)
    scores = np.eye(2) - policy[:, None, :]  # [STATES, token, 2]: gradient of the token's log-probability
    total = np.zeros_like(EXACT)
    for chosen, probability in joint_samples(size, LOG_POLICY):
        rewards = [np.array(t.rewards)[np.array(t.sampled)] for t in chosen]
        energies = [np.array([(scores[choice] ** 2).sum() for choice in t.choices]) for t in chosen]
        found = optimal_token_baseline(rewards, energies, np.zeros(size, int))
        for t, advantages in zip(chosen, found, strict=True):
            for (state, token), advantage in zip(t.choices, advantages, strict=True):
                total[state] += probability * advantage * scores[state, token] / size
    return total


def test_the_bias_of_the_optimal_token_baseline_falls_with_the_group():
    errors = [error_of_direction(token_baseline_gradient(size)) for size in (2, 3)]
    assert 0.01 < errors[1] < errors[0]


def test_the_gradients_of_kl_estimators_are_as_documented():
    reference = np.log(np.array([0.3, 0.7]))
    logits = torch.tensor([0.4, -0.1], dtype=torch.float64, requires_grad=True)

    def gradient(value: torch.Tensor) -> np.ndarray:
        return torch.autograd.grad(value, logits, retain_graph=True)[0].numpy()

    log_policy = torch.log_softmax(logits, dim=0)
    probabilities, target = log_policy.exp(), torch.from_numpy(reference)
    reverse = gradient((probabilities * (log_policy - target)).sum())
    forward = gradient((target.exp() * (target - log_policy)).sum())
    batch = TokenBatch(
        rollout_logprobs=log_policy.detach(),
        advantages=torch.zeros(2, dtype=torch.float64),
        stream=torch.arange(2),
        lengths=torch.ones(2, dtype=torch.int64),
        weights=probabilities.detach(),
        ref_logprobs=target,
    )
    expected = {"k1": np.zeros(2), "k2": reverse, "k3": forward}
    for estimator, exact in expected.items():
        np.testing.assert_allclose(gradient(kl_loss(estimator, log_policy, batch)), exact, atol=1e-12)
    assert np.abs(reverse - forward).max() > 1e-3


REFERENCE = 0.3 * np.array([[1.0, -1.0], [-1.0, 0.5], [0.3, 0.0], [0.0, 1.0], [1.0, 0.0], [-0.5, 0.8]])
"""Logits of a reference policy less those of the policy."""


def test_importance_weighted_kl_has_the_gradient_of_the_kl_for_any_sampling_policy():
    log_rollout = log_softmax(PARAMETERS - 1.5 * REFERENCE)
    every = trajectories()
    choices = torch.tensor([choice for t in every for choice in t.choices])
    lengths = torch.tensor([len(t.choices) for t in every])
    weights = torch.tensor([t.probability(log_rollout) for t in every], dtype=torch.float64).repeat_interleave(lengths)
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    log_policy, target = torch.log_softmax(parameters, dim=1), torch.from_numpy(log_softmax(PARAMETERS + REFERENCE))
    states, tokens = choices.T
    visits = torch.zeros(len(PARAMETERS), dtype=torch.float64).index_add(0, states, weights)
    kl = (visits * (log_policy.exp() * (log_policy - target)).sum(1)).sum()
    exact = torch.autograd.grad(kl, parameters, retain_graph=True)[0]
    batch = TokenBatch(
        rollout_logprobs=torch.from_numpy(log_rollout)[states, tokens],
        advantages=torch.zeros(len(choices), dtype=torch.float64),
        stream=torch.repeat_interleave(torch.arange(len(every)), lengths),
        lengths=lengths,
        weights=weights,
        ref_logprobs=target[states, tokens],
    )

    def gradient(estimator: str, importance_weighted: bool) -> torch.Tensor:
        loss = kl_loss(estimator, log_policy[states, tokens], batch, importance_weighted)
        return torch.autograd.grad(loss, parameters, retain_graph=True)[0]

    for estimator in ("k1", "k3"):
        torch.testing.assert_close(gradient(estimator, True), exact, atol=1e-12, rtol=0)
    for estimator in ("k2", "k3"):
        assert (gradient(estimator, False) - exact).abs().max() > 1e-3


@pytest.mark.parametrize("distance", [0.01, -0.3])
def test_only_k1_is_a_kl_penalty_in_the_reward(distance):
    reference = log_softmax(PARAMETERS + distance * REFERENCE)
    parameters = torch.tensor(PARAMETERS, requires_grad=True)
    log_policy = torch.log_softmax(parameters, dim=1)
    kl = torch.zeros((), dtype=torch.float64)
    penalties: dict[str, np.ndarray] = {}
    for t in trajectories():
        log_probability = sum(log_policy[choice] for choice in t.choices)
        difference = sum(log_policy[choice] - reference[choice] for choice in t.choices)
        kl = kl + t.environment * log_probability.exp() * difference
        for estimator in ("k1", "k2", "k3"):
            d = np.array([LOG_POLICY[choice] - reference[choice] for choice in t.choices])
            paid = t.probability(LOG_POLICY) * estimate_kl(estimator, d).sum()
            penalties[estimator] = penalties.get(estimator, 0.0) + paid * score(t, LOG_POLICY)
    kl.backward()
    assert parameters.grad is not None
    exact = parameters.grad.numpy()
    cosine = {
        name: float((found * exact).sum() / np.linalg.norm(found) / np.linalg.norm(exact))
        for name, found in penalties.items()
    }
    np.testing.assert_allclose(penalties["k1"], exact, atol=1e-12)
    assert max(cosine["k2"], cosine["k3"]) < 0.5
    assert np.linalg.norm(penalties["k3"]) < 0.02 * np.linalg.norm(exact)


def test_log_probabilities_of_the_full_vocabulary_are_biased_where_sampling_is_truncated():
    """Renormalized over the kept tokens they are not. The bias is E[A] times the gradient of the log-probability of the kept
    tokens, which is why recipes with `top_p`, `top_k` or `min_p` get a warning."""
    logits = torch.tensor([0.9, 0.2, -0.3, -0.8], dtype=torch.float64, requires_grad=True)
    kept, advantages = torch.tensor([0, 1, 2]), torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    full = torch.log_softmax(logits, 0)[kept]
    renormalized = torch.log_softmax(logits[kept], 0)
    sampling = renormalized.exp().detach()

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    exact = gradient((renormalized.exp() * advantages).sum())
    torch.testing.assert_close(gradient((sampling * advantages * renormalized).sum()), exact)
    bias = gradient((sampling * advantages * full).sum()) - exact
    torch.testing.assert_close(bias, (sampling * advantages).sum() * gradient(full.logsumexp(0)))
    assert bias.norm() > 0.1 * exact.norm()


def test_score_is_zero_on_average():
    mean = sum(t.probability(LOG_POLICY) * score(t, LOG_POLICY) for t in trajectories())
    np.testing.assert_allclose(mean, 0.0, atol=1e-14)
