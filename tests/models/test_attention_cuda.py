"""The GPU's attention without a GPU: its spans and gradients against the processor's, with a plain kernel in between."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.cuda.attention import _Gather, attend_spans, flash, spans_of, supports
from posttrain.models.layers import Heads
from tests.models.bundles import bundle_layout

CPU = torch.device("cpu")
BUNDLES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=3).map(tuple)), min_size=1, max_size=4
)


def plain_kernel(spans, query, key, value, scaling, window):
    """The documented computation of the flash kernel, span by span, with explicit masks."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for span in range(len(spans.query_ends) - 1):
        q = query[spans.query_ends[span] : spans.query_ends[span + 1]]
        k = key[spans.key_ends[span] : spans.key_ends[span + 1]].repeat_interleave(groups, 1)
        v = value[spans.key_ends[span] : spans.key_ends[span + 1]].repeat_interleave(groups, 1)
        assert len(q) <= spans.longest_query
        assert len(k) <= spans.longest_key
        ahead = torch.arange(len(k))[None] - (torch.arange(len(q))[:, None] + len(k) - len(q))
        seen = ahead <= 0 if window is None else (ahead <= 0) & (ahead >= -(window - 1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def rows_of(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, tokens, 8), (2, tokens, 8), (2, tokens, 8), (4, tokens, 8)]
    *rows, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [row.requires_grad_() for row in rows], weights


@settings(max_examples=40, deadline=None)
@given(BUNDLES, st.sampled_from([None, 1, 3, 100]), st.integers(0, 1000))
def test_outputs_and_gradients_equal_the_processors(bundles, window, seed):
    tokens = sum(prompt + sum(rest) for prompt, rest in bundles)
    rows, weights = rows_of(tokens, seed)
    expected = bundle_layout(bundles).attend(0, Heads(*rows, 0.3, window))
    gradients = torch.autograd.grad((expected * weights).sum(), rows)
    found = attend_spans(spans_of(bundle_layout(bundles).segments, CPU), *rows, 0.3, window, plain_kernel)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(torch.autograd.grad((found * weights).sum(), rows), gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_keys_of_a_shared_prompt_alone_are_copied_for_each_continuation_and_not_kept():
    assert not supports(CPU, torch.bfloat16, 8), "the attention of a processor is used there"
    spans = spans_of(bundle_layout([(7, []), (5, []), (4, [])]).segments, CPU)
    assert spans.gathered is None
    assert spans.query_ends.tolist() == spans.key_ends.tolist() == [0, 7, 12, 16]
    assert spans.query_ends.dtype == torch.int32
    spans = spans_of(bundle_layout([(6, [2, 3, 1])]).segments, CPU)
    assert len(spans.gathered) == 6 + 8 + 9 + 7
    rows, _ = rows_of(12, 0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape[0]) or t, lambda t: t):
        attend_spans(spans, *rows, 0.3, None, plain_kernel)
    assert 30 not in kept


def test_gradients_of_a_row_taken_often_do_not_stall_in_bfloat16():
    rows = torch.zeros(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    _Gather.apply(rows, torch.zeros(600, dtype=torch.int64)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.unique().tolist() == [600]


@pytest.mark.parametrize("window", [None, 4])
def test_the_installed_kernel_takes_these_arguments(window):
    """On the meta device: shapes and the way back, without numbers."""
    spans = spans_of(bundle_layout([(6, [2, 3]), (4, [4])]).segments, torch.device("meta"))
    query = torch.empty(4, 19, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(2, 19, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = attend_spans(spans, query, key, key, 0.3, window, flash)
    out.sum().backward()
    assert out.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape
