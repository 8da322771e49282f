"""The reward model: a decoder with a scalar head, read at the last token of a stream or of each of its units."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from posttrain.errors import InputError
from posttrain.models.attention import PackedLayout
from posttrain.models.base import TrainedModel
from posttrain.models.forward import hidden_states, transformer
from posttrain.models.load import load_reward_model
from posttrain.models.packing import pack_row
from posttrain.models.probes import ProbedLayout, WatchedLayout
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import StoredUnits
from posttrain.seeds import derive_seed

_UNITS = "posttrain_units"
"""Key of `config.json` under which a model keeps how answers are cut into the units that it rewards."""


@dataclass(frozen=True)
class UnitValues:
    """Rewards of the U units of S streams, stream after stream, in order."""

    rewards: torch.Tensor
    """[U] float32."""
    stream: torch.Tensor
    """[U] int64: the stream of each."""
    streams: int
    """S."""


class RewardModel(TrainedModel):
    """A decoder with a scalar head that scores token streams.

    It starts from a language model with a new head, or from a reward model with a head of its own.
    """

    task = "SEQ_CLS"

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, new_head: bool = True, **settings: Any) -> None:
        """As `Policy`. Without `new_head`, a model that has no head is an `InputError`."""
        self._new_head = new_head
        super().__init__(model, seed, trained=new_head, **settings)
        self._set_padding()

    def load(self) -> torch.nn.Module:
        return load_reward_model(
            self.recipe, derive_seed(self.seed, "reward head") if self._new_head else None, place=self.place
        )

    @property
    def statistics(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the rewards on the validation rows of its training; None without any."""
        config = transformer(self.model).config
        mean, std = getattr(config, "mean", None), getattr(config, "std", None)
        return None if mean is None or not std else (float(mean), float(std))

    def set_statistics(self, mean: float, std: float) -> None:
        """Keep the mean and standard deviation with the model, in its `config.json` as `mean` and `std`."""
        config = transformer(self.model).config
        config.mean, config.std = mean, std

    @property
    def units(self) -> StoredUnits | None:
        """How the model's training cut answers into units; None for a model that rewards whole answers."""
        kept = getattr(transformer(self.model).config, _UNITS, None)
        try:
            return None if kept is None else StoredUnits.model_validate(kept)
        except ValidationError as error:
            key = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise InputError(
                f"{self.recipe.path}/config.json: `{_UNITS}` is wrong at {key!r} ({error.errors()[0]['msg']}); restore the "
                "file as `posttrain reward` exported it"
            ) from error

    def set_units(self, units: StoredUnits | None) -> None:
        """Keep `units` with the model, in its `config.json`; None makes it one that rewards whole answers."""
        setattr(transformer(self.model).config, _UNITS, None if units is None else units.model_dump(mode="json"))

    def rewards(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Rewards [S] float32 of several streams, in one packed forward pass, each read at its last token.

        `streams`: token ids [T_i] int64; `sampled`: [T_i] bool, the answers. A prompt that streams share is computed
        once. The same numbers as `AutoModelForSequenceClassification(num_labels=1)` gives for each stream alone.
        """
        row = pack_row(streams, sampled)
        return self._read(row.ids, row.layout, row.last)

    def unit_rewards(
        self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray], ends: Sequence[np.ndarray]
    ) -> UnitValues:
        """As `rewards`, read at the last token of each unit: `ends` [K_i] int64 are their places in each stream, from
        its first sampled token on. Each reward is that of `rewards` for the stream cut after the unit.
        """
        row = pack_row(streams, sampled)
        # The answers of a stream stand together in the row, and `last` is the place of their last token.
        places = [last - (len(ids) - 1) + end for last, ids, end in zip(row.last, streams, ends, strict=True)]
        counts = [len(end) for end in ends]
        owner = torch.from_numpy(np.repeat(np.arange(len(streams)), counts)).to(self.device)
        return UnitValues(self._read(row.ids, row.layout, np.concatenate(places)), owner, len(streams))

    def prefix_rewards(self, streams: Sequence[np.ndarray], seen: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per stream [P_i] float32, without gradient: the rewards of its beginnings, all in one pass over the stream.

        `streams`: token ids [T_i] int64; `seen` [P_i] int64: tokens of each beginning, 1 to T_i. A beginning is read as
        `rewards` would read it with the end token behind it, or, where it ends with an end token already, as it is.
        """
        rows, counts, places = [], [], []
        start = 0
        for ids, lengths in zip(streams, seen, strict=True):
            ended = np.isin(ids[lengths - 1], list(self.end_tokens))
            probed = lengths[~ended]
            at = start + lengths - 1
            at[~ended] = start + len(ids) + np.arange(len(probed))
            rows += [ids, np.full(len(probed), self.end_token)]
            counts.append((len(ids), probed.tolist()))
            places.append(at)
            start += len(ids) + len(probed)
        with torch.no_grad():
            values = self._read(np.concatenate(rows), ProbedLayout(counts), np.concatenate(places))
        return np.split(values.cpu().numpy(), np.cumsum([len(at) for at in places])[:-1])

    def attention_paid(self, streams: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per stream [T_i] float32, sums to 1: the attention of the last token, where the reward is read, as the last
        layer pays it, a mean over its heads. `streams`: token ids [T_i] int64, at least 2 each."""
        layout = WatchedLayout([len(ids) for ids in streams], transformer(self.model).config.num_hidden_layers - 1)
        with torch.no_grad():
            self._read(np.concatenate(streams), layout, np.zeros(0, dtype=np.int64))
        return [paid.cpu().numpy() for paid in layout.paid]

    @property
    def end_token(self) -> int:
        """The end token that the model's own template ends an answer with."""
        own = self.tokenizer.eos_token_id
        return own if own in self.end_tokens else min(self.end_tokens)

    def _read(self, row_ids: np.ndarray, layout: PackedLayout | ProbedLayout, places: np.ndarray) -> torch.Tensor:
        """The head's values [n] at `places` [n] of a row of token ids [T]."""
        ids, positions = torch.from_numpy(row_ids).to(self.device), layout.positions().to(self.device)
        at = torch.from_numpy(places).to(self.device)

        def read() -> torch.Tensor:
            hidden = hidden_states(self.model, ids, positions, layout)[at]
            # In float32 whatever the weights are in: rewards that are close should not become equal.
            return torch.nn.functional.linear(hidden.float(), self._head().weight.float()).squeeze(1)

        return self.compute(read)

    def _head(self) -> torch.nn.Linear:
        head = transformer(self.model).score
        # peft keeps a trained copy of the head beside the original one.
        return head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head

    def export(self, directory: Path) -> None:
        if self.recipe.lora is not None and self.recipe.lora.export == "adapter":
            # peft keeps the adapters and the head; the statistics and the padding token are in the configuration.
            transformer(self.model).config.save_pretrained(directory)
        super().export(directory)

    def _set_padding(self) -> None:
        """Pad with a token that never ends an answer.

        transformers reads the reward at the last token that is not padding, so where padding and end token are the
        same it would read it one token early.
        """
        tokenizer = self.tokenizer
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id in self.end_tokens:
            spare = [token for token in tokenizer.all_special_ids if token not in self.end_tokens]
            if spare:
                tokenizer.pad_token = tokenizer.convert_ids_to_tokens(spare[-1])
        transformer(self.model).config.pad_token_id = tokenizer.pad_token_id
