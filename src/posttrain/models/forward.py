"""Forward passes over packed streams, and log-probabilities without full logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.models.attention import Layout
from posttrain.models.projection import projected_scores


def transformer(model: torch.nn.Module) -> Any:
    """The transformers model inside `model`, with adapters in place if it has any."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def hidden_states(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Last hidden states [T, hidden] of a row of tokens: `ids` and `positions` are [T] int64."""
    inner = transformer(model)
    decoder = getattr(inner, inner.base_model_prefix)
    output = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    return output.last_hidden_state[0]


def logits_of(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, vocabulary] in float32 of hidden states [N, hidden], with the model's own scale and soft cap."""
    inner = transformer(model)
    logits = inner.get_output_embeddings()(hidden).float()
    config = inner.config
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


@dataclass(frozen=True)
class TokenScores:
    """What a model thinks of N tokens: `logprobs` [N] and `entropies` [N], float32, in nats."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    values: torch.Tensor | None = None
    """[N] float32: the value before each token is sampled, in units of reward, where a head reads it."""

    def at(self, places: torch.Tensor) -> "TokenScores":
        """Those of the tokens at `places` [n] int64 alone."""
        values = None if self.values is None else self.values[places]
        return TokenScores(self.logprobs[places], self.entropies[places], values)


def token_scores(
    model: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, positions_per_chunk: int
) -> TokenScores:
    """Log-probability of each target and entropy of the distribution it was drawn from.

    `hidden` [N, hidden] are the states that predict `targets` [N]; the distribution is softmax(logits / temperature),
    as in sampling (temperature 0, greedy, scores at 1). Logits exist for `positions_per_chunk` positions at a time:
    a chunk's logits are dropped after use and computed again in the backward pass.
    """
    divisor = temperature if temperature > 0 else 1.0
    if not len(targets):
        return TokenScores(hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32))
    plain = _plain_projection(model)
    if plain is not None:
        weight, scale = plain
        elements = positions_per_chunk * len(weight)
        return TokenScores(*projected_scores(hidden, weight, targets, divisor / scale, elements))

    def score(chunk: torch.Tensor, chunk_targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits_of(model, chunk) / divisor, dim=-1)
        chosen = logprobs.gather(1, chunk_targets[:, None])[:, 0]
        return chosen, -(logprobs.exp() * logprobs).sum(-1)

    parts = []
    for start in range(0, len(targets), positions_per_chunk):
        chunk = hidden[start : start + positions_per_chunk]
        chunk_targets = targets[start : start + positions_per_chunk]
        if torch.is_grad_enabled():
            parts.append(checkpoint(score, chunk, chunk_targets, use_reentrant=False))
        else:
            parts.append(score(chunk, chunk_targets))
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _plain_projection(model: torch.nn.Module) -> tuple[torch.Tensor, float] | None:
    """Weight [vocabulary, hidden] and scale, where logits are nothing but their product with the hidden states."""
    inner = transformer(model)
    head, config = inner.get_output_embeddings(), inner.config
    hooked = head._forward_hooks or head._forward_pre_hooks
    if type(head) is not torch.nn.Linear or head.bias is not None or hooked:
        return None
    if getattr(config, "final_logit_softcapping", None):
        return None
    return head.weight, (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
