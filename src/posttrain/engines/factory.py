"""From the `engine` section of a recipe to an engine."""

from pathlib import Path

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Engine
from posttrain.factory import Factory
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.rollout import EngineRecipe, SamplingRecipe


@Factory
def open_engine(
    policy: Policy,
    recipe: EngineRecipe | VllmEngineRecipe,
    longest: int | None = None,
    sampling: SamplingRecipe | None = None,
    logs: Path | None = None,
) -> Engine:
    """The engine of the recipe, which samples with the weights of `policy` as they are at each `load_weights`.

    An engine outside this process is told the `longest` context in tokens that it will see, null for what the model
    knows; the `sampling` for which its log-probabilities have to be right, null for temperature 1; and where to keep
    its `logs`.
    """
    if isinstance(recipe, EngineRecipe):
        return LocalEngine(policy, recipe)
    from posttrain.engines.vllm.engine import open_vllm

    return open_vllm(policy, recipe, longest, sampling, logs)
