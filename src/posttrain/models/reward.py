"""The reward model: a decoder with a scalar head, read at the last token of a stream or of each of its units."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from posttrain.data.rendering import end_token_of
from posttrain.errors import InputError
from posttrain.models.forward import base_decoder, transformer, upload
from posttrain.models.layers import lengths_of
from posttrain.models.load import load_reward_model
from posttrain.models.packing import PackedLayout, PackedRow, RowPart, probed_layout
from posttrain.models.policy import TrainedModel
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import StoredUnits
from posttrain.seeds import derive_seed

_UNITS = "posttrain_units"
"""Key of `config.json` that stores how the model divides completions into rewarded units."""
PADDING = "<|padding|>"
"""The padding token of a reward model whose tokenizer has none that never ends a stream."""


@dataclass(frozen=True)
class UnitValues:
    """Rewards of the U units of S streams, ordered by stream and position."""

    rewards: torch.Tensor
    """[U] float32."""
    stream: torch.Tensor
    """[U] int64: index of the stream of each unit."""
    streams: int
    """S."""


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """Ids by token, without the padding token that `RewardModel` adds."""
    return {token: number for token, number in tokenizer.get_vocab().items() if token != PADDING}


class RewardModel(TrainedModel):
    """A decoder with a scalar head that scores token streams. It starts from a language model with a new head, or from
    a reward model with its own head."""

    task = "SEQ_CLS"

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, new_head: bool = True, **settings: Any) -> None:
        """As `Policy`. Without `new_head`, a model that has no head is an `InputError`."""
        self._new_head = new_head
        super().__init__(model, seed, trained=new_head, **settings)

    def load(self) -> torch.nn.Module:
        head_seed = derive_seed(self.seed, "reward head") if self._new_head else None
        return self._padded(load_reward_model(self.recipe, head_seed, device=self.load_device))

    @property
    def statistics(self) -> tuple[float, float] | None:
        """Mean and standard deviation of rewards on the validation rows of the training run; None if not stored."""
        config = transformer(self.model).config
        mean, std = getattr(config, "mean", None), getattr(config, "std", None)
        return None if mean is None or not std else (float(mean), float(std))

    def set_statistics(self, mean: float, std: float) -> None:
        """Store the mean and standard deviation in the model's `config.json`, as `mean` and `std`."""
        config = transformer(self.model).config
        config.mean, config.std = mean, std

    @property
    def units(self) -> StoredUnits | None:
        """How the model divides completions into units; None for a model that rewards whole completions."""
        stored = getattr(transformer(self.model).config, _UNITS, None)
        try:
            return None if stored is None else StoredUnits.model_validate(stored)
        except ValidationError as error:
            key = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise InputError(
                f"{self.recipe.path}/config.json: invalid `{_UNITS}` at {key!r} ({error.errors()[0]['msg']}); restore the "
                "file that `posttrain reward` exported"
            ) from error

    def set_units(self, units: StoredUnits | None) -> None:
        """Store `units` in the model's `config.json`; None for a model that rewards whole completions."""
        setattr(transformer(self.model).config, _UNITS, None if units is None else units.model_dump(mode="json"))

    def rewards(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Rewards [S] float32 of several streams, each read at its last token, in one packed forward pass. `streams`:
        token ids [T_i] int64; `sampled`: [T_i] bool, the completions. Shared prefixes are computed once. Equal to the
        output of `AutoModelForSequenceClassification(num_labels=1)` for each stream alone."""
        row = self.pack(streams, sampled)
        return self._read(row.ids, row.layout, np.array([places[-1] for places in row.places]), row)

    def unit_rewards(
        self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray], ends: Sequence[np.ndarray]
    ) -> UnitValues:
        """Rewards of units, each equal to the reward of the stream cut after the unit. `streams` and `sampled` as in
        `rewards`. `ends`: [K_i] int64, the index in each stream of the last token of each unit, at or after the first
        sampled token."""
        row = self.pack(streams, sampled)
        positions = [places[end] for places, end in zip(row.places, ends, strict=True)]
        counts = [len(end) for end in ends]
        owner = upload(np.repeat(np.arange(len(streams)), counts), self.device)
        return UnitValues(self._read(row.ids, row.layout, np.concatenate(positions), row), owner, len(streams))

    def prefix_rewards(self, streams: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Rewards of prefixes of the streams, without gradient, in one forward pass: per stream [P_i] float32.
        `streams`: token ids [T_i] int64; `lengths`: [P_i] int64, the length of each prefix, 1 to T_i. A prefix is
        scored with the end token appended, unless it already ends with one."""
        lengths_by = lengths_of(base_decoder(self.model))
        if lengths_by is not None and max(map(len, streams)) >= lengths_by.original:
            # One stream for each prefix, which has the rotary frequencies of its own length.
            cuts = [ids[:count] for ids, stops in zip(streams, lengths, strict=True) for count in stops]
            whole = [cut if cut[-1] in self.end_tokens else np.append(cut, self.end_token) for cut in cuts]
            with torch.no_grad():
                values = self.rewards(whole, [np.arange(len(cut)) > 0 for cut in whole])
            return np.split(values.cpu().numpy(), np.cumsum([len(stops) for stops in lengths])[:-1])
        rows, counts, positions = [], [], []
        start = 0
        for ids, prefixes in zip(streams, lengths, strict=True):
            ended = np.isin(ids[prefixes - 1], list(self.end_tokens))
            probed = prefixes[~ended]
            at = start + prefixes - 1
            at[~ended] = start + len(ids) + np.arange(len(probed))
            rows += [ids, np.full(len(probed), self.end_token)]
            counts.append((len(ids), probed.tolist()))
            positions.append(at)
            start += len(ids) + len(probed)
        with torch.no_grad():
            values = self._read(np.concatenate(rows), probed_layout(counts), np.concatenate(positions))
        return np.split(values.cpu().numpy(), np.cumsum([len(at) for at in positions])[:-1])

    @cached_property
    def end_token(self) -> int:
        """The end token that the model's chat template puts after a completion."""
        return end_token_of(self.tokenizer, self.end_tokens)

    def _read(
        self, row_ids: np.ndarray, layout: PackedLayout, indices: np.ndarray, row: PackedRow | None = None
    ) -> torch.Tensor:
        """The head's values [n] float32 at `indices` [n] of a row of token ids [T]."""
        part = RowPart(row_ids, layout, indices, self.device, row)

        def read() -> torch.Tensor:
            hidden = part.states(self.model)
            # Computed in float32 for any dtype of the weights, so that close rewards do not become equal.
            return torch.nn.functional.linear(hidden.float(), self._head().weight.float()).squeeze(1)

        return part.gather(self.compute(read))

    def _head(self) -> torch.nn.Linear:
        head = transformer(self.model).score
        # peft keeps a trained copy of the head beside the original.
        return head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head

    def export(self, directory: Path) -> None:
        if self.recipe.lora is not None and self.recipe.lora.export == "adapter":
            # peft exports only adapters and head; the configuration contains the statistics and the padding token.
            transformer(self.model).config.save_pretrained(directory)
        super().export(directory)

    def _padded(self, model: Any) -> Any:
        """`model` with a padding token in its configuration and tokenizer, and a row of the embedding if it is new.
        transformers reads the reward at the last token that is not padding, so no stream may end with this token."""
        tokenizer, rows = self.tokenizer, len(model.get_input_embeddings().weight)
        tokens = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        if not self._never_ends(tokenizer.pad_token_id, tokenizer.pad_token):
            spare = [number for number, token in tokens.items() if number < rows and self._never_ends(number, token)]
            named = [number for number in spare if "pad" in tokens[number].lower()]
            tokenizer.add_special_tokens({"pad_token": tokens[max(named or spare)] if spare else PADDING})
        padding = tokenizer.pad_token_id
        if padding >= rows:
            if self.recipe.lora is not None and self.recipe.lora.export == "adapter":
                raise InputError(
                    f"model.lora.export: the tokenizer of {self.recipe.path} has no token to pad with, and adapters have no "
                    "embedding for a new one; use merged"
                )
            with torch.random.fork_rng(devices=[]):
                embedding = model.resize_token_embeddings(padding + 1, mean_resizing=False)
            embedding.weight.data[rows:] = 0
        model.config.get_text_config().pad_token_id = padding
        return model

    def _never_ends(self, number: int | None, token: str) -> bool:
        """Whether no stream ends with this special token: templates do not write it, and text does not encode to it."""
        tokenizer = self.tokenizer
        if number is None or number in {*self.end_tokens, tokenizer.bos_token_id}:
            return False
        # The second character is in no vocabulary, so it shows whether text encodes to the token for unknown text.
        text = tokenizer(f"{token}\U0010fffd", add_special_tokens=False, split_special_tokens=True).input_ids
        return token not in str(tokenizer.chat_template) and number not in text
