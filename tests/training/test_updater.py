"""The learner: one global aggregation, skipped updates that name their episode, masters in float32."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.errors import RunError
from posttrain.losses.surrogates import PpoLoss
from posttrain.models.policy import _PRODUCT, Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.loss import EntropyRecipe
from posttrain.recipe.model import LearnerRecipe, LoraRecipe, ModelRecipe, OptimizerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.objectives import PolicyObjective, SupervisedObjective, logprobs, token_forward
from posttrain.training.optimizer import Optimizer, decayed
from posttrain.training.updater import MOST_SKIPPED, Updater
from tests.conftest import save_tiny_model
from tests.training import small

from .test_batches import sample


def learner(model, budget=4096, **optimizer):
    policy = Policy(ModelRecipe(path=str(model)))
    recipe = OptimizerRecipe(**({"learning_rate": 1e-2, "max_gradient_norm": 1e9} | optimizer))
    batches = LearnerRecipe(tokens_per_batch=budget)
    return Updater(policy, Optimizer(policy.trainable(), recipe, 10), batches, token_forward(policy, batches))


def samples(seed=0):
    """Three groups of four streams with their true behaviour log-probabilities left at a guess."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(3):
        prompt = rng.integers(3, 250, 10)
        for member in range(4):
            one = sample(prompt, rng.integers(3, 250, rng.integers(2, 30)), f"group {group} episode {member}")
            one.stream.rollout_logprobs[one.stream.sampled] = -5.0 + rng.normal(size=one.sampled_tokens) * 0.1
            one.advantages = np.full(one.sampled_tokens, rng.normal(), dtype=np.float32)
            made.append(one)
    return made


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_gradients_do_not_depend_on_the_split_into_micro_batches(aggregation, tiny_policy, monkeypatch):
    loss = {"type": "ppo", "aggregation": aggregation} | ({"constant": 100.0} if aggregation == "constant" else {})
    objective = PolicyObjective(RlRecipe(loss=loss).loss, entropy=EntropyRecipe(coefficient=0.1))
    forward, budgets = token_forward(tiny_policy, LearnerRecipe()), (45, 60, 150)
    small.assert_no_split_changes_gradients(
        tiny_policy, forward, samples, objective, monkeypatch, budgets, atol=2e-6, rtol=1e-4
    )


def test_an_update_raises_the_likelihood_of_the_trained_rows(tiny_model):
    subject = learner(tiny_model)
    before = logprobs(subject, samples())
    subject.update(samples(), SupervisedObjective())
    after = logprobs(subject, samples())
    assert np.concatenate(after).mean() > np.concatenate(before).mean()
    assert subject.model.version == 1


def test_no_signal_costs_nothing_and_a_nonfinite_loss_skips_the_update_and_names_the_episode(tiny_model):
    subject = learner(tiny_model)
    flat = samples()
    for one in flat:
        one.advantages[:] = 0
    totals = subject.update(flat, PolicyObjective(PpoLoss()))
    assert totals["optimizer/no_signal"] == (1.0, 1.0)
    assert (subject.trained_tokens, subject.model.version) == (0, 0)
    broken = samples()
    broken[5].advantages[0] = np.nan
    before = {n: p.detach().clone() for n, p in subject.model.trainable()}
    totals = subject.update(broken, PolicyObjective(PpoLoss()))
    assert totals["optimizer/skipped"] == (1.0, 1.0)
    assert subject.take_warnings() == ["update skipped: loss or gradient is not finite for group 1 episode 1"]
    for name, parameter in subject.model.trainable():
        assert torch.equal(parameter, before[name])
    for _ in range(MOST_SKIPPED - 1):
        subject.update(broken, PolicyObjective(PpoLoss()))
    subject.update(samples(), PolicyObjective(PpoLoss()))  # a good one resets the count
    assert subject.skipped_in_a_row == 0
    broken[5].advantages[0] = np.inf
    for _ in range(MOST_SKIPPED):
        subject.update(broken, PolicyObjective(PpoLoss()))
    with pytest.raises(RunError, match=r"4 updates in a row .* group 1 episode 1; lower optimizer.learning_rate"):
        subject.update(broken, PolicyObjective(PpoLoss()))


def test_the_reference_is_the_start_with_and_without_adapters(tiny_model):
    for lora in (None, LoraRecipe(rank=4)):
        policy = Policy(ModelRecipe(path=str(tiny_model), lora=lora))
        optimizer = Optimizer(policy.trainable(), OptimizerRecipe(learning_rate=1e-2), 10)
        subject = Updater(policy, optimizer, LearnerRecipe(), token_forward(policy, LearnerRecipe()))
        start = logprobs(subject, samples())
        subject.update(samples(), SupervisedObjective())
        subject.update(samples(), SupervisedObjective())
        with policy.as_reference():
            reference = logprobs(subject, samples())
        np.testing.assert_allclose(np.concatenate(reference), np.concatenate(start), atol=1e-6)
        assert np.abs(np.concatenate(logprobs(subject, samples())) - np.concatenate(start)).max() > 1e-3


class Products(TorchDispatchMode):
    """Counts products with weights."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += _PRODUCT.search(func.name()) is not None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_gradient_checkpointing_changes_nothing(lora, tiny_model, monkeypatch):
    monkeypatch.setattr("posttrain.models.policy._WIDE", 8)  # the model is 32 wide
    gradients, products = {}, {}
    for flag in (False, True, "selective"):
        policy = Policy(ModelRecipe(path=str(tiny_model), gradient_checkpointing=flag, lora=lora))
        batch = samples()
        with policy.training_mode(), Products() as counted:
            scores = policy.score([s.stream.ids for s in batch], [s.stream.sampled for s in batch], 1.0, 64)
            scores.logprobs.sum().backward()
        gradients[flag] = torch.cat([p.grad.flatten() for _, p in policy.trainable()])
        products[flag] = counted.count
    assert torch.equal(gradients[True], gradients[False])
    assert torch.equal(gradients["selective"], gradients[False])
    # Two layers of seven products, and as many with an adapter's first matrix. The second has four terms only. Torch stops
    # before the last product of a layer where its inputs are saved before it is computed, which depends on the processor.
    assert products[True] - products["selective"] in ((12, 14) if lora is None else (26, 28))
    if lora is None:
        assert products["selective"] == products[False]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2", "adapters", "reward"])
def test_weight_decay_excludes_the_parameters_that_transformers_excludes(architecture, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, Trainer

    if architecture == "gpt2":
        model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50))
    else:
        path = str(save_tiny_model(tmp_path, architecture if architecture.startswith(("llama", "qwen")) else "qwen2"))
        kind = RewardModel if architecture == "reward" else Policy
        model = kind(path, lora={"rank": 2} if architecture == "adapters" else None).model
    found = {name for name, parameter in model.named_parameters() if decayed(name, parameter)}
    expected = set(Trainer.get_decay_parameter_names(None, model)) & {name for name, _ in model.named_parameters()}
    assert expected - found == ({"transformer.wpe.weight"} if architecture == "gpt2" else set())
    assert found <= expected
    assert found
