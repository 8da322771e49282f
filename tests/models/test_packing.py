"""Shared prefixes of streams are computed once, and all beginnings of an answer in one pass, with the same results."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.critic import Critic
from posttrain.models.layers import Heads, causal_attention
from posttrain.models.packing import pack_row, probed_layout, row_length
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from tests.conftest import save_tiny_model
from tests.models.families import save_family


def conversations(seed, tasks=3, members=4, words=250):
    """Streams of several groups that share a prompt. Few different words make streams share whole turns as well."""
    rng = np.random.default_rng(seed)
    streams, sampled = [], []
    for length in rng.integers(1, 20, tasks):
        prompt = rng.integers(0, words, length)
        for _ in range(members):
            rest = rng.integers(0, words, rng.integers(1, 25))
            mask = np.arange(len(rest)) % 5 < 3
            mask[-1] = True
            streams.append(np.concatenate([prompt, rest]))
            sampled.append(np.concatenate([np.zeros(length, bool), mask]))
    order = rng.permutation(len(streams))
    return [streams[i] for i in order], [sampled[i] for i in order]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 250]))
def test_a_row_is_the_prefix_tree_of_its_streams(seed, words):
    streams, sampled = conversations(seed, words=words)
    row = pack_row(streams, sampled)
    assert (
        len(row.ids) == row_length(streams) == len({ids[: n + 1].tobytes() for ids in streams for n in range(len(ids))})
    )
    positions = row.layout.positions().numpy()
    keys = {}
    for segment in row.layout.segments:
        seen = [np.arange(*part) for part in segment.before]
        for token in range(segment.start, segment.stop):
            keys[token] = np.concatenate([*seen, np.arange(segment.start, token + 1)])
    for ids, places in zip(streams, row.places, strict=True):
        assert (row.ids[places] == ids).all()
        assert (positions[places] == np.arange(len(ids))).all()
        for at, place in enumerate(places):
            assert (row.ids[keys[place]] == ids[: at + 1]).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 250]))
def test_predictors_point_at_the_token_before(seed, words):
    streams, sampled = conversations(seed, words=words)
    row = pack_row(streams, sampled)
    expected = np.concatenate([ids[:-1][mask[1:]] for ids, mask in zip(streams, sampled, strict=True)])
    assert (row.ids[row.predictors] == expected).all()
    assert (row.targets == np.concatenate([ids[mask] for ids, mask in zip(streams, sampled, strict=True)])).all()
    chosen, kind = row.distinct()
    assert (row.predictors[chosen][kind] == row.predictors).all()
    assert (row.targets[chosen][kind] == row.targets).all()
    assert len(chosen) == len(set(zip(row.predictors.tolist(), row.targets.tolist(), strict=True)))


def compare(model, compute, streams, sampled):
    """Outputs [N, ...] of the streams together and one by one, and their gradients."""
    model.zero_grad()
    together = compute(streams, sampled)
    weights = torch.randn(together.shape, generator=torch.Generator().manual_seed(0))
    (weights * together).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    apart = torch.cat([compute([ids], [mask]) for ids, mask in zip(streams, sampled, strict=True)])
    (weights * apart).sum().backward()
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=2e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("words", [2, 250])
def test_scores_and_gradients_equal_those_of_each_stream_alone(tiny_model, words):
    policy = Policy(ModelRecipe(path=str(tiny_model)))

    def scores(streams, sampled):
        found = policy.score(streams, sampled, 0.8, 16)
        return torch.stack([found.logprobs, found.entropies], 1)

    compare(policy.model, scores, *conversations(3, words=words))


def test_identical_streams_count_as_often_as_they_are_given(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    (ids, *_), (mask, *_) = conversations(5)
    compare(policy.model, lambda *given: policy.score(*given, 1.0, 16).logprobs, [ids, ids, ids], [mask, mask, mask])


def test_rewards_and_values_equal_those_of_each_stream_alone(tiny_model):
    streams, sampled = conversations(4, words=2)
    reward = RewardModel(ModelRecipe(path=str(tiny_model)), seed=1)
    compare(reward.model, reward.rewards, streams, sampled)
    ends = {ids.tobytes(): np.flatnonzero(mask)[1::3] for ids, mask in zip(streams, sampled, strict=True)}

    def of_units(streams, sampled):
        return reward.unit_rewards(streams, sampled, [ends[ids.tobytes()] for ids in streams]).rewards

    compare(reward.model, of_units, streams, sampled)
    critic = Critic(ModelRecipe(path=str(tiny_model)))
    with torch.no_grad():
        critic._head().weight.normal_(generator=torch.Generator().manual_seed(2))
    compare(critic.model, critic.values, streams, sampled)


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def model(request, tmp_path_factory) -> RewardModel:
    folder = tmp_path_factory.mktemp("probes")
    if request.param == "mistral":  # with a sliding window of 5 tokens
        save_family(folder, "mistral", head_dim=8, sliding_window=5, num_hidden_layers=2)
    else:
        save_tiny_model(folder, request.param)
    return RewardModel(ModelRecipe(path=str(folder)), seed=1)


def separate(model, ids, seen):
    """Each beginning on its own, the end token behind it where it has none."""
    texts = [ids[:n] if ids[n - 1] in model.end_tokens else np.append(ids[:n], model.end_token) for n in seen]
    with torch.no_grad():
        return torch.cat([model.rewards([t], [np.arange(len(t)) > 0]) for t in texts]).numpy()


def test_probes_equal_separate_passes(model):
    rng = np.random.default_rng(0)
    streams = [rng.integers(3, 250, n) for n in (40, 7, 150)]
    streams[0][[20, 39]] = model.end_token  # a beginning that ends with an end token is read as it is
    seen = [np.array([3, 21, 22, 40]), np.array([1, 7]), np.array([5, 128, 129, 150])]
    together = model.prefix_rewards(streams, seen)
    for ids, places, values in zip(streams, seen, together, strict=True):
        expected = separate(model, ids, places.tolist())
        assert np.ptp(expected) > 1e-3
        np.testing.assert_allclose(values, expected, atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 70), st.lists(st.integers(1, 70), max_size=4)), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_a_probe_sees_its_beginning_and_itself(streams):
    streams = [(length, [min(n, length) for n in seen]) for length, seen in streams]
    layout = probed_layout(streams)
    total = sum(length + len(seen) for length, seen in streams)
    generator = torch.Generator().manual_seed(total)
    query, key, value = (torch.randn(heads, total, 8, generator=generator) for heads in (4, 2, 2))
    found = layout.attend(0, Heads(query, key, value, 0.3, None))
    assert len(layout.positions()) == total
    start = 0
    for length, seen in streams:
        own = slice(start, start + length)
        expected = causal_attention(Heads(query[:, own], key[:, own], value[:, own], 0.3, None))
        torch.testing.assert_close(found[:, own], expected, atol=1e-5, rtol=1e-5)
        for i, n in enumerate(seen):
            rows = [*range(start, start + n), start + length + i]
            expected = causal_attention(Heads(query[:, rows], key[:, rows], value[:, rows], 0.3, None))[:, -1]
            torch.testing.assert_close(found[:, start + length + i], expected, atol=1e-5, rtol=1e-5)
            assert layout.positions()[start + length + i] == n
        start += length + len(seen)
