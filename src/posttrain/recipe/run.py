"""Where a run lives, what it records, and when it stops itself."""

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import EnvironmentRecipe, environment_recipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import EvaluationRecipe, SeedRange


class CheckpointRecipe(BaseConfig):
    """When the state is saved."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints; one is always written at the end and on Ctrl-C or SIGTERM."""
    keep: int = Field(2, ge=1)
    """Latest checkpoints kept; the best one on evaluation is kept besides."""


class GuardRecipe(BaseConfig):
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


class StageRecipe(BaseConfig):
    """A run of one stage."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its directory is `<runs>/<name>`."""
    runs: str = "runs"
    """Directory that holds the runs."""
    seed: int = Field(0, ge=0)
    """The run seed; every random number is derived from it by name."""
    model: ModelRecipe = ModelRecipe()
    sinks: list[SinkName] = []
    """Where metrics also go; `metrics.jsonl` is always written."""

    @property
    def remote(self) -> BaseConfig | None:
        """The engine, where a remote model answers, so that no model is loaded; None here."""
        return None


class PlayedRecipe(StageRecipe):
    """A stage that plays an environment."""

    environment: SerializeAsAny[EnvironmentRecipe] = Field(
        default_factory=lambda: environment_recipe({"type": "bandit"})
    )
    """The task; its keys depend on `environment.type`."""

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_by_type(cls, value: Any) -> Any:
        return environment_recipe(value) if isinstance(value, dict) else value


def refuse_overlap(key: str, seeds: SeedRange, evaluation: EvaluationRecipe) -> None:
    """Refuse training seeds that are evaluated on."""
    for name, held_out in (("seeds", evaluation.seeds), ("final_seeds", evaluation.final_seeds)):
        if seeds.overlaps(held_out):
            raise ValueError(
                f"`{key}` ({seeds}) and the held-out `evaluation.{name}` ({held_out}) overlap; move one `start`"
            )
