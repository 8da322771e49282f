"""Sampling: the right tokens with the right frequencies and log-probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from posttrain.engines.local import cuda
from posttrain.engines.local.decoder import sample, truncate
from posttrain.recipe.rollout import SamplingRecipe

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])


def test_frequencies_follow_the_tempered_distribution():
    logits = PROBABILITIES.log()[None].repeat(20_000, 1)
    draws = np.random.default_rng(0).random(20_000)
    tokens, logprobs = sample(logits, [SamplingRecipe(temperature=2.0)] * 20_000, draws)
    expected = torch.softmax(PROBABILITIES.double().log() / 2, -1)
    assert chisquare(np.bincount(tokens, minlength=4), expected.numpy() * 20_000).pvalue > 1e-3
    torch.testing.assert_close(logprobs, expected.log()[tokens].float())
    greedy, logprob = sample(PROBABILITIES.log()[None], [SamplingRecipe(temperature=0.0)], [0.99])
    assert greedy.tolist() == [0]
    assert logprob.exp().item() == pytest.approx(0.5), "scored at temperature 1"


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [
        (SamplingRecipe(top_k=2), [0, 1]),
        (SamplingRecipe(top_p=0.5), [0]),
        (SamplingRecipe(top_p=0.51), [0, 1]),
        (SamplingRecipe(min_p=0.3), [0, 1, 2]),
        (SamplingRecipe(top_k=3, top_p=0.9), [0, 1, 2]),
        (SamplingRecipe(top_k=1), [0]),
    ],
)
def test_truncation_keeps_earlier_steps(recipe, kept):
    assert torch.nonzero(truncate(PROBABILITIES[None], [recipe])[0])[:, 0].tolist() == kept


@pytest.mark.parametrize("recipe", [SamplingRecipe(top_k=50), SamplingRecipe(top_p=0.5)])
def test_ties_between_tokens_keep_the_first_in_any_batch(recipe):
    """Logits of bfloat16 weights are equal more often than not where a cut falls."""
    random = torch.Generator().manual_seed(0)
    flat = torch.full((1, 49_152), 1 / 49_152)
    for _ in range(10):
        row = torch.softmax((3 * torch.randn(1, 49_152, generator=random)).bfloat16().float(), -1)
        kept = truncate(row, [recipe])[0] > 0
        # A neighbour whose top-p reaches far makes the whole vocabulary be sorted.
        among = truncate(torch.cat([row, flat]), [recipe, SamplingRecipe(top_p=0.99)])[0] > 0
        assert torch.equal(kept, among)
        least = row[0][kept].min()
        equal = torch.nonzero(row[0] == least)[:, 0]
        assert kept[equal].tolist() == sorted(kept[equal].tolist(), reverse=True)
        assert recipe.top_k == 0 or int(kept.sum()) == recipe.top_k
    one = SamplingRecipe(top_k=1) if recipe.top_k else SamplingRecipe(top_p=0.1)
    assert truncate(torch.tensor([[0.2, 0.4, 0.4]]), [one])[0].tolist() == pytest.approx([0, 0.4, 0])


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30),
    draw=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.99),
)
def test_a_sampled_token_is_always_a_kept_token(weights, draw, top_k, top_p, min_p):
    recipe = SamplingRecipe(top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = torch.tensor(weights) / sum(weights)
    tokens, _ = sample(probabilities.log()[None], [recipe], [draw])
    assert truncate(torch.softmax(probabilities.log(), -1)[None], [recipe])[0, tokens[0]] > 0


@given(rows=st.integers(1, 3), count=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_running_sums_by_products_are_running_sums(rows, count, seed):
    values = torch.rand(rows, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "TERMS", 8)  # 300 numbers are blocks of blocks of blocks
        found = cuda.sum_by_products(values)
    torch.testing.assert_close(found, values.cumsum(-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("recipe", [SamplingRecipe(), SamplingRecipe(top_p=0.5), SamplingRecipe(temperature=0.0)])
@pytest.mark.parametrize("wrong", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_that_are_not_finite_have_no_log_probability(recipe, wrong):
    tokens, logprobs = sample(torch.tensor([wrong, [0.0, 0.0]]), [recipe, SamplingRecipe()], [0.9, 0.9])
    assert logprobs.isnan().tolist() == [True, False]
    assert 0 <= int(tokens[0]) < 2
    assert int(tokens[1]) == 1
