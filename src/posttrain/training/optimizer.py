"""The optimizer: AdamW on float32 master weights, its schedule, and the location of its state."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from posttrain.distributed.sharding import compute_dtype, is_sharded, local_shard, shard_like
from posttrain.distributed.world import current_world
from posttrain.models.cuda.copies import copied_to_cpu
from posttrain.plugins import require_module
from posttrain.recipe.model import OptimizerRecipe


def learning_rate_factor(recipe: OptimizerRecipe, update: int, total: int) -> float:
    """Factor of the learning rate at `update` (0 is the first) of `total`.

    Warm-up over W updates: (update + 1) / (W + 1), so the first update is small but not 0. Then, with
    x = (update - W) / (total - W) from 0 to 1 and final fraction f:
    `constant`: 1; `linear`: 1 - (1 - f) x; `cosine`: f + (1 - f) (1 + cos(pi x)) / 2.
    Source of cosine: Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, without restarts.
    """
    if update < recipe.warmup_updates:
        return (update + 1) / (recipe.warmup_updates + 1)
    if recipe.schedule == "constant":
        return 1.0
    progress = min((update - recipe.warmup_updates) / max(total - recipe.warmup_updates, 1), 1.0)
    remaining = 1 - progress if recipe.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return recipe.final_fraction + (1 - recipe.final_fraction) * remaining


_NOT_DECAYED = re.compile(
    r"bias|layernorm|rmsnorm|(^|[._])norm([.]|$)|(^|[._])(wpe|\w*position\w*|pos_emb\w*)([.]|$)", re.I
)


def decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies to a parameter: to matrices, but not to norms, biases and position embeddings.

    Similar to `Trainer.get_decay_parameter_names` of transformers, which also decays position embeddings and other
    vectors.
    """
    return parameter.ndim > 1 and _NOT_DECAYED.search(name) is None


_BLOCK = 256
"""8-bit numbers with a common scale, in bitsandbytes."""


class Optimizer:
    """Updates the parameters of a policy. Parameters in bfloat16 have float32 master weights, which are optimized.
    Masters of sharded parameters are this process's shards. With `hardware.offload: optimizer`, masters, their
    gradients and the moments are in CPU memory, and AdamW runs there.

    AdamW: Loshchilov and Hutter 2019, "Decoupled weight decay regularization".
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], recipe: OptimizerRecipe, updates: int
    ) -> None:
        """`parameters`: names and parameters; `updates`: optimizer steps of the whole run, for the schedule. InputError if
        the package of the optimizer's type is missing."""
        self.recipe, self.total_updates, self.updates = recipe, updates, 0
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self._offloads = current_world().hardware.offload == "optimizer"
        self.masters = [_master(parameter, self._offloads) for parameter in self.parameters]
        decays = [decayed(name, parameter) for name, parameter in parameters]
        groups = [
            # A process may have no share of a small parameter, and bitsandbytes has no kernel for nothing.
            {
                "params": [m for m, d in zip(self.masters, decays, strict=True) if d == decay and m.numel()],
                "weight_decay": rate,
            }
            for decay, rate in ((True, recipe.weight_decay), (False, 0.0))
        ]
        self._adamw: Any = self._made([group for group in groups if group["params"]])
        self._divided = [is_sharded(parameter) for parameter in self.parameters]
        self._counts: dict[str, torch.Tensor] = {}
        self._remainders: dict[str, torch.Tensor] | None = None
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of the recipe, with its state already initialized, so that checkpoints always have the same
        tensors."""
        recipe = self.recipe
        settings: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.betas, "eps": recipe.epsilon}
        if recipe.type == "adamw_8bit":
            bitsandbytes = require_module("bitsandbytes", "optimizer.type adamw_8bit")
            eight = bitsandbytes.optim.AdamW8bit(groups, **settings)
            for number, group in enumerate(eight.param_groups):
                for index, master in enumerate(group["params"]):
                    eight.init_state(group, master, number, index)
            if "dynamic" not in eight.name2qmap:
                eight.fill_qmap()
            self._codes = {"state1": eight.name2qmap["dynamic"], "state2": eight.name2qmap["udynamic"]}
            return eight
        adamw = torch.optim.AdamW(groups, **settings, fused=True)
        for master in self.masters:
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            adamw.state[master] = {"step": torch.zeros((), device=master.device), **zeros}
        return adamw

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.recipe.learning_rate * learning_rate_factor(self.recipe, self.updates, self.total_updates)

    def sleep(self) -> None:
        """With `hardware.offload: rollouts`, move masters and moments to CPU memory until `wake`. Sharded masters are
        the weights and stay on the device."""
        if current_world().hardware.offload == "rollouts":
            self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Move them back to the parameters' device."""
        if current_world().hardware.offload == "rollouts":
            self._move(local_shard(self.parameters[0]).device)

    def _move(self, device: torch.device) -> None:
        moved: dict[int, torch.Tensor] = {}
        for number, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            state = self._adamw.state.pop(master)
            if master is not parameter and not is_sharded(parameter):
                self.masters[number] = moved[id(master)] = master.detach().to(device, copy=True).requires_grad_()
            self._adamw.state[self.masters[number]] = state
            for key, value in state.items():
                # Small and on the device for the fused kernel: the count of steps.
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.to(device, copy=True)
        for group in self._adamw.param_groups:
            group["params"] = [moved.get(id(tensor), tensor) for tensor in group["params"]]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context manager for a backward pass, at whose end the gradients are added to those of the masters, in float32.

        Those of whole bfloat16 parameters are added and freed as soon as they are complete, so that they do not exist at the
        same time.
        """
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._collect, number))
            for number, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True))
            if not (master is parameter or self._offloads or is_sharded(parameter))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.collect()

    def collect(self) -> None:
        """Add the gradients of the last backward pass to those of the masters, in float32."""
        pairs = zip(self.parameters, self.masters, strict=True)
        numbers = [
            i for i, (parameter, master) in enumerate(pairs) if master is not parameter and parameter.grad is not None
        ]
        copies: Sequence[torch.Tensor | None] = [None] * len(numbers)
        if self._offloads:
            copies = copied_to_cpu([local_shard(self.parameters[i].grad) for i in numbers])  # type: ignore[arg-type]
        for number, copy in zip(numbers, copies, strict=True):
            self._collect(number, self.parameters[number], copy)

    def _collect(self, number: int, parameter: torch.Tensor, copy: torch.Tensor | None = None) -> None:
        """Move the gradient of a parameter, or its `copy` in CPU memory, to the master."""
        if is_sharded(parameter) and not self._offloads:
            self.masters[number].grad = local_shard(parameter.grad)  # type: ignore[arg-type]
            return  # FSDP adds the gradients of the next passes in place
        gradient = (local_shard(parameter.grad) if copy is None else copy).float()  # type: ignore[arg-type]
        master = self.masters[number]
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    def add_up(self) -> None:
        """Sum the gradients over all processes, after the last `collect` of an update. Gradients of sharded parameters
        are already summed."""
        pairs = zip(self._divided, self.masters, strict=True)
        current_world().sum([m.grad for divided, m in pairs if m.grad is not None and not divided])

    def clear(self) -> None:
        """Clear all gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the collected gradients, a scalar; 0 if there are none."""
        norms = []
        for of_shares in (False, True):
            gradients = [
                m.grad
                for m, d in zip(self.masters, self._divided, strict=True)
                if d == of_shares and m.grad is not None
            ]
            norms.append(torch.nn.utils.get_total_norm(gradients))
        if not any(self._divided):
            return norms[0]
        (squares,) = current_world().sum([norms[1].double() ** 2])
        squares /= current_world().hardware.replicas  # which have the same gradients
        return (norms[0].to(squares.device).double() ** 2 + squares).sqrt().float()

    def step(self) -> float:
        """Clip and apply the collected gradients; returns their norm before clipping.

        If the norm is not finite, nothing is applied. Gradients are cleared in either case.
        """
        total = self.gradient_norm()
        norm = float(total)
        limit = self.recipe.max_gradient_norm
        if isinstance(self._adamw, torch.optim.AdamW):
            # The kernel divides the gradients that it reads, as `clip_grads_with_norm_` would in passes of its own.
            self._adamw.grad_scale = (total + 1e-6) / limit if norm > limit else None  # type: ignore[attr-defined]
        elif norm > limit and math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.masters, limit, total)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self.updates += 1
            self._hand_out()
        self.clear()
        return norm

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The tensors that resuming needs besides the model's weights: `moments`, and 16 bits for each bfloat16 weight, with
        which it is its float32 master.

        `saved`: the `state_dict` of a checkpoint that will be read into the tensors, after the model's weights.
        """
        tensors, remainders = self.moments(saved), dict[str, torch.Tensor]()
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if compute_dtype(parameter) == torch.bfloat16:
                remainders[name] = (
                    _remainder(master.detach()) if saved is None else torch.empty(master.shape, dtype=torch.int16)
                )
                tensors[f"{name}/remainder"] = shard_like(remainders[name], parameter)
        self._remainders = None if saved is None else remainders
        return tensors

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights, in float32 for bfloat16 ones. They share memory with the optimizer."""
        each = zip(self.names, self.parameters, self.masters, strict=True)
        return {name: shard_like(master.detach(), parameter) for name, parameter, master in each}

    def moments(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The moments and counts. They share memory with the optimizer, so a checkpoint can be written from them or, with its
        `state_dict` as `saved`, read into them."""
        world, tensors = current_world(), dict[str, torch.Tensor]()
        shards = world.shards if saved is None else saved["shards"]
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            # A process without a share makes no steps, so its count must not be the one that is stored.
            for key, value in self._adamw.state[master].items() if master.numel() else ():
                if key.startswith("qmap"):  # the same constants for every parameter
                    continue
                if isinstance(value, int):  # bitsandbytes counts steps in plain numbers
                    value = self._counts.setdefault(name, torch.zeros((), dtype=torch.int64)).fill_(value)
                elif self.recipe.type == "adamw_8bit":
                    # Blocks of 8-bit numbers are those of a shard, whose scales no other shard has.
                    if shards == world.shards:
                        tensors[_in_shard(f"{name}/{key}", world.shard_rank, shards)] = value
                    elif key.startswith("state"):
                        pieces = self._pieces[name, key] = _pieces(parameter, shards, self._adamw.args.min_8bit_size)
                        for piece in pieces:
                            tensors[_in_shard(f"{name}/{key}", piece.shard, shards)] = piece.values
                            if piece.scales is not None:
                                scales = f"{name}/{key.replace('state', 'absmax')}"
                                tensors[_in_shard(scales, piece.shard, shards)] = piece.scales
                    continue
                tensors[f"{name}/{key}"] = shard_like(value, parameter) if value.shape == master.shape else value
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """The remaining state that resuming needs, as plain JSON."""
        return {"updates": self.updates, "names": self.names, "shards": current_world().shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, after `tensors` were read. ValueError if it belongs to other parameters."""
        if state["names"] != self.names:
            raise ValueError("the optimizer state belongs to other parameters")
        self.updates = state["updates"]
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if self._remainders is not None:
                with torch.no_grad():
                    master.copy_(local_shard(parameter))
                if name in self._remainders:
                    master.detach().view(torch.int32).add_(self._remainders[name].to(master.device))
            state_of = self._adamw.state[master]
            if name in self._counts:
                state_of["step"] = int(self._counts[name])
            for key in ("state1", "state2"):
                if pieces := self._pieces.pop((name, key), None):
                    start, _ = _shard_range(parameter, current_world().shard_rank, current_world().shards)
                    _regroup(pieces, start, state_of[key], state_of.get(f"absmax{key[-1]}"), self._codes[key])
        self._remainders = None
        self._hand_out()

    def _hand_out(self) -> None:
        """Copy the values of the masters to their parameters."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter and (self._offloads or not is_sharded(parameter)):
                    local_shard(parameter).copy_(master)


def _master(parameter: torch.nn.Parameter, offloads: bool) -> torch.Tensor:
    if offloads:
        return local_shard(parameter).detach().to("cpu", torch.float32, copy=True).requires_grad_()
    if is_sharded(parameter):
        return local_shard(parameter).requires_grad_()
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()


def _remainder(master: torch.Tensor) -> torch.Tensor:
    """What the bits of float32 numbers have beyond those of their bfloat16 roundings, as int16 in CPU memory.

    Halfway between two bfloat16 numbers, it would not fit into 16 bits where rounding is down. Such numbers, one in 131,072,
    become the next smaller one in `master` as well, so a run goes on from what it has stored.
    """
    bits = master.view(torch.int32)
    bits.sub_((bits & 0x1FFFF).eq_(0x8000))
    return (master.view(torch.int32) - master.bfloat16().float().view(torch.int32)).to(torch.int16).cpu()


@dataclass
class _Piece:
    """Moments of the numbers from `start` to `stop` of a flattened parameter: a shard of another number of shards."""

    shard: int
    start: int
    stop: int
    values: torch.Tensor
    """8-bit numbers, or float32 for a small shard."""
    scales: torch.Tensor | None
    """The scale of each block; None for float32."""


def _in_shard(name: str, shard: int, shards: int) -> str:
    return name if shards == 1 else f"{name}/{shard} of {shards}"


def _shard_range(parameter: torch.Tensor, shard: int, shards: int) -> tuple[int, int]:
    """The numbers of a flattened parameter in a shard. FSDP divides the rows."""
    each = -(-parameter.shape[0] // shards) * (parameter.numel() // parameter.shape[0])
    return min(shard * each, parameter.numel()), min((shard + 1) * each, parameter.numel())


def _regroup(
    pieces: Sequence[_Piece], start: int, moments: torch.Tensor, scales: torch.Tensor | None, codes: torch.Tensor
) -> None:
    """Set the moments of the numbers from `start` on of a flattened parameter. Blocks that are also blocks of a piece are
    copied; others are quantized again, with an error of half a step of the `codes` at their scale, and 2% of that."""
    stop, whole = start + moments.numel(), list[torch.Tensor]()
    for piece in pieces:
        values = piece.values.flatten()
        if piece.scales is not None:
            values = codes[values.int()] * piece.scales.repeat_interleave(_BLOCK)[: len(values)]
        whole.append(values[max(start - piece.start, 0) : stop - piece.start])
    if scales is None:
        moments.copy_(torch.cat(whole).view_as(moments))
        return
    from bitsandbytes.functional import quantize_blockwise

    quantized, state = quantize_blockwise(torch.cat(whole), code=codes, blocksize=_BLOCK)
    scales.copy_(state.absmax)
    for piece in pieces:
        if piece.scales is None or (shift := start - piece.start) % _BLOCK:
            continue
        first = -(min(shift, 0) // _BLOCK)
        end = min(piece.stop, stop) - start
        last = -(-end // _BLOCK) if piece.stop == stop else end // _BLOCK
        if first < last:
            scales[first:last] = piece.scales[first + shift // _BLOCK : last + shift // _BLOCK]
            copied = slice(first * _BLOCK, min(last * _BLOCK, end))
            quantized[copied] = piece.values.flatten()[copied.start + shift : copied.stop + shift]
    moments.copy_(quantized.view_as(moments))


def _pieces(parameter: torch.Tensor, shards: int, smallest: int) -> list[_Piece]:
    """Empty pieces of a parameter for the shards that overlap with that of this process. `smallest`: numbers of a shard that
    has 8-bit numbers."""
    world, found = current_world(), list[_Piece]()
    first, last = _shard_range(parameter, world.shard_rank, world.shards)
    for shard in range(shards):
        start, stop = _shard_range(parameter, shard, shards)
        if (count := stop - start) and start < last and first < stop:
            eight, device = count >= smallest, local_shard(parameter).device
            values = torch.empty(count, dtype=torch.uint8 if eight else torch.float32, device=device)
            scales = torch.empty(-(-count // _BLOCK), device=device) if eight else None
            found.append(_Piece(shard, start, stop, values.view(-1, *parameter.shape[1:]), scales))
    return found
