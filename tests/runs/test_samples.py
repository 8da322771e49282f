"""Held-out rows of supervised runs: stored by the run, read back, shown on its page and in its report."""

import asyncio
import json

import pytest

from posttrain import verbs
from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.samples import read_samples
from posttrain.runs.tables import Results, read_run_results
from posttrain.view.report import write_html
from posttrain.view.run_pages import Logs, facts
from posttrain.view.server import Pages

NAMES = {"sft": ["reference"], "dpo": ["chosen", "rejected"], "reward": ["chosen", "rejected"]}


def row(stage, n):
    answers = {"completion": f"{n}."} if stage == "sft" else {"chosen": f"{n}.", "rejected": f"{n + 1}."}
    return {"prompt": f"Say {n}.", **answers}


@pytest.mark.parametrize("stage", NAMES)
def test_a_run_keeps_rows_with_scores_before_and_after(stage, tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row(stage, n)) + "\n" for n in range(30)))
    keys = {"data": {"train": str(rows), "held_out": 12}, "model": {"path": str(tiny_model)}, "runs": str(tmp_path)}
    keys |= {"optimizer": {"learning_rate": 1e-2}, "steps": 2, "name": stage, "plots": False, "export": "last"}

    async def in_a_notebook():
        return getattr(verbs, stage)(keys)

    result = asyncio.run(in_a_notebook())
    assert not any("held-out rows" in warning for warning in result.warnings)
    run = RunDirectory.open(result.run)
    samples = read_samples(run)
    assert len(samples) == 6
    for sample in samples:
        number = int(sample.prompt.split("Say ")[1].split(".")[0])
        assert sample.origin == f"rows.jsonl row {number + 1}"
        assert [answer.name for answer in sample.answers] == NAMES[stage]
        assert sample.answers[0].text.startswith(f"{number}.")
        assert (sample.reply == "") == (stage == "reward")
        assert all(answer.before is not None and answer.before != answer.after for answer in sample.answers)
    scores = [one.answers[0].after - (one.answers[1].after if len(one.answers) > 1 else 0) for one in samples]
    assert scores == sorted(scores)
    if stage == "sft":
        assert samples[0].answers[0].after < result.evaluation[-1]["test/loss"] < samples[-1].answers[0].after
    assert write_html([run.path])[0].read_text().count('<span class="role">prompt</span>') == 6
    pages = Pages(tmp_path)
    about = {"run": pages.scanner.summary(stage, run.path), "about": facts(Logs(), run.path)}
    assert "Held-out rows" in pages.render("run.html.j2", **about).body.decode()


TABLE = {"title": "t", "headings": ["a"], "note": ""}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("rows/samples.json", content) for content in ("[]", '{"rows": [{"origin": 1}]}', '{"rows": 3}', "{")),
        *(("results.json", content) for content in ("[]", '{"policies": 3}', '{"verdict": {}}', "{")),
        *(("results.json", json.dumps({"tables": [TABLE | {"rows": [row]}]})) for row in (["b", "c"], [1])),
    ],
)
def test_files_of_another_form_are_named(file, content, tmp_path):
    run = RunDirectory(tmp_path)
    assert read_samples(run) == []
    assert read_run_results(tmp_path) == Results()
    (tmp_path / "rows").mkdir()
    (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=file):
        read_samples(run) if "samples" in file else read_run_results(tmp_path)
