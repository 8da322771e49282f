"""The optimizer: the weights that AdamW updates, its schedule, and the location of its state."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.distributed.sharding import compute_dtype, is_sharded, local_shard, shard_like
from posttrain.distributed.world import current_world
from posttrain.models.cuda.copies import copied_to_cpu
from posttrain.recipe.model import OptimizerRecipe
from posttrain.training.adamw import (
    BLOCK,
    LEAST,
    Rates,
    dequantized,
    joined,
    quantize,
    split,
    update_tensor,
    zero_moments,
)


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


class Trained:
    """A parameter, what an update of this process changes, and its gradient and moments.

    The master weights in float32 are the parameter itself, its shard, or with `hardware.offload: optimizer` a copy in CPU
    memory. Those of a whole bfloat16 parameter are put together from it and `low`.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter, eight: bool, decay: float) -> None:
        """`eight`: moments in 8-bit numbers; `decay`: weight decay."""
        self.name, self.parameter, self.decay = name, parameter, decay
        self.sharded, self.offloads = is_sharded(parameter), current_world().hardware.offload == "optimizer"
        self._held: torch.Tensor | None = None
        if self.offloads:
            self._held = local_shard(parameter).detach().to("cpu", torch.float32, copy=True)
        elif self.sharded:
            self._held = local_shard(parameter)
        elif not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        split_up = self.weight.dtype == torch.bfloat16
        self.low = torch.zeros_like(self.weight, dtype=torch.int16) if split_up else None
        self.moments = zero_moments(self.weight, eight)
        self.count = torch.zeros(())
        """Its updates. A process may have no share of a small parameter, and never updates it."""
        self.gradient: torch.Tensor | None = None
        """Float32, of this process's share."""

    @property
    def weight(self) -> torch.Tensor:
        """Float32 masters, or a bfloat16 weight with `low` int16."""
        return self.parameter.detach() if self._held is None else self._held

    @property
    def master(self) -> torch.Tensor:
        """The float32 weights that are updated; a copy of those that are put together."""
        return self.weight if self.low is None else joined(self.weight, self.low)

    @master.setter
    def master(self, values: torch.Tensor) -> None:
        if self.low is None:
            self.weight.copy_(values)
        else:
            split(values.to(self.weight.device, copy=True), self.weight, self.low)

    def remainder(self) -> torch.Tensor:
        """What masters have beyond the bfloat16 weights, int16. FSDP rounds to the nearest bfloat16 number, and halfway to the
        even one. Where that is downwards, the distance needs 17 bits, so such masters, one in 131,072, become the next smaller
        number, and a run goes on from what it has stored."""
        if self.low is not None:
            return self.low
        bits = self.weight.view(torch.int32)
        if self.sharded:
            bits.sub_((bits & 0x1FFFF).eq_(0x8000))
        return bits.to(torch.int16).cpu()

    def collect(self, copy: torch.Tensor | None = None) -> None:
        """Move the gradient of the parameter, or its `copy` in CPU memory, to the master."""
        gradient: Any = self.parameter.grad if copy is None else copy
        gradient = local_shard(gradient) if self.sharded else gradient
        if self.low is None and not self.offloads:
            self.gradient = gradient  # autograd and FSDP add the gradients of the next passes in place
            return
        self.gradient = gradient.float() if self.gradient is None else self.gradient.add_(gradient)
        self.parameter.grad = None

    def hand_out(self) -> None:
        """Copy masters in CPU memory to the parameter."""
        if self.offloads and self.parameter.dtype == torch.bfloat16:
            rounded = torch.empty_like(self.weight, dtype=torch.bfloat16)
            split(self.weight.clone(), rounded, torch.empty_like(self.weight, dtype=torch.int16))
            self.parameter.detach().copy_(rounded)
        elif self.offloads:
            local_shard(self.parameter.detach()).copy_(self.weight)


def fused_adamw(
    rates: Rates,
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: list[tuple[torch.Tensor, ...]],
) -> None:
    """AdamW of float32 tensors, with two moments of each, in few kernels of torch."""
    first, second = (list(each) for each in zip(*moments, strict=True))
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],
        [weights[0].new_full((), rates.count)] * len(weights),
        lr=rates.rate,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        weight_decay=rates.decay,
        eps=rates.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=None if rates.clip == 1 else weights[0].new_full((), rates.clip),
    )


class Optimizer:
    """Updates the parameters of a policy by AdamW (`training.adamw`). Masters of sharded parameters are this process's
    shards. With `hardware.offload: optimizer`, masters, their gradients and the moments are in CPU memory, and AdamW runs
    there.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], recipe: OptimizerRecipe, updates: int
    ) -> None:
        """`parameters`: names and parameters; `updates`: optimizer steps of the whole run, for the schedule."""
        self.recipe, self.total_updates, self.updates = recipe, updates, 0
        self._eight = recipe.type == "adamw_8bit"
        self.trained = [
            Trained(name, parameter, self._eight, recipe.weight_decay if decayed(name, parameter) else 0.0)
            for name, parameter in parameters
        ]
        self._read: dict[str, torch.Tensor] = {}
        """Parts of weights that are read from a checkpoint, by their names."""
        self._reads_weights = False
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.trained]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [each.parameter for each in self.trained]

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
            self._move(self.trained[0].weight.device)

    def _move(self, device: torch.device) -> None:
        for each in self.trained:
            each.low = None if each.low is None else each.low.to(device, copy=True)
            each.moments = {name: tensor.to(device, copy=True) for name, tensor in each.moments.items()}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context manager for a backward pass, at whose end the gradients are added to those of the masters, in float32.

        Those of whole bfloat16 parameters are added and freed as soon as they are complete, so that they do not exist at the
        same time.
        """
        handles = [
            each.parameter.register_post_accumulate_grad_hook(lambda _, each=each: each.collect())
            for each in self.trained
            if each.low is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.collect()

    def collect(self) -> None:
        """Add the gradients of the last backward pass to those of the masters, in float32."""
        arrived = [each for each in self.trained if each.parameter.grad is not None]
        copies: Sequence[torch.Tensor | None] = [None] * len(arrived)
        if arrived and arrived[0].offloads:
            copies = copied_to_cpu([local_shard(each.parameter.grad) for each in arrived])  # type: ignore[arg-type]
        for each, copy in zip(arrived, copies, strict=True):
            each.collect(copy)

    def add_up(self) -> None:
        """Sum the gradients over all processes, after the last `collect` of an update. Gradients of sharded parameters
        are already summed."""
        current_world().sum(self._gradients(sharded=False))

    def _gradients(self, sharded: bool) -> list[torch.Tensor]:
        return [each.gradient for each in self.trained if each.sharded == sharded and each.gradient is not None]

    def clear(self) -> None:
        """Clear all gradients."""
        for each in self.trained:
            each.parameter.grad = each.gradient = None

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the collected gradients, a scalar; 0 if there are none."""
        whole, shares = (torch.nn.utils.get_total_norm(self._gradients(sharded)) for sharded in (False, True))
        if not any(each.sharded for each in self.trained):
            return whole
        (squares,) = current_world().sum([shares.double() ** 2])
        squares /= current_world().hardware.replicas  # which have the same gradients
        return (whole.to(squares.device).double() ** 2 + squares).sqrt().float()

    @torch.no_grad()
    def step(self) -> float:
        """Clip and apply the collected gradients; returns their norm before clipping.

        If the norm is not finite, nothing is applied. Gradients are cleared in either case. Kernels divide the gradients that
        they read, so clipping is no pass of its own.
        """
        norm = float(self.gradient_norm())
        if math.isfinite(norm):
            clip = max((norm + 1e-6) / self.recipe.max_gradient_norm, 1.0)
            fixed = self.learning_rate, self.recipe.betas, self.recipe.epsilon
            together = defaultdict[Rates, list[Trained]](list)
            for each in self.trained:
                if each.gradient is None or not each.weight.numel():
                    continue
                rates = Rates(*fixed, each.decay, clip, float(each.count.add_(1)))
                if each.low is None and not self._eight:
                    together[rates].append(each)
                else:
                    update_tensor(rates, each.weight, each.low, each.gradient, each.moments, fused_adamw)
            for rates, some in together.items():
                gradients: Any = [each.gradient for each in some]
                moments = [tuple(each.moments.values()) for each in some]
                fused_adamw(rates, [each.weight for each in some], gradients, moments)
            self.updates += 1
            self._hand_out()
        self.clear()
        return norm

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The tensors that resuming needs besides the model's weights: `moments`, and 16 bits for each bfloat16 weight, with
        which it is its float32 master.

        `saved`: the `state_dict` of a checkpoint that will be read into the tensors, after the model's weights.
        """
        tensors, self._reads_weights = self.moments(saved), saved is not None
        for each in self.trained:
            if compute_dtype(each.parameter) == torch.bfloat16:
                reads = saved is not None and each.low is None
                rest = torch.empty(each.weight.shape, dtype=torch.int16) if reads else each.remainder()
                if reads:
                    self._read[f"{each.name}/remainder"] = rest
                tensors[f"{each.name}/remainder"] = shard_like(rest, each.parameter)
        return tensors

    def weights(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The trained weights, in float32 for bfloat16 ones. Masters that are put together are copies in CPU memory, from
        which `load_state_dict` takes them; others share memory with the optimizer."""
        tensors = {each.name: each.weight if each.low is None else each.master.cpu() for each in self.trained}
        if saved is not None:
            self._read |= {each.name: tensors[each.name] for each in self.trained if each.low is not None}
        return {each.name: shard_like(tensors[each.name], each.parameter) for each in self.trained}

    def moments(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The moments and counts. They share memory with the optimizer, so a checkpoint can be written from them or, with its
        `state_dict` as `saved`, read into them."""
        world, tensors = current_world(), dict[str, torch.Tensor]()
        shards = world.shards if saved is None else saved["shards"]
        for each in self.trained:
            # A process without a share makes no steps, so its count must not be the one that is stored.
            if not each.weight.numel():
                continue
            tensors[f"{each.name}/step"] = each.count
            for key, value in each.moments.items():
                if not self._eight:
                    tensors[f"{each.name}/{key}"] = shard_like(value, each.parameter)
                # Blocks of 8-bit numbers are those of a shard, whose scales no other shard has.
                elif shards == world.shards:
                    tensors[_in_shard(f"{each.name}/{key}", world.shard_rank, shards)] = value
                elif key.startswith("state"):
                    pieces = self._pieces[each.name, key] = _pieces(each.parameter, shards)
                    for piece in pieces:
                        tensors[_in_shard(f"{each.name}/{key}", piece.shard, shards)] = piece.values
                        if piece.scales is not None:
                            scales = f"{each.name}/{key.replace('state', 'absmax')}"
                            tensors[_in_shard(scales, piece.shard, shards)] = piece.scales
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """The remaining state that resuming needs, as plain JSON."""
        return {"updates": self.updates, "names": self.names, "shards": current_world().shards}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, after `tensors` were read. ValueError if it belongs to other parameters."""
        if state["names"] != self.names:
            raise ValueError("the optimizer state belongs to other parameters")
        self.updates = state["updates"]
        for each in self.trained:
            if self._reads_weights and each.low is None:
                each.weight.copy_(local_shard(each.parameter))
            if (rest := self._read.pop(f"{each.name}/remainder", None)) is not None:
                each.weight.view(torch.int32).add_(rest.to(each.weight.device))
            if (master := self._read.pop(each.name, None)) is not None:
                each.master = master
            for key in ("state1", "state2"):
                if pieces := self._pieces.pop((each.name, key), None):
                    start, _ = _shard_range(each.parameter, current_world().shard_rank, current_world().shards)
                    kind, scales = int(key[-1]) - 1, each.moments.get(f"absmax{key[-1]}")
                    _regroup(pieces, start, each.moments[key], scales, kind)
        self._reads_weights = False
        self._hand_out()

    def _hand_out(self) -> None:
        for each in self.trained:
            each.hand_out()


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
    pieces: Sequence[_Piece], start: int, moments: torch.Tensor, scales: torch.Tensor | None, kind: int
) -> None:
    """Set the moments of the numbers from `start` on of a flattened parameter. Blocks that are also blocks of a piece are
    copied; others are quantized again, with an error of half a step of the codes of `kind` at their scale."""
    stop, whole = start + moments.numel(), list[torch.Tensor]()
    for piece in pieces:
        values = piece.values.flatten()
        if piece.scales is not None:
            values = dequantized(values, piece.scales, kind)
        whole.append(values[max(start - piece.start, 0) : stop - piece.start])
    if scales is None:
        moments.copy_(torch.cat(whole).view_as(moments))
        return
    quantized = moments.view(-1)
    quantize(torch.cat(whole), quantized, scales, kind)
    for piece in pieces:
        if piece.scales is None or (shift := start - piece.start) % BLOCK:
            continue
        first = -(min(shift, 0) // BLOCK)
        end = min(piece.stop, stop) - start
        last = -(-end // BLOCK) if piece.stop == stop else end // BLOCK
        if first < last:
            scales[first:last] = piece.scales[first + shift // BLOCK : last + shift // BLOCK]
            copied = slice(first * BLOCK, min(last * BLOCK, end))
            quantized[copied] = piece.values.flatten()[copied.start + shift : copied.stop + shift]


def _pieces(parameter: torch.Tensor, shards: int) -> list[_Piece]:
    """Empty pieces of a parameter for the shards that overlap with that of this process."""
    world, found = current_world(), list[_Piece]()
    first, last = _shard_range(parameter, world.shard_rank, world.shards)
    for shard in range(shards):
        start, stop = _shard_range(parameter, shard, shards)
        if (count := stop - start) and start < last and first < stop:
            eight, device = count >= LEAST, local_shard(parameter).device
            values = torch.empty(count, dtype=torch.uint8 if eight else torch.float32, device=device)
            scales = torch.empty(-(-count // BLOCK), device=device) if eight else None
            found.append(_Piece(shard, start, stop, values.view(-1, *parameter.shape[1:]), scales))
    return found
