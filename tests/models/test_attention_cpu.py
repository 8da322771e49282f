"""Attention with its own backward pass equals the library's, and its gradient the numerical one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.cpu import attention as attention_cpu
from posttrain.models.layers import Heads, causal_attention
from posttrain.models.packing import pack_row
from tests.models.bundles import bundle_layout

WIDTH = 8


def heads(seed, tokens, counts=(6, 2, 2), dtype=torch.float64, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    # As models have them: token by token in memory.
    return [
        torch.randn(tokens, count, width, generator=generator, dtype=dtype).transpose(0, 1).requires_grad_()
        for count in counts
    ]


def segment_by_segment(layout, query, key, value, window):
    """Each segment against what it sees, through the library's attention."""
    outputs = []
    for segment in layout.segments:
        seen = torch.cat([torch.arange(*places) for places in segment.keys])
        queries = query[:, segment.start : segment.stop]
        outputs.append(causal_attention(Heads(queries, key[:, seen], value[:, seen], 0.3, window)))
    return torch.cat(outputs, 1)


def assert_equal(found, expected, inputs, tolerance=1e-10):
    """Outputs, and gradients by the inputs."""
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    above = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    mine, theirs = (torch.autograd.grad(out, inputs, above) for out in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=10 * tolerance, rtol=0)


def compare(bundles, window, counts, seed=0, dtype=torch.float64, tolerance=1e-10, width=WIDTH):
    layout = bundle_layout(bundles)
    inputs = heads(seed, layout.segments[-1].stop, counts, dtype, width)
    found, expected = layout.attend(0, Heads(*inputs, 0.3, window)), segment_by_segment(layout, *inputs, window)
    assert_equal(found, expected, inputs, tolerance)


BUNDLES = st.lists(st.tuples(st.integers(1, 70), st.lists(st.integers(1, 70), max_size=3)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(BUNDLES, st.sampled_from([None, 1, 3, 40, 64, 1000]), st.sampled_from([(6, 2, 2), (3, 3, 3), (4, 1, 1)]))
def test_equals_the_library_with_shared_prompts_windows_and_grouped_heads(bundles, window, counts):
    compare(bundles, window, counts)


@pytest.fixture(scope="module")
def compiled_attention():
    if (kernel := attention_cpu._library(torch.float32)) is None:
        pytest.skip("there is no C++ compiler, or no AVX2")
    return kernel


@settings(max_examples=60, deadline=None)
@given(
    BUNDLES,
    st.sampled_from([None, 1, 3, 40, 64, 1000]),
    st.sampled_from([(6, 2, 2), (3, 3, 3)]),
    st.sampled_from([32, 96]),
)
def test_compiled_attention_equals_the_library(compiled_attention, bundles, window, counts, width):
    compare(bundles, window, counts, dtype=torch.float32, tolerance=5e-6, width=width)


@pytest.mark.parametrize("tokens", [200, attention_cpu.MOST_KEYS, attention_cpu.MOST_KEYS + 1])
def test_compiled_attention_in_bfloat16_rounds_once(compiled_attention, tokens):
    exact = heads(3, tokens, dtype=torch.bfloat16, width=64)
    wide = [x.detach().double().requires_grad_() for x in exact]
    above = torch.randn(6, tokens, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    layout = bundle_layout([(tokens, [])])
    outputs = [layout.attend(0, Heads(*x, 0.125, None)) for x in (exact, wide)]
    bound = 2**-9 if tokens <= attention_cpu.MOST_KEYS else 2**-7
    assert (outputs[0] - outputs[1]).norm() < bound * outputs[1].norm()
    mine, theirs = (
        torch.autograd.grad(*pair) for pair in zip(outputs, (exact, wide), (above, above.double()), strict=True)
    )
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() < bound * other.norm()


def test_compiled_sums_are_the_same_for_any_number_of_threads_and_other_segments(compiled_attention):
    """Segments that share keys add to their gradients in one order; a segment's result is the same beside others."""
    bundles = [(70, [33, 20, 41]), (129, [])]
    inputs = heads(6, 293, dtype=torch.float32, width=64)
    above = torch.randn(6, 293, 64, generator=torch.Generator().manual_seed(5))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = bundle_layout(bundles).attend(0, Heads(*inputs, 0.125, None))
            found.append([out, *torch.autograd.grad(out, inputs, above)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
    last = [x.detach()[:, 164:] for x in inputs]
    alone = bundle_layout([(129, [])]).attend(0, Heads(*last, 0.125, None))
    assert torch.equal(alone, found[0][0][:, 164:])


STREAMS = st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=60), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(STREAMS)
def test_trees_of_streams_equal_the_library(streams):
    """One layout, with several windows, as the layers of a model may have, and several numbers of query heads."""
    ids = [np.array(stream) for stream in streams]
    layout = pack_row(ids, [np.arange(len(stream)) == len(stream) - 1 for stream in ids]).layout
    for window, counts in [(None, (6, 2, 2)), (5, (6, 2, 2)), (5, (4, 1, 1)), (40, (6, 2, 2))]:
        inputs = heads(0, layout.segments[-1].stop, counts)
        assert_equal(layout.attend(0, Heads(*inputs, 0.3, window)), segment_by_segment(layout, *inputs, window), inputs)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, WIDTH), (torch.float32, 32)], ids=["torch", "compiled"])
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("bundles", [[(10, [6, 6])], [(6, []), (6, [])], [(100, []), (300, [])]])
def test_a_token_that_is_not_finite_reaches_no_stream_that_does_not_see_it(bundles, part, dtype, width):
    layout = bundle_layout(bundles)
    broken = layout.segments[1]
    inputs = [x.detach() for x in heads(0, layout.segments[-1].stop, dtype=dtype, width=width)]
    inputs[part][:, broken.start] = float("inf" if part == 2 else "nan")
    found, expected = layout.attend(0, Heads(*inputs, 0.3, None)), segment_by_segment(layout, *inputs, None)
    if part == 2:
        assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[:, broken.start].isfinite().any()
    assert found[:, : broken.start].isfinite().all()
    assert found[:, broken.stop :].isfinite().all()


@pytest.mark.parametrize("window", [None, 50, 130, 200])
@pytest.mark.parametrize("bundles", [[(300, [])], [(140, [150, 20]), (129, [])]])
def test_equals_the_library_over_several_blocks(bundles, window):
    assert max(max(prompt, *rest, 0) for prompt, rest in bundles) > attention_cpu.BLOCK
    compare(bundles, window, (6, 2, 2))
    compare(bundles, window, (6, 2, 2), dtype=torch.float32, tolerance=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_the_gradient_is_the_numerical_one(monkeypatch, window):
    monkeypatch.setattr(attention_cpu, "BLOCK", 2)
    layout = bundle_layout([(3, [2, 1]), (3, [])])
    assert torch.autograd.gradcheck(lambda *x: layout.attend(0, Heads(*x, 0.3, window)), heads(2, 9, (4, 2, 2)))


def test_bfloat16_is_as_accurate_as_eager_attention():
    """Scores and probabilities rounded once each, sums in float32."""
    bundles = [(200, [])]
    exact = heads(3, 200)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    above = torch.randn(6, 200, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    truth = torch.autograd.grad(bundle_layout(bundles).attend(0, Heads(*exact, 0.3, None)), exact, above)
    found = torch.autograd.grad(bundle_layout(bundles).attend(0, Heads(*rounded, 0.3, None)), rounded, above.bfloat16())
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 0.01 * other.norm()


def test_only_the_inputs_are_kept_for_the_backward_pass():
    sizes = []
    inputs = heads(5, 400)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        bundle_layout([(400, [])]).attend(0, Heads(*inputs, 0.3, None))
    assert sizes
    assert sum(sizes) <= sum(x.numel() for x in inputs)
