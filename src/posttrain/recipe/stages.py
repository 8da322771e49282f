"""The recipe of `posttrain evaluate`, and the schemas of all stages by name."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.recipe.engines import OpenAIEngineRecipe, VllmEngineRecipe, refuse_lone_adapters, refuse_unknown_sampling
from posttrain.recipe.generate import GenerateRecipe
from posttrain.recipe.model import RewardSource
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.rollout import EngineRecipe, EvaluationRecipe, RolloutRecipe
from posttrain.recipe.run import PlayedRecipe
from posttrain.recipe.supervised import DpoRecipe, RewardRecipe, SftRecipe


class EvaluateRecipe(PlayedRecipe):
    """Evaluation of a model in an environment on held-out seeds."""

    stage: Literal["evaluate"] = "evaluate"
    """Which stage the recipe is for; `posttrain evaluate` takes this one."""
    engine: Annotated[EngineRecipe | VllmEngineRecipe | OpenAIEngineRecipe, Field(discriminator="type")] = (
        EngineRecipe()
    )
    """The engine that answers: `model.path` in this process or in vLLM, or a remote model behind a server."""
    rollout: RolloutRecipe = RolloutRecipe()
    reward: RewardSource | None = None
    """Reward model whose score is added to the environment's reward. Null: none."""
    evaluation: EvaluationRecipe = EvaluationRecipe()

    @property
    def remote(self) -> OpenAIEngineRecipe | None:
        """The engine if a remote model answers, else None."""
        return self.engine if isinstance(self.engine, OpenAIEngineRecipe) else None

    @model_validator(mode="after")
    def _what_an_engine_can_do(self):
        refuse_lone_adapters(self.engine, self.model)
        if self.remote is not None:
            refuse_unknown_sampling(self.evaluation.sampling, "evaluation.sampling")
            if self.reward is not None:
                raise ValueError(
                    "`reward.path` reads the tokens of an answer, which a server does not tell; remove `reward`, or name a "
                    "judge in environment.judge"
                )
        return self


Recipe = Annotated[
    RlRecipe | SftRecipe | RewardRecipe | DpoRecipe | EvaluateRecipe | GenerateRecipe, Field(discriminator="stage")
]

STAGES: dict[
    str,
    type[RlRecipe]
    | type[SftRecipe]
    | type[RewardRecipe]
    | type[DpoRecipe]
    | type[EvaluateRecipe]
    | type[GenerateRecipe],
] = {
    "rl": RlRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "evaluate": EvaluateRecipe,
    "generate": GenerateRecipe,
}
"""Name of a stage -> schema of its recipe."""
