"""The vLLM engine of a run: engines of its own or of others, their weights, and what becomes of those that die."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from posttrain.distributed.sharding import compute_dtype
from posttrain.distributed.world import current
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.engines.vllm.replicas import (
    EngineDied,
    EngineRefused,
    InProcessReplica,
    LaunchedServerReplica,
    Replica,
    ServerReplica,
)
from posttrain.engines.vllm.settings import Settings
from posttrain.engines.vllm.weights import WeightStore, buckets
from posttrain.episode import StopReason
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.models.load import resolve_path
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.runs import events

Awaited = TypeVar("Awaited")


class HangDetector:
    """Asks an engine for a sign of life as long as anything is asked of it.

    How long an answer takes says nothing, so no request has a time-out of its own.
    """

    def __init__(self, respond: Callable[[], Awaitable[None]], seconds: float) -> None:
        """`respond` returns once the engine has; one that does not for `seconds` hangs."""
        self._respond = respond
        self._seconds = seconds
        self._waiting: set[asyncio.Future[Any]] = set()
        self._given_up: set[asyncio.Future[Any]] = set()

    async def over(self, work: Coroutine[Any, Any, Awaited]) -> Awaited:
        """The result of `work`, which is asked of the engine; EngineDied where the engine hangs."""
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        if len(self._waiting) == 1:
            self._looking = asyncio.ensure_future(self._look())
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._given_up:
                raise EngineDied(f"it gave no sign of life for {self._seconds:g} s") from None
            raise
        finally:
            self._waiting.discard(task)
            self._given_up.discard(task)
            if not self._waiting:
                self._looking.cancel()

    async def _look(self) -> None:
        """Look until it is cancelled, when nothing is asked any more."""
        while True:
            await asyncio.sleep(self._seconds / 4)
            asked = set(self._waiting)
            try:
                async with asyncio.timeout(3 * self._seconds / 4):
                    await self._respond()
            except TimeoutError:
                self._given_up = asked & self._waiting
                for task in self._given_up:
                    task.cancel()
            except (EngineDied, EngineRefused):
                # Those who ask find out themselves.
                pass


T = TypeVar("T")
MIB = 2**20


@dataclass
class _Life:
    """A replica, and how it has fared."""

    replica: Replica
    lock: asyncio.Lock
    watch: HangDetector
    lives: int = 1
    load: int = 0
    """Episodes that are at home there, and requests of no episode."""
    alive: bool = True


class VllmEngine:
    """Engine over vLLM. `policy` is whose weights are sent; they are read in the thread that calls `load_weights`."""

    def __init__(self, policy: Policy, recipe: VllmEngineRecipe, replicas: Sequence[Replica]) -> None:
        """Starts the replicas; RunError where one does not."""
        self.policy = policy
        self.recipe = recipe
        self.counters = EngineCounters()
        self.capacity = recipe.slots
        self.version = -1
        self.restarts = 0
        """Engines that died and were started again."""
        self.retried = 0
        """Requests that were asked again because the engine that had them died."""
        self._home: ContextVar[list[_Life] | None] = ContextVar("home", default=None)
        self._lives = [
            _Life(replica, asyncio.Lock(), HangDetector(replica.respond, recipe.hang_timeout)) for replica in replicas
        ]
        self._depot = WeightStore(recipe.max_restarts > 0 or bool(recipe.urls), self._size())
        self._adapter: Path | None = None
        self._sent = 0
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm")
        thread.start()
        # Also when the engine is forgotten, and when the process ends.
        self._closing = weakref.finalize(self, _close, list(replicas), self._depot, self._loop, thread)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start all, and say on standard error what the user waits for."""
        if not self._lives:
            return
        begun = time.monotonic()
        names = ", ".join(life.replica.name for life in self._lives)
        print(f"waiting for {names}; starting vLLM takes about a minute", file=sys.stderr, flush=True)
        self._wait(self._all(lambda life: life.replica.start()))
        print(f"vLLM is ready after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    # -- the protocol -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """One answer; asked again, with the same seed, where the engine that was to give it died."""
        sampling = request.sampling
        job = {
            "prompt_ids": list(request.prompt_ids),
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "end_tokens": sorted(self.policy.end_tokens),
            "stop_strings": list(request.stop_strings),
            **sampling.model_dump(),
        }
        home = self._home.get()
        if home is None:
            with self._at_home([]) as lone:
                found = await self._asked(lone, job)
        else:
            found = await self._asked(home, job)
        self.counters.sampled += len(found["ids"])
        self.counters.reused += found["reused"]
        self.counters.prefilled += len(request.prompt_ids) - found["reused"]
        reason = StopReason(found["stop_reason"])
        return Completion(tuple(found["ids"]), tuple(found["logprobs"]), tuple(found["versions"]), reason)

    @contextmanager
    def episode(self, group: int = 0) -> Iterator[None]:
        """Its requests go to the same engine, which has its earlier turns in the cache."""
        with self._at_home([]) as home:
            mark = self._home.set(home)
            try:
                yield
            finally:
                self._home.reset(mark)

    def load_weights(self, version: int) -> None:
        """Send the policy's weights, or its adapters, and wait until every engine samples with them."""
        # An engine that is being started again first gets the weights whose files are about to go.
        self._wait(self._all(lambda life: life.lock.acquire()))
        try:
            self._depot.clear()
            self._adapter = None
            if self.recipe.adapters == "adapter_only":
                self._write_adapter()
                self._wait(self._all(lambda life: self._unless_dead(life, self._send_adapter(life, version))))
            else:
                self._send_weights(version)
            self.version = version
        finally:
            self._wait(self._all(self._release))
        self._wait(self._all(self._revived))

    def sleep(self) -> None:
        """Let every engine give back what it can."""
        self._wait(self._all(lambda life: self._unless_dead(life, life.replica.sleep())))

    def close(self) -> None:
        """End the engines that were started here."""
        self._closing()

    # -- answers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _at_home(self, home: list[_Life]) -> Iterator[list[_Life]]:
        """`home` gets the engine of its first request, which counts it until the end of the block."""
        try:
            yield home
        finally:
            for life in home:
                life.load -= 1

    async def _asked(self, home: list[_Life], job: dict[str, Any]) -> dict[str, Any]:
        if not home:
            home.append(min(self._lives, key=lambda life: life.load))
            home[0].load += 1
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(home[0], job), self._loop))

    async def _answer(self, life: _Life, job: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(self.recipe.retries + 1):
            lives = life.lives
            try:
                return await life.watch.over(life.replica.generate(job))
            except EngineRefused as error:
                raise RunError(f"{life.replica.name} refused a request: {error}") from error
            except EngineDied as error:
                if attempt == self.recipe.retries:
                    raise RunError(
                        f"{life.replica.name} died {attempt + 1} times over one answer ({error}); see its log, or raise "
                        "engine.retries"
                    ) from error
                self.retried += 1
                await self._revive(life, lives, str(error))
        raise AssertionError("the last attempt returns or raises")

    # -- engines that die ---------------------------------------------------------------------------------------------

    async def _revive(self, life: _Life, lives: int, reason: str) -> None:
        """Start the replica again with the current weights, unless another request has seen to it since its life `lives`."""
        async with life.lock:
            if life.lives != lives:
                return
            life.alive = False
            while not life.alive:
                if life.lives > self.recipe.max_restarts:
                    raise RunError(
                        f"{life.replica.name} died {life.lives} times, the last time because {reason}, and engine.max_restarts is "
                        f"{self.recipe.max_restarts}; the run goes on from its last checkpoint with --resume"
                    )
                life.lives += 1
                self.restarts += 1
                await life.replica.start()
                try:
                    if self.version >= 0:
                        await life.watch.over(self._send_again(life))
                    life.alive = True
                except EngineDied as error:
                    reason = str(error)
            events.record(
                f"{life.replica.name} died ({reason}); it was started again with weights of version {self.version}, and "
                "what it was asked is asked again"
            )

    async def _release(self, life: _Life) -> None:
        life.lock.release()

    async def _revived(self, life: _Life) -> None:
        """Start it again if it died while weights were sent."""
        if not life.alive:
            await self._revive(life, life.lives, "while weights were sent")

    async def _unless_dead(self, life: _Life, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work`; an engine that dies of it is marked and seen to later."""
        if not life.alive:
            work.close()
            return
        try:
            await life.watch.over(work)
        except EngineDied:
            life.alive = False

    # -- weights ------------------------------------------------------------------------------------------------------

    def _send_weights(self, version: int) -> None:
        """Read the weights in this thread, bucket by bucket, and hand each to every engine before the next is read."""
        self._sent += 1
        self._wait(self._all(lambda life: self._unless_dead(life, life.replica.begin_weights(version))))
        for number, bucket in enumerate(buckets(self.policy.weights(), self.recipe.bucket_megabytes * MIB)):
            if not self._lives:
                continue
            path = self._depot.put(bucket, f"{self._sent}-{number}.safetensors")
            self._wait(self._all(partial(self._receive, path=path)))
            self._depot.done_with(path)
        self._wait(self._all(lambda life: self._unless_dead(life, self._finish(life))))

    async def _receive(self, life: _Life, path: Path) -> None:
        await self._unless_dead(life, life.replica.receive_weights(path))

    async def _finish(self, life: _Life) -> None:
        missing = await life.replica.finish_weights()
        if missing:
            raise RunError(
                f"{life.replica.name} lacks {len(missing)} weights of {self.recipe_name}, the first of them {missing[0]}; its "
                "model is another one than the policy"
            )

    async def _send_again(self, life: _Life) -> None:
        if self._adapter is not None:
            await self._send_adapter(life, self.version)
            return
        await life.replica.begin_weights(self.version)
        for path in self._depot.files:
            await life.replica.receive_weights(path)
        await self._finish(life)

    def _write_adapter(self) -> None:
        self._sent += 1
        folder = f"adapter-{self._sent}"
        weights = dict(self.policy.adapter_weights())
        if not self._lives:
            return
        self._adapter = self._depot.put(weights, f"{folder}/adapter_model.safetensors").parent
        config = self._adapter / "adapter_config.json"
        config.write_text(json.dumps(_adapter_config(self.policy), default=sorted))

    async def _send_adapter(self, life: _Life, version: int) -> None:
        assert self._adapter is not None
        await life.replica.load_adapter(self._adapter, version)

    # -- between threads ----------------------------------------------------------------------------------------------

    @property
    def recipe_name(self) -> str:
        """Of the model, for messages."""
        return self.policy.recipe.path

    def _size(self) -> int:
        most = self.recipe.bucket_megabytes * MIB
        if self.recipe.max_restarts == 0 and not self.recipe.urls:
            return 2 * most
        return sum(parameter.numel() * parameter.element_size() for parameter in self.policy.model.parameters())

    async def _all(self, what: Callable[[_Life], Coroutine[Any, Any, T]]) -> list[T]:
        tasks = [asyncio.ensure_future(what(life)) for life in self._lives]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        return [result for result in found if not isinstance(result, BaseException)]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` in the engine's loop and wait for it."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except PosttrainError:
            raise
        except EngineRefused as error:
            raise RunError(f"vLLM refused: {error}") from error


def _adapter_config(policy: Policy) -> dict[str, Any]:
    """What peft writes beside the adapters."""
    model: Any = policy.model
    config = model.peft_config["default"].to_dict()
    return {key: value for key, value in config.items() if not (key == "task_type" and value is None)}


def _close(
    replicas: Sequence[Replica], depot: WeightStore, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    # First the loop: what still waits in it would take the end for a death.
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=5)
    for replica in replicas:
        with contextlib.suppress(Exception):
            replica.let_go()
    for replica in replicas:
        with contextlib.suppress(Exception):
            replica.close()
    depot.close()


def open_vllm(
    policy: Policy,
    recipe: VllmEngineRecipe,
    longest: int | None = None,
    sampling: SamplingRecipe | None = None,
    logs: Path | None = None,
) -> VllmEngine:
    """A vLLM engine for contexts of up to `longest` tokens, whose log-probabilities are right for `sampling`.

    `logs`: where servers that are started here write theirs; null is a temporary directory. In a run of several processes
    the first one has the engines; the others only join in reading the weights, which may be divided among them.
    """
    settings = settings_of(policy, recipe, longest, sampling)
    return VllmEngine(policy, recipe, _replicas(recipe, settings, logs) if current().is_rank0 else [])


def settings_of(
    policy: Policy, recipe: VllmEngineRecipe, longest: int | None = None, sampling: SamplingRecipe | None = None
) -> Settings:
    """What each engine is started with; InputError for what the policy and an engine cannot agree on."""
    path = Path(resolve_path(policy.recipe.path))
    if (path / "adapter_config.json").is_file():
        if recipe.adapters == "adapter_only":
            raise InputError(
                f"engine.adapters: adapter_only keeps the weights of files, and {path} is itself an adapter; use merged"
            )
        raise InputError(
            f"model.path: {path} is an adapter, and vLLM starts from a whole model; train with model.lora.export=merged"
        )
    most = getattr(policy.model.config, "max_position_embeddings", None)
    context = recipe.max_model_len or longest or most or 0
    if most is not None and context > most:
        raise InputError(
            f"{policy.recipe.path} knows {most} positions and contexts may have {context} tokens; lower "
            f"{'engine.max_model_len' if recipe.max_model_len else 'rollout.tokens_per_episode'}"
        )
    own = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[compute_dtype(next(policy.model.parameters()))]
    cold = sampling is None or sampling.temperature in (0, 1)
    return Settings(
        model=str(path) if path.exists() else policy.recipe.path,
        dtype=own if recipe.dtype == "auto" else recipe.dtype,
        context=context,
        sequences=recipe.max_num_seqs,
        tokens_per_forward=recipe.tokens_per_forward,
        tensor_parallel=recipe.tensor_parallel,
        gpu_memory_utilization=recipe.gpu_memory_utilization,
        cache_gigabytes=recipe.cache_gigabytes or 0.0,
        prefix_caching=recipe.prefix_caching,
        eager={None: "auto", True: "yes", False: "no"}[recipe.enforce_eager],
        logprobs="raw" if cold else "processed",
        adapter_rank=policy.recipe.lora.rank if recipe.adapters == "adapter_only" and policy.recipe.lora else 0,
        threads=recipe.threads or 0,
    )


def _replicas(recipe: VllmEngineRecipe, settings: Settings, logs: Path | None) -> list[Replica]:
    if recipe.mode == "in_process":
        return [InProcessReplica(settings)]
    if recipe.urls:
        token = _token(recipe)
        return [
            ServerReplica(
                f"the vLLM server at {url}",
                url.rstrip("/"),
                token,
                recipe.start_timeout,
                same_machine=False,
                wanted=settings,
            )
            for url in recipe.urls
        ]
    folder = logs or Path(tempfile.mkdtemp(prefix="posttrain-vllm-logs-"))
    found: list[Replica] = []
    for number in range(recipe.servers):
        first = recipe.first_device + number * recipe.tensor_parallel
        devices = list(range(first, first + recipe.tensor_parallel))
        found.append(LaunchedServerReplica(number, settings, recipe.python, devices, recipe.start_timeout, folder))
    return found


def _token(recipe: VllmEngineRecipe) -> str | None:
    if recipe.token_variable is None:
        return None
    token = os.environ.get(recipe.token_variable)
    if not token:
        raise InputError(
            f"engine.token_variable: the environment variable {recipe.token_variable} is not set; put the token of the "
            "servers there"
        )
    return token
