"""Operations and weights read: by hand for tiny shapes."""

from dataclasses import replace

import pytest
from harness import flops

from posttrain.planning.memory import ModelSizes

# One layer: queries 3x4, keys and values 3x2 each, output 4x3, and three matrices 3x5.
DENSE = ModelSizes(0, 2, 3, 5, 2, 1, 2, 7)
LAYER = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 3 * 5
MIXTURE = replace(DENSE, experts=4, experts_per_token=2)
SHARED = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 4
EXPERT = 3 * 3 * 5


def test_a_mixture_computes_with_active_experts():
    ten = flops.Tokens(10, 0)
    assert flops.forward_flops(MIXTURE, ten) == 2 * 10 * 2 * (SHARED + 2 * EXPERT)
    more = replace(MIXTURE, experts=8)
    assert flops.forward_flops(more, ten) - flops.forward_flops(MIXTURE, ten) == 2 * 10 * 2 * (
        3 * 4
    )  # a wider router alone


def test_operations_by_hand():
    rows = flops.rows_of(2, 3, 1)
    assert rows == flops.Tokens(6, 12, 2)  # 1 + 2 + 3 pairs a row
    products = 2 * 6 * 2 * LAYER + 2 * 2 * 21
    assert flops.forward_flops(DENSE, rows) == products + 4 * 2 * 2 * 2 * 12
    assert flops.training_flops(DENSE, rows) == 3 * flops.forward_flops(DENSE, rows)
    assert flops.training_flops(DENSE, rows, frozen=True) == 2 * products + 3 * 4 * 2 * 2 * 2 * 12


def test_weights_that_a_pass_reads():
    assert flops.read_weights(DENSE, 2, 1) == flops.read_weights(DENSE, 2, 99) == 2 * (2 * LAYER + 21)
    assert flops.touched_experts(MIXTURE, 1) == 2
    assert flops.touched_experts(MIXTURE, 2) == 3  # 2 of 4, and half of the other two
    assert flops.read_weights(MIXTURE, 1, 1) == 2 * (SHARED + 2 * EXPERT) + 21
    assert flops.read_weights(MIXTURE, 1, 1000) == pytest.approx(2 * (SHARED + 4 * EXPERT) + 21)
