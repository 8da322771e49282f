"""The engines of a cluster as one engine: weights go out once for all of them, a group stays on one of them.

An engine that computes in step with its episodes (the local one) is asked in turns: everything its open episodes wait for
goes out at once, and comes back as soon as something is finished. So what it computes together is a function of the
requests alone, as in one process; and when it dies, the turns since the last weights are played again to the one in its
place, which then holds bit for bit what the dead one held. Other engines are asked for each answer by itself.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

from posttrain.distributed.ray.worker_group import Gone, Member
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.models.policy import Policy

PIECE_BYTES = 256 * 2**20
"""Most bytes of a piece, unless one tensor has more."""

Packed = list[tuple[str, str, tuple[int, ...], Any]]
"""Name, type, shape and bytes of tensors; the bytes are numpy arrays, which readers on one machine share."""


def weight_buckets(policy: Policy, keep: bool) -> list[Any]:
    """References to the pieces in the object store; of weights that are divided among processes, gathered by all of them.

    Only what is trained is sent: an engine starts from the same files. Not `keep`: the process helps to gather and keeps
    nothing.
    """
    import ray

    return [ray.put(piece) for piece in _packed(policy, keep)]


def _packed(policy: Policy, keep: bool) -> Iterator[Packed]:
    import torch

    piece: Packed = []
    size = 0
    for name, parameter in policy.trainable():
        tensor = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if not keep:
            continue
        # numpy has no bfloat16; bytes are the same to all.
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if piece and size + raw.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw))
        size += raw.nbytes
    if piece:
        yield piece


def load_bucket(policy: Policy, piece: Packed) -> None:
    """Copy the tensors of a piece into a policy of the same recipe."""
    import torch

    own = dict(policy.trainable())
    with torch.no_grad():
        for name, dtype, shape, raw in piece:
            # The store's memory is read-only, which torch would warn about.
            tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
            own[name].copy_(tensor)


Turn = tuple[int, tuple[tuple[int, Request], ...]]
"""Episodes that are open, and the requests that are new, each with its number."""


class _Link:
    """The way to one engine, and what it was asked since it has its weights."""

    def __init__(self, member: Member, in_step: bool, counters: EngineCounters) -> None:
        self.member, self.in_step, self.counters = member, in_step, counters
        self.open = 0
        self.weights: tuple[int, list[Any]] | None = None
        """The version and the pieces that it has to have."""
        self.has = -1
        """The life of the member that has them."""
        self._restoring: asyncio.Lock | None = None
        self._turns: list[Turn] = []
        self._new: list[tuple[int, Request]] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._numbers = 0
        self._pump: asyncio.Task[None] | None = None
        self._counted = EngineCounters()

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin(self, version: int, pieces: list[Any]) -> None:
        """Nothing of what was asked before counts any longer."""
        self.weights = (version, pieces)
        self._turns, self._new, self._waiting = [], [], {}
        self._restoring = None
        self.has = -1

    def give_weights(self) -> None:
        """Give it the weights, whatever befalls it meanwhile."""
        assert self.weights is not None
        while self.has != self.member.lives or self.has < 0:
            life = self.member.lives
            try:
                counters = self.member.once("new weights", "load_weights", *self.weights)
            except Gone as gone:
                self.member.await_return(life, gone)
                continue
            self.has, self._counted = life, counters

    # -- answers ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        if not self.in_step:
            return await self._alone(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._new.append((self._numbers, request))
        self._waiting[self._numbers] = future
        self._numbers += 1
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            # An interrupt ends the loop from inside this task; asyncio would report it as never retrieved.
            self._pump.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await future

    async def _alone(self, request: Request) -> Completion:
        while True:
            life = self.member.lives
            try:
                found = await self.member.once_awaited("an answer", "generate", request)
            except Gone as gone:
                await self._restore(life, gone)
                continue
            self._count(found[1])
            return found[0]

    async def _run(self) -> None:
        """Ask in turns until nothing is in flight."""
        try:
            while self._waiting:
                looks = 0
                while len(self._waiting) < self.open:
                    looks += 1
                    await asyncio.sleep(0 if looks < 100 else 0.001)
                turn: Turn = (self.open, tuple(self._new))
                self._new = []
                self._turns.append(turn)
                for number, completion in await self._asked(turn):
                    future = self._waiting.pop(number)
                    if not future.done():
                        future.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            self._waiting, self._new = {}, []

    async def _asked(self, turn: Turn) -> list[tuple[int, Completion]]:
        """What the engine finishes next; of one that died, the one in its place."""
        while True:
            life = self.member.lives
            what = f"{len(self._waiting)} answers" if len(self._waiting) > 1 else "an answer"
            try:
                finished, counters = await self.member.once_awaited(what, "compute", *turn)
            except Gone as gone:
                await self._restore(life, gone)
                continue
            self._count(counters)
            return finished

    async def _restore(self, life: int, gone: Gone) -> None:
        """Bring the engine in the place of the dead one to where that was; returns once somebody has."""
        if self._restoring is None:
            self._restoring = asyncio.Lock()
        async with self._restoring:
            if self.has > life:
                return
            while True:
                await asyncio.to_thread(self.member.await_return, life, gone)
                await asyncio.to_thread(self.give_weights)
                life = self.has
                try:
                    for turn in self._turns[:-1]:
                        _, self._counted = await self.member.once_awaited("its turns again", "compute", *turn)
                    return
                except Gone as again:
                    gone = again

    def _count(self, now: EngineCounters) -> None:
        """Add what is new; work that was done a second time after a death is not counted."""
        for name in (field.name for field in fields(EngineCounters)):
            more = getattr(now, name) - getattr(self._counted, name)
            setattr(self.counters, name, getattr(self.counters, name) + more)
        self._counted = now


class RayEngine:
    """Engine over the engines of a cluster. Every learner process has one; only the first one's samples."""

    def __init__(self, policy: Policy, members: Sequence[Member], slots: int, in_step: bool, first: bool) -> None:
        """`slots` are those of one engine; `in_step`: whether it computes in step with its episodes."""
        self.policy = policy
        self.counters = EngineCounters()
        self.capacity = slots * len(members)
        self.first = first
        self._links = [_Link(member, in_step, self.counters) for member in members]
        self._home: ContextVar[_Link] = ContextVar("home", default=self._links[0])

    async def generate(self, request: Request) -> Completion:
        return await self._home.get().generate(request)

    @contextmanager
    def episode(self, group: int = 0) -> Iterator[None]:
        link = self._links[group % len(self._links)]
        token = self._home.set(link)
        link.open += 1
        try:
            yield
        finally:
            link.open -= 1
            self._home.reset(token)

    def load_weights(self, version: int) -> None:
        """Put the weights into the object store once; every engine takes them from there."""
        pieces = weight_buckets(self.policy, self.first)
        if not self.first:
            return
        for link in self._links:
            link.begin(version, pieces)
        _side_by_side([link.give_weights for link in self._links])

    def sleep(self) -> None:
        """An engine that does not hear of it sleeps for good, and is started again with the next weights."""
        for link in self._links if self.first else []:
            life = link.member.lives
            try:
                link.member.once("that it sleeps", "sleep")
            except Gone as gone:
                link.member.await_return(life, gone)


def _side_by_side(works: Sequence[Any]) -> None:
    """Do all of them, each in a thread; the first error goes through."""
    from concurrent.futures import ThreadPoolExecutor

    if len(works) == 1:
        works[0]()
        return
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
