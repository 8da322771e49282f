"""The classes of the worker processes, which `ClusterRun` starts as Ray actors, and the learner's side of their calls."""

import asyncio
import hashlib
import itertools
import json
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from pydantic import TypeAdapter

from posttrain.data.rendering import Renderer, end_token_of
from posttrain.distributed.ray.engine import load_bucket
from posttrain.distributed.ray.monitor import HeartbeatSender
from posttrain.distributed.ray.worker_group import WorkerClient, WorkerDied, call_in_parts
from posttrain.distributed.world import current_world, use_deterministic_kernels
from posttrain.engines.factory import open_engine
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.environments.protocol import Action, Environment, Observation, Step
from posttrain.episode import Episode
from posttrain.errors import naming
from posttrain.models.load import load_end_tokens, load_tokenizer, resolve_device, resolve_dtype
from posttrain.models.policy import Policy
from posttrain.recipe.components import EnvironmentRecipe, environment_class, environment_recipe
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.recipe.stages import Recipe
from posttrain.training.reward_scorer import OF_UNITS, RewardScorer, render_alike


class RemoteRewardModel:
    """The methods of a `RewardModel` that unit credit uses, for copies on workers. Rank 0 calls them in turn."""

    def __init__(self, source: RewardSource, workers: Sequence[WorkerClient]) -> None:
        self.workers = list(workers)
        self.tokenizer: Any = load_tokenizer(ModelRecipe(path=source.path))
        self.end_tokens = load_end_tokens(source.path, self.tokenizer)
        self.end_token = end_token_of(self.tokenizer, self.end_tokens)
        self._calls = itertools.count()
        self.units = self._next("the units", "units")

    def rewards(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(self._next(f"{len(streams)} rewards", "rewards", streams, sampled))

    def prefix_rewards(self, streams: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._next("rewards of prefixes", "prefix_rewards", streams, lengths)

    def _next(self, what: str, method: str, *arguments: Any) -> Any:
        worker = self.workers[next(self._calls) % len(self.workers)]
        return current_world().on_rank0(lambda: worker.call(what, method, *arguments))


class RayScorer(RewardScorer):
    """Scores episodes as a `RewardScorer` in this process, with reward models on workers."""

    def __init__(self, source: RewardSource, workers: Sequence[WorkerClient], policy: Policy) -> None:
        self.source = source
        self.workers = list(workers)
        self.lock = threading.Lock()
        self.statistics = self.workers[0].call("statistics", "statistics")
        with naming(path="reward.path"):
            self.model = RemoteRewardModel(source, workers)  # type: ignore[assignment]
        self.same_tokens = render_alike(self.model.tokenizer, policy.tokenizer)
        self.renderer = Renderer(self.model.tokenizer, self.model.end_tokens)

    def scores(self, episodes: Sequence[Episode]) -> list[float]:
        """Scores of the episodes, in order. Each copy of the reward model scores a contiguous part of them."""
        scores = call_in_parts(self.workers, episodes, "rewards", "scores")
        for episode, (_, units) in zip(episodes, scores, strict=True):
            if units is not None:
                last = episode.turns[-1]
                last.info = {**last.info, OF_UNITS: units}
        return [raw for raw, _ in scores]


class ReplayDiffers(Exception):
    """An environment did not repeat its outputs when it was replayed."""


class UnknownEnvironment(Exception):
    """The worker does not have the environment, because it was restarted."""


def digest(output: Observation | Step) -> str:
    """Digest of an environment's output without its info, which may contain times."""
    parts: list[Any] = [output.messages, output.state]
    if isinstance(output, Observation):
        parts.append(output.tools)
    else:
        parts += [output.reward, output.terminated, output.truncated, output.new_conversation]
    return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()


class RayEnvironment(Environment):
    """The environment of one episode, on a worker."""

    blocking = True

    def __init__(self, recipe: EnvironmentRecipe, worker: WorkerClient) -> None:
        super().__init__(recipe)
        self._worker = worker
        self._values = recipe.model_dump(mode="json")
        self._id = uuid4().hex
        self._seed = 0
        self._actions: list[Action] = []
        self._digests: list[str] = []
        weakref.finalize(self, _close, worker.actor, self._id)

    def reset(self, seed: int) -> Observation:
        self._seed, self._actions, self._digests = seed, [], []
        observation, self.primer = self._call("a reset", "reset", self._id, self._values, seed)
        self._digests.append(digest(observation))
        return observation

    def take(self, action: Action) -> Step:
        step = self._call("a step", "step", self._id, len(self._actions), action)
        self._actions.append(action)
        self._digests.append(digest(step))
        return step

    step = take
    act = take  # type: ignore[assignment]

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        """The result of a method. If the worker died, the episode is first replayed on the restarted worker."""
        lost = False
        while True:
            restart = self._worker.restarts
            try:
                if lost and method == "step":
                    self._replay()
                return self._worker.call_once(what, method, *arguments)
            except WorkerDied as died:
                self._worker.wait_for_restart(restart, died)
            except UnknownEnvironment:
                pass
            lost = True

    def _replay(self) -> None:
        values = (self._id, self._values, self._seed, self._actions)
        digests = self._worker.call_once("a replay", "replay", *values)
        for turn, (replayed, before) in enumerate(zip(digests, self._digests, strict=True)):
            if replayed != before:
                raise ReplayDiffers(
                    f"its worker died, and a replay with seed {self._seed} and the same actions differs at turn {turn}, so "
                    "its state is lost"
                )


def _close(actor: Any, environment_id: str) -> None:
    try:
        actor.close.remote(environment_id)
    except Exception:
        return  # Ray has shut down, including the worker


class Worker:
    """Base of all workers: sends heartbeats."""

    def __init__(self, name: str, monitor: str, seconds: float, folder: str, devices: tuple[int, ...] | None) -> None:
        """Start the worker.

        `monitor`: name of the monitor actor. `seconds`: time between heartbeats. `folder`: working directory. `devices`:
        visible GPUs, possibly none, if Ray does not assign them.
        """
        import ray

        if Path(folder).is_dir():
            os.chdir(folder)
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        self.heartbeat = HeartbeatSender(ray.get_actor(monitor), name, seconds)

    def get_pid(self) -> int:
        """Id of the process. Returns once the worker has started."""
        return os.getpid()

    def location(self) -> tuple[str, int, str, list[int], int]:
        """Address of the machine, a free port on it, its id in Ray, the GPUs of this process, and the process id."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpus = [int(device) for device in ray.get_gpu_ids()]
        return ray.util.get_node_ip_address(), port, ray.get_runtime_context().get_node_id(), gpus, os.getpid()


def recipe_from(document: str) -> Any:
    """The recipe in a JSON document."""
    return TypeAdapter(Recipe).validate_json(document)


def staged_model(recipe: Any) -> Any:
    """The `model` section for an engine's copy of the policy: on the CPU if vLLM has separate weights."""
    if recipe.engine.type == "local":
        return recipe.model
    dtype = resolve_dtype(recipe.model.dtype, resolve_device(recipe.model.device))
    kernels = {"fused": "auto", "load_in_4bit": False}  # nothing is computed there, and both need a GPU
    return recipe.model.model_copy(update={"device": "cpu", "dtype": str(dtype).removeprefix("torch."), **kernels})


class ModelWorker(Worker):
    """A worker with a model, of the recipe in a JSON document."""

    def __init__(self, document: str, *common: Any) -> None:
        super().__init__(*common)
        self.recipe = recipe_from(document)
        use_deterministic_kernels(self.recipe.hardware, self.recipe.model.device)


class EngineWorker(ModelWorker):
    """An engine with its own copy of the policy."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self.policy = Policy(staged_model(self.recipe), self.recipe.seed)
        self.engine = self._open()
        self.heartbeat.extra_progress = lambda: sum(vars(self.engine.counters).values())
        self._tasks: dict[asyncio.Task[Completion], int] = {}
        self._episodes: list[Any] = []

    def _open(self) -> Any:
        recipe, engine = self.recipe, self.recipe.engine
        if engine.type == "local":
            return open_engine(self.policy, engine)
        engine = engine.model_copy(update={"servers": 1, "tensor_parallel": recipe.hardware.engines.devices})
        rollout = recipe.rollout
        ahead = rollout.async_rollouts > 0
        return open_engine(self.policy, engine, rollout.tokens_per_episode, rollout.sampling, weights_change=ahead)

    async def load_weights(self, version: int, buckets: list[Any]) -> EngineCounters:
        """Cancel all requests and load the weights; returns the work done so far."""
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for episode in self._episodes:
            episode.__exit__(None, None, None)
        if left and self.recipe.engine.type == "local":
            self.engine = self._open()
        self._tasks, self._episodes = {}, []
        for reference in buckets:
            load_bucket(self.policy, await reference)
        await asyncio.to_thread(self.engine.load_weights, version)
        return replace(self.engine.counters)

    async def compute(
        self, opened: int, requests: tuple[tuple[int, Request], ...]
    ) -> tuple[list[tuple[int, Completion]], EngineCounters]:
        """Continue with `opened` open episodes and these new requests until a completion is finished."""
        while len(self._episodes) > opened:
            self._episodes.pop().__exit__(None, None, None)
        while len(self._episodes) < opened:
            self._episodes.append(self.engine.episode())
            self._episodes[-1].__enter__()
        for number, request in requests:
            self._tasks[asyncio.create_task(self.engine.generate(request))] = number
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finished = sorted((self._tasks.pop(task), task.result()) for task in done)
        return finished, replace(self.engine.counters)

    async def generate(self, request: Request) -> tuple[Completion, EngineCounters]:
        """Sample one completion, for engines that batch requests as they arrive."""
        with self.engine.episode():
            completion = await self.engine.generate(request)
        return completion, replace(self.engine.counters)

    async def sleep(self) -> None:
        await asyncio.to_thread(self.engine.sleep)


class EnvironmentWorker(Worker):
    """Environments of many episodes. Methods run in threads; each environment runs one method at a time."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self._environments: dict[str, tuple[Environment, int, Step | None]] = {}
        self._importing = threading.Lock()

    def reset(self, environment_id: str, values: dict[str, Any], seed: int) -> tuple[Observation, str]:
        """The first observation, and the primer of the policy's messages."""
        environment = self._make(values)
        observation = environment.reset(seed)
        self._environments[environment_id] = (environment, 0, None)
        self.heartbeat.progress += 1
        return observation, environment.primer

    def step(self, environment_id: str, number: int, action: Action) -> Step:
        """Step with `action`, which is the episode's action `number`. A repeated call returns the same step."""
        if environment_id not in self._environments:
            raise UnknownEnvironment
        environment, played, last = self._environments[environment_id]
        if last is not None and number == played - 1:
            return last
        if number != played:
            raise UnknownEnvironment
        step = environment.take(action)
        self._environments[environment_id] = (environment, played + 1, step)
        self.heartbeat.progress += 1
        return step

    def replay(self, environment_id: str, values: dict[str, Any], seed: int, actions: list[Action]) -> list[str]:
        """Replay an episode with its actions; returns the digests of the environment's outputs."""
        environment = self._make(values)
        outputs: list[Observation | Step] = [environment.reset(seed)]
        outputs += [environment.take(action) for action in actions]
        last = outputs[-1]
        self._environments[environment_id] = (environment, len(actions), last if isinstance(last, Step) else None)
        return [digest(output) for output in outputs]

    def close(self, environment_id: str) -> None:
        """Drop the environment of an episode that has ended."""
        self._environments.pop(environment_id, None)

    def _make(self, values: dict[str, Any]) -> Environment:
        # The environment's class may be in a user's file, which two threads must not import at the same time.
        with self._importing:
            recipe = environment_recipe(values)
            kind = environment_class(recipe.type)
        return kind(recipe)


class RewardWorker(ModelWorker):
    """A copy of the reward model, with methods of `RewardModel`, without gradient."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        model = self.recipe.model
        self.scorer = RewardScorer(self.recipe.reward, load_tokenizer(model), model.device)

    def statistics(self) -> tuple[float, float]:
        """Mean and standard deviation that rewards are normalized with."""
        return self.scorer.statistics

    def units(self) -> Any:
        return self.scorer.model.units

    def rewards(self, streams: list[np.ndarray], sampled: list[np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            rewards = self.scorer.model.rewards(streams, sampled).cpu().numpy()
        self.heartbeat.progress += 1
        return rewards

    def prefix_rewards(self, streams: list[np.ndarray], lengths: list[np.ndarray]) -> list[np.ndarray]:
        self.heartbeat.progress += 1
        return self.scorer.model.prefix_rewards(streams, lengths)

    def scores(self, episodes: list[Episode]) -> list[tuple[float, Any]]:
        """The score of each episode, and the scores of its units if the model rewards units."""
        raws = self.scorer.scores(episodes)
        self.heartbeat.progress += 1
        return [(raw, episode.turns[-1].info.get(OF_UNITS)) for raw, episode in zip(raws, episodes, strict=True)]
