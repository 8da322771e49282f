"""FSDP2 models: every weight is sharded over the processes, or those of each replica (HSDP), at rest, and gathered layer by
layer to compute.

Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`. Shards of trained weights are
float32 and the optimizer updates them directly, so they are the master weights; layers are gathered in the model's
dtype. Gradients are summed in float32 and not averaged, because the divisor of the loss is already global over the
processes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from posttrain.distributed.hangs import progress
from posttrain.distributed.world import current_world

T = TypeVar("T")


class _Root(torch.nn.Module):
    """Wrapper whose forward runs any function, so that the FSDP hooks fire for every computation with the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function. FSDP finds outputs that need a backward hook only as tensors in plain tuples."""
        return function(*arguments)


class ShardedModel:
    """A model whose parameters are sharded in place. All ranks make the same calls in the same order."""

    def __init__(
        self, model: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device, trained: bool = True
    ) -> None:
        """Shard `model`, which computes on `device`.

        Each of `layers` is one FSDP group; the rest of the model is one more. With `trained`, shards of parameters that
        require a gradient become float32.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        hardware = current_world().hardware
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        lower = dtype != torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if lower else None,
            reduce_dtype=torch.float32 if lower else None,
            cast_forward_inputs=False,
        )
        offload = CPUOffloadPolicy() if hardware.offload == "all" else OffloadPolicy()
        mesh = current_world().mesh(device.type)
        self._reshards = hardware.reshard_after_forward
        self._reduces_each = hardware.reduces_per_forward
        self._root: Any = _Root(model)
        self._held = False
        for module, reshard in [*((layer, self._reshards) for layer in layers), (self._root, False)]:
            # Convert one group at a time, so that at most one group is whole in float32.
            for parameter in module.parameters() if trained and lower else ():
                if parameter.requires_grad and not is_sharded(parameter):
                    parameter.data = parameter.data.float()
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
        for parameter in model.parameters():
            parameter._posttrain_dtype = dtype  # type: ignore[attr-defined]
        self._groups: list[Any] = [*layers, self._root]
        for group in self._groups:
            # Reduce by sum, even where NCCL would divide by the number of ranks.
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        with torch.no_grad():
            # FSDP takes the first module that runs as the root of all groups.
            self(lambda: None)

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`, which computes with the model's layers or with gathered weights of the rest.

        Outputs that need a gradient must be a tensor or a tuple of tensors.
        """
        progress[0] += 1
        result = self._root(function, *arguments)
        if not torch.is_grad_enabled():
            self.reshard()
        return result

    def set_last_backward(self, last: bool) -> None:
        """Declare, before a backward pass, whether it is the last one of the update. After the last, gradients are
        complete.
        """
        self._root.set_requires_gradient_sync(last or self._reduces_each)

    def reshard(self) -> None:
        """Free weights that are still gathered after a forward pass. Call it before other code reads or changes
        weights.
        """
        if not self._held:
            for group in self._groups:
                group.reshard()

    def hold(self) -> None:
        """Gather all weights and keep them whole until `release`, for code that uses the modules directly."""
        for group in self._groups:
            group.set_reshard_after_forward(False, recurse=False)
            group.unshard()
        self._held = True

    def release(self) -> None:
        """Reshard the weights that `hold` gathered; no effect if nothing is held."""
        if self._held:
            self._held = False
            self.reshard()
            for group in self._groups:
                # FSDP records the order of forward passes to prefetch for the backward pass, but the ranks did not run
                # the same passes while weights were held.
                state = group._get_fsdp_state()
                state._comm_ctx.post_forward_order.clear()
                for parameters in state._fsdp_param_groups:
                    parameters._post_forward_indices.clear()
            for group in self._groups[:-1]:
                group.set_reshard_after_forward(self._reshards, recurse=False)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep all weights gathered inside the block."""
        self.hold()
        try:
            yield
        finally:
            self.release()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process holds only a shard of the tensor."""
    loaded = sys.modules.get("torch.distributed.tensor")  # an import of half a second, which a shard has caused already
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing memory with `tensor`; `tensor` itself if it is not sharded."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(shard: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's `shard` as a distributed tensor with the shape and sharding of `tensor`.

    Returns `shard` unchanged if `tensor` is not sharded.
    """
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    sharded: Any = tensor
    meta = TensorMeta(tensor.shape, tensor.stride(), shard.dtype)
    # `DTensor.from_local` would copy a shard in CPU memory to the device of the mesh.
    return DTensor(shard, DTensorSpec(sharded.device_mesh, sharded.placements, meta), requires_grad=False)


def compute_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype that the parameter computes in; its shard may be wider."""
    return getattr(parameter, "_posttrain_dtype", parameter.dtype)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor in its compute dtype. A collective call for a sharded tensor: all ranks make it."""
    dtype = compute_dtype(tensor)
    progress[0] += 1
    return tensor.detach().full_tensor().to(dtype) if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gather_to_rank0(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors in rank 0's CPU memory, gathered one at a time; an empty dictionary on the other ranks.

    A tensor with several names is gathered once and stays one tensor.
    """
    gathered: dict[str, torch.Tensor] = {}
    by_id: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in by_id:
            full = full_tensor(tensor)
            by_id[id(tensor)] = full.cpu() if current_world().is_rank0 else full.new_empty(0)
        if current_world().is_rank0:
            gathered[name] = by_id[id(tensor)]
    return gathered


def set_shard(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy `full` into `tensor`; a sharded tensor takes this rank's shard of it."""
    with torch.no_grad():
        if is_sharded(tensor):
            # FSDP shards by rows into one chunk per rank; the last chunks are smaller or empty.
            chunks, rank = torch.chunk(full, current_world().shards), current_world().shard_rank
            shard = chunks[rank] if rank < len(chunks) else full[:0]
            local_shard(tensor).copy_(shard)
        else:
            tensor.copy_(full)
