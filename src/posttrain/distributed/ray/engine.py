"""The engines of a Ray cluster as one engine. Weights are published once for all engines; a group stays on one engine.

An engine that computes in lockstep with its episodes (the local engine) is called in rounds: all requests that its open
episodes wait for are sent together, and the call returns as soon as a completion is finished. The composition of
batches therefore depends only on the requests, as in one process. If the engine dies, the rounds since the last weights
are replayed on the restarted engine, which then has the same state, bit for bit. Other engines get each request
separately.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from posttrain.distributed.ray.worker_group import WorkerClient, WorkerDied
from posttrain.distributed.sharding import full_tensor
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.engines.vllm.transfer import Entry, packed, unpacked
from posttrain.engines.vllm.weights import buckets
from posttrain.models.cuda.copies import copied_to_cpu
from posttrain.models.policy import Policy

BUCKET_BYTES = 256 * 2**20
"""Maximum size of a bucket; a larger tensor gets its own bucket."""


def weight_buckets(policy: Policy, keep: bool) -> list[Any]:
    """Put the trained weights into Ray's object store, in buckets, and return the references.

    Frozen weights are not sent: engines load them from the same files. All ranks call it to gather sharded weights; a rank
    without `keep` puts nothing.
    """
    import ray

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in policy.trainable():
            # In the dtype that the engine computes in: shards are float32.
            tensor = full_tensor(parameter).detach()
            if keep:
                yield name, copied_to_cpu([tensor])[0]

    stored = []
    for bucket in buckets(gathered(), BUCKET_BYTES):
        buffer, entries = packed(bucket)
        stored.append(ray.put((buffer.numpy(), entries)))  # readers on one machine share a numpy array
    return stored


def load_bucket(policy: Policy, bucket: tuple[Any, list[Entry]]) -> None:
    """Copy the tensors of a bucket into a policy of the same recipe."""
    parameters = dict(policy.trainable())
    raw, entries = bucket
    with torch.no_grad():
        # Copy: the object store's memory is read-only, and torch warns about that.
        for name, tensor in unpacked(torch.frombuffer(bytearray(raw), dtype=torch.uint8), entries):
            parameters[name].copy_(tensor)


Round = tuple[int, tuple[tuple[int, Request], ...]]
"""The number of open episodes, and the new requests, each with its number."""


class _EngineClient:
    """Calls one engine, and records the rounds since it loaded its weights."""

    def __init__(self, worker: WorkerClient, lockstep: bool, counters: EngineCounters) -> None:
        self.worker, self.lockstep, self.counters = worker, lockstep, counters
        self.open = 0
        self.weights: tuple[int, list[Any]] | None = None
        """Version and buckets of the current weights."""
        self.loaded_restart = -1
        """The restart count of the worker when it loaded the weights; -1 if it has not loaded any."""
        self._restoring: asyncio.Lock | None = None
        self._rounds: list[Round] = []
        self._new: list[tuple[int, Request]] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._numbers = 0
        self._pump: asyncio.Task[None] | None = None
        self._counted = EngineCounters()

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin(self, version: int, buckets: list[Any]) -> None:
        """Discard all requests and use new weights from now on."""
        self.weights = (version, buckets)
        self._rounds, self._new, self._waiting = [], [], {}
        self._restoring = None
        self.loaded_restart = -1

    def send_weights(self) -> None:
        """Send the weights, and send them again after every restart of the worker."""
        assert self.weights is not None
        while self.loaded_restart != self.worker.restarts or self.loaded_restart < 0:
            restart = self.worker.restarts
            try:
                counters = self.worker.call_once("new weights", "load_weights", *self.weights)
            except WorkerDied as died:
                self.worker.wait_for_restart(restart, died)
                continue
            self.loaded_restart, self._counted = restart, counters

    def sleep(self) -> None:
        """Put the engine to sleep; a dead one is restarted instead."""
        restart = self.worker.restarts
        try:
            self.worker.call_once("sleep", "sleep")
        except WorkerDied as died:
            self.worker.wait_for_restart(restart, died)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        if not self.lockstep:
            return await self._compute("a completion", "generate", request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._new.append((self._numbers, request))
        self._waiting[self._numbers] = future
        self._numbers += 1
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            # An interrupt stops the loop from inside this task; asyncio would report it as never retrieved.
            self._pump.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await future

    async def _run(self) -> None:
        """Run rounds until nothing is in flight."""
        try:
            while self._waiting:
                polls = 0
                while len(self._waiting) < self.open:
                    polls += 1
                    await asyncio.sleep(0 if polls < 100 else 0.001)
                round_: Round = (self.open, tuple(self._new))
                self._new = []
                self._rounds.append(round_)
                what = f"{len(self._waiting)} requests" if len(self._waiting) > 1 else "a request"
                for number, completion in await self._compute(what, "compute", *round_):
                    future = self._waiting.pop(number)
                    if not future.done():
                        future.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            self._waiting, self._new = {}, []

    async def _compute(self, what: str, method: str, *arguments: Any) -> Any:
        """The completions of a method of the engine; if it dies, those of the restarted engine."""
        while True:
            restart = self.worker.restarts
            try:
                finished, counters = await self.worker.call_once_async(what, method, *arguments)
            except WorkerDied as died:
                await self._restore(restart, died)
                continue
            # Replayed work is not counted.
            for name, done in vars(counters).items():
                more = getattr(self.counters, name) + done - getattr(self._counted, name)
                setattr(self.counters, name, more)
            self._counted = counters
            return finished

    async def _restore(self, restart: int, died: WorkerDied) -> None:
        """Bring the restarted engine to the state of the dead engine, unless another call has already done so."""
        if self._restoring is None:
            self._restoring = asyncio.Lock()
        async with self._restoring:
            if self.loaded_restart > restart:
                return
            while True:
                await asyncio.to_thread(self.worker.wait_for_restart, restart, died)
                await asyncio.to_thread(self.send_weights)
                restart = self.loaded_restart
                try:
                    for round_ in self._rounds[:-1]:
                        _, self._counted = await self.worker.call_once_async("replayed rounds", "compute", *round_)
                    return
                except WorkerDied as again:
                    died = again


class RayEngine:
    """An `Engine` over the engines of a cluster. Every learner has an instance, but only rank 0 samples."""

    def __init__(
        self, policy: Policy, workers: Sequence[WorkerClient], slots: int, lockstep: bool, is_rank0: bool
    ) -> None:
        """`slots`: capacity of one engine; `lockstep`: whether engines compute in lockstep with their episodes."""
        self.policy = policy
        self.counters = EngineCounters()
        self.capacity = slots * len(workers)
        self.is_rank0 = is_rank0
        self._clients = [_EngineClient(worker, lockstep, self.counters) for worker in workers]
        self._client: ContextVar[_EngineClient] = ContextVar("client", default=self._clients[0])

    async def generate(self, request: Request) -> Completion:
        return await self._client.get().generate(request)

    @contextmanager
    def episode(self, group: int = 0) -> Iterator[None]:
        client = self._clients[group % len(self._clients)]
        token = self._client.set(client)
        client.open += 1
        try:
            yield
        finally:
            client.open -= 1
            self._client.reset(token)

    def load_weights(self, version: int, source: Policy | None = None) -> None:
        """Put the weights into the object store once; every engine reads them from there."""
        source = source or self.policy
        buckets = weight_buckets(source, self.is_rank0)
        # Every learner shares its GPU with a colocated engine, which wakes up now.
        source.release_cached_memory()
        if not self.is_rank0:
            return
        for client in self._clients:
            client.begin(version, buckets)
        self._at_once(_EngineClient.send_weights)

    def sleep(self) -> None:
        """Put all engines to sleep. An engine that dies meanwhile is restarted and gets the next weights."""
        if self.is_rank0:
            self._at_once(_EngineClient.sleep)

    def _at_once(self, call: Callable[[_EngineClient], None]) -> None:
        """`call` every engine, each in a thread."""
        with ThreadPoolExecutor(len(self._clients)) as pool:
            for done in [pool.submit(call, client) for client in self._clients]:
                done.result()
