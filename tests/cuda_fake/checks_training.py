"""Every objective on a fake GPU: forward pass, backward pass and optimizer step."""

import pytest
import torch

from posttrain.models.policy import Policy
from posttrain.recipe.loss import SftLossRecipe
from posttrain.training.objectives import PolicyObjective, SupervisedObjective
from tests.cuda_fake import made


@pytest.fixture
def policy(device, tiny_model):
    return Policy(made.recipe(tiny_model))


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_supervised(device, policy, loss):
    learner = made.policy_updater(policy)
    made.updated(learner, made.samples(), SupervisedObjective(SftLossRecipe(type=loss)))
    print(device.syncs, device.kernel_count)

def test_ppo(device, policy):
    from posttrain.recipe.loss import PpoLoss
    learner = made.policy_updater(policy)
    made.updated(learner, made.samples(), PolicyObjective(PpoLoss()))
    device.reset()
    made.updated(learner, made.samples(), PolicyObjective(PpoLoss()))
    for k,v in device.syncs.items(): print(v,k)
    print(device.kernel_count, device.kernels)
