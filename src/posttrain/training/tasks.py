"""Checks of a run's tasks before it starts. Importing this module does not import torch."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.data.held_out import TaskSplit
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.environments.protocol import (
    CallTimeout,
    Environment,
    allowed,
    completed,
    require_observation,
    return_range,
)
from posttrain.environments.rewards import load_reward
from posttrain.errors import InputError
from posttrain.recipe.agent import AgentRecipe
from posttrain.recipe.audit import AuditRecipe
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.guards import SOLVED
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.recipe.run import SampledRecipe


def check_tasks(recipe: Any, tasks: TaskSplit) -> list[str]:
    """Check the tasks of a run of `recipe` before a model is loaded. Returns the warnings of the environments.

    Environments name their keys `environment...`; messages name those of the recipe. InputError if a task cannot be
    played, or nothing rewards the answers."""
    warnings = []
    rollout, evaluated = recipe.rollout, recipe.evaluation.environment
    agent: AgentRecipe | None = getattr(recipe, "agent", None)
    audit: AuditRecipe | None = getattr(recipe, "audit", None)
    if agent is not None and agent.function is not None:
        load_reward(agent.function, "agent.reward")
    scored = recipe.is_scored or (agent is not None and agent.reward != "environment")
    parts = parts_of(getattr(recipe, "environment", None) or evaluated, tasks, evaluated)
    if audit is not None and audit.environment is not None:
        parts.append((audit.environment, "audit.environment", (), [tasks.validation]))
    for part in parts:
        try:
            found = _check_part(part, rollout.environment_timeout, scored)
        except InputError as error:
            raise InputError(_named(str(error), part[1])) from error
        warnings += [_named(text, part[1]) for text in found if text not in warnings]
    return warnings


def _named(message: str, key: str) -> str:
    """`message` with `key` in place of `environment`, where that begins a recipe key."""
    return re.sub(r"(?<![\w.])environment(?=\.[a-z])", key, message)


def _check_part(part: "TaskPart", timeout: float | None, scored: bool) -> list[str]:
    """`check_tasks` of one environment. `scored`: whether another part scores the answers."""
    one, key, training, held_out = part
    kind, audits = environment_class(one.type), key.startswith("audit")
    if (audits or not scored) and not kind.has_reward(one):
        raise InputError(
            f"nothing scores the answers; name a function in {key}.reward, a judge in {key}.judge, or a reward model in "
            f"{'audit' if audits else 'reward'}.path"
        )
    return_range(one)  # before the run, not at its first evaluation
    warnings = [*kind.check_tasks(one, training, held_out)]
    if seeds := next((seeds for seeds in (training, *held_out) if len(seeds)), ()):
        place = f"{key}.type: the constructor of {one.type}"
        try:
            game = completed(partial(kind, one), place, timeout)
            if audits and completed(partial(game.reset, seeds[0]), f"`reset` of {one.type}", timeout).tools:
                raise InputError(
                    f"{key} has tools, and an audit replays texts; audit with a reward model in audit.path"
                )
            place = f"{key}: scoring an answer to {kind.task_name(one, seeds[0])}"
            warnings += completed(partial(game.try_reward, seeds[0]), place, timeout)
        except CallTimeout as error:
            warnings.append(f"{place} {error}; an episode for which it does fails")
    return warnings


TaskPart = tuple[EnvironmentRecipe, str, Sequence[int], Sequence[Sequence[int]]]


def parts_of(environment: EnvironmentRecipe, tasks: TaskSplit, evaluated: EnvironmentRecipe | None) -> list[TaskPart]:
    """(environment, its recipe key, training seeds, held-out seeds) of the environments of a run."""
    if evaluated is None:
        return [(environment, "environment", tasks.training, tasks.held_out)]
    return [(environment, "environment", tasks.training, []), (evaluated, "evaluation.environment", (), tasks.held_out)]


@dataclass(frozen=True)
class LeftOut:
    """Seeds whose tasks are not played because their prompts are too long."""

    training: frozenset[int] = frozenset()
    held_out: frozenset[int] = frozenset()


def too_long(
    environment: EnvironmentRecipe,
    rollout: RolloutRecipe,
    renderer: Renderer,
    tasks: TaskSplit,
    evaluated: EnvironmentRecipe | None = None,
) -> tuple[LeftOut, list[str]]:
    """Seeds whose prompt leaves less than `tokens_per_turn` of the episode's tokens, and warnings about them. A warning
    also says if fewer tasks remain than a step needs. `evaluated` as for `check_tasks`.

    Only tasks from the user's data are checked. They are left out of training and of evaluation. InputError if no
    seed of an environment is left, or a prompt is too long and the environment is `strict`."""
    excluded, warnings = [], []
    for one, _, training, held_out in parts_of(environment, tasks, evaluated):
        seeds, messages = _too_long(one, rollout, renderer, [training, *held_out])
        excluded.append(seeds)
        warnings += messages
    left = len(set(tasks.training) - excluded[0])
    if tasks.training and left < rollout.groups_per_step:
        warnings.append(
            f"rollout.groups_per_step is {rollout.groups_per_step}, and there are {left} tasks to train on, so a step samples "
            "some of them more than once"
        )
    return LeftOut(excluded[0], excluded[-1]), warnings


def _too_long(
    environment: EnvironmentRecipe, rollout: RolloutRecipe, renderer: Renderer, parts: Sequence[Sequence[int]]
) -> tuple[frozenset[int], list[str]]:
    """Seeds of one environment whose prompts are too long, and a summary."""
    kind = environment_class(environment.type)
    if kind.self_contained:
        return frozenset(), []
    room = rollout.tokens_per_episode - rollout.tokens_per_turn
    problems = Problems()
    left_out = set()
    for seeds in parts:
        for seed in seeds:
            one = completed(partial(kind, environment), f"the constructor of {environment.type}")
            first = completed(partial(one.reset, seed), f"`reset` of {environment.type} on seed {seed}")
            first = allowed(require_observation, first, environment, seed)
            tokens = len(renderer.prompt(first.messages, one.primer, first.tools))
            if tokens > room:
                left_out.add(seed)
                detail = f"{tokens} tokens, and rollout.tokens_per_turn = {rollout.tokens_per_turn} for the answer"
                problems.add(
                    f"prompt leaves no room for an answer within rollout.tokens_per_episode = {rollout.tokens_per_episode}",
                    kind.task_name(environment, seed),
                    detail,
                )
        if len(seeds) and left_out.issuperset(seeds):
            problems.require_any(f"tasks {seeds[0]} to {seeds[-1]} of {environment.type}")
    problems.raise_if(getattr(environment, "strict", False))
    return frozenset(left_out), problems.summary()


def first_episodes(
    recipe: SampledRecipe, metrics: Mapping[str, float], random: Mapping[str, float | None], returns: Sequence[float]
) -> tuple[str, list[str]]:
    """What the episodes of the first step, by the policy before any update, show about the environment, and warnings.
    `metrics`: of the step's rollouts and credit. `random`: the values of the random policy, where they are known.
    `returns`: of the episodes."""
    counts = {"failed": metrics["rollout/failed"], "rejected": metrics.get("rollout/rejected_share", 0.0)}
    line = (
        f"before the first update, {metrics['rollout/episodes']:.0f} training episodes: {counts['failed']:.0f} failed, "
        f"{counts['rejected']:.0%} of the answers rejected"
    )
    spread, silent = metrics.get("reward/group_spread"), metrics.get("credit/zero_groups")
    if spread is not None and silent is not None:
        line += f", {1 - silent:.0%} of the groups with signal (spread of returns {spread:.3g})"
    for key, form in (("success", ".1%"), ("return", ".3g")):
        if (value := metrics.get(f"rollout/{key}")) is not None:
            known = random.get(key)
            line += f"; {key} {value:{form}}" + ("" if known is None else f", of the random policy {known:{form}}")
    if silent != 1 or metrics.get("rollout/success", 0.0) >= SOLVED:
        return line, []
    start = "this policy gets no signal here, because"
    if recipe.rollout.sampling.temperature == 0:
        same = "so the episodes of a task are the same; set it to 1"
        return line, [f"{start} rollout.sampling.temperature is 0, {same}"]
    rows = environment_class(recipe.environment.type).self_contained
    # Episodes without success often have the return 0, whatever the reward can tell apart.
    if not rows and returns and set(returns) == {returns[0]} != {0.0}:
        same = f"every episode has the return {returns[0]:.4g}, whatever the task and the answer"
        return line, [f"{start} {same}; let environment.reward tell answers apart"]
    why = "no answer has the right form" if counts["rejected"] == 1 else "all episodes of a task end alike"
    return line, [
        f"{start} {why}: warm up first (`{_warm_up(recipe.environment, recipe.model.path)}`, then model.path=runs/warm/model), or choose easier tasks"
    ]


def _warm_up(environment: EnvironmentRecipe, model: str) -> str:
    """The command that imitates the environment's expert, or else rows of the user's, with the model `model`."""
    words = [] if model == ModelRecipe().path else [f"model.path={model}"]
    kind = environment_class(environment.type)
    if not kind.self_contained or kind.expert is Environment.expert:
        words.append("data.train=answers.jsonl")
    else:
        keys = {"type": environment.type, **environment.model_dump(mode="json", exclude_defaults=True)}
        words += [
            f"environment.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()
        ]
    return shlex.join(["posttrain", "sft", *words, "name=warm"])
