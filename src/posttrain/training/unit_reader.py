"""Where the units of samples end, as a reward model's `config.json` says, entropies of the reference model included."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from posttrain.credit.units.streams import unit_ends
from posttrain.errors import InputError
from posttrain.models.load import load_model, resolve_path
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.unit_rewards import StoredUnits
from posttrain.training.batches import Sample
from posttrain.training.entropies import entropies_under


class UnitReader:
    """Cuts the answers of samples into the units that `model` rewards.

    Entropies are those of a packed forward pass of the reference model, without gradient; float rounding may tell two
    packings apart by one boundary, so `remember` what a run must find again.
    """

    def __init__(self, model: RewardModel, units: StoredUnits, tokens_per_batch: int) -> None:
        """`tokens_per_batch`: most tokens of a pass of the reference model. `InputError` where that cannot be loaded."""
        self.model = model
        self.units = units
        self.tokens_per_batch = tokens_per_batch
        self.reference = _reference(model, units.reference) if units.reference is not None else None
        self._known: dict[bytes, np.ndarray] = {}

    def remember(self, samples: Sequence[Sample]) -> None:
        """Find the units of `samples` now, in passes over all of them, and keep them."""
        self._known |= {_name(s): ends for s, ends in zip(samples, self._find(samples), strict=True)}

    def forget(self) -> None:
        """Drop what was remembered."""
        self._known.clear()

    def ends(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Per sample [K] int64: places in its stream of the last tokens of its units. Those that are not remembered are
        found one by one, so that the answer depends on the sample alone."""
        names = [_name(sample) for sample in samples]
        return [
            self._known[name] if name in self._known else self._find([sample])[0]
            for name, sample in zip(names, samples, strict=True)
        ]

    def _find(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        entropies: Sequence[np.ndarray | None] = [None] * len(samples)
        if self.reference is not None:
            entropies = entropies_under(self.reference, samples, self.tokens_per_batch)
        decode = partial(self.model.tokenizer.decode, clean_up_tokenization_spaces=False)
        end_tokens = self.model.end_tokens
        return [
            unit_ends(self.units.segmenter, sample.stream, end_tokens, decode, values)
            for sample, values in zip(samples, entropies, strict=True)
        ]


def _reference(model: RewardModel, path: str) -> torch.nn.Module:
    """The frozen language model at `path`, in the precision and on the device of `model`."""
    try:
        config = json.loads((Path(resolve_path(path)) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        config = {}  # a hub id, or adapters; what is wrong with it the loader says
    except InputError as error:
        raise InputError(
            f"units.segmenter: the reference model {path}, whose entropies cut the units of {model.recipe.path}, "
            f"cannot be loaded ({error}); put it there, or train with another segmenter"
        ) from error
    if any("SequenceClassification" in name for name in config.get("architectures") or ()):
        raise InputError(
            f"units.segmenter: `entropy` needs the entropies of a language model, and {path} is a reward model; start from "
            "a language model in `model.path`, or take another segmenter"
        )
    return load_model(ModelRecipe(path=path, dtype=model.recipe.dtype, device=model.recipe.device))


def _name(sample: Sample) -> bytes:
    return sample.stream.ids.tobytes() + sample.stream.sampled.tobytes()
