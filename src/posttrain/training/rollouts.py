"""The episodes of a step: tasks in a fixed order, played in groups by an engine, filtered and refilled."""

import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current_world
from posttrain.engines.factory import open_engine
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Engine, EngineCounters
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.episode import CUT_OFF, Episode, Outcome, reports_success, score_names
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.agent import AgentRecipe
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.agents.endpoint import AgentEndpoint
from posttrain.rollout.agents.worker import AgentEnding, AgentWorker
from posttrain.rollout.driver import (
    EpisodeRequest,
    Played,
    RolloutWorker,
    Scorer,
    collect_episodes,
    quiet,
    unscored_message,
    without_failures,
)
from posttrain.rollout.filters import has_signal, most_uncertain
from posttrain.seeds import random_stream


def sharding_of(engine: Engine) -> Literal["none", "by_group", "rank0"]:
    """How several processes divide episodes: an engine in this process plays this process's groups; an engine outside
    this process plays all groups, on behalf of rank 0."""
    if current_world().size == 1:
        return "none"
    return "by_group" if isinstance(engine, LocalEngine) else "rank0"


class RolloutManager:
    """An engine that samples with the weights of a policy, and the workers that play episodes with it."""

    model_name = "model"
    """Name of the evaluated model in the final table."""

    def __init__(
        self,
        policy: Policy,
        engine: LocalEngineRecipe | VllmEngineRecipe,
        environment: EnvironmentRecipe,
        rollout: RolloutRecipe,
        scorer: Scorer | None = None,
        sampling: SamplingRecipe | None = None,
        logs: Path | None = None,
        agent: AgentRecipe | None = None,
    ) -> None:
        """Start the engine. `scorer`: adds a reward model's rewards to the episodes. `sampling`: the settings for which
        log-probabilities must be exact; default `rollout.sampling`. `logs`: directory for the logs of an engine in
        another process. `agent`: the program that plays the episodes."""
        self.sleepers: list[Any] = []
        """Optimizers and critics whose state leaves the device while episodes are sampled, by `sleep` and `wake`."""
        self.played: Played = quiet
        """Called as each episode of a training batch ends, unless another thread samples it."""
        self.policy, self.rollout, self.scorer = policy, rollout, scorer
        self.agent, self.engine_settings = agent, engine
        self.environment = EnvironmentFactory(environment)
        self.renderer = Renderer(policy.tokenizer, policy.end_tokens)
        ahead = rollout.async_rollouts > 0
        self.engine = open_engine(policy, engine, rollout.tokens_per_episode, sampling or rollout.sampling, logs, ahead)
        self.lock = threading.Lock()
        """Held while the engine is in use: with async rollouts, another thread also samples with it."""

    def template_warnings(self) -> list[str]:
        """Warnings about a chat template that changes system messages or earlier turns."""
        warnings = self.renderer.warnings()
        if self.renderer.rewrites_answers:
            warnings.append("the chat template rewrites earlier answers, so every turn becomes its own stream")
        elif self.renderer.rewrites_thoughts:
            warnings.append(
                "the chat template drops earlier thinking, so the turn after a thinking answer starts a new stream"
            )
        return warnings

    @contextmanager
    def worker(
        self, sampling: SamplingRecipe, environment: EnvironmentFactory | None = None
    ) -> Iterator[RolloutWorker]:
        """A worker with the policy's current weights, by default in the training environment.

        The engine sleeps outside the block. The KV cache starts empty, so samples do not depend on an earlier
        evaluation or on a resume.
        """
        with self.lock:
            for optimizer in self.sleepers:
                optimizer.sleep()
            # An engine of rank 0 wakes up on the GPUs of all processes, which have to leave it memory first.
            self.policy.release_cached_memory()
            current_world().barrier()
            self.engine.load_weights(self.policy.version)
            worker = RolloutWorker(
                engine=self.engine,
                renderer=self.renderer,
                environment=environment or self.environment,
                rollout=self.rollout,
                sampling=sampling,
                version=self.policy.version,
                scorer=self.scorer,
                sharding=sharding_of(self.engine),
            )
            if self.agent is None:
                yield worker
            else:
                with AgentEndpoint() as endpoint:
                    yield AgentWorker(**vars(worker), agent=self.agent, endpoint=endpoint)
            self.engine.sleep()
            current_world().barrier()  # engines of rank 0 leave the GPUs of all processes before optimizers return
            for optimizer in self.sleepers:
                optimizer.wake()


class TaskOrder:
    """Environment seeds, reshuffled for each pass. `drawn` counts the seeds taken so far."""

    def __init__(self, seeds: Sequence[int], run_seed: int, left_out: frozenset[int] = frozenset()) -> None:
        """`left_out`: seeds that are never drawn."""
        self.seeds = [seed for seed in seeds if seed not in left_out]
        self.run_seed, self.drawn = run_seed, 0
        self._shuffled: tuple[int, np.ndarray] | None = None
        """The pass that was drawn from last, and its order."""
        self._digest = hashlib.blake2b(np.array(self.seeds, dtype=np.int64).tobytes(), digest_size=8).hexdigest()

    def take(self, count: int) -> list[int]:
        """The next `count` environment seeds."""
        taken = []
        for number in range(self.drawn, self.drawn + count):
            passes, place = divmod(number, len(self.seeds))
            if self._shuffled is None or self._shuffled[0] != passes:  # a shuffle of many seeds takes long
                self._shuffled = passes, random_stream(self.run_seed, "tasks", passes).permutation(len(self.seeds))
            taken.append(self.seeds[int(self._shuffled[1][place])])
        self.drawn += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "tasks": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("tasks", self._digest) != self._digest:
            raise InputError(
                "the training tasks differ from those at the start of this run, because its files have changed; restore "
                "the files, or start a run with another name"
            )
        self.drawn = state["drawn"]


@dataclass
class RolloutBatch:
    """The episodes that were sampled for one step."""

    episodes: list[Episode]
    """The episodes that the update is computed from, ordered by group."""
    sampled: list[Episode]
    """All episodes, including those that a filter or a failure removed."""
    greedy: dict[int, Episode] = field(default_factory=dict)
    """Group id -> its greedy episode, for `remax`."""
    warnings: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics about how the batch was sampled."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    """Counters of the engine's work for the batch."""
    seconds: float = 0.0
    """Time that sampling took."""


Play = Callable[[RolloutWorker, Sequence[EpisodeRequest]], list[Episode]]
"""Plays the requested episodes and returns them in that order, with all of their rewards."""


def collect(
    worker: RolloutWorker, tasks: TaskOrder, step: int, greedy: bool = False, play: Play = collect_episodes
) -> RolloutBatch:
    """Sample the groups of a step. The `dynamic` filter samples more groups until enough of them have signal. `greedy`:
    also play one greedy episode per group, the baseline of `remax`. RunError if more episodes failed than
    `failures.max_share` allows."""
    rollout = worker.rollout
    wanted, dynamic = rollout.groups_per_step, rollout.filter.type == "dynamic"
    batch = RolloutBatch([], [])
    kept: list[list[Episode]] = []
    rounds = rollout.filter.max_rounds if dynamic else 1
    for _ in range(rounds):
        groups = _play_groups(worker, tasks, wanted - len(kept), step, batch, greedy, play)
        kept += [group for group in groups if has_signal(group)] if dynamic else groups
        if len(kept) == wanted:
            break
    if dynamic and len(kept) < wanted:
        batch.warnings.append(f"only {len(kept)} of {wanted} groups have signal after {rounds} rounds of sampling")
    if rollout.filter.type == "uncertainty":
        kept = most_uncertain(kept, rollout.filter.keep)
    batch.episodes = [episode for group in kept for episode in group]
    return batch


def _play_groups(
    worker: RolloutWorker, tasks: TaskOrder, count: int, step: int, batch: RolloutBatch, greedy: bool, play: Play
) -> list[list[Episode]]:
    """Play one group for each of the next `count` tasks. Group ids continue those of the batch."""
    size, seed = worker.rollout.episodes_per_group, tasks.run_seed
    first = len(batch.sampled) // size
    groups = dict(enumerate(tasks.take(count), first))
    requests = [
        EpisodeRequest(task, group, index, (seed, "sampling", step, group, index))
        for group, task in groups.items()
        for index in range(size)
    ]
    episodes = play(worker, requests)
    batch.sampled += episodes
    usable, message = without_failures(episodes, worker.rollout.failures)
    batch.warnings += [message] if message else [] if usable else [unscored_message(episodes)]
    if greedy:
        probes = [EpisodeRequest(task, group, size, (seed, "greedy", step, group)) for group, task in groups.items()]
        baselines = play(replace(worker, sampling=SamplingRecipe(temperature=0.0)), probes)
        batch.greedy |= {e.group: e for e in baselines if e.has_return}
        without = sorted(set(groups) - set(batch.greedy))
        if without:
            batch.warnings.append(
                f"groups {without} are left out: the greedy episode that remax compares with failed or has no reward"
            )
            usable = [e for e in usable if e.group not in without]
    return [[e for e in usable if e.group == group] for group in groups]


def counters_since(before: EngineCounters, engine: Engine) -> EngineCounters:
    """The work of the engine since it had the counters `before`, and the largest size of its cache so far."""
    work = {name: value - getattr(before, name) for name, value in asdict(engine.counters).items()}
    return EngineCounters(**work | {"cache_bytes": engine.counters.cache_bytes})


@dataclass
class SyncRollouts:
    """The batches of a run, each sampled on request: `rollout.async_rollouts: 0`."""

    manager: RolloutManager
    tasks: TaskOrder
    greedy: bool = False
    """As in `collect`."""
    phase: ClassVar[str] = "rollout"
    """Name of the time of `take` in the metrics."""

    def running(self, step: int) -> AbstractContextManager[None]:
        """Context manager inside which batches are sampled, starting with that of `step`."""
        return nullcontext()

    def take(self, step: int) -> RolloutBatch:
        """Sample with the current weights. Several processes divide the groups, and each receives all of them."""
        engine = self.manager.engine
        begun, counters = time.perf_counter(), replace(engine.counters)
        with self.manager.worker(self.manager.rollout.sampling) as worker:
            loaded = time.perf_counter() - begun
            play = partial(collect_episodes, played=self.manager.played)
            batch = collect(worker, self.tasks, step, self.greedy, play)
            batch.metrics["time/weights"] = loaded
        work = asdict(counters_since(counters, engine))
        ranks = current_world().gather([work])
        batch.counters = EngineCounters(**{name: sum(rank[name] for rank in ranks) for name in work})
        batch.seconds = time.perf_counter() - begun
        return batch

    def learned(self, step: int) -> None:
        """Called when the policy has the weights after `step`."""


AGENT_COUNTS = ("calls", "streams", "retried", "abandoned", "refused", "late", "malformed_calls")
"""Sums over the episodes of agents."""


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Success, return, lengths, spread and speed over all sampled episodes, including those that a filter removed.

    Failed episodes count as not successful. They and episodes to which no reward applies are in no other mean, sum or share
    but the counts of episodes and the `agent/`, `tokens/` and `speed/` metrics. A mean without values is left out.
    """
    episodes = batch.sampled
    failed, unscored = (sum(e.outcome is outcome for e in episodes) for outcome in (Outcome.FAILED, Outcome.UNSCORED))
    played = [e for e in episodes if e.has_return]
    turns = [turn for e in played for turn in e.turns]
    by_group: dict[int, list[float]] = defaultdict(list)
    for episode in played:
        by_group[episode.group].append(episode.total_reward)
    spreads = [float(np.std(returns)) for returns in by_group.values() if len(returns) > 1]
    streams = [stream for e in played for stream in e.streams]
    repeated = sum(int((s.sampled[1:] & (s.ids[1:] == s.ids[:-1])).sum()) for s in streams)
    pairs = sum(int(s.sampled[1:].sum()) for s in streams)
    answers = Counter(turn.answer for turn in turns)
    metrics = {
        "rollout/episodes": float(len(episodes)),
        "rollout/kept": float(len(batch.episodes)),
        "rollout/failed": float(failed),
        **_mean("rollout/turns", [len(e.turns) for e in played]),
        **_mean("rollout/tokens_per_answer", [turn.stop - turn.start for turn in turns]),
        **_mean("rollout/rejected_share", [bool(turn.info.get("rejected")) for turn in turns]),
        **_mean("rollout/truncated_share", [turn.stop_reason in CUT_OFF for turn in turns]),
        **({"rollout/same_answer_share": max(answers.values()) / len(turns)} if turns else {}),
        **_mean("rollout/return", [e.total_reward for e in played]),
        **_mean("reward/group_spread", spreads),
        "policy/repeated_share": repeated / max(pairs, 1),
        "tokens/sampled": float(batch.counters.sampled),
        "tokens/prefilled": float(batch.counters.prefilled),
        "tokens/reused": float(batch.counters.reused),
        "speed/tokens_per_second": batch.counters.sampled / batch.seconds if batch.seconds else 0.0,
    }
    if batch.counters.decoding_seconds:
        metrics["time/prompts"] = batch.counters.prompt_seconds
        metrics["time/decoding"] = batch.counters.decoding_seconds
    if batch.counters.cache_bytes:
        metrics["memory/key_value_cache"] = float(batch.counters.cache_bytes)
    if reports_success(episodes):
        metrics |= _mean("rollout/success", [e.success for e in episodes if e.outcome is not Outcome.UNSCORED])
    if unscored:
        metrics["rollout/unscored"] = float(unscored)
    for name in score_names(played):
        values = [e.scores[name] for e in played if name in e.scores]
        metrics |= _mean(f"rollout/score/{name}", values)
        if len(values) < len(played):
            metrics[f"rollout/score_n/{name}"] = float(len(values))
    if counted := [turn.info for turn in turns if "tool_calls" in turn.info]:
        calls, malformed = (sum(info[key] for info in counted) for key in ("tool_calls", "malformed_calls"))
        metrics["tools/calls"] = calls / len(played)
        metrics["tools/malformed_share"] = malformed / max(calls + malformed, 1)
        metrics["tools/failed_share"] = sum(info.get("failed_calls", 0) for info in counted) / max(calls, 1)
    if agents := [e.info for e in episodes if "ending" in e.info]:
        metrics |= {f"agent/{end}": float(sum(i["ending"] == end for i in agents)) for end in AgentEnding}
        metrics |= {f"agent/{name}": float(sum(i[name] for i in agents)) for name in AGENT_COUNTS}
    return metrics | batch.metrics


def _mean(name: str, values: list) -> dict[str, float]:
    return {name: float(np.mean(values))} if values else {}
