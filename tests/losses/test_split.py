"""Law 4: however the streams of an optimizer step are divided into micro-batches, the gradient is the same."""

import functools

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from posttrain.losses.kl import kl_loss
from posttrain.losses.policy import TokenBatch, dft, nll, policy_loss, token_weights
from posttrain.recipe.loss import LossRecipe

LENGTHS = [3, 1, 5, 2, 4]
FEATURES = 6
LOSSES = {
    "ppo": {"type": "ppo"},
    "dual": {"type": "ppo", "clip_high": 0.28, "dual_clip": 1.5},
    "gspo": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "gspo_token": {"type": "gspo_token", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"type": "cispo", "clip_high": 0.3},
    "dppo": {"type": "dppo", "delta": 0.05},
    "sapo": {"type": "sapo"},
    "gmpo": {"type": "gmpo", "clip_low": 0.1, "clip_high": 0.1},
    "reinforce": {"type": "reinforce"},
    "off_policy": {"type": "ppo", "off_policy_mask": 0.05},
    "tis": {"type": "ppo", "correction": {"cap": 1.2, "reject": "geometric", "bounds": [0.8, 1.3]}},
    "mis": {"type": "gspo", "correction": {"weights": "sequence", "reject": "token"}},
}


def partitions(items):
    """All set partitions of `items`."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [items[0], *part], *rest[i + 1 :]]


@functools.cache
def passed(loss, aggregation, part):
    """Gradient and metrics of one micro-batch, the streams `part` of an optimizer step."""
    rng = np.random.default_rng(0)
    streams = [{k: rng.normal(size=n) for k in ("noise", "mismatch", "reference", "advantages")} for n in LENGTHS]
    inputs = [rng.normal(size=(n, FEATURES)) for n in LENGTHS]
    parameters = torch.tensor(rng.normal(size=FEATURES) * 0.5, requires_grad=True)
    start = parameters.detach()
    options = {"aggregation": aggregation} | ({"constant": 7.0} if aggregation == "constant" else {})
    recipe = TypeAdapter(LossRecipe).validate_python(LOSSES.get(loss, {"type": "ppo"}) | options)
    weights, divisor = token_weights(aggregation, LENGTHS, recipe.constant)
    joined = {k: torch.from_numpy(np.concatenate([streams[i][k] for i in part])) for k in streams[0]}
    x = torch.from_numpy(np.concatenate([inputs[i] for i in part]))
    logprobs = torch.nn.functional.logsigmoid(x @ parameters)
    old = torch.nn.functional.logsigmoid(x @ start) + 0.2 * joined["noise"]
    lengths = torch.tensor([LENGTHS[i] for i in part])
    batch = TokenBatch(
        rollout_logprobs=old + 0.3 * joined["mismatch"],
        advantages=joined["advantages"],
        stream=torch.repeat_interleave(torch.arange(len(part)), lengths),
        lengths=lengths,
        weights=torch.repeat_interleave(torch.tensor([weights[i] for i in part], dtype=torch.float64), lengths),
        ref_logprobs=old + joined["reference"],
        old_logprobs=old,
    )
    if loss in ("nll", "dft"):
        value, metrics = {"nll": nll, "dft": dft}[loss](logprobs, batch), {}
    elif loss in ("k2", "k3"):
        value, metrics = kl_loss(loss, logprobs, batch), {}
    else:
        value, metrics = policy_loss(recipe, logprobs, batch)
    (value / divisor).backward()
    return parameters.grad, metrics


def step(loss, aggregation, parts):
    """Gradient and metrics of one optimizer step in which `parts` are the micro-batches."""
    gradient, totals = torch.zeros(FEATURES, dtype=torch.float64), {}
    for part in parts:
        added, metrics = passed(loss, aggregation, tuple(part))
        gradient = gradient + added
        for name, pair in metrics.items():
            totals[name] = totals.get(name, np.zeros(2)) + pair
    return gradient, totals


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("loss", [*LOSSES, "k2", "k3", "nll", "dft"])
def test_any_split_has_the_same_gradient_and_metrics(loss, aggregation):
    whole, totals = step(loss, aggregation, [list(range(5))])
    assert whole.abs().max() > 1e-3
    every = list(partitions(list(range(5))))
    assert len(every) == 52
    for parts in every:
        gradient, metrics = step(loss, aggregation, parts)
        torch.testing.assert_close(gradient, whole, atol=1e-12, rtol=0)
        for name, pair in metrics.items():
            np.testing.assert_allclose(pair, totals[name], atol=1e-10, err_msg=name)


def test_weights_and_divisors():
    assert token_weights("token_mean", [3, 0, 1]) == ([1.0, 1.0, 1.0], 4.0)
    assert token_weights("sequence_mean", [4, 0, 1]) == ([0.25, 0.0, 1.0], 2.0)
    assert token_weights("constant", [3, 1], 10.0) == ([1.0, 1.0], 10.0)
    with pytest.raises(ValueError, match="constant"):
        token_weights("constant", [3, 1])
