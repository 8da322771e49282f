"""The critic of PPO: a model of values, for credit that compares rewards with what was expected."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.optimizer import OptimizerRecipe


class CriticRecipe(Part):
    """A model of its own that says before each sampled token what the episode will still earn. `gae` and `bilevel_gae` use it."""

    path: str | None = None
    """Where its weights start: a language model (its head then starts at 0), or a reward model with its head, as `posttrain reward` exports one (its values are then scaled as `reward.normalise: stored` scales rewards); it must have the policy's tokenizer. Null is `model.path`. In a pipeline, `stage:NAME`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of its weights in use; its head always computes in float32."""
    lora: LoraRecipe | None = None
    """Adapters of the critic; null trains all of its weights."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    updates_before_policy: int = Field(0, ge=0)
    """Updates in which the critic alone learns, before the policy's first (value warm-up)."""
    clip: float | None = Field(0.2, gt=0)
    """Value loss: how far a value may move from the one before the step's updates and still gain, in units of reward; null is off."""

    def model(self, policy: ModelRecipe) -> ModelRecipe:
        """The critic as a model; what is not said here is as in the policy's `model`."""
        own = {"path": self.path or policy.path, "dtype": self.dtype, "lora": self.lora}
        return policy.model_copy(update=own)
