"""Seconds of each kind of work, from what it computes, reads and sends and from what devices can do at most.

Not covered: environments and judges, uneven lengths between devices, start-up, checkpoints, and the metrics and files of
a step, which on a processor are most of the time of a very small model.
"""

import math

from posttrain.planning.devices import HOP, SYNC, Device
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
    """Forward and backward passes over `tokens`, evenly over the learner's devices, in passes of `tokens_per_batch` each.

    Products at their share of the peak, and each number kept for the backward pass moved `Device.moved` times; a forward
    pass more with `checkpointing`. Sharded weights are gathered forward and backward, and gradients divided, in every
    pass (Rajbhandari et al. 2019, arXiv 1910.02054, section 7.2.2), while the device computes: the longer of both counts.
    Copies of a shard sum their gradients once. Tokens on their way to experts are waited for.
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
    """Forward passes without gradients over the learner's devices: log-probabilities, values or rewards."""
    each = tokens * (1 / placement.devices)
    passes = math.ceil(each.count / tokens_per_batch)
    computing = forward_flops(sizes, each) / (device.peak(width) * device.products)
    # Of what a backward pass would need, a third of the movements is in the forward pass.
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
    """Putting the divided weights together once, layer after layer."""
    if placement.shard == 1:
        return 0.0
    sent = gathered_bytes(sizes, width, placement.shard, placement.expert_parallel)
    return sent / device.bandwidth(placement.shard)


def prefill_seconds(
    sizes: ModelSizes, device: Device, tokens: Tokens, width: int, tensor: int = 1, tokens_per_forward: int = 2048
) -> float:
    """Reading prompts on one engine of `tensor` devices."""
    computing = forward_flops(sizes, tokens) / tensor / (device.peak(width) * device.products)
    kept = tokens.count * width * sizes.layers * layer_activations(sizes) / tensor
    computing += kept * device.moved / 3 / device.reading
    passes = math.ceil(tokens.count / tokens_per_forward)
    reading = passes * read_weights(sizes, width, tokens_per_forward) / tensor / device.reading
    return max(computing, reading) + _reducing(sizes, device, width, tokens.count, tensor, passes)


def step_seconds(sizes: ModelSizes, device: Device, rows: float, context: float, width: int, tensor: int = 1) -> float:
    """One decoding step of an engine: a token for each of `rows` sequences that see `context` tokens on average.

    Weights and caches are read once, and every row passes every product; the longer counts, or their sum where the device
    does not read while it computes. The cache of a head is never divided.
    """
    cached = rows * context * cache_bytes(sizes, width, tensor)
    reading = (read_weights(sizes, width, rows) / tensor + cached) / (device.reading * device.decoding_reads)
    flops = forward_flops(sizes, Tokens(rows, rows * context, rows)) / tensor
    computing = flops / (device.peak(width) * device.decoding)
    both = max(reading, computing) if device.overlaps else reading + computing
    return both + sizes.layers * device.launch + _reducing(sizes, device, width, rows, tensor, 1)


def _reducing(sizes: ModelSizes, device: Device, width: int, tokens: float, tensor: int, passes: int) -> float:
    """Sums over the devices of an engine, two a layer: what is sent, and a hop each."""
    if tensor == 1:
        return 0.0
    sent = reduced_bytes(sizes, width, tokens, tensor) / device.bandwidth(tensor)
    return sent + passes * 2 * sizes.layers * HOP


def decoding_seconds(
    sizes: ModelSizes, device: Device, episodes: Episodes, width: int, slots: int, tensor: int = 1
) -> float:
    """Sampling all answers on one engine of `tensor` devices that holds `slots` sequences."""
    full, tail, rows = decoding_steps(episodes.count, slots, episodes.answer, episodes.longest)
    context = episodes.prompt + (episodes.observed + episodes.answer) / 2
    busy = full * step_seconds(sizes, device, min(episodes.count, slots), context, width, tensor)
    return busy + tail * step_seconds(sizes, device, rows, context, width, tensor)


def steady_seconds(
    sizes: ModelSizes, device: Device, episodes: Episodes, width: int, slots: int, tensor: int, async_rollouts: int
) -> float:
    """Sampling the answers of a step on one engine that never drains, for it may begin those of `async_rollouts` further steps.

    With N answers in flight, a decoding step of t seconds and n answers a step, that is n x mean x t / N (Little's law), and
    no less than longest x t / (async_rollouts + 1), for the longest answer may span so many steps and no more.
    """
    rows = min(slots, episodes.count * (async_rollouts + 1))
    context = episodes.prompt + (episodes.observed + episodes.answer) / 2
    steps = max(episodes.count * episodes.answer / rows, episodes.longest / (async_rollouts + 1))
    return steps * step_seconds(sizes, device, rows, context, width, tensor)


def optimizer_seconds(trained: int, device: Device, placement: Placement, width: int) -> float:
    """AdamW over `trained` parameters: bytes moved. Gradient, master and two moments are read (16), gradients once more for
    their norm (4), master and moments written (12), and the bfloat16 weight beside a master (2).

    Offloaded: gradients in float32 go to the processors and weights come back, and the state is moved there, at the speed
    of `Device.host`, which is generous.
    """
    moved = (34 if width == 2 else 32) * trained / placement.shard
    if not placement.offloaded:
        return moved / device.reading
    if device.host is None:
        return moved / device.reading
    return (moved + (4 + width) * trained / placement.shard) / device.host


def sync_seconds(sizes: ModelSizes, device: Device, placement: Placement, width: int) -> float:
    """New weights for the engines; nothing where the engine uses the learner's."""
    if not placement.engines or device.network is None:
        return 0.0
    return width * sizes.parameters / (device.network * SYNC)
