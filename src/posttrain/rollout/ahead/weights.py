"""Weights on their way from the learner to those who sample: copies of the trained ones, told apart by step."""

import threading
from dataclasses import dataclass

import torch

from posttrain.models.policy import Policy


class Stopped(Exception):
    """Sampling is to end, and nobody waits for what it would have made."""


@dataclass(frozen=True)
class Weights:
    """The trained weights as they were after a step."""

    step: int
    version: int
    """Optimizer updates that they had seen."""
    tensors: dict[str, torch.Tensor]
    """Name -> a whole copy that nobody changes, for the parameters that an optimizer changes."""

    @classmethod
    def of(cls, policy: Policy, step: int) -> "Weights":
        """Those of `policy` as they are now, after `step`. Where they are divided among processes all of these call it, and
        the first one gets them."""
        trained: dict[str, torch.Tensor] = dict(policy.trainable())
        whole = policy.whole_tensors(trained)
        return cls(
            step, policy.version, {n: t.detach().clone() for n, t in trained.items()} if whole is None else whole
        )

    @classmethod
    def unread(cls, policy: Policy) -> "Weights":
        """Room for weights of `policy` that are to be read from a checkpoint."""
        return cls(0, 0, {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in policy.trainable()})

    def put_into(self, policy: Policy) -> None:
        """Give `policy` these weights."""
        with torch.no_grad():
            for name, parameter in policy.trainable():
                parameter.copy_(self.tensors[name])
        policy.version = self.version


class Published:
    """Weights that the learner has made, for another thread to wait for."""

    def __init__(self, kept: int) -> None:
        """`kept`: of how many steps, the newest included, weights are kept."""
        self._kept = kept
        self._changed = threading.Condition()
        self._by_step: dict[int, Weights] = {}
        self._stopped = False

    def publish(self, weights: Weights) -> None:
        with self._changed:
            self._by_step[weights.step] = weights
            for step in sorted(self._by_step)[: -self._kept]:
                del self._by_step[step]
            self._changed.notify_all()

    def after(self, step: int) -> Weights:
        """The weights after `step`, or the oldest that are kept where those are newer; waits until they are there."""
        with self._changed:
            while not self._stopped and max(self._by_step, default=-1) < step:
                self._changed.wait()
            self._go_on()
            return self._by_step[min(found for found in self._by_step if found >= step)]

    def newest(self) -> Weights:
        with self._changed:
            self._go_on()
            return self._by_step[max(self._by_step)]

    def kept(self) -> list[Weights]:
        """All that are kept, the oldest first."""
        with self._changed:
            return [self._by_step[step] for step in sorted(self._by_step)]

    def stop(self) -> None:
        """From now on whoever asks or waits for weights gets `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _go_on(self) -> None:
        if self._stopped:
            raise Stopped
