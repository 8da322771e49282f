"""From the `environment` section of a recipe to an environment."""

from posttrain.environments.protocol import Environment
from posttrain.factory import Factory
from posttrain.recipe.components import EnvironmentRecipe, environment_class


@Factory
def open_environment(recipe: EnvironmentRecipe) -> Environment:
    """A fresh environment, which plays one episode."""
    return environment_class(recipe.type)(recipe)
