"""One pass for the values of all beginnings of an answer, and the attention that a reward is read from.

Behind each stream stand probes: a token each that sees a beginning of the stream and itself, at the position that
follows the beginning. So a probe computes what the stream cut there and ended with that token would, and the stream is
computed once.
"""

from collections.abc import Sequence

import torch

from posttrain.models.attention import PackedLayout, causal_attention
from posttrain.models.cpu.attention import Masks, Segment, attend_segments


class ProbedLayout:
    """Streams side by side in one row, each followed by its probes."""

    def __init__(self, streams: Sequence[tuple[int, Sequence[int]]]) -> None:
        """`streams`: the tokens of each, and how many of them each of its probes sees, at least 1."""
        self._segments: list[Segment] = []
        positions: list[torch.Tensor] = []
        start = 0
        for length, seen in streams:
            self._segments.append(Segment(start, start + length, start, start))
            first = start + length
            self._segments += [
                Segment(first + i, first + i + 1, start, start + tokens) for i, tokens in enumerate(seen)
            ]
            positions += [torch.arange(length), torch.tensor(list(seen), dtype=torch.int64)]
            start = first + len(seen)
        self._positions = torch.cat(positions)
        self._masks = Masks()

    def positions(self) -> torch.Tensor:
        """[T] int64: position ids."""
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
        for one in self._segments:
            own, before = slice(one.start, one.stop), slice(one.prompt_start, one.prompt_stop)
            keys, values = (torch.cat([part[:, before], part[:, own]], 1) for part in (key, value))
            outputs.append(causal_attention(query[:, own], keys, values, scaling, window))
        return torch.cat(outputs, dim=1)


class WatchedLayout(PackedLayout):
    """Streams side by side, of which the attention of the last token is kept, as one layer pays it."""

    def __init__(self, lengths: Sequence[int], layer: int) -> None:
        """`lengths`: tokens of each stream; `layer`: the index of the layer that is watched."""
        super().__init__([(1, [length - 1]) for length in lengths])
        self._ends = torch.tensor(lengths).cumsum(0).tolist()
        self._layer = layer
        self.paid: list[torch.Tensor] = []
        """Per stream [T] float32: mean over heads of the attention of its last token; each sums to 1."""

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
                self.paid.append(scores.softmax(-1).mean(0))
                start = end
        return super().attend(layer, query, key, value, scaling, window)
