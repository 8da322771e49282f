"""Verdicts: a run that learns, one that does not, and what sees them."""

import json
from pathlib import Path

import pytest

import posttrain
from posttrain.cli.main import main
from posttrain.evaluation.verdict import run_verdict
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import IMPROVED, NOTHING, read_verdict

LETTERS = Path(__file__).parents[1] / "training" / "letters.py"


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    made = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "ab" * 5}]}
        for n in range(60)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return file


def words(stage, tiny_model, tmp_path, *more):
    common = [f"model.path={tiny_model}", "model.threads=1", f"runs={tmp_path}", "plots=false", "--strict"]
    return [stage, *common, *more]


def rl(tiny_model, tmp_path, rate, *more):
    keys = [f"environment.type={LETTERS}", "environment.max_turns=1", "name=still", "steps=2", "evaluation.every=1"]
    keys += ["rollout.groups_per_step=2", "rollout.episodes_per_group=2", "rollout.tokens_per_turn=6"]
    keys += ["evaluation.seeds.count=2", "evaluation.final_seeds.count=6", "export=last"]
    return words("rl", tiny_model, tmp_path, *keys, f"optimizer.learning_rate={rate}", *more)


def test_a_run_that_does_not_move_ends_with_code_4_and_reasons(tiny_model, tmp_path, capsys):
    assert main(rl(tiny_model, tmp_path, 1e-12)) == 4
    run = tmp_path / "still"
    verdict = posttrain.Result.open(run).verdict
    assert verdict.outcome == NOTHING
    assert len(verdict.reasons) == 3
    assert any("optimizer.learning_rate 1e-12 is low" in reason for reason in verdict.reasons)
    printed = capsys.readouterr()
    assert NOTHING in printed.err.lower()
    for place in (printed.out, (run / "report.md").read_text()):
        assert all(" ".join(line.split()) in " ".join(place.split()) for line in verdict.lines)
    # A finished run keeps its verdict when it is named again.
    assert main(["rl", "--resume", str(run), "--strict"]) == 4


def test_without_a_start_there_is_no_verdict_and_strict_is_refused(tiny_model, tmp_path, capsys):
    assert main(rl(tiny_model, tmp_path, 1e-3, "evaluation.start=false")) == 2
    assert "evaluation.start" in capsys.readouterr().err
    assert read_verdict(tmp_path / "still") is None


def test_a_run_that_learns_its_rows_has_improved(tiny_model, tmp_path, rows):
    more = [f"data.train={rows}", "data.held_out=30", "name=learned", "epochs=3", "optimizer.learning_rate=3e-3"]
    assert main(words("sft", tiny_model, tmp_path, *more, "rows_per_update=10")) == 0
    assert read_verdict(tmp_path / "learned").outcome == IMPROVED
    # What is stored is enough: the verdict does not depend on the process that trained.
    (tmp_path / "learned" / "results.json").unlink()
    assert run_verdict(RunDirectory.open(tmp_path / "learned")).outcome == IMPROVED


def test_a_strict_pipeline_stops_at_the_stage_that_learned_nothing(tiny_model, tmp_path, rows, capsys):
    section = {"stage": "sft", "data": {"train": str(rows), "held_out": 30}, "epochs": 1, "rows_per_update": 30}
    stages = [
        {"name": "still", **section, "optimizer": {"learning_rate": 1e-12}},
        {"name": "after", **section, "model": {"path": "stage:still"}},
    ]
    common = {"model": {"path": str(tiny_model), "threads": 1}, "plots": False}
    file = tmp_path / "pipeline.yaml"
    file.write_text(json.dumps({"name": "chain", "runs": str(tmp_path), "common": common, "stages": stages}))
    assert main(["pipeline", str(file), "--strict"]) == 4
    assert not (tmp_path / "chain" / "after").exists()
    assert "stage still: Nothing was learned" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("alarm", "outcome"), [(None, IMPROVED), (1, IMPROVED), (2, NOTHING)])
def test_a_reward_that_rises_alone_is_not_learning(tmp_path, monkeypatch, alarm, outcome):
    """The audit of the exported checkpoint, of step 2, decides."""
    from posttrain.evaluation import verdict
    from posttrain.evaluation.results import MetricResult
    from posttrain.evaluation.statistics import item_means
    from posttrain.recipe.compose import load_recipe

    run = RunDirectory.create(load_recipe([], [f"runs={tmp_path}", "environment.type=bandit"], "rl"))
    lines = [{"step": 2, "kind": "final", "policy": "trained", "best_step": 2, "chosen": "best of the curve"}]
    for step in (1, 2) if alarm else ():
        message = f"audit of step {step}"
        lines.append({"step": step, "kind": "audit", "audit/score": 0.1, "message": message, "alarm": step == alarm})
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sides = [item_means("rate", ((str(task), value) for task in range(40))) for value in (0.0, 1.0)]
    monkeypatch.setattr(verdict, "_measured", lambda *_: tuple(MetricResult("success", one) for one in sides))
    found = run_verdict(run)
    assert found.outcome == outcome
    assert (found.reasons == ["audit of step 2"]) == (outcome == NOTHING)
