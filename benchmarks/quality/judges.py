"""What two reward models say of answers: one of whole answers with every estimator of credit, one of units."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.credit.units import estimators
from posttrain.credit.units.normalizer import Normalizer, read_normalizer
from posttrain.credit.units.spans import Spans
from posttrain.episode import Stream
from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import EntropyUnits, TextUnits, UnitsRecipe
from posttrain.training.unit_credit import JudgedAnswer, UnitValuer
from posttrain.training.unit_rewards import UnitReader, unit_rewards
from posttrain.training.updater import Sample, pack
from quality.arithmetic import wrong_calculations
from quality.solutions import Reader

SENTENCES = TextUnits(type="sentence")
"""Every line of a solution is one or more of these; a line holds one calculation."""
_KEY = "--tokens"


@dataclass(frozen=True, eq=False)
class Credits:
    """An estimator's credit of the units of several answers."""

    values: list[np.ndarray]
    """[K_i] float64 each."""
    forwards: int
    """Texts read, besides the whole answers."""
    tokens: int
    """Computed for them."""


def open_model(path: Path, dtype: Literal["float32", "bfloat16", "auto"]) -> RewardModel:
    """The reward model of a run, or a directory that holds one."""
    found = path / "model" if (path / "model").is_dir() else path
    return RewardModel(ModelRecipe(path=str(found), dtype=dtype), new_head=False)


class OutcomeJudge:
    """A reward model of whole answers."""

    def __init__(self, model: RewardModel, budget: int) -> None:
        self.model, self.budget = model, budget
        if model.units is not None:
            raise InputError(f"--outcome: {model.recipe.path} rewards units; name a reward model of whole answers")
        mean, std = model.statistics or (0.0, 1.0)
        self.scale: Callable[[float], float] = lambda raw: (raw - mean) / std
        self._known: dict[bytes, float] = {}

    def reader(self, segmenter: UnitsRecipe) -> Reader:
        return Reader(self.model, segmenter)

    def scores(self, streams: Sequence[Stream]) -> np.ndarray:
        """[S] float64: normalized rewards of whole answers, each computed once."""
        import torch

        new = [stream for stream in streams if stream.ids.tobytes() not in self._known]
        for group in pack([_sample(stream) for stream in new], self.budget, _KEY):
            chosen = [new[i] for i in group]
            with torch.no_grad():
                values = self.model.rewards([s.ids for s in chosen], [s.sampled for s in chosen]).tolist()
            self._known |= {s.ids.tobytes(): self.scale(value) for s, value in zip(chosen, values, strict=True)}
        return np.array([self._known[stream.ids.tobytes()] for stream in streams])

    def credits(
        self, streams: Sequence[Stream], units: Sequence[Spans], wanted: Callable[[str], bool] = lambda name: True
    ) -> dict[str, Credits]:
        """The credit by every estimator that is `wanted`, by its name in recipes."""
        answers = [
            JudgedAnswer(stream, own, outcome, f"answer {number}")
            for number, (stream, own, outcome) in enumerate(zip(streams, units, self.scores(streams), strict=True))
        ]
        found: dict[str, Credits] = {}
        if wanted("prefix") or wanted("trunc"):
            valuer = self._valuer()
            values = valuer.prefixes(answers, one_pass=True)
            found["prefix"] = _paid([estimators.prefix(own) for own in values], valuer)
            found["trunc"] = _paid([estimators.trunc(own) for own in values], valuer)
        if wanted("loo"):
            found["loo"] = self._loo(answers)
        found["even"] = Credits([estimators.even(a.outcome, a.units.is_unit) for a in answers], 0, 0)
        found["outcome"] = Credits([estimators.last(a.outcome, len(a.units)) for a in answers], 0, 0)
        return {name: own for name, own in found.items() if wanted(name)}

    def _loo(self, answers: Sequence[JudgedAnswer]) -> Credits:
        valuer = self._valuer()
        members = [estimators.leave_one_out_coalitions(len(a.units)) for a in answers]
        without = valuer.coalitions(answers, members)
        credits = [
            estimators.loo(a.outcome, np.array([own[m] for m in asked]))
            for a, asked, own in zip(answers, members, without, strict=True)
        ]
        return _paid(credits, valuer)

    def _valuer(self) -> UnitValuer:
        return UnitValuer(self.model, self.budget, self.scale)


class Calculator(RewardModel):
    """Reads as `model` does and knows no more of an answer than how many of its calculations are wrong: the limit of
    what a better reward model could say. Its reward is minus their number, whatever else is there or missing."""

    def __init__(self, model: RewardModel) -> None:
        self.tokenizer, self.end_tokens = model.tokenizer, model.end_tokens
        self._decode = partial(model.tokenizer.decode, clean_up_tokenization_spaces=False)

    @property
    def units(self) -> None:
        return None

    @property
    def statistics(self) -> None:
        return None

    def rewards(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> Any:
        """[S] float32 of the sampled tokens of each stream."""
        import torch

        texts = [self._decode(ids[own].tolist()) for ids, own in zip(streams, sampled, strict=True)]
        return torch.tensor([-float(wrong_calculations(text)) for text in texts])

    def prefix_rewards(self, streams: Sequence[np.ndarray], seen: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As a reward model's. The first beginning is the prompt, of which nothing is counted."""
        return [
            np.array([-float(wrong_calculations(self._decode(ids[own[0] : n].tolist()))) for n in own.tolist()])
            for ids, own in zip(streams, seen, strict=True)
        ]


class UnitJudge:
    """A reward model of units, and the normalizer of its run if there is one."""

    def __init__(self, path: Path, dtype: Literal["float32", "bfloat16", "auto"], budget: int) -> None:
        self.model, self.budget = open_model(path, dtype), budget
        units = self.model.units
        if units is None:
            raise InputError(f"--units: {path} rewards whole answers; name a reward model trained with `units`")
        if isinstance(units.segmenter, EntropyUnits):
            raise InputError(f"--units: {path} cuts by entropy, and a changed number moves such cuts; name another")
        self.segmenter = units.segmenter
        self._cutter = UnitReader(self.model, units, budget)
        self._known: dict[bytes, np.ndarray] = {}
        params = path / "normalizer" / "params.json"
        self.normalizer: Normalizer | None = read_normalizer(params) if params.is_file() else None

    def reader(self, segmenter: UnitsRecipe) -> Reader:
        return Reader(self.model, segmenter)

    def rewards(self, streams: Sequence[Stream]) -> list[np.ndarray]:
        """[K_i] float64 of each answer: the raw rewards of its units, each computed once."""
        new = [stream for stream in streams if stream.ids.tobytes() not in self._known]
        found = unit_rewards(self.model, self._cutter, [_sample(s) for s in new], self.budget, _KEY)
        self._cutter.forget()
        self._known |= {s.ids.tobytes(): own.astype(np.float64) for s, own in zip(new, found, strict=True)}
        return [self._known[stream.ids.tobytes()] for stream in streams]

    def scores(self, streams: Sequence[Stream]) -> np.ndarray:
        """[S] float64: what the answers are worth, the mean of their units."""
        return np.array([own.mean() for own in self.rewards(streams)])

    def credits(self, streams: Sequence[Stream]) -> dict[str, Credits]:
        """The model's rewards as they are, and normalized by place where there is a fit. They come with the score of
        the whole, so they cost nothing besides."""
        raw = self.rewards(streams)
        found = {"unit rewards": Credits(raw, 0, 0)}
        if self.normalizer is not None:
            found["unit rewards, by place"] = Credits([self.normalizer.normalize(own) for own in raw], 0, 0)
        return found


def _paid(values: list[np.ndarray], valuer: UnitValuer) -> Credits:
    return Credits(values, valuer.forwards, valuer.tokens)


def _sample(stream: Stream) -> Sample:
    return Sample(stream, "an answer", np.zeros(0, np.float32))
