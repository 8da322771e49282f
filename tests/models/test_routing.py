"""Routers of models with experts: choices that are read and replayed, the load-balancing loss, and their metrics."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.harness import tiny_families
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from posttrain.errors import InputError
from posttrain.losses.surrogates import PpoLoss
from posttrain.models.policy import Policy
from posttrain.models.routing import Routing
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.seeds import random_stream
from posttrain.training.objectives import PolicyObjective, SupervisedObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rows import stream_of
from posttrain.training.updater import Sample, Updater
from tests.conftest import make_tokenizer
from tests.models.families import save_family

FAMILIES = {"qwen3_moe": 1, "qwen2_moe": 2, "mixtral": 2, "olmoe": 2, "granitemoe": 2, "glm4_moe": 1, "deepseek_v3": 1}
FAMILIES |= {"minimax_m2": 2}
"""Family -> routers of its tiny model. That of MiniMax-M2 takes a bias besides the hidden states."""
EXPERTS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("routing")


def policy_of(folder, family="mixtral", **settings):
    if not (folder / family).exists():
        save_family(folder / family, family)
    return Policy(str(folder / family), threads=1, **settings)


def streams_of(*lengths, shared=6, prompt=4):
    """Random streams that share their first tokens, the last of which are sampled."""
    draws = random_stream(0, "routing")
    common = draws.integers(3, 250, shared)
    rows = [np.concatenate([common, draws.integers(3, 250, n - shared)]) for n in lengths]
    made = [stream_of(ids, np.arange(len(ids)) >= prompt) for ids in rows]
    for stream in made:
        stream.rollout_logprobs[stream.sampled] = -5.5
    return made


def logprobs(policy, streams, replay=True):
    """Per stream [n], from one packed row."""
    experts = [stream.experts if replay else None for stream in streams]
    flat = policy.score([s.ids for s in streams], [s.sampled for s in streams], 1.0, 64, experts=experts).logprobs
    return flat.split([int(s.sampled.sum()) for s in streams])


def recorded(policy, streams):
    with torch.no_grad(), policy.routing.recorded() as routed:
        logprobs(policy, streams, replay=False)
    return routed


def drawn(streams, routers, top=2):
    """Set other experts for every token, two different ones; the first tokens of all streams have the same."""
    for stream in streams:
        every = np.tile(np.arange(EXPERTS), (len(stream), routers, 1))
        stream.experts = random_stream(len(stream), "experts").permuted(every, axis=2)[..., :top]
        stream.experts[:6] = random_stream(1, "experts").permuted(every[:6], axis=2)[..., :top]
    return streams


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_a_router_s_own_choices_changes_no_bit_and_other_choices_are_followed(folder, family):
    policy = policy_of(folder, family)
    routers = FAMILIES[family]
    (stream,) = streams_of(30)
    routed = recorded(policy, [stream])
    stream.experts = routed.stacked()
    assert stream.experts.shape == (30, routers, 2)
    assert stream.experts.dtype == np.int8
    with torch.no_grad():
        assert torch.equal(logprobs(policy, [stream])[0], logprobs(policy, [stream], replay=False)[0])
        drawn([stream], routers)
        with policy.routing.recorded() as other:
            changed = logprobs(policy, [stream])[0]
        assert np.array_equal(other.stacked(), stream.experts)
        assert (changed - logprobs(policy, [stream], replay=False)[0]).abs().max() > 1e-3
        stream.experts[:] = -1
        assert torch.equal(logprobs(policy, [stream])[0], logprobs(policy, [stream], replay=False)[0])


def test_the_weights_of_replayed_experts_are_those_of_the_family_s_formula(folder):
    """Against transformers' modules with routers that are written here."""
    policy = policy_of(folder, "mixtral")
    (stream,) = drawn(streams_of(20), 2)
    plain = copy.deepcopy(policy.model)
    for place, layer in enumerate(plain.model.layers):
        chosen = torch.from_numpy(stream.experts[:, place]).long()

        def route(hidden, gate=layer.mlp.gate, chosen=chosen):
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.t()
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        layer.mlp.gate.forward = route
    expected = plain(torch.from_numpy(stream.ids)[None]).logits[0].log_softmax(-1)
    expected = expected[:-1].gather(1, torch.from_numpy(stream.ids[1:])[:, None])[stream.sampled[1:], 0]
    found = logprobs(policy, [stream])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, module in ((found, policy.model), (expected, plain)):
        one.sum().backward()
        assert module.model.layers[0].mlp.gate.weight.grad.abs().max() > 0
    for one, other in zip(policy.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_streams_of_a_row_keep_their_own_experts(folder, checkpointing):
    """Shared tokens have the experts of the first stream that knows some; the others those of their stream. Layers that are
    recomputed in the backward pass have the same."""
    policy = policy_of(folder, "qwen2_moe", gradient_checkpointing=checkpointing)
    streams = drawn(streams_of(30, 24, 40), 2)
    streams[0].experts[:6] = -1
    gradients, scores = [], []
    for groups in ([streams], [[stream] for stream in streams]):
        if len(groups) > 1:
            streams[0].experts[:6] = streams[1].experts[:6]
        scores.append([])
        with policy.training_mode("routing"):
            for group in groups:
                parts = logprobs(policy, group)
                scores[-1] += [part.detach() for part in parts]
                torch.cat(parts).square().sum().backward()
        gradients.append([p.grad.clone() for _, p in policy.trainable()])
        policy.model.zero_grad()
    for one, other in zip(*scores, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def updated(policy, streams, budget, objective=SupervisedObjective, steps=1):
    """The updater after updates on the streams, and the metrics of the last."""
    learner = LearnerRecipe(tokens_per_batch=budget)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(learning_rate=1e-3), steps)
    updater = Updater(policy, optimizer, learner, token_forward(policy, learner))
    samples = [Sample(s, "row", np.linspace(-1, 1, int(s.sampled.sum()), dtype=np.float32)) for s in streams]
    for _ in range(steps):
        totals = updater.update(samples, objective())
    return {name: value / count for name, (value, count) in totals.items() if count}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_the_load_balancing_loss_is_that_of_transformers(folder, family, monkeypatch):
    """For all streams in one padded batch, whatever the micro-batches are; and so is its gradient."""
    streams = streams_of(30, 24, 17, 21)
    plain = policy_of(folder, family).model
    logits = []
    for name, module in plain.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, inputs, out: logits.append(out[0]))
    for stream in streams:  # packed attention takes no padding
        plain(torch.from_numpy(stream.ids)[None])
    routers = FAMILIES[family]
    of_router = [torch.cat(logits[place::routers]) for place in range(routers)]
    expected = load_balancing_loss_func(tuple(of_router), EXPERTS, 2)
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    padded = [pad(logits[place::routers]).flatten(0, 1) for place in range(routers)]
    mask = pad([torch.ones(len(stream), dtype=torch.int64) for stream in streams])
    torch.testing.assert_close(load_balancing_loss_func(tuple(padded), EXPERTS, 2, mask), expected)
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert len(gradients) > 3
    kept = {}

    def step(optimizer):
        kept.update({name: p.grad for name, p in zip(optimizer.names, optimizer.parameters, strict=True)})
        return 0.0

    monkeypatch.setattr(Optimizer, "step", step)
    for budget in (30, 60, 200):
        policy = policy_of(folder, family, router_aux_loss=0.5)
        metrics = updated(policy, streams, budget, Silent)
        assert metrics["loss/router"] == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(kept[name], 0.5 * gradient, atol=1e-6, rtol=1e-4)


class Silent(SupervisedObjective):
    """A loss of zero."""

    def __call__(self, output, samples, weights):
        loss, metrics = super().__call__(output, samples, weights)
        return loss * 0, metrics


def test_metrics_count_tokens_of_streams_once_for_each_stream(folder):
    streams = streams_of(30, 24, 17)
    policy = policy_of(folder, "mixtral")
    shares = [recorded(policy, [stream]).stacked() for stream in streams]
    chosen = np.concatenate(shares)
    counts = np.stack([np.bincount(chosen[:, place].ravel(), minlength=EXPERTS) for place in range(2)])
    share = counts / counts.sum(1, keepdims=True)
    expected = {
        "router/imbalance": (share.max(1) * EXPERTS).mean(),
        "router/entropy": (-(share * np.log(np.maximum(share, 1e-9))).sum(1) / np.log(EXPERTS)).mean(),
        "router/unused": (counts == 0).mean(),
        "router/changed": 0.0,
    }
    for budget in (30, 200):
        metrics = updated(policy_of(folder, "mixtral"), streams, budget)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    drawn(streams, 2)
    changed = np.concatenate([np.sort(a) != np.sort(s.experts) for a, s in zip(shares, streams, strict=True)]).any(-1)
    metrics = updated(policy_of(folder, "mixtral"), streams, 30, lambda: PolicyObjective(PpoLoss()))
    assert metrics["router/changed"] == pytest.approx(changed.mean(), abs=0.15)  # later layers see other inputs
    assert metrics["router/unused"] == 0  # every expert was drawn


def test_the_loss_balances_experts(folder):
    streams = streams_of(40, 30, 45)
    before, after = (
        updated(policy_of(folder, "mixtral", router_aux_loss=weight), streams, 100, steps=20)["router/imbalance"]
        for weight in (0.0, 0.1)
    )
    assert after < before - 0.05


def test_a_reference_model_chooses_its_own_experts(folder):
    for lora in (None, {"rank": 4}):
        policy = policy_of(folder, "mixtral", lora=lora)
        (stream,) = streams_of(30)
        with torch.no_grad():
            expected = logprobs(policy, [stream])[0]
        drawn([stream], 2)
        with policy.as_reference():
            assert torch.equal(logprobs(policy, [stream])[0], expected)
        with torch.no_grad():
            assert not torch.equal(logprobs(policy, [stream])[0], expected)


@pytest.mark.parametrize(("key", "value"), [("router_replay", True), ("router_aux_loss", 0.1)])
def test_models_without_experts_are_refused(folder, tiny_model, key, value):
    with pytest.raises(InputError, match=rf"model\.{key}: .*remove the key"):
        Policy(str(tiny_model), threads=1, **{key: value})


def test_layers_of_routers_whose_model_calls_them_blocks(tmp_path):
    tokenizer = make_tokenizer()
    tiny_families.save_tiny("dbrx", tmp_path, len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    names = [name for name, _ in Policy(str(tmp_path), threads=1).model.named_modules() if name.endswith("router")]
    assert ".blocks.1." in names[1]
    assert Routing(names).layers == list(range(len(names)))
