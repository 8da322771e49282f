"""Rewards of written answers, from a file and not from a rollout, by a reward model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.rows import Message
from posttrain.errors import InputError
from posttrain.models.load import load_tokenizer
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.reward import RewardSource
from posttrain.rollout.streams import Episode, Outcome, StopReason, Turn
from posttrain.training.reward_scorer import RewardScorer


@dataclass(frozen=True)
class _Tokenizer:
    """What a scorer asks of a policy."""

    tokenizer: object


class AnswerRewards:
    """A reward model that scores conversations as its training rendered them."""

    def __init__(self, path: str, tokens_per_batch: int = 4096) -> None:
        """InputError where `path` holds no reward model."""
        source = RewardSource(path=path, normalise="none", clip=None, tokens_per_batch=tokens_per_batch)
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
