"""What sections of a recipe use to declare their memory and their batches: sizes of a model, the layout of the GPUs, and the
tasks of a run.

`planning` creates a `Plan` and adds up what the sections of a recipe return for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.errors import InputError

Items = dict[str, tuple[int, str]]
"""What is in memory -> (bytes on one device, how they are counted)."""

MASTERS = "float32 masters and their gradients"
CACHE = "key/value cache, at most"
ACTIVATIONS = "activations, roughly"
GATHERED = "gathered temporarily"
BETWEEN = "gradients between replicas"
PASSING = (ACTIVATIONS, "logits", GATHERED, "gradients", "whole gradients", BETWEEN)
"""Items that exist from the first pass of an update to its optimizer step."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder. `parameters` includes all experts and counts tied weights once."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    experts: int = 0
    """Experts per layer, each with `intermediate` hidden units. 0: a dense model."""
    experts_per_token: int = 0
    """Active experts per token."""
    tied: bool = True
    """Whether the output projection shares its weights with the embedding."""
    head_norms: bool = False
    """Whether each head's queries and keys are normalized, as in Qwen3."""

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the matrices of one layer without experts: seven, or the four of attention if it has experts."""
        queries, keys = self.heads * self.head_size, self.key_value_heads * self.head_size
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        if self.experts:
            return attention
        return [*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]

    @property
    def expert(self) -> int:
        """Parameters of one expert's three matrices; 0 without experts."""
        return 3 * self.hidden * self.intermediate if self.experts else 0

    @property
    def shared_layer(self) -> int:
        """Matrix parameters of a layer used by every token: all except the experts, including the router."""
        return sum(inputs * outputs for inputs, outputs in self.linear_sizes) + self.hidden * self.experts

    @property
    def layer(self) -> int:
        """Parameters of the matrices of one layer."""
        return self.shared_layer + self.experts * self.expert

    @property
    def active_layer(self) -> int:
        """Matrix parameters of a layer used by one token."""
        return self.shared_layer + self.experts_per_token * self.expert

    @property
    def head(self) -> int:
        """Parameters of the output projection."""
        return self.vocabulary * self.hidden

    @property
    def scorer_parameters(self) -> int:
        """Parameters of a reward model or critic of this size: its scalar head replaces the output projection."""
        return self.parameters if self.tied else self.parameters - self.head

    @property
    def computed_parameters(self) -> int:
        """Parameters by formula: matrices, two norms per layer, embedding and final norm. For files without a count."""
        ends = self.head * (1 if self.tied else 2)
        return ends + self.layers * (self.layer + 2 * self.hidden) + self.hidden

    @property
    def kept_activations(self) -> int:
        """Numbers kept per token for the backward pass of one layer, in the model's dtype: the inputs of both norms and of
        the matrices after them, queries, keys, values and outputs of attention, gate, its factor and their product.

        With experts, only the active experts of a token count, plus three copies of the token for each, and the inputs of norms
        in float32. Statistics of norms and softmax are left out. `tests/cuda_fake` compares this with what an update keeps.
        """
        queries, keys = self.heads * self.head_size, self.key_value_heads * self.head_size
        networks, copies = (self.experts_per_token, 3 * self.experts_per_token + 4) if self.experts else (1, 0)
        normalized = queries + keys if self.head_norms else 0
        return (4 + copies) * self.hidden + 2 * (queries + keys) + normalized + 3 * networks * self.intermediate

    @property
    def kept_products(self) -> int:
        """`kept_activations` with `model.gradient_checkpointing: selective`: the layer's input, and what products with weights
        and attention return."""
        queries, keys = self.heads * self.head_size, self.key_value_heads * self.head_size
        networks = self.experts_per_token if self.experts else 1
        return (2 + networks) * self.hidden + 2 * (queries + keys) + 2 * networks * self.intermediate

    @property
    def backward_activations(self) -> int:
        """Numbers per token that the backward pass of one layer has at a time besides `kept_activations`: gradients of the
        gated units, or of the copies for experts, and of the hidden state."""
        units = self.experts_per_token * self.hidden if self.experts else 2 * self.intermediate
        return units + 2 * self.hidden

    def gathered_bytes(
        self, width: int, inputs: int, activations: int, logits: int, trains: bool, scores: bool, whole: bool
    ) -> int:
        """Bytes that FSDP2 has beside its shards and the given bytes of activations and logits, at the largest of four moments
        of a pass: before the first layer, in the backward pass of the output projection, in that of a layer, and in that of the
        root group after the last layer. Only the second has logits, beside `inputs`, the activations that exist before a layer is
        recomputed.

        Embedding and output projection are in the root group, which stays gathered. Gradients of a group are unsharded in the
        model's dtype, `width` bytes, and are reduced in float32; those of the output projection wait for the root's. `trains`:
        whether all weights have gradients, not those of adapters alone. `scores`: a reward model. `whole`: whether all weights
        stay gathered. `tests/cuda_fake` compares this with torch's own allocations.
        """
        head = 0 if scores else self.head
        root = self.head if self.tied or scores else 2 * self.head
        gathered = self.layers * self.layer if whole else 2 * self.layer
        waiting = width * head if trains else 0
        projection = width * (root + (gathered if whole else self.layer)) + waiting
        layer = width * (root + gathered) + waiting + (width + 4) * self.layer * trains
        # The gradients of a tied weight exist twice and as their sum; otherwise, the gathered weights are freed before.
        end = (4 * width * root + 4 * self.layer) if self.tied and not scores else (width + 4) * root
        start = 2 * width * (root + self.layer)  # the buffers of a gathering stay until the next
        without = max(layer, start - activations, end * trains - activations) - logits
        return max(projection + inputs - activations, without, 0)

    def cache_bytes(self, width: int, tensor: int = 1) -> int:
        """Bytes of KV cache per token on one of `tensor` devices, at `width` bytes per number. Heads are not split."""
        heads = -(-self.key_value_heads // tensor)
        return 2 * self.layers * heads * self.head_size * width


@dataclass(frozen=True)
class Device:
    """A GPU."""

    name: str
    memory: float
    """Bytes of memory, by the vendor."""


DEVICES = {name: Device(name, gigabytes * 1e9) for name, gigabytes in (("h200", 141), ("h100", 80), ("a100", 80))}
"""Name -> GPU. `a100` is the module with 80 GB."""


def device_of(word: str) -> Device:
    """The GPU for the option `--on`: a key of `DEVICES`, or a number of gigabytes such as `48`.

    Raises `InputError` for other words.
    """
    if word in DEVICES:
        return DEVICES[word]
    try:
        gigabytes = float(word)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes < 1e6:
        raise InputError(f"--on: {word} is not a known GPU; give {', '.join(DEVICES)}, or its memory in GB, such as 48")
    return Device(f"a GPU of {gigabytes:g} GB", gigabytes * 1e9)


@dataclass(frozen=True)
class Placement:
    """Device layout of a run. The default is one device, with the engine in the learner's process."""

    devices: int = 1
    """Number of learner devices."""
    shard: int = 1
    """Devices per shard group of weights, gradients and optimizer state (FSDP, ZeRO stage 3). A learner with more devices
    holds `devices / shard` replicas."""
    engines: int = 0
    """Engines with their own copy of the weights. 0: one engine that uses the learner's weights."""
    tensor: int = 1
    """Tensor-parallel size of one engine. Matrices and KV-cache heads are divided."""
    colocated: bool = True
    """Whether the engines share the learner's devices. Sampling and learning then alternate."""


ALONE = Placement()
"""Placement on a single device."""


@dataclass(frozen=True)
class Plan:
    """What the memory of a run depends on besides its recipe."""

    sizes: ModelSizes
    """Sizes of the model at `model.path`."""
    placement: Placement = ALONE
    device: Device | None = None
    """The GPU of each process. None: unknown, or a CPU."""
    sizes_at: Callable[[str], ModelSizes | None] = lambda path: None
    """Sizes of the model at a path; None if they are unknown, such as those of the model of a later stage."""

    def divided(self, items: Items) -> Items:
        """The items on one of the devices that shard them."""
        count = self.placement.shard
        if count == 1:
            return items
        return {what: (-(-size // count), f"{how}, over {count} devices") for what, (size, how) in items.items()}


@dataclass(frozen=True)
class TaskSplit:
    """Environment seeds of a run. No seed is in two parts."""

    training: Sequence[int]
    validation: Sequence[int]
    """Seeds of the learning curve."""
    test: Sequence[int]
    """Seeds of the final table."""
    source: str | None = None
    """The recipe key of the files whose rows are the training tasks; None if tasks are generated."""
    held_out_source: str | None = None
    """The same for the held-out seeds."""

    @property
    def held_out(self) -> list[Sequence[int]]:
        """The seeds of the curve and those of the table."""
        return [self.validation, self.test]

    def __str__(self) -> str:
        """The number of tasks in each part, and their source."""
        apart = self.source != self.held_out_source
        parts = [
            f"{len(seeds):,} {what}"
            + (f" (seeds {shown_seeds(seeds)})" if source is None else f" (rows of {source})" if apart else "")
            for seeds, what, source in (
                (self.training, "to train on", self.source),
                (self.validation, "for the learning curve", self.held_out_source),
                (self.test, "for the final table", self.held_out_source),
            )
            if seeds
        ]
        return f"tasks{f' of {self.source}' if self.source and not apart else ''}: {', '.join(parts)}"


def named_tasks(tasks: TaskSplit | None, part: int) -> str:
    """The tasks of a part: 0 for training, 1 for the learning curve, 2 for the final table."""
    kind = "" if part == 0 else "held-out "
    if tasks is None:
        return f"{kind}tasks, which are known when they are read"
    seeds = (tasks.training, *tasks.held_out)[part]
    source = tasks.held_out_source if part else tasks.source
    if source is None:
        return f"{'the ' * bool(kind)}{kind}seeds {shown_seeds(seeds)}"
    return f"{len(seeds):,} {kind}{plural('task', len(seeds))} of {source}"


def shown_seeds(seeds: Sequence[int]) -> str:
    """`first..last` for a range of seeds."""
    return f"{seeds[0]}..{seeds[-1]}"


def plural(word: str, count: int) -> str:
    """`word`, or its plural unless `count` is 1."""
    return word if count == 1 else f"{word}es" if word.endswith("s") else f"{word}s"


def counted(count: int, word: str) -> str:
    """`count` and `word`, in the plural unless `count` is 1."""
    return f"{count} {plural(word, count)}"
