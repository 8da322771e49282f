"""The processes of a run: ranks, collective calls, errors and interrupts. A run of one process is a world of size 1.

Every process runs the same stage on the same recipe. Decisions that concern all ranks go through the methods of
`World`, which all ranks call in the same order. Only rank 0 writes the run directory and prints to the user.
"""

import faulthandler
import itertools
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.distributed import hangs
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.runs.machine import usable_processors

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that `torchrun`, and a launch by posttrain, set for each process."""
_SIOCGIFADDR = 0x8915
"""Of Linux: the IPv4 address of a network interface."""
_TIMEOUT_DAYS = 7
"""Time-out of collective calls in CPU memory, longer than any rollout. A rank that exits is detected at once through its
connection.
"""


class AlreadyReported(PosttrainError):
    """Raised on ranks whose error another rank has already reported."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


class RankLost(RunError):
    """Another process of the run has exited."""


@dataclass(eq=False)
class World:
    """The processes of a run. This one is `rank` (0 to size - 1), and `local_rank` of `local_size` on its machine."""

    hardware: HardwareRecipe
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the run directory and prints to the user."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether models are sharded with FSDP: over several processes, or in one process for its CPU offload."""
        return self.size > 1 or self.hardware.offload == "all"

    @property
    def sequence_rank(self) -> int:
        """Which part of each row this process computes, of `hardware.sequence_parallel`."""
        return self.rank % self.hardware.sequence_parallel

    @property
    def data_rank(self) -> int:
        """The number of the group of processes, of `data_size`, with which this one computes its micro-batches."""
        return self.rank // self.hardware.sequence_parallel

    @property
    def data_size(self) -> int:
        """Groups of `hardware.sequence_parallel` processes. Each computes other micro-batches."""
        return self.size // self.hardware.sequence_parallel

    @property
    def shards(self) -> int:
        """Processes over which models are sharded; the others hold replicas of these shards."""
        return self.size // self.hardware.replicas

    @property
    def shard_rank(self) -> int:
        """Which shard this process holds, of `shards`."""
        return self.rank % self.shards

    def mesh(self, device: str) -> Any:
        """The processes as torch's mesh for devices of a type: of `shards`, or of replicas x `shards`."""
        import torch

        if self.hardware.replicas == 1:
            return torch.distributed.init_device_mesh(device, (self.size,))
        if _state["mesh"] is None:  # it has process groups of its own
            shape = (self.hardware.replicas, self.shards)
            _state["mesh"] = torch.distributed.init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards"))
        return _state["mesh"]

    def gather(self, items: Sequence[T], background: bool = False) -> list[T]:
        """The items of all ranks, in rank order, on every rank. Items must be picklable. `background`: see `control_group`."""
        if self.size == 1:
            return list(items)
        import torch.distributed as dist

        hangs.progress[0] += 1
        gathered: list[Any] = [None] * self.size
        with _explain_failure():
            dist.all_gather_object(gathered, list(items), group=control_group(background))
        return list(itertools.chain.from_iterable(gathered))

    def broadcast(self, item: T) -> T:
        """Rank 0's `item`, which must be picklable, on every rank."""
        if self.size == 1:
            return item
        import torch.distributed as dist

        hangs.progress[0] += 1
        box = [item]
        with _explain_failure():
            dist.broadcast_object_list(box, src=0, group=control_group())
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        import torch

        (count,) = self.sum([torch.tensor(float(flag))])
        return bool(count > 0)

    def sum(self, tensors: Sequence["torch.Tensor"]) -> list["torch.Tensor"]:
        """Sum each tensor over the ranks, in place. Shapes are equal on all ranks; so are the results, bit for bit."""
        if self.size > 1:
            import torch.distributed as dist

            hangs.progress[0] += 1
            with _explain_failure():
                for tensor in tensors:
                    dist.all_reduce(tensor, group=control_group() if tensor.device.type == "cpu" else None)
        return list(tensors)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        self.any(False)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank. An error on rank 0 is raised on all."""
        if self.size == 1:
            return work()
        value, own = _attempt(work) if self.is_rank0 else (None, None)
        value, raised = self.broadcast((value, _portable(own)))
        if raised is not None:
            raise own or raised
        return value  # type: ignore[return-value]

    def on_all_ranks(self, work: Callable[[], T], background: bool = False) -> list[T]:
        """Run `work` on every rank and return the results in rank order. An error on any rank is raised on all."""
        if self.size == 1:
            return [work()]
        value, own = _attempt(work)
        results = self.gather([(value, _portable(own))], background)
        for _, raised in results:
            if raised is not None:
                raise own or raised
        return [value for value, _ in results]  # type: ignore[misc]

    def raise_any(self, error: BaseException | None) -> None:
        """Raise the `error` of any rank on all ranks."""

        def work() -> None:
            if error is not None:
                raise error

        self.on_all_ranks(work)


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except (Exception, KeyboardInterrupt) as error:
        return None, error


def _portable(error: BaseException | None) -> BaseException | None:
    """`error` for other ranks, with its traceback if it is unexpected; a RuntimeError if it cannot be sent."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(error, Exception) and not isinstance(error, PosttrainError):
        copy.add_note("On the rank that failed:\n" + "".join(traceback.format_exception(error)))
    return copy


_SINGLE_PROCESS = World(HardwareRecipe())
_NO_GROUPS = {"control": None, "background": None, "sequence": None, "mesh": None}
_state: dict[str, Any] = {"world": _SINGLE_PROCESS, **_NO_GROUPS}


def current_world() -> World:
    """The world of this process."""
    return _state["world"]


def is_launched() -> bool:
    """Whether this process is one of several that a launcher started together."""
    return all(name in os.environ for name in _LAUNCH_VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def join_world(hardware: HardwareRecipe, device: str = "auto") -> Iterator[World]:
    """Make this process a rank of its world inside the block; a process that no launcher started is the only rank.

    `device` is the recipe's `model.device`. Raises InputError for settings that do not match the processes. If an error
    leaves the block on several ranks, one rank raises it and the others raise `AlreadyReported`.
    """
    with _kernels(hardware, device), _joined(hardware, device) as world:
        yield world


@contextmanager
def _joined(hardware: HardwareRecipe, device: str) -> Iterator[World]:
    if is_launched():
        size = int(os.environ["WORLD_SIZE"])
        if hardware.learners not in (1, size):
            raise InputError(
                f"hardware.processes = {hardware.learners}, but torchrun started {size} processes; set it to {size}, or start "
                f"{hardware.learners}"
            )
        local_rank, local_size = os.environ.get("LOCAL_RANK", 0), os.environ.get("LOCAL_WORLD_SIZE", 1)
        world = World(hardware, int(os.environ["RANK"]), size, int(local_rank), int(local_size))
    else:
        world = World(hardware)
    if hardware.offload != "none" and not _on_gpu(device):
        raise InputError(
            "hardware.offload moves state from a GPU to CPU memory, but the device here is a CPU; remove it"
        )
    if not world.sharded:
        _state["world"] = world
        try:
            yield world
        finally:
            _state["world"] = _SINGLE_PROCESS
        return
    store = _connect(world, _on_gpu(device))
    if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(usable_processors()) // world.local_size))
    _state["world"] = world
    try:
        with hangs.watched(store, world.rank, world.size) if world.size > 1 else nullcontext():
            yield world
            world.barrier()
    except BaseException as error:
        error = communication_error(error) or error
        if world.size > 1 and not _claim_report(store, world):
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            raise AlreadyReported(error.exit_code if isinstance(error, PosttrainError) else code) from error
        raise error
    import torch.distributed as dist

    _state.update(world=_SINGLE_PROCESS, **_NO_GROUPS)
    dist.destroy_process_group()


@contextmanager
def single_process() -> Iterator[World]:
    """Load and run models in this process alone inside the block; models are not sharded there.

    Yields the outer world, so that rank 0 can act differently. All ranks wait for each other at the end of the block, where an
    error of any rank is raised on all.
    """
    world, raised = current_world(), None
    _state["world"] = _SINGLE_PROCESS
    try:
        yield world
    except Exception as error:
        raised = error
    finally:
        _state["world"] = world
    world.raise_any(raised)


def threads_per_process(requested: int | None) -> int | None:
    """CPU threads of this process: its share of `requested` threads of the machine; None keeps torch's default."""
    return None if requested is None else max(1, requested // current_world().local_size)


def use_deterministic_kernels(hardware: HardwareRecipe, device: str) -> None:
    """With `hardware.deterministic`, use only kernels on a GPU that add in a fixed order in this process from now on.

    Call it before the first product there: cuBLAS reads its setting once. An operation without such a kernel raises
    RuntimeError. See https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if hardware.deterministic and _on_gpu(device):
        import torch

        # cuBLAS needs workspaces of a fixed size, whatever is in flight.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # By default torch also fills new memory with NaN, which costs time; nothing reads memory before it is written.
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)


@contextmanager
def _kernels(hardware: HardwareRecipe, device: str) -> Iterator[None]:
    """`use_deterministic_kernels` inside the block only."""
    if not hardware.deterministic:
        yield
        return
    import torch

    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    use_deterministic_kernels(hardware, device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def _on_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def _connect(world: World, on_gpu: bool) -> Any:
    """Create the process groups; returns the key-value store that the ranks share."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    timeout = timedelta(days=_TIMEOUT_DAYS)
    # NCCL ends a process whose call takes longer; ranks wait for work of other ranks in calls of gloo. It shows no line itself.
    limit = timedelta(seconds=hangs.LIMIT) if on_gpu else timeout
    if on_gpu:
        faulthandler.enable(sys.__stderr__ or sys.stderr)
        if world.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"hardware.processes: {world.local_size} processes on this machine need one GPU each, but there are "
                f"{torch.cuda.device_count()}; lower it, or set model.device to cpu"
            )
        torch.cuda.set_device(world.local_rank)
    store: Any
    if world.size == 1:
        store = dist.HashStore()
    else:
        store, _, _ = next(dist.rendezvous("env://"))
        store.set_timeout(timeout)
        _choose_interface(os.environ["MASTER_ADDR"])
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    group_store = dist.PrefixStore("posttrain", store)
    try:
        dist.init_process_group(backend, store=group_store, rank=world.rank, world_size=world.size, timeout=limit)
    except RuntimeError as error:
        raise RunError(
            f"the learner processes cannot connect to each other ({str(error).splitlines()[0]}); set GLOO_SOCKET_IFNAME on "
            "each machine to the network interface that reaches the others"
        ) from error
    _state["control"] = dist.new_group(backend="gloo", timeout=timeout)
    _state["background"] = dist.new_group(backend="gloo", timeout=timeout)
    together = world.hardware.sequence_parallel
    # Every process takes part in making every group.
    for first in range(0, world.size, together) if together > 1 else ():
        group = dist.new_group(list(range(first, first + together)), backend=backend, timeout=limit)
        if first <= world.rank < first + together:
            _state["sequence"] = group
    return store


def _choose_interface(address: str) -> None:
    """Let gloo use the network interface through which this machine reaches `address`, the one of rank 0. Gloo itself takes
    that of the host name, which on many systems is the loopback interface, so that machines do not find each other.
    """
    if sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


def control_group(background: bool = False) -> Any:
    """The gloo process group, for small objects and for tensors in CPU memory; None in a single process.

    `background`: the one of the thread that writes checkpoints, whose calls must not mix with others.
    """
    return _state["background" if background else "control"]


def sequence_group() -> Any:
    """The group of the processes that compute rows together with this one, for tensors on the model's device and in CPU
    memory; None without `hardware.sequence_parallel`."""
    return _state["sequence"]


def _claim_report(store: Any, world: World) -> bool:
    """Whether this rank reports the error to the user. The first rank that asks the store does."""
    try:
        return store.compare_set(hangs.FAILED, "", str(world.rank)) == str(world.rank).encode()
    except Exception:  # the process that hosts the store has exited
        return world.is_rank0


@contextmanager
def _explain_failure() -> Iterator[None]:
    """Replace torch's error about a failed collective call by a one-sentence message."""
    try:
        yield
    except RuntimeError as error:
        explained = communication_error(error)
        if explained is None:
            raise
        raise explained from error


def communication_error(error: BaseException) -> RunError | None:
    """The error to raise instead of torch's `error` if a collective call failed; None for any other error.

    `RankLost` if another process has exited. NCCL can also fail for other reasons, which its message names.
    """
    import torch.distributed as dist

    text = str(error)
    collective = isinstance(error, dist.DistError) or "gloo" in text.lower()
    if isinstance(error, PosttrainError) or not (isinstance(error, RuntimeError) and collective):
        return None
    cause = " ".join(text.split())[:400]
    if "NCCL" in text and "ncclRemoteError" not in text:
        return RunError(
            f"NCCL failed ({cause}); set NCCL_DEBUG=WARN to see its log, and in a container raise the size of /dev/shm "
            "(`docker run --shm-size=16g`)"
        )
    return RankLost(f"another process of the run exited early ({cause}); continue the run with --resume")


# -- interrupts ---------------------------------------------------------------------------------------------------------


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. A KeyboardInterrupt, so that asyncio propagates it."""


REPEATED = 5.0
"""Seconds within which a further SIGTERM is the same request."""


class Interrupts:
    """Turns SIGINT and SIGTERM into `Interrupted`, deferred inside `critical()`. A second signal is not deferred, except
    a SIGTERM within `REPEATED` seconds: batch systems signal every process, and launchers pass the signal on.

    Several processes stop together: a signal to any of them is deferred until all of them reach the end of a critical
    block, because none of them can continue or save without the others.
    """

    def __init__(self) -> None:
        self._world = current_world()
        self._together = self._world.size > 1
        self.torn = False
        """Whether an error left a critical block, so that the state which it changes is between two steps."""
        self._critical = False
        self._requested: int | None = None
        self._terminated = -REPEATED
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def critical(self) -> Iterator[None]:
        """Finish the block first, then stop if a stop was requested."""
        self._critical = True
        try:
            yield
        except BaseException:
            self.torn = True
            raise
        finally:
            self._critical = False
        requested, self._requested = self._requested, None
        if self._together:
            requested = next(iter(self._world.gather([requested] if requested is not None else [])), None)
        if requested is not None:
            raise Interrupted(signal.Signals(requested).name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._terminated = self._terminated, time.monotonic()
            if self._terminated - before < REPEATED:
                return
        if (self._critical or self._together) and self._requested is None:
            self._requested = number
            return
        raise Interrupted(signal.Signals(number).name)
