"""How fast this machine samples and trains, measured in a few seconds, and how many steps of a run fit into a time."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from posttrain.environments.protocol import task_split
from posttrain.episode import Advantages, Episode
from posttrain.errors import RunError
from posttrain.models.cuda.memory import release_cached_memory
from posttrain.models.packing import row_length
from posttrain.models.policy import Policy
from posttrain.recipe.rl import RlRecipe
from posttrain.training.learner import Learner
from posttrain.training.rollouts import RolloutManager, SyncRollouts, TaskOrder

T = TypeVar("T")
Play = Callable[[int, int], list[Episode]]
"""`play(groups, step)` samples that many groups of episodes with the random numbers of that step."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a batch of episodes."""

    fixed: float
    """Whatever their number."""
    each: float
    """In addition, per episode."""

    def seconds(self, episodes: int) -> float:
        """Expected seconds of a batch of `episodes`."""
        return self.fixed + episodes * self.each


@dataclass(frozen=True)
class Speed:
    """A measurement of sampling and training."""

    dtype: str
    threads: int
    in_flight: int
    """Episodes that were sampled at a time."""
    turns: float
    """Their mean number of turns."""
    sampling: Cost
    training: Cost
    """Of an update in which every sampled token has credit."""
    tokens: float
    """Tokens per second of the measured update."""


def measure(policy: Policy, play: Play, most: int, seconds: float, tokens_per_batch: int = 4096) -> Speed:
    """Sample and train for about `seconds` each, on up to `most` groups. The weights of `policy` change.

    One group and then several, and two episodes and then more: two sizes separate the time per episode from the time that
    does not depend on their number. A slow machine takes longer: the least work is two groups, and three updates on two
    episodes.

    Raises:
        RunError: the optimizer skipped an update, whose time would be meaningless.
    """
    learner = Learner(policy, learning_rate=1e-9, tokens_per_batch=tokens_per_batch)

    def update(episodes: list[Episode]) -> None:
        metrics = learner.update(episodes, every_token(episodes))
        if metrics["optimizer/skipped"] or "optimizer/no_signal" in metrics:
            raise RunError(f"the optimizer skipped the measured update ({metrics}); report this output as a bug")

    play(1, 0)  # compiles the kernel and allocates the cache
    sampling = []
    episodes, took = timed(lambda: play(1, 1))
    sampling.append((len(episodes), took))
    if (groups := min(most, 1 + int(2 * seconds / took))) > 1:
        episodes, took = timed(lambda: play(groups, 2))
        sampling.append((len(episodes), took))
    batch = episodes[:2]
    update(batch)  # allocates the optimizer's state
    updating = [(len(batch), timed(lambda: update(batch))[1])]
    if (many := min(len(episodes), 2 * int(2 * seconds / updating[0][1]))) > 2:
        batch = episodes[:many]
        updating.append((many, timed(lambda: update(batch))[1]))
    return Speed(
        dtype=str(next(policy.model.parameters()).dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        in_flight=len(episodes),
        turns=float(np.mean([len(episode.turns) for episode in episodes])),
        sampling=cost(sampling),
        training=cost(updating),
        tokens=computed_tokens(batch) / updating[-1][1],
    )


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work` and the seconds that it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def cost(measured: list[tuple[int, float]]) -> "Cost":
    """The line through one or two measurements of (episodes, seconds), neither falling nor negative at 0 episodes."""
    (few, first), (many, last) = measured[0], measured[-1]
    each = last / many
    if many > few:
        each = min(each, max(0.0, last - first) / (many - few))
    return Cost(last - many * each, each)


def every_token(episodes: list[Episode]) -> Advantages:
    """Credit for every sampled token. The optimizer skips tokens without credit, which would look like a fast update.

    Untrained models have nearly equal returns, so their advantages are 0.
    """
    return Advantages([[stream.sampled.astype(np.float32) for stream in episode.streams] for episode in episodes])


def computed_tokens(episodes: list[Episode]) -> int:
    """Tokens of an update on `episodes`: those that the episodes of a group share are computed once."""
    return sum(
        row_length([stream.ids for episode in episodes if episode.group == group for stream in episode.streams])
        for group in {episode.group for episode in episodes}
    )


def measure_run(recipe: RlRecipe, seconds: float = 2.0) -> Speed:
    """Measure the policy of `recipe` on its first training tasks. The run is not changed: the policy is another copy."""
    policy = Policy(recipe.model, recipe.seed)
    manager = RolloutManager(policy, recipe.engine, recipe.environment, recipe.rollout)
    tasks = TaskOrder(task_split(recipe.environment, recipe.evaluation, recipe.seeds).training, recipe.seed)

    def play(groups: int, step: int) -> list[Episode]:
        manager.rollout = recipe.rollout.model_copy(update={"groups_per_step": groups})
        return SyncRollouts(manager, tasks).take(step).sampled

    try:
        return measure(policy, play, recipe.rollout.groups_per_step, seconds, recipe.learner.tokens_per_batch)
    finally:
        release_cached_memory(policy.device)


def expected_seconds(recipe: RlRecipe, speed: Speed, steps: int, curve: int) -> float:
    """Expected duration of `steps` steps and the evaluations between them, each on `curve` held-out seeds."""
    episodes = recipe.rollout.groups_per_step * recipe.rollout.episodes_per_group
    updates = recipe.learner.updates_per_step
    update = speed.training.seconds(math.ceil(episodes / updates))
    step = speed.sampling.seconds(episodes) + recipe.learner.epochs_per_step * updates * update
    evaluations = steps // recipe.evaluation.every if recipe.evaluation.every else 0
    return steps * step + evaluations * speed.sampling.seconds(curve * recipe.evaluation.episodes_per_seed)


def steps_that_fit(recipe: RlRecipe, speed: Speed) -> tuple[int, float]:
    """The most steps, up to `recipe.steps`, that are expected to end within `recipe.max_minutes`, at least one; and
    their expected seconds.
    """
    curve = len(task_split(recipe.environment, recipe.evaluation, recipe.seeds).validation)
    limit = 60 * (recipe.max_minutes or 0)
    expected = (expected_seconds(recipe, speed, steps, curve) for steps in range(recipe.steps, 0, -1))
    return next(
        ((recipe.steps - fewer, seconds) for fewer, seconds in enumerate(expected) if seconds <= limit),
        (1, expected_seconds(recipe, speed, 1, curve)),
    )
