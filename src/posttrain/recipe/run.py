"""Where a run lives, what it records, and when it stops itself."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part


class CheckpointRecipe(Part):
    """When the state is saved."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints; one is always written at the end and on Ctrl-C or SIGTERM."""
    keep: int = Field(2, ge=1)
    """Latest checkpoints kept; the best one on evaluation is kept besides."""


class GuardRecipe(Part):
    """What counts as collapse. A guard fires after `patience` steps in a row beyond its threshold."""

    action: Literal["warn", "stop"] = "warn"
    """`stop` ends the run, keeps the last good checkpoint, and says so."""
    patience: int = Field(5, ge=1)
    """Steps in a row beyond a threshold before the guard fires."""
    min_reward_spread: float | None = Field(None, ge=0)
    """Mean in-group standard deviation of returns below this."""
    min_entropy: float | None = Field(None, ge=0)
    """Mean entropy of the policy at sampled tokens, in nats, below this."""
    max_gradient_norm: float | None = Field(None, gt=0)
    """Gradient norm before clipping above this."""
    max_repeated_share: float | None = Field(0.8, gt=0, le=1)
    """Share of sampled tokens equal to the token before them above this."""


SinkName = Literal["tensorboard", "wandb", "trackio"]
