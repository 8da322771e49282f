"""Preference losses by hand: values, gradients, limits, symmetries, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from posttrain.losses.preference import PairLogprobs, RewardShift, kto_kl, kto_losses, preference_losses
from posttrain.recipe.loss import KtoLoss, PreferenceLossRecipe

PAIRWISE = ["dpo", "cdpo", "ipo", "simpo", "orpo", "apo_zero", "apo_down", "bco"]
WITH_REFERENCE = ["dpo", "cdpo", "ipo", "apo_zero", "apo_down", "bco"]
LENGTHS = ([4, 2, 7], [2, 2, 3])


def recipe(kind, **keys):
    return TypeAdapter(PreferenceLossRecipe).validate_python({"type": kind, **keys})


def numbers(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def pairs(chosen, rejected, lengths=LENGTHS, reference=None, dtype=torch.float64):
    """Sums with gradients; the reference is zero unless given."""
    ref_chosen_logprobs, ref_rejected_logprobs = reference or ([0.0] * len(chosen),) * 2
    return PairLogprobs(
        chosen_logprobs=numbers(chosen, dtype).requires_grad_(),
        rejected_logprobs=numbers(rejected, dtype).requires_grad_(),
        chosen_length=torch.tensor(lengths[0][: len(chosen)]),
        rejected_length=torch.tensor(lengths[1][: len(chosen)]),
        ref_chosen_logprobs=numbers(ref_chosen_logprobs, dtype),
        ref_rejected_logprobs=numbers(ref_rejected_logprobs, dtype),
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


# One pair: log pi -6 and -5, reference -8 and -4, 4 and 2 tokens; so h is 2 and -1.
BY_HAND = {
    "dpo": ({"beta": 0.5}, -math.log(sigmoid(1.5)), 1.0, -0.5),
    "cdpo": (
        {"beta": 0.5, "label_smoothing": 0.2},
        -0.8 * math.log(sigmoid(1.5)) - 0.2 * math.log(sigmoid(-1.5)),
        1,
        -0.5,
    ),
    "ipo": ({"beta": 0.5}, (2 / 4 + 1 / 2 - 1) ** 2, 0.25, -0.25),
    "simpo": ({"beta": 2.0, "gamma": 0.5}, -math.log(sigmoid(2 * (-1.5 + 2.5) - 0.5)), -3.0, -5.0),
    "apo_zero": ({"beta": 0.5}, (1 - sigmoid(1.0)) + sigmoid(-0.5), 1.0, -0.5),
    "apo_down": ({"beta": 0.5}, sigmoid(1.0) + (1 - sigmoid(1.5)), 1.0, -0.5),
    "bco": ({"beta": 0.5}, -math.log(sigmoid(1.0)) - math.log(sigmoid(0.5)), 1.0, -0.5),
    "orpo": ({"beta": 0.5}, 1.5 - 0.5 * math.log(sigmoid(log_odds(-1.5) - log_odds(-2.5))), -0.75, -1.25),
}


@pytest.mark.parametrize("kind", PAIRWISE)
def test_values_by_hand(kind):
    keys, loss, chosen_reward, rejected_reward = BY_HAND[kind]
    found = preference_losses(recipe(kind, **keys), pairs([-6.0], [-5.0], reference=([-8.0], [-4.0])))
    assert found.losses.tolist() == pytest.approx([loss], abs=1e-12)
    assert found.chosen_rewards.tolist() == pytest.approx([chosen_reward])
    assert found.rejected_rewards.tolist() == pytest.approx([rejected_reward])
    assert found.losses.requires_grad
    assert not found.chosen_rewards.requires_grad
    assert not found.rejected_rewards.requires_grad


def test_gradients_by_hand():
    # dL/dc of dpo is -beta sigmoid(-z); of ipo it is 2 (difference - target) / |c|.
    sums = pairs([-6.0], [-5.0], reference=([-8.0], [-4.0]))
    preference_losses(recipe("dpo", beta=0.5), sums).losses.sum().backward()
    assert sums.chosen_logprobs.grad.item() == pytest.approx(-0.5 * sigmoid(-1.5))
    assert sums.rejected_logprobs.grad.item() == pytest.approx(0.5 * sigmoid(-1.5))
    sums = pairs([-6.0], [-5.0], reference=([-8.0], [-4.0]))
    preference_losses(recipe("ipo", beta=0.1), sums).losses.sum().backward()
    assert sums.chosen_logprobs.grad.item() == pytest.approx(2 * (1 - 5) / 4)
    assert sums.rejected_logprobs.grad.item() == pytest.approx(-2 * (1 - 5) / 2)


log_probability = st.lists(st.floats(-60, -0.05), min_size=3, max_size=3)


@settings(deadline=None, max_examples=25)
@given(log_probability, log_probability, log_probability, log_probability)
def test_gradients_are_those_of_finite_differences(chosen, rejected, ref_chosen_logprobs, ref_rejected_logprobs):
    for kind in PAIRWISE:
        part = recipe(kind)

        def losses(c, r, part=part):
            base = pairs(chosen, rejected, reference=(ref_chosen_logprobs, ref_rejected_logprobs))
            keep = (base.chosen_length, base.rejected_length, base.ref_chosen_logprobs, base.ref_rejected_logprobs)
            return preference_losses(part, PairLogprobs(c, r, *keep)).losses

        start = pairs(chosen, rejected)
        assert torch.autograd.gradcheck(losses, (start.chosen_logprobs, start.rejected_logprobs))


@settings(deadline=None, max_examples=25)
@given(log_probability, log_probability, log_probability)
def test_a_pair_does_not_attend_to_others(chosen, rejected, reference):
    for kind in PAIRWISE:
        whole = preference_losses(recipe(kind), pairs(chosen, rejected, reference=(reference, reference))).losses
        for i in range(3):
            alone = pairs(
                chosen[i : i + 1],
                rejected[i : i + 1],
                (LENGTHS[0][i : i + 1], LENGTHS[1][i : i + 1]),
                ([reference[i]],) * 2,
            )
            assert preference_losses(recipe(kind), alone).losses.item() == pytest.approx(whole[i].item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["dpo", "cdpo"])
def test_a_policy_that_is_its_reference_has_loss_log_2(kind):
    sums = pairs([-3.0, -9.0], [-5.0, -2.0], reference=([-3.0, -9.0], [-5.0, -2.0]))
    assert preference_losses(recipe(kind), sums).losses.tolist() == pytest.approx([math.log(2)] * 2)


def test_a_policy_that_is_its_reference_is_half_a_target_away():
    sums = pairs([-3.0, -9.0], [-5.0, -2.0], reference=([-3.0, -9.0], [-5.0, -2.0]))
    assert preference_losses(recipe("ipo", beta=0.25), sums).losses.tolist() == pytest.approx([4.0, 4.0])


def test_beta_to_zero_is_linear_in_the_margin():
    # L = log 2 - z / 2 + O(z^2).
    sums = pairs([-6.0], [-5.0], reference=([-8.0], [-4.0]))
    loss = preference_losses(recipe("dpo", beta=1e-5), sums).losses.item()
    assert loss - math.log(2) == pytest.approx(-3e-5 / 2, rel=1e-4)


def test_beta_to_infinity_is_a_hinge():
    sums = pairs([-6.0, -6.0], [-5.0, -5.0], reference=([-8.0, -4.0], [-4.0, -8.0]))
    losses = preference_losses(recipe("dpo", beta=1e3), sums).losses / 1e3
    assert losses.tolist() == pytest.approx([0.0, 5.0], abs=1e-12)


def test_no_label_smoothing_of_cdpo_is_dpo_and_half_is_symmetric():
    sums, swapped = pairs([-6.0, -1.0], [-5.0, -4.0]), pairs([-5.0, -4.0], [-6.0, -1.0])
    plain = preference_losses(recipe("dpo"), sums).losses
    assert torch.allclose(preference_losses(recipe("cdpo", label_smoothing=1e-12), sums).losses, plain, atol=1e-11)
    half = recipe("cdpo", label_smoothing=0.5 - 1e-12)
    assert torch.allclose(preference_losses(half, sums).losses, preference_losses(half, swapped).losses, atol=1e-11)
    assert not torch.allclose(plain, preference_losses(recipe("dpo"), swapped).losses, atol=0.01)


def test_smoothing_moves_the_minimum_to_its_log_odds():
    at = math.log(0.8 / 0.2) / 0.1
    sums = pairs([at], [0.0])
    preference_losses(recipe("dpo", label_smoothing=0.2), sums).losses.sum().backward()
    assert sums.chosen_logprobs.grad.item() == pytest.approx(0, abs=1e-12)


def test_ipo_is_zero_at_its_target_and_not_below():
    # h(c) / |c| = 20 / 4 = 5 = 1 / (2 x 0.1); summed log-ratios would be 20.
    assert preference_losses(recipe("ipo"), pairs([20.0], [0.0])).losses.item() == pytest.approx(0, abs=1e-20)
    assert preference_losses(recipe("ipo"), pairs([40.0], [0.0])).losses.item() == pytest.approx(25)


@pytest.mark.parametrize("kind", ["ipo", "simpo", "orpo"])
def test_length_averaged_losses_do_not_depend_on_the_length(kind):
    short, long = pairs([-6.0], [-5.0], ([2], [2])), pairs([-60.0], [-50.0], ([20], [20]))
    losses = [preference_losses(recipe(kind), sums).losses.item() for sums in (short, long)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_gamma_is_subtracted_after_beta():
    at_the_margin = pairs([-2.0], [-5.0], ([2], [2]))
    found = preference_losses(recipe("simpo", beta=2.0, gamma=3.0), at_the_margin).losses.item()
    assert found == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_losses_without_a_reference_do_not_read_one(kind):
    sums, other = pairs([-6.0], [-5.0]), pairs([-6.0], [-5.0], reference=([-1.0], [-9.0]))
    bare = PairLogprobs(sums.chosen_logprobs, sums.rejected_logprobs, sums.chosen_length, sums.rejected_length)
    assert not recipe(kind).needs_reference
    assert (
        preference_losses(recipe(kind), bare).losses.tolist() == preference_losses(recipe(kind), other).losses.tolist()
    )


@pytest.mark.parametrize("kind", WITH_REFERENCE)
def test_losses_with_a_reference_declare_it(kind):
    sums = pairs([-6.0], [-5.0])
    assert recipe(kind).needs_reference
    with pytest.raises(ValueError, match="reference"):
        preference_losses(
            recipe(kind),
            PairLogprobs(sums.chosen_logprobs, sums.rejected_logprobs, sums.chosen_length, sums.rejected_length),
        )


@pytest.mark.parametrize("kind", PAIRWISE)
@pytest.mark.parametrize(("chosen", "rejected"), [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4), (0.0, 0.0)])
def test_extremes_stay_finite_in_float32(kind, chosen, rejected):
    # log pi = 0 is an answer the policy is certain of; against the references h reaches +-1e4.
    for reference in (([0.0], [0.0]), ([-1e4], [-1e4])):
        sums = pairs([chosen], [rejected], ([1], [1]), reference, torch.float32)
        losses = preference_losses(recipe(kind), sums).losses
        losses.sum().backward()
        for values in (losses, sums.chosen_logprobs.grad, sums.rejected_logprobs.grad):
            assert torch.isfinite(values).all()
            assert values.dtype == torch.float32


def test_a_lost_pair_keeps_its_gradient():
    for kind in ("dpo", "simpo"):
        sums = pairs([-1e4], [0.0], ([1], [1]), dtype=torch.float32)
        preference_losses(recipe(kind), sums).losses.sum().backward()
        assert sums.chosen_logprobs.grad.item() == pytest.approx(-recipe(kind).beta)


def test_anchored_losses_move_each_answer_and_not_only_their_difference():
    # At the reference: apo_zero raises chosen and lowers rejected, apo_down lowers both and rejected more.
    for kind, chosen, rejected in (("apo_zero", -0.125, 0.125), ("apo_down", 0.125 - 0.125, 0.125)):
        sums = pairs([-6.0], [-5.0], reference=([-6.0], [-5.0]))
        preference_losses(recipe(kind, beta=0.5), sums).losses.sum().backward()
        assert sums.chosen_logprobs.grad.item() == pytest.approx(chosen, abs=1e-12)
        assert sums.rejected_logprobs.grad.item() == pytest.approx(rejected, abs=1e-12)
    # With chosen above rejected, apo_down lowers chosen too.
    sums = pairs([-6.0], [-5.0], reference=([-6.0], [-1.0]))
    preference_losses(recipe("apo_down", beta=0.5), sums).losses.sum().backward()
    assert sums.chosen_logprobs.grad.item() == pytest.approx(0.125 - 0.5 * sigmoid(2) * sigmoid(-2))


def test_the_shift_of_bco_is_subtracted_from_both_rewards():
    sums = pairs([-6.0], [-5.0], reference=([-8.0], [-4.0]))
    found = preference_losses(recipe("bco", beta=0.5), sums, 0.3)
    assert found.losses.item() == pytest.approx(-math.log(sigmoid(1 - 0.3)) - math.log(sigmoid(0.5 + 0.3)))
    assert found.chosen_rewards.item() == pytest.approx(1.0)
    # An upper bound of dpo's loss for any shift.
    for shift in (-2.0, 0.0, 0.25, 3.0):
        bound = preference_losses(recipe("bco", beta=0.5), sums, shift).losses.item()
        assert bound > preference_losses(recipe("dpo", beta=0.5), sums).losses.item()


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
    assert kto_kl(ratios).item() == pytest.approx(1.0)
    assert kto_kl(-ratios).item() == 0.0
    assert not kto_kl(ratios).requires_grad
    assert kto_kl(ratios).shape == ()
    assert kto_kl(numbers([])).item() == 0.0


@pytest.mark.parametrize(
    "keys",
    [
        {"type": "dpo", "label_smoothing": 0.5},
        {"type": "cdpo", "label_smoothing": 0.0},
        {"type": "dpo", "beta": 0.0},
        {"type": "simpo", "gamma": -1.0},
        {"type": "kto", "label_smoothing": 0.1},
        {"type": "hinge"},
        {},
    ],
)
def test_recipes_that_are_refused(keys):
    with pytest.raises(ValidationError):
        TypeAdapter(PreferenceLossRecipe).validate_python(keys)
