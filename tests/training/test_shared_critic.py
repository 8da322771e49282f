"""A critic on the policy's trunk: one forward and backward pass whose gradient is that of both losses, and whole runs."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.errors import RunError
from posttrain.models.policy import Policy
from posttrain.recipe.model import LearnerRecipe, LoraRecipe, OptimizerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training import updater
from posttrain.training.critic import CriticLearner, open_critic
from posttrain.training.objectives import (
    MixedObjective,
    PolicyObjective,
    SharedObjective,
    SupervisedObjective,
    scores,
    token_forward,
)
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Updater, means, pack

from . import small
from .test_critic import SHARED
from .test_ptx import rows
from .test_updater import samples as episodes


def recipe(model, **changes):
    return RlRecipe(**{"model": {"path": str(model)}, "credit": {"type": "gae"}, "critic": SHARED} | changes)


def opened(model, budget=4096, lora=None, **changes):
    """A policy's learner and the critic on its trunk, with a head that is not zero."""
    values = recipe(model, **changes)
    policy = Policy(values.model.model_copy(update={"lora": lora}))
    critic = CriticLearner(values.critic, values.credit, open_critic(values, policy))
    batches = LearnerRecipe(tokens_per_batch=budget)
    forward = token_forward(policy, batches, 1.0, critic.head)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(), 9)
    learner = Updater(policy, optimizer, batches, forward, joint={"critic": critic.updater.optimizer})
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(3)))
    return learner, critic


def judged(clip_at=1.0):
    """Episodes with values before the update and targets; one of them has no credit, and so learns values alone."""
    draws, made = np.random.default_rng(5), episodes()
    for one in made:
        one.values, one.returns = draws.normal(size=(2, one.sampled_tokens)).astype(np.float32) * clip_at
    made[4].advantages[:] = 0
    return made


def gradients(learner, samples, objective, monkeypatch):
    """Gradients of trunk and head as they stand before they are applied, and the metrics."""
    with monkeypatch.context() as patched:
        found = small.kept_gradients(patched)
        totals = learner.update(samples, objective)
    return found, means(totals)


def by_hand(model, weight, samples, coefficient, clip):
    """PPO's loss + coefficient x the value loss, each a mean over sampled tokens, from one padded forward pass of
    transformers' own model; its gradients by parameter, the head's as `weight`."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    head = weight.clone().requires_grad_()
    longest = max(len(s.stream.ids) for s in samples)
    ids, mask = torch.zeros(len(samples), longest, dtype=torch.long), torch.zeros(len(samples), longest)
    for row, one in enumerate(samples):
        ids[row, : len(one.stream.ids)] = torch.from_numpy(one.stream.ids)
        mask[row, : len(one.stream.ids)] = 1
    output = plain(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    logprobs = torch.log_softmax(output.logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    values = (output.hidden_states[-1][:, :-1] @ head[0]).float()
    losses, errors = [], []
    for row, one in enumerate(samples):
        places = torch.from_numpy(np.flatnonzero(one.stream.sampled) - 1)
        ratio = torch.exp(logprobs[row, places] - torch.from_numpy(one.stream.rollout_logprobs[one.stream.sampled]))
        advantages = torch.from_numpy(one.advantages)
        losses.append(-torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.2) * advantages))
        own, old, target = values[row, places], torch.from_numpy(one.values), torch.from_numpy(one.returns)
        near = old + (own - old).clamp(-clip, clip)
        errors.append(torch.maximum((own - target) ** 2, (near - target) ** 2) / 2)
    policy, value = torch.cat(losses).mean(), torch.cat(errors).mean()
    (policy + coefficient * value).backward()
    found = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return found | {"weight": head.grad}, policy.item(), value.item()


def test_the_gradient_is_that_of_both_losses_by_plain_autograd(tiny_model, monkeypatch):
    loss = {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "aggregation": "token_mean"}
    learner, critic = opened(tiny_model)
    objective = SharedObjective(PolicyObjective(recipe(tiny_model, loss=loss).loss), 0.3, 0.2)
    found, metrics = gradients(learner, judged(), objective, monkeypatch)
    expected, policy, value = by_hand(tiny_model, critic.head.weight.detach(), judged(), 0.3, 0.2)
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-3)
    assert metrics["loss/policy"] == pytest.approx(policy, rel=1e-4)
    assert metrics["critic/loss"] == pytest.approx(value, rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(policy + 0.3 * value, rel=1e-4)
    assert 0 < metrics["critic/clipped"] < 1
    alone, _, _ = by_hand(tiny_model, critic.head.weight.detach(), judged(), 0.0, 0.2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert (found[name] - alone[name]).abs().max() > 1e-3  # the value loss reaches the trunk


@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "aggregation", [{}, {"aggregation": "sequence_mean"}, {"aggregation": "constant", "constant": 50.0}]
)
def test_the_gradient_does_not_depend_on_the_split_and_includes_that_of_rows(
    lora, aggregation, tiny_model, monkeypatch
):
    values = recipe(tiny_model, loss={"type": "ppo"} | aggregation)
    shared = SharedObjective(PolicyObjective(values.loss), 0.3, 0.2)

    def of(samples, objective, budget=4096):
        learner, _ = opened(tiny_model, budget, lora)
        return gradients(learner, samples, objective, monkeypatch)[0]

    assert len(pack(judged(), 60)) > 2
    whole, parts = of(judged(), shared), of(judged(), shared, 60)
    assert "weight" in whole
    torch.testing.assert_close(parts, whole, atol=3e-6, rtol=1e-3)
    taught = of(rows(), SupervisedObjective())
    mixed = of([*judged(), *rows()], MixedObjective(shared, 0.5), 100)
    expected = whole | {name: whole[name] + 0.5 * gradient for name, gradient in taught.items()}
    torch.testing.assert_close(mixed, expected, atol=3e-6, rtol=1e-3)


def test_updating_the_critic_alone_trains_only_the_head(tiny_model):
    learner, critic = opened(tiny_model)
    before = {name: p.detach().clone() for name, p in critic.updater.model.policy.trainable()}
    head = critic.head.weight.detach().clone()
    totals = means(critic.begin_update(judged())())
    assert totals["critic/gradient_norm"] > 0
    assert not torch.equal(head, critic.head.weight)
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in critic.updater.model.policy.trainable())
    assert critic.updater.model.policy.version == 0
    assert learner.optimizer.updates == 0


def test_values_of_every_pass_are_the_same(tiny_model):
    """Those before the updates, alone or with the log-probabilities, are those that the loss sees."""
    learner, critic = opened(tiny_model)
    made = episodes()
    joined = [values for _, _, values in scores(learner, made)]
    for alone, values in zip(critic.updater.begin_values(made)(), joined, strict=True):
        np.testing.assert_allclose(alone, values, rtol=1e-5, atol=1e-6)
    assert np.concatenate(joined).std() > 0.1


def test_the_head_has_a_separate_learning_rate_and_clip(tiny_model):
    optimizer = {"learning_rate": 0.5, "max_gradient_norm": 1e-3}
    learner, critic = opened(tiny_model, critic={"backbone": "shared", "optimizer": optimizer})
    head = critic.head.weight.detach().clone()
    learner.update(judged(), SharedObjective(PolicyObjective(recipe(tiny_model).loss), 0.3, 0.2))
    moved = (critic.head.weight.detach() - head).abs()
    assert moved.max() == pytest.approx(0.5, rel=1e-2)  # AdamW's first step is one learning rate
    assert learner.optimizer.learning_rate == pytest.approx(1e-5)


def test_a_nonfinite_loss_updates_neither_model_and_names_both_learning_rates(tiny_model, monkeypatch):
    learner, critic = opened(tiny_model)
    monkeypatch.setattr(updater, "MOST_SKIPPED", 0)
    head = critic.head.weight.detach().clone()
    broken = judged()
    broken[2].returns[0] = np.inf
    with pytest.raises(RunError, match=r"group 0 episode 2; .*optimizer\.l.* or critic\.optimizer\.learning_rate"):
        learner.update(broken, SharedObjective(PolicyObjective(recipe(tiny_model).loss), 0.3, 0.2))
    assert torch.equal(head, critic.head.weight)
    assert critic.updater.optimizer.updates == learner.optimizer.updates == 0
    assert critic.head.weight.grad is None


@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_a_value_loss_that_is_not_finite_names_the_critics_rate(backbone, tiny_model):
    values = recipe(tiny_model, critic={"backbone": backbone, "updates_before_policy": 2})
    critic = CriticLearner(values.critic, values.credit, open_critic(values, Policy(values.model)))
    broken = judged()[:3]
    broken[2].returns[0] = np.inf
    for _ in range(3):
        assert means(critic.begin_update(broken)())["critic/skipped"] == 1
    (said, *_) = critic.take_warnings()
    assert said.startswith("critic: update skipped: loss or gradient is not finite for group 0 episode 2; lower ")
    assert "critic.optimizer.learning_rate" in said
    with pytest.raises(RunError, match=r"group 0 episode 2; lower critic\.optimizer\.learning_rate, or"):
        critic.begin_update(broken)()
