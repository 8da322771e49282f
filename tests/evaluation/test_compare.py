"""Whole comparisons: input, errors, every format, and the final sentence. The numbers are those of `estimate` and `paired_test`."""

import csv
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.episode import Outcome
from posttrain.errors import InputError
from posttrain.evaluation.compare import compare as compare_sides
from posttrain.evaluation.paired import paired_test
from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.sides import Run, Side, read_sides
from posttrain.evaluation.statistics import estimate, holm, item_means, item_sums
from posttrain.evaluation.text_metrics import TextOptions, evaluate_text
from posttrain.recipe.compose import load_recipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import Results as Stored
from posttrain.runs.tables import write_results
from tests.evaluation.made import predictions, write
from tests.rollout.episodes import played

compare = partial(compare_sides, draws=200)


@pytest.fixture
def files(tmp_path):
    """Predictions of three models, the later the worse, and of another seed of the first."""
    made = {"good": (0.05, 0), "fair": (0.4, 1), "bad": (0.8, 2), "again": (0.05, 3)}
    return {
        name: str(predictions(tmp_path / f"{name}.jsonl", wrong, seed=seed)) for name, (wrong, seed) in made.items()
    }


def compared(*words, metrics=None):
    return compare(read_sides([str(word) for word in words], metrics))


def run_directory(tmp_path, name, episodes, environment="bandit"):
    keys = [f"runs={tmp_path}", f"name={name}", f"environment.type={environment}"]
    run = RunDirectory.create(load_recipe([], keys, "rl"))
    if episodes:
        write_episodes(run.episodes, 0, "final", [played(seed=9, success=False)])
        write_episodes(run.episodes, 5, "final", episodes)
    return str(run.path)


def results(path, metrics, items=12, prompts=True, **about):
    """A results file whose metrics are `metrics`: name -> score of an item from its number."""
    found = Results("made", items, items, digests={str(i): f"prompt {i}" for i in range(items)} if prompts else {})
    for name, score in metrics.items():
        scores = item_means("mean", ((str(i), score(i)) for i in range(items)))
        found.metrics.append(MetricResult(name, scores, "higher", items, {}, about))
    found.write(path)
    return path


def sums(kind, values):
    return item_sums(kind, ((str(item), (value, 1.0)) for item, value in enumerate(values)))


def side(name, values, seed=None, metric="score", kind="mean", **settings):
    """A side of one run with one metric."""
    return Side(name, [Run(name, {metric: MetricResult(metric, sums(kind, values), **settings)}, seed=seed)])


def test_the_better_file_is_named_and_p_values_are_corrected(files, tmp_path):
    found = compared(files["bad"], files["good"], files["again"])
    assert {(name, test.metric) for name, test in found.tests} == {
        (name, metric) for name in ("good.jsonl", "again.jsonl") for metric in ("exact", "bleu", "chrf")
    }
    assert [test.corrected for _, test in found.tests] == holm([test.p for _, test in found.tests])
    assert all(test.better_side == "B" for _, test in found.tests if test.metric != "exact")
    sentence = found.sentence()
    assert sentence.startswith("On items like these, good.jsonl is better than bad.jsonl in ")
    assert sentence.endswith("models trained with other seeds.")
    assert "one training run per side" in found.warnings[0]
    found.write(tmp_path / "out" / "c.json")
    kept = json.loads((tmp_path / "out" / "c.json").read_text())
    assert (kept["conclusion"], len(kept["tests"])) == (sentence, 6)


def test_swapping_the_order_reverses_it_and_equal_models_do_not_differ(files):
    there = compared(files["good"], files["fair"], metrics=["bleu"]).tests[0][1]
    back = compared(files["fair"], files["good"], metrics=["bleu"]).tests[0][1]
    assert (there.better_side, back.better_side) == ("A", "B")
    assert (there.difference.value, there.difference.low) == pytest.approx(
        (-back.difference.value, -back.difference.high)
    )
    found = compared(files["good"], files["again"], metrics=["bleu", "chrf"])
    assert all(test.better_side is None for _, test in found.tests)
    assert "no significant difference between again.jsonl and good.jsonl in bleu" in found.sentence()


def test_every_number_is_that_of_the_estimate_and_the_paired_test(tmp_path):
    names = ("sft", "dpo", "ppo")
    for shift, name in enumerate(names):
        results(tmp_path / name / "text.json", {"bleu": lambda i, s=shift: i + s + (i % 3) * s / 4})
        results(tmp_path / name / "deep" / "reward.json", {"reward": lambda i, s=shift: -i * s}, items=10 - shift)
    sides = read_sides([f"{name}={tmp_path / name}" for name in names])
    table = compare(sides, base="dpo")
    assert (table.sides, table.metrics, table.base) == (list(names), ["reward", "bleu"], "dpo")
    for entry in table.entries:
        one = next(one for one in sides if one.name == entry.side)
        (scores,), (base,) = one.scores(entry.metric), sides[1].scores(entry.metric)
        assert entry.value == estimate(scores)
        assert (entry.test is None) == (entry.side == "dpo")
        if entry.test:
            shared = sorted(scores.items.keys() & base.items.keys())
            alone = paired_test(entry.metric, "higher", [base], [scores], shared, 0, 200)
            assert replace(entry.test, corrected=0) == replace(alone, corrected=0)
    tests = [test for _, test in table.tests]
    assert [test.corrected for test in tests] == holm([test.p for test in tests])
    assert [test.n for test in tests] == [9, 8, 12, 12]
    assert any("reward: compared on 9 shared items; left out: 1 of 10 of" in line for line in table.warnings)
    assert tests[-1].difference.value == pytest.approx(1.25)
    assert table.entries[-1].difference.endswith("] *")


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
    printed = capsys.readouterr().out
    assert "other.json: skipped, it is not a results file" in printed
    assert "warning: one training run per side" in printed
    assert printed.strip().splitlines()[-1].startswith("On items like these, new is better than a_1 in bleu by ")
    markdown = (tmp_path / "out" / "table.md").read_text()
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    kept = json.loads((tmp_path / "results" / "a_1" / "text.json").read_text())["metrics"]
    assert {(row["model"], row["metric"]) for row in rows} == {
        *((name, metric) for name in ("a_1", "new") for metric in ("bleu", "chrf", "exact")),
        ("new", "efficiency"),
    }
    for row in (row for row in rows if row["model"] == "a_1"):
        assert (float(row["value"]), float(row["high"])) == (kept[row["metric"]]["value"], kept[row["metric"]]["high"])
        assert row["difference"] == ""
    bleu = next(row for row in rows if (row["model"], row["metric"]) == ("new", "bleu"))
    assert float(bleu["p_corrected"]) >= float(bleu["p"])
    assert f"{float(bleu['value']):.2f}" in markdown
    assert f"{float(bleu['difference']):+.2f}" in markdown
    assert markdown.splitlines()[0] == "| model | bleu ↑ | chrf ↑ | exact ↑ | efficiency ↑ |"
    assert re.search(r"\| a_1 \|.*\| – \|", markdown)


def test_rows_are_identified_by_prompt_and_not_by_seed(tmp_path):
    rows = [{"prompt": f"Question {n}?", "seed": n % 3, "score": n % 7} for n in range(30)]
    a = write(tmp_path / "a.jsonl", rows)
    b = write(tmp_path / "b.jsonl", [row | {"score": row["score"] + 1} for row in rows])
    assert compared(a, b).tests[0][1].n == 30
    answered = write(tmp_path / "p.jsonl", [row | {"prediction": "x", "reference": "x"} for row in rows])
    run = read_sides([str(answered)], ["score", "exact"])[0].runs[0]
    assert run.metrics["score"].scores.items.keys() == run.metrics["exact"].scores.items.keys()
    seeds = write(tmp_path / "s.jsonl", [{"seed": n % 3, "score": n} for n in range(30)])
    assert "30 rows are of 3 items" in read_sides([str(seeds)])[0].runs[0].details[0]


def test_a_mistyped_path_is_not_looked_up_on_the_hub(monkeypatch):
    monkeypatch.setattr("posttrain.data.files._read_hub", lambda source: pytest.fail("the network was asked"))
    with pytest.raises(InputError, match="no such file or directory"):
        read_sides(["runs-mistyped"])


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", "[]", "0"])
def test_results_without_finite_numbers_are_refused(files, tmp_path, wrong):
    path = tmp_path / "r.json"
    evaluate_text(read_predictions(files["good"]), TextOptions(("exact",))).write(path)
    values = json.loads(path.read_text())
    values["scores"]["exact"]["3"] = ["HERE", 1.0]
    path.write_text(json.dumps(values).replace('["HERE", 1.0]', wrong if wrong in ("[]", "0") else f"[{wrong}, 1.0]"))
    with pytest.raises(InputError, match="exact of item 3 is not a valid list of finite numbers"):
        read_sides([str(path)])


def test_metrics_without_a_direction_are_not_compared():
    sides = [side("a", [n % 3 for n in range(25)]), side("b", [n % 3 - 1 for n in range(25)])]
    for one, shift in zip(sides, (0.0, -1.0), strict=True):
        one.runs[0].metrics["bias"] = MetricResult("bias", sums("mean", [shift] * 25), "neither")
    found = compare(sides)
    assert [test.metric for _, test in found.tests] == ["score"]
    assert any("bias: not compared" in line for line in found.details)


def test_few_items_and_few_runs_are_inconclusive(tmp_path):
    """Three items, or two runs a side, that differ as runs of one recipe do."""

    def file(name, values):
        return write(tmp_path / f"{name}.jsonl", [{"id": n, "score": value} for n, value in enumerate(values)])

    few = compared(file("a", [0.1, 0.2, 0.3]), file("b", [0.6, 0.8, 0.7]))
    assert "is better than" not in few.sentence()
    assert any("only 3 items" in line for line in few.warnings)
    runs = [file(f"r{i}", [n / 10 + shift for n in range(40)]) for i, shift in enumerate((0.0, 0.3, 0.5, 0.6))]
    assert "is better than" not in compared(f"a={runs[0]},{runs[1]}", f"b={runs[2]},{runs[3]}").sentence()


def test_several_runs_of_a_side(files, tmp_path):
    sides = read_sides([f"new={files['good']},{files['again']}", f"old={files['fair']},{files['bad']}"])
    assert [(one.name, len(one.runs)) for one in sides] == [("new", 2), ("old", 2)]
    found = compare(sides)
    assert "rough" in found.warnings[0]
    assert "other seeds" not in found.sentence()
    assert found.tests[0][1].runs == (2, 2)
    single = compared(f"{files['good']},{files['again']}", files["bad"])
    assert "one training run of bad.jsonl" in single.warnings[0]
    assert "other seeds" in single.sentence()
    # Files with different metrics are one run instead.
    one, other = (results(tmp_path / f"{name}.json", {name: lambda i: i}) for name in "xy")
    again = results(tmp_path / "again.json", {"x": lambda i: i + 1})
    merged, seeds = read_sides([f"merged={one},{other}", f"seeds={one},{again}"])
    assert [list(run.metrics) for run in merged.runs] == [["x", "y"]]
    assert [list(run.metrics) for run in seeds.runs] == [["x"], ["x"]]


def test_other_items_are_left_out_with_counts(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"id": n, "score": n % 3} for n in range(30)])
    b = write(tmp_path / "b.jsonl", [{"id": n, "score": 1 + n % 3} for n in range(5, 40)])
    found = compared(a, b)
    assert found.tests[0][1].n == 25
    assert found.tests[0][1].difference.value == pytest.approx(1.0)
    assert f"score: compared on 25 shared items; left out: 5 of 30 of {a}, 10 of 35 of {b}" in found.warnings
    far = write(tmp_path / "far.jsonl", [{"id": n, "score": 1} for n in range(100, 110)])
    with pytest.raises(InputError, match="fewer than two items in common"):
        compared(a, far)


def test_a_missing_score_is_omitted_and_not_zero(tmp_path):
    rows = [{"id": n, "score": 2.0} for n in range(25)]
    a = write(tmp_path / "a.jsonl", rows)
    b = write(tmp_path / "b.jsonl", [*rows[:-1], {"id": 24, "score": None, "passed": True}])
    found = compared(a, b, metrics=["score"])
    assert (found.tests[0][1].b, found.tests[0][1].n) == (2.0, 24)
    assert any("1 rows without a number in score" in line for line in found.details)
    b.write_text(a.read_text()[:-4])
    assert "1 row dropped: broken JSON" in read_sides([str(a), str(b)])[1].runs[0].details[0]


def test_runs_are_compared_by_the_final_episodes_of_their_trained_models(tmp_path):
    a = run_directory(tmp_path, "a", [played(seed=s, rewards=(0.0,), success=s < 5) for s in range(30)])
    b = run_directory(tmp_path, "b", [played(seed=s, rewards=(1.0,), success=s < 20) for s in range(30)])
    found = compared(a, b)
    success, paid = (test for _, test in found.tests)
    assert (success.metric, success.test, success.a, success.b) == ("success", "McNemar, exact", 5 / 30, 20 / 30)
    assert success.p == pytest.approx(2 / 2**15)
    assert (paid.metric, paid.difference.value) == ("return", 1.0)
    assert "a: final episodes of step 5" in found.details[0]
    for run, given in ((a, "reward model x"), (b, "reward model y")):
        write_results(Path(run), Stored(return_source=given))
    found = compared(a, b)
    assert found.metrics == ["success"]
    assert any(line.startswith("return: not compared") for line in found.warnings)
    with pytest.raises(InputError, match="reward model x and reward model y"):
        compare(read_sides([a, b]), ["return"])


def test_failed_episodes_are_not_successful_and_have_no_return(tmp_path):
    episodes = [played(seed=s, success=True) for s in range(25)]
    failed = [*episodes[:-1], played(seed=24, success=True, outcome=Outcome.FAILED, failure="time-out")]
    found = compared(run_directory(tmp_path, "a", episodes), run_directory(tmp_path, "b", failed))
    success, paid = (test for _, test in found.tests)
    assert (success.b, success.n) == (24 / 25, 25)
    assert (paid.b, paid.n) == (1.0, 24)
    assert any(line.startswith("return: compared on 24 shared items; left out: 1 of 25 of") for line in found.warnings)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("{good}", "needs two sides"),
        ("{good} {good}", "on two sides"),
        ("{good} {here}/nothing.jsonl", "no such file"),
        ("{good},{good} {bad}", "contains a run twice"),
        ("{good} columns.text=x {bad}", "not a column setting"),
        ("{good} {here}/numbers.jsonl", "no metric in common"),
        ("{good} {here}/empty.jsonl", "has no rows"),
        ("{good} {here}/other.jsonl", "30 of 30 items have different prompts or references"),
        ("{good} {here}/broken.json", "not a valid results file"),
        ("{good} {here}/texts.jsonl", "has no metrics to compare"),
        ("{good} {fair} --metrics blue", "they have .*exact, bleu, chrf"),
        ("a={here}/a.json b={here}/b.json --metrics z", "no side has the metric 'z'; they have x"),
        ("a={here}/a.json b={here}/b.json --base c", "--base c is not one of the sides; use one of a, b"),
        ("a={here}/a.json b={here}/twice", "twice: x is in .*/twice/a.json and in .*/twice/b.json"),
        ("a={here}/a.json b={here}/judged.json", "x has judge None in .*/a.json and m in .*/judged.json"),
        ("a={here}/a.json {here}/none", "none contains no results file"),
        ("a={here}/a.json b={here}/b.json --out t.pdf", "--out t.pdf must end in .json, .md or .csv"),
        ("a={here}/a.json b={here}/changed.json", "1 of 12 items have different prompts or references"),
        ("a={here}/a.json,{here}/renamed.json b={good}", "a: item 3 of .*renamed.json has another prompt"),
        ("{here}/lake {here}/ice", "on bandit and .* on frozen_lake"),
        ("{here}/lake {here}/unfinished", "no final episodes yet"),
        ("{here}/lake {here}/rows", "of stage sft without an environment"),
    ],
)
def test_invalid_arguments_are_refused(files, tmp_path, capsys, words, told):
    rows = [json.loads(line) for line in Path(files["good"]).read_text().splitlines()]
    write(tmp_path / "other.jsonl", [row | {"prompt": "Another?"} for row in rows])
    write(tmp_path / "numbers.jsonl", [{"id": n, "score": n} for n in range(30)])
    write(tmp_path / "texts.jsonl", [{"id": 1, "text": "x"}])
    write(tmp_path / "empty.jsonl", [])
    (tmp_path / "broken.json").write_text('{"format": 1, "metr')
    for name, about in (("a", {}), ("b", {}), ("judged", {"judge": "m"}), ("twice/a", {}), ("twice/b", {})):
        results(tmp_path / f"{name}.json", {"x": lambda i: i}, **about)
    changed = (tmp_path / "a.json").read_text().replace("prompt 3", "another prompt")
    (tmp_path / "changed.json").write_text(changed)
    (tmp_path / "renamed.json").write_text(changed.replace('"x"', '"z"'))
    (tmp_path / "none").mkdir()
    if "lake" in words:
        episodes = [played(seed=s) for s in range(20)]
        run_directory(tmp_path, "lake", episodes)
        run_directory(tmp_path, "ice", episodes, "frozen_lake")
        run_directory(tmp_path, "unfinished", [])
        RunDirectory.create(load_recipe([], [f"runs={tmp_path}", "name=rows", "data.train=x.jsonl"], "sft"))
    assert main(["compare", *words.format(here=tmp_path, **files).split()]) == 2
    assert re.search(told, " ".join(capsys.readouterr().err.split()))


def test_values_measured_with_other_settings_are_not_compared(files, tmp_path):
    for name, verifier in (("good", "final_number"), ("fair", "contains")):
        options = TextOptions(("verifier",), verifier=f"posttrain.environments.rewards:{verifier}")
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"reference": "', '"reference": "7 '))
        evaluate_text(read_predictions(str(path)), options).write(tmp_path / f"{name}.json")
    with pytest.raises(InputError, match=r"verifier has verifier .*final_number in .* and .*contains in "):
        compared(tmp_path / "good.json", tmp_path / "fair.json")


@pytest.mark.parametrize("key", ["judge", "rubric", "encoder", "model"])
def test_values_are_compared_only_under_equal_settings(key):
    def by(name, setting, kind="mean"):
        return side(name, [n % 5 for n in range(25)], kind=kind, about={key: setting})

    assert compare([by("a", "x"), by("b", "x")]).tests[0][1].p == 1.0
    with pytest.raises(InputError, match=f"score has {key} x in a and y in b"):
        compare([by("a", "x"), by("b", "y")])
    if key == "model":
        found = compare([by("a", "x", "perplexity"), by("b", "y", "perplexity")])
        assert any("comparable only if they share a tokenizer" in line for line in found.warnings)


def test_items_that_one_side_alone_has_right_are_listed(tmp_path):
    """Of both training runs of a side, and of shared items."""
    sides = []
    for name, runs in {"a": ([1, 1, 0, 1], [1, 1, 0, 0]), "b": ([0, 1, 1, 1], [0, 1, 1, 1])}.items():
        folders = []
        for number, won in enumerate(runs):
            episodes = [played(seed=seed, success=bool(one)) for seed, one in enumerate(won)]
            folders.append(run_directory(tmp_path, f"{name}{number}", episodes))
        sides.append(f"{name}={','.join(folders)}")
    one, other = (line for line in compared(*sides).details if line.startswith("success"))
    assert "only a, not b: 1 of 4 items (0)" in one
    assert "only b, not a: 1 of 4 items (2)" in other


@pytest.mark.parametrize(
    ("seeds", "tested", "paired", "told"),
    [
        (((0, 1, 2), (2, 0, 1)), (3, 3), True, ""),
        (((0, 1, 2), (3, 4, 5)), (3, 3), False, ""),
        (((0, 0, 1), (0, 0, 1)), (3, 3), False, "not paired by training seed, although both sides have 0, 1: "),
        (((0, 1, 2, 3), (1, 2, 3, 4)), (3, 3), True, "seeds of both sides, 1, 2, 3; left out of the difference: a, b"),
        (((0, 1, 2), (1, 2, 3)), (3, 3), False, "although both sides have 1, 2: pairs need 3 seeds"),
        (((0, 1, 2, 3), (0,)), (4, 1), False, ""),
    ],
)
def test_seeds_that_both_sides_have_are_paired(seeds, tested, paired, told):
    """Training seeds differ by much more than the recipes do, and each seed is better with the second one."""
    level = {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.2, 4: 0.4, 5: 0.8}
    sides = []
    for name, numbers, gain in zip("ab", seeds, (0.0, 0.05), strict=True):
        made = [side(name, [level[seed] + gain + 0.01 * (item % 3) for item in range(40)], seed) for seed in numbers]
        sides.append(Side(name, [run for one in made for run in one.runs]))
    found = compare(sides)
    [(_, test)] = found.tests
    assert ("paired by training seed" in test.test) == paired
    assert test.runs == tested
    assert (test.better_side == "B") == paired
    assert test.difference.value == pytest.approx(0.05) or not paired
    assert ("only differences of" in found.sentence()) != paired
    about = [line for line in found.warnings if "training seed" in line and "score" in line]
    assert [told in line for line in about] == [True] * bool(told)


def test_equal_runs_differ_by_a_number():
    values = [item % 2 / 2 for item in range(40)]  # two episodes of each task
    sentence = compare([side(name, values, 0, kind="rate") for name in "ab"]).sentence()
    assert "(+0.0 pp on each of 40 items)" in sentence
    assert "–" not in sentence
