"""Operations and weights read: by hand for tiny shapes."""

from dataclasses import replace

import pytest
from harness import flops

from tests.planning.test_cost_memory import BY_HAND, EXPERT, LAYER, OF_EXPERTS, SHARED


def test_a_mixture_computes_with_active_experts():
    ten = flops.Tokens(10, 0)
    assert flops.forward_flops(OF_EXPERTS, ten) == 2 * 10 * 2 * (SHARED + 2 * EXPERT)
    more = replace(OF_EXPERTS, experts=8)
    assert flops.forward_flops(more, ten) - flops.forward_flops(OF_EXPERTS, ten) == 2 * 10 * 2 * (
        3 * 4
    )  # a wider router alone


def test_operations_by_hand():
    rows = flops.rows_of(2, 3, 1)
    assert rows == flops.Tokens(6, 12, 2)  # 1 + 2 + 3 pairs a row
    products = 2 * 6 * 2 * LAYER + 2 * 2 * 21
    assert flops.forward_flops(BY_HAND, rows) == products + 4 * 2 * 2 * 2 * 12
    assert flops.training_flops(BY_HAND, rows) == 3 * flops.forward_flops(BY_HAND, rows)
    assert flops.training_flops(BY_HAND, rows, frozen=True) == 2 * products + 3 * 4 * 2 * 2 * 2 * 12


def test_weights_that_a_pass_reads():
    assert flops.read_weights(BY_HAND, 2, 1) == flops.read_weights(BY_HAND, 2, 99) == 2 * (2 * LAYER + 21)
    assert flops.touched_experts(OF_EXPERTS, 1) == 2
    assert flops.touched_experts(OF_EXPERTS, 2) == 3  # 2 of 4, and half of the other two
    assert flops.read_weights(OF_EXPERTS, 1, 1) == 2 * (SHARED + 2 * EXPERT) + 21
    assert flops.read_weights(OF_EXPERTS, 1, 1000) == pytest.approx(2 * (SHARED + 4 * EXPERT) + 21)
