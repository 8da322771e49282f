"""Which weights the episodes of a batch are sampled with: the bound on their age, and what happens when newer ones come.

The batch of step s begins once the weights after step s - 1 - `ahead` exist.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from posttrain.engines.protocol import Engine
from posttrain.errors import RunError
from posttrain.models.policy import Policy
from posttrain.rollout.in_flight import InFlight
from posttrain.rollout.journal import BatchEvents, WeightUpdate


class SamplingStopped(Exception):
    """The sampling thread must end; nothing waits for its batch."""


@dataclass(frozen=True)
class WeightSnapshot:
    """The trained weights as they were after a step."""

    step: int
    version: int
    """Optimizer updates that they had seen."""
    tensors: dict[str, torch.Tensor]
    """Name -> a whole copy that nobody changes, for the parameters that an optimizer changes."""

    @classmethod
    def capture(cls, policy: Policy, step: int) -> "WeightSnapshot":
        """Those of `policy` as they are now, after `step`. Where they are divided among processes all of these call it, and
        the first one gets them."""
        trained: dict[str, torch.Tensor] = dict(policy.trainable())
        whole = policy.whole_tensors(trained)
        return cls(
            step, policy.version, {n: t.detach().clone() for n, t in trained.items()} if whole is None else whole
        )

    @classmethod
    def empty(cls, policy: Policy) -> "WeightSnapshot":
        """Room for weights of `policy` that are to be read from a checkpoint."""
        return cls(0, 0, {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in policy.trainable()})

    def load_into(self, policy: Policy) -> None:
        """Give `policy` these weights."""
        with torch.no_grad():
            for name, parameter in policy.trainable():
                parameter.copy_(self.tensors[name])
        policy.version = self.version


class PublishedWeights:
    """Weights that the learner has made, for another thread to wait for."""

    def __init__(self, kept: int) -> None:
        """`kept`: of how many steps, the newest included, weights are kept."""
        self._kept = kept
        self._changed = threading.Condition()
        self._by_step: dict[int, WeightSnapshot] = {}
        self._stopped = False

    def publish(self, weights: WeightSnapshot) -> None:
        with self._changed:
            self._by_step[weights.step] = weights
            for step in sorted(self._by_step)[: -self._kept]:
                del self._by_step[step]
            self._changed.notify_all()

    def after(self, step: int) -> WeightSnapshot:
        """The weights after `step`, or the oldest that are kept where those are newer; waits until they are there."""
        with self._changed:
            while not self._stopped and max(self._by_step, default=-1) < step:
                self._changed.wait()
            self._go_on()
            return self._by_step[min(found for found in self._by_step if found >= step)]

    def newest(self) -> WeightSnapshot:
        with self._changed:
            self._go_on()
            return self._by_step[max(self._by_step)]

    def kept(self) -> list[WeightSnapshot]:
        """All that are kept, the oldest first."""
        with self._changed:
            return [self._by_step[step] for step in sorted(self._by_step)]

    def stop(self) -> None:
        """From now on whoever asks or waits for weights gets `SamplingStopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _go_on(self) -> None:
        if self._stopped:
            raise SamplingStopped


Rule = Literal["finish", "continue", "restart"]


class WeightSync:
    """Gives the engine its weights, batch by batch and within a batch. Used by the thread that samples."""

    def __init__(
        self,
        rule: Rule,
        ahead: int,
        policy: Policy,
        engine: Engine,
        published: PublishedWeights,
        flights: InFlight,
        recorded: Mapping[int, BatchEvents] | None,
    ) -> None:
        """`policy` is what `engine` samples with, and the conductor's alone; `recorded`: events to follow, by batch."""
        self._rule, self._ahead = rule, ahead
        self._policy, self._engine = policy, engine
        self._published, self._flights = published, flights
        self._recorded = recorded
        self._batch = 0
        self._loaded: WeightSnapshot | None = None
        self._first_pass = 0
        self._taken: list[WeightUpdate] = []
        self._due: list[WeightUpdate] = []
        if hasattr(engine, "before_pass"):
            engine.before_pass = self.poll
        elif rule != "finish":
            flights.poll = self.poll

    def wait_for(self, batch: int) -> None:
        """Until the oldest weights that `batch` may begin with are there."""
        self._published.after(max(0, batch - 1 - self._ahead))

    def begin_batch(self, batch: int) -> None:
        """Load the weights that `batch` begins with."""
        oldest = self._published.after(max(0, batch - 1 - self._ahead))
        self._batch, self._taken, self._first_pass = batch, [], self._engine.counters.forwards
        self._due = []
        if self._recorded is not None:
            if batch not in self._recorded:
                raise RunError(
                    f"rollout.replay: the run that is replayed has no events of batch {batch}; lower `steps`"
                )
            self._due = list(self._recorded[batch].weights)
            self._take(self._published.after(self._due.pop(0).step))
        else:
            self._take(oldest if self._rule == "finish" else self._published.newest())

    def poll(self) -> None:
        """Between two forward passes: take newer weights, if there are any and the rule is to take them."""
        if self._recorded is not None:
            while self._due and self._due[0].before_pass == self.passes:
                self._change(self._published.after(self._due.pop(0).step))
        elif self._rule != "finish":
            newest = self._published.newest()
            assert self._loaded is not None
            if newest.version > self._loaded.version:
                self._change(newest)

    def end_batch(self) -> tuple[list[WeightUpdate], int]:
        """What was taken while the batch was sampled, and the forward passes of it."""
        return self._taken, self.passes

    @property
    def version(self) -> int:
        """Of the weights that were loaded last; 0 before any."""
        return self._loaded.version if self._loaded is not None else 0

    @property
    def passes(self) -> int:
        """Forward passes of the batch so far."""
        return self._engine.counters.forwards - self._first_pass

    def _change(self, weights: WeightSnapshot) -> None:
        places = self._flights.restart_all() if self._rule == "restart" else []
        self._take(weights, [[place.group, place.index] for place in places])

    def _take(self, weights: WeightSnapshot, restarted: list[list[int]] | None = None) -> None:
        if weights.step < self._batch - 1 - self._ahead:
            raise RunError(
                f"internal error: batch {self._batch} was given the weights after step {weights.step}, which are older than "
                f"rollout.async_rollouts = {self._ahead} allows"
            )
        if self._loaded is None or weights.step != self._loaded.step:
            weights.load_into(self._policy)
        self._engine.load_weights(weights.version)
        self._loaded = weights
        self._taken.append(WeightUpdate(self.passes, weights.step, weights.version, restarted or []))
