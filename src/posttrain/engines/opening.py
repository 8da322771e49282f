"""From the `engine` section of a recipe to an engine."""

from posttrain.engines.local import LocalEngine
from posttrain.engines.protocol import Engine
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import EngineRecipe


def open_engine(policy: Policy, recipe: EngineRecipe) -> Engine:
    """The engine of the recipe, which samples with the weights of `policy` as they are at each `load_weights`."""
    return LocalEngine(policy, recipe)
