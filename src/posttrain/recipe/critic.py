"""The critic of PPO: values, for credit that compares rewards with what was expected."""

from typing import Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import Part
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.optimizer import OptimizerRecipe


class CriticRecipe(Part):
    """What says before each sampled token what the episode will still earn. `gae` and `bilevel_gae` use it."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a model of its own, with its own updates. `shared`: a head on the policy's last hidden states, which starts at 0; policy and value loss are one forward and backward pass, but each loss moves what the other reads."""
    coefficient: float = Field(0.1, gt=0)
    """Weight of the value loss beside the policy's loss, with `trunk: shared`. 0.1 is usual for language models; control tasks often take 0.5."""
    path: str | None = None
    """Where its weights start: a language model (its head then starts at 0), or a reward model with its head, as `posttrain reward` exports one (its values are then scaled as `reward.normalise: stored` scales rewards); it must have the policy's tokenizer. Null is `model.path`. In a pipeline, `stage:NAME`. For `trunk: own`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of its weights in use, for `trunk: own`; its head always computes in float32."""
    lora: LoraRecipe | None = None
    """Adapters of the critic; null trains all of its weights. For `trunk: own`."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    """Of the critic's weights; with `trunk: shared` of its head alone, the trunk being the policy's to move."""
    updates_before_policy: int = Field(0, ge=0)
    """Updates in which the critic alone learns, before the policy's first (value warm-up); with `trunk: shared` only its head does."""
    clip: float | None = Field(0.2, gt=0)
    """Value loss: how far a value may move from the one before the step's updates and still gain, in units of reward; null is off."""

    @model_validator(mode="after")
    def _keys_fit_the_trunk(self):
        if self.trunk == "own":
            if self.coefficient != 0.1:
                raise ValueError(
                    "`critic.coefficient` weighs the value loss against the policy's, which only `critic.trunk: shared` "
                    "joins; remove it"
                )
            return self
        if self.path is not None:
            raise ValueError(
                "`critic.path` starts a critic of its own weights, such as a reward model's; with `critic.trunk: shared` "
                "the weights are the policy's and the head starts at 0. Set `critic.trunk: own`, or remove `critic.path`"
            )
        for key, default in (("dtype", "float32"), ("lora", None)):
            if getattr(self, key) != default:
                raise ValueError(
                    f"`critic.{key}` has no effect with `critic.trunk: shared`, whose trunk is the policy's: see `model.{key}`"
                )
        skipped = "max_skipped_updates"
        default = OptimizerRecipe.model_fields[skipped].default
        if not self.updates_before_policy and getattr(self.optimizer, skipped) != default:
            raise ValueError(
                f"`critic.optimizer.{skipped}` has no effect with `critic.trunk: shared` and no `updates_before_policy`: "
                f"the head's updates are the policy's, see `optimizer.{skipped}`"
            )
        return self

    def model(self, policy: ModelRecipe) -> ModelRecipe:
        """A critic of its own as a model; what is not said here is as in the policy's `model`."""
        own = {"path": self.path or policy.path, "dtype": self.dtype, "lora": self.lora}
        return policy.model_copy(update=own)
