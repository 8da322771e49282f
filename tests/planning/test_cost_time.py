"""Seconds by hand on a device of round numbers, and how they grow."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import InputError
from posttrain.planning.devices import DEVICES, HOP, HOST_COPIES, HOST_COPIES_RAY, HOST_COPY, SYNC, Device
from posttrain.planning.memory import ModelSizes, layer_activations
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.times import (
    decoding_seconds,
    forward_seconds,
    gathering_seconds,
    optimizer_seconds,
    prefill_seconds,
    steady_seconds,
    step_seconds,
    training_seconds,
    transfer_seconds,
)
from posttrain.planning.work import (
    Episodes,
    Tokens,
    forward_flops,
    gathered_bytes,
    read_weights,
    reduced_bytes,
    rows_of,
    training_flops,
)

SIZES = ModelSizes(2000, 2, 3, 5, 2, 1, 2, 7)
# Products alone: nothing else takes time.
PRODUCTS = Device("products", 100.0, 50.0, 1e30, products=0.5, decoding=0.25, moved=0.0, launch=0.0)
# Memory alone.
READING = Device("reading", 1e30, 1e30, 10.0, decoding_reads=0.5, moved=4.0, launch=0.0)
LINKS = Device("links", 1e30, 1e30, 1e30, link=20.0, network=5.0, host=2.0, links=0.5, per_node=4, launch=0.0)
ROWS = rows_of(4, 6, 2)


def test_products():
    flops = training_flops(SIZES, ROWS)
    assert training_seconds(SIZES, PRODUCTS, ALONE, ROWS, 2, 100) == flops / 50
    assert training_seconds(SIZES, PRODUCTS, ALONE, ROWS, 4, 100) == flops / 25  # float32 at half the peak
    again = training_seconds(SIZES, PRODUCTS, ALONE, ROWS, 2, 100, checkpointing=True)
    assert again == pytest.approx((flops + forward_flops(SIZES, ROWS)) / 50)
    adapters = training_seconds(SIZES, PRODUCTS, ALONE, ROWS, 2, 100, whole=False, checkpointing=True)
    assert adapters == pytest.approx((2 + 1) * forward_flops(SIZES, ROWS) / 50)
    assert forward_seconds(SIZES, PRODUCTS, ALONE, ROWS, 2, 100) == forward_flops(SIZES, ROWS) / 50
    assert training_seconds(SIZES, replace(PRODUCTS, link=1e30), Placement(2), ROWS, 2, 100) == flops / 2 / 50


def test_movements():
    kept = ROWS.count * 2 * 2 * layer_activations(SIZES)
    assert training_seconds(SIZES, READING, ALONE, ROWS, 2, 100) == pytest.approx(4 * kept / 10)
    assert forward_seconds(SIZES, READING, ALONE, ROWS, 2, 100) == pytest.approx(4 * kept / 3 / 10)
    few = Tokens(1, 1)
    assert forward_seconds(SIZES, replace(READING, moved=0.0), ALONE, few, 2, 100) == read_weights(SIZES, 2, 100) / 10


def test_a_decoding_step():
    rows, context = 3, 10
    weights, cache = read_weights(SIZES, 2, rows), rows * context * (2 * 2 * 2 * 2)
    assert step_seconds(SIZES, READING, rows, context, 2) == (weights + cache) / 5
    flops = forward_flops(SIZES, Tokens(rows, rows * context, rows))
    assert step_seconds(SIZES, PRODUCTS, rows, context, 2) == pytest.approx(flops / 25)
    both = replace(READING, bfloat16=100.0, decoding=0.25)
    longer = max((weights + cache) / 5, flops / 25)
    assert step_seconds(SIZES, both, rows, context, 2) == pytest.approx(longer)
    one_by_one = replace(both, overlaps=False, launch=7.0)
    assert step_seconds(SIZES, one_by_one, rows, context, 2) == pytest.approx((weights + cache) / 5 + flops / 25 + 14)


def test_an_engine_of_two_devices():
    sent = reduced_bytes(SIZES, 2, 3, 2)
    assert step_seconds(SIZES, LINKS, 3, 10, 2, tensor=2) == pytest.approx(sent / 10 + 4 * HOP)
    # One head of keys is on both.
    halved = read_weights(SIZES, 2, 3) / 2 + 3 * 10 * 16
    assert step_seconds(SIZES, replace(READING, link=1e30), 3, 10, 2, 2) == pytest.approx(halved / 5 + 4 * HOP)
    with pytest.raises(InputError, match="reading has no link to other devices"):
        step_seconds(SIZES, READING, 3, 10, 2, tensor=2)


def test_sampling_of_all_answers():
    job = Episodes(groups=2, size=2, prompt=4, answer=5, longest=5)
    step = step_seconds(SIZES, READING, 4, 4 + 2.5, 2)
    assert decoding_seconds(SIZES, READING, job, 2, 8) == 5 * step
    half = step_seconds(SIZES, READING, 2, 4 + 2.5, 2)
    assert decoding_seconds(SIZES, READING, job, 2, 2) == pytest.approx(2 * 5 * half)
    # An engine that never drains gives as many answers with no tail.
    longer = replace(job, longest=10)
    eight = step_seconds(SIZES, READING, 8, 6.5, 2)
    assert steady_seconds(SIZES, READING, longer, 2, 64, 1, async_rollouts=1) == pytest.approx(
        5 * eight
    )  # 10 / 2 steps
    # With two further steps 12 are in flight; 4 x 5 / 12 steps would do, but the longest needs 10 / 3.
    twelve = step_seconds(SIZES, READING, 12, 6.5, 2)
    assert steady_seconds(SIZES, READING, longer, 2, 64, 1, async_rollouts=2) == pytest.approx(10 / 3 * twelve)


def test_sharding():
    four = Placement(4, 4)
    once = gathered_bytes(SIZES, 2, 4) / 10
    assert gathering_seconds(SIZES, LINKS, four, 2) == once
    assert gathering_seconds(SIZES, LINKS, ALONE, 2) == 0
    # 24 tokens, 6 a device, in passes of 4: gathered forward and backward and divided, twice.
    assert training_seconds(SIZES, LINKS, four, ROWS, 2, 4) == pytest.approx(2 * 3 * once)
    # Eight devices are two nodes, as slow as the network.
    eight = gathered_bytes(SIZES, 2, 8) / 2.5
    assert forward_seconds(SIZES, LINKS, Placement(8, 8), ROWS, 2, 100) == pytest.approx(eight)
    copies = training_seconds(SIZES, LINKS, Placement(8, 4), ROWS, 2, 100)
    summed = 2 * 1 / 2 * 2 * (2 * SIZES.layer + 2 * SIZES.head) / 4 / 2.5
    assert copies == pytest.approx(3 * once + summed)


def test_optimizer_and_weights():
    assert optimizer_seconds(100, READING, ALONE, 2) == 34 * 100 / 10
    assert optimizer_seconds(100, READING, ALONE, 4) == 32 * 100 / 10
    assert optimizer_seconds(100, READING, Placement(4, 4), 2) == 34 * 25 / 10
    assert optimizer_seconds(100, LINKS, Placement(1, offloaded=True), 2) == pytest.approx((34 + 6) * 100 / 2)
    apart = Placement(4, 4, engines=1, colocated=False)
    assert transfer_seconds(SIZES, LINKS, apart, 2, "nccl") == pytest.approx(2 * 2000 / (5 * SYNC))
    assert transfer_seconds(SIZES, LINKS, apart, 2, "ipc") == pytest.approx(4 * 2 * 2000 / 1e30)
    assert transfer_seconds(SIZES, READING, apart, 2, "nccl") == pytest.approx(2 * 2000 / HOST_COPY)
    assert transfer_seconds(SIZES, LINKS, ALONE, 2) == pytest.approx(HOST_COPIES * 2 * 2000 / HOST_COPY)
    assert transfer_seconds(SIZES, LINKS, apart, 2) == pytest.approx(HOST_COPIES_RAY * 2 * 2000 / HOST_COPY)


SIZED = st.builds(
    lambda layers, hidden, inner, keys, experts: ModelSizes(
        0, layers, 64 * hidden, 64 * inner, 4 * keys, keys, 64, 32_000, experts, min(2, experts)
    ),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 80),
    st.integers(1, 8),
    st.sampled_from([0, 4, 64]),
)
ANY_DEVICE = st.sampled_from(list(DEVICES.values()))


@settings(deadline=None)
@given(SIZED, ANY_DEVICE, st.integers(1, 4000), st.integers(1, 4000), st.integers(0, 3000), st.sampled_from([2, 4]))
def test_longer_contexts_never_take_less_time(sizes, device, prompt, answer, more, width):
    short = Episodes(4, 4, prompt, answer, 2 * answer)
    for long in (
        replace(short, prompt=prompt + more),
        replace(short, observed=more),
        replace(short, answer=answer + more, longest=2 * answer + 2 * more),
    ):
        for seconds in (
            lambda job: decoding_seconds(sizes, device, job, width, 8),
            lambda job: prefill_seconds(sizes, device, job.prefilled, width),
            lambda job: training_seconds(sizes, device, ALONE, job.learned, width, 4096),
            lambda job: forward_seconds(sizes, device, ALONE, job.learned, width, 4096),
        ):
            assert seconds(long) >= seconds(short) * (1 - 1e-9)


@settings(deadline=None)
@given(SIZED, st.sampled_from(["h200", "h100", "a100"]), st.integers(1, 512), st.integers(1, 8000))
def test_more_sequences_never_make_a_step_shorter_or_a_token_slower(sizes, name, rows, context):
    device = DEVICES[name]
    one, more = (step_seconds(sizes, device, count, context, 2) for count in (rows, 2 * rows))
    assert one <= more * (1 + 1e-9)
    assert more <= 2 * one * (1 + 1e-9)
