"""Streams as one row of tokens in which a prompt that several streams share stands once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.models.attention import PackedLayout


@dataclass(frozen=True)
class PackedRow:
    """Several streams in one row of T tokens, and where their n sampled tokens are predicted."""

    ids: np.ndarray
    """[T] int64."""
    layout: PackedLayout
    predictors: np.ndarray
    """[n] int64: row index of the token whose output predicts each sampled token, stream by stream as given."""
    targets: np.ndarray
    """[n] int64: the sampled tokens."""
    last: np.ndarray
    """[S] int64: row index of the last token of each stream."""


def prompt_length(sampled: np.ndarray) -> int:
    """Tokens before the first sampled one of a stream with mask `sampled` [T] bool."""
    return int(np.argmax(sampled))


def pack_row(streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> PackedRow:
    """One row for `streams` (token ids [T_i] int64, masks [T_i] bool), each with a sampled token after its first."""
    members: dict[bytes, list[int]] = {}
    for index, (ids, mask) in enumerate(zip(streams, sampled, strict=True)):
        members.setdefault(ids[: prompt_length(mask)].tobytes(), []).append(index)
    pieces: list[np.ndarray] = []
    bundles = []
    predictors: dict[int, np.ndarray] = {}
    last: dict[int, int] = {}
    offset = 0
    for indices in members.values():
        prompt = prompt_length(sampled[indices[0]])
        pieces.append(streams[indices[0]][:prompt])
        prompt_end = offset + prompt - 1
        offset += prompt
        for index in indices:
            pieces.append(streams[index][prompt:])
            places = np.flatnonzero(sampled[index]) - prompt
            predictors[index] = np.where(places == 0, prompt_end, offset + places - 1)
            offset += len(pieces[-1])
            last[index] = offset - 1
        bundles.append((prompt, [len(streams[index]) - prompt for index in indices]))
    return PackedRow(
        ids=np.concatenate(pieces),
        layout=PackedLayout(bundles),
        predictors=np.concatenate([predictors[index] for index in range(len(streams))]),
        targets=np.concatenate([ids[mask] for ids, mask in zip(streams, sampled, strict=True)]),
        last=np.array([last[index] for index in range(len(streams))], dtype=np.int64),
    )
