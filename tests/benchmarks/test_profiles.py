"""Profiles of the stages: how operators are summed up, and one real profile."""

import profiles
import pytest

from tests.benchmarks.conftest import output_of


def test_time_outside_of_operators_is_listed():
    found = profiles.shares(
        {"aten::mm": 2.0, "aten::bmm": 1.0, "_SegmentAttention": 0.5, "kernel attend": 0.5, "aten::unheard_of": 0.5},
        10.0,
    )
    assert found["products of projections"] == 0.2
    assert found["attention"] == pytest.approx(0.15)
    assert found[profiles.OTHER] == 0.05
    assert found[profiles.OUTSIDE] == pytest.approx(0.55)
    assert sum(found.values()) == pytest.approx(1)


def test_operators_that_run_beside_the_steps_make_no_negative_share():
    assert profiles.shares({"aten::mm": 12.0}, 10.0)[profiles.OUTSIDE] == 0


@pytest.mark.slow
def test_a_stage_is_profiled():
    words = ["--model", "qwen3", "--stages", "sft", "--rows", "2", "--threads", "1"]
    assert "products of projections" in output_of("profiles", *words)
