"""A model divided among the processes by FSDP2: shares of every weight at rest, whole layers while they compute.

Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`. Shares of trained weights are
float32 and are what the optimizer changes, so they are its masters; what computes is gathered in the model's precision.
Gradients are added up in float32 and not divided: the loss was divided already, by a normalizer over all processes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from posttrain.distributed.world import current

T = TypeVar("T")


class _Root(torch.nn.Module):
    """The module around a model that FSDP sees computing, whatever is computed with the model's weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Only tensors in plain tuples of what it returns are found by FSDP for the backward pass."""
        return function(*arguments)


class ShardedModel:
    """A model whose parameters are divided in place; every process makes the same calls in the same order."""

    def __init__(
        self, model: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device, trained: bool = True
    ) -> None:
        """`layers` are gathered one at a time, the rest of `model` as one more part. The shares of what requires a gradient
        become float32 where the model is `trained`. Computes on `device`."""
        hardware = current().hardware
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        lower = dtype != torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if lower else None,
            reduce_dtype=torch.float32 if lower else None,
            cast_forward_inputs=False,
        )
        offload = CPUOffloadPolicy() if hardware.offload else OffloadPolicy()
        mesh = torch.distributed.init_device_mesh(device.type, (current().size,))
        self._reshards = hardware.reshard_after_forward
        self._reduces_each = hardware.gradient_sync == "per_forward"
        self._root: Any = _Root(model)
        self._held = False
        for module, reshard in [*((layer, self._reshards) for layer in layers), (self._root, False)]:
            # One part at a time, so that no more than one of them is ever whole in float32.
            for parameter in module.parameters() if trained and lower else ():
                if parameter.requires_grad and not is_sharded(parameter):
                    parameter.data = parameter.data.float()
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
        for parameter in model.parameters():
            parameter._posttrain_dtype = dtype  # type: ignore[attr-defined]
        self._parts: list[Any] = [*layers, self._root]
        for part in self._parts:
            # A sum, also where the library of a GPU would divide for us.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        with torch.no_grad():
            # FSDP takes the first module that computes for the root of all.
            self(lambda: None)

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, which computes with the model: its layers, or whole weights of the rest. What has a
        gradient is returned as a tensor or in a tuple."""
        found = self._root(function, *arguments)
        if not torch.is_grad_enabled():
            self.settle()
        return found

    def reduce_next(self, last: bool) -> None:
        """Say before a backward pass whether it is the update's last, at the end of which gradients are complete."""
        self._root.set_requires_gradient_sync(last or self._reduces_each)

    def settle(self) -> None:
        """Back to shares, where a computation left weights whole: before they are read, or changed from outside."""
        if not self._held:
            for part in self._parts:
                part.reshard()

    def hold(self) -> None:
        """Gather everything: until `release` the model's modules have whole weights, for anyone who computes with them."""
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self._held = True

    def release(self) -> None:
        """End what `hold` began."""
        if self._held:
            self._held = False
            self.settle()
            self._forget_order()
            for part in self._parts[:-1]:
                part.set_reshard_after_forward(self._reshards, recurse=False)

    def _forget_order(self) -> None:
        """Forget which layers computed while all was held: from that FSDP guesses what to gather ahead of a backward pass,
        and the processes did not compute the same."""
        for part in self._parts:
            state = part._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            for group in state._fsdp_param_groups:
                group._post_forward_indices.clear()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all weights are gathered."""
        self.hold()
        try:
            yield
        finally:
            self.release()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process has only its share of the tensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a tensor, in the same memory; the tensor itself where it is not divided."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(own: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`own`, this process's share, as a whole tensor that is divided as `tensor` is."""
    if not is_sharded(tensor):
        return own
    from torch.distributed.tensor import DTensor

    divided: Any = tensor
    return DTensor.from_local(
        own, divided.device_mesh, divided.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def dtype_in_use(parameter: torch.Tensor) -> torch.dtype:
    """The precision that the parameter computes in, which its share may exceed."""
    return getattr(parameter, "_posttrain_dtype", parameter.dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, in the precision that it is used in; every process asks for it."""
    dtype = dtype_in_use(tensor)
    return tensor.detach().full_tensor().to(dtype) if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gathered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors in the first process's memory, one gathered after the other, and nothing in the others.

    What is one tensor under several names stays one.
    """
    found: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            entire = whole(tensor)
            known[id(tensor)] = entire.cpu() if current().first else entire.new_empty(0)
        if current().first:
            found[name] = known[id(tensor)]
    return found


def set_share(tensor: torch.Tensor, entire: torch.Tensor) -> None:
    """Set a tensor to `entire`, of which a divided one takes this process's share."""
    with torch.no_grad():
        if is_sharded(tensor):
            # As FSDP divides: rows, in as many parts as there are processes, the last ones smaller or empty.
            parts = torch.chunk(entire, current().size)
            own = parts[current().rank] if current().rank < len(parts) else entire[:0]
            share(tensor).copy_(own)
        else:
            tensor.copy_(entire)
