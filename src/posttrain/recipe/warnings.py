"""Warnings about recipe keys without effect and about unusual values."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.base import BaseConfig, is_given
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.credit import CriticRecipe, GdpoCredit
from posttrain.recipe.distill import DistillRecipe
from posttrain.recipe.engines import OpenAIEngineRecipe, VllmEngineRecipe, has_thinking
from posttrain.recipe.evaluate import NOT_EVALUATED, EvaluateRecipe
from posttrain.recipe.generate import GenerateRecipe
from posttrain.recipe.loss import GspoLoss, KlCovRecipe, PpoLoss
from posttrain.recipe.model import ModelRecipe, RewardSource, stored_thinking
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe, evaluated_environment
from posttrain.recipe.run import StageRecipe
from posttrain.recipe.sources import read_file
from posttrain.recipe.supervised import DpoRecipe, RewardRecipe, SftRecipe

_STARTED_WITH = (
    *("python", "tensor_parallel", "first_device", "threads", "gpu_memory_utilization", "cache_gigabytes"),
    *("max_model_len", "dtype", "tokens_per_forward", "prefix_caching", "enforce_eager"),
)
"""Keys of a vLLM engine that are fixed at its start."""
_ASYNC_KEYS = ("async_rollouts", "on_new_weights", "max_staleness")


def recipe_warnings(recipe: StageRecipe) -> list[str]:
    """One sentence for each key without effect and each unusual value."""
    engine = getattr(recipe, "engine", None)
    warnings = [*_thinking(recipe), *(engine.warnings(recipe.model) if engine is not None else [])]
    return [*warnings, *_unused(recipe), *recipe.warnings()]


def _unused(recipe: Any) -> list[str]:
    """One sentence for each key without effect."""
    warnings = [*_head(recipe), *_tracking(recipe)]
    if isinstance(recipe, GenerateRecipe | EvaluateRecipe) and recipe.plots is not None:
        warnings.append(_without_effect("plots", f"the {recipe.stage} stage draws no figures"))
    if isinstance(recipe, GenerateRecipe):
        return [*warnings, *_generation(recipe)]
    optimizer = getattr(recipe, "optimizer", None)
    if optimizer is not None and optimizer.schedule == "constant" and is_given(optimizer, "final_fraction"):
        warnings.append(_without_effect("optimizer.final_fraction", "optimizer.schedule is constant"))
    if isinstance(recipe, SftRecipe | RewardRecipe) and recipe.hardware.offload == "rollouts":
        warnings.append(_without_effect("hardware.offload: rollouts", f"the {recipe.stage} stage samples no episodes"))
    if isinstance(recipe, SftRecipe | DpoRecipe | RewardRecipe):
        warnings += _rows(recipe)
    if not hasattr(recipe, "rollout"):
        return warnings
    if evaluated_environment(recipe) is None:
        parts = [key for key in ("engine", "rollout") if getattr(recipe, key) != type(getattr(recipe, key))()]
        return [*warnings, *(_without_effect(key, "the recipe has no environment") for key in parts)]
    warnings += [*_sampling("evaluation.sampling", recipe.evaluation.sampling), *_vllm(recipe.engine)]
    if isinstance(recipe, RlRecipe):
        warnings += [*_rl_without_effect(recipe), *_entropy(recipe)]
    elif isinstance(recipe, DistillRecipe):
        warnings += _distill(recipe)
    else:
        warnings += _rollout_unused(recipe.rollout, recipe.stage)
    if isinstance(recipe, EvaluateRecipe):
        unused = (*NOT_EVALUATED["evaluation"], *(["seeds"] if recipe.evaluation.held_out == "all" else []))
        warnings += [
            _without_effect(f"evaluation.{key}", "the evaluate stage runs one evaluation, on evaluation.final_seeds")
            for key in unused
            if is_given(recipe.evaluation, key)
        ]
        if recipe.remote is not None:
            warnings += _server(recipe, recipe.remote, recipe.evaluation.sampling)
    return warnings


def _generation(recipe: GenerateRecipe) -> list[str]:
    """Warnings for the `generate` stage."""
    warnings = _sampling("sampling", recipe.sampling)
    if recipe.remote is None:
        return warnings
    if is_given(recipe, "window"):
        warnings.append(_without_effect("window", "engine.type is openai, so answers are independent"))
    return [*warnings, *_server(recipe, recipe.remote, recipe.sampling)]


def _head(recipe: StageRecipe) -> list[str]:
    """Warnings if `model.head_dtype` has no effect."""
    if recipe.model.head_dtype == "model":
        return []
    if recipe.scores:
        return [_without_effect("model.head_dtype", "rewards are computed in float32")]
    if recipe.model.dtype == "float32" or (recipe.model.dtype is None and recipe.model.device == "cpu"):
        return [_without_effect("model.head_dtype", "model.dtype is float32")]
    return []


def _thinking(recipe: StageRecipe) -> list[str]:
    """Warnings if the model, the reward model and the format of answers disagree about thinking."""
    if recipe.remote is not None:
        return []
    reward, environment = getattr(recipe, "reward", None), getattr(recipe, "environment", None)
    warnings = thinking_differs(recipe, recipe.model.path, *_origin(recipe.model.path))
    if isinstance(reward, RewardSource):
        warnings += thinking_differs(recipe, reward.path, *_origin(reward.path))
    used = stored_thinking(recipe.model.path) if recipe.model.thinking == "template" else recipe.model.thinking
    if environment is None or used is None or (key := _thinking_key(environment)) is None:
        return warnings
    if has_thinking(environment) != (used == "on"):
        warnings.append(
            f"environment.{key} is {str(has_thinking(environment)).lower()}, and model.thinking is {used}, so the chat "
            "template and the environment ask for different answers; set both to the same"
        )
    return warnings


def _origin(path: str) -> tuple[Mapping[str, Any], str]:
    """The recipe of the run that exported the model at `path` or saved it as a checkpoint, empty if unknown, and its name."""
    model = Path(path).expanduser()
    for run in [model.parent, *model.parents[2:3]]:
        if (run / "recipe.yaml").is_file() and (run / "environment.json").is_file():
            with suppress(InputError):
                return read_file(str(run / "recipe.yaml")).values, f"the run {run}"
    return {}, "an earlier run"


def thinking_differs(recipe: StageRecipe, path: str, origin: Mapping[str, Any], name: str) -> list[str]:
    """Warnings if `recipe` uses the model at `path` but differs in thinking from the recipe that trained it.

    Args:
        origin: the keys of that recipe; empty if unknown.
        name: the run or stage of that recipe.
    """
    warnings = []
    set_before = stored_thinking(path) or (origin.get("model") or {}).get("thinking", "template")
    used = recipe.model.thinking
    if used == "template" and path != recipe.model.path:
        used = stored_thinking(recipe.model.path) or used
    if "template" not in (used, set_before) and used != set_before:
        warnings.append(f"model.thinking is {used}, and {name}, which trained {path}, had model.thinking {set_before}")
    ours, theirs = getattr(recipe, "environment", None), origin.get("environment") or {}
    before = theirs.get("thinking", (theirs.get("format") or {}).get("thinking"))
    if ours is None or before is None or (key := _thinking_key(ours)) is None or before == has_thinking(ours):
        return warnings
    now, before = (str(value).lower() for value in (has_thinking(ours), before))
    warnings.append(
        f"environment.{key} is {now}, and {name}, which trained {path}, had environment.{key} {before}, so the model has "
        "learned another format of answers; set both to the same"
    )
    return warnings


def _thinking_key(environment: EnvironmentRecipe) -> str | None:
    """The key that determines whether answers have a thinking block; None if the environment has no such key."""
    if hasattr(environment, "thinking"):
        return "thinking"
    return "format.thinking" if hasattr(getattr(environment, "format", None), "thinking") else None


def _tracking(recipe: StageRecipe) -> list[str]:
    """Keys of `tracking` that no sink reads."""
    used = {
        "wandb": ("project", "entity", "run_name", "group", "tags", "completions"),
        "trackio": ("project", "run_name", "group", "completions"),
        "tensorboard": ("completions",),
    }
    read = {key for sink in recipe.sinks for key in used[sink]}
    given = [key for key in used["wandb"] if is_given(recipe.tracking, key)]
    warnings = [
        _without_effect(f"tracking.{key}", f"sinks is {json.dumps(recipe.sinks)}") for key in given if key not in read
    ]
    if "completions" in given and "completions" in read and recipe.stage not in ("rl", "distill"):
        warnings.append(_without_effect("tracking.completions", f"{recipe.stage} has no training episodes"))
    return warnings


def _vllm(engine: BaseConfig) -> list[str]:
    """Keys without effect on external servers, whose settings are fixed at their start."""
    if not isinstance(engine, VllmEngineRecipe) or not engine.urls:
        return []
    given = [key for key in _STARTED_WITH if is_given(engine, key)]
    return [_without_effect(f"engine.{key}", "the servers at engine.urls are already running") for key in given]


def _server(recipe: EvaluateRecipe | GenerateRecipe, engine: OpenAIEngineRecipe, sampling: SamplingRecipe) -> list[str]:
    """Keys without effect with a remote model."""
    server, rollout = "engine.type is openai, and the server has the model", recipe.rollout
    warnings = [] if recipe.model == ModelRecipe() else [_without_effect("model", server)]
    if is_given(rollout, "tokens_per_episode"):
        warnings.append(_without_effect("rollout.tokens_per_episode", f"{server} and limits its context"))
    if sampling.temperature == 0 and is_given(engine, "send_seed"):
        warnings.append(_without_effect("engine.send_seed", "temperature 0 is greedy, and no seed is sent"))
    if not rollout.stop_strings and is_given(engine, "stop_at"):
        warnings.append(_without_effect("engine.stop_at", "rollout.stop_strings is empty"))
    return warnings


def _rows(recipe: SftRecipe | DpoRecipe | RewardRecipe) -> list[str]:
    """Keys without effect in stages that train on rows."""
    unused = [key for key in ("updates_per_step", "epochs_per_step") if is_given(recipe.learner, key)]
    warnings = [
        _without_effect(f"learner.{key}", f"the {recipe.stage} stage makes one update per step") for key in unused
    ]
    data = recipe.data
    if recipe.steps is not None and recipe.epochs != 1:
        warnings.append(_without_effect("epochs", "steps determines the length of the run"))
    if data is None:
        return warnings
    if not data.streaming and is_given(data, "shuffle_buffer"):
        warnings.append(_without_effect("data.shuffle_buffer", "data.streaming is false"))
    if data.streaming and any(source.weight != 1 for source in data.train):
        warnings.append(_without_effect("data.train weight", "streamed rows are read once, in order"))
    if isinstance(recipe, SftRecipe) and recipe.experts != type(recipe.experts)():
        warnings.append(_without_effect("experts", "the run trains on the rows in data"))
    return warnings


def _without_effect(key: str, reason: str) -> str:
    return f"{key} has no effect: {reason}"


def _sampling(name: str, sampling: SamplingRecipe) -> list[str]:
    if sampling.temperature > 0:
        return []
    return [
        _without_effect(f"{name}.{key}", "temperature 0 is greedy")
        for key in ("top_p", "top_k", "min_p")
        if is_given(sampling, key)
    ]


def _distill(recipe: DistillRecipe) -> list[str]:
    """Keys without effect in distillation, and questionable values."""
    rollout, learner, warnings = recipe.rollout, recipe.learner, _sampling("rollout.sampling", recipe.rollout.sampling)
    unused = [key for key in ("overlong_penalty", "missing_eos_penalty", *_ASYNC_KEYS) if is_given(rollout, key)]
    warnings += [
        _without_effect(f"rollout.{key}", "the distill stage learns from the teacher, not from rewards")
        for key in unused
    ]
    once = learner.updates_per_step == 1 and learner.epochs_per_step == 1 and recipe.engine.type == "local"
    if recipe.loss.type == "reverse_kl" and once and is_given(recipe.loss, "cap"):
        warnings.append(_without_effect("loss.cap", "with one update per step the importance weight is always 1"))
    return warnings


def _rollout_unused(rollout: RolloutRecipe, stage: str) -> list[str]:
    reason = f"the {stage} stage samples evaluation episodes only"
    return [_without_effect(f"rollout.{key}", reason) for key in NOT_EVALUATED["rollout"] if is_given(rollout, key)]


def _rl_without_effect(recipe: RlRecipe) -> list[str]:
    kl, rollout, learner, warnings = recipe.kl, recipe.rollout, recipe.learner, []
    warnings += _sampling("rollout.sampling", rollout.sampling)
    if kl.coefficient == 0:
        keys = [
            key for key in ("estimator", "apply_to", "importance_weighted", "horizon", "reference") if is_given(kl, key)
        ]
        warnings += [_without_effect(f"kl.{key}", "kl.coefficient is 0") for key in keys]
    elif kl.target is None and is_given(kl, "horizon"):
        warnings.append(_without_effect("kl.horizon", "the coefficient is fixed while kl.target is null"))
    for key, type_name in (("keep", "uncertainty"), ("max_rounds", "dynamic")):
        if rollout.filter.type != type_name and is_given(rollout.filter, key):
            warnings.append(_without_effect(f"rollout.filter.{key}", f"rollout.filter.type is {rollout.filter.type}"))
    for key, policy in (("retries", "retry"), ("reward", "score")):
        if rollout.failures.action != policy and is_given(rollout.failures, key):
            reason = f"rollout.failures.action is {rollout.failures.action}"
            warnings.append(_without_effect(f"rollout.failures.{key}", reason))
    if rollout.async_rollouts == 0:
        warnings += [
            _without_effect(f"rollout.{key}", "rollout.async_rollouts is 0")
            for key in _ASYNC_KEYS[1:]
            if is_given(rollout, key)
        ]
    once = learner.updates_per_step == 1 and learner.epochs_per_step == 1 and rollout.async_rollouts == 0
    if recipe.has_critic:
        warnings += _critic_without_effect(recipe.critic, once)
    elif recipe.critic != type(recipe.critic)():
        # Not an error, so that users can switch between gae and other credit with one key.
        warnings.append(_without_effect("critic", f"credit.type {recipe.credit.type} uses no values"))
    if isinstance(recipe.credit, GdpoCredit) and "return" not in (recipe.credit.weights or {}):
        reason = "credit.weights of gdpo has no weight for `return`"
        warnings += [_without_effect(key, reason) for key in recipe.rewards_beside_scores]
    loss = recipe.loss
    if loss.ratio_to != "old" and loss.correction is None and is_given(loss, "old"):
        warnings.append(_without_effect("loss.old", f"loss.type {loss.type} does not use old log-probabilities"))
    if (
        isinstance(loss, PpoLoss | GspoLoss)
        and loss.old != "rollout"
        and learner.updates_per_step * learner.epochs_per_step == 1
    ):
        clips = [key for key in ("clip_low", "clip_high", "dual_clip") if is_given(loss, key)]
        reason = "with one update per step the ratio is always 1"
        warnings += [_without_effect(f"loss.{key}", reason) for key in clips]
    if recipe.evaluation.every > recipe.steps:
        warnings.append(
            _without_effect("evaluation.every", f"the run ends after {recipe.steps} step{'s' * (recipe.steps > 1)}")
        )
    return warnings


def _critic_without_effect(critic: CriticRecipe, once: bool) -> list[str]:
    """Keys without effect in `critic`. `once`: whether a step makes one update."""
    warnings: list[str] = []
    if critic.optimizer.schedule == "constant" and is_given(critic.optimizer, "final_fraction"):
        warnings.append(_without_effect("critic.optimizer.final_fraction", "critic.optimizer.schedule is constant"))
    if critic.lora is not None and is_given(critic.lora, "export"):
        warnings.append(_without_effect("critic.lora.export", "the critic is not exported"))
    if once and is_given(critic, "clip"):
        warnings.append(_without_effect("critic.clip", "with one update per step the values are unchanged"))
    return warnings


def _entropy(recipe: RlRecipe) -> list[str]:
    entropy, learner = recipe.entropy, recipe.learner
    warnings = []
    for key in ("step", "max_coefficient"):
        if entropy.target is None and is_given(entropy, key):
            warnings.append(_without_effect(f"entropy.{key}", "there is no entropy.target"))
    if not entropy.has_bonus and entropy.tokens != "all":
        warnings.append(
            _without_effect("entropy.tokens", "there is no bonus; set entropy.coefficient or entropy.target")
        )
    once = learner.updates_per_step * learner.epochs_per_step == 1
    if isinstance(entropy.covariance, KlCovRecipe) and once and not recipe.ratio_to_rollout:
        reason = "the gradient of its penalty is 0 before the first update of a step, and a step makes one"
        warnings.append(_without_effect("entropy.covariance.type kl_cov", reason))
    return warnings
