"""One step's episodes: tasks drawn in a fixed order, played in groups, filtered, and refilled where asked."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import EngineCounters
from posttrain.environments.protocol import Environment
from posttrain.episode import Episode, Outcome
from posttrain.errors import InputError, RunError
from posttrain.evaluation.summary import environment_scores, reports_success
from posttrain.recipe.components import environment_class
from posttrain.recipe.rollout import SamplingRecipe, SeedRange
from posttrain.recipe.stages import EvaluateRecipe, RlRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes
from posttrain.rollout.filters import has_signal, most_uncertain
from posttrain.seeds import random_stream
from posttrain.training.trainer import Trainer


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
class RolloutBatch:
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


Play = Callable[[RolloutWorker, Sequence[EpisodeRequest]], list[Episode]]
"""Plays the episodes of places and returns them in that order, with all that they are paid."""


def collect(
    player: RolloutWorker, recipe: RlRecipe, tasks: TaskOrder, step: int, play: Play = collect_episodes
) -> RolloutBatch:
    """Sample a step's groups; with the `dynamic` filter, again until enough of them have signal or rounds run out."""
    wanted = recipe.rollout.groups_per_step
    collected = RolloutBatch([], [])
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
        kept = most_uncertain(kept, recipe.rollout.filter.keep)
    collected.episodes = [episode for group in kept for episode in group]
    return collected


def _play_groups(
    player: RolloutWorker,
    recipe: RlRecipe,
    seeds: Sequence[int],
    step: int,
    first: int,
    collected: RolloutBatch,
    play: Play,
) -> list[list[Episode]]:
    """Play one group per seed; group ids go on from those already sampled in this step."""
    size = recipe.rollout.episodes_per_group
    ids = [first // size + i for i in range(len(seeds))]
    places = [
        EpisodeRequest(seed, group, index, (recipe.seed, "sampling", step, group, index))
        for group, seed in zip(ids, seeds, strict=True)
        for index in range(size)
    ]
    episodes = play(player, places)
    collected.sampled += episodes
    usable = _apply_failure_policy(episodes, recipe, collected)
    if recipe.credit.type == "remax":
        greedy = replace(player, sampling=SamplingRecipe(temperature=0.0))
        probes = [EpisodeRequest(s, g, size, (recipe.seed, "greedy", step, g)) for g, s in zip(ids, seeds, strict=True)]
        baselines = play(greedy, probes)
        collected.greedy |= {e.group: e for e in baselines if e.outcome is not Outcome.FAILED}
        without = sorted(set(ids) - set(collected.greedy))
        if without:
            collected.messages.append(
                f"groups {without} are left out: the greedy episode that remax compares with failed"
            )
            usable = [e for e in usable if e.group not in without]
    return [[e for e in usable if e.group == group] for group in ids]


def _apply_failure_policy(episodes: list[Episode], recipe: RlRecipe, collected: RolloutBatch) -> list[Episode]:
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
    if failures.action != "score":
        return [e for e in episodes if e.outcome is not Outcome.FAILED]
    for episode in failed:
        if episode.turns:
            last = episode.turns[-1]
            correction = failures.reward - episode.total_reward
            last.reward += correction
            episode.streams[last.stream].rewards[last.stop - 1] += correction
    return [e for e in episodes if e.streams]


def check_tasks(recipe: RlRecipe | EvaluateRecipe) -> list[str]:
    """What the environment has to say of the recipe's seeds, before a model is loaded; InputError where one of them
    has no task.
    """
    if recipe.reward is None and not environment_class(recipe.environment.type).has_reward(recipe.environment):
        raise InputError(
            "nothing scores the answers; name a rule or a judge in environment.rule or environment.judge, or a reward "
            "model in reward.path"
        )
    training, held_out = _ranges(recipe)
    return environment_class(recipe.environment.type).check_tasks(recipe.environment, training, held_out)


def too_long(recipe: RlRecipe | EvaluateRecipe, renderer: Renderer) -> tuple[frozenset[int], list[str]]:
    """Seeds whose prompt leaves less than `tokens_per_turn` of the episode's tokens, and one summary that names them.

    Only tasks from the user's data are looked at, and they are left out of training and evaluation; InputError if
    nothing is left of either, or, where the environment is `strict`, if any is too long.
    """
    kind = environment_class(recipe.environment.type)
    if kind.self_contained:
        return frozenset(), []
    rollout = recipe.rollout
    room = rollout.tokens_per_episode - rollout.tokens_per_turn
    problems = Problems()
    left_out = set()
    training, held_out = _ranges(recipe)
    for seeds in (training, *held_out):
        for seed in seeds:
            environment: Environment = kind(recipe.environment)
            tokens = len(renderer.prompt(environment.reset(seed).messages, environment.primer))
            if tokens > room:
                left_out.add(seed)
                detail = f"{tokens} tokens, and rollout.tokens_per_turn = {rollout.tokens_per_turn} for the answer"
                problems.add(
                    f"prompt leaves no room for an answer within rollout.tokens_per_episode = {rollout.tokens_per_episode}",
                    kind.task_name(recipe.environment, seed),
                    detail,
                )
        if len(seeds) and left_out.issuperset(seeds):
            problems.require_any(f"seeds {seeds.start} to {seeds.stop - 1} of {recipe.environment.type}")
    problems.raise_if(getattr(recipe.environment, "strict", False))
    if isinstance(recipe, RlRecipe) and len(training) - len(left_out & set(training)) < recipe.rollout.groups_per_step:
        raise InputError(
            f"fewer than rollout.groups_per_step = {recipe.rollout.groups_per_step} training prompts leave room for an "
            "answer; raise rollout.tokens_per_episode or `seeds.count`"
        )
    return frozenset(left_out), problems.summary()


def _ranges(recipe: RlRecipe | EvaluateRecipe) -> tuple[range, list[range]]:
    """Training and held-out seeds that the recipe plays."""
    evaluation = recipe.evaluation
    final = range(evaluation.final_seeds.start, evaluation.final_seeds.stop)
    if isinstance(recipe, EvaluateRecipe):
        return range(0), [final]
    curve = range(evaluation.seeds.start, evaluation.seeds.stop)
    return range(recipe.seeds.start, recipe.seeds.stop), [curve, final]


def rollout_metrics(collected: RolloutBatch, recipe: RlRecipe) -> dict[str, float]:
    """Success, return, lengths and spread over all sampled episodes, those that a filter removed included."""
    episodes = collected.sampled
    played = [e for e in episodes if e.outcome is not Outcome.FAILED]
    turns = [turn for e in episodes for turn in e.turns]
    by_group: dict[int, list[float]] = defaultdict(list)
    for episode in played:
        by_group[episode.group].append(episode.total_reward)
    spreads = [float(np.std(returns)) for returns in by_group.values() if len(returns) > 1]
    repeats = [_repeats(stream.ids, stream.sampled) for e in played for stream in e.streams]
    pairs = sum(count for _, count in repeats)
    metrics = {
        "rollout/episodes": float(len(episodes)),
        "rollout/kept": float(len(collected.episodes)),
        "rollout/failed": float(len(episodes) - len(played)),
        "rollout/turns": _mean([len(e.turns) for e in played]),
        "rollout/tokens_per_answer": _mean([turn.stop - turn.start for turn in turns]),
        "rollout/rejected_share": _mean([bool(turn.info.get("rejected")) for turn in turns]),
        "policy/repeated_share": sum(repeated for repeated, _ in repeats) / max(pairs, 1),
    }
    if reports_success(episodes):
        metrics["rollout/success"] = _mean([e.success for e in episodes])
    by_name: dict[str, list[float]] = defaultdict(list)
    for episode in played:
        for name, value in environment_scores(episode).items():
            by_name[name].append(value)
    metrics |= {f"rollout/score/{name}": _mean(found) for name, found in by_name.items()}
    if played:
        metrics["rollout/return"] = _mean([e.total_reward for e in played])
    if spreads:
        metrics["reward/group_spread"] = _mean(spreads)
    return metrics | collected.metrics


class StepCounters:
    """What the engine does for a step and the learner from here on, in tokens, and how fast."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._trained = trainer.learner.trained_tokens

    def metrics(self, collected: RolloutBatch) -> dict[str, float]:
        """Counts of the step that learns from `collected`; the speed is sampled tokens per second of sampling."""
        engine, seconds = collected.counters, collected.seconds
        return {
            "tokens/sampled": float(engine.sampled),
            "tokens/prefilled": float(engine.prefilled),
            "tokens/reused": float(engine.reused),
            "tokens/trained": float(self.trainer.learner.trained_tokens - self._trained),
            "speed/tokens_per_second": engine.sampled / seconds if seconds else 0.0,
            "optimizer/learning_rate": self.trainer.optimizer.learning_rate,
        }


def _repeats(ids: np.ndarray, sampled: np.ndarray) -> tuple[int, int]:
    """Sampled tokens equal to the token before them, and how many were compared."""
    return int((sampled[1:] & (ids[1:] == ids[:-1])).sum()), int(sampled[1:].sum())


def _mean(values: list) -> float:
    return float(np.mean(values)) if values else float("nan")
