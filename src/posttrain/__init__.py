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

_PUBLIC = {
    "Advantages": "posttrain.episode",
    "Callback": "posttrain.training.trainer",
    "CispoLoss": "posttrain.losses.surrogates",
    "DppoLoss": "posttrain.losses.surrogates",
    "EntropyRecipe": "posttrain.recipe.loss",
    "Environment": "posttrain.environments.protocol",
    "EnvironmentRecipe": "posttrain.recipe.components",
    "Episode": "posttrain.episode",
    "GmpoLoss": "posttrain.losses.surrogates",
    "GspoLoss": "posttrain.losses.surrogates",
    "KlRecipe": "posttrain.recipe.loss",
    "Learner": "posttrain.training.learner",
    "LocalEngine": "posttrain.engines.local.engine",
    "Metric": "posttrain.recipe.metrics",
    "Observation": "posttrain.environments.protocol",
    "Panel": "posttrain.recipe.metrics",
    "Policy": "posttrain.models.policy",
    "PpoLoss": "posttrain.losses.surrogates",
    "ReinforceLoss": "posttrain.losses.surrogates",
    "Result": "posttrain.result",
    "RewardModel": "posttrain.models.reward",
    "SapoLoss": "posttrain.losses.surrogates",
    "StageRecipe": "posttrain.recipe.run",
    "Step": "posttrain.environments.protocol",
    "TokenBatch": "posttrain.losses.policy",
    "ToolEnvironment": "posttrain.environments.tools",
    "TrainedRecipe": "posttrain.recipe.run",
    "VllmEngine": "posttrain.engines.vllm.engine",
    "advantages": "posttrain.training.learner",
    "calling": "posttrain.environments.tools",
    "distill": "posttrain.verbs",
    "dpo": "posttrain.verbs",
    "evaluate": "posttrain.verbs",
    "evaluate_checkpoints": "posttrain.verbs",
    "generate": "posttrain.verbs",
    "load_dataset": "posttrain.data.examples",
    "make_env": "posttrain.environments.make",
    "pipeline": "posttrain.verbs",
    "random_stream": "posttrain.seeds",
    "register_credit": "posttrain.recipe.credit",
    "register_environment": "posttrain.recipe.components",
    "register_loss": "posttrain.recipe.loss",
    "register_stage": "posttrain.recipe.stages",
    "reward": "posttrain.verbs",
    "rl": "posttrain.verbs",
    "run": "posttrain.verbs",
    "sft": "posttrain.verbs",
    "summarize": "posttrain.evaluation.summary",
}
"""Public name -> module that defines it. `posttrain.rollout` is a package that can be called."""

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
