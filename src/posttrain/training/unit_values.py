"""What a reward model says of answers of which parts are missing, and what asking it cost."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.credit.units.rendering import Rendering, Tokens, beginnings, blanked_beginning, rendered
from posttrain.credit.units.spans import Spans
from posttrain.errors import RunError
from posttrain.models.reward import RewardModel
from posttrain.rollout.streams import Stream
from posttrain.training.batches import Sample, pack
from posttrain.training.rows import stream_of

_KEY = "reward.tokens_per_batch"


@dataclass(frozen=True, eq=False)
class JudgedAnswer:
    """An answer, its units, and what the reward model says of the whole."""

    stream: Stream
    """Up to the last sampled token."""
    units: Spans
    outcome: float
    """R, normalised."""
    label: str
    """Names the episode in messages."""


class UnitValuer:
    """Asks a reward model for the values that estimators of unit credit are made of; counts what it computes."""

    def __init__(
        self, model: RewardModel, tokens_per_batch: int, scale: Callable[[float], float], clip: float | None = None
    ) -> None:
        """`scale`: from what the model says to the normalised reward, which it clips to [-clip, clip]."""
        self.model = model
        self.budget = tokens_per_batch
        self.scale = scale
        self.clip = clip
        self.forwards = 0
        """Texts read."""
        self.tokens = 0
        """Tokens computed, a prompt that several texts of a pass share once."""
        self.clipped = 0
        """Values that the clip changed, or that lie on it."""
        tokenizer = model.tokenizer

        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        self.ids = Tokens(model.end_token, frozenset(model.end_tokens), ids("[omitted]"), ids(" ")[0])

    def prefixes(self, answers: Sequence[JudgedAnswer], one_pass: bool) -> list[np.ndarray]:
        """Per answer [K + 1] float64: the value of its prompt alone, after each unit, and of the whole, R."""
        seen = [beginnings(answer.stream, answer.units) for answer in answers]
        if one_pass:
            values = self._probed(answers, seen)
        else:
            cut = ((self._ended(a.stream.ids[:n]) for n in own.tolist()) for a, own in zip(answers, seen, strict=True))
            values = self._read(answers, cut)
        return [np.append(own, answer.outcome) for own, answer in zip(values, answers, strict=True)]

    def coalitions(
        self, answers: Sequence[JudgedAnswer], members: Sequence[Sequence[int]], how: Rendering
    ) -> list[dict[int, float]]:
        """Per answer: the values of its coalitions of units, and of the whole one, R."""
        texts = (
            (rendered(answer.stream, answer.units, one, how, self.ids) for one in own)
            for answer, own in zip(answers, members, strict=True)
        )
        values = self._read(answers, texts)
        return [
            dict(zip(own, found.tolist(), strict=True)) | {(1 << len(answer.units)) - 1: answer.outcome}
            for own, found, answer in zip(members, values, answers, strict=True)
        ]

    def blanked(self, answers: Sequence[JudgedAnswer]) -> list[np.ndarray]:
        """Per answer [K] float64: the values of the published counterfactuals of its units."""
        texts = ((blanked_beginning(a.stream, *unit, self.ids) for unit in a.units) for a in answers)
        return self._read(answers, texts)

    def attention(self, answers: Sequence[JudgedAnswer]) -> list[np.ndarray]:
        """Per answer [K] float64: the attention paid to each of its units where the reward is read."""
        found: list[np.ndarray] = []
        for group in self._groups(answers, [len(a.stream) for a in answers]):
            for answer, paid in zip(group, self.model.attention_paid([a.stream.ids for a in group]), strict=True):
                own = paid[answer.stream.sampled].astype(np.float64)
                found.append(np.add.reduceat(own, answer.units.cuts[:-1]))
        return found

    def _probed(self, answers: Sequence[JudgedAnswer], seen: Sequence[np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        left = iter(seen)
        # What stands behind the last beginning is read by none of them.
        for group in self._groups(answers, [int(own[-1]) + len(own) for own in seen]):
            parts = [next(left) for _ in group]
            streams = [a.stream.ids[: own[-1]] for a, own in zip(group, parts, strict=True)]
            found += [self._scaled(values) for values in self.model.prefix_rewards(streams, parts)]
        return found

    def _groups(self, answers: Sequence[JudgedAnswer], sizes: Sequence[int]) -> Iterator[list[JudgedAnswer]]:
        """Answers in their order, in passes of at most the budget's tokens."""
        group: list[JudgedAnswer] = []
        used = 0
        for answer, size in zip(answers, sizes, strict=True):
            if size > self.budget:
                raise RunError(
                    f"{answer.label} takes {size} tokens with its units, more than {_KEY} = {self.budget}; raise it"
                )
            if used + size > self.budget:
                yield group
                group, used = [], 0
            group.append(answer)
            used += size
            self.forwards += 1
            self.tokens += size
        if group:
            yield group

    def _read(self, answers: Sequence[JudgedAnswer], texts: Iterable[Iterable[np.ndarray]]) -> list[np.ndarray]:
        """Per answer the values [K] of whole texts [T] of it, each read on its own; the answer's prompt is shared.

        The texts of one answer exist at a time: there may be hundreds.
        """
        return [self._read_one(answer, own) for answer, own in zip(answers, texts, strict=True)]

    def _read_one(self, answer: JudgedAnswer, texts: Iterable[np.ndarray]) -> np.ndarray:
        prompt, label = int(np.argmax(answer.stream.sampled)), f"{answer.label}, without some of its units,"
        samples = [
            Sample(stream_of(ids, np.arange(len(ids)) >= prompt), label, np.zeros(0, np.float32)) for ids in texts
        ]
        values = np.zeros(len(samples), dtype=np.float64)
        for group in pack(samples, self.budget, _KEY):
            chosen = [samples[i].stream for i in group]
            with torch.no_grad():
                values[group] = self.model.rewards([s.ids for s in chosen], [s.sampled for s in chosen]).cpu().numpy()
            self.forwards += len(group)
            prompts = {s.ids[~s.sampled].tobytes(): int((~s.sampled).sum()) for s in chosen}
            self.tokens += sum(prompts.values()) + sum(int(s.sampled.sum()) for s in chosen)
        return self._scaled(values)

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        return ids if int(ids[-1]) in self.ids.ends else np.append(ids, self.ids.end)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        found = np.array([self.scale(float(value)) for value in values], dtype=np.float64)
        self.clipped += 0 if self.clip is None else int((np.abs(found) >= self.clip).sum())
        return found
