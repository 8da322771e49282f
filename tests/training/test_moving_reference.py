"""A reference model that follows the policy: the moving average, the schedule, what is compared with it, and resuming."""

import math

import numpy as np
import pytest
import torch

from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.loss import KlRecipe, ReferenceRecipe
from posttrain.recipe.model import LearnerRecipe, LoraRecipe, ModelRecipe, OptimizerRecipe
from posttrain.training.learner import Learner
from posttrain.training.objectives import PairObjective, logprobs, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.reference import MovingReference, move_towards
from posttrain.training.updater import Updater
from tests.training import small
from tests.training.preferences import recipe_values, unpaired_rows, write_jsonl
from tests.training.test_preferences import LOSSES, pair_samples


def test_the_moving_average_in_closed_form():
    average, weights = torch.tensor([[8.0, -4.0]]), torch.tensor([[0.0, 12.0]])
    for step in range(1, 6):
        move_towards([average], [weights], 0.25)
        # Multiples of powers of two, hence exact: p + (1 - a)^n (r_0 - p).
        assert torch.equal(average, weights + 0.75**step * (torch.tensor([[8.0, -4.0]]) - weights))
    # A hard update is a copy bit for bit.
    average, weights = torch.randn(50), torch.randn(50) * 1e-20
    move_towards([average], [weights], 1.0)
    assert torch.equal(average, weights)
    rounded = torch.zeros(50, dtype=torch.bfloat16)
    move_towards([rounded], [weights], 1.0)
    assert torch.equal(rounded, weights.bfloat16())


def parts(tiny, recipe, **settings):
    policy = Policy(ModelRecipe(path=str(tiny), **settings))
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(learning_rate=1e-3), 9)
    learner = Updater(policy, optimizer, LearnerRecipe(), token_forward(policy, LearnerRecipe()))
    return policy, learner, MovingReference(ReferenceRecipe(**recipe), policy, optimizer)


def weights_of(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.trainable()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mix", [1.0, 0.3])
def test_the_reference_follows_every_n_updates(mix, tiny_model):
    policy, learner, reference = parts(tiny_model, {"update_every": 2, "mix": mix})
    expected, samples = weights_of(policy), pair_samples()
    scored = logprobs(learner, samples)
    for update in range(1, 6):
        learner.update(samples, PairObjective(LOSSES.validate_python({"type": "dpo"}), 0.0))
        reference.follow()
        reference.follow()  # no further optimizer step, as after a skipped one: no further update
        now = weights_of(policy)
        if update % 2 == 0:
            mixed = {name: (1 - mix) * expected[name] + mix * now[name] for name in now}
            expected = now if mix == 1 else mixed
            scored = logprobs(learner, samples) if mix == 1 else None
        assert reference.updates == update // 2
        for name, tensor in reference.tensors().items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-8 if mix < 1 else 0, rtol=2e-7 if mix < 1 else 0)
        assert not equal(reference.tensors(), now) or (mix == 1 and update % 2 == 0)
        if scored is not None:
            with policy.as_reference():
                found = logprobs(learner, samples)
            assert all(np.array_equal(one, other) for one, other in zip(found, scored, strict=True))


def test_small_changes_add_up_in_bfloat16(tiny_model):
    policy, _, reference = parts(tiny_model, {"update_every": 1, "mix": 0.01}, dtype="bfloat16")
    start = {name: tensor.clone() for name, tensor in reference.tensors().items()}
    with torch.no_grad():
        for each in reference.optimizer.trained:
            each.master = each.master + 0.01
    for _ in range(100):
        policy.version += 1
        reference.follow()
    share = 1 - 0.99**100
    copies = policy.reference_parameters()
    for name, average in reference.tensors().items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, start[name] + 0.01 * share, atol=1e-6, rtol=1e-5)
        assert torch.equal(copies[name], average.bfloat16())


def test_its_state_restores_it(tiny_model):
    policy, _, reference = parts(tiny_model, {"update_every": 1, "mix": 0.5}, dtype="bfloat16")
    for each in reference.optimizer.trained:
        each.master = each.master + 0.3
    policy.version += 1
    reference.follow()
    again, _, restored = parts(tiny_model, {"update_every": 1, "mix": 0.5}, dtype="bfloat16")
    for name, tensor in restored.tensors().items():
        tensor.copy_(reference.tensors()[name])
    again.version = policy.version
    restored.load_state_dict(reference.state_dict())
    restored.follow()
    assert restored.updates == 1
    assert equal(dict(again.reference_parameters()), dict(policy.reference_parameters()))


@pytest.mark.parametrize(("loss", "start"), [("dpo", math.log(2)), pytest.param("kto", 0.5, marks=pytest.mark.slow)])
def test_training_rows_are_compared_with_the_present_reference_and_held_out_rows_with_the_start(
    loss, start, tiny_model, tmp_path
):
    changes = {"loss": {"type": loss}, "reference": {"update_every": 1}}
    values = recipe_values("dpo", tiny_model, tmp_path, epochs=1, evaluation={"every": 100}, **changes)
    if loss == "kto":
        values["data"]["train"] = write_jsonl(tmp_path / "judged.jsonl", unpaired_rows(13))
        values["data"]["validation"] = write_jsonl(tmp_path / "judged_too.jsonl", unpaired_rows(4))
    run, _ = small.train(values)
    trained = small.lines(run, "train")
    assert len(trained) > 2
    for number, line in enumerate(trained):
        # The policy is its own reference before each update.
        assert line["loss/total"] == pytest.approx(start, abs=2e-6)
        assert line["reference/updates"] == number + 1
    held_out = [line["validation/loss"] for line in small.lines(run, "evaluation")]
    assert held_out[0] == pytest.approx(start, abs=2e-6)
    assert abs(held_out[-1] - start) > 1e-3


def test_the_kl_penalty_is_measured_against_the_present_reference(tiny_model, tmp_path):
    values = small.recipe_values(tiny_model, tmp_path, kl={"coefficient": 0.1, "reference": {"update_every": 2}})
    values |= small.two_steps(values) | {"steps": 3, "learner": {"tokens_per_batch": 1500}}
    lines = small.lines(small.train(values)[0], "train")
    assert [line["reference/updates"] for line in lines] == [0, 1, 1]
    # One update a step: the start, one update away from it, and a copy of the present policy.
    first, second, third = [line["policy/kl"] for line in lines]
    assert max(first, third) < 1e-9
    assert second > 1e-5


def test_a_learner_in_a_custom_loop_updates_it_too_unless_it_is_sharded_or_adapted(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    learner = Learner(policy, kl=KlRecipe(coefficient=0.1, reference=ReferenceRecipe(update_every=3)))
    assert learner._learner.moving is not None
    assert learner._learner.moving.every == 3
    adapted = Policy(ModelRecipe(path=str(tiny_model), lora=LoraRecipe(rank=2)))
    with pytest.raises(InputError, match="adapters off"):
        Learner(adapted, kl=KlRecipe(coefficient=0.1, reference=ReferenceRecipe(update_every=3)))
    policy.sharded = object()
    with pytest.raises(InputError, match="not supported for sharded models"):
        MovingReference(ReferenceRecipe(update_every=1), policy, None)
