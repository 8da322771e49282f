"""What phases compute, read and send: by hand for tiny shapes, and how it grows."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.planning.memory import ModelSizes
from posttrain.planning.work import (
    Episodes,
    Tokens,
    decoding_steps,
    forward_flops,
    gathered_bytes,
    moved_tokens_bytes,
    read_weights,
    reduced_bytes,
    rows_of,
    touched_experts,
    training_flops,
)

# One layer: queries 3x4, keys and values 3x2 each, output 4x3, and three matrices 3x5.
DENSE = ModelSizes(0, 2, 3, 5, 2, 1, 2, 7)
LAYER = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 3 * 5
MIXTURE = replace(DENSE, experts=4, experts_per_token=2)
SHARED = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 4
EXPERT = 3 * 3 * 5


def test_parameters_by_hand():
    assert (DENSE.layer, DENSE.active_layer, DENSE.head) == (LAYER, LAYER, 21)
    assert DENSE.computed_parameters == 21 + 2 * (LAYER + 6) + 3
    assert replace(DENSE, tied=False).computed_parameters == DENSE.computed_parameters + 21


def test_a_mixture_computes_with_active_experts_and_stores_all():
    assert (MIXTURE.layer, MIXTURE.active_layer) == (SHARED + 4 * EXPERT, SHARED + 2 * EXPERT)
    assert MIXTURE.computed_parameters == 21 + 2 * (SHARED + 4 * EXPERT + 6) + 3
    ten = Tokens(10, 0)
    assert forward_flops(MIXTURE, ten) == 2 * 10 * 2 * (SHARED + 2 * EXPERT)
    more = replace(MIXTURE, experts=8)
    assert forward_flops(more, ten) - forward_flops(MIXTURE, ten) == 2 * 10 * 2 * (3 * 4)  # a wider router alone


def test_the_sizes_of_published_models_add_up():
    """Parameters as their model cards state them: 4.0, 32.8 and 235 billion, 22 of which are active."""
    qwen4 = ModelSizes(0, 36, 2560, 9728, 32, 8, 128, 151_936)
    qwen32 = ModelSizes(0, 64, 5120, 25_600, 64, 8, 128, 151_936, tied=False)
    qwen235 = ModelSizes(0, 94, 4096, 1536, 64, 4, 128, 151_936, experts=128, experts_per_token=8, tied=False)
    found = [sizes.computed_parameters / 1e9 for sizes in (qwen4, qwen32, qwen235)]
    assert found == pytest.approx([4.02, 32.8, 235.1], rel=2e-3)
    active = qwen235.layers * qwen235.active_layer + 2 * qwen235.head
    assert active / 1e9 == pytest.approx(22.2, rel=2e-3)


def test_operations_by_hand():
    rows = rows_of(2, 3, 1)
    assert rows == Tokens(6, 12, 2)  # 1 + 2 + 3 pairs a row
    products = 2 * 6 * 2 * LAYER + 2 * 2 * 21
    assert forward_flops(DENSE, rows) == products + 4 * 2 * 2 * 2 * 12
    assert training_flops(DENSE, rows) == 3 * forward_flops(DENSE, rows)
    assert training_flops(DENSE, rows, whole=False) == 2 * forward_flops(DENSE, rows)


def test_a_group_shares_its_prompt():
    job = Episodes(groups=2, size=3, prompt=4, answer=2, longest=5)
    assert (job.count, job.length) == (6, 6)
    # The prompt once: 1 + 2 + 3 + 4 pairs; answers see it and themselves.
    assert job.learned == Tokens(2 * 4 + 6 * 2, 2 * 10 + 6 * (2 * 4 + 3), 12)
    assert job.prefilled == Tokens(8, 20, 6)
    assert job.whole == Tokens(36, 6 * 21)
    # One episode of a group is a row: what it goes through is the same either way.
    single = replace(job, size=1)
    assert single.learned.pairs == single.whole.pairs


def test_engines_take_whole_groups_until_there_are_more_engines_than_groups():
    job = Episodes(groups=4, size=8, prompt=1, answer=1, longest=1)
    assert [(s.groups, s.size) for s in map(job.share, (1, 2, 3, 4, 8, 32, 64))] == [
        (4, 8),
        (2, 8),
        (2, 6),
        (1, 8),
        (1, 4),
        (1, 1),
        (1, 1),
    ]


def test_bytes_sent_by_hand():
    both = 2 * LAYER + 2 * 21
    assert gathered_bytes(DENSE, 2, 1) == 0
    assert gathered_bytes(DENSE, 2, 4) == 2 * both * 3 / 4
    whole = 2 * (2 * SHARED + 2 * 21 + 2 * 4 * EXPERT) * 3 / 4
    assert gathered_bytes(MIXTURE, 2, 4) == whole
    # Experts over all four devices are never gathered.
    assert gathered_bytes(MIXTURE, 2, 4, expert_parallel=4) == 2 * (2 * SHARED + 2 * 21) * 3 / 4
    assert moved_tokens_bytes(MIXTURE, 2, 10, 4) == 2 * 2 * 10 * 2 * 3 * 2 * 3 / 4
    assert reduced_bytes(DENSE, 2, 10, 2) == 2 * 2 * 10 * 3 * 2 * (2 * 1 / 2)
    assert reduced_bytes(DENSE, 2, 10, 1) == 0


def test_weights_that_a_pass_reads():
    assert read_weights(DENSE, 2, 1) == read_weights(DENSE, 2, 99) == 2 * (2 * LAYER + 21)
    assert touched_experts(MIXTURE, 1) == 2
    assert touched_experts(MIXTURE, 2) == 3  # 2 of 4, and half of the other two
    assert read_weights(MIXTURE, 1, 1) == 2 * (SHARED + 2 * EXPERT) + 21
    assert read_weights(MIXTURE, 1, 1000) == pytest.approx(2 * (SHARED + 4 * EXPERT) + 21)


def test_steps_of_decoding():
    assert decoding_steps(4, 8, 10, 30) == (0, 30, 4 * 10 / 30)  # all at once: as long as the longest
    assert decoding_steps(16, 8, 10, 30) == (10, 30, 8 * 10 / 30)
    assert decoding_steps(16, 8, 10, 10) == (10, 10, 8)  # answers of one length: two full rounds


@settings(deadline=None)
@given(
    st.integers(1, 500),
    st.integers(1, 64),
    st.floats(1, 1000),
    st.floats(1, 10),
)
def test_decoding_steps_sample_every_token(answers, slots, mean, spread):
    full, tail, rows = decoding_steps(answers, slots, mean, mean * spread)
    assert full * min(answers, slots) + tail * rows == pytest.approx(answers * mean)
    assert rows <= min(answers, slots) * (1 + 1e-9)
