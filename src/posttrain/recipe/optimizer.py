"""The optimizer and the batches it sees."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part


class OptimizerRecipe(Part):
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: float = Field(1e-5, gt=0)
    """Learning rate after warm-up, per update."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the running mean of the gradient and of its square, per update."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the running square."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW: share of a weight removed per update, times the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, over all updates of the run."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the learning rate left at the end of `linear` and `cosine`."""
    max_gradient_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    max_skipped_updates: int = Field(3, ge=0)
    """Updates in a row that may be skipped for a non-finite loss or gradient; one more stops the run."""


class LearnerRecipe(Part):
    """How a batch becomes optimizer steps."""

    tokens_per_batch: int = Field(4096, ge=16)
    """The memory dial: most tokens in one forward pass. A longer stream is an error, never cut."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps on each step's episodes; whole groups are divided among them."""
    passes: int = Field(1, ge=1)
    """Times that each step's episodes are gone through (PPO epochs)."""
    logits_per_chunk: int = Field(512, ge=1)
    """Positions whose logits exist at one time when log-probabilities are computed."""
