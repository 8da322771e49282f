"""One typed document per stage: a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.recipe.reward import RewardSource
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.rollout import EngineRecipe, EvaluationRecipe, RolloutRecipe
from posttrain.recipe.stage import PlayedRecipe
from posttrain.recipe.supervised import DpoRecipe, RewardRecipe, SftRecipe


class EvaluateRecipe(PlayedRecipe):
    """Evaluation of a model in an environment on held-out seeds."""

    stage: Literal["evaluate"] = "evaluate"
    """Which stage the recipe is for; `posttrain evaluate` takes this one."""
    engine: EngineRecipe = EngineRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    reward: RewardSource | None = None
    """A reward model that pays each episode besides what the environment pays; null is none."""
    evaluation: EvaluationRecipe = EvaluationRecipe()


Recipe = Annotated[RlRecipe | SftRecipe | RewardRecipe | DpoRecipe | EvaluateRecipe, Field(discriminator="stage")]

STAGES: dict[str, type[RlRecipe] | type[SftRecipe] | type[RewardRecipe] | type[DpoRecipe] | type[EvaluateRecipe]] = {
    "rl": RlRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "evaluate": EvaluateRecipe,
}
"""Name of a stage -> schema of its recipe."""
