"""Evaluations of one row, one label, one group: what a single value does not determine is left out, never printed as nan."""

import re

import pytest

import posttrain
from posttrain.runs.metrics import read_metrics

from .preferences import write_jsonl

CONVERSATION = {"messages": [{"role": "user", "content": "Say a"}, {"role": "assistant", "content": "a"}]}
PAIR = {"prompt": "Say a", "chosen": "a", "rejected": "b"}


def labeled(*labels):
    return [{"prompt": f"Say {n}", "completion": "a", "label": label} for n, label in enumerate(labels)]


def pairs(count, **keys):
    return [{**PAIR, "prompt": f"Say {n}", **keys} for n in range(count)]


RUNS = {
    "sft": ("sft", [CONVERSATION], {}),
    "dpo": ("dpo", pairs(1, domain="d"), {}),
    "kto good": ("dpo", labeled(True), {"loss": {"type": "kto"}}),
    "kto bad": ("dpo", labeled(False), {"loss": {"type": "kto"}}),
    "kto one each": ("dpo", labeled(True, False), {"loss": {"type": "kto"}}),
    "reward": ("reward", pairs(1), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation_of_one_row(name, tiny_model, tmp_path, capsys):
    stage, rows, keys = RUNS[name]
    train = write_jsonl(tmp_path / "train.jsonl", labeled(True, False) if name.startswith("kto") else rows)
    data = {"train": train, "validation": write_jsonl(tmp_path / "test.jsonl", rows), "cache": f"{tmp_path / 'cache'}"}
    model = {"path": f"{tiny_model}", "threads": 1}
    result = getattr(posttrain, stage)(model=model, data=data, steps=1, runs=f"{tmp_path}", name="run", **keys)
    without_nan(result, capsys)


@pytest.mark.parametrize("reward", [lambda answer: 1.0, lambda answer, n: 1.0 if n else None], ids=["all", "some"])
def test_rl_and_evaluate_with_one_task(reward, tiny_model, tmp_path, capsys):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"Say {n}", "n": n} for n in range(4)])
    common = {"environment": {"prompts": rows}}
    common |= {"reward": reward, "model": {"path": f"{tiny_model}", "threads": 1}, "runs": f"{tmp_path}"}
    held_out = {"seeds": {"start": 3, "count": 1}, "final_seeds": {"start": 2, "count": 1}}
    rollout = {"groups_per_step": 1, "episodes_per_group": 2, "tokens_per_turn": 4}
    keys = {"rollout": rollout, "seeds": {"start": 0, "count": 2}, "evaluation": {**held_out, "every": 1}, "steps": 2}
    result = posttrain.rl(**common, **keys, name="run")
    without_nan(result, capsys)
    evaluation = {"final_seeds": {"start": 1, "count": 1}}
    without_nan(posttrain.evaluate(evaluation=evaluation, name="evaluated", **common), capsys)


def without_nan(result, capsys):
    lines = read_metrics(result.run / "metrics.jsonl")
    assert lines
    assert [line["nonfinite"] for line in lines if "nonfinite" in line] == []
    printed = "".join(capsys.readouterr())
    for text in (printed, (result.run / "report.md").read_text()):
        assert not re.search(r"\bnan\b", text, re.IGNORECASE), text
    assert "\u2013" in printed or "%" in printed
