"""The reference model of the KL penalty, and one that follows the policy (TR-DPO) instead of staying the initial model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.errors import InputError
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.components import Factory
from posttrain.recipe.loss import ADAPTERS_OFF, ReferenceRecipe
from posttrain.training.objectives import logprobs
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Samples, Updater


@dataclass
class ReferenceModel:
    """The reference model in this process: the policy with its adapters off, or a copy of its initial weights."""

    policy: Policy
    learner: Updater[TokenScores]

    def load(self) -> None:
        """Load the copy now instead of at its first use."""
        with self.policy.as_reference():
            pass

    def begin(self, samples: Samples) -> Callable[[], list[np.ndarray]]:
        """A function that returns the log-probabilities [n] float32 of the sampled tokens of each sample. A reference model
        on processes of its own computes them meanwhile."""

        def finish() -> list[np.ndarray]:
            with self.policy.as_reference():
                return logprobs(self.learner, samples)

        return finish


@Factory
def open_reference(policy: Policy, learner: Updater[TokenScores]) -> ReferenceModel:
    """The reference model of `policy`, which `learner` trains."""
    return ReferenceModel(policy, learner)


def move_towards(averages: Sequence[torch.Tensor], weights: Iterable[torch.Tensor], mix: float) -> None:
    """averages <- mix * weights + (1 - mix) * averages, in place. With mix = 1 it is an exact copy.

    `averages`, `weights`: tensors of equal shapes in pairs, float32 where mix < 1, which may be on different devices.

    Source: Gorbatovski et al. 2024, "Learn your reference model for real good alignment" (TR-DPO), arXiv 2404.09656:
    the soft update, whose weight alpha is `mix`, and the hard update, which is mix = 1.
    """
    for average, weight in zip(averages, weights, strict=True):
        if mix == 1:
            average.copy_(weight)
        else:
            average.mul_(1 - mix).add_(weight.to(average.device), alpha=mix)


class MovingReference:
    """The reference model of a policy, updated every `update_every` optimizer steps of that policy.

    It updates the copy that `Policy.as_reference` scores with. If the weights are not float32 and `mix` is below 1, the
    average is stored in float32, because small changes would be lost to rounding. `tensors` belong in a checkpoint.

    Attributes:
        updates: updates of the reference model so far.
    """

    def __init__(self, recipe: ReferenceRecipe, policy: Policy, optimizer: Optimizer) -> None:
        """Load the reference model. `optimizer`: the optimizer of all trained parameters of `policy`.
        InputError if the policy has adapters, or is sharded."""
        if policy.recipe.lora is not None:
            raise InputError(f"`reference.update_every` {ADAPTERS_OFF}")
        if policy.sharded is not None:
            raise InputError(
                "`reference.update_every` is not supported for sharded models; remove it, or train in processes that each "
                "hold the whole model"
            )
        assert recipe.update_every is not None
        self.every, self.mix = recipe.update_every, recipe.mix
        self.policy, self.optimizer, self.updates = policy, optimizer, 0
        self._start = policy.version
        copies = policy.reference_parameters()
        self._parameters = [copies[name].detach() for name in optimizer.names]
        rounded = recipe.mix < 1
        self._averages = [p.float() if rounded and p.dtype != torch.float32 else p for p in self._parameters]

    @property
    def is_policy(self) -> bool:
        """Whether the reference model has the weights of the policy."""
        updated = self._start + self.every * self.updates
        return self.policy.version == updated and (self.mix == 1 or not self.updates)

    def follow(self) -> None:
        """Update the reference model if it is due. Call it after each optimizer step of the policy, inside
        `critical()`."""
        if (self.policy.version - self._start) // self.every == self.updates:
            return
        self.updates += 1
        with torch.no_grad():
            move_towards(self._averages, (each.master for each in self.optimizer.trained), self.mix)
        self._hand_out()

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The averages, from which a checkpoint is written or into which it is read."""
        return dict(zip(self.optimizer.names, self._averages, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, after `tensors` were read."""
        self.updates = state["updates"]
        self._hand_out()

    def _hand_out(self) -> None:
        """Copy the averages to parameters of lower precision."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            if average is not parameter:
                parameter.copy_(average)
