"""Preference losses by hand: values, gradients, limits, symmetries, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from posttrain.losses.preference import PairLogprobs, RewardShift, kto_kl, kto_losses, preference_losses
from posttrain.recipe.loss import KtoLoss, PreferenceLossRecipe

WITH_REFERENCE = ["dpo", "cdpo", "ipo", "apo_zero", "apo_down", "bco"]
PAIRWISE = [*WITH_REFERENCE, "simpo", "orpo"]
LENGTHS = ([4, 2, 7], [2, 2, 3])


def recipe(kind, **keys):
    return TypeAdapter(PreferenceLossRecipe).validate_python({"type": kind, **keys})


def numbers(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def pairs(chosen, rejected, lengths=LENGTHS, reference=None, dtype=torch.float64):
    """Sums with gradients; the reference is zero unless given."""
    ref_chosen, ref_rejected = reference or ([0.0] * len(chosen),) * 2
    return PairLogprobs(
        chosen_logprobs=numbers(chosen, dtype).requires_grad_(),
        rejected_logprobs=numbers(rejected, dtype).requires_grad_(),
        chosen_length=torch.tensor(lengths[0][: len(chosen)]),
        rejected_length=torch.tensor(lengths[1][: len(chosen)]),
        ref_chosen_logprobs=numbers(ref_chosen, dtype),
        ref_rejected_logprobs=numbers(ref_rejected, dtype),
    )


def one_pair(reference=([-8.0], [-4.0])):
    """log pi -6 and -5, 4 and 2 tokens; with this reference, h is 2 and -1."""
    return pairs([-6.0], [-5.0], reference=reference)


def losses_of(kind, sums, shift=0.0, **keys):
    return preference_losses(recipe(kind, **keys), sums, shift).losses


def gradients_of(kind, sums, **keys):
    """Gradients of the first pair's log-probabilities."""
    losses_of(kind, sums, **keys).sum().backward()
    return [sums.chosen_logprobs.grad[0].item(), sums.rejected_logprobs.grad[0].item()]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def softplus(x):
    return -math.log(sigmoid(-x))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


@pytest.mark.parametrize(
    ("kind", "keys", "loss", "rewards"),
    [
        ("dpo", {"beta": 0.5}, softplus(-1.5), [1.0, -0.5]),
        ("cdpo", {"beta": 0.5, "label_smoothing": 0.2}, 0.8 * softplus(-1.5) + 0.2 * softplus(1.5), [1.0, -0.5]),
        ("ipo", {"beta": 0.5}, (2 / 4 + 1 / 2 - 1) ** 2, [0.25, -0.25]),
        ("simpo", {"beta": 2.0, "gamma": 0.5}, softplus(-2 * (-1.5 + 2.5) + 0.5), [-3.0, -5.0]),
        ("apo_zero", {"beta": 0.5}, (1 - sigmoid(1.0)) + sigmoid(-0.5), [1.0, -0.5]),
        ("apo_down", {"beta": 0.5}, sigmoid(1.0) + (1 - sigmoid(1.5)), [1.0, -0.5]),
        ("bco", {"beta": 0.5}, softplus(-1.0) + softplus(-0.5), [1.0, -0.5]),
        ("orpo", {"beta": 0.5}, 1.5 + 0.5 * softplus(log_odds(-2.5) - log_odds(-1.5)), [-0.75, -1.25]),
    ],
)
def test_values_by_hand(kind, keys, loss, rewards):
    found = preference_losses(recipe(kind, **keys), one_pair())
    assert found.losses.tolist() == pytest.approx([loss], abs=1e-12)
    assert [found.chosen_rewards.item(), found.rejected_rewards.item()] == pytest.approx(rewards)
    assert found.losses.requires_grad
    assert not any(rewards.requires_grad for rewards in (found.chosen_rewards, found.rejected_rewards))


def test_gradients_by_hand():
    # dL/dc of dpo is -beta sigmoid(-z); of ipo it is 2 (difference - target) / |c|.
    by_dpo = [-0.5 * sigmoid(-1.5), 0.5 * sigmoid(-1.5)]
    assert gradients_of("dpo", one_pair(), beta=0.5) == pytest.approx(by_dpo)
    assert gradients_of("ipo", one_pair(), beta=0.1) == pytest.approx([2 * (1 - 5) / 4, -2 * (1 - 5) / 2])


log_probability = st.lists(st.floats(-60, -0.05), min_size=3, max_size=3)


@settings(deadline=None, max_examples=25)
@given(log_probability, log_probability, log_probability, log_probability)
def test_gradients_are_those_of_finite_differences(chosen, rejected, ref_chosen, ref_rejected):
    base = pairs(chosen, rejected, reference=(ref_chosen, ref_rejected))
    rest = (base.chosen_length, base.rejected_length, base.ref_chosen_logprobs, base.ref_rejected_logprobs)
    for kind in PAIRWISE:
        part = recipe(kind)
        start = pairs(chosen, rejected)
        assert torch.autograd.gradcheck(
            lambda c, r, part=part: preference_losses(part, PairLogprobs(c, r, *rest)).losses,
            (start.chosen_logprobs, start.rejected_logprobs),
        )


@settings(deadline=None, max_examples=25)
@given(log_probability, log_probability, log_probability)
def test_a_pair_does_not_attend_to_others(chosen, rejected, reference):
    for kind in PAIRWISE:
        whole = losses_of(kind, pairs(chosen, rejected, reference=(reference, reference)))
        for i in range(3):
            lengths = ([LENGTHS[0][i]], [LENGTHS[1][i]])
            alone = pairs([chosen[i]], [rejected[i]], lengths, ([reference[i]],) * 2)
            assert losses_of(kind, alone).item() == pytest.approx(whole[i].item(), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "keys", "loss"), [("dpo", {}, math.log(2)), ("cdpo", {}, math.log(2)), ("ipo", {"beta": 0.25}, 4.0)]
)
def test_a_policy_that_is_its_reference_has_a_known_loss(kind, keys, loss):
    sums = pairs([-3.0, -9.0], [-5.0, -2.0], reference=([-3.0, -9.0], [-5.0, -2.0]))
    assert losses_of(kind, sums, **keys).tolist() == pytest.approx([loss] * 2)


def test_limits_of_beta_are_linear_in_the_margin_and_a_hinge():
    # L = log 2 - z / 2 + O(z^2).
    assert losses_of("dpo", one_pair(), beta=1e-5).item() - math.log(2) == pytest.approx(-3e-5 / 2, rel=1e-4)
    sums = pairs([-6.0, -6.0], [-5.0, -5.0], reference=([-8.0, -4.0], [-4.0, -8.0]))
    assert (losses_of("dpo", sums, beta=1e3) / 1e3).tolist() == pytest.approx([0.0, 5.0], abs=1e-12)


def test_no_label_smoothing_of_cdpo_is_dpo_and_half_is_symmetric():
    sums, swapped = pairs([-6.0, -1.0], [-5.0, -4.0]), pairs([-5.0, -4.0], [-6.0, -1.0])
    plain = losses_of("dpo", sums)
    assert torch.allclose(losses_of("cdpo", sums, label_smoothing=1e-12), plain, atol=1e-11)
    halves = [losses_of("cdpo", each, label_smoothing=0.5 - 1e-12) for each in (sums, swapped)]
    assert torch.allclose(*halves, atol=1e-11)
    assert not torch.allclose(plain, losses_of("dpo", swapped), atol=0.01)


def test_smoothing_moves_the_minimum_to_its_log_odds():
    sums = pairs([math.log(0.8 / 0.2) / 0.1], [0.0])
    assert gradients_of("dpo", sums, label_smoothing=0.2)[0] == pytest.approx(0, abs=1e-12)


def test_ipo_is_zero_at_its_target_and_not_below():
    # h(c) / |c| = 20 / 4 = 5 = 1 / (2 x 0.1); summed log-ratios would be 20.
    assert losses_of("ipo", pairs([20.0], [0.0])).item() == pytest.approx(0, abs=1e-20)
    assert losses_of("ipo", pairs([40.0], [0.0])).item() == pytest.approx(25)


@pytest.mark.parametrize("kind", ["ipo", "simpo", "orpo"])
def test_length_averaged_losses_do_not_depend_on_the_length(kind):
    short, long = pairs([-6.0], [-5.0], ([2], [2])), pairs([-60.0], [-50.0], ([20], [20]))
    assert losses_of(kind, short).item() == pytest.approx(losses_of(kind, long).item(), rel=1e-12)


def test_gamma_is_subtracted_after_beta():
    at_the_margin = pairs([-2.0], [-5.0], ([2], [2]))
    assert losses_of("simpo", at_the_margin, beta=2.0, gamma=3.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", PAIRWISE)
def test_losses_declare_whether_they_read_a_reference(kind):
    sums, other = pairs([-6.0], [-5.0]), one_pair(reference=([-1.0], [-9.0]))
    bare = PairLogprobs(sums.chosen_logprobs, sums.rejected_logprobs, sums.chosen_length, sums.rejected_length)
    assert recipe(kind).needs_reference == (kind in WITH_REFERENCE)
    if kind in WITH_REFERENCE:
        with pytest.raises(ValueError, match="reference"):
            losses_of(kind, bare)
    else:
        assert losses_of(kind, bare).tolist() == losses_of(kind, other).tolist()


@pytest.mark.parametrize("kind", PAIRWISE)
@pytest.mark.parametrize(("chosen", "rejected"), [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4), (0.0, 0.0)])
def test_extremes_stay_finite_in_float32(kind, chosen, rejected):
    # log pi = 0 is an answer the policy is certain of; against the references h reaches +-1e4.
    for reference in (([0.0], [0.0]), ([-1e4], [-1e4])):
        sums = pairs([chosen], [rejected], ([1], [1]), reference, torch.float32)
        losses = losses_of(kind, sums)
        losses.sum().backward()
        for values in (losses, sums.chosen_logprobs.grad, sums.rejected_logprobs.grad):
            assert torch.isfinite(values).all()
            assert values.dtype == torch.float32


def test_a_lost_pair_keeps_its_gradient():
    for kind in ("dpo", "simpo"):
        sums = pairs([-1e4], [0.0], ([1], [1]), dtype=torch.float32)
        assert gradients_of(kind, sums)[0] == pytest.approx(-recipe(kind).beta)


def test_anchored_losses_move_each_answer_and_not_only_their_difference():
    # At the reference: apo_zero raises chosen and lowers rejected, apo_down lowers both and rejected more.
    for kind, expected in (("apo_zero", [-0.125, 0.125]), ("apo_down", [0.125 - 0.125, 0.125])):
        sums = one_pair(reference=([-6.0], [-5.0]))
        assert gradients_of(kind, sums, beta=0.5) == pytest.approx(expected, abs=1e-12)
    # With chosen above rejected, apo_down lowers chosen too.
    lowered = gradients_of("apo_down", one_pair(reference=([-6.0], [-1.0])), beta=0.5)[0]
    assert lowered == pytest.approx(0.125 - 0.5 * sigmoid(2) * sigmoid(-2))


def test_the_shift_of_bco_is_subtracted_from_both_rewards():
    found = preference_losses(recipe("bco", beta=0.5), one_pair(), 0.3)
    assert found.losses.item() == pytest.approx(softplus(-(1 - 0.3)) + softplus(-(0.5 + 0.3)))
    assert found.chosen_rewards.item() == pytest.approx(1.0)
    # An upper bound of dpo's loss for any shift.
    for shift in (-2.0, 0.0, 0.25, 3.0):
        assert losses_of("bco", one_pair(), shift, beta=0.5) > losses_of("dpo", one_pair(), beta=0.5)


def test_the_shift_is_the_mean_reward_of_earlier_updates():
    shift = RewardShift()
    assert shift.value == 0.0
    shift.update({"preference/chosen": (3.0, 2.0), "preference/rejected": (-1.0, 2.0)})
    assert shift.value == pytest.approx((1.5 - 0.5) / 2)
    shift.update({"optimizer/skipped": (1.0, 1.0)})
    shift.update({"preference/chosen": (1.0, 1.0), "preference/rejected": (0.0, 1.0)})
    assert shift.value == pytest.approx(0.5)
    again = RewardShift()
    again.load_state_dict(shift.state_dict())
    assert again.value == shift.value


def test_kto_by_hand():
    part = KtoLoss(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    logratio = numbers([3.0, 3.0, -1.0]).requires_grad_()
    losses = kto_losses(part, logratio, torch.tensor([True, False, False]), numbers(1.0))
    expected = [2 * (1 - sigmoid(1)), 3 * (1 - sigmoid(-1)), 3 * (1 - sigmoid(1))]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)
    losses.sum().backward()
    slope = 0.5 * sigmoid(1) * sigmoid(-1)
    assert logratio.grad.tolist() == pytest.approx([-2 * slope, 3 * slope, 3 * slope])
    assert part.needs_reference


@settings(deadline=None, max_examples=25)
@given(log_probability, st.floats(0, 5))
def test_kto_gradients_and_symmetry(values, kl):
    good, at = torch.tensor([True, False, True]), numbers(kl)
    part = KtoLoss(beta=0.2)
    assert torch.autograd.gradcheck(lambda h: kto_losses(part, h, good, at), numbers(values).requires_grad_())
    # A good answer is as far above the reference point as a bad one is below it.
    mirrored = kto_losses(part, 2 * at - numbers(values), ~good, at)
    assert torch.allclose(kto_losses(part, numbers(values), good, at), mirrored, rtol=1e-9, atol=1e-15)


def test_kto_is_bounded_and_finite_far_away():
    logratio = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    losses = kto_losses(KtoLoss(), logratio, torch.tensor([True, True, False, False]), torch.tensor(0.0))
    losses.sum().backward()
    assert losses.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert torch.isfinite(logratio.grad).all()


def test_the_reference_point_is_a_detached_mean_that_is_not_negative():
    ratios = numbers([1.0, 4.0, -2.0]).requires_grad_()
    assert [kto_kl(each).item() for each in (ratios, -ratios, numbers([]))] == pytest.approx([1.0, 0.0, 0.0])
    assert not kto_kl(ratios).requires_grad
    assert kto_kl(ratios).shape == ()
