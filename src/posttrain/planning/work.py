"""What a phase has to compute: tokens, floating-point operations, and bytes that are read or sent. Closed forms.

An operation is a multiplication or an addition. Embedding, norms, softmax and whatever is computed a second time (such as
by gradient checkpointing) are no operations here.
"""

import math
from dataclasses import dataclass, replace

from posttrain.planning.memory import ModelSizes


@dataclass(frozen=True)
class Tokens:
    """Tokens that a model goes through."""

    count: float
    """Tokens."""
    pairs: float
    """Pairs of a token and one that it sees, itself included."""
    scored: float = 0.0
    """Tokens whose logits are computed."""

    def __mul__(self, times: float) -> "Tokens":
        return Tokens(times * self.count, times * self.pairs, times * self.scored)


@dataclass(frozen=True)
class Episodes:
    """What a step samples: `groups` of `size` episodes, which share the first `prompt` tokens. Lengths are means in tokens."""

    groups: int
    size: int
    prompt: float
    answer: float
    """Sampled in one episode, all turns together."""
    longest: float
    """Sampled in the longest episode."""
    observed: float = 0.0
    """What the environment says in an episode after the prompt."""

    @property
    def count(self) -> int:
        return self.groups * self.size

    @property
    def length(self) -> float:
        """Tokens of an episode."""
        return self.prompt + self.observed + self.answer

    def share(self, engines: int) -> "Episodes":
        """What the busiest of `engines` engines samples: whole groups where there are enough, else parts of a group."""
        groups = math.ceil(self.groups / engines)
        return replace(self, groups=groups, size=math.ceil(self.count / engines / groups))

    @property
    def learned(self) -> Tokens:
        """What the learner goes through: prompts once for each group, logits of what was sampled."""
        own = self.observed + self.answer
        return Tokens(
            self.groups * self.prompt + self.count * own,
            self.groups * _triangle(self.prompt) + self.count * (own * self.prompt + _triangle(own)),
            self.count * self.answer,
        )

    @property
    def prefilled(self) -> Tokens:
        """What the engine reads: prompts once for each group, observations, and one row of logits an episode.

        What an observation sees besides prompt and observations is, on average, half of what the episode samples.
        """
        seen = self.observed * (self.prompt + self.answer / 2) + _triangle(self.observed)
        return Tokens(
            self.groups * self.prompt + self.count * self.observed,
            self.groups * _triangle(self.prompt) + self.count * seen,
            self.count,
        )

    @property
    def whole(self) -> Tokens:
        """Every episode by itself, without logits, as a reward model reads it."""
        return Tokens(self.count * self.length, self.count * _triangle(self.length))


def _triangle(length: float) -> float:
    return length * (length + 1) / 2


def rows_of(rows: float, length: float, scored: float) -> Tokens:
    """`rows` rows of `length` tokens each, with the logits of `scored` of them."""
    return Tokens(rows * length, rows * _triangle(length), rows * scored)


def forward_flops(sizes: ModelSizes, tokens: Tokens) -> float:
    """Operations of a forward pass: 2 for each parameter that a token passes, and 4 x layers x heads x head size for each
    pair (two products of queries with keys and of probabilities with values).

    Narayanan et al. 2021, arXiv 2104.04473, formula 3, with attention counted over what is seen and the experts over
    those that a token passes.
    """
    body = 2 * sizes.layers * sizes.active_layer * tokens.count
    attention = 4 * sizes.layers * sizes.heads * sizes.head_size * tokens.pairs
    return body + 2 * sizes.head * tokens.scored + attention


def training_flops(sizes: ModelSizes, tokens: Tokens, whole: bool = True) -> float:
    """Operations of a forward and backward pass: three times those of a forward pass, or, unless the `whole` model is
    trained (adapters alone), twice, for the gradients of frozen weights are not computed."""
    return (3 if whole else 2) * forward_flops(sizes, tokens)


def touched_experts(sizes: ModelSizes, tokens: float) -> float:
    """Experts of a layer that at least one of `tokens` tokens passes, if each chooses evenly: E (1 - (1 - k/E)^tokens)."""
    if not sizes.experts:
        return 0.0
    return sizes.experts * (1 - (1 - sizes.experts_per_token / sizes.experts) ** tokens)


def read_weights(sizes: ModelSizes, width: int, tokens: float) -> float:
    """Bytes of weights that one pass over `tokens` tokens reads at least: those of the layers, of experts the ones that are
    touched, and of the output projection."""
    layer = sizes.shared_layer + touched_experts(sizes, tokens) * sizes.expert
    return width * (sizes.layers * layer + sizes.head)


def reduced_bytes(sizes: ModelSizes, width: int, tokens: float, devices: int) -> float:
    """Bytes that each of `devices` devices sends when tokens pass layers whose matrices are divided among them.

    Two sums a layer, each a ring: 2 (t - 1) / t x tokens x hidden numbers (Shoeybi et al. 2019, arXiv 1909.08053).
    """
    return 4 * (devices - 1) / devices * sizes.layers * tokens * sizes.hidden * width


def gathered_bytes(sizes: ModelSizes, width: int, devices: int, expert_parallel: int = 1) -> float:
    """Bytes that a device receives when weights divided over `devices` are put together once: (n - 1) / n of them.

    With experts divided over `expert_parallel` devices each gathers its own experts, over n / expert_parallel devices.
    """
    shared = (devices - 1) / devices * (sizes.layers * sizes.shared_layer + 2 * sizes.head)
    copies = devices // expert_parallel
    experts = (copies - 1) / copies * sizes.layers * sizes.experts * sizes.expert / expert_parallel
    return width * (shared + experts)


def moved_tokens_bytes(sizes: ModelSizes, width: int, tokens: float, devices: int) -> float:
    """Bytes that a device sends when its `tokens` go to their experts on `devices` devices and come back, all layers."""
    return 2 * (devices - 1) / devices * sizes.layers * tokens * sizes.experts_per_token * sizes.hidden * width


def decoding_steps(answers: float, slots: int, mean: float, longest: float) -> tuple[float, float, float]:
    """(steps with all rows busy, steps of the tail, mean rows busy in the tail) for `answers` answers in `slots` slots.

    Slots are refilled until no answer waits; then those in flight, of `mean` tokens on average, end one after another
    while the longest goes on. The first token of an answer comes with its prompt and counts like the others.
    """
    rows = min(answers, slots)
    full = max(0.0, answers / rows - 1) * mean
    return full, longest, rows * mean / longest
