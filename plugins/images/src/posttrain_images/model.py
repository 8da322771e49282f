"""The forward pass of rows whose ids may be those of images: features, positions and attention as in transformers.

Features of each image of a row are computed once, whichever tokens of it the row has. The decoder then gets the embeddings of a
row as it gets those of text. A row alone, without a layout, goes through the pass of transformers itself, which the gate compares with.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import scaled_dot_product_attention

from posttrain.distributed.world import current_world
from posttrain.errors import InputError
from posttrain.images import FIRST, key_of, mark, number_of
from posttrain.models.forward import base_decoder
from posttrain.models.layers import Heads
from posttrain.seeds import random_stream
from posttrain_images.store import put
from posttrain_images.tokens import Images

GATE_IMAGES = ((40, 64), (90, 48))
"""Heights and widths of the images of the gate's rows."""
GATE_TEXT = 30
"""Tokens of text after an image of the gate's rows."""


class _ReadsImages(torch.nn.Module):
    """A base model of transformers with an image encoder and a decoder."""

    family: Any
    images: Images
    code: str
    """A digest of this plug-in, which verdicts of the gate depend on."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        layout: Any = None,
        **named: Any,
    ) -> Any:
        """The output of transformers. `input_ids` [1, T] int64 are ids of text and of images; `layout` is that of the row."""
        if input_ids is None:
            return super().forward(position_ids=position_ids, layout=layout, **named)
        marked = input_ids[0] >= FIRST
        tokens = input_ids[0][marked].tolist()
        if layout is None:
            return self._alone(input_ids, marked, tokens, position_ids, **named)
        base: Any = self
        embeddings = base.get_input_embeddings()(input_ids[0].masked_fill(marked, 0))
        extra: dict[str, Any] = {}
        if tokens:
            features, deep = self._features(tokens)
            embeddings = embeddings.masked_scatter(marked[:, None], features.to(embeddings.dtype))
            if self.family.deepstack:
                extra = {"visual_pos_masks": marked[None], "deepstack_visual_embeds": deep}
            if self.family.both_ways:
                layout = _BothWays(layout, tokens, marked)
        elif torch.is_grad_enabled() and current_world().sharded:
            # Processes add up the gradients of the same weights, so each needs those of the encoder.
            ids = self._gate_image(*GATE_IMAGES[0])
            features, deep = self._features(ids[ids >= FIRST].tolist())
            for part in (features, *deep):
                embeddings = embeddings + 0 * part.sum().to(embeddings.dtype)
        if self.family.grid:
            position_ids = self._grid_positions(input_ids[0], layout, position_ids)
        return getattr(base, self.family.decoder)(
            inputs_embeds=embeddings[None], position_ids=position_ids, layout=layout, **extra, **named
        )

    def _alone(
        self, ids: torch.Tensor, marked: torch.Tensor, tokens: list[int], positions: torch.Tensor | None, **named: Any
    ) -> Any:
        """transformers' own pass over one sequence, whose images are complete."""
        inputs: dict[str, Any] = {}
        if tokens:
            keys = [key_of(token) for token in tokens if number_of(token) == 0]
            inputs = self.images.inputs(keys, ids.device)
            if self.family.token_types is not None:
                inputs[self.family.token_types] = marked[None].long()
        ids = ids.masked_fill(marked, self.images.token)
        return super().forward(input_ids=ids, position_ids=positions, **{**named, **inputs})

    def _features(self, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The features [n, hidden] of tokens of images, and those that deeper layers add."""
        base: Any = self
        keys = list(dict.fromkeys(map(key_of, tokens)))
        counts = [self.images.processed(key).tokens for key in keys]
        starts = dict(zip(keys, np.cumsum([0, *counts])[:-1].tolist(), strict=True))
        device = base.device
        output = base.get_image_features(**self.images.inputs(keys, device), return_dict=True)
        chosen = torch.tensor([starts[key_of(token)] + number_of(token) for token in tokens], device=device)
        deep = [_joined(parts)[chosen] for parts in output.deepstack_features] if self.family.deepstack else []
        features = _joined(output.pooler_output)
        if len(features) != sum(counts):
            raise InputError(
                f"model.path: {self.family.name}: the encoder makes {len(features)} features of images with {sum(counts)} tokens; "
                "restore preprocessor_config.json and processor_config.json of the model"
            )
        return features[chosen], deep

    # -- positions ----------------------------------------------------------------------------------------------------

    def _grid_positions(self, ids: torch.Tensor, layout: Any, positions: torch.Tensor | None) -> torch.Tensor | None:
        """Positions [3, 1, T] of a row, of which those of images are a grid; unchanged ones for a row without images."""
        sequences = list(getattr(layout, "tokens", ()))
        counts = [segment.count for segment in layout.segments] if sequences else []
        if not sequences:
            row = ids.cpu().numpy()
            if not (row >= FIRST).any():
                return positions
            sequences = [np.concatenate([row[slice(*span)] for span in segment.keys]) for segment in layout.segments]
            counts = [segment.stop - segment.start for segment in layout.segments]
        elif not any((sequence >= FIRST).any() for sequence in sequences):
            return positions
        parts = [self.positions(one)[:, -count:] for one, count in zip(sequences, counts, strict=True)]
        return torch.from_numpy(np.concatenate(parts, 1)).to(ids.device)[:, None]

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Positions [3, T] int64 of a sequence [T]: time, row and column. A token of text has the same number in all three,
        one more than the largest before it; an image begins there.

        Source: Wang et al. 2024, "Qwen2-VL", arXiv 2409.12191, section 2.1.
        """
        base: Any = self
        merge = base.config.vision_config.spatial_merge_size
        positions = np.tile(np.arange(len(ids)), (3, 1))
        for start in np.flatnonzero(ids >= FIRST).tolist():
            if number_of(int(ids[start])):
                continue
            time, height, width = self.images.processed(key_of(int(ids[start]))).inputs["image_grid_thw"][0].tolist()
            grid = np.indices((time, height // merge, width // merge)).reshape(3, -1)
            begun, stop = positions[0, start], start + grid.shape[1]
            positions[:, start:stop] = begun + grid[:, : len(ids) - start]
            positions[:, stop:] = begun + max(height, width) // merge + np.arange(max(len(ids) - stop, 0))
        return positions

    # -- the gate -----------------------------------------------------------------------------------------------------

    def gate_rows(self) -> list[np.ndarray]:
        """Seeded rows of ids [T] int64 with one and with three images, of which two are equal."""
        base: Any = self
        vocabulary = min(base.get_input_embeddings().weight.shape[0], self.images.token)
        texts = [random_stream("gate", "text", n).integers(0, vocabulary, GATE_TEXT) for n in range(5)]
        first, second = (self._gate_image(*size) for size in GATE_IMAGES)
        return [
            np.concatenate([texts[0], first, texts[1]]),
            np.concatenate([texts[0], first, texts[2], second, texts[3], first, texts[4]]),
        ]

    def _gate_image(self, height: int, width: int) -> np.ndarray:
        """The ids [T] int64 of a seeded image, which no run keeps."""
        pixels = random_stream("gate", "image", height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        key = put(Image.fromarray(pixels))
        self.images.gate_keys.add(key)
        tokenize = partial(self.images.processor.tokenizer, add_special_tokens=False)
        return np.array(self.images.encode(mark(key), tokenize)["input_ids"], dtype=np.int64)


def _joined(parts: Any) -> torch.Tensor:
    """Features [n, hidden] of several images, from a tensor or a sequence of tensors."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


class _BothWays:
    """A layout of the learner or of the engine in which the tokens of an image also attend to the later ones of the image."""

    def __init__(self, layout: Any, tokens: Sequence[int], marked: torch.Tensor) -> None:
        """`tokens`: the ids of images in the row, at the places that are `marked` [T] bool."""
        self.whole = layout
        self._cached = hasattr(layout, "cache")
        counts = [one.count for one in layout.segments] if self._cached else []
        starts = np.cumsum([0, *counts])
        places = marked.nonzero()[:, 0].tolist()
        follows = {(token + 1, place + 1) for token, place in zip(tokens, places, strict=True)}
        begins = [at for at, step in enumerate(zip(tokens, places, strict=True)) if step not in follows]
        self._blocks: list[tuple[int, int, Any, int]] = []
        """(start, stop, segment, start of the segment) of the tokens of each image in the row."""
        for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
            start, stop = places[begin], places[end - 1] + 1
            number = int(np.searchsorted(starts, start, "right")) - 1 if self._cached else 0
            if not self._cached:
                segment = next(one for one in layout.segments if one.start <= start < one.stop)
                self._blocks.append((start, stop, segment, segment.start))
                continue
            segment, first = layout.segments[number], int(starts[number])
            at = segment.start + start - first
            if at and layout.tokens[number][at - 1] == tokens[begin] - 1:
                raise RuntimeError("an image is divided between two passes")
            self._blocks.append((start, stop, segment, first))

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        """As `Layout.attend`. The window limits attention to earlier tokens."""
        query, key, value, scaling, window, _ = heads
        out = self.whole.attend(layer, heads)
        pieces, at = [], 0
        for start, stop, segment, first in self._blocks:
            if self._cached:
                cache, count = self.whole.cache, segment.start + stop - first
                stores = cache.keys[layer], cache.values[layer]
                keys, values = (cache.tokens(store, segment.slot, count) for store in stores)
            else:
                spans = [*segment.before, (first, stop)]
                keys, values = (torch.cat([rows[:, a:b] for a, b in spans], 1) for rows in (key, value))
            copies, seen = len(query) // len(keys), keys.shape[1]
            distance = torch.arange(seen - (stop - start), seen)[:, None] - torch.arange(seen)[None]
            attended = scaled_dot_product_attention(
                query[None, :, start:stop],
                keys.repeat_interleave(copies, 0)[None],
                values.repeat_interleave(copies, 0)[None],
                attn_mask=None if window is None else (distance < window).to(query.device),
                scale=scaling,
            )[0]
            pieces += [out[:, at:start], attended]
            at = stop
        return torch.cat([*pieces, out[:, at:]], 1)


class _OwnEncoderAttention:
    """A model whose encoder keeps its attention when that of its decoder is set."""

    def set_attn_implementation(self, name: Any, **settings: Any) -> None:
        """Set the attention of the model and of its decoder."""
        super().set_attn_implementation({"": name, "text_config": name}, **settings)  # type: ignore[misc]


def reads_images(model: Any, family: Any, images: Images) -> None:
    """Make `model`, of transformers, compute ids of images, in place."""
    base, code = base_decoder(model), hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    attributes = {"family": family, "code": code.hexdigest(), "__module__": __name__}
    base.__class__ = type(type(base).__name__, (_ReadsImages, type(base)), attributes)
    base.images = images
    cls = type(model)
    model.__class__ = type(cls.__name__, (_OwnEncoderAttention, cls), {"__module__": cls.__module__})
