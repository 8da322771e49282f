"""Create the engine that the `engine` section of a recipe describes."""

from pathlib import Path

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Engine
from posttrain.models.policy import Policy
from posttrain.recipe.components import Factory
from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe


@Factory
def open_engine(
    policy: Policy,
    recipe: LocalEngineRecipe | VllmEngineRecipe,
    max_context: int | None = None,
    sampling: SamplingRecipe | None = None,
    logs: Path | None = None,
    weights_change: bool = True,
) -> Engine:
    """The engine of the recipe. It samples with the weights of `policy` at each `load_weights`.

    `max_context` is the longest context in tokens (default: the model's limit). For engines outside this process,
    `sampling` gives the settings for which log-probabilities must be exact (default: temperature 1), `logs` the directory of
    their log files, and `weights_change` whether weights may change while requests are in flight.
    """
    if isinstance(recipe, LocalEngineRecipe):
        return LocalEngine(policy, recipe, max_context)
    from posttrain.engines.vllm.engine import open_vllm

    return open_vllm(policy, recipe, max_context, sampling, logs, weights_change)


def open_inference_engine(policy: Policy, recipe: LocalEngineRecipe | VllmEngineRecipe) -> Engine:
    """An engine with the weights of `policy`, which is not in training, for requests of any temperature. The
    log-probabilities of vLLM are those after temperature and, unlike those of the local engine, after truncation."""
    engine = open_engine(policy, recipe, sampling=SamplingRecipe(temperature=0.5), weights_change=False)
    engine.load_weights(policy.version)
    return engine
