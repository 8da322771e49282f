"""Decoding attention over the cache: compiled and by torch's products, against the plain formula."""

import os
import stat

import pytest
import torch

from posttrain.engines.local.cache import (
    CompiledAttention,
    KeyValuePages,
    Prefix,
    Segment,
    TorchDecodingAttention,
    plan_decoding,
    shared_pages,
)
from posttrain.engines.local.cpu.kernel import PAGE, decoding_kernel
from posttrain.models.cpu import compiler

SLOTS, HEADS, GROUPS, SIZE = 12, 2, 3, 64


def compiled(segments, window, dtype, size=SIZE):
    built = decoding_kernel(dtype, size, GROUPS)
    if built is None:
        pytest.skip("there is no C++ compiler")
    return CompiledAttention(built, segments, window)


IMPLEMENTATIONS = {
    "compiled": compiled,
    "torch": lambda singles, window, dtype: TorchDecodingAttention(singles, window, torch.device("cpu")),
}


def filled(dtype, segments, size=SIZE):
    """A cache whose slots hold random keys and values; slots of one prefix hold the same ones there."""
    generator = torch.Generator().manual_seed(0)
    cache = KeyValuePages(SLOTS)
    cache.reserve(3 * PAGE)
    shape = (3, SLOTS, HEADS, PAGE, size)
    cache.keys[0], cache.values[0] = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    for segment in segments:
        if segment.prefix is not None:
            first = next(s.slot for s in segments if s.prefix is segment.prefix)
            cache.copy_prefix(first, segment.slot, segment.prefix.tokens)
    tokens = sum(segment.count for segment in segments)
    queries = torch.randn(tokens, HEADS, GROUPS, size, generator=generator).to(dtype)
    return cache, queries


def plain(cache, queries, segments, window):
    rows = []
    for query, segment in zip(queries, segments, strict=True):
        key, value = (cache.tokens(store[0], segment.slot, segment.start + 1) for store in (cache.keys, cache.values))
        first = 0 if window is None else max(0, segment.start + 1 - window)
        scores = query.double() @ key[:, first:].double().transpose(1, 2) * 0.1
        rows.append(scores.softmax(-1) @ value[:, first:].double())
    return torch.stack(rows)


def ragged():
    together = Prefix(PAGE + 5)
    starts = {0: 3, 1: PAGE - 1, 2: PAGE, 3: 2 * PAGE + 17, 4: 0, 9: 40}
    alone = [Segment(slot, start, 1) for slot, start in starts.items()]
    group = [Segment(slot, PAGE + 5 + 30 * place, 1, together) for place, slot in enumerate((5, 6, 7, 8, 10, 11))]
    return sorted([*alone, *group], key=lambda s: s.slot)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 1, 50, PAGE, 10_000])
def test_attention_is_the_plain_formula(implementation, dtype, bound, window):
    segments = ragged()
    cache, queries = filled(dtype, segments)
    # A window that hides nothing is no window.
    window = None if window == 10_000 else window
    out = IMPLEMENTATIONS[implementation](segments, window, dtype)(cache.keys[0], cache.values[0], queries, 0.1)
    assert out.dtype == dtype
    assert (out.double() - plain(cache, queries, segments, window)).abs().max() < bound


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("by_head", [False, True])
def test_prompts_are_attended_with_decoding_sequences(size, dtype, bound, window, by_head):
    together = Prefix(PAGE + 5)
    group = [
        Segment(slot, PAGE + 5 + slot, count, together) for slot, count in ((4, 1), (5, 9), (6, 2), (7, 3), (8, 1))
    ]
    segments = [Segment(0, 3, 1), *group, Segment(1, 0, PAGE + 3), Segment(2, PAGE - 2, 5), Segment(3, 0, 2)]
    assert shared_pages(segments)
    cache, queries = filled(dtype, segments, size)
    tokens = [Segment(s.slot, position, 1) for s in segments for position in range(s.start, s.start + s.count)]
    expected = plain(cache, queries, tokens, window)
    if by_head:
        queries = queries.flatten(1, 2).transpose(0, 1).contiguous().transpose(0, 1).unflatten(1, (HEADS, GROUPS))
        assert not queries[0].is_contiguous()
    out = compiled(segments, window, dtype, size)(cache.keys[0], cache.values[0], queries, 0.1)
    assert (out.double() - expected).abs().max() < bound


def test_shared_prompts_are_read_from_one_slot():
    segments = ragged()
    (group,) = shared_pages(segments)
    assert (group.slots, group.pages) == ([5, 6, 7, 8, 10, 11], 1)
    cache, queries = filled(torch.float32, segments)
    expected = plain(cache, queries, segments, None)
    for slot in group.slots[1:]:
        cache.keys[0][0, slot] = cache.values[0][0, slot] = 1e3
    for make in IMPLEMENTATIONS.values():
        out = make(segments, None, torch.float32)(cache.keys[0], cache.values[0], queries, 0.1)
        assert (out.double() - expected).abs().max() < 2e-6


def test_every_token_is_in_one_block_of_a_plan():
    segments = ragged()
    plan = plan_decoding(segments, None, share=False)
    for segment in segments:
        pages = [b.page for b in plan.blocks if b.first <= segment.slot < b.stop]
        assert set(range(segment.start // PAGE + 1)) <= set(pages)
        assert len(pages) == len(set(pages))


def test_one_thread_or_two_the_bits_are_the_same():
    segments = ragged()
    cache, queries = filled(torch.bfloat16, segments)
    read = compiled(segments, None, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        outputs = []
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(read(cache.keys[0], cache.values[0], queries, 0.1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)


def test_a_failing_compiler_gives_a_warning_and_a_missing_one_does_not(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    decoding_kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no such option.*POSTTRAIN_KERNEL=0"):
            assert decoding_kernel(torch.float32, SIZE, GROUPS) is None
        monkeypatch.setenv("CXX", "nosuchcompiler")
        decoding_kernel.cache_clear()
        with pytest.warns(UserWarning, match="CXX=nosuchcompiler is not a command.*unset CXX, or install it"):
            assert decoding_kernel(torch.float32, SIZE, GROUPS) is None
        monkeypatch.delenv("CXX")
        monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
        decoding_kernel.cache_clear()
        assert decoding_kernel(torch.float32, SIZE, GROUPS) is None
    finally:
        decoding_kernel.cache_clear()
    assert not list(os.scandir(tmp_path / "cache")) or not list((tmp_path / "cache" / "kernels").glob("*.so"))
