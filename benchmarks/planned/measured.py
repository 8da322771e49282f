"""Speeds recorded in docs/results/speed.md, and predictions of the cost model for the same work."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from posttrain.planning.devices import DEVICES
from posttrain.planning.memory import ModelSizes
from posttrain.planning.placement import ALONE
from posttrain.planning.times import (
    decoding_seconds,
    forward_seconds,
    optimizer_seconds,
    prefill_seconds,
    step_seconds,
    training_seconds,
)
from posttrain.planning.work import Episodes, Tokens

SMOLLM2 = ModelSizes(134_515_008, 30, 576, 1536, 9, 3, 64, 49_152)
"""SmolLM2-135M."""
SMALL = ModelSizes(4_197_120, 4, 256, 768, 4, 2, 64, 4096)
"""The random Qwen3 of the benchmarks."""
HERE = DEVICES["epyc-zen5-2"]
PROMPT_SHARE = 0.35
"""Of the tokens of a row."""
PROMPTS = 130.0
"""Mean tokens of a prompt of the engine's job."""


@dataclass(frozen=True)
class Record:
    """A recorded speed."""

    what: str
    measured: float
    """In `unit`."""
    predict: Callable[[], float]
    unit: str = "tokens/s"
    fitted: bool = False
    """Whether a constant of the model was fitted to it, so that agreement is no evidence."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predict() / self.measured


def rows(count: float) -> Tokens:
    """Rows of lognormal length: median 140, sigma 0.635, answers trained."""
    mean = 140 * math.exp(0.635**2 / 2)
    return Tokens(count * mean, count * mean**2 * math.exp(0.635**2) / 2, count * mean * (1 - PROMPT_SHARE))


def pairs(count: float) -> Tokens:
    """Two such rows with one prompt, which is computed once."""
    two = rows(2 * count)
    return Tokens(two.count * (1 - PROMPT_SHARE / 2), two.pairs * (1 - PROMPT_SHARE**2 / 2), two.scored)


def sft(sizes: ModelSizes, width: int) -> float:
    """Tokens/s of updates on 8 rows."""
    return rows(8).count / _update(sizes, rows(8), width)


def reward(sizes: ModelSizes, width: int) -> float:
    """Tokens/s of updates of a reward model on 8 pairs; tokens of a prompt count for both sides."""
    both = pairs(8)
    return rows(16).count / _update(sizes, Tokens(both.count, both.pairs), width)


def dpo(sizes: ModelSizes, width: int) -> float:
    """Tokens/s of DPO's updates on 8 pairs, the reference model's pass included."""
    reference = forward_seconds(sizes, HERE, ALONE, pairs(8), width, 4096)
    return rows(16).count / (reference + _update(sizes, pairs(8), width))


def _update(sizes: ModelSizes, tokens: Tokens, width: int) -> float:
    learned = training_seconds(sizes, HERE, ALONE, tokens, width, 4096)
    return learned + optimizer_seconds(sizes.parameters, HERE, ALONE, width)


def rl(sizes: ModelSizes, width: int, reference: bool) -> float:
    """Tokens/s of steps of 4 groups of 4 answers; tokens of a prompt count for each answer."""
    episodes = Episodes(4, 4, 100, 65, longest_of(16))
    sampled = prefill_seconds(sizes, HERE, episodes.prefilled, width) + decoding_seconds(
        sizes, HERE, episodes, width, 64
    )
    checked = forward_seconds(sizes, HERE, ALONE, episodes.learned, width, 4096) if reference else 0.0
    return episodes.count * episodes.length / (sampled + checked + _update(sizes, episodes.learned, width))


def longest_of(answers: int) -> float:
    """Tokens of the longest of `answers` answers: the highest of their quantiles, at most 256."""
    return min(256.0, 48 * math.exp(0.8 * NormalDist().inv_cdf(1 - 0.5 / answers)))


def engine(in_flight: int, reused: float, width: int) -> float:
    """Sampled tokens/s of a job of twice as many requests as are in flight, with the measured share of reused prompts."""
    answers = Episodes(2 * in_flight, 1, PROMPTS, 64, longest_of(2 * in_flight))
    read = answers.count * PROMPTS * (1 - reused)
    prompts = prefill_seconds(SMOLLM2, HERE, Tokens(read, read * PROMPTS / 2, answers.count), width)
    sampled = decoding_seconds(SMOLLM2, HERE, answers, width, in_flight)
    return answers.count * answers.answer / (prompts + sampled)


RECORDS = [
    Record("SFT, SmolLM2, bfloat16", 676, lambda: sft(SMOLLM2, 2), fitted=True),
    Record("SFT, SmolLM2, float32", 361, lambda: sft(SMOLLM2, 4)),
    Record(
        "decoding step, SmolLM2, bfloat16, 30 in flight",
        30,
        lambda: 1e3 * step_seconds(SMOLLM2, HERE, 30, 150, 2),
        "ms",
        True,
    ),
    Record("engine, SmolLM2, bfloat16, 8 in flight", 281, lambda: engine(8, 0.208, 2)),
    Record("engine, SmolLM2, bfloat16, 8 in flight, groups of 8", 327, lambda: engine(8, 0.858, 2)),
    Record("engine, SmolLM2, bfloat16, 32 in flight", 487, lambda: engine(32, 0.191, 2)),
    Record("engine, SmolLM2, bfloat16, 32 in flight, groups of 8", 687, lambda: engine(32, 0.888, 2)),
    Record("engine, SmolLM2, bfloat16, 128 in flight", 625, lambda: engine(128, 0.186, 2)),
    Record("engine, SmolLM2, bfloat16, 128 in flight, groups of 8", 950, lambda: engine(128, 0.962, 2)),
    Record("engine, SmolLM2, float32, 8 in flight", 178, lambda: engine(8, 0.208, 4)),
    Record("engine, SmolLM2, float32, 32 in flight", 317, lambda: engine(32, 0.191, 4)),
    Record("SFT, small Qwen3, bfloat16", 9889, lambda: sft(SMALL, 2)),
    Record("SFT, small Qwen3, float32", 7576, lambda: sft(SMALL, 4)),
    Record("reward, small Qwen3, bfloat16", 11902, lambda: reward(SMALL, 2)),
    Record("reward, small Qwen3, float32", 11355, lambda: reward(SMALL, 4)),
    Record("DPO, small Qwen3, bfloat16", 8503, lambda: dpo(SMALL, 2)),
    Record("DPO, small Qwen3, float32", 7294, lambda: dpo(SMALL, 4)),
    Record("RLOO step, small Qwen3, bfloat16", 4870, lambda: rl(SMALL, 2, reference=True)),
    Record("RLOO step, small Qwen3, float32", 4221, lambda: rl(SMALL, 4, reference=True)),
    Record("GRPO step, small Qwen3, bfloat16", 5204, lambda: rl(SMALL, 2, reference=False)),
    Record("GRPO step, small Qwen3, float32", 4596, lambda: rl(SMALL, 4, reference=False)),
]
"""SmolLM2 has 135 million parameters, the small Qwen3 4."""
