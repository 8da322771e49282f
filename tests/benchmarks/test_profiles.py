"""Profiles of the stages: how operators and samples are summed up, and one real profile."""

import profiles
import pytest

from tests.benchmarks.conftest import output_of


def test_time_outside_of_operators_is_listed():
    found = profiles.shares({"aten::mm": 2.0, "aten::bmm": 1.0, "kernel attend": 0.5, "aten::unheard_of": 0.5}, 10.0)
    assert found["products of projections"] == 0.2
    assert found["products in attention"] == 0.1
    assert found[profiles.OTHER] == 0.05
    assert found[profiles.OUTSIDE] == pytest.approx(0.6)
    assert sum(found.values()) == pytest.approx(1)


def test_operators_that_run_beside_the_steps_make_no_negative_share():
    assert profiles.shares({"aten::mm": 12.0}, 10.0)[profiles.OUTSIDE] == 0


def test_samples_count_for_the_function_on_top_at_any_line():
    raw = "main (a.py:1);step (b.py:7) 6\nmain (a.py:1);step (b.py:9) 2\nmain (a.py:2) 2\n"
    assert profiles.lines(raw, 0.01) == [("step (b.py)", 0.8), ("main (a.py)", 0.2)]
    assert profiles.lines(raw, 0.5) == [("step (b.py)", 0.8)]


@pytest.mark.slow
def test_a_stage_is_profiled():
    words = ["--model", "qwen3", "--stages", "sft", "--rows", "2", "--threads", "1"]
    assert "products of projections" in output_of("profiles", *words)
