"""Verdicts: a run that learns, one that does not, and what sees them."""

import json
import re
from pathlib import Path

import pytest

import posttrain
from posttrain.cli.main import main
from posttrain.errors import NothingLearned
from posttrain.evaluation import verdict
from posttrain.evaluation.paired import paired_test
from posttrain.evaluation.results import MetricResult
from posttrain.evaluation.statistics import item_means
from posttrain.evaluation.verdict import _of_run, run_verdict
from posttrain.recipe.compose import load_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import read_log
from posttrain.runs.tables import IMPROVED, NOTHING, UNSHOWN, read_verdict
from tests.evaluation.made import write

TEXT = ["environment.type=text_task", "environment.prompts=p.jsonl"]
LETTERS = Path(__file__).parents[1] / "training" / "letters.py"


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", [{"prompt": f"{n}?", "completion": "ab" * 5} for n in range(60)])


def words(stage, tiny_model, tmp_path, *more, strict=True):
    common = [f"model.path={tiny_model}", "model.threads=1", f"runs={tmp_path}", "plots=false", *["--strict"] * strict]
    return [stage, *common, *more]


def rl(tiny_model, tmp_path, rate, *more, strict=True):
    keys = [f"environment.type={LETTERS}", "environment.max_turns=1", "name=still", "steps=2", "evaluation.every=1"]
    keys += ["rollout.groups_per_step=2", "rollout.episodes_per_group=2", "rollout.tokens_per_turn=6"]
    keys += ["evaluation.seeds.count=2", "evaluation.final_seeds.count=6", "export=last"]
    return words("rl", tiny_model, tmp_path, *keys, f"optimizer.learning_rate={rate}", *more, strict=strict)


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


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("evaluation.start=false", "evaluation.start"),
        ("evaluation.every=0", "evaluation.every"),
        ("evaluation.final_seeds.count=5", "evaluation.final_seeds.count"),
    ],
)
def test_a_recipe_without_a_verdict_is_refused_before_training(change, key, more, tiny_model, tmp_path, capsys):
    assert main(rl(tiny_model, tmp_path, 1e-3, change, *more)) == 2
    assert key in capsys.readouterr().err
    assert not (tmp_path / "still").exists()


def test_five_tasks_show_nothing_and_the_run_says_so_before_and_after(tiny_model, tmp_path, capsys):
    few = rl(tiny_model, tmp_path, 1e-12, "evaluation.final_seeds.count=5", strict=False)
    assert main([*few, "--dry-run"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert "5 tasks cannot show any change; 6 or more can" in planned
    assert main(few) == 0
    result = posttrain.Result.open(tmp_path / "still")
    [warning] = [line for line in result.warnings if "evaluation.final_seeds.count" in line]
    assert f"warning: {warning}" in planned
    assert (result.verdict.outcome, result.verdict.reasons) == (UNSHOWN, [])
    assert "5 held-out tasks" in result.verdict.sentence
    with pytest.raises(NothingLearned):
        result.require_learning()


def test_the_plan_and_the_verdict_say_the_same_of_what_can_be_shown(tiny_model, tmp_path, capsys):
    """Also with several episodes of a task."""
    for more in ([], ["evaluation.episodes_per_seed=3", "evaluation.sampling.temperature=1"]):
        assert main([*rl(tiny_model, tmp_path, 1e-12, *more, strict=False), "--dry-run"]) == 0
        planned = set(re.findall(r"[0-9.]+ (?:points|standard)", " ".join(capsys.readouterr().out.split())))
        recipe = load_recipe([], rl(tiny_model, tmp_path, 1e-12, *more, strict=False)[1:], "rl")
        run = RunDirectory.create(recipe.model_copy(update={"name": f"run-{len(more)}"}))
        run.metrics.write_text(json.dumps({"step": 2, "kind": "train", "time/run": 1.0}))
        for kind in ("rate", "mean"):
            scores = [item_means(kind, ((str(item), item % 2) for item in range(6)))] * 2
            test = paired_test("success", "higher", scores[:1], scores[1:], [str(item) for item in range(6)])
            reasons = [text for _, text in _of_run(read_log(run.metrics), recipe, test)]
            said = {number for text in reasons for number in re.findall(r"[0-9.]+ (?:points|standard)", text)}
            assert len(said) == 1
            assert said < planned


def test_a_run_that_learns_its_rows_has_improved(tiny_model, tmp_path, rows):
    more = [f"data.train={rows}", "data.held_out=30", "name=learned", "epochs=3", "optimizer.learning_rate=3e-3"]
    assert main(words("sft", tiny_model, tmp_path, *more, "rows_per_update=10")) == 0
    assert read_verdict(tmp_path / "learned").outcome == IMPROVED
    # What is stored is enough: the verdict does not depend on the process that trained.
    (tmp_path / "learned" / "results.json").unlink()
    assert run_verdict(RunDirectory.open(tmp_path / "learned")).outcome == IMPROVED


def section(rows, held_out=30):
    data = {"train": str(rows), "held_out": held_out}
    return {"stage": "sft", "data": data, "epochs": 1, "rows_per_update": 30}


def pipeline(tiny_model, tmp_path, *stages):
    common = {"model": {"path": str(tiny_model), "threads": 1}, "plots": False}
    file = tmp_path / "pipeline.yaml"
    file.write_text(json.dumps({"name": "chain", "runs": str(tmp_path), "common": common, "stages": stages}))
    return file


def test_a_strict_pipeline_stops_at_the_stage_that_learned_nothing(tiny_model, tmp_path, rows, capsys):
    still = {"name": "still", **section(rows), "optimizer": {"learning_rate": 1e-12}}
    file = pipeline(tiny_model, tmp_path, still, {"name": "after", **section(rows), "model": {"path": "stage:still"}})
    assert main(["pipeline", str(file), "--strict"]) == 4
    assert not (tmp_path / "chain" / "after").exists()
    assert "stage still: Nothing was learned" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("stage", "keys", "remedy"),
    [
        ("reward", ["data.train=pairs.jsonl"], "set data.held_out"),
        ("dpo", ["data.train=pairs.jsonl", "data.held_out=20", "evaluation.every=0"], "set it above 0"),
        ("dpo", ["data.train=pairs.jsonl", "data.held_out=20"], None),
        ("distill", ["teacher.path=t", *TEXT], "environment.reward"),
        ("distill", ["teacher.path=t", "environment.type=bandit"], None),
    ],
)
def test_the_keys_that_leave_a_run_without_a_verdict_are_named(stage, keys, remedy):
    why = load_recipe([], keys, stage).untested()
    assert (why is None) == (remedy is None)
    assert remedy is None or remedy in why


def test_rows_and_stages_that_cannot_show_anything_are_refused(tiny_model, tmp_path, rows, capsys):
    """Half of four held-out rows are for the final table. No stage of the pipeline begins."""
    assert main(words("sft", tiny_model, tmp_path, f"data.train={rows}", "data.held_out=4", "name=few")) == 2
    assert "data.held_out leaves 2 held-out rows" in capsys.readouterr().err
    file = pipeline(tiny_model, tmp_path, {"name": "first", **section(rows)}, {"name": "few", **section(rows, 4)})
    for more in ([], ["--dry-run"]):
        assert main(["pipeline", str(file), "--strict", *more]) == 2
        assert "stage few: --strict needs a verdict: data.held_out" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "chain").exists()
    assert main(["pipeline", str(file), "--dry-run"]) == 0
    assert "warning: data.held_out leaves 2 held-out rows" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("alarm", "outcome"), [(None, IMPROVED), (1, IMPROVED), (2, NOTHING)])
def test_a_reward_that_rises_alone_is_not_learning(tmp_path, monkeypatch, alarm, outcome):
    """The audit of the exported checkpoint, of step 2, decides."""
    run = RunDirectory.create(load_recipe([], [f"runs={tmp_path}", "environment.type=bandit"], "rl"))
    lines = [{"step": 2, "kind": "final", "policy": "trained", "best_step": 2, "chosen": "best of the curve"}]
    for step in (1, 2) if alarm else ():
        message = f"audit of step {step}"
        lines.append({"step": step, "kind": "audit", "audit/score": 0.1, "message": message, "alarm": step == alarm})
    write(run.metrics, lines)
    sides = [item_means("rate", ((str(task), value) for task in range(40))) for value in (0.0, 1.0)]
    monkeypatch.setattr(verdict, "_measured", lambda *_: tuple(MetricResult("success", one) for one in sides))
    found = run_verdict(run)
    assert found.outcome == outcome
    assert (found.reasons == ["audit of step 2"]) == (outcome == NOTHING)


CALM = {"rollout/return": 0.3, "rollout/success": 0.0, "reward/group_spread": 0.2, "credit/zero_groups": 0.0}
LOST = CALM | {"rollout/return": 0.0}
SOLVED_BY_NONE = {"credit/zero_groups": 1.0, "reward/group_spread": 0.0, "rollout/return": 0.0, "rollout/success": 0.0}


@pytest.mark.parametrize(
    ("keys", "begin", "end", "difference", "reason"),
    [
        (["optimizer.learning_rate=1e-9"], CALM, CALM, 0.0, "optimizer.learning_rate 1e-09"),
        (["optimizer.learning_rate=1e-9"], SOLVED_BY_NONE, SOLVED_BY_NONE, 0.0, "guards.thresholds.max_zero_groups"),
        (["optimizer.learning_rate=1e-3"], CALM, SOLVED_BY_NONE, -0.5, "set optimizer.learning_rate=0.0001"),
        (["optimizer.learning_rate=1e-3"], CALM, LOST, 0.0, "set optimizer.learning_rate=0.0001"),
        (["export=best_by_audit"], CALM, CALM | {"rollout/return": 0.9}, 0.0, "the audit of the best checkpoint"),
        ([], CALM, CALM | {"rollout/return": 0.9}, 0.0, "the held-out measure did not"),
        (["rollout.sampling.temperature=0"], SOLVED_BY_NONE, SOLVED_BY_NONE, 0.0, "rollout.sampling.temperature is 0"),
        ([], SOLVED_BY_NONE | {"rollout/return": 0.5}, SOLVED_BY_NONE | {"rollout/return": 0.5}, 0.0, "return 0.5"),
    ],
    ids=["tiny rate", "no signal", "collapse", "slow collapse", "gamed by audit", "gamed", "greedy", "constant"],
)
def test_the_first_reason_follows_from_the_metrics(tmp_path, monkeypatch, keys, begin, end, difference, reason):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say 1."}\n')
    text = ["environment.type=text_task", f"environment.prompts={prompts}", "environment.reward=exact"]
    text.append("audit.environment.reward=contains")
    recipe = load_recipe([], [f"runs={tmp_path}", *text, *keys], "rl")
    run = RunDirectory.create(recipe)
    lines = [{"step": step, "kind": "train", **(begin if step <= 4 else end)} for step in range(1, 61)]
    write(run.metrics, lines)
    fell, measured = int(-40 * difference), [1.0] * 20 + [0.0] * 20
    after = [0.0] * fell + measured[fell:]
    sides = [item_means("rate", ((str(task), value) for task, value in enumerate(side))) for side in (measured, after)]
    monkeypatch.setattr(verdict, "_measured", lambda *_: tuple(MetricResult("success", one) for one in sides))
    found = run_verdict(run)
    assert reason in found.reasons[0]
    assert not any("too hard" in one for one in found.reasons if "tiny" in reason or "lower" in found.reasons[0])


@pytest.mark.parametrize(
    ("metric", "n", "text", "outcome"),
    [
        ("return", 11, "11 of 24 tasks", UNSHOWN),
        ("return", 22, "22 of 24 tasks", IMPROVED),
        ("success", 24, "13 of 24 episodes", IMPROVED),
    ],
)
def test_a_verdict_on_failed_episodes_says_so(tmp_path, monkeypatch, metric, n, text, outcome):
    """One that more than a tenth of the tasks are missing from shows nothing."""
    run = RunDirectory.create(load_recipe([], [f"runs={tmp_path}", "environment.type=bandit"], "rl"))
    common = {"step": 2, "kind": "final", "best_step": 2, "chosen": "x", "n": 24, "episodes": 24}
    lines = [{**common, "policy": policy, "failed": failed} for policy, failed in (("start", 0), ("trained", 13))]
    write(run.metrics, lines)
    sides = [item_means("rate", ((str(task), value) for task in range(n))) for value in (0.0, 1.0)]
    monkeypatch.setattr(verdict, "_measured", lambda *_: tuple(MetricResult(metric, one) for one in sides))
    assert run_verdict(run).outcome == outcome
    assert text in run_verdict(run).sentence
