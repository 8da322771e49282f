"""Layouts of bundles: a prompt, and continuations that see the prompt and themselves."""

from posttrain.models.layers import RowSegment
from posttrain.models.packing import PackedLayout


def bundle_layout(bundles):
    """`bundles`: the length of each prompt and of its continuations, in row order."""
    segments, start = [], 0
    for prompt, continuations in bundles:
        segments.append(RowSegment(start, start + prompt))
        place = start + prompt
        for length in continuations:
            segments.append(RowSegment(place, place + length, ((start, start + prompt),)))
            place += length
        start = place
    return PackedLayout(segments)
