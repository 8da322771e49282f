"""The model against recorded measurements, and the tables of docs/results/scaling_tables.md."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGE, TINY = 1.4, 1.75
"""Factors that predictions are within: of SmolLM2-135M, and of a model of 4 million parameters, most of whose time on two
cores is not in products."""


@pytest.fixture(scope="module")
def planned():
    """The modules of `benchmarks/planned`, imported as the script imports them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import planned.clusters
    import planned.measured
    import planned.topologies

    yield planned
    sys.path.remove(str(ROOT / "benchmarks"))


def test_predictions_are_near_recorded_measurements(planned):
    records = planned.measured.RECORDS
    assert len(records) > 15
    assert sum(record.fitted for record in records) == 2
    for record in records:
        bound = TINY if "Qwen3" in record.what else LARGE
        assert 1 / bound < record.ratio < bound, (record.what, record.ratio)


def test_recorded_measurements_are_those_of_the_page(planned):
    page = (ROOT / "docs" / "results" / "speed.md").read_text()
    for record in planned.measured.RECORDS:
        spelt = {f"{record.measured:,.0f}", f"{record.measured:g}"}
        assert any(f"| {number} |" in page or f" {number} ms" in page for number in spelt), record.what


def test_every_fastest_setting_fits_and_is_no_slower_than_a_baseline_that_fits(planned):
    clusters = planned.clusters
    for name, sizes in planned.clusters.MODELS.items():
        baseline = clusters.plan(clusters.baseline(name, 64), sizes)
        best = clusters.best(name, 64, async_rollouts=0)
        assert best is not None
        assert best.fits
        assert max(best.learning, best.sampling) < 0.9 * clusters.DEVICE.memory
        assert best.seconds <= baseline.seconds or not baseline.fits


def test_a_whole_235b_does_not_fit_on_eight(planned):
    assert planned.clusters.best("Qwen3-235B-A22B", 8, async_rollouts=0) is None
    assert planned.clusters.best("Qwen3-235B-A22B", 8, async_rollouts=0, lora=True) is not None


def test_idle_gpus_in_the_published_placements(planned):
    topologies = planned.topologies
    found = {(job, name): topologies.busy(p) for job, plans in topologies.PLANS.items() for name, p in plans.items()}
    assert all(0 < gpus <= 8 + 1e-9 for gpus in found.values())
    assert found["PPO", "as published"] < 2.5
    assert found["PPO", "colocated"] == pytest.approx(8)
    assert found["SFT", "as published"] < found["SFT", "optimizer on the GPUs"]
    for job, plans in topologies.PLANS.items():
        rows = topologies.table(job)
        for placement in plans:
            column = f"{placement}, s"
            assert sum(row[column] or 0 for row in rows[:-1]) == pytest.approx(rows[-1][column])


def test_the_longest_run_determines_the_time_of_a_parallel_search(planned):
    last, work, idle = planned.topologies.search_in_parallel()
    assert idle == pytest.approx(1 - work / (8 * last))
    assert idle > 0.2
    assert last == pytest.approx(planned.topologies.search_run(4, 16))
    first, same, none = planned.topologies.search_in_parallel(gpus=1)
    assert (first, none) == (pytest.approx(same), pytest.approx(0))
    assert same == pytest.approx(work)


def test_the_page_contains_the_tables_that_the_script_prints(planned, monkeypatch, capsys):
    import scaling

    tables = "measured,published,baseline,best,PPO,DRCA,memory-agent,SFT,DPO,reward-model,search"
    monkeypatch.setattr(sys, "argv", ["scaling", "--markdown", "--tables", tables])
    scaling.main()
    page = (ROOT / "docs" / "results" / "scaling_tables.md").read_text()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) > 50
    assert [row for row in rows if row not in page] == []
