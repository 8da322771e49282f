"""Warnings about recipe keys without effect and about unusual values."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.engines import (
    VllmEngineRecipe,
    has_thinking,
    has_truncated_logprobs,
    no_primer,
)
from posttrain.recipe.loss import KL_STEP
from posttrain.recipe.model import RewardSource, stored_thinking
from posttrain.recipe.needs import is_given, without_effect
from posttrain.recipe.rollout import SamplingRecipe, evaluated_environment
from posttrain.recipe.sources import read_file
from posttrain.recipe.stages import (
    DistillRecipe,
    DpoRecipe,
    EvaluateRecipe,
    GenerateRecipe,
    Recipe,
    RewardRecipe,
    RlRecipe,
    SftRecipe,
)
from posttrain.recipe.units import CausalCredit

_UPDATES = 32
"""Maximum number of optimizer steps on the same episodes in published long runs."""
_STEEP = 0.95


def recipe_warnings(recipe: Recipe) -> list[str]:
    """One sentence for each key without effect and each unusual value."""
    warnings = [*without_effect(recipe), *_thinking(recipe), *_head(recipe)]
    if isinstance(recipe, SftRecipe | DpoRecipe | RewardRecipe):
        warnings += _rows(recipe)
    if isinstance(recipe, GenerateRecipe | DpoRecipe | RewardRecipe) or evaluated_environment(recipe) is None:
        return warnings
    if recipe.remote is None:
        warnings += _limits(recipe)
    elif isinstance(recipe, EvaluateRecipe):
        primer = environment_class(recipe.environment.type)(recipe.environment).primer
        warnings += [no_primer(recipe.environment, primer)] if primer else []
    if isinstance(recipe, RlRecipe):
        warnings += _rl_doubtful(recipe)
    elif isinstance(recipe, DistillRecipe):
        warnings += _distill(recipe)
    return warnings


def _head(recipe: Recipe) -> list[str]:
    """A warning if `model.head_dtype` has an effect only on the learner."""
    if recipe.model.head_dtype == "model" or not isinstance(getattr(recipe, "engine", None), VllmEngineRecipe):
        return []
    return [
        "model.head_dtype=float32 applies to the learner alone: vLLM computes the output projection in the model's dtype, "
        "so policy/mismatch keeps the rounding of its logits"
    ]


def _thinking(recipe: Recipe) -> list[str]:
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


def thinking_differs(recipe: Recipe, path: str, origin: Mapping[str, Any], name: str) -> list[str]:
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


def _rows(recipe: SftRecipe | DpoRecipe | RewardRecipe) -> list[str]:
    """Warnings about the rows of stages that train on them."""
    data, warnings = recipe.data, list[str]()
    if data is None:
        return warnings
    if data.streaming and any(source.weight != 1 for source in data.train):
        warnings.append("data.train weight has no effect: streamed rows are read once, in order")
    if not (data.validation or data.held_out) and evaluated_environment(recipe) is None:
        warnings.append("there are no validation rows (data.validation, data.held_out), so the last checkpoint is kept")
    return warnings


def _distill(recipe: DistillRecipe) -> list[str]:
    """Questionable values of a distillation."""
    warnings = []
    if recipe.model.lora is None and recipe.optimizer.learning_rate > 1e-4:
        warnings.append(
            f"optimizer.learning_rate {recipe.optimizer.learning_rate:g} is high for full-parameter distillation"
        )
    environment = recipe.evaluation.environment or recipe.environment
    if not environment_class(environment.type).has_reward(environment):
        warnings.append("nothing scores the answers, so nothing is evaluated and the last checkpoint is kept")
    if recipe.off_policy is not None and recipe.off_policy.share == 1:
        warnings.append("off_policy.share is 1, so no step samples episodes and `rollout` and `seeds` have no effect")
    return warnings


def _limits(recipe: RlRecipe | DistillRecipe | SftRecipe | EvaluateRecipe) -> list[str]:
    rollout, evaluated = recipe.rollout, evaluated_environment(recipe)
    assert evaluated is not None
    turns = (recipe.environment or evaluated).max_turns
    warnings = [
        f"{count} turns of rollout.tokens_per_turn {rollout.tokens_per_turn} exceed rollout.tokens_per_episode "
        f"{rollout.tokens_per_episode} even without observations; long episodes will be cut"
        for count in dict.fromkeys((turns, evaluated.max_turns))
        if count * rollout.tokens_per_turn > rollout.tokens_per_episode
    ]
    if rollout.overlong_penalty is not None and rollout.overlong_penalty.limit > turns * rollout.tokens_per_turn:
        warnings.append(
            "rollout.overlong_penalty.limit is more than an episode can sample; the full penalty never applies"
        )
    return warnings


def _many_updates(recipe: RlRecipe) -> list[str]:
    learner = recipe.learner
    count = learner.updates_per_step * learner.epochs_per_step
    if count <= _UPDATES:
        return []
    return [
        f"a step makes {count} updates on the same episodes (learner.updates_per_step {learner.updates_per_step} x "
        f"learner.epochs_per_step {learner.epochs_per_step}). Late updates are far off-policy, which can make a run "
        f"collapse; use {_UPDATES} or fewer"
    ]


def _steep_kl(recipe: RlRecipe) -> list[str]:
    """The adaptive coefficient moves by at most `KL_STEP` x episodes / horizon in a step (Ziegler et al. 2019)."""
    kl, episodes = recipe.kl, recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group
    factor = 1 - KL_STEP * min(1, episodes / kl.horizon)
    if kl.target is None or factor > _STEEP:
        return []
    return [
        f"kl.horizon {kl.horizon:g} is short for {episodes} episodes per step: while the KL is below kl.target, the "
        f"coefficient is multiplied by {factor:.2g} each step and quickly approaches 0; raise kl.horizon"
    ]


def _truncated(sampling: SamplingRecipe) -> list[str]:
    keys = [f"rollout.sampling.{key}" for key in ("top_p", "top_k", "min_p") if is_given(sampling, key)]
    if not keys or sampling.temperature == 0:
        return []
    return [
        f"{' and '.join(keys)} truncate the sampling distribution, but the log-probabilities in the loss "
        "are those of the full vocabulary: the gradient also moves probability between kept and left-out tokens, and "
        "policy/entropy and policy/kl are biased; sample from the full vocabulary (top_p 1, top_k 0, min_p 0)"
    ]


def _rl_doubtful(recipe: RlRecipe) -> list[str]:
    loss, lora, optimizer, warnings = recipe.loss, recipe.model.lora, recipe.optimizer, []
    if isinstance(recipe.unit_credit, CausalCredit) and getattr(recipe.credit, "discount", 1.0) < 1:
        warnings.append(
            f"with credit.discount below 1, unit_credit.type {recipe.unit_credit.type} changes the objective, because "
            "earlier rewards count more"
        )
    warnings += [*loss.warnings(recipe), *recipe.credit.warnings(recipe)]
    if recipe.evaluation.every > recipe.steps:
        steps = f"{recipe.steps} step{'s' * (recipe.steps > 1)}"
        warnings.append(f"evaluation.every has no effect: the run ends after {steps}")
    warnings += _many_updates(recipe) + _steep_kl(recipe) + _truncated(recipe.rollout.sampling)
    if recipe.rollout.async_rollouts > 0 and loss.correction is None and not loss.compares_with_rollout:
        warnings.append(
            f"with rollout.async_rollouts above 0, loss.type {loss.type} treats episodes of older weights as on-policy, because "
            "it has no ratio to the policy that sampled; set loss.correction"
        )
    vllm = isinstance(recipe.engine, VllmEngineRecipe)
    if vllm and loss.correction is None and loss.ratio_to != "rollout":
        warnings.append(
            "engine.type vllm computes log-probabilities differently from the learner (policy/mismatch measures the difference), "
            "without a correction; set loss.correction.weights or loss.correction.reject"
        )
    if has_truncated_logprobs(recipe.engine, recipe.rollout.sampling):
        warnings.append(
            "engine.type vllm returns the log-probabilities of the truncated distribution at temperatures other than 1, so "
            "policy/mismatch includes the negative logarithm of the probability that truncation keeps, at most -log(top_p) "
            "with top_p alone"
        )
    if loss.ratio_to == "old" and loss.old == "rollout" and (vllm or recipe.model.dtype not in ("float32", None)):
        warnings.append(
            "loss.old rollout puts the difference between engine and learner into the ratio, about 0.04 nats per token in "
            "bfloat16: gspo with its default clip loses most of its gradient before any update "
            "(policy/clipped_before_update); use auto"
        )
    if lora is not None and lora.dropout > 0:
        warnings.append("model.lora.dropout above 0 makes the policies of engine and learner differ")
    if lora is None and optimizer.learning_rate > 1e-4:
        warnings.append(f"optimizer.learning_rate {optimizer.learning_rate:g} is high for full-parameter rl")
    updates = recipe.steps * recipe.learner.updates_per_step * recipe.learner.epochs_per_step
    policy_updates = updates - (recipe.critic.updates_before_policy if recipe.has_critic else 0)
    if optimizer.warmup_updates >= policy_updates:
        warnings.append(
            f"optimizer.warmup_updates {optimizer.warmup_updates} is not below the {policy_updates} updates of the run"
        )
    if recipe.has_critic and recipe.critic.optimizer.warmup_updates >= updates:
        warnings.append(
            f"critic.optimizer.warmup_updates {recipe.critic.optimizer.warmup_updates} is not below the {updates} "
            "updates of the run"
        )
    if recipe.rollout.sampling.temperature == 0 and recipe.rollout.episodes_per_group > 1:
        warnings.append("rollout.sampling.temperature 0 makes all episodes of a group identical")
    return warnings
