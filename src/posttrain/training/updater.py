"""One optimizer step from samples and an objective. It depends neither on the algorithm nor on what the model computes.

The loss is divided once, by a normalizer that is global over the optimizer step, so gradients are the same to float
rounding for any split into micro-batches. Several processes divide the micro-batches among them: each sees all samples of an
update, and one without a micro-batch of its own computes another one's for nothing, so that all do the same.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from posttrain.distributed.sharding import local_shard
from posttrain.distributed.world import current
from posttrain.errors import RunError
from posttrain.models.cpu.backend import keep_freed_memory
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.batches import Sample, pack
from posttrain.training.optimizer import Optimizer

Totals = dict[str, tuple[float, float]]
"""Metrics as (sum, count), which add up exactly over micro-batches."""

Output = TypeVar("Output")
"""What the model computes for a micro-batch: `TokenScores` of a policy, rewards [S] of a reward model."""
Read = TypeVar("Read", contravariant=True)


class Learning(Protocol):
    """A model as the updater sees it: a `TrainedModel`, or a head on one."""

    version: int

    @property
    def device(self) -> torch.device: ...

    def training_mode(self) -> AbstractContextManager[None]: ...

    def set_last_backward(self, last: bool) -> None: ...

    def reshard(self) -> None: ...


class Objective(Protocol[Read]):
    """What a stage minimises, as a weighted sum over the samples of a micro-batch."""

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        """One weight per sample of the whole optimizer step, and the one divisor of the weighted sum."""
        ...

    def has_signal(self, sample: Sample) -> bool:
        """Whether the sample can add to the gradient; those that cannot are left out."""
        ...

    def __call__(
        self, output: Read, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        """The weighted sum of losses (scalar) and metrics."""
        ...


class Updater(Generic[Output]):
    """Owns the optimizer of a model. `forward` is what the model computes for the samples of one micro-batch."""

    def __init__(
        self,
        model: Learning,
        optimizer: Optimizer,
        recipe: LearnerRecipe,
        forward: Callable[[Sequence[Sample]], Output],
        key: str = "optimizer",
    ) -> None:
        """`key`: where the recipe has the optimizer, for messages."""
        self.model = model
        self.optimizer = optimizer
        self.recipe = recipe
        self.forward = forward
        self.keys = [key]
        self.beside: dict[str, Optimizer] = {}
        """Optimizers of further parameters that the same loss trains, by the name of their metrics. Each clips and
        steps what is its own; an update is made by all of them or by none."""
        self.skipped_in_a_row = 0
        self.trained_tokens = 0
        self._messages: list[str] = []
        self.world = current()
        if model.device.type == "cpu":
            keep_freed_memory()

    def update(self, samples: Sequence[Sample], objective: Objective[Output]) -> Totals:
        """One optimizer step on `samples`. A loss or gradient that is not finite skips it and names the samples."""
        weights, divisor = objective.weigh(samples)
        signal = [i for i, sample in enumerate(samples) if objective.has_signal(sample)]
        totals: Totals = {}
        if not signal:
            return {"optimizer/skipped": (0.0, 1.0), "optimizer/no_signal": (1.0, 1.0)}
        shares = list(self._shares(self._groups([samples[i] for i in signal])))
        for number, (group, own) in enumerate(shares):
            chosen = [samples[signal[i]] for i in group]
            with self.model.training_mode():
                output = self.forward(chosen)
            loss, metrics = objective(output, chosen, [weights[signal[i]] for i in group])
            spoilt = own and not bool(torch.isfinite(loss))
            stop = self.world.any(spoilt)
            if stop and self.world.size == 1:
                return self._skip(chosen, objective)
            self.model.set_last_backward(stop or number == len(shares) - 1)
            (loss / divisor if own else loss * 0).backward()
            for optimizer in self._optimizers():
                optimizer.collect()
            if stop:
                named = self.world.gather([signal[i] for i in group] if spoilt else [])
                return self._skip([samples[i] for i in named], objective)
            if own:
                add_totals(totals, metrics | {"loss/total": (float(loss.detach()), 0.0)})
        parts, totals = self.world.gather([totals]), {}
        for part in parts:
            add_totals(totals, part)
        for optimizer in self._optimizers():
            optimizer.add_up()
        finite = all(math.isfinite(float(optimizer.gradient_norm())) for optimizer in self.beside.values())
        norm = self.optimizer.step() if finite else math.nan
        if not math.isfinite(norm):
            return self._skip([samples[i] for i in signal], objective)
        for name, optimizer in self.beside.items():
            totals[f"{name}/gradient_norm"] = (optimizer.step(), 1.0)
        self.skipped_in_a_row = 0
        self.model.version += 1
        totals["loss/total"] = (totals["loss/total"][0], float(divisor))
        return totals | {"optimizer/gradient_norm": (norm, 1.0), "optimizer/skipped": (0.0, 1.0)}

    def also_train(self, name: str, key: str, optimizer: Optimizer) -> None:
        """Let `optimizer`, which the recipe has at `key`, make every update too; its metrics are `name`/..."""
        self.beside[name] = optimizer
        self.keys.append(key)

    def take_messages(self) -> list[str]:
        """What there was to say since the last call: skipped updates and the samples behind them."""
        messages, self._messages = self._messages, []
        return messages

    def without_gradient(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Output]]:
        """Micro-batches of `samples` as indices, and what the model computes for them, all on every process."""
        for group, own in self._shares(self._groups(samples)):
            with torch.no_grad():
                output = self.forward([samples[i] for i in group])
            if self.world.size == 1:
                yield group, output
            else:
                for other, found in self.world.gather([(group, _moved(output, "cpu"))] if own else []):
                    yield other, _moved(found, self.model.device)

    def _groups(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        for group in divided(samples, self.recipe.tokens_per_batch, self.world.size):
            self.trained_tokens += sum(len(samples[i].stream) for i in group)
            yield group

    def _shares(self, groups: Iterable[list[int]]) -> Iterator[tuple[list[int], bool]]:
        """This process's micro-batches, as many on each process, and whether each is its own or a stand-in."""
        if self.world.size == 1:
            yield from ((group, True) for group in groups)
            return
        everyone = list(groups)
        for start in range(0, len(everyone), self.world.size):
            place = start + self.world.rank
            own = place < len(everyone)
            # The last micro-batch is a small one.
            yield everyone[place if own else -1], own

    def _skip(self, suspects: Sequence[Sample], objective: Objective[Output]) -> Totals:
        """Leave the weights as they are; stop the run when that happens too often in a row."""
        self._clear()
        labels = list(dict.fromkeys(s.label for s in suspects))
        culprits = [
            label for label in labels if not self._is_finite([s for s in suspects if s.label == label], objective)
        ]
        culprits = culprits or labels
        self.skipped_in_a_row += 1
        named = ", ".join(culprits[:3]) + (f" and {len(culprits) - 3} more" if len(culprits) > 3 else "")
        self._messages.append(f"update skipped: loss or gradient is not finite for {named}")
        if self.skipped_in_a_row > self.optimizer.recipe.max_skipped_updates:
            raise RunError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite, the last for "
                f"{named}; lower {' or '.join(f'{key}.learning_rate' for key in self.keys)}, or look at what they hold "
                "with `posttrain episodes` or `posttrain data inspect`"
            )
        return {"optimizer/skipped": (1.0, 1.0)}

    def _is_finite(self, samples: Sequence[Sample], objective: Objective[Output]) -> bool:
        """Whether these samples alone give a finite loss and gradient."""
        loss, _ = objective(self.forward(samples), samples, [1.0] * len(samples))
        finite = not self.world.any(not bool(torch.isfinite(loss)))
        if finite:
            self.model.set_last_backward(True)
            loss.backward()
            trained = [p for optimizer in self._optimizers() for p in optimizer.parameters]
            finite = all(bool(torch.isfinite(local_shard(p.grad)).all()) for p in trained if p.grad is not None)
        self._clear()
        return not self.world.any(not finite)

    def _optimizers(self) -> list[Optimizer]:
        return [self.optimizer, *self.beside.values()]

    def _clear(self) -> None:
        self.model.reshard()
        for optimizer in self._optimizers():
            optimizer.clear()


def divided(samples: Sequence[Sample], budget: int, processes: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens as `pack` makes them, smaller ones where there would be fewer than
    processes, as far as samples can be divided."""
    groups = pack(samples, budget)
    if len(groups) >= processes:
        return groups
    tokens = sum(len(sample.stream) for sample in samples)
    for room in (1.0, 1.1, 1.25, 1.5):
        smaller = math.ceil(room * tokens / processes)
        try:
            found = pack(samples, min(smaller, budget))
        except RunError:  # the longest has no room
            continue
        if len(found) <= processes:
            return found
    return groups


def _moved(output: Any, device: torch.device | str) -> Any:
    """A tensor, or a dataclass of tensors and plain values, with its tensors on `device`."""
    if isinstance(output, torch.Tensor):
        return output.to(device)
    if not is_dataclass(output) or isinstance(output, type):
        return output
    return replace(output, **{field.name: _moved(getattr(output, field.name), device) for field in fields(output)})


def add_totals(totals: Totals, more: Totals) -> None:
    """Add (sum, count) metrics into `totals`."""
    for key, (value, count) in more.items():
        old = totals.get(key, (0.0, 0.0))
        totals[key] = (old[0] + float(value), old[1] + float(count))


def means(totals: Totals) -> dict[str, float]:
    """Metrics as means; those that never counted anything are left out."""
    return {key: value / count for key, (value, count) in totals.items() if count}
