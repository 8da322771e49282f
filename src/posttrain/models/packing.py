"""Packed forward passes: several streams in one row of tokens, and the layouts that say what each token attends to.

- `PackedLayout`: prompts with continuations; a prompt that several streams share is computed once.
- `ProbedLayout`: streams followed by probe tokens, each of which ends a prefix of its stream.
- `LastTokenLayout`: streams of which one layer's attention of the last token is recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.models.attention import causal_attention
from posttrain.models.cpu.attention import AttentionSegment, MaskCache, attend_segments, segments_of
from posttrain.models.cuda.attention import Spans, attend_spans, spans_of, supports


class PackedLayout:
    """Bundles side by side in one row. A bundle is a prompt and continuations that see the prompt and themselves.

    The continuations of a bundle do not see each other, so the streams of a group share one forward pass of their
    prompt and get the outputs and gradients that each would get alone. A single stream is a bundle with one continuation.
    """

    def __init__(self, bundles: Sequence[tuple[int, Sequence[int]]]) -> None:
        """`bundles`: the length of the prompt and of each continuation, in row order. No length is 0."""
        self.bundles = [(prompt, list(continuations)) for prompt, continuations in bundles]
        self._lengths = [length for prompt, continuations in self.bundles for length in (prompt, *continuations)]
        self._segments = segments_of(self.bundles)
        self._masks = MaskCache()
        self._spans: Spans | None = None

    def positions(self) -> torch.Tensor:
        """Position ids [T] int64: from 0 for each prompt, and from the prompt's length for each continuation."""
        return torch.cat(
            [
                torch.arange(start, start + length)
                for prompt, continuations in self.bundles
                for start, length in [(0, prompt), *((prompt, length) for length in continuations)]
            ]
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        if supports(query):
            self._spans = self._spans or spans_of(self.bundles, query.device)
            return attend_spans(self._spans, query, key, value, scaling, window)
        if query.device.type == "cpu":
            return attend_segments(query, key, value, self._segments, scaling, window, self._masks)
        pieces = zip(*(row.split(self._lengths, dim=1) for row in (query, key, value)), strict=True)
        outputs = []
        for _, continuations in self.bundles:
            query_part, prompt_key, prompt_value = next(pieces)
            outputs.append(causal_attention(query_part, prompt_key, prompt_value, scaling, window))
            for _ in continuations:
                query_part, key_part, value_part = next(pieces)
                keys, values = torch.cat([prompt_key, key_part], 1), torch.cat([prompt_value, value_part], 1)
                outputs.append(causal_attention(query_part, keys, values, scaling, window))
        return torch.cat(outputs, dim=1)


class ProbedLayout:
    """Streams side by side in one row, each followed by its probes.

    A probe is one token that sees a prefix of its stream and itself, at the position that follows the prefix. It gets the
    output of the stream cut there and ended with that token, while the stream is computed once.
    """

    def __init__(self, streams: Sequence[tuple[int, Sequence[int]]]) -> None:
        """`streams`: for each stream its length, and for each of its probes the length of the prefix (at least 1)."""
        self._segments: list[AttentionSegment] = []
        positions: list[torch.Tensor] = []
        start = 0
        for length, prefixes in streams:
            self._segments.append(AttentionSegment(start, start + length, start, start))
            first = start + length
            self._segments += [
                AttentionSegment(first + i, first + i + 1, start, start + prefix) for i, prefix in enumerate(prefixes)
            ]
            positions += [torch.arange(length), torch.tensor(list(prefixes), dtype=torch.int64)]
            start = first + len(prefixes)
        self._positions = torch.cat(positions)
        self._masks = MaskCache()

    def positions(self) -> torch.Tensor:
        """Position ids [T] int64."""
        return self._positions

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        if query.device.type == "cpu":
            return attend_segments(query, key, value, self._segments, scaling, window, self._masks)
        outputs = []
        for segment in self._segments:
            tokens = slice(segment.start, segment.stop)
            prompt = slice(segment.prompt_start, segment.prompt_stop)
            keys, values = (torch.cat([part[:, prompt], part[:, tokens]], 1) for part in (key, value))
            outputs.append(causal_attention(query[:, tokens], keys, values, scaling, window))
        return torch.cat(outputs, dim=1)


class LastTokenLayout(PackedLayout):
    """Streams side by side; records the attention probabilities of each stream's last token in one layer."""

    def __init__(self, lengths: Sequence[int], layer: int) -> None:
        """`lengths`: tokens of each stream; `layer`: index of the recorded layer."""
        super().__init__([(1, [length - 1]) for length in lengths])
        self._ends = torch.tensor(lengths).cumsum(0).tolist()
        self._layer = layer
        self.attention: list[torch.Tensor] = []
        """Per stream [T] float32: attention probabilities of the last token, averaged over heads. Each sums to 1."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        if layer == self._layer:
            keys = key.repeat_interleave(len(query) // len(key), dim=0).float()
            start = 0
            for end in self._ends:
                scores = torch.einsum("hd,htd->ht", query[:, end - 1].float(), keys[:, start:end]) * scaling
                if window is not None:
                    scores[:, : max(0, end - start - window)] = float("-inf")
                self.attention.append(scores.softmax(-1).mean(0))
                start = end
        return super().attend(layer, query, key, value, scaling, window)


@dataclass(frozen=True)
class PackedRow:
    """S streams in one row of T tokens, and the positions that predict their n sampled tokens."""

    ids: np.ndarray
    """[T] int64: token ids."""
    layout: PackedLayout
    predictors: np.ndarray
    """[n] int64: row index whose output predicts each sampled token, stream by stream in the given order."""
    targets: np.ndarray
    """[n] int64: the sampled tokens."""
    last: np.ndarray
    """[S] int64: row index of the last token of each stream."""


def prompt_length(sampled: np.ndarray) -> int:
    """Number of tokens before the first sampled one of a stream with mask `sampled` [T] bool."""
    return int(np.argmax(sampled))


def pack_row(streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> PackedRow:
    """Pack `streams` (token ids [T_i] int64) with masks `sampled` [T_i] bool into one row; equal prompts are stored once.

    Each stream has at least one sampled token, and its first token is not sampled.
    """
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
            positions = np.flatnonzero(sampled[index]) - prompt
            predictors[index] = np.where(positions == 0, prompt_end, offset + positions - 1)
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
