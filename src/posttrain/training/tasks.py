"""Checks of a run's tasks before it starts. Importing this module does not import torch."""

from collections.abc import Sequence

from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.environments.protocol import Environment
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import RolloutRecipe


def check_tasks(
    environment: EnvironmentRecipe, training: range, held_out: Sequence[range], reward_model: bool
) -> list[str]:
    """Check the seeds before a model is loaded; returns the environment's warnings.

    Raises:
        InputError: a seed has no task, or nothing rewards the answers.
    """
    kind = environment_class(environment.type)
    if not reward_model and not kind.has_reward(environment):
        raise InputError(
            "nothing scores the answers; name a function in environment.reward, a judge in environment.judge, or a reward "
            "model in reward.path"
        )
    return kind.check_tasks(environment, training, list(held_out))


def too_long(
    environment: EnvironmentRecipe,
    rollout: RolloutRecipe,
    renderer: Renderer,
    training: range,
    held_out: Sequence[range],
) -> tuple[frozenset[int], list[str]]:
    """Seeds whose prompt leaves less than `tokens_per_turn` of the episode's tokens, and a summary of them.

    Only tasks from the user's data are checked. They are left out of training and of evaluation.

    Raises:
        InputError: no seed of a range is left, too few training seeds are left for a step, or any is too long and the
            environment is `strict`.
    """
    kind = environment_class(environment.type)
    if kind.self_contained:
        return frozenset(), []
    room = rollout.tokens_per_episode - rollout.tokens_per_turn
    problems = Problems()
    left_out = set()
    for seeds in (training, *held_out):
        for seed in seeds:
            task: Environment = kind(environment)
            tokens = len(renderer.prompt(task.reset(seed).messages, task.primer))
            if tokens > room:
                left_out.add(seed)
                detail = f"{tokens} tokens, and rollout.tokens_per_turn = {rollout.tokens_per_turn} for the answer"
                problems.add(
                    f"prompt leaves no room for an answer within rollout.tokens_per_episode = {rollout.tokens_per_episode}",
                    kind.task_name(environment, seed),
                    detail,
                )
        if len(seeds) and left_out.issuperset(seeds):
            problems.require_any(f"seeds {seeds.start} to {seeds.stop - 1} of {environment.type}")
    problems.raise_if(getattr(environment, "strict", False))
    if len(training) and len(training) - len(left_out & set(training)) < rollout.groups_per_step:
        raise InputError(
            f"fewer than rollout.groups_per_step = {rollout.groups_per_step} training prompts leave room for an "
            "answer; raise rollout.tokens_per_episode or `seeds.count`"
        )
    return frozenset(left_out), problems.summary()
