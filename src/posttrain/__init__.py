"""posttrain: post-training of language models and language-model agents.

    import posttrain

    result = posttrain.rl("recipe.yaml", steps=20)       # a stage; also `sft`, `dpo`, `reward`, ...
    policy = posttrain.Policy("packaged:smollm2-135m")   # or the parts for a custom training loop

Importing the package is light: torch, transformers and optional packages are imported when a name that needs them is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.data.examples import load_dataset as load_dataset
    from posttrain.engines.local.engine import LocalEngine as LocalEngine
    from posttrain.engines.vllm.engine import VllmEngine as VllmEngine
    from posttrain.environments.make import make_env as make_env
    from posttrain.environments.protocol import Environment as Environment
    from posttrain.environments.protocol import Observation as Observation
    from posttrain.environments.protocol import Step as Step
    from posttrain.environments.tools import ToolEnvironment as ToolEnvironment
    from posttrain.environments.tools import calling as calling
    from posttrain.episode import Advantages as Advantages
    from posttrain.episode import Episode as Episode
    from posttrain.evaluation.summary import summarize as summarize
    from posttrain.losses.policy import TokenBatch as TokenBatch
    from posttrain.losses.surrogates import CispoLoss as CispoLoss
    from posttrain.losses.surrogates import DppoLoss as DppoLoss
    from posttrain.losses.surrogates import GmpoLoss as GmpoLoss
    from posttrain.losses.surrogates import GspoLoss as GspoLoss
    from posttrain.losses.surrogates import PpoLoss as PpoLoss
    from posttrain.losses.surrogates import ReinforceLoss as ReinforceLoss
    from posttrain.losses.surrogates import SapoLoss as SapoLoss
    from posttrain.models.policy import Policy as Policy
    from posttrain.models.reward import RewardModel as RewardModel
    from posttrain.recipe.components import EnvironmentRecipe as EnvironmentRecipe
    from posttrain.recipe.components import register_environment as register_environment
    from posttrain.recipe.credit import register_credit as register_credit
    from posttrain.recipe.loss import EntropyRecipe as EntropyRecipe
    from posttrain.recipe.loss import KlRecipe as KlRecipe
    from posttrain.recipe.loss import register_loss as register_loss
    from posttrain.recipe.metrics import Metric as Metric
    from posttrain.recipe.metrics import Panel as Panel
    from posttrain.recipe.run import StageRecipe as StageRecipe
    from posttrain.recipe.run import TrainedRecipe as TrainedRecipe
    from posttrain.recipe.stages import register_stage as register_stage
    from posttrain.result import Result as Result
    from posttrain.rollout.driver import rollout as rollout
    from posttrain.seeds import random_stream as random_stream
    from posttrain.training.learner import Learner as Learner
    from posttrain.training.learner import advantages as advantages
    from posttrain.training.trainer import Callback as Callback
    from posttrain.verbs import distill as distill
    from posttrain.verbs import dpo as dpo
    from posttrain.verbs import evaluate as evaluate
    from posttrain.verbs import evaluate_checkpoints as evaluate_checkpoints
    from posttrain.verbs import generate as generate
    from posttrain.verbs import pipeline as pipeline
    from posttrain.verbs import reward as reward
    from posttrain.verbs import rl as rl
    from posttrain.verbs import run as run
    from posttrain.verbs import sft as sft

__version__ = "0.2.0"

_MODULES = {
    "posttrain.data.examples": "load_dataset",
    "posttrain.engines.local.engine": "LocalEngine",
    "posttrain.engines.vllm.engine": "VllmEngine",
    "posttrain.environments.make": "make_env",
    "posttrain.environments.protocol": "Environment Observation Step",
    "posttrain.environments.tools": "ToolEnvironment calling",
    "posttrain.episode": "Advantages Episode",
    "posttrain.evaluation.summary": "summarize",
    "posttrain.losses.policy": "TokenBatch",
    "posttrain.losses.surrogates": "CispoLoss DppoLoss GmpoLoss GspoLoss PpoLoss ReinforceLoss SapoLoss",
    "posttrain.models.policy": "Policy",
    "posttrain.models.reward": "RewardModel",
    "posttrain.recipe.components": "EnvironmentRecipe register_environment",
    "posttrain.recipe.credit": "register_credit",
    "posttrain.recipe.loss": "EntropyRecipe KlRecipe register_loss",
    "posttrain.recipe.metrics": "Metric Panel",
    "posttrain.recipe.run": "StageRecipe TrainedRecipe",
    "posttrain.recipe.stages": "register_stage",
    "posttrain.result": "Result",
    "posttrain.seeds": "random_stream",
    "posttrain.training.learner": "Learner advantages",
    "posttrain.training.trainer": "Callback",
    "posttrain.verbs": "distill dpo evaluate evaluate_checkpoints generate pipeline reward rl run sft",
}
"""Module -> the public names that it defines. `posttrain.rollout` is a package that can be called."""
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", "rollout", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "rollout":
        return importlib.import_module("posttrain.rollout")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
