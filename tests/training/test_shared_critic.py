"""A critic on the policy's trunk: one forward and backward pass whose gradient is that of both losses, and whole runs."""

import json

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModelForCausalLM

from posttrain.distributed.tensors import read_all
from posttrain.errors import RunError
from posttrain.models.policy import Policy
from posttrain.recipe.model import LearnerRecipe, LoraRecipe, OptimizerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training import updater
from posttrain.training.critic import CriticLearner
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
from .test_critic import foretold
from .test_ptx import ptx, rows
from .test_rl import lines, train
from .test_updater import samples as episodes

SHARED = {"backbone": "shared", "optimizer": {"learning_rate": 1e-2}}


def recipe(model, **changes):
    values = {"model": {"path": str(model)}, "credit": {"type": "gae"}, "critic": SHARED}
    return TypeAdapter(RlRecipe).validate_python(values | changes)


def opened(model, budget=4096, lora=None, **changes):
    """A policy's learner and the critic on its trunk, with a head that is not zero."""
    values = recipe(model, **changes)
    policy = Policy(values.model.model_copy(update={"lora": lora}))
    critic = CriticLearner(values.critic, values.credit, policy, values.learner, 9)
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
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=3e-6, rtol=1e-3, msg=name)
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
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=3e-6, rtol=1e-3, msg=name)
    taught = of(rows(), SupervisedObjective())
    mixed = of([*judged(), *rows()], MixedObjective(shared, 0.5), 100)
    for name, gradient in whole.items():
        expected = gradient + 0.5 * taught[name] if name in taught else gradient
        torch.testing.assert_close(mixed[name], expected, atol=3e-6, rtol=1e-3, msg=name)


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
    for alone, values in zip(critic.updater.values(made), joined, strict=True):
        np.testing.assert_allclose(alone, values, rtol=1e-5, atol=1e-6)
    assert np.concatenate(joined).std() > 0.1


def test_the_head_has_a_separate_learning_rate_and_clip(tiny_model):
    optimizer = {"learning_rate": 0.5, "max_gradient_norm": 1e-3}
    learner, critic = opened(tiny_model, critic={"backbone": "shared", "optimizer": optimizer})
    head = critic.head.weight.detach().clone()
    learner.update(judged(), SharedObjective(PolicyObjective(recipe(tiny_model).loss), 0.3, 0.2))
    moved = (critic.head.weight.detach() - head).abs()
    assert moved.max() == pytest.approx(0.5, rel=1e-2)  # AdamW's first step is one learning rate
    assert all(group["lr"] == pytest.approx(1e-5) for group in learner.optimizer._adamw.param_groups)


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
    critic = CriticLearner(values.critic, values.credit, Policy(values.model), values.learner, 9)
    broken = judged()[:3]
    broken[2].returns[0] = np.inf
    for _ in range(3):
        assert means(critic.begin_update(broken)())["critic/skipped"] == 1
    (said, *_) = critic.take_warnings()
    assert said.startswith("critic: update skipped: loss or gradient is not finite for group 0 episode 2; lower ")
    assert "critic.optimizer.learning_rate" in said
    with pytest.raises(RunError, match=r"group 0 episode 2; lower critic\.optimizer\.learning_rate, or"):
        critic.begin_update(broken)()


@pytest.mark.slow
def test_the_critic_learns_to_explain_predictable_returns(tiny_model, tmp_path):
    critic = {"backbone": "shared", "clip": None, "coefficient": 1.0}
    critic["optimizer"] = {"learning_rate": 3e-2, "max_gradient_norm": 10.0}
    learner = {"epochs_per_step": 4, "tokens_per_batch": 4096}
    task = foretold(tiny_model, tmp_path, optimizer={"learning_rate": 3e-3})
    run, _ = train(tiny_model, tmp_path, credit={"type": "gae"}, critic=critic, learner=learner, steps=20, **task)
    explained = [line["critic/explained_variance"] for line in lines(run, "train")]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # its head starts at zero
    assert min(explained[-5:]) > 0.8


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"lora": {"rank": 2}}},
        pytest.param({"model": {"dtype": "bfloat16"}}, marks=pytest.mark.slow),
        {"model": {"gradient_checkpointing": True}},
        {"credit": {"type": "bilevel_gae"}},
        {"loss": {"type": "gspo"}},
        pytest.param({"loss": {"type": "ppo", "correction": {"weights": "token"}}}, marks=pytest.mark.slow),
        {"learner": {"epochs_per_step": 2, "updates_per_step": 2, "tokens_per_batch": 1500}},
    ],
    ids=str,
)
def test_the_variants_take_steps_under_the_same_names(changes, tiny_model, tmp_path):
    base = small.recipe_values(tiny_model, tmp_path)
    wanted = {"credit": {"type": "gae"}, "critic": SHARED} | changes
    merged = {key: base.get(key, {}) | value if key == "model" else value for key, value in wanted.items()}
    run, _ = train(tiny_model, tmp_path, **merged | small.two_steps(base))
    for line in lines(run, "train"):
        assert line["optimizer/skipped"] == line["critic/skipped"] == 0
        assert line["optimizer/gradient_norm"] > 0
        assert line["critic/gradient_norm"] > 0
        assert {"critic/loss", "critic/clipped", "critic/value", "critic/return", "loss/policy"} <= set(line)
    assert lines(run, "train")[0]["critic/value"] == 0
    assert lines(run, "train")[1]["critic/value"] != 0
    _, info = AutoModelForCausalLM.from_pretrained(run.path / "model", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]


def test_the_policy_waits_for_the_heads_first_updates(tiny_model, tmp_path):
    critic = SHARED | {"updates_before_policy": 3}
    run, _ = train(
        tiny_model,
        tmp_path,
        credit={"type": "gae"},
        critic=critic,
        steps=3,
        checkpoint={"every": 1, "keep": 9, "keep_state": "always"},
    )
    first, second, third = lines(run, "train")
    assert "loss/policy" not in first  # its two updates, and the first of the next step's two, are the head's alone
    assert {"critic/loss", "critic/gradient_norm", "critic/skipped"} <= set(first)
    assert second["loss/policy"] != 0
    assert third["critic/value"] != 0
    weights = [(path / "policy" / "model.safetensors").read_bytes() for path in sorted(run.checkpoints.glob("*"))]
    assert weights[0] == weights[1]
    assert weights[1] != weights[2]
    state = [json.loads((path / "state.json").read_text()) for path in sorted(run.checkpoints.glob("*"))]
    assert [one["checkpointables"]["critic"]["optimizer"]["updates"] for one in state] == [0, 2, 4, 6]
    assert [one["optimizer"]["updates"] for one in state] == [0, 0, 1, 3]


def _values(tiny, runs, folder):
    critic = {"backbone": "shared", "updates_before_policy": 1, "clip": 0.1, "coefficient": 0.5}
    critic["optimizer"] = {"learning_rate": 1e-2, "schedule": "cosine"}
    model = {"path": str(tiny), "threads": 1, "lora": {"rank": 2, "dropout": 0.1}}
    return small.recipe_values(tiny, runs, credit={"type": "gae"}, critic=critic, model=model, ptx=ptx(folder))


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    assert small.run(_values(tiny_model, runs, runs)) == 0, (runs / "log.txt").read_text()
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("posttrain.training.updater:Optimizer.step", 6),  # the trunk has made its update, the head has not
        ("torch:save", 3),
    ],
)
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, count, tiny_model, tmp_path, uninterrupted):
    values = _values(tiny_model, tmp_path, uninterrupted)
    assert small.run(values, die_at=(place, count)) == -9
    assert small.run(values, resume=(tmp_path / "small").exists()) == 0, (tmp_path / "log.txt").read_text()
    small.assert_same(tmp_path / "small", uninterrupted / "small")
    last = sorted((tmp_path / "small" / "checkpoints").glob("step_*"))[-1]
    assert read_all(last / "tensors")["critic/weights/weight"].any()
    assert json.loads((last / "state.json").read_text())["checkpointables"]["critic"]["optimizer"]["updates"] == 8


@pytest.mark.parametrize(
    ("critic", "said"),
    [
        ({"path": "a"}, "`path` has no effect: backbone is shared"),
        ({"dtype": "bfloat16"}, "`dtype` has no effect: backbone is shared"),
        ({"lora": {"rank": 2}}, "`lora` has no effect: backbone is shared"),
        ({"backbone": "separate", "coefficient": 0.5}, "`coefficient` has no effect: backbone is separate"),
    ],
)
def test_keys_without_effect_are_errors(critic, said):
    with pytest.raises(ValidationError, match=said):
        RlRecipe(credit={"type": "gae"}, critic={"backbone": "shared"} | critic)
