"""A prompt that streams share is computed once, with the same results."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.forward import pack_row
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe


def group(seed, prompts=3, members=4):
    """Streams of several groups that share prompts; answers in turns, environment tokens between."""
    rng = np.random.default_rng(seed)
    streams, sampled = [], []
    for length in rng.integers(1, 20, prompts):
        prompt = rng.integers(0, 250, length)
        for _ in range(members):
            rest = rng.integers(0, 250, rng.integers(1, 25))
            mask = rng.random(len(rest)) < 0.5
            mask[0] = mask[-1] = True
            streams.append(np.concatenate([prompt, rest]))
            sampled.append(np.concatenate([np.zeros(length, bool), mask]))
    order = rng.permutation(len(streams))
    return [streams[i] for i in order], [sampled[i] for i in order]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_predictors_point_at_the_token_before(seed):
    streams, sampled = group(seed)
    row = pack_row(streams, sampled)
    expected = np.concatenate([ids[:-1][mask[1:]] for ids, mask in zip(streams, sampled, strict=True)])
    assert (row.ids[row.predictors] == expected).all()
    distinct = {
        ids[: int(np.argmax(mask))].tobytes(): int(np.argmax(mask)) for ids, mask in zip(streams, sampled, strict=True)
    }
    continued = sum(len(ids) - int(np.argmax(mask)) for ids, mask in zip(streams, sampled, strict=True))
    assert len(row.ids) == sum(distinct.values()) + continued


def test_scores_and_gradients_equal_those_of_each_stream_alone(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    streams, sampled = group(3)
    weights = torch.randn(sum(int(mask.sum()) for mask in sampled))
    together = policy.score(streams, sampled, 0.8, 16)
    (weights * together.logprobs).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    alone = [policy.score([ids], [mask], 0.8, 16) for ids, mask in zip(streams, sampled, strict=True)]
    apart = torch.cat([scores.logprobs for scores in alone])
    (weights * apart).sum().backward()
    torch.testing.assert_close(together.logprobs, apart, atol=1e-5, rtol=0)
    torch.testing.assert_close(together.entropies, torch.cat([s.entropies for s in alone]), atol=1e-5, rtol=0)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-4, rtol=1e-4, msg=name)
