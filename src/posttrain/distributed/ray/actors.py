"""What runs in the worker processes. The classes become Ray actors where they are started."""

import asyncio
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from posttrain.distributed.ray.watch import Reporter
from posttrain.distributed.ray.worker_group import Gone, Member
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.episode import Episode
from posttrain.recipe.components import EnvironmentRecipe, environment_class, environment_recipe
from posttrain.recipe.model import RewardSource
from posttrain.recipe.stages import Recipe
from posttrain.training.reward_scorer import OF_UNITS, RewardScorer


class RayScorer(RewardScorer):
    """Pays episodes as a scorer in this process does; what the model says comes from the workers."""

    def __init__(self, source: RewardSource, members: Sequence[Member]) -> None:
        self.source = source
        self.members = list(members)
        self.lock = threading.Lock()
        self.statistics = self.members[0].ask("its statistics", "statistics")

    def scores(self, episodes: Sequence[Episode]) -> list[float]:
        """As of the model in this process; copies read whole runs of episodes, one after another."""
        count = len(self.members)
        each = -(-len(episodes) // count) if episodes else 0
        parts = [list(episodes[i * each : (i + 1) * each]) for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            asked = [
                pool.submit(member.ask, f"{len(part)} rewards", "scores", part)
                for member, part in zip(self.members, parts, strict=True)
                if part
            ]
            found = [pair for done in asked for pair in done.result()]
        for episode, (_, units) in zip(episodes, found, strict=True):
            if units is not None:
                last = episode.turns[-1]
                last.info = {**last.info, OF_UNITS: units}
        return [raw for raw, _ in found]


class ReplayDiffers(Exception):
    """An environment does not do again what it did."""


class Unknown(Exception):
    """The worker has no such environment: it was started again since."""


def digest(said: Observation | Step) -> str:
    """Of what an environment said: all but its info, which may hold times."""
    parts: list[Any] = [said.messages, said.state]
    if isinstance(said, Step):
        parts += [said.reward, said.terminated, said.truncated, said.new_conversation]
    return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()


class RayEnvironment(Environment):
    """One episode's environment, in the worker `member`."""

    blocking = True

    def __init__(self, recipe: EnvironmentRecipe, member: Member) -> None:
        super().__init__(recipe)
        self._member = member
        self._values = recipe.model_dump(mode="json")
        self._id = uuid4().hex
        self._seed = 0
        self._answers: list[str] = []
        self._said: list[str] = []
        weakref.finalize(self, _close, member.actor, self._id)

    def reset(self, seed: int) -> Observation:
        self._seed, self._answers, self._said = seed, [], []
        observation, self.primer = self._asked("a reset", "reset", self._id, self._values, seed)
        self._said.append(digest(observation))
        return observation

    def step(self, action: str) -> Step:
        step = self._asked("a step", "step", self._id, len(self._answers), action)
        self._answers.append(action)
        self._said.append(digest(step))
        return step

    def _asked(self, what: str, method: str, *arguments: Any) -> Any:
        """The worker's answer; after its death, that of the one in its place, where the episode is played again first."""
        while True:
            life = self._member.lives
            try:
                return self._member.once(what, method, *arguments)
            except Gone as gone:
                self._member.await_return(life, gone)
            except Unknown:
                pass
            if method == "step":
                self._rebuild()

    def _rebuild(self) -> None:
        while True:
            life = self._member.lives
            try:
                said = self._member.once("a replay", "replay", self._id, self._values, self._seed, self._answers)
            except Gone as gone:
                self._member.await_return(life, gone)
                continue
            for turn, (again, before) in enumerate(zip(said, self._said, strict=True)):
                if again != before:
                    raise ReplayDiffers(
                        f"its worker died, and played again with seed {self._seed} and the same answers it says something "
                        f"else at turn {turn}, so its state is lost"
                    )
            return


def _close(actor: Any, identity: str) -> None:
    try:
        actor.close.remote(identity)
    except Exception:
        return  # Ray is gone, and the worker with it


class Worker:
    """What every worker does: it reports, and says that it is there."""

    def __init__(self, name: str, watch: str, seconds: float, folder: str, devices: tuple[int, ...] | None) -> None:
        """`watch`: name of its actor; `seconds` between reports; `folder`: where relative paths begin; `devices`: GPUs to see, where Ray does not say."""
        import ray

        if Path(folder).is_dir():
            os.chdir(folder)
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        self.reporter = Reporter(ray.get_actor(watch), name, seconds)

    def about(self) -> int:
        """The process; the answer comes once the worker has begun."""
        return os.getpid()


def recipe_from(document: str) -> Any:
    """The recipe of a JSON document."""
    from pydantic import TypeAdapter

    return TypeAdapter(Recipe).validate_json(document)


class EngineWorker(Worker):
    """An engine with weights of its own."""

    def __init__(self, document: str, *common: Any) -> None:
        super().__init__(*common)
        from posttrain.models.policy import Policy

        self.recipe = recipe_from(document)
        self.policy = Policy(self.recipe.model, self.recipe.seed)
        self.engine = self._opened()
        self.reporter.more_progress = lambda: sum(vars(self.engine.counters).values())
        self._tasks: dict[asyncio.Task[Completion], int] = {}
        self._episodes: list[Any] = []

    def _opened(self) -> Any:
        from posttrain.engines.factory import open_engine

        recipe, engine = self.recipe, self.recipe.engine
        if engine.type == "local":
            return open_engine(self.policy, engine)
        engine = engine.model_copy(update={"servers": 1, "tensor_parallel": recipe.hardware.engines.devices})
        rollout = recipe.rollout
        return open_engine(self.policy, engine, rollout.tokens_per_episode, rollout.sampling)

    async def about(self) -> int:  # type: ignore[override]
        return os.getpid()

    async def load_weights(self, version: int, pieces: list[Any]) -> EngineCounters:
        """Take the weights, and forget whoever asked before; returns the work done so far."""
        from posttrain.distributed.ray.engine import load_bucket

        await self._forget()
        for reference in pieces:
            load_bucket(self.policy, await reference)
        await asyncio.to_thread(self.engine.load_weights, version)
        return replace(self.engine.counters)

    async def _forget(self) -> None:
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for episode in self._episodes:
            episode.__exit__(None, None, None)
        if left and self.recipe.engine.type == "local":
            self.engine = self._opened()
        self._tasks, self._episodes = {}, []

    async def compute(
        self, opened: int, requests: tuple[tuple[int, Request], ...]
    ) -> tuple[list[tuple[int, Completion]], EngineCounters]:
        """Go on with `opened` open episodes and these new requests until something is finished."""
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
        """One answer, of an engine that batches what comes."""
        with self.engine.episode():
            completion = await self.engine.generate(request)
        return completion, replace(self.engine.counters)

    async def sleep(self) -> None:
        await asyncio.to_thread(self.engine.sleep)


class EnvironmentWorker(Worker):
    """Environments of many episodes. Its methods run in threads, those of one environment one at a time."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self._playing: dict[str, tuple[Environment, int, Step | None]] = {}
        self._importing = threading.Lock()

    def reset(self, identity: str, values: dict[str, Any], seed: int) -> tuple[Observation, str]:
        """The first observation, and what is put in front of each answer."""
        environment = self._made(values)
        observation = environment.reset(seed)
        self._playing[identity] = (environment, 0, None)
        self.reporter.progress += 1
        return observation, environment.primer

    def step(self, identity: str, number: int, action: str) -> Step:
        """The step that `action` leads to, which is answer `number` of the episode; asked again, the same step."""
        if identity not in self._playing:
            raise Unknown
        environment, played, last = self._playing[identity]
        if last is not None and number == played - 1:
            return last
        if number != played:
            raise Unknown
        step = environment.step(action)
        self._playing[identity] = (environment, played + 1, step)
        self.reporter.progress += 1
        return step

    def replay(self, identity: str, values: dict[str, Any], seed: int, answers: list[str]) -> list[str]:
        """Play an episode again up to where it was; returns the digests of what the environment says."""
        environment = self._made(values)
        said: list[Observation | Step] = [environment.reset(seed)]
        said += [environment.step(answer) for answer in answers]
        last = said[-1]
        self._playing[identity] = (environment, len(answers), last if isinstance(last, Step) else None)
        return [digest(each) for each in said]

    def close(self, identity: str) -> None:
        """The episode has ended."""
        self._playing.pop(identity, None)

    def _made(self, values: dict[str, Any]) -> Environment:
        # A file of the user's own is not to be imported by two threads at once.
        with self._importing:
            recipe = environment_recipe(values)
            kind = environment_class(recipe.type)
        return kind(recipe)


class RewardWorker(Worker):
    """A copy of the reward model."""

    def __init__(self, document: str, *common: Any) -> None:
        super().__init__(*common)
        from posttrain.models.load import load_tokenizer
        from posttrain.training.reward_scorer import RewardScorer

        recipe = recipe_from(document)

        class Written:
            """What a scorer needs of a policy."""

            tokenizer = load_tokenizer(recipe.model)

        self.scorer = RewardScorer(recipe.reward, Written())  # type: ignore[arg-type]

    def statistics(self) -> tuple[float, float]:
        """Mean and standard deviation that rewards are scaled by."""
        return self.scorer.statistics

    def scores(self, episodes: list[Episode]) -> list[tuple[float, Any]]:
        """What the model says of each episode, and of its units where it rewards units."""
        from posttrain.training.reward_scorer import OF_UNITS

        raws = self.scorer.scores(episodes)
        self.reporter.progress += 1
        return [(raw, episode.turns[-1].info.get(OF_UNITS)) for raw, episode in zip(raws, episodes, strict=True)]
