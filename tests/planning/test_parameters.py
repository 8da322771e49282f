"""Parameters of model sizes: by hand for tiny shapes, and of published models."""

from dataclasses import replace

import pytest

from posttrain.planning.memory import ModelSizes

# One layer: queries 3x4, keys and values 3x2 each, output 4x3, and three matrices 3x5.
DENSE = ModelSizes(0, 2, 3, 5, 2, 1, 2, 7)
LAYER = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 3 * 5
MIXTURE = replace(DENSE, experts=4, experts_per_token=2)
SHARED = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 4
EXPERT = 3 * 3 * 5


def test_parameters_by_hand_of_a_dense_model_and_of_one_that_stores_all_experts():
    assert (DENSE.layer, DENSE.active_layer, DENSE.head) == (LAYER, LAYER, 21)
    assert DENSE.computed_parameters == 21 + 2 * (LAYER + 6) + 3
    assert replace(DENSE, tied=False).computed_parameters == DENSE.computed_parameters + 21
    assert (MIXTURE.layer, MIXTURE.active_layer) == (SHARED + 4 * EXPERT, SHARED + 2 * EXPERT)
    assert MIXTURE.computed_parameters == 21 + 2 * (SHARED + 4 * EXPERT + 6) + 3


def test_the_sizes_of_published_models_add_up():
    """Parameters as their model cards state them: 4.0, 32.8 and 235 billion, 22 of which are active."""
    qwen4 = ModelSizes(0, 36, 2560, 9728, 32, 8, 128, 151_936)
    qwen32 = ModelSizes(0, 64, 5120, 25_600, 64, 8, 128, 151_936, tied=False)
    qwen235 = ModelSizes(0, 94, 4096, 1536, 64, 4, 128, 151_936, experts=128, experts_per_token=8, tied=False)
    found = [sizes.computed_parameters / 1e9 for sizes in (qwen4, qwen32, qwen235)]
    assert found == pytest.approx([4.02, 32.8, 235.1], rel=2e-3)
    active = qwen235.layers * qwen235.active_layer + 2 * qwen235.head
    assert active / 1e9 == pytest.approx(22.2, rel=2e-3)
