"""Every objective on a fake GPU: forward pass, backward pass and optimizer step, with ceilings on waits and kernels."""

import os
import sys

import numpy as np
import pytest
import torch

from posttrain.distributed.world import join_world
from posttrain.errors import InputError
from posttrain.losses.distillation import TeacherScores
from posttrain.losses.surrogates import CispoLoss, DppoLoss, GmpoLoss, GspoLoss, PpoLoss, ReinforceLoss, SapoLoss
from posttrain.models import forward, layers
from posttrain.models.critic import Critic, SharedCritic
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe import loss as losses
from posttrain.recipe.distill import JsdLoss, ReverseKlLoss
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import CorrectionRecipe, EntropyRecipe, KlRecipe, SftLossRecipe
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.training import objectives
from posttrain.training.distill import DistillationObjective, distillation_forward
from posttrain.training.objectives import PolicyObjective, SupervisedObjective
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Updater
from tests.cuda_fake import made
from tests.models import fake_liger
from tests.training import small


def waits_per_batch(device, learner, objective, pairs=False):
    """Waits of an update on one micro-batch, and those that a second one adds."""
    counts = []
    for number in (1, 2):
        learner.settings = LearnerRecipe(tokens_per_batch=made.LENGTH * 2)
        batch = made.samples(2 * number, pairs)
        device.reset()
        made.updated(learner, batch, objective)
        counts.append(device.sync_count)
    return counts[0], counts[1] - counts[0]


POLICY = {
    "ppo": PpoLoss(dual_clip=3.0),
    "gspo": GspoLoss(type="gspo"),
    "gspo_token": GspoLoss(type="gspo_token"),
    "cispo": CispoLoss(),
    "dppo": DppoLoss(),
    "sapo": SapoLoss(),
    "gmpo": GmpoLoss(),
    "reinforce": ReinforceLoss(),
    "gpg": ReinforceLoss(type="gpg"),
    "tis": PpoLoss(correction=CorrectionRecipe(weights="token")),
    "mis": PpoLoss(correction=CorrectionRecipe(weights="none", reject="geometric")),
    "off_policy_mask": PpoLoss(off_policy_mask=0.1),
}


PPO = PpoLoss()
OBJECTIVES = {name: PolicyObjective(loss, old="learner") for name, loss in POLICY.items()}
OBJECTIVES |= {
    "kl": PolicyObjective(PPO, KlRecipe(coefficient=0.1), entropy=EntropyRecipe(coefficient=0.01)),
    "top_share": PolicyObjective(PPO, entropy=EntropyRecipe(coefficient=0.01, top_share=0.5)),
    "kl_cov": PolicyObjective(PPO, entropy=EntropyRecipe(covariance=losses.KlCovRecipe())),
    "clip_cov": PolicyObjective(
        PPO, entropy=EntropyRecipe(covariance=losses.ClipCovRecipe()), random=np.random.default_rng(0)
    ),
    "first_update": PolicyObjective(PPO, first_update=True, old="learner"),
    "nll": SupervisedObjective(SftLossRecipe(type="nll")),
    "dft": SupervisedObjective(SftLossRecipe(type="dft")),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_tokens_wait_only_once_per_update(device, policy, name):
    learner, objective = made.policy_updater(policy), OBJECTIVES[name]
    device.reset()
    made.updated(learner, made.samples(2), objective)
    device.expect(name, syncs=2)  # the metrics and the gradient norm
    if name in ("tis", "nll", "dft"):
        assert waits_per_batch(device, learner, objective) == (2, 0), device.syncs


REFUSED = {"cumsum", "put_", "kthvalue", "median", "nll_loss2d_forward", "_embedding_bag"}
"""Operations that torch refuses on a GPU with deterministic kernels, for floating-point numbers at least."""


def test_updates_with_deterministic_kernels(device, policy):
    with join_world(HardwareRecipe(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        learner = made.policy_updater(policy)
        device.reset()
        made.updated(learner, made.samples(2), PolicyObjective(PpoLoss(), kl=KlRecipe(coefficient=0.1)))
        made.updated(learner, made.samples(2), SupervisedObjective(SftLossRecipe()))
        assert not REFUSED & set(device.kernels)
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


PAIRS = [
    getattr(losses, f"{name}Loss")() for name in ["Dpo", "Cdpo", "Ipo", "Simpo", "Orpo", "ApoZero", "ApoDown", "Bco"]
]


@pytest.mark.parametrize("loss", PAIRS, ids=lambda loss: loss.type)
def test_pairs_wait_once_per_micro_batch(device, policy, loss):
    objective = objectives.PairObjective(loss, supervised=0.1, shift=0.0 if isinstance(loss, losses.BcoLoss) else None)
    learner = made.policy_updater(policy)
    device.reset()
    made.updated(learner, made.samples(2, pairs=True), objective)
    device.expect(loss.type, syncs=3)


def test_kto(device, policy):
    kl = torch.zeros((), device=policy.device)
    objective = objectives.UnpairedObjective(losses.KtoLoss(), kl, 2)
    assert waits_per_batch(device, made.policy_updater(policy), objective, pairs=True) == (3, 1), device.syncs


def test_reward_model(device, thin_model):
    model = RewardModel(made.recipe(thin_model))
    learner = made.updater(model, objectives.reward_forward(model))
    objective = objectives.RewardObjective(losses.RewardLossRecipe(margin=True, center_rewards_coefficient=0.01))
    assert waits_per_batch(device, learner, objective, pairs=True) == (3, 1), device.syncs
    ids, sampled = made.arrays(made.samples(2))
    prefixes = [np.array([9, 12]), np.array([10])]
    assert [len(r) for r in model.prefix_rewards(ids, prefixes)] == [2, 1]
    assert len(model.unit_rewards(ids, sampled, [np.array([10, 23]), np.array([23])]).rewards) == 3


def test_critics(device, policy, thin_model):
    critic = Critic(made.recipe(thin_model))
    learner = made.updater(critic, lambda rows: critic.values(*made.arrays(rows)))
    assert waits_per_batch(device, learner, objectives.ValueObjective(0.2)) == (2, 0), device.syncs
    shared = SharedCritic(policy)
    optimizer = Optimizer(shared.trainable(), OptimizerRecipe(), 10)
    joint = made.policy_updater(policy, head=shared.head)
    joint.joint = {"critic": optimizer}
    objective = objectives.SharedObjective(PolicyObjective(PpoLoss()), 0.1, 0.2)
    once, each = waits_per_batch(device, joint, objective)
    assert each == 0, device.syncs
    assert once <= 4, device.syncs  # metrics, and the norms of two optimizers


DISTILLATION = {
    "reverse": ReverseKlLoss(),
    "top": JsdLoss(type="jsd", top_k=4),
    "whole": JsdLoss(type="jsd", top_k=None),
}


@pytest.mark.parametrize("loss", DISTILLATION.values(), ids=DISTILLATION)
def test_distillation(device, policy, loss):
    width = len(policy.tokenizer)
    learner = made.updater(policy, distillation_forward(policy, LearnerRecipe(), 1.0, loss))
    batch = made.samples(2)
    for sample in batch:
        tokens = sample.sampled_tokens
        k = 4 if getattr(loss, "top_k", None) else None
        sample.teacher = TeacherScores(
            -np.ones(tokens, np.float32),
            None if k is None else np.tile(np.arange(k, dtype=np.int32), (tokens, 1)),
            np.full((tokens, width if k is None else k + 1), -3.0, dtype=np.float32),
        )
    device.reset()
    made.updated(learner, batch, DistillationObjective(loss))
    device.expect("distillation", syncs=2)


def test_supervised_rows_beside_episodes(device, policy):
    learner, batch = made.policy_updater(policy), made.samples(4)
    batch[3].ptx = True
    device.reset()
    made.updated(learner, batch, objectives.MixedObjective(PolicyObjective(PpoLoss()), 0.1))
    device.expect("ptx", syncs=2)


def test_passes_without_gradient(device, policy):
    learner, batch = made.policy_updater(policy), made.samples(4)
    assert [len(each) for each in objectives.logprobs(learner, batch)] == [made.LENGTH - made.PROMPT] * 4
    with policy.as_reference():
        assert len(objectives.logprobs(learner, batch)) == 4
    energies = made.updater(policy, objectives.energy_forward(policy, LearnerRecipe(), 1.0))
    assert objectives.token_energies(energies, [], []) == []
    assert next(iter(energies.without_gradient(batch)))[1].shape == (4 * (made.LENGTH - made.PROMPT),)


LORA = {"rank": 4, "dropout": 0.1}
PASSES = [(lora, checkpointing) for lora in (None, LORA) for checkpointing in (False, True, "selective")]


@pytest.mark.parametrize("case", small.cases(PASSES, [PASSES[1], *PASSES[3:]]), ids=str)
def test_adapters_and_gradient_checkpointing(device, thin_model, case):
    lora, checkpointing = case
    policy = Policy(made.recipe(thin_model, lora=lora, gradient_checkpointing=checkpointing))
    learner = made.policy_updater(policy)
    assert waits_per_batch(device, learner, SupervisedObjective()) == (2, 0), device.syncs


@pytest.mark.parametrize("head_dtype", ["model", "float32"])
def test_dtypes(device, thin_model, head_dtype):
    assert Policy(made.recipe(thin_model, dtype=None)).model.dtype == torch.bfloat16
    policy = Policy(made.recipe(thin_model, head_dtype=head_dtype))
    made.updated(made.policy_updater(policy), made.samples(), SupervisedObjective())
    if head_dtype == "float32":
        return
    # Without the flash kernel, each segment is attended by itself.
    wide = Policy(made.recipe(thin_model, dtype="float32"))
    made.updated(made.policy_updater(wide), made.samples(), SupervisedObjective())


def test_kernels_per_layer(device, tmp_path, thin_model):
    """A forward pass, a backward pass and the gradients' way to the masters."""
    counts = []
    for count in (1, 2):
        policy = Policy(made.recipe(made.deeper(thin_model, tmp_path / str(count), count)))
        learner = made.policy_updater(policy)
        device.reset()
        made.updated(learner, made.samples(2), SupervisedObjective())
        counts.append(device.kernel_count)
    assert counts[1] - counts[0] <= 105


class Chatty(SupervisedObjective):
    """Reads a number without need."""

    def __call__(self, output, samples, weights):
        output.logprobs.sum().item()
        return super().__call__(output, samples, weights)


def test_an_added_wait_fails_with_its_line(device, policy):
    learner: Updater = made.policy_updater(policy)
    device.reset()
    made.updated(learner, made.samples(2), Chatty())
    line = Chatty.__call__.__code__.co_firstlineno + 1
    with pytest.raises(
        AssertionError, match=rf"the CPU waited 3 times, more than 2:\n(.*\n)*.*a number at .*checks_training.py:{line}"
    ):
        device.expect("an update", syncs=2)
    with pytest.raises(RuntimeError, match="device"):  # tensors of two devices
        torch.ones(3, device="cuda") + torch.ones(3)


@pytest.mark.parametrize("fused", ["liger", "none"])
def test_choices_of_fused_layers(device, thin_model, fused, monkeypatch):
    """Liger's kernels are replaced by their formulas, so they are not counted."""
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, fake_liger.ops())
    layers.liger.cache_clear()
    learner = made.policy_updater(Policy(made.recipe(thin_model, fused=fused)))
    device.reset()
    made.updated(learner, made.samples(2), SupervisedObjective())
    device.expect(fused, syncs=2)


def test_flash_attention_is_activated_through_torch(device, thin_model, monkeypatch):
    chosen = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: chosen[-1])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", chosen.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: chosen.append(None))
    for name in ("fa2", "fa3", "fa3", "fa2"):
        Policy(made.recipe(thin_model, attention=name))
    assert chosen == [None, "FA3", None]

    def missing(name):
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", missing)
    with pytest.raises(
        InputError, match=r"model\.attention: fa3 could not be activated .*install flash_attn_interface"
    ):
        Policy(made.recipe(thin_model, attention="fa3"))


def test_a_chunk_of_logits_is_read_once_each_way(device):
    hidden, weight = (
        torch.zeros(count, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for count in (512, 1024)
    )
    targets = torch.zeros(512, device="cuda", dtype=torch.int64)
    device.reset()
    logprobs, entropies = forward.projected_scores(hidden, weight, targets, 1.0, 128 * 1024)
    (logprobs + entropies).sum().backward()
    # Four chunks of rows, and four of columns: with the products, 4 + 10 bytes per logit.
    assert (device.kernels["read_rows"], device.kernels["differentiate"]) == (4, 4)
    assert device.kernels["mm"] == 4 + 3 * 4
    assert not {"_softmax", "amax", "gather", "scatter"} & set(device.kernels)
    assert device.kernel_count < 64
