"""Unit rewards: forward pass, segmentation and training objective of a unit-level reward model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from posttrain.credit.units.segment import unit_ends
from posttrain.errors import InputError
from posttrain.losses.policy import number
from posttrain.losses.reward import unit_entropies, unit_entropy_penalty, unit_means, unit_stds
from posttrain.models.forward import base_decoder, token_scores, upload
from posttrain.models.layers import lengths_of
from posttrain.models.load import load_model, resolve_path
from posttrain.models.packing import RowPart, pack_row
from posttrain.models.reward import RewardModel, UnitValues
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import StoredUnits, UnitRewardsRecipe
from posttrain.training.objectives import Comparisons, RewardObjective
from posttrain.training.updater import Forward, Loss, Sample, Samples, by_sample, in_batches

WEAK = 0.05
"""R² of a normalizer's fit below which a warning says that positions explain almost nothing."""
_POSITIONS_PER_CHUNK = 512
"""Number of positions whose logits exist at a time when entropies are computed."""


def entropies_under(model: torch.nn.Module, samples: Samples, tokens_per_batch: int) -> list[np.ndarray]:
    """Per sample [n] float32: entropy in nats of the distribution of each sampled token, at temperature 1, without
    gradient.

    `tokens_per_batch`: maximum number of tokens per forward pass.
    """
    device = next(model.parameters()).device

    def entropies(batch: Samples) -> list[np.ndarray]:
        ids, sampled = [sample.stream.ids for sample in batch], [sample.stream.sampled for sample in batch]
        row = pack_row(ids, sampled, lengths_of(base_decoder(model)))
        part = RowPart(row.ids, row.layout, row.predictors, device)
        targets = upload(row.targets[part.mine], device)
        scores = token_scores(model, part.states(model), targets, 1.0, _POSITIONS_PER_CHUNK)
        return by_sample(part.gather(scores.entropies).float(), batch)

    unpaired = [replace(sample, side=None) for sample in samples]  # samples may be packed in any combination
    return in_batches(unpaired, tokens_per_batch, "learner.tokens_per_batch", entropies)


class UnitReader:
    """Segments the answers of samples into the units that `model` rewards.

    Entropies come from packed forward passes of the reference model, without gradient. Float rounding may move a
    boundary between packings, so use `remember` for samples that are segmented more than once.
    """

    def __init__(self, model: RewardModel, units: StoredUnits, tokens_per_batch: int) -> None:
        """`tokens_per_batch`: maximum number of tokens per pass of the reference model. Raises `InputError` if it
        cannot be loaded."""
        self.model, self.units, self.tokens_per_batch = model, units, tokens_per_batch
        self.reference = _reference(model, units.reference) if units.reference is not None else None
        self._known: dict[bytes, np.ndarray] = {}

    def remember(self, samples: Samples) -> None:
        """Segment all `samples` now, in packed passes, and store the result."""
        self._known |= {_name(s): ends for s, ends in zip(samples, self._find(samples), strict=True)}

    def forget(self) -> None:
        self._known.clear()

    def ends(self, samples: Samples) -> list[np.ndarray]:
        """Per sample [K] int64: position in its stream of the last token of each unit. Samples without stored units are
        segmented one by one, so that the result depends on the sample alone."""
        names = [_name(sample) for sample in samples]
        return [
            self._known[name] if name in self._known else self._find([sample])[0]
            for name, sample in zip(names, samples, strict=True)
        ]

    def _find(self, samples: Samples) -> list[np.ndarray]:
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
        config = {}  # a hub id, or adapters; the loader reports errors
    except InputError as error:
        raise InputError(
            f"units.segmenter: the reference model {path}, whose entropies define the units of {model.recipe.path}, "
            f"cannot be loaded ({error}); restore it, or train with another segmenter"
        ) from error
    if any("SequenceClassification" in name for name in config.get("architectures") or ()):
        raise InputError(
            f"units.segmenter: `entropy` needs the entropies of a language model, and {path} is a reward model; set "
            "`model.path` to a language model, or use another segmenter"
        )
    return load_model(ModelRecipe(path=path, dtype=model.recipe.dtype, device=model.recipe.device))


def _name(sample: Sample) -> bytes:
    return sample.stream.ids.tobytes() + sample.stream.sampled.tobytes()


def unit_reward_forward(model: RewardModel, reader: UnitReader) -> Forward[UnitValues]:
    """The function that computes the unit rewards of samples."""

    def forward(samples: Samples) -> UnitValues:
        streams = [sample.stream for sample in samples]
        return model.unit_rewards([s.ids for s in streams], [s.sampled for s in streams], reader.ends(samples))

    return forward


def unit_rewards(model: RewardModel, reader: UnitReader, samples: Samples, budget: int, key: str) -> list[np.ndarray]:
    """Per sample [K_i] float32: the rewards of its units, without gradient. `reader` stores the units.

    `budget`: maximum number of tokens per forward pass. `key`: its recipe key, for messages.
    """
    reader.remember(samples)
    forward = unit_reward_forward(model, reader)

    def rewards(batch: Samples) -> list[np.ndarray]:
        values = forward(batch)
        counts = np.bincount(values.stream.cpu().numpy(), minlength=len(batch))
        return np.split(values.rewards.cpu().numpy(), np.cumsum(counts)[:-1])

    return in_batches(samples, budget, key, rewards)


@dataclass
class UnitRewardObjective(RewardObjective):
    """Bradley-Terry on the mean rewards of the units of two answers, + coefficient x unevenness of both."""

    units: UnitRewardsRecipe

    def compare(self, output: UnitValues, samples: Samples) -> Comparisons:  # type: ignore[override]
        """Losses without the regularizer."""
        return super().compare(unit_means(output.rewards, output.stream, output.streams), samples)

    def __call__(  # type: ignore[override]
        self, output: UnitValues, samples: Samples, weights: Sequence[float]
    ) -> Loss:
        compared = self.compare(output, samples)
        loss, totals = self.loss_and_totals(compared, samples)
        parts = (output.rewards, output.stream, output.streams)
        with torch.no_grad():
            answers = float(output.streams)
            totals["units/per_answer"] = (float(len(output.rewards)), answers)
            totals["units/effective"] = (number(unit_entropies(*parts).exp().sum()), answers)
            totals["units/spread"] = (number(unit_stds(*parts).sum()), answers)
        if self.units.entropy_coefficient:
            answer_weights = torch.tensor([sample.weight for sample in samples], device=output.rewards.device)
            uneven = (unit_entropy_penalty(*parts, self.units.entropy_form) * answer_weights).sum()
            loss = loss + self.units.entropy_coefficient * uneven
            totals["loss/unevenness"] = (number(uneven), totals["loss/preference"][1])
        return loss, totals
