"""Rewards of episodes from a reward model, which reads the sampled tokens."""

import json
import math
import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from posttrain.data.messages import Message
from posttrain.data.rendering import LossOn, Renderer, render_conversation
from posttrain.episode import CUT_OFF, Episode, Outcome, StopReason, Turn
from posttrain.errors import InputError, naming
from posttrain.models.load import load_tokenizer
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel, vocabulary
from posttrain.recipe.components import Factory
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.training.controllers import RAW, scaled
from posttrain.training.objectives import reward_forward
from posttrain.training.rows import stream_of
from posttrain.training.unit_rewards import UnitReader, unit_rewards
from posttrain.training.updater import Sample, in_batches

OF_UNITS = "unit_rewards"
"""Key of the rewards of units in a turn's info, as (position of the unit's last token in the stream, reward)."""


class RewardScorer:
    """Adds a reward model's reward to the last turn of each episode. For a model that rewards units, it is their mean.

    A reward model with the policy's tokenizer and template reads the sampled tokens themselves. Otherwise the
    conversation is rendered for it. An answer that was cut off gets no end token in this rendering either.
    """

    def __init__(
        self,
        source: RewardSource,
        tokenizer: Any,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        key: str = "reward.path",
    ) -> None:
        """Load the model. `tokenizer`: the policy's. Raises InputError, which names `key`, if `source` is not a reward model,
        or lacks the statistics for `normalize: stored`."""
        self.source = source
        self.lock = threading.Lock()
        """Held while the reward model is in use: with async rollouts, another thread scores episodes."""
        with naming(path=key):
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
        self.same_tokens = render_alike(self.model.tokenizer, tokenizer)
        self.renderer = Renderer(self.model.tokenizer, self.model.end_tokens)
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
        samples, budget = [self._sample(episode) for episode in episodes], self.source.tokens_per_batch
        key = "reward.tokens_per_batch"
        if self.reader is not None:
            rewards_by_unit = unit_rewards(self.model, self.reader, samples, budget, key)
            for episode, ends, values in zip(episodes, self.reader.ends(samples), rewards_by_unit, strict=True):
                if self.same_tokens:
                    last = episode.turns[-1]
                    last.info = {**last.info, OF_UNITS: list(zip(ends.tolist(), values.tolist(), strict=True))}
            self.reader.forget()
            return [float(np.mean(values)) for values in rewards_by_unit]
        forward = reward_forward(self.model)
        return in_batches(samples, budget, key, lambda batch: forward(batch).cpu().tolist())

    def _sample(self, episode: Episode) -> Sample:
        label = f"the episode of seed {episode.seed}, group {episode.group}"
        none = np.zeros(0, dtype=np.float32)
        if self.same_tokens:  # up to the end of the last answer
            turn = episode.turns[-1]
            stream = episode.streams[turn.stream]
            return Sample(stream_of(stream.ids[: turn.stop], stream.sampled[: turn.stop]), label, none)
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


@Factory
def open_scorer(source: RewardSource | None, policy: Policy) -> RewardScorer | None:
    """The scorer of `reward`; None without a reward model."""
    return RewardScorer(source, policy.tokenizer, policy.recipe.device) if source is not None else None


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
        with naming(path="--model", device="--device"):
            self._scorer = RewardScorer(source, load_tokenizer(ModelRecipe(path=path)), device, "--model")
        # No policy sampled these answers, so the conversations are always rendered.
        self._scorer.same_tokens = False
        stored = self._scorer.model.statistics
        usable = stored is not None and math.isfinite(stored[0]) and 0 < stored[1] < math.inf
        self.statistics: tuple[float, float] | None = stored if usable else None
        """Mean and standard deviation of rewards that are stored with the model; None if it has none."""

    def scores(self, conversations: Sequence[list[Message]], cut_off: Sequence[bool]) -> list[float]:
        """The raw reward of each conversation, which ends with an answer. Answers marked `cut_off` get no end token."""
        episodes = []
        for place, (messages, cut) in enumerate(zip(conversations, cut_off, strict=True)):
            reason = StopReason.TURN_BUDGET if cut else StopReason.END_TOKEN
            turn = Turn(0, 0, 0, 0.0, reason, str(messages[-1]["content"]))
            episodes.append(Episode(place, place, 0, 0, [], [turn], Outcome.TERMINATED, None, messages))
        return self._scorer.scores(episodes)
