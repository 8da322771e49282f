"""Whole comparisons: input, errors, and the final sentence."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from posttrain.episode import Outcome
from posttrain.errors import InputError
from posttrain.evaluation.compare import compare as compare_sides
from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.results import MetricResult
from posttrain.evaluation.sides import Run, Side, read_sides
from posttrain.evaluation.statistics import holm, item_sums
from posttrain.evaluation.text_metrics import TextOptions, evaluate_text
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import write_results
from tests.evaluation.made import predictions, write
from tests.rollout.episodes import played

compare = partial(compare_sides, draws=500)


@pytest.fixture
def files(tmp_path):
    """Predictions of three models, the later the worse, and of another seed of the first."""
    made = {"good": (0.05, 0), "fair": (0.4, 1), "bad": (0.8, 2), "again": (0.05, 3)}
    return {
        name: str(predictions(tmp_path / f"{name}.jsonl", wrong, seed=seed)) for name, (wrong, seed) in made.items()
    }


def run_directory(tmp_path, name, episodes, environment="bandit", final=5):
    from posttrain.recipe.compose import load_recipe

    keys = [f"runs={tmp_path}", f"name={name}", f"environment.type={environment}"]
    run = RunDirectory.create(load_recipe([], keys, "rl"))
    if episodes:
        write_episodes(run.episodes, 0, "final", [played(seed=9, success=False)])
        write_episodes(run.episodes, final, "final", episodes)
    return str(run.path)


def test_the_better_file_is_named_and_p_values_are_corrected(files, tmp_path):
    found = compare(read_sides([files["bad"], files["good"], files["again"]]))
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
    assert kept["conclusion"] == sentence
    assert len(kept["tests"]) == 6


def test_swapping_the_order_reverses_it(files):
    there = compare(read_sides([files["good"], files["fair"]], ["bleu"])).tests[0][1]
    back = compare(read_sides([files["fair"], files["good"]], ["bleu"])).tests[0][1]
    assert there.better_side == "A"
    assert back.better_side == "B"
    there, back = there.difference, back.difference
    assert (there.value, there.low) == pytest.approx((-back.value, -back.high))


def test_equal_models_have_no_significant_difference(files):
    found = compare(read_sides([files["good"], files["again"]], ["bleu", "chrf"]))
    assert all(test.better_side is None for _, test in found.tests)
    assert "no significant difference between again.jsonl and good.jsonl in bleu" in found.sentence()


def test_rows_are_identified_by_prompt_and_not_by_seed(tmp_path):
    rows = [{"prompt": f"Question {n}?", "seed": n % 3, "score": n % 7} for n in range(30)]
    a = write(tmp_path / "a.jsonl", rows)
    b = write(tmp_path / "b.jsonl", [row | {"score": row["score"] + 1} for row in rows])
    assert compare(read_sides([str(a), str(b)])).tests[0][1].n == 30
    answered = write(tmp_path / "p.jsonl", [row | {"prediction": "x", "reference": "x"} for row in rows])
    run = read_sides([str(answered)], ["score", "exact"])[0].runs[0]
    assert run.metrics["score"].scores.items.keys() == run.metrics["exact"].scores.items.keys()
    seeds = write(tmp_path / "s.jsonl", [{"seed": n % 3, "score": n} for n in range(30)])
    assert "30 rows are of 3 items" in read_sides([str(seeds)])[0].runs[0].details[0]


def test_the_error_of_a_wrong_metric_lists_the_metrics(tmp_path, monkeypatch):
    scores = write(tmp_path / "a.jsonl", [{"id": n, "ok": True} for n in range(30)])
    with pytest.raises(InputError, match="no side has the metric 'okay'; they have ok"):
        read_sides([str(scores)], ["okay"])
    answered = predictions(tmp_path / "p.jsonl", 0.5)
    with pytest.raises(InputError, match=r"they have .*exact, bleu, chrf"):
        read_sides([str(answered)], ["blue"])
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
    def side(name, shift):
        bias = item_sums("mean", ((str(n), (shift, 1.0)) for n in range(25)))
        won = item_sums("mean", ((str(n), (n % 3 + shift, 1.0)) for n in range(25)))
        return Side(name, [Run(name, {"bias": MetricResult("bias", bias, "neither"), "won": MetricResult("won", won)})])

    found = compare([side("a", 0.0), side("b", -1.0)])
    assert [test.metric for _, test in found.tests] == ["won"]
    assert any("bias: not compared" in line for line in found.details)


def test_few_items_and_few_runs_are_inconclusive(tmp_path):
    """Three items, or two runs a side, that differ as runs of one recipe do."""

    def file(name, values):
        return str(write(tmp_path / f"{name}.jsonl", [{"id": n, "score": value} for n, value in enumerate(values)]))

    few = compare(read_sides([file("a", [0.1, 0.2, 0.3]), file("b", [0.6, 0.8, 0.7])]))
    assert "is better than" not in few.sentence()
    assert any("only 3 items" in line for line in few.warnings)
    hard = [n / 10 for n in range(40)]
    runs = [file(f"r{i}", [value + shift for value in hard]) for i, shift in enumerate((0.0, 0.3, 0.5, 0.6))]
    found = compare(read_sides([f"a={runs[0]},{runs[1]}", f"b={runs[2]},{runs[3]}"]))
    assert "is better than" not in found.sentence()


def test_several_runs_of_a_side(files):
    sides = read_sides([f"new={files['good']},{files['again']}", f"old={files['fair']},{files['bad']}"])
    assert [(side.name, len(side.runs)) for side in sides] == [("new", 2), ("old", 2)]
    found = compare(sides)
    assert "rough" in found.warnings[0]
    assert "other seeds" not in found.sentence()
    assert found.tests[0][1].runs == (2, 2)
    single = compare(read_sides([f"{files['good']},{files['again']}", files["bad"]]))
    assert "one training run of bad.jsonl" in single.warnings[0]
    assert "other seeds" in single.sentence()


def test_results_files_contain_the_metrics_of_predictions(files, tmp_path):
    words = []
    for name in ("good", "fair"):
        results = evaluate_text(read_predictions(files[name]), TextOptions(("bleu", "chrf", "exact")))
        results.write(tmp_path / f"{name}.json")
        words.append(str(tmp_path / f"{name}.json"))
    of_results, of_files = (
        compare(read_sides(words, ["bleu", "exact"])),
        compare(read_sides([files["good"], files["fair"]], ["bleu", "exact"])),
    )
    assert [test for _, test in of_results.tests] == [test for _, test in of_files.tests]


def test_other_items_are_left_out_with_counts(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"id": n, "score": n % 3} for n in range(30)])
    b = write(tmp_path / "b.jsonl", [{"id": n, "score": 1 + n % 3} for n in range(5, 40)])
    found = compare(read_sides([str(a), str(b)]))
    assert found.tests[0][1].n == 25
    assert found.tests[0][1].difference.value == pytest.approx(1.0)
    assert f"score: compared on 25 shared items; left out: 5 of 30 of {a}, 10 of 35 of {b}" in found.warnings
    far = write(tmp_path / "far.jsonl", [{"id": n, "score": 1} for n in range(100, 110)])
    with pytest.raises(InputError, match="fewer than two items in common"):
        compare(read_sides([str(a), str(far)]))


def test_a_missing_score_is_omitted_and_not_zero(tmp_path):
    rows = [{"id": n, "score": 2.0} for n in range(25)]
    a = write(tmp_path / "a.jsonl", rows)
    b = write(tmp_path / "b.jsonl", [*rows[:-1], {"id": 24, "score": None, "passed": True}])
    c = write(tmp_path / "c.jsonl", rows)
    found = compare(read_sides([str(a), str(b)], ["score"]))
    assert (found.tests[0][1].b, found.tests[0][1].n) == (2.0, 24)
    assert any("1 rows without a number in score" in line for line in found.details)
    c.write_text(c.read_text()[:-4])
    assert "1 row dropped: broken JSON" in read_sides([str(a), str(c)])[1].runs[0].details[0]


def test_runs_are_compared_by_the_final_episodes_of_their_trained_models(tmp_path):
    seeds = range(30)
    a = run_directory(tmp_path, "a", [played(seed=s, rewards=(0.0,), success=s < 5) for s in seeds])
    b = run_directory(tmp_path, "b", [played(seed=s, rewards=(1.0,), success=s < 20) for s in seeds])
    found = compare(read_sides([a, b]))
    success, paid = (test for _, test in found.tests)
    assert (success.metric, success.test, success.a, success.b) == ("success", "McNemar, exact", 5 / 30, 20 / 30)
    assert success.p == pytest.approx(2 / 2**15)
    assert (paid.metric, paid.difference.value) == ("return", 1.0)
    assert "a: final episodes of step 5" in found.details[0]


def test_returns_of_different_rewards_are_not_compared(tmp_path):
    episodes = [played(seed=s, success=s < 5) for s in range(30)]
    sides = [run_directory(tmp_path, name, episodes) for name in "ab"]
    for side, given in zip(sides, ("reward model x", "reward model y"), strict=True):
        write_results(Path(side), [], [], return_source=given)
    found = compare(read_sides(sides))
    assert found.metrics == ["success"]
    assert any(line.startswith("return: not compared") for line in found.warnings)
    with pytest.raises(InputError, match="reward model x and reward model y"):
        compare(read_sides(sides), ["return"])


def test_failed_episodes_are_not_successful_and_have_no_return(tmp_path):
    episodes = [played(seed=s, success=True) for s in range(25)]
    failed = [*episodes[:-1], played(seed=24, success=True, outcome=Outcome.FAILED, failure="time-out")]
    found = compare(read_sides([run_directory(tmp_path, "a", episodes), run_directory(tmp_path, "b", failed)]))
    success, paid = (test for _, test in found.tests)
    assert (success.b, success.n) == (24 / 25, 25)
    assert (paid.b, paid.n) == (1.0, 24)
    assert any(line.startswith("return: compared on 24 shared items; left out: 1 of 25 of") for line in found.warnings)


def test_runs_of_other_environments_are_refused_and_other_keys_reported(tmp_path):
    episodes = [played(seed=s) for s in range(20)]
    a = run_directory(tmp_path, "a", episodes)
    other = run_directory(tmp_path, "c", episodes, "frozen_lake")
    with pytest.raises(InputError, match=r"on bandit and .* on frozen_lake"):
        compare(read_sides([a, other]))
    with pytest.raises(InputError, match="no final episodes yet"):
        read_sides([a, run_directory(tmp_path, "d", [])])
    from posttrain.recipe.compose import load_recipe

    rows = RunDirectory.create(load_recipe([], [f"runs={tmp_path}", "name=e", "data.train=x.jsonl"], "sft"))
    with pytest.raises(InputError, match="of stage sft without an environment"):
        read_sides([a, str(rows.path)])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["good"], "needs two sides"),
        (["good", "good"], "on two sides"),
        (["good", "nothing"], "no such file"),
        (["good,good", "bad"], "contains a run twice"),
        (["good", "columns.text=x", "bad"], "not a column setting"),
        (["good", "numbers"], "no metric in common"),
        (["good", "empty"], "has no rows"),
        (["good", "other"], "30 of 30 items have different prompts or references"),
        (["good", "broken"], "not a valid results file"),
        (["good", "texts"], "has no metrics to compare"),
    ],
)
def test_invalid_arguments_are_refused(files, tmp_path, words, told):
    paths = files | {"nothing": str(tmp_path / "nothing.jsonl"), "empty": str(tmp_path / "empty.jsonl")}
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.json").write_text('{"format": 1, "metr')
    paths["broken"] = str(tmp_path / "broken.json")
    paths["numbers"] = str(write(tmp_path / "numbers.jsonl", [{"id": n, "score": n} for n in range(30)]))
    rows = [json.loads(line) for line in Path(files["good"]).read_text().splitlines()]
    paths["other"] = str(write(tmp_path / "other.jsonl", [row | {"prompt": "Another?"} for row in rows]))
    paths["texts"] = str(write(tmp_path / "texts.jsonl", [{"id": 1, "text": "x"}]))
    given = [",".join(paths.get(part, part) for part in word.split(",")) for word in words]
    with pytest.raises(InputError, match=told):
        compare(read_sides(given))


def test_values_measured_with_other_settings_are_not_compared(files, tmp_path):
    for name, verifier in (("good", "final_number"), ("fair", "contains")):
        options = TextOptions(("verifier",), verifier=f"posttrain.environments.rewards:{verifier}")
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"reference": "', '"reference": "7 '))
        evaluate_text(read_predictions(str(path)), options).write(tmp_path / f"{name}.json")
    with pytest.raises(InputError, match=r"verifier has verifier .*final_number in .* and .*contains in "):
        compare(read_sides([str(tmp_path / "good.json"), str(tmp_path / "fair.json")]))
    with pytest.raises(InputError, match="no side has the metric 'bleu'; they have verifier"):
        read_sides([str(tmp_path / "good.json"), str(tmp_path / "fair.json")], ["bleu"])


@pytest.mark.parametrize("key", ["judge", "rubric", "encoder", "model"])
def test_values_are_compared_only_under_equal_settings(key):
    def side(name, by, kind="mean"):
        scores = item_sums(kind, ((str(n), (n % 5, 1.0)) for n in range(25)))
        return Side(name, [Run(name, {"score": MetricResult("score", scores, about={key: by})})])

    assert compare([side("a", "x"), side("b", "x")]).tests[0][1].p == 1.0
    with pytest.raises(InputError, match=f"score has {key} x in a and y in b"):
        compare([side("a", "x"), side("b", "y")])
    if key == "model":
        found = compare([side("a", "x", "perplexity"), side("b", "y", "perplexity")])
        assert any("comparable only if they share a tokenizer" in line for line in found.warnings)


def test_items_that_one_side_alone_has_right_are_listed(tmp_path):
    """Of both training runs of a side, and of shared items."""
    won = {"a": ([1, 1, 0, 1], [1, 1, 0, 0]), "b": ([0, 1, 1, 1], [0, 1, 1, 1])}
    sides = []
    for name, runs in won.items():
        folders = [
            run_directory(
                tmp_path, f"{name}{number}", [played(seed=seed, success=bool(one)) for seed, one in enumerate(of)]
            )
            for number, of in enumerate(runs)
        ]
        sides.append(f"{name}={','.join(folders)}")
    details = [line for line in compare(read_sides(sides)).details if line.startswith("success")]
    assert [re.findall(r"(\d+) of (\d+) items \(([^)]*)\)", line)[0] for line in details] == [
        ("1", "4", "0"),
        ("1", "4", "2"),
    ]
    assert "only a, not b" in details[0]
    assert "only b, not a" in details[1]


@pytest.mark.parametrize(
    ("seeds", "tested", "paired", "told"),
    [
        (((0, 1, 2), (2, 0, 1)), (3, 3), True, ""),
        (((0, 1, 2), (3, 4, 5)), (3, 3), False, ""),
        (((0, 0, 1), (0, 0, 1)), (3, 3), False, "not paired by training seed, although both sides have 0, 1: "),
        (
            ((0, 1, 2, 3), (1, 2, 3, 4)),
            (3, 3),
            True,
            "seeds of both sides, 1, 2, 3; left out of the difference: a-0, b-4",
        ),
        (((0, 1, 2), (1, 2, 3)), (3, 3), False, "although both sides have 1, 2: pairs need 3 seeds"),
        (((0, 1, 2, 3), (0,)), (4, 1), False, ""),
    ],
)
def test_seeds_that_both_sides_have_are_paired(seeds, tested, paired, told):
    """Training seeds differ by much more than the recipes do, and each seed is better with the second one."""

    def side(name, numbers, gain):
        level = {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.2, 4: 0.4, 5: 0.8}
        runs = []
        for number in numbers:
            values = [(str(item), (level[number] + gain + 0.01 * (item % 3),)) for item in range(40)]
            scores = item_sums("mean", [(item, (*value, 1.0)) for item, value in values])
            runs.append(Run(f"{name}-{number}", {"score": MetricResult("score", scores)}, seed=number))
        return Side(name, runs)

    found = compare([side("a", seeds[0], 0.0), side("b", seeds[1], 0.05)])
    [(_, test)] = found.tests
    assert ("paired by training seed" in test.test) == paired
    assert test.runs == tested
    assert (test.better_side == "B") == paired
    assert test.difference.value == pytest.approx(0.05) or not paired
    assert ("only differences of" in found.sentence()) != paired
    about = [line for line in found.warnings if "training seed" in line and "score" in line]
    assert [told in line for line in about] == [True] * bool(told)


def test_equal_runs_differ_by_a_number():
    values = [(str(item), (item % 2 / 2, 1.0)) for item in range(40)]  # two episodes of each task
    metrics = {"success": MetricResult("success", item_sums("rate", values))}
    sides = [Side(name, [Run(name, metrics, seed=0)]) for name in "ab"]
    sentence = compare(sides).sentence()
    assert "(+0.0 pp on each of 40 items)" in sentence
    assert "–" not in sentence
