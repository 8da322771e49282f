"""Policy losses by hand: values, edges where the gradient is zero, corrections."""

import dataclasses
import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from posttrain.losses.policy import TokenBatch, dft, gpg_factor, nll, policy_loss
from posttrain.recipe.loss import CorrectionRecipe, LossRecipe


def batch(advantages, lengths=None, behaviour=None, old=None, weights=None):
    n = len(advantages)
    lengths = lengths or [n]
    tensor = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
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
    logprobs = torch.tensor([-1.0 + math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_loss(TypeAdapter(LossRecipe).validate_python(recipe), logprobs, data)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), metrics


RATIOS, ADVANTAGES = [1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0]


def test_ppo_clips_on_the_pessimistic_side():
    loss, gradient, metrics = evaluate({"type": "ppo"}, RATIOS, batch(ADVANTAGES))
    assert loss == pytest.approx(-2.4 + 3.0 - 1.0 + 1.6 - 1.1)
    assert gradient == pytest.approx([0, 3.0, -1.0, 0, -1.1])
    assert metrics["policy/clip_high"] == (1.0, 5.0)
    assert metrics["policy/clip_low"] == (1.0, 5.0)
    assert metrics["policy/ratio"] == pytest.approx((5.1, 5.0))


def test_clip_higher_lets_good_tokens_grow():
    _, gradient, _ = evaluate({"type": "ppo", "clip_high": 0.6}, RATIOS, batch(ADVANTAGES))
    assert gradient == pytest.approx([-3.0, 3.0, -1.0, 0, -1.1])


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    loss, gradient, metrics = evaluate({"type": "ppo", "dual_clip": 3.0}, [5.0, 2.0, 5.0], batch([-2.0, -2.0, 2.0]))
    assert loss == pytest.approx(6.0 + 4.0 - 2.4)
    assert gradient == pytest.approx([0, 4.0, 0])
    assert metrics["policy/clip_dual"] == (1.0, 3.0)


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_gspo_uses_the_geometric_mean_of_the_stream(kind):
    recipe = {"type": kind, "clip_low": 0.2, "clip_high": 0.2}
    # Stream 1: sqrt(2 x 0.5) = 1, unclipped; stream 2: 1.5, clipped for its positive advantage.
    data = batch([1.0, 3.0, 2.0], lengths=[2, 1])
    loss, gradient, metrics = evaluate(recipe, [2.0, 0.5, 1.5], data)
    assert loss == pytest.approx(-1.0 - 3.0 - 2.4)
    assert gradient == pytest.approx([-2.0, -2.0, 0] if kind == "gspo" else [-1.0, -3.0, 0])
    assert metrics["policy/clip_high"] == (1.0, 3.0)


def test_cispo_keeps_every_gradient():
    loss, gradient, metrics = evaluate({"type": "cispo", "clip_high": 1.0}, [5.0, 0.5], batch([2.0, -2.0]))
    assert gradient == pytest.approx([-4.0, 1.0])
    assert loss == pytest.approx(-2 * 2 * (-1 + math.log(5)) + 0.5 * 2 * (-1 + math.log(0.5)))
    assert metrics["policy/clip_high"] == (1.0, 2.0)


def test_reinforce_has_no_ratio():
    _, gradient, _ = evaluate({"type": "reinforce"}, [5.0, 0.5], batch([2.0, -2.0], weights=[1.0, 0.5]))
    assert gradient == pytest.approx([-2.0, 1.0])


def test_corrections_per_token():
    # w = old / behaviour = 4, 1.5, 0.25.
    behaviour = [-1 - math.log(w) for w in (4.0, 1.5, 0.25)]
    data = batch([1.0, 1.0, 1.0], behaviour=behaviour, old=[-1.0] * 3)
    _, gradient, metrics = evaluate({"type": "ppo", "correction": {}}, [1.0] * 3, data)
    assert gradient == pytest.approx([-2.0, -1.5, -0.25])
    assert metrics["correction/truncated"] == (1.0, 3.0)
    _, gradient, metrics = evaluate({"type": "ppo", "correction": {"reject": "token"}}, [1.0] * 3, data)
    assert gradient == pytest.approx([0, -1.5, 0])
    assert metrics["correction/rejected"] == (2.0, 3.0)
    assert metrics["correction/mismatch"] == pytest.approx((math.log(4) + math.log(1.5) + math.log(4), 3.0))


def test_a_sequence_weight_is_the_product_of_the_streams_ratios():
    # Products 4 x 0.5 = 2 and 8.
    data = corrected([4.0, 0.5, 8.0], lengths=[2, 1])
    _, gradient, metrics = evaluate({"type": "cispo", "correction": {"weights": "sequence"}}, [1.0] * 3, data)
    assert gradient == pytest.approx([-2.0, -2.0, -3.0])
    assert metrics["correction/truncated"] == (1.0, 3.0)
    recipe = {"type": "cispo", "correction": {"weights": "none", "reject": "sequence"}}
    _, gradient, metrics = evaluate(recipe, [1.0] * 3, data)
    assert gradient == pytest.approx([-1.0, -1.0, 0.0])
    assert (metrics["correction/rejected"], metrics["correction/rejected_streams"]) == ((1.0, 3.0), (1.0, 2.0))


def test_a_cap_on_the_product_acts_where_one_on_the_geometric_mean_does_not():
    # 200 tokens, each 0.02 nats off: the product is e^4 = 55, the geometric mean 1.02.
    n = 200
    data = corrected([math.exp(0.02)] * n, lengths=[n])
    _, gradient, metrics = evaluate({"type": "ppo", "correction": {"weights": "sequence", "cap": 2.0}}, [1.0] * n, data)
    assert gradient == pytest.approx([-2.0] * n)
    assert metrics["correction/truncated"] == (n, n)


def test_geometric_rejection_combines_with_token_weights():
    # Geometric means sqrt(3 x 1 / 3) = 1 stays; 1.002 leaves the default bounds of 0.999 to 1.001.
    data = corrected([3.0, 1 / 3, 1.002, 1.002], lengths=[2, 2])
    recipe = {"type": "ppo", "correction": {"weights": "token", "reject": "geometric"}}
    _, gradient, metrics = evaluate(recipe, [1.0] * 4, data)
    assert gradient == pytest.approx([-2.0, -1 / 3, 0.0, 0.0])
    assert metrics["correction/truncated"] == (1.0, 4.0)
    assert (metrics["correction/rejected"], metrics["correction/rejected_streams"]) == ((2.0, 4.0), (1.0, 2.0))
    wide = recipe | {"correction": recipe["correction"] | {"bounds": [0.99, 1.01]}}
    assert evaluate(wide, [1.0] * 4, data)[1] == pytest.approx([-2.0, -1 / 3, -1.002, -1.002])


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
    switched = CorrectionRecipe.model_validate(levels[1].model_dump() | {"weights": "token", "reject": "geometric"})
    assert switched == levels[0]


def test_a_correction_needs_the_learners_own_logprobs():
    with pytest.raises(ValueError, match="old_logprobs"):
        evaluate({"type": "ppo", "correction": {}}, [1.0], batch([1.0]))


@pytest.mark.parametrize("kind", ["ppo", "gspo", "gspo_token", "cispo", "dppo", "sapo", "gmpo", "reinforce", "gpg"])
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


def test_nll_is_the_weighted_sum():
    assert nll(torch.tensor([-1.0, -3.0], dtype=torch.float64), batch([0.0, 0.0], weights=[1.0, 0.5])).item() == 2.5


def test_dppo_masks_by_the_change_of_the_probability():
    # Sampled at 0.5; now 0.75, 0.75, 0.25, 0.25, 0.6: only those that move further in the wrong direction are masked.
    data = batch([2.0, -2.0, 2.0, -2.0, 1.0], behaviour=[math.log(0.5)] * 5)
    now = [0.75, 0.75, 0.25, 0.25, 0.6]
    ratios = [p / math.exp(-1) for p in now]
    loss, gradient, metrics = evaluate({"type": "dppo", "delta": 0.15}, ratios, data)
    assert gradient == pytest.approx([0, 3.0, -1.0, 0, -1.2])
    assert loss == pytest.approx(3.0 - 1.0 - 1.2)
    assert metrics["policy/clip_high"] == (1.0, 5.0)
    assert metrics["policy/clip_low"] == (1.0, 5.0)
    assert metrics["policy/divergence"] == pytest.approx((1.1, 5.0))


def test_dppo_tolerates_large_ratios_of_rare_tokens():
    data = batch([1.0], behaviour=[math.log(0.001)])
    ratios = [0.01 / math.exp(-1)]
    assert evaluate({"type": "dppo"}, ratios, data)[1] == pytest.approx([-10.0])
    assert evaluate({"type": "ppo"}, ratios, data)[1] == [0.0]


def test_dppo_by_kl_of_two_events():
    data = batch([1.0, 1.0, 1.0], behaviour=[math.log(0.5), math.log(0.2), -1e-9])
    now = [0.7, 0.3, 1.0]
    divergences = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in ((0.5, 0.7), (0.2, 0.3))]
    recipe = {"type": "dppo", "divergence": "kl", "delta": 0.05}
    _, gradient, metrics = evaluate(recipe, [p / math.exp(-1) for p in now], data)
    assert metrics["policy/divergence"] == pytest.approx((sum(divergences), 3.0), abs=1e-6)
    assert gradient == pytest.approx([0, -1.5, -1.0])


def test_dppo_refuses_a_second_correction():
    with pytest.raises(ValueError, match="remove `correction`"):
        TypeAdapter(LossRecipe).validate_python({"type": "dppo", "correction": {}})


def test_sapo_gates_by_the_sign_of_the_advantage():
    recipe = {"type": "sapo", "positive_temperature": 1.0, "negative_temperature": 2.0}
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    good, bad = sigmoid(1.0), sigmoid(-1.0)
    loss, gradient, metrics = evaluate(recipe, [2.0, 0.5, 1.0], batch([3.0, -1.0, 2.0]))
    assert loss == pytest.approx(-4 * good * 3 + 2 * bad - 4 * 0.5 * 2)
    weights = [4 * good * (1 - good), 4 * bad * (1 - bad), 1.0]
    assert gradient == pytest.approx([-weights[0] * 2 * 3, weights[1] * 0.5, -2.0])
    assert metrics["policy/gate"] == pytest.approx((sum(weights), 3.0))


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # Stream 1 (A > 0): 2 is clipped to e^0.4, 0.5 is not. Stream 2 (A < 0): 0.5 is clipped to e^-0.4, 3 is not.
    data = batch([2.0, 2.0, -1.0, -1.0], lengths=[2, 2], weights=[0.5] * 4)
    loss, gradient, metrics = evaluate({"type": "gmpo"}, [2.0, 0.5, 0.5, 3.0], data)
    first, second = math.sqrt(math.exp(0.4) * 0.5), math.sqrt(math.exp(-0.4) * 3.0)
    assert loss == pytest.approx(-2 * first + second)
    assert gradient == pytest.approx([0, -first, 0, second / 2])
    assert metrics["policy/clip_high"] == (1.0, 4.0)
    assert metrics["policy/clip_low"] == (1.0, 4.0)


def test_gpg_scales_by_the_groups_that_have_an_advantage():
    assert gpg_factor([0, 0, 1, 1, 2, 2], [True, False, False, False, True, True]) == 1.5
    assert gpg_factor([0, 1], [False, False]) == 1.0
    data = dataclasses.replace(batch([2.0, -1.0]), factors=torch.tensor([1.5, 1.5], dtype=torch.float64))
    assert evaluate({"type": "gpg"}, [1.0, 1.0], data)[1] == pytest.approx([-3.0, 1.5])


@pytest.mark.parametrize("kind", ["ppo", "gspo", "gspo_token", "cispo", "dppo", "sapo", "gmpo", "reinforce", "gpg"])
def test_the_off_policy_mask_keeps_streams_that_are_good_or_close(kind):
    # mean log mu / pi: 0.5 with A < 0, 0.5 with A > 0, 0.05 with A < 0.
    ratios = [math.exp(-1.0), 1.0, math.exp(-1.0), 1.0, math.exp(-0.1), 1.0]
    data = batch([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], lengths=[2, 2, 2])
    plain = evaluate({"type": kind}, ratios, data)[1]
    _, masked, metrics = evaluate({"type": kind, "off_policy_mask": 0.1}, ratios, data)
    assert masked == pytest.approx([0, 0, *plain[2:]])
    assert any(plain[:2]) or kind.startswith("gspo")  # whose clip is narrower
    assert metrics["policy/off_policy_masked"] == (2.0, 6.0)


def test_dft_weighs_each_token_by_its_probability_without_gradient():
    logprobs = torch.tensor([math.log(0.5), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    loss = dft(logprobs, batch([0.0, 0.0], weights=[1.0, 0.5]))
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * math.log(0.5) - 0.5 * 0.1 * math.log(0.1))
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -0.05])
