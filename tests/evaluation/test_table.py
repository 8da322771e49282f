"""Comparisons of several models with several results files: its numbers are those of `estimate` and `paired_test`, in every format."""

import csv
import json
import re

import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.evaluation.compare import compare
from posttrain.evaluation.paired import paired_test
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.sides import read_sides
from posttrain.evaluation.statistics import estimate, holm, item_means
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
    sides = read_sides([f"{name}={tmp_path / name}" for name in names])
    table = compare(sides, base="dpo", draws=200)
    assert (table.sides, table.metrics, table.base) == (list(names), ["reward", "bleu"], "dpo")
    tests = []
    for entry in table.entries:
        side = next(side for side in sides if side.name == entry.side)
        (scores,), (base,) = side.scores(entry.metric), sides[1].scores(entry.metric)
        assert entry.value == estimate(scores)
        if entry.side == "dpo":
            assert entry.test is None
            continue
        shared = sorted(scores.items.keys() & base.items.keys())
        alone = paired_test(entry.metric, "higher", [base], [scores], shared, 0, 200)
        assert entry.test.with_correction(0) == alone.with_correction(0)
        tests.append(entry.test)
    assert [test.corrected for test in tests] == holm([test.p for test in tests])
    assert [test.n for test in tests] == [9, 8, 12, 12]
    assert any("reward: compared on 9 shared items; left out: 1 of 10 of" in line for line in table.warnings)
    up = next(entry for entry in table.entries if (entry.side, entry.metric) == ("ppo", "bleu"))
    assert up.test.difference.value == pytest.approx(1.25)
    assert up.difference.endswith("] *")


def test_the_command_writes_every_format_and_all_agree(tmp_path, capsys):
    for name, wrong in (("a_1", 0.6), ("b", 0.1)):
        file = predictions(tmp_path / f"{name}.jsonl", wrong, items=20)
        assert main(["evaluate", "text", str(file), "--out", str(tmp_path / "results" / name / "text.json")]) == 0
    results(tmp_path / "results" / "b" / "judge.json", {"efficiency": lambda i: 3.0}, prompts=False, judge="m")
    (tmp_path / "results" / "b" / "other.json").write_text("[1]")
    outs = [str(tmp_path / "out" / f"table{suffix}") for suffix in (".md", ".csv")]
    capsys.readouterr()
    models = [str(tmp_path / "results" / "a_1"), f"new={tmp_path / 'results' / 'b'}"]
    assert main(["compare", *models, *(word for out in outs for word in ("--out", out))]) == 0
    said = capsys.readouterr().out
    assert "other.json: skipped, it is not a results file" in said
    markdown = (tmp_path / "out" / "table.md").read_text()
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
    assert shown in markdown
    assert change in markdown
    assert markdown.splitlines()[0] == "| model | bleu ↑ | chrf ↑ | exact ↑ | efficiency ↑ |"
    assert re.search(r"\| a_1 \|.*\| – \|", markdown)


def test_chosen_metrics_are_in_the_given_order(tmp_path, capsys):
    words = [
        f"{name}={results(tmp_path / name, {'x': lambda i: i, 'y': lambda i: -i})}" for name in ("a.json", "b.json")
    ]
    assert main(["compare", *words, "--metrics", "y,x"]) == 0
    said = capsys.readouterr().out
    assert said.index("y ↑") < said.index("x ↑")


def test_files_with_different_metrics_are_one_run_and_others_are_seeds(tmp_path):
    one, other = (results(tmp_path / f"{name}.json", {name: lambda i: i}) for name in "xy")
    again = results(tmp_path / "again.json", {"x": lambda i: i + 1})
    merged, seeds = read_sides([f"merged={one},{other}", f"seeds={one},{again}"])
    assert [list(run.metrics) for run in merged.runs] == [["x", "y"]]
    assert [list(run.metrics) for run in seeds.runs] == [["x"], ["x"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a={}/a.json", "b={}/b.json", "--metrics", "z"], "no side has the metric 'z'; they have x"),
        (["a={}/a.json", "b={}/b.json", "--base", "c"], "--base c is not one of the sides; use one of a, b"),
        (["a={}/a.json", "b={}/twice"], "{}/twice: x is in {}/twice/a.json and in {}/twice/b.json"),
        (["a={}/a.json", "b={}/judged.json"], "x has judge None in {}/a.json and m in {}/judged.json"),
        (["a={}/a.json", "{}/none"], "{}/none contains no results file"),
        (["a={}/a.json", "b={}/b.json", "--out", "t.pdf"], "--out t.pdf must end in .json, .md or .csv"),
    ],
)
def test_invalid_arguments_are_refused(words, message, tmp_path, capsys):
    results(tmp_path / "a.json", {"x": lambda i: i})
    results(tmp_path / "b.json", {"x": lambda i: -i})
    results(tmp_path / "judged.json", {"x": lambda i: i}, judge="m")
    for name in ("a", "b"):
        results(tmp_path / "twice" / f"{name}.json", {"x": lambda i: i})
    (tmp_path / "none").mkdir()
    assert main(["compare", *(word.replace("{}", str(tmp_path)) for word in words)]) == 2
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err


def test_other_prompts_under_the_same_ids_are_refused(tmp_path):
    one = results(tmp_path / "a.json", {"x": lambda i: i})
    text = one.read_text().replace("prompt 3", "another prompt")
    (tmp_path / "b.json").write_text(text)
    (tmp_path / "c.json").write_text(text.replace('"x"', '"z"'))
    with pytest.raises(InputError, match="1 of 12 items have different prompts or references"):
        compare(read_sides([f"a={one}", f"b={tmp_path / 'b.json'}"]))
    with pytest.raises(InputError, match=r"a: item 3 of .*c.json has another prompt"):
        read_sides([f"a={one},{tmp_path / 'c.json'}"])
