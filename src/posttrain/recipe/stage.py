"""What the recipes of all stages share."""

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator

from posttrain.recipe.base import Part
from posttrain.recipe.components import EnvironmentRecipe, environment_recipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import EvaluationRecipe, SeedRange
from posttrain.recipe.run import SinkName


class StageRecipe(Part):
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
    def remote(self) -> Part | None:
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
