"""Seeded rows of made-up chat whose lengths are spread as real ones are: lognormal, in tokens of the model at hand."""

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from posttrain.seeds import random_stream

_TEXT = (
    "time people way day thing world life hand part place week case point company number group problem fact water money "
    "story month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city community name team minute idea body back parent face others level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force answer "
    "carry walk leave count divide open write think because before after while under between across without enough"
)
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of lengths in tokens."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    cap: int

    def draw(self, count: int, random: np.random.Generator, low: int = 1) -> list[int]:
        """`count` lengths in random order: the quantiles at (i + 1/2) / count, so every draw has the same sum."""
        quantiles = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
        lengths = [min(self.cap, max(low, round(self.median * float(np.exp(self.sigma * q))))) for q in quantiles]
        return [lengths[i] for i in random.permutation(count)]


ROWS = Lengths(median=140, sigma=0.635, cap=1000)
"""Whole conversations: mean 171, 95th percentile 398."""
ANSWERS = Lengths(median=48, sigma=0.8, cap=256)
"""Sampled answers: mean 65."""
PROMPT_SHARE = 0.35
"""Of a row's tokens; the rest is the answer."""


class Writer:
    """Makes texts of a wanted number of tokens of one tokenizer."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random_stream(seed, "benchmark rows")
        self._costs = np.array([len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) for word in WORDS])

    def text(self, tokens: int) -> str:
        """Random words of about `tokens` tokens; one word at least."""
        chosen = self.random.integers(len(WORDS), size=max(1, tokens))
        fits = int(np.searchsorted(np.cumsum(self._costs[chosen]), tokens, side="right"))
        return " ".join(WORDS[i] for i in chosen[: max(1, fits)])

    @cached_property
    def frame(self) -> int:
        """Tokens that the chat template spends on a conversation of two empty messages."""
        empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
        return len(self.tokenizer.apply_chat_template(empty, return_dict=True)["input_ids"])

    def conversation(self, total: int) -> dict[str, Any]:
        """A row with prompt and completion, `total` tokens in all."""
        inside = max(4, total - self.frame)
        prompt = max(2, round(PROMPT_SHARE * inside))
        return {
            "prompt": _said("user", self.text(prompt)),
            "completion": _said("assistant", self.text(inside - prompt)),
        }


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def chat_rows(tokenizer: Any, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations for supervised fine-tuning, as `prompt` and `completion`."""
    writer = Writer(tokenizer, seed)
    return [writer.conversation(total) for total in ROWS.draw(count, writer.random, low=writer.frame + 4)]


def preference_rows(tokenizer: Any, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs: one prompt, two answers whose lengths are spread independently."""
    writer = Writer(tokenizer, seed)
    rows = []
    for total, other in zip(
        ROWS.draw(count, writer.random, low=writer.frame + 4),
        ROWS.draw(count, writer.random, low=writer.frame + 4),
        strict=True,
    ):
        row = writer.conversation(total)
        rejected = writer.text(max(2, round((1 - PROMPT_SHARE) * (other - writer.frame))))
        rows.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": _said("assistant", rejected)})
    return rows


def prompt_rows(tokenizer: Any, count: int, seed: int = 0, low: int = 40, high: int = 160) -> list[dict[str, Any]]:
    """Prompts of `low` to `high` tokens, uniformly."""
    writer = Writer(tokenizer, seed)
    sizes = [int(writer.random.integers(low, high + 1)) for _ in range(count)]
    return [{"prompt": _said("user", writer.text(max(2, size - writer.frame)))} for size in sizes]


def answer_lengths(step: int, count: int, lengths: Lengths = ANSWERS, seed: int = 0) -> list[int]:
    """Tokens that the `count` answers sampled in step `step` have, the same on every side."""
    return lengths.draw(count, random_stream(seed, "benchmark answers", step))
