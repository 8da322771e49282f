"""Rotary positions whose frequencies depend on the length of a sequence: `longrope` and `dynamic` of transformers.

transformers chooses one set of frequencies for a whole forward pass, by the largest position in it, and the dynamic ones
remember the longest sequence of earlier passes. Here each token gets the frequencies of its own sequence. The sequence
that counts is the one that the model has read when it predicts a token: token t of a stream is predicted with the
frequencies of length t, as an engine samples it. So a stream that crosses the switch is packed once for each set of
frequencies (`models.packing`), and an engine recomputes its cache when a sequence crosses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.errors import InputError

_BY_LENGTH = ("longrope", "dynamic")


@dataclass(frozen=True)
class Lengths:
    """Which lengths of a sequence share their frequencies. 0 stands for all lengths up to `original` tokens."""

    original: int
    each: bool
    """Whether every length beyond `original` has its own frequencies (`dynamic`), or all have the same (`longrope`)."""

    def of(self, length: int) -> int:
        """The smallest length with the frequencies of a sequence of `length` tokens, or 0."""
        if length <= self.original:
            return 0
        return length if self.each else self.original + 1

    def spans(self, tokens: int) -> list[tuple[int, int, int]]:
        """(length, first, stop) for a stream of `tokens` tokens: the outputs of tokens first .. stop - 1 have the
        frequencies of `length`, in a pass over the tokens before `stop`.
        """
        short = min(tokens, self.original)
        if self.each:
            beyond = [(count, count - 1, count) for count in range(short + 1, tokens + 1)]
        else:
            beyond = [(self.original + 1, short, tokens)] if tokens > short else []
        return [(0, 0, short), *beyond]


class _ByLength(torch.nn.Module):
    """A rotary embedding of transformers that treats the tokens of each length separately."""

    lengths: Sequence[int] | None = None
    """For each token of the next pass its `Lengths.of`; None if all are 0."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *extra: Any, **named: Any) -> Any:
        module: Any = self
        if self.lengths is None:
            self._forget()
            return super().forward(x, position_ids, *extra, **named)  # type: ignore[misc]
        lengths = torch.tensor(self.lengths)
        parts: list[Any] = [None, None]
        for length in lengths.unique().tolist():
            self._forget()
            chosen = (lengths == length).nonzero()[:, 0].to(position_ids.device)
            # The position after the tokens decides the frequencies.
            last = position_ids.new_full((1, 1), max(length, 1) - 1)
            positions = torch.cat([position_ids[:, chosen], last], dim=1)
            for index, part in enumerate(super().forward(x, positions, *extra, **named)):  # type: ignore[misc]
                if parts[index] is None:
                    parts[index] = part.new_empty(part.shape[0], len(self.lengths), part.shape[2])
                parts[index][:, chosen] = part[:, :-1]
        module._forget()
        return tuple(parts)

    def _forget(self) -> None:
        """Restore the frequencies of short sequences, which `dynamic` ones overwrite."""
        module: Any = self
        if "dynamic" in module.rope_type and module.max_seq_len_cached != module.original_max_seq_len:
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len


def use_positions_by_length(decoder: Any) -> None:
    """Replace the rotary embedding of `decoder`, a base model of transformers, in place if it depends on the length.

    InputError if only some layers have such positions, or if the embedding is not the usual one.
    """
    for name, module in decoder.named_modules():
        kind = getattr(module, "rope_type", None)
        kinds = list(kind.values()) if isinstance(kind, dict) else [kind]
        if not any(kind in _BY_LENGTH for kind in kinds):
            continue
        if name != "rotary_emb" or isinstance(kind, dict):
            raise InputError(
                f"model.path: positions of this {decoder.config.model_type} model depend on the length ({name} has "
                f"rope_type {kind}) in a way that is not supported; set another rope_type in its config.json"
            )
        module.__class__ = type(type(module).__name__, (_ByLength, type(module)), {"__module__": __name__})


def lengths_of(decoder: Any) -> Lengths | None:
    """Which lengths share frequencies in `decoder`; None if all do."""
    module: Any = getattr(decoder, "rotary_emb", None)
    if not isinstance(module, _ByLength):
        return None
    if module.rope_type == "longrope":
        return Lengths(int(module.config.rope_parameters["original_max_position_embeddings"]), each=False)
    return Lengths(int(module.original_max_seq_len), each=True)


def set_lengths(decoder: Any, lengths: Sequence[int] | None) -> None:
    """Set the lengths that decide the frequencies of each token of the next pass of `decoder`."""
    module = getattr(decoder, "rotary_emb", None)
    if isinstance(module, _ByLength):
        module.lengths = lengths
