"""Every script of `benchmarks/` runs at its smallest size: here, or in the test named beside it."""

from pathlib import Path

import pytest

from tests.benchmarks.conftest import output_of

FOLDER = Path(__file__).parents[2] / "benchmarks"

ELSEWHERE = {
    "test_benchmarks": "learning speed_trl",
    "test_engine_benchmarks": "generation",
    "test_gpu_script": "gpu",
    **{f"test_{name}": name for name in ("coverage", "crosscheck")},
}
"""File of tests -> the scripts that it runs."""
HERE = {
    # A run takes seconds to a minute of one core; the stored ones are on the page.
    "audit_scorer": ("--table {docs}/results/audit_scorer.jsonl", "| all clean runs |"),
    # A run of its smallest entry takes four minutes of the 135M model; its recipes have tests of their own.
    "board": ("--table {docs}/results/board.jsonl", "| after RL"),
    # A run takes half a minute of one core; the stored ones are on the page.
    "claims": ("--table {docs}/results/claims.jsonl", "| credit |"),
    "contention": ("--seconds 1 --rounds 1 --busy 0,1", "of the quiet speed"),
    "credit_toy": ("--seeds 1 --steps 2 --rewards 5 --tasks additive", "additive"),
    "driver": ("--episodes 8 --tokens 4 --only bandit", "turns per processor second"),
    # It needs the package easy-vqa, and a run takes minutes; the stored ones are on the page.
    "easy_vqa": ("--table {docs}/results/easy_vqa.jsonl", "| real less blank |"),
    "families": ("llama stablelm doge", "| llama | packed | paged |"),
    # A run takes seconds to a minute of one core; the stored ones are on the page.
    "guards": ("--table {docs}/results/guards.jsonl", "| all planted |"),
    "house": ("--stages sft --files", "training/updater.py"),
    "intervals": ("--samples 5 --groups Differences", "mean of paired differences"),
    # A kill takes a minute; the stored ones are lines of the file.
    "kills": ("--table {docs}/results/kills.jsonl", "| checkpoint | same bits, 1 lost |"),
    "learning_trl": ("--tasks bandit --seeds 1 --learning-rates 1e-3 --out {out}", "posttrain"),
    "memory": ("--only 4B", "peak of an update, GiB"),
    "memory --row": ("--only 4096-False", "peak, GiB"),
    "power": ("--entries bandit --comparisons 20", "| bandit |"),
    "router_replay": ("--seeds 1 --steps 1", "router/changed"),
}


def test_every_script_is_run_by_a_test():
    elsewhere = [script for scripts in ELSEWHERE.values() for script in scripts.split()]
    assert sorted(file.stem for file in FOLDER.glob("*.py")) == sorted(
        [*elsewhere, *(name for name in HERE if " " not in name)]
    )
    for name in ELSEWHERE:
        assert "pytest.mark.slow" in Path(__file__).with_name(f"{name}.py").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", HERE)
def test_a_script_runs_at_its_smallest_size(name, tmp_path):
    words, printed = HERE[name]
    options = [word.format(docs=FOLDER.parent / "docs", out=tmp_path) for word in words.split()]
    assert printed in output_of(*name.split(), *options)
