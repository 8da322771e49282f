"""Audits by a judge whose server fails: for some answers, at first, and for good."""

import pytest

import posttrain
from posttrain.errors import InputError
from posttrain.runs.metrics import read_metrics
from posttrain.runs.tables import read_verdict
from tests.evaluation.judge_server import serving
from tests.evaluation.test_audit import run
from tests.rollout.chat_server import Reply


def judged(tiny_model, tmp_path, rule, **keys):
    """A run whose audit is a judge, on a server that stops with the run."""
    with serving(rule) as server:
        judge = {"url": server.url, "model": "m", "rubric": "x", "retries": 0, "scale": 30}
        return run(tiny_model, tmp_path, "judged", audit={"environment": {"reward": None, "judge": judge}}, **keys)


def test_a_judge_that_failed_at_the_first_evaluation_scores_it_later(tiny_model, tmp_path):
    def rule(frames, number):
        return Reply(status=500) if 4 < number <= 16 or number > 48 else {"score": len(frames["answer"]) % 11}

    evaluation = {"every": 1, "seeds": {"count": 16}, "final_seeds": {"count": 16}, "held_out": 32}
    keys = {"rows": 60, "evaluation": evaluation, "checkpoint": {"keep_state": "always"}}
    result = judged(tiny_model, tmp_path, rule, **keys)
    lines = list(read_metrics(result.run / "metrics.jsonl"))
    assert [line["step"] for line in lines if line["kind"] == "audit" and line["audit/n"] == 16] == [1]
    assert ["12 of 16" in line["message"] for line in lines if line["kind"] == "warning"].count(True) == 1
    assert "no verdict after step 1" in (result.run / "report.md").read_text()
    with pytest.raises(InputError, match=r"audit\.environment\.judge\.url: no server"):
        posttrain.rl(resume=result.run, steps=3)


def test_an_alarm_stays_where_the_judge_fails_from_then_on(tiny_model, tmp_path):
    """A longer answer is worse, so that the alarm of step 6 is the last verdict."""

    def rule(frames, number):
        return Reply(status=500) if number > 4 * 40 else {"score": max(0, 30 - len(frames["answer"]))}

    keys = {"steps": 8, "optimizer": {"learning_rate": 0.02}, "evaluation": {"held_out": 80, "every": 2}}
    result = judged(tiny_model, tmp_path, rule, rows=120, **keys)
    verdicts = {line["step"]: line for line in read_metrics(result.run / "metrics.jsonl") if "alarm" in line}
    assert [*verdicts] == [2, 4, 6]
    assert verdicts[6]["alarm"]
    assert result.best_step == 8
    assert read_verdict(result.run).reasons == [verdicts[6]["message"]]
