"""A CUDA device of fake tensors: every operation is checked and counted, none is computed.

`FakeDevice` is a dispatch mode in which CUDA tensors are fake and CPU tensors are real. An operation on the device that
mixes devices, lacks an argument or gets a wrong shape fails as it would on a GPU. Numbers that come back to the CPU are
made up: ones, and true. The mode counts what the CPU asks of the device, and the live and largest bytes of its tensors.

It needs the library of `fake_cuda.cpp`, loaded before torch is imported (`child.py`).
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft  # noqa: F401 (imports bitsandbytes, whose part for CUDA does not fit a fake device)
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from posttrain.engines.local import cuda, decoder
from posttrain.models import layers

aten = torch.ops.aten
HERE = Path(__file__).parent
SOURCES = tuple(str(part) for part in (HERE.parents[1] / "src", HERE))

NO_KERNEL = {
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "t", "transpose", "permute", "expand", "alias", "detach"),
    *("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "unsqueeze", "squeeze", "as_strided"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "is_pinned", "diagonal"),
    *("is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous", "dim", "device"),
    *("layout", "set_", "resize_", "view_as_real", "narrow", "unfold"),
}
"""Operations that launch no kernel: views, allocations and questions about shapes."""
WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal", "is_nonzero"}
"""Operations that make the CPU wait, because the shape of the result or a Python number depends on values."""


class FakeDevice(TorchDispatchMode):
    """Counts of the work that the CPU has asked of the device since `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = 0
        """Bytes of all tensors on the device, each storage once."""
        self._storages: dict[int, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Count from zero. `live` stays, and `peak` becomes it."""
        self.kernels: Counter[str] = Counter()
        """Kernel launches by operation."""
        self.syncs: Counter[str] = Counter()
        """Number of times that the CPU waits for the device, by operation and line of the package."""
        self.uploads = 0
        """Copies from the CPU's memory to the device."""
        self.peak = self.live

    @property
    def kernel_count(self) -> int:
        return sum(self.kernels.values())

    @property
    def sync_count(self) -> int:
        return sum(self.syncs.values())

    _should_skip_dynamo = classmethod(lambda cls: False)  # nothing is compiled, and skipping takes long

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        fakes = [item for item in tensors if isinstance(item, FakeTensor)]
        to_device = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if not fakes and not to_device:
            pinned = kwargs.pop("pin_memory", False)
            out = func(*args, **kwargs)
            return PINNED.add(out) if pinned else out
        name = func.overloadpacket.__name__
        if func is aten._local_scalar_dense.default:
            self._wait("a number")
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        if name == "nonzero":  # all places, as if every element were true
            self._wait(name)
            return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if name == "index" and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]):
            self._wait("a mask as an index")  # every value, as if the mask were true everywhere
            (mask,) = [i for i in args[1] if i is not None]
            return args[0].reshape(-1, *args[0].shape[mask.dim() :]).clone()
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self._wait(name)
            return args[0].new_zeros(int(args[0].numel()))
        if name in WAITS:
            self._wait(name)
        if name == "index" and any(isinstance(i, torch.Tensor) and i.device.type == "cpu" for i in args[1]):
            self._wait("an index from the CPU")
        if name == "copy_" and isinstance(args[0], FakeTensor) and not isinstance(args[1], FakeTensor):
            self._upload(args[1], (len(args) > 2 and bool(args[2])) or bool(kwargs.get("non_blocking")))
        if name == "_to_copy" and not fakes:
            self._upload(args[0], bool(kwargs.get("non_blocking")))
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            if args[0] not in PINNED:
                self._wait("a copy to the CPU")
            return args[0].fill_(1)
        if len(fakes) < len(tensors):
            args, kwargs = tree_map(self._faked, (args, kwargs))
        out = self.fake.dispatch(func, types, args, kwargs)
        if name not in NO_KERNEL:
            self.kernels[name] += 1
        return self._returned(out) if isinstance(out, torch.Tensor) else tree_map(self._returned, out)

    def _faked(self, value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        # Of an alias: the mode would keep a weak reference, and modules do not replace parameters that have one.
        return self.fake.from_tensor(value.detach()) if real else value

    def _returned(self, value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if value.device.type == "cpu":
            self._wait("a copy to the CPU")
            return torch.ones(value.shape, dtype=value.dtype)
        self._remember(value.untyped_storage())
        return value

    def _upload(self, source: torch.Tensor, non_blocking: bool) -> None:
        self.uploads += bool(source.dim())
        # A number in a tensor without dimensions is an argument of the kernel.
        if not (non_blocking and source in PINNED) and source.dim():
            self._wait("a copy from memory that is not pinned")

    def _wait(self, what: str) -> None:
        self.syncs[f"{what} at {_line()}"] += 1

    def _remember(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            if (kept := self._storages.pop(key, None)) is not None:
                self.live -= kept[1]

        self._storages[key] = weakref.ref(storage, freed), 0
        self.resized(storage)

    def resized(self, storage: Any) -> None:
        """Count the bytes of a storage anew. FSDP frees the storage of gathered weights without an operation."""
        reference, size = self._storages[storage._cdata]
        self._storages[storage._cdata] = reference, storage.nbytes()
        self.live += storage.nbytes() - size
        self.peak = max(self.peak, self.live)

    def expect(self, what: str, syncs: int) -> None:
        """AssertionError with the lines that wait if there were more than `syncs` waits."""
        if self.sync_count > syncs:
            lines = "\n".join(f"  {count} x {where}" for where, count in self.syncs.most_common())
            raise AssertionError(f"{what}: the CPU waited {self.sync_count} times, more than {syncs}:\n{lines}")


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments and in lists of them, ten times faster than by `tree_leaves`."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Pinned:
    """Tensors that `pin_memory` returned."""

    def __init__(self) -> None:
        self._ids: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.detach().clone()
        self._ids[id(pinned)] = weakref.ref(pinned, lambda _, key=id(pinned): self._ids.pop(key, None))
        return pinned

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._ids.get(id(tensor))
        return found is not None and found() is tensor


PINNED = _Pinned()


class _FusedNorm(torch.autograd.Function):
    """As many kernels and as much memory as PyTorch's RMS norm, which is one kernel in builds for CUDA alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        of_weight = gradient.reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return gradient * weight, of_weight


def _fused_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _FusedNorm.apply(x, weight) if x.is_cuda else torch.rms_norm(x, shape, weight, epsilon)


def _swapped(swap: Any) -> Any:
    """`swap`, which refuses fake tensors, only where a module's parameter moves."""
    return lambda one, other: None if (one.device, one.dtype) == (other.device, other.dtype) else swap(one, other)


def _line() -> str:
    """The innermost line of the package, or of these checks, that is being executed."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(SOURCES) and not file.endswith("cuda_fake/device.py"):
            return f"{Path(file).relative_to(HERE.parents[1])}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


@contextmanager
def fake_cuda() -> Any:
    """A machine with one GPU of compute capability 9.0 inside the block, whose tensors are fake."""
    replaced = {
        (torch.cuda, "_lazy_init"): lambda: None,
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "device_count"): lambda: 1,
        (torch.cuda, "get_device_capability"): lambda device=None: (9, 0),
        (torch.cuda, "is_bf16_supported"): lambda including_emulation=True: True,
        (torch.cuda, "is_current_stream_capturing"): lambda: False,
        (torch.cuda, "manual_seed_all"): lambda seed: None,
        (torch.Tensor, "pin_memory"): lambda self, device=None: PINNED.add(self),
    }
    device = FakeDevice()
    replaced |= {
        (torch.cuda, "current_stream"): lambda: SimpleNamespace(synchronize=lambda: device._wait("a synchronization")),
        (torch.cuda, "Event"): lambda: SimpleNamespace(
            record=lambda: None, synchronize=lambda: device._wait("a synchronization")
        ),
        (torch.cuda, "empty_cache"): lambda: None,
        # One kernel on a GPU; PyTorch computes it for fake tensors by several operations in float32.
        (torch.ops.aten, "silu_backward"): lambda gradient, x: torch.empty_like(x),
        (torch.utils, "swap_tensors"): _swapped(torch.utils.swap_tensors),
        (layers, "rms_norm"): _fused_norm,
        (decoder, "rms_norm"): _fused_norm,
        (cuda, "CudaGraphs"): lambda: lambda run: (run, run()),
    }
    before = {place: getattr(*place) for place in replaced}
    for (owner, name), stub in replaced.items():
        setattr(owner, name, stub)
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with device:
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        for (owner, name), original in before.items():
            setattr(owner, name, original)


class VocabularyKernels:
    """`models.cuda.vocabulary`, whose kernels are launched by Triton, with results of the same shapes."""

    def __init__(self, device: FakeDevice) -> None:
        self._kernels = device.kernels

    def read_rows(self, logits: torch.Tensor, *numbers: Any) -> list[torch.Tensor]:
        self._kernels["read_rows"] += 1
        return [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3)]

    def differentiate(self, *numbers: Any) -> None:
        self._kernels["differentiate"] += 1


class DecodingKernels:
    """`models.cuda.decoding`, as `VocabularyKernels`."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def normalize(self, x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        self._device.kernels["normalize"] += 1
        return torch.empty_like(x)

    def rotate_and_store(self, *numbers: Any) -> None:
        self._device.kernels["rotate_and_store"] += 1

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        self._device.kernels["gate"] += 1
        return both.new_empty(len(both), both.shape[1] // 2)


class AdamwKernels:
    """`models.cuda.adamw`, likewise."""

    def __init__(self, device: FakeDevice) -> None:
        self._kernels = device.kernels

    def step(self, weight: torch.Tensor, low: torch.Tensor | None, gradient: torch.Tensor, *numbers: Any) -> None:
        tensors = [weight, gradient, *([] if low is None else [low]), *numbers[0], *numbers[1], *numbers[2]]
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
        assert (weight.dtype, gradient.dtype) == (torch.float32 if low is None else torch.bfloat16, torch.float32)
        self._kernels["adamw"] += 1
