"""Supervised rows mixed into the updates of reinforcement learning."""

from typing import Any, Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import Part
from posttrain.recipe.data import DataRecipe


class PtxRecipe(Part):
    """Rows of text that join every update of the policy, so that it does not forget them (Ouyang et al. 2022, arXiv 2203.02155)."""

    data: DataRecipe
    """Conversations; `train` alone, since nothing is measured on them."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of their negative log-likelihood, a mean over the rows' trained tokens of the update, beside the policy's loss."""
    rows_per_update: int = Field(16, ge=1)
    """Rows that join each optimizer step."""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens of a row are trained: all answers, the last one, or every token. They are scored at `rollout.sampling.temperature`."""

    @model_validator(mode="before")
    @classmethod
    def _there_are_rows(cls, values: Any) -> Any:
        if isinstance(values, dict) and values and not values.get("data"):
            raise ValueError(
                f"`{next(iter(values))}` would have no effect: there are no rows to train on beside the episodes; name "
                "some in `data.train`, or remove ptx"
            )
        return values

    @model_validator(mode="after")
    def _rows_are_for_training(self):
        for key in ("validation", "test", "held_out", "streaming"):
            if getattr(self.data, key):
                raise ValueError(
                    f"`data.{key}` has no place here: the rows are read at the start and trained on; remove it"
                )
        return self
