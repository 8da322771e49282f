"""The cache of a GPU on a processor: passes over it with a plain kernel against the paged cache."""

import pytest
import torch

from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment
from posttrain.engines.local.cuda import FlashLayout, KeyValueRows
from posttrain.errors import RunError

CPU = torch.device("cpu")
SLOTS, HEADS, KEY_HEADS, SIZE = 4, 4, 2, 8


def plain_kernel(spans, query, key, value, scaling, window):
    """The documented computation of the flash kernel for spans of keys with room at their ends."""
    outputs = []
    for span, seen in enumerate(spans.keys_seen.tolist()):
        assert seen <= spans.longest_key
        assert spans.key_ends[span] + seen <= spans.key_ends[span + 1], "spans follow each other"
        q = query[spans.query_ends[span] : spans.query_ends[span + 1]]
        k, v = (part[spans.key_ends[span] :][:seen].repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
        ahead = torch.arange(seen)[None] - (torch.arange(len(q))[:, None] + seen - len(q))
        visible = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


PASSES = [
    [Segment(2, 0, 40), Segment(0, 0, 5)],
    [Segment(0, 5, 1), Segment(2, 40, 1), Segment(1, 0, 200)],  # grows the cache
    [Segment(3, 30, 4), Segment(2, 41, 1), Segment(1, 200, 1), Segment(0, 6, 3)],  # slot 3 continues a copied prefix
]


@pytest.mark.parametrize("window", [None, 7])
def test_every_token_sees_what_it_sees_in_the_paged_cache(window):
    generator = torch.Generator().manual_seed(0)
    pages, rows = KeyValuePages(SLOTS), KeyValueRows(SLOTS)
    for number, segments in enumerate(PASSES):
        if number == 2:
            for cache in (pages, rows):
                cache.copy_prefix(2, 3, 30)
        new = {
            segment: [
                torch.randn(segment.count, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            ]
            for segment in segments
        }
        found = []
        for layout in (CachedLayout(pages, segments, CPU), FlashLayout(rows, segments, CPU, plain_kernel)):
            inputs = [torch.cat([new[segment][part] for segment in layout.segments]) for part in range(3)]
            out = layout.attend_tokens(0, *inputs, 0.3, window)
            counts = [segment.count for segment in layout.segments]
            found.append(dict(zip(layout.segments, out.split(counts), strict=True)))
        for segment in segments:
            torch.testing.assert_close(found[1][segment], found[0][segment])


def test_a_cache_that_does_not_fit_names_what_to_lower(monkeypatch):
    def full(*sizes, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows, like = KeyValueRows(SLOTS), torch.zeros(1, KEY_HEADS, SIZE)
    rows.reserve(100)
    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    with pytest.raises(RunError, match=r"4 slots with 128 tokens does not fit .*; lower engine.slots"):
        rows.layer(0, like)
