"""One table of several models: its numbers are those of `estimate` and `paired_test`, in every format."""

import csv
import json
import re

import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.evaluation.compare import paired_test
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.sides import read_models
from posttrain.evaluation.statistics import estimate, holm, item_means
from posttrain.evaluation.table import model_table
from tests.evaluation.made import predictions


def results(path, metrics, items=12, prompts=True, **about):
    """A results file whose metrics are `metrics`: name -> score of an item from its number."""
    found = Results("made", items, items, digests={str(i): f"prompt {i}" for i in range(items)} if prompts else {})
    for name, score in metrics.items():
        scores = item_means("mean", ((str(i), score(i)) for i in range(items)))
        found.metrics.append(MetricResult(name, scores, "higher", items, {}, about))
    found.write(path)
    return path


def test_every_number_is_that_of_the_estimate_and_the_paired_test(tmp_path):
    names = ("sft", "dpo", "ppo")
    for shift, name in enumerate(names):
        results(tmp_path / name / "text.json", {"bleu": lambda i, s=shift: i + s + (i % 3) * s / 4})
        results(tmp_path / name / "deep" / "reward.json", {"reward": lambda i, s=shift: -i * s}, items=10 - shift)
    runs = read_models([f"{name}={tmp_path / name}" for name in names])
    table = model_table(runs, base="dpo", draws=200)
    assert (table.models, table.metrics, table.base) == (list(names), ["reward", "bleu"], "dpo")
    tests = []
    for entry in table.entries:
        run = next(run for run in runs if run.path == entry.model)
        scores, base = run.metrics[entry.metric].scores, runs[1].metrics[entry.metric].scores
        assert entry.value == estimate(scores)
        if entry.model == "dpo":
            assert entry.test is None
            continue
        shared = sorted(scores.items.keys() & base.items.keys())
        alone = paired_test(entry.metric, "higher", [base], [scores], shared, 0, 200)
        assert entry.test.with_correction(0) == alone.with_correction(0)
        tests.append(entry.test)
    assert [test.corrected for test in tests] == holm([test.p for test in tests])
    assert [test.n for test in tests] == [9, 8, 12, 12]
    assert "sft: reward: 9 shared items of 10, and of 9 of dpo" in table.details
    up = next(entry for entry in table.entries if (entry.model, entry.metric) == ("ppo", "bleu"))
    assert up.test.difference.value == pytest.approx(1.25)
    assert up.difference.endswith("] *")


def test_the_command_writes_every_format_and_all_agree(tmp_path, capsys):
    for name, wrong in (("a_1", 0.6), ("b", 0.1)):
        file = predictions(tmp_path / f"{name}.jsonl", wrong, items=20)
        assert main(["evaluate", "text", str(file), "--out", str(tmp_path / "results" / name / "text.json")]) == 0
    results(tmp_path / "results" / "b" / "judge.json", {"efficiency": lambda i: 3.0}, prompts=False, judge="m")
    (tmp_path / "results" / "b" / "other.json").write_text("[1]")
    outs = [str(tmp_path / "out" / f"table{suffix}") for suffix in (".md", ".csv", ".tex", ".html")]
    capsys.readouterr()
    models = [str(tmp_path / "results" / "a_1"), f"new={tmp_path / 'results' / 'b'}"]
    assert main(["table", *models, *(word for out in outs for word in ("--out", out))]) == 0
    said = capsys.readouterr().out
    assert "other.json: skipped, it is not a results file" in said
    markdown, page, latex = ((tmp_path / "out" / f"table.{kind}").read_text() for kind in ("md", "html", "tex"))
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    kept = json.loads((tmp_path / "results" / "a_1" / "text.json").read_text())["metrics"]
    assert {(row["model"], row["metric"]) for row in rows} == {
        *((name, metric) for name in ("a_1", "new") for metric in ("bleu", "chrf", "exact")),
        ("new", "efficiency"),
    }
    for row in rows:
        if row["model"] == "a_1":
            assert float(row["value"]) == kept[row["metric"]]["value"]
            assert float(row["high"]) == kept[row["metric"]]["high"]
            assert row["difference"] == ""
    bleu = next(row for row in rows if (row["model"], row["metric"]) == ("new", "bleu"))
    assert float(bleu["p_corrected"]) >= float(bleu["p"])
    shown = f"{float(bleu['value']):.2f}"
    change = f"{float(bleu['difference']):+.2f}"
    for text in (markdown, page, latex):
        assert shown in text
        assert change in text
    assert markdown.splitlines()[0] == "| model | bleu ↑ | chrf ↑ | exact ↑ | efficiency ↑ |"
    assert r"a\_1" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}")
    assert page.count("<tr>") == 3
    assert re.search(r"a_1</td>.*–</td></tr>", page)


def test_one_model_and_chosen_metrics(tmp_path, capsys):
    file = results(tmp_path / "one.json", {"x": lambda i: i, "y": lambda i: -i})
    assert main(["table", f"sft={file}", "--metrics", "y,x"]) == 0
    said = capsys.readouterr().out
    assert said.index("y ↑") < said.index("x ↑")
    assert "Holm" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a={}/a.json", "b={}/b.json", "--metrics", "z"], "no model has the metric 'z'; the files have x"),
        (["a={}/a.json", "b={}/b.json", "--base", "c"], "--base c is not a model of the table; use one of a, b"),
        (
            ["a={}/a.json,{}/b.json"],
            "a: x is in {}/a.json and in {}/b.json; name the files to use, one for each metric",
        ),
        (["a={}/a.json", "a={}/b.json"], "two models have the name a; name them, as in `sft=PATH dpo=PATH`"),
        (["a={}/a.json", "b={}/judged.json"], "x has judge None in a and m in b; use the same settings"),
        (["a={}/a.json", "{}/none"], "{}/none contains no results file"),
        (["a={}/a.json", "b={}/b.json", "--out", "t.pdf"], "--out t.pdf must end in .md, .csv, .tex or .html"),
    ],
)
def test_invalid_arguments_of_table_are_refused(words, message, tmp_path, capsys):
    results(tmp_path / "a.json", {"x": lambda i: i})
    results(tmp_path / "b.json", {"x": lambda i: -i})
    results(tmp_path / "judged.json", {"x": lambda i: i}, judge="m")
    (tmp_path / "none").mkdir()
    assert main(["table", *(word.replace("{}", str(tmp_path)) for word in words)]) == 2
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err


def test_other_prompts_under_the_same_ids_are_refused(tmp_path):
    one = results(tmp_path / "a.json", {"x": lambda i: i})
    text = one.read_text().replace("prompt 3", "another prompt")
    (tmp_path / "b.json").write_text(text)
    (tmp_path / "c.json").write_text(text.replace('"x"', '"z"'))
    with pytest.raises(InputError, match="1 of 12 items have different prompts or references"):
        model_table(read_models([f"a={one}", f"b={tmp_path / 'b.json'}"]))
    with pytest.raises(InputError, match=r"a: item 3 of .*c.json has another prompt"):
        read_models([f"a={one},{tmp_path / 'c.json'}"])
