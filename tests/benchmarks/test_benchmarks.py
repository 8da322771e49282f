"""The learner's benchmarks run and measure the same work on both sides."""

import json
import math
import subprocess
import sys
from pathlib import Path

import harness.data
import harness.models
import harness.table
import harness.timing
import numpy as np
import pytest

from tests.benchmarks.conftest import output_of

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(part: str, tmp_path: Path, *options: str) -> dict:
    """The table of a part of `speed_trl.py` at its smallest, as it writes it."""
    pytest.importorskip("trl")
    file = tmp_path / "table.json"
    smallest = "--steps 2 --rounds 1 --threads 1 --warmup 1 --json"
    output_of("speed_trl", part, *smallest.split(), str(file), *options)
    return json.loads(file.read_text())


def check(rows: list[dict], unit: str) -> None:
    for row in rows:
        assert row["tokens/s"] > 0
        assert row["tokens/s"] / row[f"{unit}/s"] == pytest.approx(row[f"tokens/{unit.removesuffix('s')}"], rel=1e-6)
        assert 0.1 < row["peak GB"] < 20
    assert max(row["x TRL best"] for row in rows if row["side"].startswith("TRL")) == 1
    compared = "answers/s" if unit == "answers" else "tokens/s"
    default = next((row for row in rows if row["side"] == "TRL defaults"), None)
    for row in rows:
        expected = None if default is None else pytest.approx(row[compared] / default[compared])
        assert row["x TRL defaults"] == expected


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_auto_takes_at_most_a_twentieth_longer_than_the_faster_precision(tmp_path):
    """By processor time, in turn. Sides of equal precision are the same program, so each precision has its least time."""
    from learners.job import OURS, Job
    from transformers import AutoTokenizer

    model = harness.models.model_directory("qwen3")
    rows = harness.table.write_lines(
        tmp_path / "rows.jsonl", harness.data.chat_rows(AutoTokenizer.from_pretrained(model), 24)
    )
    jobs = {side.name: Job("sft", str(model), str(rows), 1, 2, 8, 1, 0, side.settings).as_json() for side in OURS}
    found = harness.timing.in_turn(
        {
            name: lambda _, job=job: harness.timing.run_side("learners.posttrain_side", job, 1)
            for name, job in jobs.items()
        },
        rounds=2,
    )
    least: dict[str, float] = {}
    for outcome in (one for outcomes in found.values() for one in outcomes):
        least[outcome["dtype"]] = min(least.get(outcome["dtype"], math.inf), outcome["processor"])
    print(least, {name: [(one["dtype"], one["processor"]) for one in outcomes] for name, outcomes in found.items()})
    assert set(least) == {"float32", "bfloat16"}
    for outcome in found["posttrain auto"]:
        assert least[outcome["dtype"]] <= 1.05 * min(least.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "unit", "stages"),
    [
        ("sft", "rows", ["sft"]),
        ("reward", "pairs", ["reward"]),
        ("dpo", "pairs", ["dpo"]),
        ("rl", "answers", ["rloo", "grpo"]),
    ],
)
@pytest.mark.timeout(3600)
def test_every_side_of_every_part(part, unit, stages, tmp_path):
    table = run(part, tmp_path, "--rows", "8")
    emulated = harness.models.emulates_bfloat16()  # TRL's defaults and its other sides in bfloat16 are then left out
    for stage in stages:
        rows = [row for row in table["rows"] if row["stage"] == stage]
        assert len(rows) >= (3 if emulated else 5)
        assert any(row["side"] == "TRL defaults" for row in rows) == (not emulated)
        check(rows, unit)
        if stage == "sft":
            # These take the same rows, and a random model is as good as a guess among its 4096 tokens. TRL counts the line break
            # after the end token, posttrain does not.
            alike = [row for row in rows if row["side"].startswith("posttrain") or row["side"] == "TRL defaults"]
            assert all(row["loss"] == pytest.approx(math.log(4096), rel=0.02) for row in alike)
            lengths = [row["tokens/row"] for row in alike]
            assert max(lengths) - min(lengths) < 1.5
        if stage == "dpo":
            # With equal rewards at the start, every pair costs ln 2.
            assert all(row["loss"] == pytest.approx(math.log(2), rel=0.02) for row in rows)
        if stage in ("rloo", "grpo"):
            assert len({row["tokens/answer"] for row in rows}) == 1


def test_sides_take_turns_and_warm_up():
    calls: list[tuple[str, int]] = []

    def side(name):
        return lambda number: calls.append((name, number)) or number

    found = harness.timing.in_turn({"a": side("a"), "b": side("b")}, rounds=2, warmup=1, say=lambda line: None)
    assert calls == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert found == {"a": [0, 1], "b": [0, 1]}
    assert harness.timing.ratio([1, 2, 9], [4, 4, 4]) == 0.5
    assert len(harness.timing.seconds_of(lambda: None, repeats=3, warmup=2)) == 3


def test_peak_memory_includes_allocated_memory():
    code = (
        "from harness.timing import peak_memory; before = peak_memory(); held = b'x' * 200_000_000; del held;"
        "print(peak_memory() - before)"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True)
    assert 190e6 < int(printed.stdout) < 300e6


def test_lengths_are_lognormal_and_each_step_has_the_same_sum():
    drawn = harness.data.ROWS.draw(4000, np.random.default_rng(0))
    assert np.mean(drawn) == pytest.approx(140 * math.exp(0.635**2 / 2), rel=0.02)
    assert np.percentile(drawn, 95) == pytest.approx(398, rel=0.02)
    steps = [harness.data.answer_lengths(step, 16) for step in range(3)]
    assert steps[0] != steps[1]
    assert len({tuple(sorted(step)) for step in steps}) == 1
    assert steps[0] == harness.data.answer_lengths(0, 16)


def test_rows_have_the_requested_lengths(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def tokens(messages):
        return len(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])

    rows = harness.data.chat_rows(tokenizer, 64)
    assert rows == harness.data.chat_rows(tokenizer, 64)
    mean = np.mean([tokens(row["prompt"] + row["completion"]) for row in rows])
    assert mean == pytest.approx(171, rel=0.1)
    for row in harness.data.preference_rows(tokenizer, 8):
        assert row["chosen"] != row["rejected"]
    for row in harness.data.prompt_rows(tokenizer, 32):
        assert 25 <= tokens(row["prompt"]) <= 165


@pytest.mark.slow
def test_the_learning_benchmark_runs_once_and_reports_again(tmp_path):
    """Two runs of the bandit, a table with both, and curves; the second call trains nothing."""
    words = ["--environments", "bandit", "--variants", "base,no warm-up", "--seeds", "1", "--jobs", "2"]
    for trained in (2, 0):
        assert output_of("learning", *words, "--out", str(tmp_path)).count(" -> ") == trained
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["variant"] for line in sorted(lines, key=lambda line: line["variant"])] == ["base", "no warm-up"]
    for line in lines:
        steps, seconds, rates = zip(*line["curve"], strict=True)
        assert steps == (0, 5, 10, 15, 20)
        assert list(seconds) == sorted(seconds)
        assert line["final"] > line["start"]
        assert rates[0] < rates[-1]
    table = (tmp_path / "learning.md").read_text()
    assert "### bandit" in table
    assert [row.split(" | ")[:2] for row in table.splitlines()[-2:]] == [["| base", "1"], ["| no warm-up", "1"]]
    assert "nan" not in table
