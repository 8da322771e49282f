"""One step's episodes: tasks drawn in a fixed order, played in groups, filtered, and refilled where asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.engines.protocol import EngineCounters
from posttrain.errors import RunError
from posttrain.recipe.rollout import SamplingRecipe, SeedRange
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.driver import Place, Player, play_all
from posttrain.rollout.filters import has_signal, uncertainty
from posttrain.rollout.streams import Episode, Outcome
from posttrain.seeds import random_stream


class TaskOrder:
    """Environment seeds in an order shuffled anew for each pass; `drawn` says how far it has come."""

    def __init__(self, seeds: SeedRange, run_seed: int, drawn: int = 0, left_out: frozenset[int] = frozenset()) -> None:
        """`left_out`: seeds of the range that are never drawn."""
        self.range, self.left_out = seeds, left_out
        self.seeds = [seed for seed in range(seeds.start, seeds.stop) if seed not in left_out]
        self.run_seed = run_seed
        self.drawn = drawn

    def take(self, count: int) -> list[int]:
        """The next `count` environment seeds."""
        taken = []
        for number in range(self.drawn, self.drawn + count):
            passes, place = divmod(number, len(self.seeds))
            taken.append(self.seeds[int(self._order(passes)[place])])
        self.drawn += count
        return taken

    def copy(self) -> "TaskOrder":
        """One that goes on from here by itself."""
        return TaskOrder(self.range, self.run_seed, self.drawn, self.left_out)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

    def _order(self, passes: int) -> np.ndarray:
        return random_stream(self.run_seed, "tasks", passes).permutation(len(self.seeds))


@dataclass
class Collected:
    """What one step sampled."""

    episodes: list[Episode]
    """Those that go on to the update, in the order of groups."""
    sampled: list[Episode]
    """All that were played, also those that a filter or a failure removed."""
    greedy: dict[int, Episode] = field(default_factory=dict)
    """The greedy episode of each group, for `remax`."""
    messages: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """What is to be logged of how it was sampled."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    """The engine's work for it."""
    seconds: float = 0.0
    """Time that sampling took."""


Play = Callable[[Player, Sequence[Place]], list[Episode]]
"""Plays the episodes of places and returns them in that order, with all that they are paid."""


def collect(player: Player, recipe: RlRecipe, tasks: TaskOrder, step: int, play: Play = play_all) -> Collected:
    """Sample a step's groups; with the `dynamic` filter, again until enough of them have signal or rounds run out."""
    wanted = recipe.rollout.groups_per_step
    collected = Collected([], [])
    kept: list[list[Episode]] = []
    rounds = recipe.rollout.filter.max_rounds if recipe.rollout.filter.type == "dynamic" else 1
    for _ in range(rounds):
        seeds, first = tasks.take(wanted - len(kept)), len(collected.sampled)
        groups = _play_groups(player, recipe, seeds, step, first, collected, play)
        kept += [g for g in groups if has_signal(g)] if recipe.rollout.filter.type == "dynamic" else groups
        if len(kept) == wanted:
            break
    if recipe.rollout.filter.type == "dynamic" and len(kept) < wanted:
        collected.messages.append(f"only {len(kept)} of {wanted} groups have signal after {rounds} rounds of sampling")
    if recipe.rollout.filter.type == "uncertainty":
        kept = uncertainty(kept, recipe.rollout.filter.keep)
    collected.episodes = [episode for group in kept for episode in group]
    return collected


def _play_groups(
    player: Player,
    recipe: RlRecipe,
    seeds: Sequence[int],
    step: int,
    first: int,
    collected: Collected,
    play: Play,
) -> list[list[Episode]]:
    """Play one group per seed; group ids go on from those already sampled in this step."""
    size = recipe.rollout.episodes_per_group
    ids = [first // size + i for i in range(len(seeds))]
    places = [
        Place(seed, group, index, (recipe.seed, "sampling", step, group, index))
        for group, seed in zip(ids, seeds, strict=True)
        for index in range(size)
    ]
    episodes = play(player, places)
    collected.sampled += episodes
    usable = _apply_failure_policy(episodes, recipe, collected)
    if recipe.credit.type == "remax":
        greedy = replace(player, sampling=SamplingRecipe(temperature=0.0))
        probes = [Place(s, g, size, (recipe.seed, "greedy", step, g)) for g, s in zip(ids, seeds, strict=True)]
        baselines = play(greedy, probes)
        collected.greedy |= {e.group: e for e in baselines if e.outcome is not Outcome.FAILED}
        without = sorted(set(ids) - set(collected.greedy))
        if without:
            collected.messages.append(
                f"groups {without} are left out: the greedy episode that remax compares with failed"
            )
            usable = [e for e in usable if e.group not in without]
    return [[e for e in usable if e.group == group] for group in ids]


def _apply_failure_policy(episodes: list[Episode], recipe: RlRecipe, collected: Collected) -> list[Episode]:
    """Drop failed episodes, or give them the recipe's reward; too many of them stop the run."""
    failed = [e for e in episodes if e.outcome is Outcome.FAILED]
    failures = recipe.rollout.failures
    if failed:
        collected.messages.append(
            f"{len(failed)} of {len(episodes)} episodes failed, the first in group {failed[0].group} "
            f"(environment seed {failed[0].seed}): {failed[0].failure}"
        )
    if len(failed) > failures.max_share * len(episodes):
        raise RunError(
            f"{collected.messages[-1]}; that is more than rollout.failures.max_share = {failures.max_share}, so the run "
            "stops here; mend the environment and go on with --resume"
        )
    if failures.policy != "score":
        return [e for e in episodes if e.outcome is not Outcome.FAILED]
    for episode in failed:
        if episode.turns:
            last = episode.turns[-1]
            correction = failures.reward - episode.total_reward
            last.reward += correction
            episode.streams[last.stream].rewards[last.stop - 1] += correction
    return [e for e in episodes if e.streams]
