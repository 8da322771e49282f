"""From the keys of a recipe to a running vLLM engine."""

import os
import tempfile
from pathlib import Path

import torch

from posttrain.distribution.sharding import dtype_in_use
from posttrain.distribution.world import current
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.inside import InsideReplica
from posttrain.engines.vllm.replica import Replica
from posttrain.engines.vllm.served import OwnReplica, ServedReplica
from posttrain.engines.vllm.settings import Settings
from posttrain.errors import InputError
from posttrain.models.load import resolve_path
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.recipe.vllm import VllmEngineRecipe


def open_vllm(
    policy: Policy,
    recipe: VllmEngineRecipe,
    longest: int | None = None,
    sampling: SamplingRecipe | None = None,
    logs: Path | None = None,
) -> VllmEngine:
    """A vLLM engine for contexts of up to `longest` tokens, whose log-probabilities are right for `sampling`.

    `logs`: where servers that are started here write theirs; null is a temporary directory. In a run of several processes
    the first one has the engines; the others only join in reading the weights, which may be divided among them.
    """
    settings = settings_of(policy, recipe, longest, sampling)
    return VllmEngine(policy, recipe, _replicas(recipe, settings, logs) if current().first else [])


def settings_of(
    policy: Policy, recipe: VllmEngineRecipe, longest: int | None = None, sampling: SamplingRecipe | None = None
) -> Settings:
    """What each engine is started with; InputError for what the policy and an engine cannot agree on."""
    path = Path(resolve_path(policy.recipe.path))
    if (path / "adapter_config.json").is_file():
        if recipe.adapters == "adapter_only":
            raise InputError(
                f"engine.adapters: adapter_only keeps the weights of files, and {path} is itself an adapter; use merged"
            )
        raise InputError(
            f"model.path: {path} is an adapter, and vLLM starts from a whole model; train with model.lora.export=merged"
        )
    most = getattr(policy.model.config, "max_position_embeddings", None)
    context = recipe.context or longest or most or 0
    if most is not None and context > most:
        raise InputError(
            f"{policy.recipe.path} knows {most} positions and contexts may have {context} tokens; lower "
            f"{'engine.context' if recipe.context else 'rollout.tokens_per_episode'}"
        )
    own = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype_in_use(next(policy.model.parameters()))]
    cold = sampling is None or sampling.temperature in (0, 1)
    return Settings(
        model=str(path) if path.exists() else policy.recipe.path,
        dtype=own if recipe.dtype == "auto" else recipe.dtype,
        context=context,
        sequences=recipe.sequences,
        tokens_per_forward=recipe.tokens_per_forward,
        tensor_parallel=recipe.tensor_parallel,
        memory_share=recipe.memory_share,
        cache_gigabytes=recipe.cache_gigabytes or 0.0,
        prefix_caching=recipe.prefix_caching,
        eager={None: "auto", True: "yes", False: "no"}[recipe.enforce_eager],
        logprobs="raw" if cold else "processed",
        adapter_rank=policy.recipe.lora.rank if recipe.adapters == "adapter_only" and policy.recipe.lora else 0,
        threads=recipe.threads or 0,
    )


def _replicas(recipe: VllmEngineRecipe, settings: Settings, logs: Path | None) -> list[Replica]:
    if recipe.mode == "in_process":
        return [InsideReplica(settings)]
    if recipe.urls:
        token = _token(recipe)
        return [
            ServedReplica(
                f"the vLLM server at {url}",
                url.rstrip("/"),
                token,
                recipe.start_seconds,
                same_machine=False,
                wanted=settings,
            )
            for url in recipe.urls
        ]
    folder = logs or Path(tempfile.mkdtemp(prefix="posttrain-vllm-logs-"))
    found: list[Replica] = []
    for number in range(recipe.servers):
        first = recipe.first_device + number * recipe.tensor_parallel
        devices = list(range(first, first + recipe.tensor_parallel))
        found.append(OwnReplica(number, settings, recipe.python, devices, recipe.start_seconds, folder))
    return found


def _token(recipe: VllmEngineRecipe) -> str | None:
    if recipe.token_variable is None:
        return None
    token = os.environ.get(recipe.token_variable)
    if not token:
        raise InputError(
            f"engine.token_variable: the environment variable {recipe.token_variable} is not set; put the token of the "
            "servers there"
        )
    return token
