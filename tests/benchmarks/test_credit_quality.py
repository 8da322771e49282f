"""A wrong step in a right solution: only the steps that depend on it change; and the rank of its credit."""

import json
import re
import sys
from fractions import Fraction
from pathlib import Path

import credit_quality
import numpy as np
import pytest
from quality import ranking
from quality.arithmetic import NUMBER, calculations, literals, value_of, worth, written, wrong_calculations
from quality.injection import Injected, NotExactError, inject
from quality.solutions import read_jsonl, solve

from posttrain.credit.units.segment import sentence_starts
from posttrain.seeds import random_stream

REAL = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


def made_up(number: int) -> dict[str, str]:
    """A question and its solution: 2 to 6 steps of which each takes numbers of the question and results before it."""
    random = random_stream("made-up solution", number)
    given = sorted({int(n) for n in random.integers(13, 300, size=6)})
    steps, results = [], []
    for _ in range(int(random.integers(2, 7))):
        one = results[-1] if results and random.random() < 0.8 else int(random.choice(given))
        other = int(random.choice([*given, *results]))
        sign = "+" if other >= one or random.random() < 0.5 else "-"
        sign = "*" if random.random() < 0.2 else sign
        value = {"+": one + other, "-": one - other, "*": one * other}[sign]
        shown = f"{value:,}" if random.random() < 0.5 else f"${value}"
        steps.append(f"So that makes {one} {sign} {other} = <<{one}{sign}{other}={value}>>{shown} things.")
        results.append(value)
    question = f"There are {', '.join(map(str, given))} things. How many?"
    return {"question": question, "answer": "\n".join([*steps, f"#### {results[-1]}"])}


def check(made: Injected) -> None:
    """Check all documented properties of a wrong solution."""
    right, wrong = literals(made.right), literals(made.wrong)
    assert made.right[: made.place] == made.wrong[: made.place]
    assert NUMBER.sub("#", made.right) == NUMBER.sub("#", made.wrong)
    for before, after in zip(right, wrong, strict=True):
        follows = before.start >= made.place and before.value in made.changed
        assert after.value == (made.changed[before.value] if follows else before.value)
    assert right[-1].value != wrong[-1].value
    assert right[-1].value in made.changed
    broken = []
    for old, new in zip(calculations(made.right), calculations(made.wrong), strict=True):
        said, given = value_of(made.wrong[slice(*new.shown)]), made.wrong[slice(*new.expression)]
        was_right = worth(made.right[slice(*old.expression)]) == value_of(made.right[slice(*old.shown)])
        if new.result[0] == made.place:
            broken.append(new)
            assert was_right
            assert worth(given) != said
            assert made.right[slice(*old.expression)] == given
        elif old.start > made.place and value_of(made.right[slice(*old.shown)]) in made.changed:
            assert worth(given) == said
        else:
            assert made.right[slice(*old.expression)] == given
    assert len(broken) == 1
    assert len(sentence_starts(made.right)) == len(sentence_starts(made.wrong))


def test_only_later_steps_of_synthetic_solutions_change():
    rows = [(number, made_up(number)) for number in range(300)]
    found, skipped = solve(rows, "A: ", len(rows), 0)
    assert len(found) + sum(skipped.values()) == 300
    assert len(found) > 150
    for one in found:
        assert one.injected.right.splitlines()[-1].startswith("A: ")
        check(one.injected)
    assert any(len(one.injected.changed) > 2 for one in found)
    places = [one.injected.wrong[: one.injected.place].count("\n") for one in found]
    assert min(places) == 0
    assert max(places) >= 3
    assert solve(rows, "A: ", 5, 0)[0] == found[:5]
    assert solve(rows, "A: ", 300, 1)[0] != found


def test_only_later_steps_of_real_solutions_change():
    if not REAL.is_file():
        pytest.skip("the files of GSM8K are not here")
    found, skipped = solve(list(enumerate(read_jsonl(REAL)))[1500:1700], "A: ", 200, 0)
    assert len(found) > 100
    assert sum(skipped.values()) == 200 - len(found)
    for one in found:
        check(one.injected)


def test_a_changed_result_goes_through_annotations_text_and_commas():
    question = "A band sells 1,600 tickets at $15 and pays $8,000 for the hall. What is left after 40% tax?"
    solution = (
        "They take 1,600*15=$<<1600*15=24000>>24,000.\n"
        "After the hall, 24,000 - 8,000 = $<<24000-8000=16000>>16,000 of the 24,000 is left.\n"
        "The tax is 16000*.4 = $<<16000*.4=6400.00>>6400.00\n"
        "That leaves 16000-6400 = $<<16000-6400=9600>>9600\n"
        "A: 9600"
    )
    places = set()
    for seed in range(20):
        made = inject(question, solution, random_stream(seed))
        check(made)
        lines = [re.sub(r"<<.*?>>", "", line) for line in made.wrong.splitlines()]
        values = [[one.value for one in literals(line)] for line in lines]
        first, hall, tax, rest, final = values[0][-1], values[1][2], values[2][-1], values[3][-1], values[4][0]
        assert values[1][0] == values[1][3] == first
        place = made.wrong[: made.place].count("\n")
        right = [first == 24000, hall == first - 8000, tax == hall * Fraction(2, 5), rest == hall - tax]
        assert right == [number != place for number in range(4)]
        assert final == rest
        places.add(place)
    assert places == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("question", "solution", "reason"),
    [
        ("5 boys, 9 girls?", "There are 5+9=14.\nA: 14", "annotated"),
        ("5 boys, 9 girls?", "There are <<5+9=14>>many.\nA: 14", "followed"),
        ("5 boys, 9 girls?", "There are <<5+9=15>>15.\nA: 15", "wrong or rounded already"),
        ("5 boys, 9 girls, 14 dogs?", "There are <<5+9=14>>14.\nA: 14", "equals another"),
        ("5 boys, 9 girls?", "There are <<5+9=14>>14.\nSo 14+6=20 of them.\nA: 14", "nowhere"),
        ("5 boys, 9 girls, 6 cats, 20 dogs?", "There are <<5+9=14>>14.\nSo 14+6=20 of them.\nA: 14", "not annotated"),
        ("15 boys, 15 girls?", "There are <<15+15=30>>30.\nIn 30 days still 30.\nA: 30", "use anyway"),
        ("5 boys, 9 girls?", "There are <<5+9=14>>14.\nA: 5", "final answer"),
    ],
)
def test_operations_that_would_be_inexact_are_not_done(question, solution, reason):
    with pytest.raises(NotExactError, match=reason):
        inject(question, solution, random_stream(0))


def test_numbers_are_read_and_written_exactly():
    assert [one.value for one in literals("$1,200.50 of .5, 3 and 40%.")] == [Fraction(2401, 2), Fraction(1, 2), 3, 40]
    assert worth("(1/3+.5)*6 - -1") == 6
    for value, like, text in [("1300", "1,200", "1,300"), ("900", "1,200", "900"), ("7.5", "3.25", "7.50")]:
        assert written(Fraction(value), like) == text
    assert written(Fraction(".3"), ".5") == ".3"
    for value, like in [(Fraction(1, 2), "3"), (Fraction(1, 3), "2.5"), (Fraction(0), "1"), (Fraction(-2), "1")]:
        with pytest.raises(ValueError):
            written(value, like)
    assert wrong_calculations("<<1+1=2>>2 <<1/3=.33>>.33 <<2/3=.67>>.67 <<1+1=3>>3 <<1/3=.35>>.35 <<x=2>>2") == 2
    for text in ("2x", "1/0", "__import__('os')", "2**9"):
        with pytest.raises(ValueError):
            worth(text)


def test_credit_is_ranked_with_ties_counting_one_half():
    assert ranking.lowest(np.array([1.0, -2, 3]), 1) == 1
    assert ranking.lowest(np.array([-2.0, -2, 3]), 1) == 0.5
    assert ranking.lowest(np.array([-2.0, -2, 3]), 2) == 0
    assert [ranking.rank(np.array([4.0, 2, 2, 9]), k) for k in range(4)] == [3, 1.5, 1.5, 4]
    assert ranking.auc(np.array([4.0, 2, 2, 9]), 1) == pytest.approx(2.5 / 3)
    same = [np.full(k, 0.7) for k in (3, 4, 5)]
    found = ranking.found(same, same, [0, 2, 2])
    assert found.lowest.value == pytest.approx((1 / 3 + 1 / 4 + 1 / 5) / 3)
    assert found.chance == pytest.approx(found.lowest.value)
    assert found.of_steps.value == found.chance_of_steps == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert (found.auc.value, found.drop.value) == (0.5, 0.5)
    right = [np.array([1.0, 2, 3]), np.array([3.0, 2, 1])]
    wrong = [np.array([1.0, -2, 3]), np.array([0.0, 2, 1])]
    best = ranking.found(wrong, right, [1, 0])
    assert (best.lowest.value, best.unchanged, best.auc.value, best.of_steps.value, best.drop.value) == (1, 0, 1, 1, 1)


@pytest.fixture(scope="module")
def judges(tiny_model, tmp_path_factory):
    """Two reward models with random heads, one for whole answers and one for units."""
    from posttrain.models.reward import RewardModel
    from posttrain.recipe.model import ModelRecipe
    from posttrain.recipe.units import StoredUnits, TextUnits

    folder = tmp_path_factory.mktemp("judges")
    for name, units in (("outcome", None), ("units", StoredUnits(segmenter=TextUnits(type="sentence")))):
        model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=1)
        model.set_units(units)
        model.set_statistics(0.1, 0.5)
        model.export(folder / name)
    return folder


@pytest.mark.slow
def test_the_table_of_random_judges(judges, tmp_path, monkeypatch, capsys):
    rows, pairs, table = tmp_path / "rows.jsonl", tmp_path / "pairs.jsonl", tmp_path / "table.json"
    rows.write_text("".join(json.dumps(made_up(number)) + "\n" for number in range(40)))

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["credit_quality", "--solutions", str(rows), *words])
        credit_quality.main()

    run("--rows", "20:", "--count", "8", "--write-pairs", str(pairs))
    assert "8 of " in capsys.readouterr().out
    written_pairs = read_jsonl(pairs)
    assert len(written_pairs) == 8
    assert all(row["chosen"][0] == row["rejected"][0] and row["chosen"] != row["rejected"] for row in written_pairs)
    words = f"--rows :20 --count 6 --pairs {pairs} --outcome {judges}/outcome --units {judges}/units"
    run(*words.split(), *f"--calculator --threads 1 --json {table}".split())
    content = json.loads(table.read_text())
    found = {row["credit"]: row for row in content["rows"] if row["judge"] != "calculator"}
    perfect = {row["credit"]: row for row in content["rows"] if row["judge"] == "calculator"}
    assert all(perfect[name]["lowest"] == 1 for name in ("prefix", "loo"))
    assert all(perfect[name]["AUC"] == perfect[name]["drop"] == 1 for name in ("prefix", "loo"))
    assert perfect["trunc"]["drop"] == 1
    assert perfect["even"]["lowest"] == pytest.approx(perfect["even"]["chance"])
    assert list(found) == ["prefix", "trunc", "loo", "even", "outcome", "unit rewards"]
    assert all(0 <= row["lowest"] <= 1 and 0 <= row["AUC"] <= 1 and row["n"] > 2 for row in found.values())
    assert found["even"]["lowest"] == pytest.approx(found["even"]["chance"])
    assert found["even"]["AUC"] == 0.5
    assert found["prefix"]["forwards"] == 1
    assert found["even"]["forwards"] == found["unit rewards"]["forwards"] == 0
    assert found["loo"]["tokens"] > found["prefix"]["tokens"] > 0
    assert any("held-out pairs" in note for note in content["notes"])
