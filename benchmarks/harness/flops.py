"""Closed-form counts of work: tokens, floating-point operations, and bytes of weights read.

A multiplication and an addition each count as one operation. Embedding, norms, softmax and recomputation (gradient
checkpointing) are not counted.
"""

from dataclasses import dataclass, replace

from posttrain.recipe.plan import ModelSizes


@dataclass(frozen=True)
class Tokens:
    """Tokens processed by a model."""

    count: float
    """Number of tokens."""
    pairs: float
    """Number of (query, key) pairs in causal attention, including each token with itself."""
    scored: float = 0.0
    """Tokens whose logits are computed."""


def rows_of(rows: float, length: float, scored: float) -> Tokens:
    """`rows` rows of `length` tokens each, with the logits of `scored` of them."""
    return Tokens(rows * length, rows * length * (length + 1) / 2, rows * scored)


def forward_flops(sizes: ModelSizes, tokens: Tokens) -> float:
    """Operations of a forward pass: 2 per active parameter and token, and 4 x layers x heads x head size per attention pair
    (products of queries with keys and of probabilities with values).

    Narayanan et al. 2021, arXiv 2104.04473, formula 3, with causal attention and
    only the active experts.
    """
    body = 2 * sizes.layers * sizes.active_layer * tokens.count
    attention = 4 * sizes.layers * sizes.heads * sizes.head_size * tokens.pairs
    return body + 2 * sizes.head * tokens.scored + attention


def training_flops(sizes: ModelSizes, tokens: Tokens, frozen: bool = False) -> float:
    """Operations of a forward and backward pass: three times those of a forward pass. `frozen` weights, beside which adapters
    are trained, have no gradient: their products count twice."""
    products = forward_flops(sizes, replace(tokens, pairs=0.0))
    return 3 * forward_flops(sizes, tokens) - (products if frozen else 0.0)


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
