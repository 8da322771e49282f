"""Policy losses by hand: values, edges where the gradient is zero, corrections."""

import dataclasses
import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from posttrain.losses.policy import TokenBatch, dft, gpg_factor, nll, policy_loss
from posttrain.recipe.loss import CorrectionRecipe, LossRecipe

KINDS = ["ppo", "gspo", "gspo_token", "cispo", "dppo", "sapo", "gmpo", "reinforce", "gpg"]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def batch(advantages, lengths=None, behaviour=None, old=None, weights=None):
    n = len(advantages)
    lengths = lengths or [n]
    return TokenBatch(
        rollout_logprobs=tensor(behaviour or [-1.0] * n),
        advantages=tensor(advantages),
        stream=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths=torch.tensor(lengths),
        weights=tensor(weights or [1.0] * n),
        old_logprobs=None if old is None else tensor(old),
    )


def corrected(ratios, lengths):
    """Advantages of 1, and these ratios of old to rollout probabilities."""
    n = len(ratios)
    return batch([1.0] * n, lengths=lengths, behaviour=[-1 - math.log(r) for r in ratios], old=[-1.0] * n)


def evaluate(recipe, ratios, data):
    """Loss, gradient and metrics, for ratios to a policy whose log-probabilities are -1 everywhere."""
    logprobs = tensor([-1.0 + math.log(r) for r in ratios]).requires_grad_()
    loss, metrics = policy_loss(TypeAdapter(LossRecipe).validate_python(recipe), logprobs, data)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), metrics


def check(recipe, ratios, data, gradient, loss=None, **metrics):
    """Compare the gradient, the loss and metrics, which are named without their prefix."""
    value, slope, found = evaluate(recipe, ratios, data)
    assert slope == pytest.approx(gradient)
    assert loss is None or value == pytest.approx(loss)
    assert {name: pair for key, pair in found.items() if (name := key.partition("/")[2]) in metrics} == metrics


def test_ppo_clips_on_the_pessimistic_side_and_dual_clip_bounds_the_loss_of_bad_tokens():
    ratios, data = [1.5, 1.5, 0.5, 0.5, 1.1], batch([2.0, -2.0, 2.0, -2.0, 1.0])
    loss, counts = -2.4 + 3.0 - 1.0 + 1.6 - 1.1, {"clip_high": (1.0, 5.0), "clip_low": (1.0, 5.0)}
    logs = sum(map(math.log, ratios))
    counts |= {"ratio": pytest.approx((5.1, 5.0)), "kl_rollout_k1": pytest.approx((-logs, 5.0))}
    counts |= {"kl_rollout_k3": pytest.approx((5.1 - 5.0 - logs, 5.0))}
    check({"type": "ppo"}, ratios, data, [0, 3.0, -1.0, 0, -1.1], loss, **counts)
    # Clip-higher lets good tokens grow.
    check({"type": "ppo", "clip_high": 0.6}, ratios, data, [-3.0, 3.0, -1.0, 0, -1.1])
    data = batch([-2.0, -2.0, 2.0])
    check({"type": "ppo", "dual_clip": 3.0}, [5.0, 2.0, 5.0], data, [0, 4.0, 0], 6.0 + 4.0 - 2.4, clip_dual=(1.0, 3.0))


def test_gspo_uses_the_geometric_mean_of_the_stream():
    # Stream 1: sqrt(2 x 0.5) = 1, unclipped; stream 2: 1.5, clipped for its positive advantage.
    data = batch([1.0, 3.0, 2.0], lengths=[2, 1])
    for kind, gradient in (("gspo", [-2.0, -2.0, 0]), ("gspo_token", [-1.0, -3.0, 0])):
        recipe = {"type": kind, "clip_low": 0.2, "clip_high": 0.2}
        check(recipe, [2.0, 0.5, 1.5], data, gradient, -1.0 - 3.0 - 2.4, clip_high=(1.0, 3.0))


def test_cispo_keeps_every_gradient_and_reinforce_has_no_ratio():
    loss = -2 * 2 * (-1 + math.log(5)) + 0.5 * 2 * (-1 + math.log(0.5))
    recipe, ratios = {"type": "cispo", "clip_high": 1.0}, [5.0, 0.5]
    check(recipe, ratios, batch([2.0, -2.0]), [-4.0, 1.0], loss, clip_high=(1.0, 2.0))
    check({"type": "reinforce"}, ratios, batch([2.0, -2.0], weights=[1.0, 0.5]), [-2.0, 1.0])


def test_corrections_per_token():
    data, mismatch = corrected([4.0, 1.5, 0.25], lengths=[3]), math.log(4) + math.log(1.5) + math.log(4)
    check({"type": "ppo", "correction": {}}, [1.0] * 3, data, [-2.0, -1.5, -0.25], truncated=(1.0, 3.0))
    counts = {"rejected": (2.0, 3.0), "mismatch": pytest.approx((mismatch, 3.0))}
    check({"type": "ppo", "correction": {"reject": "token"}}, [1.0] * 3, data, [0, -1.5, 0], **counts)
    with pytest.raises(ValueError, match="old_logprobs"):  # it needs the learner's own
        evaluate({"type": "ppo", "correction": {}}, [1.0], batch([1.0]))


def test_a_sequence_weight_is_the_product_of_the_streams_ratios_and_its_cap_acts_on_that():
    # Products 4 x 0.5 = 2 and 8.
    data = corrected([4.0, 0.5, 8.0], lengths=[2, 1])
    weights = {"type": "cispo", "correction": {"weights": "sequence"}}
    check(weights, [1.0] * 3, data, [-2.0, -2.0, -3.0], truncated=(1.0, 3.0))
    rejects = {"type": "cispo", "correction": {"weights": "none", "reject": "sequence"}}
    check(rejects, [1.0] * 3, data, [-1.0, -1.0, 0.0], rejected=(1.0, 3.0), rejected_streams=(1.0, 2.0))
    # 200 tokens, each 0.02 nats off: the product is e^4 = 55, the geometric mean 1.02.
    n = 200
    data = corrected([math.exp(0.02)] * n, lengths=[n])
    capped = {"type": "ppo", "correction": {"weights": "sequence", "cap": 2.0}}
    check(capped, [1.0] * n, data, [-2.0] * n, truncated=(n, n))


def test_geometric_rejection_combines_with_token_weights():
    # Geometric means sqrt(3 x 1 / 3) = 1 stays; 1.002 leaves the default bounds of 0.999 to 1.001.
    data = corrected([3.0, 1 / 3, 1.002, 1.002], lengths=[2, 2])
    correction = {"weights": "token", "reject": "geometric"}
    counts = {"truncated": (1.0, 4.0), "rejected": (2.0, 4.0), "rejected_streams": (1.0, 2.0)}
    check({"type": "ppo", "correction": correction}, [1.0] * 4, data, [-2.0, -1 / 3, 0.0, 0.0], **counts)
    wide = correction | {"bounds": [0.99, 1.01]}
    check({"type": "ppo", "correction": wide}, [1.0] * 4, data, [-2.0, -1 / 3, -1.002, -1.002])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weights": "none"}, "needs `weights` or `reject`"),
        ({"weights": "none", "reject": "token", "cap": 2.0}, "`cap` has no effect"),
        ({"bounds": [0.5, 2.0]}, "`bounds` has no effect"),
        ({"reject": "token", "bounds": [1.5, 2.0]}, "must be a number below 1"),
    ],
)
def test_invalid_corrections_are_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        CorrectionRecipe.model_validate(given)


def test_each_level_has_its_own_defaults():
    levels = [CorrectionRecipe(weights=w, reject=r) for w, r in (("token", "geometric"), ("sequence", "token"))]
    assert [(level.largest_weight, level.kept_ratios) for level in levels] == [(2.0, (0.999, 1.001)), (3.0, (0.5, 2.0))]
    assert CorrectionRecipe().kept_ratios is None
    # A resolved recipe holds no derived defaults, so another level gets its own.
    other_level = {"weights": "token", "reject": "geometric"}
    assert CorrectionRecipe.model_validate(levels[1].model_dump() | other_level) == levels[0]


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logprobs_stay_finite_in_float32(kind):
    data = batch([-1.0, 1.0])
    values = {name: getattr(data, name).float() for name in ("rollout_logprobs", "advantages", "weights")}
    data = TokenBatch(**values, stream=data.stream, lengths=data.lengths)
    logprobs = torch.tensor([0.0, -2e4], requires_grad=True)
    loss, metrics = policy_loss(TypeAdapter(LossRecipe).validate_python({"type": kind}), logprobs, data)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value, _ in metrics.values())


def test_dppo_masks_by_the_change_of_the_probability():
    # Sampled at 0.5; now 0.75, 0.75, 0.25, 0.25, 0.6: only those that move further in the wrong direction are masked.
    data = batch([2.0, -2.0, 2.0, -2.0, 1.0], behaviour=[math.log(0.5)] * 5)
    ratios = [p / math.exp(-1) for p in (0.75, 0.75, 0.25, 0.25, 0.6)]
    counts = {"clip_high": (1.0, 5.0), "clip_low": (1.0, 5.0), "divergence": pytest.approx((1.1, 5.0))}
    check({"type": "dppo", "delta": 0.15}, ratios, data, [0, 3.0, -1.0, 0, -1.2], 3.0 - 1.0 - 1.2, **counts)
    # Large ratios of rare tokens are tolerated.
    data, ratios = batch([1.0], behaviour=[math.log(0.001)]), [0.01 / math.exp(-1)]
    check({"type": "dppo"}, ratios, data, [-10.0])
    assert evaluate({"type": "ppo"}, ratios, data)[1] == [0.0]


def test_dppo_by_kl_of_two_events():
    data = batch([1.0, 1.0, 1.0], behaviour=[math.log(0.5), math.log(0.2), -1e-9])
    ratios = [p / math.exp(-1) for p in (0.7, 0.3, 1.0)]
    divergences = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in ((0.5, 0.7), (0.2, 0.3))]
    recipe = {"type": "dppo", "divergence": "kl", "delta": 0.05}
    check(recipe, ratios, data, [0, -1.5, -1.0], divergence=pytest.approx((sum(divergences), 3.0), abs=1e-6))
    with pytest.raises(ValueError, match="remove `correction`"):
        TypeAdapter(LossRecipe).validate_python({"type": "dppo", "correction": {}})


def test_sapo_gates_by_the_sign_of_the_advantage():
    recipe = {"type": "sapo", "positive_temperature": 1.0, "negative_temperature": 2.0}
    good, bad = sigmoid(1.0), sigmoid(-1.0)
    weights = [4 * good * (1 - good), 4 * bad * (1 - bad), 1.0]
    loss, gradient = -4 * good * 3 + 2 * bad - 4 * 0.5 * 2, [-weights[0] * 2 * 3, weights[1] * 0.5, -2.0]
    data = batch([3.0, -1.0, 2.0])
    check(recipe, [2.0, 0.5, 1.0], data, gradient, loss, gate=pytest.approx((sum(weights), 3.0)))


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # Stream 1 (A > 0): 2 is clipped to e^0.4, 0.5 is not. Stream 2 (A < 0): 0.5 is clipped to e^-0.4, 3 is not.
    data = batch([2.0, 2.0, -1.0, -1.0], lengths=[2, 2], weights=[0.5] * 4)
    first, second = math.sqrt(math.exp(0.4) * 0.5), math.sqrt(math.exp(-0.4) * 3.0)
    gradient, counts = [0, -first, 0, second / 2], {"clip_high": (1.0, 4.0), "clip_low": (1.0, 4.0)}
    check({"type": "gmpo"}, [2.0, 0.5, 0.5, 3.0], data, gradient, -2 * first + second, **counts)


def test_gpg_scales_by_the_groups_that_have_an_advantage():
    assert gpg_factor([0, 0, 1, 1, 2, 2], [True, False, False, False, True, True]) == 1.5
    assert gpg_factor([0, 1], [False, False]) == 1.0
    data = dataclasses.replace(batch([2.0, -1.0]), factors=tensor([1.5, 1.5]))
    check({"type": "gpg"}, [1.0, 1.0], data, [-3.0, 1.5])


@pytest.mark.parametrize("kind", KINDS)
def test_the_off_policy_mask_keeps_streams_that_are_good_or_close(kind):
    # mean log mu / pi: 0.5 with A < 0, 0.5 with A > 0, 0.05 with A < 0.
    ratios = [math.exp(-1.0), 1.0, math.exp(-1.0), 1.0, math.exp(-0.1), 1.0]
    data = batch([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], lengths=[2, 2, 2])
    plain = evaluate({"type": kind}, ratios, data)[1]
    _, masked, metrics = evaluate({"type": kind, "off_policy_mask": 0.1}, ratios, data)
    assert masked == pytest.approx([0, 0, *plain[2:]])
    assert any(plain[:2]) or kind.startswith("gspo")  # whose clip is narrower
    assert metrics["policy/off_policy_masked"] == (2.0, 6.0)


def test_nll_is_the_weighted_sum_and_dft_weighs_each_token_by_its_probability_without_gradient():
    data = batch([0.0, 0.0], weights=[1.0, 0.5])
    assert nll(tensor([-1.0, -3.0]), data).item() == 2.5
    logprobs = tensor([math.log(0.5), math.log(0.1)]).requires_grad_()
    loss = dft(logprobs, data)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * math.log(0.5) - 0.5 * 0.1 * math.log(0.1))
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -0.05])
