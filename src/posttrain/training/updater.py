"""Samples, micro-batches, and the updater that makes one optimizer step from them.

The updater is independent of the algorithm and of what the model computes. A micro-batch has at most `tokens_per_batch`
tokens, and a stream is never divided. The loss is divided once, by a divisor that is global over the optimizer step, so
gradients are equal, up to float rounding, for any split into micro-batches. Several processes divide the micro-batches.
Each process gets all samples of an update. A process without a micro-batch computes that of another process with weight
0, so that all processes make the same collective calls.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from posttrain.credit.assign import to_streams
from posttrain.distributed.sharding import local_shard
from posttrain.distributed.world import current_world
from posttrain.episode import CUT_OFF, Episode, PerToken, Stream
from posttrain.errors import RunError
from posttrain.losses.distillation import TeacherScores
from posttrain.models.cpu.backend import prepare_process
from posttrain.models.critic import SharedCritic
from posttrain.models.packing import prompt_length, row_length, tree_order
from posttrain.models.policy import TrainedModel
from posttrain.models.routing import RoutedTokens, Routing
from posttrain.recipe.model import LearnerRecipe
from posttrain.rollout.driver import Played, quiet
from posttrain.training.optimizer import Optimizer

MOST_SKIPPED = 3
"""Consecutive updates that may be skipped because of a loss or gradient that is not finite; one more stops the run."""
T = TypeVar("T")

# -- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferenceSide:
    """Identifies a stream as one answer of a row of preference data."""

    row: int
    """Unique within an update; the two answers of a pair share it and stay in one forward pass."""
    chosen: bool
    margin: float = 0.0
    """How much better the chosen answer of a pair is, in units of reward."""


@dataclass
class Sample:
    """One stream with everything that the learner needs. n of its T tokens are sampled."""

    stream: Stream
    label: str
    """Names the episode in messages."""
    advantages: np.ndarray
    """[n] float32: credit of each sampled token."""
    ref_logprobs: np.ndarray | None = None
    """[n] float32: log-probabilities under the reference model."""
    old_logprobs: np.ndarray | None = None
    """[n] float32: the learner's own log-probabilities before the step's updates; None takes the engine's."""
    episode: int | None = None
    """Number of the stream's episode within the step; None for rows of data."""
    values: np.ndarray | None = None
    """[n] float32: the critic's values before the step's updates, in units of reward."""
    returns: np.ndarray | None = None
    """[n] float32: targets of the critic's values."""
    factors: np.ndarray | None = None
    """[n] float32: factor of each token's policy loss, which depends on the whole update; None means 1."""
    entropies: np.ndarray | None = None
    """[n] float32: entropy, in nats, of the learner's distribution before the step's updates."""
    bonus: np.ndarray | None = None
    """[n] bool: whether the token gets the entropy bonus; None means all."""
    held: np.ndarray | None = None
    """[n] bool: whether KL-Cov holds the token near the old policy; None means none."""
    group: int = 0
    """The episode's group."""
    has_baseline: bool = True
    """False: the credit needs another episode to compare with and there is none, so the sample is left out."""
    truncated: bool = False
    """Whether a token limit cut the last answer of the episode."""
    teacher: TeacherScores | None = None
    """The teacher's scores of the sampled tokens."""
    weight: float = 1.0
    """Weight of a supervised row's tokens in the loss."""
    ptx: bool = False
    """A supervised row in reinforcement learning or distillation, not an episode."""
    side: PreferenceSide | None = None
    """Set only for preference data."""

    @property
    def tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.stream.ids)

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens, n."""
        return int(self.stream.sampled.sum())

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[n] float32: log-probabilities of the sampled tokens under the policy that sampled them."""
        return self.stream.rollout_logprobs[self.stream.sampled]


Samples = Sequence[Sample]


def samples_of_episodes(episodes: Sequence[Episode], step: int) -> list[Sample]:
    """One sample per stream, in the order of episodes and their streams, with advantages of 0."""
    return [
        Sample(
            stream=stream,
            label=f"step {step} group {episode.group} episode {episode.index} (environment seed {episode.seed})",
            advantages=np.zeros(int(stream.sampled.sum()), dtype=np.float32),
            episode=number,
            group=episode.group,
            truncated=bool(episode.turns) and episode.turns[-1].stop_reason in CUT_OFF,
        )
        for number, episode in enumerate(episodes)
        for stream in episode.streams
    ]


def computed(field: T | None) -> T:
    """`field` of a sample, which must not be None, because an earlier phase of the step computes it."""
    assert field is not None
    return field


def per_token(episodes: Sequence[Episode], numbers: Iterable[np.ndarray]) -> PerToken:
    """[T] float32 for each stream of `episodes`, of `numbers` [n] for the sampled tokens of each stream in order."""
    left = iter(numbers)
    return [to_streams(e, np.concatenate([np.zeros(0), *(next(left) for _ in e.streams)])) for e in episodes]


# -- micro-batches -----------------------------------------------------------------------------------------------------


def pack(samples: Samples, budget: int, key: str = "learner.tokens_per_batch") -> list[list[int]]:
    """Indices of samples, in groups of at most `budget` tokens each.

    Samples with the same prompt stay together as far as the budget allows, because shared tokens are computed once. The
    two answers of a preference pair are never divided. Supervised rows of `ptx` are not packed with episodes, because
    the two are scored at different temperatures. These bundles are packed first-fit decreasing: the longest first, each
    into the first group with room. That needs at most 11/9 of the fewest possible groups of each kind, plus one
    (Johnson 1973). RunError if a sample is longer than the budget; the message names the sample and the budget's
    `key`."""
    groups: list[list[int]] = []
    room: list[int] = []
    for size, indices in sorted(_bundles(samples, budget), key=lambda bundle: (-bundle[0], bundle[1])):
        if size > budget:
            raise RunError(
                f"{samples[indices[0]].label} has {size} tokens, more than {key} = {budget}; raise "
                "it, or lower the maximum number of tokens of an episode or row"
            )
        ptx = samples[indices[0]].ptx
        place = next((g for g, free in enumerate(room) if free >= size and samples[groups[g][0]].ptx == ptx), None)
        if place is None:
            groups.append([])
            room.append(budget)
            place = len(groups) - 1
        groups[place] += indices
        room[place] -= size
    return groups


def _bundles(samples: Samples, budget: int) -> list[tuple[int, list[int]]]:
    """(tokens of their row, indices) of samples that belong together."""
    rows: dict[int, list[int]] = defaultdict(list)
    prompts: dict[tuple[bool, bytes], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.side is not None:
            rows[sample.side.row].append(index)
        else:
            prompt = sample.stream.ids[: prompt_length(sample.stream.sampled)].tobytes()
            prompts[sample.ptx, prompt].append(index)
    bundles = [(row_length([samples[i].stream.ids for i in indices]), indices) for indices in rows.values()]
    for indices in prompts.values():
        for at, shared in tree_order([samples[i].stream.ids for i in indices]):
            index, length = indices[at], samples[indices[at]].tokens
            if shared and bundles[-1][0] + length - shared <= budget:
                bundles[-1] = (bundles[-1][0] + length - shared, [*bundles[-1][1], index])
            else:
                bundles.append((length, [index]))
    return bundles


def divided(samples: Samples, budget: int, processes: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens, made by `pack`. If there would be fewer micro-batches than processes,
    they are made smaller, as far as samples can be divided."""
    groups = pack(samples, budget)
    if len(groups) >= processes:
        return groups
    tokens = sum(sample.tokens for sample in samples)
    for room in (1.0, 1.1, 1.25, 1.5):
        smaller = math.ceil(room * tokens / processes)
        try:
            packed = pack(samples, min(smaller, budget))
        except RunError:  # the longest sample does not fit
            continue
        if len(packed) <= processes:
            return packed
    return groups


# -- the updater -------------------------------------------------------------------------------------------------------

Totals = dict[str, tuple[float, float]]
"""Metrics as (sum, count), which add up exactly over micro-batches."""
Loss = tuple[torch.Tensor, Totals]
"""A sum of losses, a scalar to minimize, and metrics."""

Output = TypeVar("Output")
"""The result of a forward pass over a micro-batch: `TokenScores` of a policy, rewards [S] of a reward model."""
Forward = Callable[[Samples], Output]
"""The forward pass over the samples of a micro-batch."""
Input = TypeVar("Input", contravariant=True)


class Objective(Protocol[Input]):
    """The loss of a stage, as a weighted sum over the samples of a micro-batch."""

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        """One weight per sample of the whole optimizer step, and the one divisor of the weighted sum."""
        ...

    def has_signal(self, sample: Sample) -> bool:
        """Whether the sample can contribute to the gradient. Other samples are not computed."""
        return True

    def __call__(self, output: Input, samples: Samples, weights: Sequence[float]) -> Loss:
        """The weighted sum of losses (scalar) and metrics."""
        ...


class RoutedUpdate:
    """The tokens of experts, and the load-balancing loss, over the passes of an update and all processes. Does nothing for a
    model without routers."""

    def __init__(self, model: Any, passes: int) -> None:
        """`passes`: number of passes of the update on this process."""
        self._routing: Routing | None = getattr(model, "routing", None)
        self._weight = 0.0 if self._routing is None else float(model.recipe.router_aux_loss)
        self.counts_first = self._weight > 0 and passes * current_world().size > 1
        """Whether the loss needs the tokens of experts in all passes, computed before without gradient."""
        self._counts: torch.Tensor | None = None
        """`RoutedTokens.counts` so far, on this process; after `add_up` of all processes."""
        self._added_up = False
        self._loss = torch.zeros(())

    @contextmanager
    def counted(self, counts: bool) -> Iterator[RoutedTokens | None]:
        """Count the tokens of the pass inside the block, which is a placeholder if `counts` is false."""
        if self._routing is None:
            yield None
            return
        with self._routing.recorded() as routed:
            yield routed
        if not self._added_up:
            self._counts = counts * routed.counts() + (0 if self._counts is None else self._counts)

    def add_up(self) -> None:
        """Add up the counts of all processes, after the last pass to count."""
        if self._counts is not None and not self._added_up:
            self._counts, self._added_up = current_world().sum([self._counts])[0], True

    def loss(self, routed: RoutedTokens | None, counts: bool) -> torch.Tensor | float:
        """The weighted loss of the tokens of one pass; 0 without a weight."""
        if routed is None or not self._weight or self._counts is None:
            return 0.0
        loss = routed.balancing_loss(self._counts)
        self._loss = self._loss + counts * loss.detach().cpu()
        return self._weight * loss

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Metrics as (sum, count), over all passes and processes."""
        self.add_up()
        if self._counts is None:
            return {}
        counts = self._counts.double().cpu()
        tokens, rows, changed = counts[:, :-2], counts[:, -2], counts[:, -1]
        shares = tokens / tokens.sum(1, keepdim=True)
        entropies = torch.special.entr(shares).sum(1) / math.log(shares.shape[1])
        routers = float(len(shares))
        metrics = {
            "router/imbalance": (float((shares.amax(1) * shares.shape[1]).sum()), routers),
            "router/entropy": (float(entropies.sum()), routers),
            "router/unused": (float((tokens == 0).double().mean(1).sum()), routers),
            "router/changed": (float(changed.sum()), float(rows.sum())),
        }
        return metrics | ({"loss/router": (float(current_world().sum([self._loss])[0]), 1.0)} if self._weight else {})


class Updater(Generic[Output]):
    """A model, its optimizer, and the forward pass of a micro-batch. `update` makes one optimizer step.

    Attributes:
        skipped_in_a_row: updates in a row that were skipped because a loss or gradient was not finite.
        trained_tokens: tokens of all forward passes so far.
        computed: called after each micro-batch of an update, with the number of samples computed and of all that have
            signal.
    """

    def __init__(
        self,
        model: TrainedModel | SharedCritic,
        optimizer: Optimizer,
        settings: LearnerRecipe,
        forward: Forward[Output],
        key: str = "optimizer",
        joint: Mapping[str, Optimizer] | None = None,
    ) -> None:
        """`forward`: the forward pass over the samples of one micro-batch. `key`: the optimizer's key in the recipe,
        for messages. `joint`: optimizers of further parameters that the same loss trains, by the prefix of their
        metrics and recipe keys. Each clips its own gradients. Either all optimizers step or none does."""
        self.model, self.optimizer, self.settings, self.forward = model, optimizer, settings, forward
        self.joint = dict(joint or {})
        self._optimizers = [optimizer, *self.joint.values()]
        self.skipped_in_a_row = self.trained_tokens = 0
        self.computed: Played = quiet
        self._keys = [key, *(f"{name}.optimizer" for name in self.joint)]
        self._warnings: list[str] = []
        self._world = current_world()
        if model.device.type == "cpu":
            prepare_process()

    def update(self, samples: Samples, objective: Objective[Output]) -> Totals:
        """Make one optimizer step on `samples`; returns metrics as (sum, count).

        A loss or gradient that is not finite skips the step; `take_warnings` then names the samples. Raises RunError:
        more than `MOST_SKIPPED` steps in a row were skipped."""
        weights, divisor = objective.weigh(samples)
        signal = [i for i, sample in enumerate(samples) if objective.has_signal(sample)]
        totals: Totals = {}
        if not signal:
            return {"optimizer/skipped": (0.0, 1.0), "optimizer/no_signal": (1.0, 1.0)}
        shares = list(self._shares([samples[i] for i in signal]))
        routers = RoutedUpdate(self.model, len(shares))
        if routers.counts_first:
            for group, counts in shares:
                with torch.no_grad(), routers.counted(counts):
                    self.forward([samples[signal[i]] for i in group])
            routers.add_up()
        parts: list[Any] = []
        done, total = 0, sum(len(group) for group, _ in shares)
        for number, (group, counts) in enumerate(shares):
            chosen = [samples[signal[i]] for i in group]
            with self.model.training_mode(*self._draw(number)):
                with routers.counted(counts) as routed:
                    output = self.forward(chosen)
                loss, metrics = objective(output, chosen, [weights[signal[i]] for i in group])
                whole = loss / divisor + routers.loss(routed, counts)
                self.model.set_last_backward(number == len(shares) - 1)
                with ExitStack() as collecting:
                    for optimizer in self._optimizers:
                        collecting.enter_context(optimizer.collecting())
                    (whole if counts else whole * 0).backward()
            # Processes that share a micro-batch have the same metrics.
            counts = counts and self._world.sequence_rank == 0
            parts.append(metrics | {"loss/total": (loss.detach(), 0.0)} if counts else {})
            done += len(group)
            self.computed(done, total)
        parts = as_numbers(parts)
        finite_losses = [math.isfinite(part.get("loss/total", (0.0, 0.0))[0]) for part in parts]
        broken = [signal[i] for (group, _), ok in zip(shares, finite_losses, strict=True) if not ok for i in group]
        if suspects := self._world.gather(broken):
            return self._skip([samples[i] for i in suspects], objective)
        add_totals(totals, *parts)
        parts, totals = self._world.gather([totals]), {}
        add_totals(totals, *parts, routers.metrics())
        for optimizer in self._optimizers:
            optimizer.add_up()
        finite = all(math.isfinite(float(optimizer.gradient_norm())) for optimizer in self.joint.values())
        norm = self.optimizer.step() if finite else math.nan
        if not math.isfinite(norm):
            return self._skip([samples[i] for i in signal], objective)
        for name, optimizer in self.joint.items():
            totals[f"{name}/gradient_norm"] = (optimizer.step(), 1.0)
        self.skipped_in_a_row = 0
        self.model.version += 1
        totals["loss/total"] = (totals["loss/total"][0], float(divisor))
        return totals | {"optimizer/gradient_norm": (norm, 1.0), "optimizer/skipped": (0.0, 1.0)}

    def take_warnings(self) -> list[str]:
        """Warnings since the last call: skipped updates and the samples that caused them."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def without_gradient(self, samples: Samples) -> Iterator[tuple[list[int], Output]]:
        """Micro-batches of `samples` as indices, with the results of their forward passes. Every process gets all of
        them."""
        for group, counts in self._shares(samples):
            with torch.no_grad():
                output = self.forward([samples[i] for i in group])
            if self._world.data_size == 1:
                yield group, output
            else:
                counts = counts and self._world.sequence_rank == 0
                for indices, computed in self._world.gather([(group, _moved(output, "cpu"))] if counts else []):
                    yield indices, _moved(computed, self.model.device)

    def _shares(self, samples: Samples) -> Iterator[tuple[list[int], bool]]:
        """This process's micro-batches of `samples`, the same number on each process, and whether each counts or is a
        placeholder. Processes of one `sequence_group` have the same ones."""
        groups = divided(samples, self.settings.tokens_per_batch, self._world.data_size)
        self.trained_tokens += sum(sample.tokens for sample in samples)
        first = self._world.data_rank
        for place in range(first, len(groups) + first, self._world.data_size):
            counts = place < len(groups)
            # The last micro-batch is a small one.
            yield groups[place if counts else -1], counts

    def _skip(self, suspects: Samples, objective: Objective[Output]) -> Totals:
        """Leave the weights unchanged. RunError if too many consecutive updates are skipped."""
        self._clear()
        labels = list(dict.fromkeys(s.label for s in suspects))
        by_label = {label: [s for s in suspects if s.label == label] for label in labels}
        culprits = [label for label in labels if not self._is_finite(by_label[label], objective)] or labels
        self.skipped_in_a_row += 1
        named = ", ".join(culprits[:3]) + (f" and {len(culprits) - 3} more" if len(culprits) > 3 else "")
        self._warnings.append(f"update skipped: loss or gradient is not finite for {named}")
        if self.skipped_in_a_row > MOST_SKIPPED:
            raise RunError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite, the last for "
                f"{named}; lower {' or '.join(f'{key}.learning_rate' for key in self._keys)}, or look at these samples "
                "with `posttrain episodes` or `posttrain data inspect`"
            )
        return {"optimizer/skipped": (1.0, 1.0)}

    def _is_finite(self, samples: Samples, objective: Objective[Output]) -> bool:
        """Whether these samples on their own give a finite loss and gradient."""
        with self.model.training_mode(*self._draw(0)):
            loss, _ = objective(self.forward(samples), samples, [1.0] * len(samples))
            finite = not self._world.any(not bool(torch.isfinite(loss)))
            if finite:
                self.model.set_last_backward(True)
                loss.backward()
        if finite:
            trained = [p for optimizer in self._optimizers for p in optimizer.parameters]
            finite = all(bool(torch.isfinite(local_shard(p.grad)).all()) for p in trained if p.grad is not None)
        self._clear()
        return not self._world.any(not finite)

    def _draw(self, number: int) -> tuple[int | str, ...]:
        """Names the dropout masks of this process's micro-batch `number` of the next update by its position among the
        micro-batches of all processes, so that the masks do not depend on which process computes it. Processes that share
        a micro-batch have different tokens, and different masks."""
        part = [self._world.sequence_rank] if self._world.sequence_rank else []
        return self._keys[0], self.optimizer.updates, number * self._world.data_size + self._world.data_rank, *part

    def _clear(self) -> None:
        self.model.reshard()
        for optimizer in self._optimizers:
            optimizer.clear()


def by_sample(values: torch.Tensor | np.ndarray, samples: Samples) -> list[np.ndarray]:
    """`values` [N, ...] of the sampled tokens of all samples in a row, divided into [n, ...] for each, in CPU memory."""
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    return np.split(array, np.cumsum([sample.sampled_tokens for sample in samples])[:-1])[: len(samples)]


def in_batches(samples: Samples, budget: int, key: str, compute: Callable[[Samples], Sequence[T]]) -> list[T]:
    """The results of `compute` for all samples, without gradient, in micro-batches as of `pack`."""
    results: dict[int, T] = {}
    with torch.no_grad():
        for group in pack(samples, budget, key):
            results |= dict(zip(group, compute([samples[i] for i in group]), strict=True))
    return [results[i] for i in range(len(samples))]


def per_sample(updater: Updater[torch.Tensor], samples: Samples) -> list[np.ndarray]:
    """[n] float32 for each sample, without gradient, from a forward pass that returns one number per sampled token."""
    arrays: dict[int, np.ndarray] = {}
    for group, numbers in updater.without_gradient(samples):
        arrays |= dict(zip(group, by_sample(numbers, [samples[i] for i in group]), strict=True))
    return [arrays[i] for i in range(len(samples))]


def _moved(output: Any, device: torch.device | str) -> Any:
    """A tensor, or a dataclass of tensors and plain values, with its tensors on `device`."""
    if isinstance(output, torch.Tensor):
        return output.to(device)
    if not is_dataclass(output) or isinstance(output, type):
        return output
    return replace(output, **{field.name: _moved(getattr(output, field.name), device) for field in fields(output)})


def as_numbers(parts: Sequence[Mapping[str, tuple[Any, Any]]]) -> list[Totals]:
    """`parts` with the tensors in them, each of one element, as Python numbers. All are read from a GPU together."""
    flat = [value for part in parts for pair in part.values() for value in pair]
    tensors = [value.double().reshape(()) for value in flat if isinstance(value, torch.Tensor)]
    read = iter(torch.stack(tensors).cpu().tolist() if tensors else [])
    numbers = iter([next(read) if isinstance(value, torch.Tensor) else float(value) for value in flat])
    return [{key: (next(numbers), next(numbers)) for key in part} for part in parts]


def add_totals(totals: Totals, *more: Totals) -> None:
    """Add (sum, count) metrics into `totals`."""
    for key, (value, count) in (item for part in more for item in part.items()):
        old = totals.get(key, (0.0, 0.0))
        totals[key] = (old[0] + float(value), old[1] + float(count))


def means(totals: Totals) -> dict[str, float]:
    """Metrics as means, without those whose count is 0."""
    return {key: value / count for key, (value, count) in totals.items() if count}
