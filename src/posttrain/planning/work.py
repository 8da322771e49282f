"""Closed-form counts of the work in a phase: tokens, floating-point operations, bytes read and bytes sent.

A multiplication and an addition each count as one operation. Embedding, norms, softmax and recomputation (gradient
checkpointing) are not counted.
"""

import math
from dataclasses import dataclass, replace

from posttrain.planning.memory import ModelSizes


@dataclass(frozen=True)
class Tokens:
    """Tokens processed by a model."""

    count: float
    """Number of tokens."""
    pairs: float
    """Number of (query, key) pairs in causal attention, including each token with itself."""
    scored: float = 0.0
    """Tokens whose logits are computed."""

    def __mul__(self, times: float) -> "Tokens":
        return Tokens(times * self.count, times * self.pairs, times * self.scored)


@dataclass(frozen=True)
class Episodes:
    """Episodes of a step: `groups` groups of `size` episodes that share a prompt. Lengths are mean tokens per episode."""

    groups: int
    size: int
    prompt: float
    answer: float
    """Sampled tokens of an episode, over all turns."""
    longest: float
    """Sampled tokens of the longest episode."""
    observed: float = 0.0
    """Tokens of later observations."""

    @property
    def count(self) -> int:
        return self.groups * self.size

    @property
    def length(self) -> float:
        """Tokens of an episode."""
        return self.prompt + self.observed + self.answer

    def share(self, engines: int) -> "Episodes":
        """The share of the busiest of `engines` engines: whole groups if there are enough, otherwise parts of a group."""
        groups = math.ceil(self.groups / engines)
        return replace(self, groups=groups, size=math.ceil(self.count / engines / groups))

    @property
    def learned(self) -> Tokens:
        """Tokens processed by the learner: prompts once per group, logits of sampled tokens only."""
        later = self.observed + self.answer
        return Tokens(
            self.groups * self.prompt + self.count * later,
            self.groups * _triangle(self.prompt) + self.count * (later * self.prompt + _triangle(later)),
            self.count * self.answer,
        )

    @property
    def prefilled(self) -> Tokens:
        """Tokens of prefill: prompts once per group, observations, and one row of logits per episode.

        On average, an observation attends to half of the sampled tokens of its episode.
        """
        seen = self.observed * (self.prompt + self.answer / 2) + _triangle(self.observed)
        return Tokens(
            self.groups * self.prompt + self.count * self.observed,
            self.groups * _triangle(self.prompt) + self.count * seen,
            self.count,
        )

    @property
    def whole(self) -> Tokens:
        """Tokens processed by a reward model: every episode separately, without logits."""
        return Tokens(self.count * self.length, self.count * _triangle(self.length))


def _triangle(length: float) -> float:
    return length * (length + 1) / 2


def rows_of(rows: float, length: float, scored: float) -> Tokens:
    """`rows` rows of `length` tokens each, with the logits of `scored` of them."""
    return Tokens(rows * length, rows * _triangle(length), rows * scored)


def forward_flops(sizes: ModelSizes, tokens: Tokens) -> float:
    """Operations of a forward pass: 2 per active parameter and token, and 4 x layers x heads x head size per attention pair
    (products of queries with keys and of probabilities with values).

    Narayanan et al. 2021, arXiv 2104.04473, formula 3, with causal attention and
    only the active experts.
    """
    body = 2 * sizes.layers * sizes.active_layer * tokens.count
    attention = 4 * sizes.layers * sizes.heads * sizes.head_size * tokens.pairs
    return body + 2 * sizes.head * tokens.scored + attention


def training_flops(sizes: ModelSizes, tokens: Tokens, whole: bool = True) -> float:
    """Operations of a forward and backward pass: three times those of a forward pass, or twice if only adapters are trained
    (`whole=False`), because gradients of frozen weights are not computed."""
    return (3 if whole else 2) * forward_flops(sizes, tokens)


def touched_experts(sizes: ModelSizes, tokens: float) -> float:
    """Expected number of experts of a layer used by at least one of `tokens` tokens: E (1 - (1 - k/E)^tokens).

    Assumes uniform routing.
    """
    if not sizes.experts:
        return 0.0
    return sizes.experts * (1 - (1 - sizes.experts_per_token / sizes.experts) ** tokens)


def read_weights(sizes: ModelSizes, width: int, tokens: float) -> float:
    """Minimum bytes of weights read by one pass over `tokens` tokens: layers, used experts, and output projection."""
    layer = sizes.shared_layer + touched_experts(sizes, tokens) * sizes.expert
    return width * (sizes.layers * layer + sizes.head)


def reduced_bytes(sizes: ModelSizes, width: int, tokens: float, devices: int) -> float:
    """Bytes that each of `devices` tensor-parallel devices sends.

    Two ring all-reduces per layer: 2 (t - 1) / t x tokens x hidden numbers (Shoeybi et al. 2019, arXiv 1909.08053).
    """
    return 4 * (devices - 1) / devices * sizes.layers * tokens * sizes.hidden * width


def gathered_bytes(sizes: ModelSizes, width: int, devices: int, expert_parallel: int = 1) -> float:
    """Bytes that a device receives in one all-gather of weights sharded over n = `devices` devices: (n - 1) / n of them.

    With expert parallelism, a device gathers only its own experts, over n / expert_parallel devices.
    """
    shared = (devices - 1) / devices * (sizes.layers * sizes.shared_layer + 2 * sizes.head)
    copies = devices // expert_parallel
    experts = (copies - 1) / copies * sizes.layers * sizes.experts * sizes.expert / expert_parallel
    return width * (shared + experts)


def moved_tokens_bytes(sizes: ModelSizes, width: int, tokens: float, devices: int) -> float:
    """Bytes that a device sends in all layers to dispatch its `tokens` to experts on `devices` devices and combine them."""
    return 2 * (devices - 1) / devices * sizes.layers * tokens * sizes.experts_per_token * sizes.hidden * width


def decoding_steps(answers: float, slots: int, mean: float, longest: float) -> tuple[float, float, float]:
    """(full steps, tail steps, mean active rows in the tail) to decode `answers` answers in `slots` slots.

    Slots are refilled until the queue is empty. In the tail, the answers in flight, of `mean` tokens on average, finish
    one by one until the longest ends. The first token of an answer counts like the others.
    """
    rows = min(answers, slots)
    full = max(0.0, answers / rows - 1) * mean
    return full, longest, rows * mean / longest
