"""Weight synchronization between the learner and the sampling thread, with the bound on the age of weights.

The batch of step s starts once the weights after step s - 1 - `async_rollouts` exist.
"""

import threading
from dataclasses import dataclass
from typing import Literal

import torch

from posttrain.engines.protocol import Engine
from posttrain.models.policy import Policy
from posttrain.rollout.in_flight import InFlight


class SamplingStopped(Exception):
    """Raised in the sampling thread when its batches are no longer needed."""


@dataclass(frozen=True)
class WeightSnapshot:
    """A copy of the trained weights after one step."""

    step: int
    version: int
    """Number of optimizer updates."""
    tensors: dict[str, torch.Tensor]
    """Parameter name -> full copy that is never modified. Contains only parameters that the optimizer updates."""

    @classmethod
    def capture(cls, policy: Policy, step: int) -> "WeightSnapshot":
        """The current weights of `policy`, after `step`.

        If the weights are sharded over processes, all processes must call this together, and rank 0 gets the tensors.
        """
        trained: dict[str, torch.Tensor] = dict(policy.trainable())
        whole = policy.gather_weights(trained)
        return cls(
            step, policy.version, {n: t.detach().clone() for n, t in trained.items()} if whole is None else whole
        )

    @classmethod
    def empty(cls, policy: Policy) -> "WeightSnapshot":
        """Uninitialized tensors of the right shapes, to read a checkpoint into."""
        return cls(0, 0, {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in policy.trainable()})

    def load_into(self, policy: Policy) -> None:
        """Copy these weights into `policy`."""
        with torch.no_grad():
            for name, parameter in policy.trainable():
                parameter.copy_(self.tensors[name])
        policy.version = self.version


class PublishedWeights:
    """The newest weight snapshots, published by the learner and read by the sampling thread. Thread-safe."""

    def __init__(self, kept: int) -> None:
        """`kept`: number of snapshots to keep, the newest included."""
        self._kept = kept
        self._changed = threading.Condition()
        self._by_step: dict[int, WeightSnapshot] = {}
        self._stopped = False

    def publish(self, weights: WeightSnapshot) -> None:
        """Add a snapshot and drop the oldest beyond `kept`."""
        with self._changed:
            self._by_step[weights.step] = weights
            for step in sorted(self._by_step)[: -self._kept]:
                del self._by_step[step]
            self._changed.notify_all()

    def after(self, step: int) -> WeightSnapshot:
        """The weights after `step`, or the oldest kept snapshot if that is newer. Blocks until such a snapshot exists."""
        with self._changed:
            while not self._stopped and max(self._by_step, default=-1) < step:
                self._changed.wait()
            self._check_running()
            return self._by_step[min(known for known in self._by_step if known >= step)]

    def newest(self) -> WeightSnapshot:
        """The newest snapshot."""
        with self._changed:
            self._check_running()
            return self._by_step[max(self._by_step)]

    def kept(self) -> list[WeightSnapshot]:
        """All kept snapshots, the oldest first."""
        with self._changed:
            return [self._by_step[step] for step in sorted(self._by_step)]

    def stop(self) -> None:
        """Raise `SamplingStopped` in every thread that waits for weights or requests them from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _check_running(self) -> None:
        if self._stopped:
            raise SamplingStopped


class WeightSync:
    """Loads published weights into the engine between batches, and within a batch. Used by the sampling thread."""

    def __init__(
        self,
        on_new_weights: Literal["finish", "continue"],
        async_rollouts: int,
        policy: Policy,
        engine: Engine,
        published: PublishedWeights,
        in_flight: InFlight,
    ) -> None:
        """`policy` is the replica whose weights `engine` loads; nothing else may use it."""
        self._on_new_weights, self._async_rollouts = on_new_weights, async_rollouts
        self._policy, self._engine = policy, engine
        self._published = published
        self._loaded: WeightSnapshot | None = None
        if on_new_weights == "finish":
            return
        if hasattr(engine, "before_forward"):
            engine.before_forward = self.poll
        else:
            in_flight.poll = self.poll

    def wait_for(self, batch: int) -> None:
        """Block until the oldest weights exist with which `batch` may start."""
        self._published.after(self._oldest_step(batch))

    def begin_batch(self, batch: int) -> None:
        """Load the weights with which `batch` starts."""
        oldest = self._published.after(self._oldest_step(batch))
        self._load(oldest if self._on_new_weights == "finish" else self._published.newest())

    def poll(self) -> None:
        """Load newer weights if they exist. Called between two forward passes."""
        newest = self._published.newest()
        assert self._loaded is not None
        if newest.version > self._loaded.version:
            self._load(newest)

    @property
    def version(self) -> int:
        """Version of the loaded weights; 0 if none are loaded."""
        return self._loaded.version if self._loaded is not None else 0

    def _oldest_step(self, batch: int) -> int:
        return max(0, batch - 1 - self._async_rollouts)

    def _load(self, weights: WeightSnapshot) -> None:
        if self._loaded is None or weights.step != self._loaded.step:
            weights.load_into(self._policy)
        self._engine.load_weights(weights.version, self._policy)
        self._loaded = weights
