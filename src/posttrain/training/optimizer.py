"""AdamW with float32 master weights, a schedule, and gradient clipping."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.recipe.optimizer import OptimizerRecipe
from posttrain.training.schedule import learning_rate_factor


class Optimizer:
    """Steps the parameters of a policy. Parameters in bfloat16 have masters in float32, which are what is optimized.

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
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.parameters]
        self._adamw = torch.optim.AdamW(
            self.masters,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.recipe.learning_rate * learning_rate_factor(self.recipe, self.updates, self.total_updates)

    def collect(self) -> None:
        """Add the gradients of the last backward pass to those of the masters, in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def clear(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the collected gradients, a scalar; 0 where there are none."""
        return torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])

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
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    if master is not parameter:
                        parameter.copy_(master)
        self.clear()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs besides the parameters: moments, counts and masters."""
        masters = {n: m for n, m, p in zip(self.names, self.masters, self.parameters, strict=True) if m is not p}
        return {"adamw": self._adamw.state_dict(), "updates": self.updates, "masters": masters, "names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; ValueError when it belongs to other parameters."""
        if state["names"] != self.names:
            raise ValueError("the optimizer state belongs to other parameters")
        self._adamw.load_state_dict(state["adamw"])
        self.updates = state["updates"]
        with torch.no_grad():
            for name, master in zip(self.names, self.masters, strict=True):
                if name in state["masters"]:
                    master.copy_(state["masters"][name])
