"""Rewards of played episodes from a reward model, on the very tokens that were sampled."""

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.data.messages import Message
from posttrain.data.rendering import LossOn, Renderer, render_conversation
from posttrain.episode import CUT_OFF, Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import InputError
from posttrain.factory import Factory
from posttrain.models.load import load_tokenizer
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.training.batches import Sample, pack
from posttrain.training.objectives import reward_forward
from posttrain.training.rows import stream_of
from posttrain.training.unit_rewards import UnitReader, unit_rewards

RAW = "reward_model"
"""Key of a turn's info that holds what the reward model said."""
OF_UNITS = "unit_rewards"
"""Key of a turn's info that holds what it said of each unit, as (place in the stream of its last token, reward)."""


class RewardScorer:
    """Adds a reward model's reward to the last turn of each episode: of a model that rewards units, their mean.

    Where the reward model has the policy's tokenizer and template, it reads the sampled tokens themselves. Otherwise
    the conversation is rendered for it; an answer that was cut off gets no end there either, so it is not taken for
    a whole one.
    """

    def __init__(self, source: RewardSource, policy: Policy) -> None:
        """`InputError` when `source` names no reward model, or one without the statistics that it should be scaled by."""
        self.source = source
        self.lock = threading.Lock()
        """Held while the reward model is in use: rollouts ahead of the learner are scored in another thread."""
        self.model = RewardModel(ModelRecipe(path=source.path, dtype=source.dtype), new_head=False)
        self.statistics = (0.0, 1.0)
        if source.normalize == "stored":
            stored = self.model.statistics
            if stored is None or not (math.isfinite(stored[0]) and 0 < stored[1] < math.inf):
                kept = "no mean and standard deviation" if stored is None else "the mean {} and standard deviation {}"
                raise InputError(
                    f"reward.normalize: {source.path} keeps {kept.format(*stored or ())} of its rewards; train it with "
                    "validation rows, or use `running` or `none`"
                )
            self.statistics = stored
        own, others = self.model.tokenizer, policy.tokenizer
        self.same_tokens = _writing(own) == _writing(others)
        self.renderer = Renderer(own, self.model.end_tokens)
        units = self.model.units
        self.reader = None if units is None else UnitReader(self.model, units, source.tokens_per_batch)

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Score all that did not fail. A reward that is not a number fails the episode."""
        played = [e for e in episodes if e.outcome is not Outcome.FAILED and e.turns]
        with self.lock:
            scores = self.scores(played)
        for episode, raw in zip(played, scores, strict=True):
            if not math.isfinite(raw):
                episode.outcome, episode.failure = Outcome.FAILED, f"the reward model gave {raw}"
                continue
            last = episode.turns[-1]
            reward = scaled(raw, *self.statistics, self.source.clip if self.source.normalize != "running" else None)
            last.info = {**last.info, RAW: raw}
            last.reward += reward
            episode.streams[last.stream].rewards[last.stop - 1] += reward

    def scores(self, episodes: Sequence[Episode]) -> list[float]:
        """What the reward model says of each episode as a whole, unscaled; of units, it is kept with the last turn."""
        samples = [self._sample(episode) for episode in episodes]
        if self.reader is not None:
            key = "reward.tokens_per_batch"
            of_units = unit_rewards(self.model, self.reader, samples, self.source.tokens_per_batch, key)
            for episode, ends, values in zip(episodes, self.reader.ends(samples), of_units, strict=True):
                if self.same_tokens:
                    last = episode.turns[-1]
                    last.info = {**last.info, OF_UNITS: list(zip(ends.tolist(), values.tolist(), strict=True))}
            self.reader.forget()
            return [float(np.mean(values)) for values in of_units]
        forward = reward_forward(self.model)
        found: dict[int, float] = {}
        for group in pack(samples, self.source.tokens_per_batch, "reward.tokens_per_batch"):
            with torch.no_grad():
                rewards = forward([samples[i] for i in group])
            found |= dict(zip(group, rewards.cpu().tolist(), strict=True))
        return [found[i] for i in range(len(samples))]

    def _sample(self, episode: Episode) -> Sample:
        label = f"the episode of seed {episode.seed}, group {episode.group}"
        none = np.zeros(0, dtype=np.float32)
        if self.same_tokens:
            return Sample(_until_last_answer(episode), label, none)
        last = max(place for place, message in enumerate(episode.messages) if message["role"] == "assistant")
        # As the rows of its training were, whose answers end with the end token that its own template gives them.
        wanted: LossOn = "last_assistant" if self.reader is None else "assistant"
        rendered = render_conversation(self.renderer, episode.messages[: last + 1], wanted)[-1]
        if episode.turns[-1].stop_reason in CUT_OFF:
            rendered = rendered.cut(len(rendered.ids) - 1)
        answer = rendered.trained.copy()
        answer[-1] = True  # also where the template leaves nothing of an answer that was cut off
        return Sample(stream_of(rendered.ids, answer), label, none)


def _writing(tokenizer: Any) -> tuple[Any, ...]:
    """What makes two tokenizers write the same conversation with the same tokens."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return tokenizer.get_vocab(), model.get("merges"), tokenizer.chat_template, tokenizer.eos_token_id


def _until_last_answer(episode: Episode) -> Stream:
    """The stream of the last answer, its own tokens marked."""
    last = episode.turns[-1]
    stream = episode.streams[last.stream]
    return stream_of(stream.ids[: last.stop], stream.sampled[: last.stop])


@Factory
def open_scorer(source: RewardSource | None, policy: Policy) -> RewardScorer | None:
    """The scorer of the recipe; None where there is no reward model."""
    return RewardScorer(source, policy) if source is not None else None


def scaled(raw: float, mean: float, std: float, clip: float | None) -> float:
    """(raw - mean) / std, clipped to [-clip, clip]."""
    value = (raw - mean) / std
    return value if clip is None else min(max(value, -clip), clip)


class RunningStatistics:
    """Mean and standard deviation of the reward model's rewards in training so far (Welford 1962)."""

    def __init__(self, source: RewardSource | None) -> None:
        self.source = source
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    @property
    def active(self) -> bool:
        return self.source is not None and self.source.normalize == "running"

    def include(self, episodes: Sequence[Episode]) -> None:
        """Count the rewards of a step's episodes."""
        for episode in episodes if self.active else []:
            raw = episode.turns[-1].info.get(RAW)
            if raw is not None:
                self.count += 1
                shift = raw - self.mean
                self.mean += shift / self.count
                self.squares += shift * (raw - self.mean)

    def correction(self, info: dict[str, Any]) -> float:
        """What to add to a raw reward that was paid with `info`, so that it becomes the scaled one."""
        return self.scaled(info[RAW]) - info[RAW] if self.active and RAW in info else 0.0

    def scaled(self, raw: float) -> float:
        """`raw` by the mean and standard deviation so far."""
        assert self.source is not None
        if self.count < 2 or self.squares <= 0:
            return 0.0  # all rewards so far are alike, and none of them is better than the mean
        return scaled(raw, self.mean, math.sqrt(self.squares / (self.count - 1)), self.source.clip)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


@dataclass(frozen=True)
class _Tokenizer:
    """What a scorer asks of a policy."""

    tokenizer: object


class AnswerRewards:
    """A reward model that scores conversations as its training rendered them."""

    def __init__(self, path: str, tokens_per_batch: int = 4096) -> None:
        """InputError where `path` holds no reward model."""
        source = RewardSource(path=path, normalize="none", clip=None, tokens_per_batch=tokens_per_batch)
        try:
            tokenizer = load_tokenizer(ModelRecipe(path=path))
            self._scorer = RewardScorer(source, _Tokenizer(tokenizer))  # type: ignore[arg-type]
        except InputError as error:
            raise InputError(str(error).replace("model.path", "--model", 1)) from error
        # No policy sampled these answers, so there are no tokens but those of its own rendering.
        self._scorer.same_tokens = False
        kept = self._scorer.model.statistics
        usable = kept is not None and math.isfinite(kept[0]) and 0 < kept[1] < math.inf
        self.statistics: tuple[float, float] | None = kept if usable else None
        """Mean and standard deviation of its rewards that are kept with it, None without any."""

    def scores(self, conversations: Sequence[list[Message]], cut_off: Sequence[bool]) -> list[float]:
        """The raw reward of each conversation, which ends with an answer; `cut_off` ones get no end token."""
        return self._scorer.scores(
            [
                _episode(place, messages, cut)
                for place, (messages, cut) in enumerate(zip(conversations, cut_off, strict=True))
            ]
        )


def _episode(place: int, messages: list[Message], cut_off: bool) -> Episode:
    reason = StopReason.TURN_BUDGET if cut_off else StopReason.END_TOKEN
    turn = Turn(0, 0, 0, 0.0, reason, str(messages[-1]["content"]))
    return Episode(place, place, 0, 0, [], [turn], Outcome.TERMINATED, None, messages)
