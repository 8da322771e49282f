"""AdamW with float32 master weights, a schedule, and gradient clipping."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.distributed.sharding import compute_dtype, is_sharded, local_shard, shard_like
from posttrain.distributed.world import current_world
from posttrain.recipe.model import OptimizerRecipe


def learning_rate_factor(recipe: OptimizerRecipe, update: int, total: int) -> float:
    """What the learning rate is multiplied by at `update` (0 is the first) of `total`.

    Warm-up over W updates: (update + 1) / (W + 1), so the first is small and not lost. Then, with
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


class Optimizer:
    """Steps the parameters of a policy. Parameters in bfloat16 have masters in float32, which are what is optimized; of
    parameters that are divided among processes, the masters are this process's shares.

    AdamW: Loshchilov and Hutter 2019, "Decoupled weight decay regularization".
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], recipe: OptimizerRecipe, updates: int
    ) -> None:
        """`parameters`: names and parameters; `updates`: optimizer steps of the whole run, for the schedule."""
        self.recipe = recipe
        self.total_updates = updates
        self.updates = 0
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.masters = [_master(parameter) for parameter in self.parameters]
        self._adamw = torch.optim.AdamW(
            self.masters,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        for master in self.masters:
            # What AdamW would begin with, there from the start so that a checkpoint always has the same tensors.
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device), **zeros}

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.recipe.learning_rate * learning_rate_factor(self.recipe, self.updates, self.total_updates)

    def collect(self) -> None:
        """Add the gradients of the last backward pass to those of the masters, in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                gradient = local_shard(parameter.grad).float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def add_up(self) -> None:
        """Add up the gradients of all processes, once the last of an update is collected; of divided parameters they are
        added up already."""
        own = zip(self.parameters, self.masters, strict=True)
        current_world().sum([m.grad for p, m in own if m.grad is not None and not is_sharded(p)])

    def clear(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the collected gradients, a scalar; 0 where there are none."""
        divided = [is_sharded(parameter) for parameter in self.parameters]
        norms = []
        for of_shares in (False, True):
            own = [m.grad for m, d in zip(self.masters, divided, strict=True) if d == of_shares and m.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(own))
        if not any(divided):
            return norms[0]
        (squares,) = current_world().sum([norms[1].double() ** 2])
        return (norms[0].to(squares.device).double() ** 2 + squares).sqrt().float()

    def step(self) -> float:
        """Clip and apply the collected gradients; returns their norm before clipping.

        A norm that is not finite changes nothing. Gradients are forgotten in every case.
        """
        total = self.gradient_norm()
        norm = float(total)
        if norm > self.recipe.max_gradient_norm and math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.recipe.max_gradient_norm, total)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self.updates += 1
            self._hand_out()
        self.clear()
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything in tensors that resuming needs besides the parameters: moments, counts and masters. They are the
        optimizer's own, to be written, or read into."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            state = self._adamw.state[master]
            found |= {f"{name}/{moment}": shard_like(state[moment], parameter) for moment in ("exp_avg", "exp_avg_sq")}
            found[f"{name}/step"] = state["step"]
            if compute_dtype(parameter) != torch.float32:
                found[f"{name}/master"] = shard_like(master.detach(), parameter)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What else resuming needs, as plain JSON."""
        return {"updates": self.updates, "names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, once `tensors` were read; ValueError when it belongs to other parameters."""
        if state["names"] != self.names:
            raise ValueError("the optimizer state belongs to other parameters")
        self.updates = state["updates"]
        self._hand_out()

    def _hand_out(self) -> None:
        """Give parameters of a lower precision the values of their masters."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter and not is_sharded(parameter):
                    parameter.copy_(master)


def _master(parameter: torch.nn.Parameter) -> torch.Tensor:
    if is_sharded(parameter):
        return local_shard(parameter).requires_grad_()
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
