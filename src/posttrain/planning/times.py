"""Estimated seconds per kind of work, from FLOPs, bytes read, bytes sent, and device limits (a roofline model).

Not covered: environments, judges, load imbalance between devices, start-up, checkpoints, metrics and file output. On a
CPU, metrics and file output dominate the step time of a very small model.
"""

import math

from posttrain.planning.devices import HOP, HOST_COPIES, HOST_COPIES_RAY, HOST_COPY, SYNC, Device
from posttrain.planning.memory import ModelSizes, cache_bytes, layer_activations
from posttrain.planning.placement import Placement
from posttrain.planning.work import (
    Episodes,
    Tokens,
    decoding_steps,
    forward_flops,
    gathered_bytes,
    moved_tokens_bytes,
    read_weights,
    reduced_bytes,
    training_flops,
)
from posttrain.recipe.engines import WeightTransfer


def training_seconds(
    sizes: ModelSizes,
    device: Device,
    placement: Placement,
    tokens: Tokens,
    width: int,
    tokens_per_batch: int,
    whole: bool = True,
    checkpointing: bool = False,
) -> float:
    """Seconds of the forward and backward passes over `tokens`.

    `tokens` are divided evenly among the learner's devices and processed `tokens_per_batch` at a time. The compute time is
    that of matrix products at `Device.products` of the peak, plus `Device.moved` memory transfers of each saved
    activation. `checkpointing` adds one forward pass. Every pass gathers sharded weights twice and reduce-scatters
    gradients (Rajbhandari et al. 2019, arXiv 1910.02054, section 7.2.2). This communication overlaps with computation, so
    the longer of the two counts. Replicas of a shard all-reduce their gradients once. Expert-parallel communication does
    not overlap.
    """
    each = tokens * (1 / placement.devices)
    times = (4 / 3 if whole else 3 / 2) if checkpointing else 1.0
    products = times * training_flops(sizes, each, whole) / (device.peak(width) * device.products)
    kept = each.count * width * sizes.layers * layer_activations(sizes)
    computing = products + times * kept * device.moved / device.reading
    passes = math.ceil(each.count / tokens_per_batch)
    sending = passes * (3 if whole else 2) * gathering_seconds(sizes, device, placement, width)
    copies = placement.devices // placement.shard
    if copies > 1 and whole:
        divided = width * (sizes.layers * sizes.layer + 2 * sizes.head) / placement.shard
        sending += 2 * (copies - 1) / copies * divided / device.bandwidth(placement.devices)
    waited = 0.0
    if placement.expert_parallel > 1:
        there = moved_tokens_bytes(sizes, width, each.count, placement.expert_parallel)
        waited = (3 if checkpointing else 2) * there / device.bandwidth(placement.expert_parallel)
    return max(computing, sending) + waited


def forward_seconds(
    sizes: ModelSizes, device: Device, placement: Placement, tokens: Tokens, width: int, tokens_per_batch: int
) -> float:
    """Seconds of forward passes without gradients on the learner's devices: log-probabilities, values or rewards."""
    each = tokens * (1 / placement.devices)
    passes = math.ceil(each.count / tokens_per_batch)
    computing = forward_flops(sizes, each) / (device.peak(width) * device.products)
    # The forward pass makes a third of the activation transfers counted in `Device.moved`.
    kept = each.count * width * sizes.layers * layer_activations(sizes)
    computing += kept * device.moved / 3 / device.reading
    reading = passes * read_weights(sizes, width, tokens_per_batch) / device.reading
    sending = passes * gathering_seconds(sizes, device, placement, width)
    waited = 0.0
    if placement.expert_parallel > 1:
        there = moved_tokens_bytes(sizes, width, each.count, placement.expert_parallel)
        waited = there / device.bandwidth(placement.expert_parallel)
    return max(computing, reading, sending) + waited


def gathering_seconds(sizes: ModelSizes, device: Device, placement: Placement, width: int) -> float:
    """Seconds of one all-gather of the sharded weights, layer by layer."""
    if placement.shard == 1:
        return 0.0
    sent = gathered_bytes(sizes, width, placement.shard, placement.expert_parallel)
    return sent / device.bandwidth(placement.shard)


def prefill_seconds(
    sizes: ModelSizes, device: Device, tokens: Tokens, width: int, tensor: int = 1, tokens_per_forward: int = 2048
) -> float:
    """Seconds of prefill on one engine of `tensor` devices."""
    computing = forward_flops(sizes, tokens) / tensor / (device.peak(width) * device.products)
    kept = tokens.count * width * sizes.layers * layer_activations(sizes) / tensor
    computing += kept * device.moved / 3 / device.reading
    passes = math.ceil(tokens.count / tokens_per_forward)
    reading = passes * read_weights(sizes, width, tokens_per_forward) / tensor / device.reading
    return max(computing, reading) + _reducing(sizes, device, width, tokens.count, tensor, passes)


def step_seconds(sizes: ModelSizes, device: Device, rows: float, context: float, width: int, tensor: int = 1) -> float:
    """Seconds of one decoding step: one token for each of `rows` sequences with a mean context of `context` tokens.

    The step reads weights and KV cache once and computes every product for every row. The result is the longer of the
    two times, or their sum if `Device.overlaps` is False. KV heads are not split.
    """
    cached = rows * context * cache_bytes(sizes, width, tensor)
    reading = (read_weights(sizes, width, rows) / tensor + cached) / (device.reading * device.decoding_reads)
    flops = forward_flops(sizes, Tokens(rows, rows * context, rows)) / tensor
    computing = flops / (device.peak(width) * device.decoding)
    both = max(reading, computing) if device.overlaps else reading + computing
    return both + sizes.layers * device.launch + _reducing(sizes, device, width, rows, tensor, 1)


def _reducing(sizes: ModelSizes, device: Device, width: int, tokens: float, tensor: int, passes: int) -> float:
    """Seconds of the two all-reduces per layer of a tensor-parallel engine: transfer time plus one hop each."""
    if tensor == 1:
        return 0.0
    sent = reduced_bytes(sizes, width, tokens, tensor) / device.bandwidth(tensor)
    return sent + passes * 2 * sizes.layers * HOP


def decoding_seconds(
    sizes: ModelSizes, device: Device, episodes: Episodes, width: int, slots: int, tensor: int = 1
) -> float:
    """Seconds to sample all answers on one engine of `tensor` devices with `slots` concurrent sequences."""
    full, tail, rows = decoding_steps(episodes.count, slots, episodes.answer, episodes.longest)
    context = episodes.prompt + (episodes.observed + episodes.answer) / 2
    busy = full * step_seconds(sizes, device, min(episodes.count, slots), context, width, tensor)
    return busy + tail * step_seconds(sizes, device, rows, context, width, tensor)


def steady_seconds(
    sizes: ModelSizes, device: Device, episodes: Episodes, width: int, slots: int, tensor: int, async_rollouts: int
) -> float:
    """Seconds per step to sample its answers on one engine that never drains.

    The engine may start answers of `async_rollouts` further steps. With N answers in flight, t seconds per decoding step
    and n answers per step, the time is n x mean x t / N (Little's law). It is at least longest x t / (async_rollouts + 1),
    because the longest answer may span at most async_rollouts + 1 steps.
    """
    rows = min(slots, episodes.count * (async_rollouts + 1))
    context = episodes.prompt + (episodes.observed + episodes.answer) / 2
    steps = max(episodes.count * episodes.answer / rows, episodes.longest / (async_rollouts + 1))
    return steps * step_seconds(sizes, device, rows, context, width, tensor)


def optimizer_seconds(trained: int, device: Device, placement: Placement, width: int) -> float:
    """Seconds of one AdamW step over `trained` parameters, from the bytes moved per parameter.

    AdamW reads gradient, master weight and two moments (16), reads the gradient again for its norm (4), writes master
    weight and moments (12), and writes the bfloat16 weight if there is one (2). With offloading, float32 gradients move to
    the host and weights move back. All traffic then counts at `Device.host`, which is an optimistic estimate.
    """
    moved = (34 if width == 2 else 32) * trained / placement.shard
    if not placement.offloaded:
        return moved / device.reading
    if device.host is None:
        return moved / device.reading
    return (moved + (4 + width) * trained / placement.shard) / device.host


def transfer_seconds(
    sizes: ModelSizes, device: Device, placement: Placement, width: int, how: WeightTransfer = "files"
) -> float:
    """Seconds to send new weights by `engine.weight_transfer` to engines that have a copy of them.

    `files`: copies through CPU memory, fewer without Ray (no `placement.engines`). `ipc`: the learner packs a buffer on the
    GPU and the engine copies from it, two reads and two writes of every weight. `nccl`: a broadcast over the network; between
    CPUs, gloo counts as one copy.
    """
    sent = width * sizes.parameters
    if how == "ipc":
        return 4 * sent / device.reading
    if how == "files":
        return (HOST_COPIES_RAY if placement.engines else HOST_COPIES) * sent / HOST_COPY
    return sent / (HOST_COPY if device.network is None else device.network * SYNC)
