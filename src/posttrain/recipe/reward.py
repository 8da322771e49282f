"""Rewards that come from a model."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part


class RewardSource(Part):
    """A reward model scores the conversation at its end; its reward is added to the last turn's."""

    path: str
    """A hub id or directory of a reward model: `posttrain reward` exports one, and others load as
    `AutoModelForSequenceClassification(num_labels=1)`. In a pipeline, `stage:NAME`."""
    normalise: Literal["stored", "running", "none"] = "stored"
    """`stored`: (r - mean) / std with the statistics kept with the model. `running`: with those of all training
    rewards so far, for credit alone; what is shown and evaluated stays raw. `none`: as the model says."""
    clip: float | None = Field(10.0, gt=0)
    """Rewards are clipped to [-clip, clip] after normalisation; null is off."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of its weights."""
    tokens_per_batch: int = Field(4096, ge=16)
    """Most tokens in one of its forward passes."""
