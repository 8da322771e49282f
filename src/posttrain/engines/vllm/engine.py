"""The vLLM engine: one or several vLLM replicas, weight updates, and the restart of replicas that die or hang."""

import asyncio
import base64
import concurrent.futures
import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from posttrain.distributed.sharding import compute_dtype
from posttrain.distributed.world import current_world
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.engines.vllm.replicas import (
    EngineDied,
    EngineRefused,
    HangDetector,
    LaunchedServerReplica,
    ServerReplica,
)
from posttrain.engines.vllm.settings import MOST_RANK, TOKEN, Settings
from posttrain.engines.vllm.transfer import address_for, broadcast, joined_group, packed, shared_memory
from posttrain.engines.vllm.weights import Bucket, WeightStore, buckets
from posttrain.episode import StopReason
from posttrain.errors import InputError, RunError
from posttrain.models.adapters import adapted_beside_layers
from posttrain.models.load import resolve_path
from posttrain.models.policy import Policy
from posttrain.recipe.compose import section
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.runs.metrics import record_event

T = TypeVar("T")
BUCKET_BYTES = 512 * 2**20
"""Largest bucket of a weight transfer; at least one tensor."""
START_SECONDS = 600.0
"""Time-out of the start of an engine."""
HANG_SECONDS = 600.0
"""Seconds without progress on an open request after which an engine counts as dead. Longer than any forward pass."""


@dataclass
class _ReplicaState:
    """A replica with its health and load."""

    replica: ServerReplica
    lock: asyncio.Lock
    detector: HangDetector
    starts: int = 1
    load: int = 0
    """Episodes assigned to the replica, and requests outside episodes."""
    alive: bool = True
    sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Images that are being sent, by their keys."""


class VllmEngine:
    """Engine over vLLM, which gets the weights of `policy` at each `load_weights`, in the thread that calls it.

    engine = VllmEngine(policy, gpu_memory_utilization=0.4)
    """

    def __init__(
        self,
        policy: Policy,
        recipe: VllmEngineRecipe | None = None,
        replicas: Sequence[ServerReplica] | None = None,
        **settings: Any,
    ) -> None:
        """Start vLLM, which takes about a minute.

        Args:
            recipe: the complete settings; or give `settings`, keys of `engine` with `type: vllm` in a recipe, by name.
            replicas: the engines to use instead of those that the settings describe.

        Raises:
            InputError: a setting is wrong, or vLLM does not support the policy.
            RunError: an engine does not start.
        """
        recipe = section(VllmEngineRecipe, recipe, **settings)
        refuse_transfer(recipe, policy)
        if replicas is None:
            replicas = _make_replicas(recipe, settings_of(policy, recipe), None) if current_world().is_rank0 else []
        self.policy = policy
        self.recipe = recipe
        self.counters = EngineCounters()
        self.capacity = recipe.slots
        self.version = -1
        self.restarts = self.retried = 0
        """Number of restarts after a replica died, and of requests sent again because of that."""
        self._assigned: ContextVar[list[_ReplicaState] | None] = ContextVar("assigned", default=None)
        self._replicas = [
            _ReplicaState(replica, asyncio.Lock(), HangDetector(partial(replica.call, "ping"), HANG_SECONDS))
            for replica in replicas
        ]
        # The largest number of bytes in files at a time. A byte of 4-bit weights is sent as two numbers of two bytes.
        kept = recipe.max_restarts > 0 or bool(recipe.urls)
        widths = ((p.numel(), p.element_size() if p.is_floating_point() else 4) for p in policy.model.parameters())
        self._store = WeightStore(kept, sum(map(math.prod, widths)) if kept else 2 * BUCKET_BYTES)
        self._adapter: Path | None = None
        self._sent = 0
        self._source = policy
        """The policy whose weights the replicas have."""
        self._group: tuple[tuple[int, ...], Any] = ((), None)
        """The starts of the replicas when they joined the process group of `nccl`, and the group."""
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm")
        thread.start()
        # Also closes the replicas when the engine is garbage-collected and when the process exits.
        self._closing = weakref.finalize(self, _close, list(replicas), self._store, self._loop, thread)
        try:
            policy.release_cached_memory()
            # The other processes wait before they allocate more, because vLLM checks the memory of their GPUs, too.
            current_world().on_rank0(self._start)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start all replicas, report the wait on standard error, and put them to sleep until they get weights. vLLM
        checks that the memory it may use is free, so start it before the learner allocates the optimizer's state."""
        if not self._replicas:
            return
        begun = time.monotonic()
        names = ", ".join(state.replica.name for state in self._replicas)
        print(f"waiting for {names}; starting vLLM takes about a minute", file=sys.stderr, flush=True)
        self._wait(self._on_replicas(lambda state: state.replica.start()))
        self.sleep()
        print(f"vLLM is ready after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    # -- the engine protocol ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. If the replica dies, the request is sent again with the same seed."""
        images = getattr(self.policy.tokenizer, "images", None)
        job = {
            **({"prompt_ids": list(request.prompt_ids)} if images is None else images.placed(request.prompt_ids)),
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "end_tokens": sorted(self.policy.end_tokens),
            "stop_strings": list(request.stop_strings),
            **request.sampling.model_dump(),
        }
        assigned = self._assigned.get()
        with nullcontext(assigned) if assigned is not None else self._assignment() as replica:
            if not replica:
                replica.append(min(self._replicas, key=lambda state: state.load))
                replica[0].load += 1
            call = asyncio.run_coroutine_threadsafe(self._generate(replica[0], job), self._loop)
            result = await asyncio.wrap_future(call)
        self.counters.sampled += len(result["ids"])
        self.counters.reused += result["reused"]
        self.counters.prefilled += len(request.prompt_ids) - result["reused"]
        reason = StopReason(result["stop_reason"])
        logprobs, versions = tuple(result["logprobs"]), tuple(result["versions"])
        experts = self._experts(*result["experts"]) if "experts" in result else None
        return Completion(tuple(result["ids"]), logprobs, versions, reason, experts)

    def _experts(self, shape: list[int], numbers: str) -> np.ndarray | None:
        """`Completion.experts` of the `numbers` that the server returns for all layers, also those without a router."""
        assert self.policy.routing is not None
        whole = np.frombuffer(base64.b64decode(numbers), dtype="<u2").reshape(shape).astype(np.int16)
        return whole[:, self.policy.routing.layers]

    @contextmanager
    def episode(self, group: int = 0) -> Iterator[None]:
        """Send all requests of the episode to one replica, whose cache has the earlier turns."""
        with self._assignment() as assigned:
            token = self._assigned.set(assigned)
            try:
                yield
            finally:
                self._assigned.reset(token)

    def load_weights(self, version: int, source: Policy | None = None) -> None:
        """Send the weights of `source`, or its adapters, and wait until every replica samples with them."""
        source = source or self.policy
        # The replicas wake up to receive weights, and again to allocate their cache.
        source.release_cached_memory()
        # Wait for replicas that are being restarted: they read the weights whose files are removed next.
        self._wait(self._on_replicas(lambda state: state.lock.acquire()))
        try:
            self._store.clear()
            self._adapter = None
            self._sent += 1
            if sends_adapters(self.policy, self.recipe):
                self._send_adapter(source, version)
            else:
                self._send_weights(source, version)
            self.version = version
        finally:
            for state in self._replicas:
                self._loop.call_soon_threadsafe(state.lock.release)

        async def restart_if_dead(state: _ReplicaState) -> None:
            if not state.alive:
                await self._restart(state, state.starts, "while weights were sent")

        self._wait(self._on_replicas(restart_if_dead))

    def sleep(self) -> None:
        """Free as much memory of every replica as possible."""
        self._wait(self._on_alive("sleep"))

    def close(self) -> None:
        """Stop the replicas that this process started."""
        self._closing()

    # -- requests -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _assignment(self) -> Iterator[list[_ReplicaState]]:
        """An empty list for the replica of the first request, whose load counts it until the end of the block."""
        assigned: list[_ReplicaState] = []
        try:
            yield assigned
        finally:
            for state in assigned:
                state.load -= 1

    async def _generate(self, state: _ReplicaState, job: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(self.recipe.retries + 1):
            if not state.alive:
                async with state.lock:  # wait for a restart, which a failure during it would repeat
                    pass
            starts = state.starts
            try:
                return await state.detector.run(self._ask(state, job))
            except EngineRefused as error:
                raise RunError(f"{state.replica.name} refused a request: {error}") from error
            except EngineDied as error:
                if attempt == self.recipe.retries:
                    raise RunError(
                        f"{state.replica.name} died {attempt + 1} times during one request ({error}); see its log, or raise "
                        "engine.retries"
                    ) from error
                self.retried += 1
                await self._restart(state, starts, str(error))
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, state: _ReplicaState, job: dict[str, Any]) -> dict[str, Any]:
        """The answer of the replica, which gets the images that it lacks."""
        while "missing" in (result := await state.replica.call("generate", job=job)):
            await asyncio.gather(*(self._send_image(state, key) for key in result["missing"]))
        return result

    async def _send_image(self, state: _ReplicaState, key: str) -> None:
        """Send an image, once for all requests that wait for it."""

        async def send() -> None:
            try:
                content = await asyncio.to_thread(self.policy.tokenizer.images.content, key)
                await state.replica.call("receive_image", key=key, content=content)
            finally:
                del state.sending[key]

        if key not in state.sending:
            state.sending[key] = asyncio.ensure_future(send())
        await asyncio.shield(state.sending[key])

    # -- dead replicas ------------------------------------------------------------------------------------------------

    async def _restart(self, state: _ReplicaState, starts: int, reason: str) -> None:
        """Restart the replica with the current weights, unless another request has restarted it since start `starts`."""
        async with state.lock:
            if state.starts != starts:
                return
            state.alive = False
            while not state.alive:
                if state.starts > self.recipe.max_restarts:
                    raise RunError(
                        f"{state.replica.name} died {state.starts} times, the last time because {reason}, and "
                        f"engine.max_restarts is {self.recipe.max_restarts}; continue from the last checkpoint with --resume"
                    )
                state.starts += 1
                self.restarts += 1
                await state.replica.start()
                try:
                    if self.version >= 0:
                        await state.detector.run(self._resend(state))
                    state.alive = True
                except EngineDied as error:
                    reason = str(error)
            record_event(
                f"{state.replica.name} died ({reason}); it was restarted with weights of version {self.version}, and its "
                "requests are sent again"
            )

    async def _if_alive(self, state: _ReplicaState, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work`. A replica that dies during it is marked as dead and restarted later."""
        if not state.alive:
            work.close()
            return
        try:
            await state.detector.run(work)
        except EngineDied:
            state.alive = False

    def _on_alive(self, name: str, **arguments: Any) -> concurrent.futures.Future[None]:
        """Call the method `name` of all live replicas."""
        return self._on_replicas(lambda state: self._if_alive(state, state.replica.call(name, **arguments)))

    # -- weights ------------------------------------------------------------------------------------------------------

    def _send_weights(self, source: Policy, version: int) -> None:
        """Read the weights in this thread, bucket by bucket, and send each to every replica before reading the next."""
        self._wait(self._on_alive("begin_weights", version=version))
        self._source, way = source, self.recipe.weight_transfer
        if way == "nccl":
            self._join_group(source)
        for number, bucket in enumerate(buckets(source.weights(), BUCKET_BYTES)):
            if way == "ipc":
                self._share_bucket(bucket)
            elif self._replicas and way == "files":
                path = self._store.put(bucket, f"{self._sent}-{number}.safetensors")
                self._wait(self._on_alive("receive_weights", path=path))
                self._store.discard(path)
            elif self._replicas:
                buffer, entries = packed(bucket)
                received = self._on_alive("receive_buffer", described={"size": buffer.numel(), "entries": entries})
                self._beside(received, partial(broadcast, self._group[1], buffer))
        source.release_cached_memory()
        self._wait(self._on_replicas(lambda state: self._if_alive(state, self._finish(state))))

    def _share_bucket(self, bucket: Bucket) -> None:
        """Let each worker open the buffer of the learner process on its GPU. All ranks call it."""
        buffer, entries = packed(bucket)
        torch.cuda.current_stream(buffer.device).synchronize()
        gpu = str(torch.cuda.get_device_properties(buffer.device).uuid)
        described = {"shared": dict(current_world().gather([(gpu, shared_memory(buffer))])), "entries": entries}
        # Returns on every rank, so the buffers exist until all replicas have read theirs.
        current_world().on_rank0(lambda: self._wait(self._on_alive("receive_buffer", described=described)))
        del buffer
        torch.cuda.ipc_collect()

    def _join_group(self, source: Policy) -> None:
        """Make the process group with all workers, again after every restart of a replica."""
        starts = tuple(state.starts for state in self._replicas)
        if not self._replicas or self._group[0] == starts:
            return
        address, port = address_for(self.recipe.urls[0] if self.recipe.urls else None)
        each = self.recipe.tensor_parallel
        size = 1 + each * len(self._replicas)

        def join(state: _ReplicaState) -> Coroutine[Any, Any, None]:
            named = {"address": address, "port": port, "first": 1 + each * self._replicas.index(state), "size": size}
            return self._if_alive(state, state.replica.call("join_transfer", **named))

        on_gpu = source.device.type == "cuda"
        group = self._beside(self._on_replicas(join), lambda _: joined_group(address, port, 0, size, on_gpu))
        self._group = starts, group

    def _beside(self, calls: concurrent.futures.Future[Any], work: Callable[[Callable[[], None]], T]) -> T:
        """Do this process's part of a collective call while the replicas do theirs."""

        def still_wanted() -> None:
            if calls.done():
                calls.result()  # raises their error
                if not all(state.alive for state in self._replicas):
                    raise EngineDied("it died while weights were sent")

        try:
            result = work(still_wanted)
            calls.result()
        except (RuntimeError, EngineDied, EngineRefused) as error:
            self._group = (), None
            raise RunError(
                f"the weights could not be sent to every vLLM worker ({str(error).splitlines()[0]}); continue with --resume, "
                "or set engine.weight_transfer=files"
            ) from error
        return result

    async def _finish(self, state: _ReplicaState) -> None:
        if missing := await state.replica.call("finish_weights"):
            raise RunError(
                f"{state.replica.name} lacks {len(missing)} weights of {self.policy.recipe.path}, the first of them "
                f"{missing[0]}; it was started with a model that differs from the policy"
            )

    async def _resend(self, state: _ReplicaState) -> None:
        if self._adapter is not None:
            await state.replica.call("load_adapter", path=self._adapter, version=self.version)
            return
        await state.replica.call("begin_weights", version=self.version)
        if self.recipe.weight_transfer != "files" and not self._store.files:
            if current_world().size > 1:
                raise RunError(
                    f"{state.replica.name} died, and one process cannot send it weights that are sharded over several; "
                    "continue with --resume, or set engine.weight_transfer=files"
                )
            # The restarted replica loads these files; the next weights are sent directly again.
            for number, bucket in enumerate(buckets(self._source.weights(), BUCKET_BYTES)):
                self._store.put(bucket, f"{self._sent}-{number}.safetensors")
        for path in self._store.files:
            await state.replica.call("receive_weights", path=path)
        await self._finish(state)

    def _send_adapter(self, source: Policy, version: int) -> None:
        weights = dict(source.adapter_weights())
        if not self._replicas:
            return
        self._adapter = self._store.put(weights, f"adapter-{self._sent}/adapter_model.safetensors").parent
        model: Any = source.model
        config = model.peft_config["default"].to_dict()
        if config.get("task_type", "") is None:
            del config["task_type"]
        (self._adapter / "adapter_config.json").write_text(json.dumps(config, default=sorted))
        self._wait(self._on_alive("load_adapter", path=self._adapter, version=version))

    # -- between threads ----------------------------------------------------------------------------------------------

    def _on_replicas(
        self, call: Callable[[_ReplicaState], Coroutine[Any, Any, Any]]
    ) -> concurrent.futures.Future[None]:
        """Call all replicas concurrently. The first error is raised after all calls have ended."""

        async def gather() -> None:
            results = await asyncio.gather(*map(call, self._replicas), return_exceptions=True)
            if errors := [result for result in results if isinstance(result, BaseException)]:
                raise errors[0]

        return asyncio.run_coroutine_threadsafe(gather(), self._loop)

    def _wait(self, work: concurrent.futures.Future[None]) -> None:
        """Wait for `work`, which runs in the event loop of the engine's thread."""
        try:
            work.result()
        except EngineRefused as error:
            raise RunError(f"vLLM refused a request: {error}") from error


def _close(
    replicas: Sequence[ServerReplica], store: WeightStore, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    # Stop the loop first: calls still in flight would mistake the shutdown for a dead replica.
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=5)
    for replica in replicas:
        with contextlib.suppress(Exception):
            replica.request_stop()
    for replica in replicas:
        with contextlib.suppress(Exception):
            replica.close()
    store.close()


def refuse_transfer(recipe: VllmEngineRecipe, policy: Policy) -> None:
    """Raises InputError if the way of sending weights does not work for this policy and these servers."""
    if recipe.weight_transfer == "ipc" and policy.device.type != "cuda":
        raise InputError(
            "engine.weight_transfer: ipc needs the policy on a GPU, and here it is in CPU memory (as the engines of Ray keep it); "
            "use files"
        )
    if policy.device.type != "cuda" or recipe.urls:
        return
    size = current_world().size
    learners = set(range(size)) if size > 1 else {policy.device.index or 0}
    servers = set(range(recipe.first_device, recipe.first_device + recipe.replicas * recipe.tensor_parallel))
    if recipe.weight_transfer == "ipc" and not servers <= learners:
        raise InputError(
            f"engine.weight_transfer: ipc needs servers on GPUs of the learner ({', '.join(map(str, sorted(learners)))}), and GPU "
            f"{min(servers - learners)} is none; set engine.first_device={min(learners)}, or use nccl"
        )
    if recipe.weight_transfer == "nccl" and servers & learners:
        raise InputError(
            f"engine.weight_transfer: nccl needs servers that do not use the learner's GPU {min(servers & learners)}; set "
            f"engine.first_device={max(learners) + 1}, or use files"
        )


def open_vllm(
    policy: Policy,
    recipe: VllmEngineRecipe,
    max_context: int | None = None,
    sampling: SamplingRecipe | None = None,
    logs: Path | None = None,
    weights_change: bool = True,
) -> VllmEngine:
    """The vLLM engine of `engines.factory.open_engine`. In a run of several processes only rank 0 has replicas; the
    other ranks take part in gathering sharded weights."""
    settings = replace(settings_of(policy, recipe, max_context, sampling), stream=weights_change)
    return VllmEngine(policy, recipe, _make_replicas(recipe, settings, logs) if current_world().is_rank0 else [])


def sends_adapters(policy: Policy, recipe: VllmEngineRecipe) -> bool:
    """Whether replicas keep the frozen weights and get the adapters alone, see `engine.adapters`."""
    if recipe.adapters != "auto":
        return recipe.adapters == "adapter_only"
    model = policy.recipe
    if model.lora is None or model.load_in_4bit or recipe.urls or recipe.weight_transfer != "files":
        return False
    return model.lora.rank <= MOST_RANK and not adapted_beside_layers(policy.model)


def settings_of(
    policy: Policy, recipe: VllmEngineRecipe, max_context: int | None = None, sampling: SamplingRecipe | None = None
) -> Settings:
    """The settings of each replica. InputError for a policy that vLLM cannot sample for."""
    path = Path(resolve_path(policy.recipe.path))
    if (path / "adapter_config.json").is_file():
        raise InputError(
            f"model.path: {path} is an adapter, and vLLM needs a whole model; train with model.lora.export=merged"
        )
    if recipe.adapters == "adapter_only" and (others := adapted_beside_layers(policy.model)):
        raise InputError(
            f"engine.adapters: adapter_only sends adapters of the decoder's linear modules, and {others[0]} is none; use merged"
        )
    images = getattr(policy.tokenizer, "images", None)
    if images is not None and images.not_in_vllm:
        raise InputError(
            f"engine.type: vllm does not sample for this model, because {images.not_in_vllm}; set it to local"
        )
    config: Any = policy.model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = recipe.max_model_len or max_context or limit or 0
    if limit is not None and context > limit:
        raise InputError(
            f"{policy.recipe.path} supports {limit} positions, but contexts may have {context} tokens; lower "
            f"{'engine.max_model_len' if recipe.max_model_len else 'rollout.tokens_per_episode'}"
        )
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[compute_dtype(next(policy.model.parameters()))]
    raw = sampling is None or sampling.temperature in (0, 1)
    return Settings(
        model=str(path) if path.exists() else policy.recipe.path,
        dtype=dtype if recipe.dtype == "auto" else recipe.dtype,
        max_model_len=context,
        max_num_seqs=recipe.max_num_seqs,
        tokens_per_forward=recipe.tokens_per_forward,
        tensor_parallel=recipe.tensor_parallel,
        gpu_memory_utilization=recipe.gpu_memory_utilization,
        cache_gigabytes=recipe.cache_gigabytes or 0.0,
        eager={None: "auto", True: "yes", False: "no"}[recipe.enforce_eager],
        logprobs="raw" if raw else "processed",
        adapter_rank=policy.recipe.lora.rank if policy.recipe.lora and sends_adapters(policy, recipe) else 0,
        trust_remote_code=policy.recipe.trust_remote_code,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        router_replay=policy.recipe.router_replay,
        threads=recipe.threads or 0,
        images=images is not None,
    )


def _make_replicas(recipe: VllmEngineRecipe, settings: Settings, logs: Path | None) -> list[ServerReplica]:
    if recipe.urls:
        token = os.environ.get(TOKEN) or None
        return [
            ServerReplica(f"the vLLM server at {url}", url.rstrip("/"), token, START_SECONDS, False, required=settings)
            for url in recipe.urls
        ]
    folder, size = logs or Path(tempfile.mkdtemp(prefix="posttrain-vllm-logs-")), recipe.tensor_parallel
    firsts = [recipe.first_device + number * size for number in range(recipe.servers)]
    return [
        LaunchedServerReplica(number, settings, recipe.python, list(range(first, first + size)), START_SECONDS, folder)
        for number, first in enumerate(firsts)
    ]
