"""Checks of a run's tasks before it starts. Importing this module does not import torch."""

from posttrain.data.held_out import TaskSplit
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.environments.protocol import Environment
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import RolloutRecipe


def check_tasks(environment: EnvironmentRecipe, tasks: TaskSplit, reward_model: bool) -> list[str]:
    """Check the tasks of a run before a model is loaded; returns the environment's warnings.

    Raises:
        InputError: a task cannot be played, or nothing rewards the answers.
    """
    kind = environment_class(environment.type)
    if not reward_model and not kind.has_reward(environment):
        raise InputError(
            "nothing scores the answers; name a function in environment.reward, a judge in environment.judge, or a reward "
            "model in reward.path"
        )
    return kind.check_tasks(environment, tasks.training, tasks.held_out)


def too_long(
    environment: EnvironmentRecipe,
    rollout: RolloutRecipe,
    renderer: Renderer,
    tasks: TaskSplit,
) -> tuple[frozenset[int], list[str]]:
    """Seeds whose prompt leaves less than `tokens_per_turn` of the episode's tokens, and warnings: a summary of them, and
    whether the others are fewer than a step needs.

    Only tasks from the user's data are checked. They are left out of training and of evaluation.

    Raises:
        InputError: no seed of a part is left, or any is too long and the environment is `strict`.
    """
    kind = environment_class(environment.type)
    if kind.self_contained:
        return frozenset(), []
    room = rollout.tokens_per_episode - rollout.tokens_per_turn
    problems = Problems()
    left_out = set()
    for seeds in (tasks.training, *tasks.held_out):
        for seed in seeds:
            one: Environment = kind(environment)
            tokens = len(renderer.prompt(one.reset(seed).messages, one.primer))
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
    warnings, left = problems.summary(), len(set(tasks.training) - left_out)
    if tasks.training and left < rollout.groups_per_step:
        warnings.append(
            f"rollout.groups_per_step is {rollout.groups_per_step}, and there are {left} tasks to train on, so a step samples "
            "some of them more than once"
        )
    return frozenset(left_out), warnings
