"""Rewards of episodes: from a reward model on the sampled tokens, and their shaping before credit."""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from posttrain.credit.assign import reward_streams
from posttrain.data.messages import Message
from posttrain.data.rendering import LossOn, Renderer, render_conversation
from posttrain.episode import CUT_OFF, Episode, Outcome, PerToken, RewardStreams, StopReason, Stream, Turn
from posttrain.errors import InputError
from posttrain.losses.kl import apply_kl_penalty, estimate_kl
from posttrain.models.load import load_tokenizer
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel, vocabulary
from posttrain.recipe.components import Factory
from posttrain.recipe.loss import KlRecipe
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.rollout.filters import overlong_penalty
from posttrain.training.objectives import reward_forward
from posttrain.training.rows import stream_of
from posttrain.training.unit_rewards import UnitReader, unit_rewards
from posttrain.training.updater import Sample, pack

RAW = "reward_model"
"""Key of the reward model's unscaled reward in a turn's info."""
OF_UNITS = "unit_rewards"
"""Key of the rewards of units in a turn's info, as (position of the unit's last token in the stream, reward)."""


class RewardScorer:
    """Adds a reward model's reward to the last turn of each episode. For a model that rewards units, it is their mean.

    A reward model with the policy's tokenizer and template reads the sampled tokens themselves. Otherwise the
    conversation is rendered for it. An answer that was cut off gets no end token in this rendering either.
    """

    def __init__(self, source: RewardSource, policy: Policy, device: Literal["auto", "cpu", "cuda"] = "auto") -> None:
        """Load the model. Raises InputError if `source` is not a reward model, or lacks the statistics for `normalize:
        stored`.
        """
        self.source = source
        self.lock = threading.Lock()
        """Held while the reward model is in use: with async rollouts, another thread scores episodes."""
        self.model = RewardModel(ModelRecipe(path=source.path, dtype=source.dtype, device=device), new_head=False)
        self.statistics = (0.0, 1.0)
        if source.normalize == "stored":
            stored = self.model.statistics
            if stored is None or not (math.isfinite(stored[0]) and 0 < stored[1] < math.inf):
                kept = "no mean and standard deviation" if stored is None else "the mean {} and standard deviation {}"
                raise InputError(
                    f"reward.normalize: {source.path} stores {kept.format(*stored or ())} of its rewards; train it with "
                    "validation rows, or use `running` or `none`"
                )
            self.statistics = stored
        tokenizer = self.model.tokenizer
        self.same_tokens = render_alike(tokenizer, policy.tokenizer)
        self.renderer = Renderer(tokenizer, self.model.end_tokens)
        units = self.model.units
        self.reader = None if units is None else UnitReader(self.model, units, source.tokens_per_batch)

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Score the episodes that did not fail. A reward that is not finite fails the episode."""
        played = [e for e in episodes if e.outcome is not Outcome.FAILED and e.turns]
        with self.lock:
            scores = self.scores(played)
        for episode, raw in zip(played, scores, strict=True):
            if not math.isfinite(raw):
                episode.outcome, episode.failure = Outcome.FAILED, f"the reward model gave {raw}"
                continue
            if episode.outcome is Outcome.UNSCORED:  # by the environment
                episode.outcome = Outcome.TERMINATED
            last = episode.turns[-1]
            reward = scaled(raw, *self.statistics, self.source.clip if self.source.normalize != "running" else None)
            last.info = {**last.info, RAW: raw}
            last.reward += reward
            episode.streams[last.stream].rewards[last.stop - 1] += reward

    def scores(self, episodes: Sequence[Episode]) -> list[float]:
        """The unscaled reward of each episode. Rewards of units are also stored in the last turn's info."""
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
        rewards_of: dict[int, float] = {}
        for group in pack(samples, self.source.tokens_per_batch, "reward.tokens_per_batch"):
            with torch.no_grad():
                rewards = forward([samples[i] for i in group])
            rewards_of |= dict(zip(group, rewards.cpu().tolist(), strict=True))
        return [rewards_of[i] for i in range(len(samples))]

    def _sample(self, episode: Episode) -> Sample:
        label = f"the episode of seed {episode.seed}, group {episode.group}"
        none = np.zeros(0, dtype=np.float32)
        if self.same_tokens:
            return Sample(_until_last_answer(episode), label, none)
        last = max(place for place, message in enumerate(episode.messages) if message["role"] == "assistant")
        # Render as for its training rows, whose answers end with the end token of its template.
        wanted: LossOn = "last_assistant" if self.reader is None else "assistant"
        rendered = render_conversation(self.renderer, episode.messages[: last + 1], wanted)[-1]
        if episode.turns[-1].stop_reason in CUT_OFF:
            rendered = rendered.cut(len(rendered.ids) - 1)
        answer = rendered.trained.copy()
        answer[-1] = True  # even if the template drops all tokens of an answer that was cut off
        return Sample(stream_of(rendered.ids, answer), label, none)


def render_alike(one: Any, other: Any) -> bool:
    """Whether two tokenizers render every conversation to the same tokens."""

    def writing(tokenizer: Any) -> tuple[Any, ...]:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        return vocabulary(tokenizer), model.get("merges"), tokenizer.chat_template, tokenizer.eos_token_id

    return writing(one) == writing(other)


def _until_last_answer(episode: Episode) -> Stream:
    """The stream up to the end of the last answer, with the tokens of this answer marked as sampled."""
    last = episode.turns[-1]
    stream = episode.streams[last.stream]
    return stream_of(stream.ids[: last.stop], stream.sampled[: last.stop])


@Factory
def open_scorer(source: RewardSource | None, policy: Policy) -> RewardScorer | None:
    """The scorer of `reward`; None without a reward model."""
    return RewardScorer(source, policy, policy.recipe.device) if source is not None else None


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
        """The value to add to the raw reward of a turn with `info` to get the scaled reward."""
        return self.scaled(info[RAW]) - info[RAW] if self.active and RAW in info else 0.0

    def scaled(self, raw: float) -> float:
        """`raw` normalized by the mean and standard deviation so far."""
        assert self.source is not None
        if self.count < 2 or self.squares <= 0:
            return 0.0  # all rewards so far are equal
        return scaled(raw, self.mean, math.sqrt(self.squares / (self.count - 1)), self.source.clip)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


@dataclass(frozen=True)
class RewardShaping:
    """Turns the rewards of episodes into reward streams: normalization, penalties for length, KL."""

    rollout: RolloutRecipe
    kl: KlRecipe
    running: RunningStatistics
    """Statistics of the reward model's rewards, for `reward.normalize: running`."""
    teacher_coefficient: float = 0.0
    """Reward per nat of log teacher - log policy at each sampled token; 0 without a teacher."""

    def shape(self, episodes: Sequence[Episode], samples: Sequence[Sample], kl_coefficient: float) -> RewardStreams:
        """Reward streams of `episodes`. The `samples` need `ref_logprobs` if the KL penalty is in the reward, and the
        teacher's scores if a teacher is.
        """
        rewards = reward_streams(episodes)
        for episode, streams in zip(episodes, rewards.values, strict=True):
            last = episode.turns[-1]
            end = streams[last.stream][last.stop - 1 : last.stop]
            end += self.running.correction(last.info)
            if last.stop_reason in CUT_OFF:
                end -= self.rollout.missing_eos_penalty
            if self.rollout.overlong_penalty is not None:
                end += overlong_penalty(episode.sampled_tokens, self.rollout.overlong_penalty)
        if kl_coefficient > 0 and self.kl.apply_to == "reward":
            references = [sample.ref_logprobs for sample in samples]
            kl = _per_token(episodes, references, lambda difference: estimate_kl(self.kl.estimator_in_use, difference))
            rewards = apply_kl_penalty(rewards, kl, kl_coefficient)
        if self.teacher_coefficient > 0:
            teacher_logprobs = [None if sample.teacher is None else sample.teacher.logprobs for sample in samples]
            # In the reward, only k1 has the gradient of the divergence as its expected gradient.
            rewards = apply_kl_penalty(
                rewards, _per_token(episodes, teacher_logprobs, lambda d: d), self.teacher_coefficient
            )
        return rewards

    def of_greedy(self, greedy: Mapping[int, Episode]) -> dict[int, float]:
        """Group -> return of its greedy episode, in the units of the shaped rewards."""
        return {
            group: episode.total_reward + self.running.correction(episode.turns[-1].info)
            for group, episode in greedy.items()
        }


def _per_token(
    episodes: Sequence[Episode],
    others: Sequence[np.ndarray | None],
    estimate: Callable[[np.ndarray], np.ndarray],
) -> PerToken:
    """`estimate` of log policy - log other at each sampled token, zero elsewhere. `others`: [n] per stream, in
    order.
    """
    remaining = iter(others)
    estimates: PerToken = []
    for episode in episodes:
        estimates.append([np.zeros(len(stream), dtype=np.float32) for stream in episode.streams])
        for stream, values in zip(episode.streams, estimates[-1], strict=True):
            other = next(remaining)
            assert other is not None
            values[stream.sampled] = estimate(stream.rollout_logprobs[stream.sampled] - other)
    return estimates


@dataclass(frozen=True)
class _Tokenizer:
    """The part of a policy that a scorer uses."""

    tokenizer: object


class AnswerRewards:
    """A reward model that scores conversations, rendered as in its training."""

    def __init__(
        self,
        path: str,
        tokens_per_batch: int = 4096,
        dtype: Literal["float32", "bfloat16", "auto"] = "float32",
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> None:
        """InputError if there is no reward model at `path`."""
        source = RewardSource(path=path, normalize="none", clip=None, dtype=dtype, tokens_per_batch=tokens_per_batch)
        try:
            tokenizer = load_tokenizer(ModelRecipe(path=path))
            self._scorer = RewardScorer(source, _Tokenizer(tokenizer), device)  # type: ignore[arg-type]
        except InputError as error:
            message = str(error).replace("model.path", "--model", 1).replace("model.device", "--device")
            raise InputError(message) from error
        # No policy sampled these answers, so the conversations are always rendered.
        self._scorer.same_tokens = False
        stored = self._scorer.model.statistics
        usable = stored is not None and math.isfinite(stored[0]) and 0 < stored[1] < math.inf
        self.statistics: tuple[float, float] | None = stored if usable else None
        """Mean and standard deviation of rewards that are stored with the model; None if it has none."""

    def scores(self, conversations: Sequence[list[Message]], cut_off: Sequence[bool]) -> list[float]:
        """The raw reward of each conversation, which ends with an answer. Answers marked `cut_off` get no end token."""
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
