"""The processes of a run: who is who, and what they tell each other. A run of one process is a world of size 1.

Every process runs the same stage on the same recipe. What concerns all of them is decided with the methods here, which
every process calls in the same order; only the first one writes the run directory and talks to the user.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.recipe.hardware import HardwareRecipe

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun`, and a launch by posttrain, put into the environment of a process."""
_PATIENCE_DAYS = 7
"""How long a process waits for another one that is alive: longer than any rollout. One that has ended is noticed at once."""


class AlreadyReported(PosttrainError):
    """An error that another process has told the user already."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


class Lost(RunError):
    """Another process of the run is gone."""


class World:
    """The processes of a run. This one is `rank` (0 to size - 1), and `local_rank` of `local_size` on its machine."""

    def __init__(
        self,
        hardware: HardwareRecipe,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
    ) -> None:
        self.hardware = hardware
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size

    @property
    def first(self) -> bool:
        """Whether this process writes the run directory and talks to the user."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether models are divided among the processes, or kept where FSDP offloads them."""
        return self.size > 1 or self.hardware.offload

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all processes in the order of ranks, on every process. Items are what pickle takes."""
        return list(items) if self.size == 1 else [item for own in self._exchange(list(items)) for item in own]

    def broadcast(self, item: T) -> T:
        """The first process's `item`."""
        if self.size == 1:
            return item
        import torch.distributed as dist

        box = [item]
        with _noticing():
            dist.broadcast_object_list(box, src=0, group=control_group())
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some process."""
        if self.size == 1:
            return flag
        import torch

        (found,) = self.sum([torch.tensor(float(flag))])
        return bool(found > 0)

    def sum(self, tensors: Sequence["torch.Tensor"]) -> list["torch.Tensor"]:
        """The sums over processes of tensors of the same shapes, bit for bit the same on each. They are changed in place."""
        if self.size > 1:
            import torch.distributed as dist

            with _noticing():
                for tensor in tensors:
                    dist.all_reduce(tensor, group=control_group() if tensor.device.type == "cpu" else None)
        return list(tensors)

    @property
    def is_single_process(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.any(False)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process, which alone does it; where it fails there, all fail."""
        if self.size == 1:
            return work()
        return self._told([_tried(work) if self.first else None])[0]

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives in each process, in the order of ranks; where it fails in one, all fail."""
        return [work()] if self.size == 1 else self._told([_tried(work)])

    def _told(self, outcomes: list["_Outcome | None"]) -> list[Any]:
        found = [outcome for outcome in self.gather(outcomes) if outcome is not None]
        for outcome in found:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in found]

    def _exchange(self, item: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with _noticing():
            dist.all_gather_object(found, item, group=control_group())
        return found


class _Outcome:
    """What came of a piece of work."""

    def __init__(self, value: Any = None, error: PosttrainError | None = None) -> None:
        self.value, self.error = value, error


def _tried(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work())
    except PosttrainError as error:
        return _Outcome(error=error)


ALONE = World(HardwareRecipe())
"""One process."""
_state: dict[str, Any] = {"world": ALONE, "control": None}


def current() -> World:
    """The world of this process."""
    return _state["world"]


def launched() -> bool:
    """Whether this process is one of several that were started together."""
    return all(name in os.environ for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def joined(hardware: HardwareRecipe, device: str = "auto") -> Iterator[World]:
    """Inside, this process is one of the world's: of those it was started with, or the only one.

    `device` is the recipe's `model.device`. Raises InputError for settings that do not fit. An error that leaves the
    block is told to the user by one process; in the others it becomes `AlreadyReported`.
    """
    if launched():
        size = int(os.environ["WORLD_SIZE"])
        if hardware.processes not in (1, size):
            raise InputError(
                f"hardware.processes = {hardware.processes}, but torchrun started {size} processes; set it to {size}, or start "
                f"{hardware.processes}"
            )
        world = World(
            hardware,
            int(os.environ["RANK"]),
            size,
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
    else:
        world = World(hardware)
    if not world.sharded:
        yield world
        return
    on_gpu = _on_gpu(device)
    if hardware.offload and not on_gpu:
        raise InputError(
            "hardware.offload moves state from a GPU to the processors, and the device here is a CPU; leave it out"
        )
    store = _connect(world, on_gpu)
    _divide_threads(world)
    _state["world"] = world
    try:
        yield world
        world.barrier()
    except BaseException as error:
        if is_loss(error):
            error = lost()
        if world.size > 1 and not _claims(store, world):
            code = (
                error.exit_code
                if isinstance(error, PosttrainError)
                else 130
                if isinstance(error, KeyboardInterrupt)
                else 1
            )
            raise AlreadyReported(code) from error
        raise error
    _disconnect()


@contextmanager
def single_process() -> Iterator[World]:
    """Inside, this process is alone with the models that it loads; it is given the world that it belongs to, for the first
    process to do something. All meet at the end."""
    world = current()
    _state["world"] = ALONE
    try:
        yield world
    finally:
        _state["world"] = world
    world.barrier()


def threads(asked: int | None) -> int | None:
    """Processor threads of this process: its share of `asked`, which None leaves to torch."""
    return None if asked is None else max(1, asked // current().local_size)


def _on_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def _connect(world: World, on_gpu: bool) -> Any:
    """Form the groups of processes; returns the store through which they can leave each other notes."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    patience = timedelta(days=_PATIENCE_DAYS)
    if on_gpu:
        if world.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"hardware.processes: {world.local_size} processes on this machine and {torch.cuda.device_count()} GPUs, one "
                "for each; lower it, or set model.device to cpu"
            )
        torch.cuda.set_device(world.local_rank)
    store: Any
    if world.size == 1:
        store = dist.HashStore()
    else:
        store, _, _ = next(dist.rendezvous("env://"))
        store.set_timeout(patience)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    group_store = dist.PrefixStore("posttrain", store)
    dist.init_process_group(backend, store=group_store, rank=world.rank, world_size=world.size, timeout=patience)
    _state["control"] = dist.new_group(backend="gloo", timeout=patience)
    return store


def _disconnect() -> None:
    import torch.distributed as dist

    _state["world"], _state["control"] = ALONE, None
    dist.destroy_process_group()


def _divide_threads(world: World) -> None:
    """Give each process of a machine its share of the threads, where the environment does not say how many it has."""
    if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))


def control_group() -> Any:
    """The group for what is small, and in the processors' memory."""
    return _state["control"]


def _claims(store: Any, world: World) -> bool:
    """Whether this is the process that tells the user what went wrong: the first to ask."""
    try:
        return store.compare_set("posttrain/failure", "", str(world.rank)) == str(world.rank).encode()
    except Exception:  # the store is gone with the process that held it
        return world.first


@contextmanager
def _noticing() -> Iterator[None]:
    """Turn what torch says about a lost connection into `Lost`."""
    try:
        yield
    except RuntimeError as error:
        raise lost() from error


def is_loss(error: BaseException) -> bool:
    """Whether torch failed since another process is gone."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def lost() -> Lost:
    """What to say where another process is gone."""
    return Lost("another process of the run ended before its time; go on with --resume")
