"""The tables of claims: their numbers, the exact credit of steps, and that the page has the tables of the stored runs."""

from pathlib import Path

import claims
import numpy as np
import pytest
from claimed import games
from harness import paired, ranked_pairs, verified_units
from harness.table import read_lines

from posttrain.credit.units.mixing import UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain_environments.rationales.policies import Attribute, Policy, Question, Rule

FOLDER = Path(__file__).parents[2]
POLICY = Policy(
    "cases",
    tuple(Attribute((Question(f"{word}?", word, f"not {word}"),)) for word in ("old", "red")),
    (Rule(((0, True),), True, "DENY"), Rule(((1, True),), True, "APPROVE")),
    "ESCALATE",
)
STEPS = ["A. old? If YES, DENY. If NO, go to Step B.\n", "B. red? If YES, APPROVE. If NO, ESCALATE.\n"]
WRONG = "B. red? If YES, DENY. If NO, ESCALATE.\n"
SPANS = Spans(np.array([0, 1, 2, 3]), np.array([True, True, False]))


def credit(estimator, steps):
    parts = [*steps, "Rationale: short."]
    return verified_units.unit_credit(estimator, parts, SPANS, POLICY, UnitRewards)


def test_each_step_is_credited_with_the_cases_that_it_decides():
    right, wrong = credit("prefix", STEPS), credit("prefix", [STEPS[0], WRONG])
    assert right.outcome == 1
    assert right.credits.sum() == pytest.approx(1)
    assert right.residual == pytest.approx(0)
    # Without its second step, the procedure decides two of four cases, one branch of two leads nowhere, and a line is missing.
    assert right.credits[0] == pytest.approx(0.5 * (2 + 1 / 3 + 1) / 4)
    assert right.credits[0] == pytest.approx(wrong.credits[0])
    assert wrong.credits[1] < right.credits[1]


def test_a_fault_costs_its_step_half_of_its_reward():
    assert credit("unit_rewards", STEPS).credits.tolist() == [1, 1, 0]
    assert credit("unit_rewards", [STEPS[0], WRONG]).credits.tolist() == [1, 0.5, 0]


def test_a_step_that_no_case_reaches_has_one_fault_and_no_reward_of_reached_units():
    steps = ["A. old? If YES, DENY. If NO, ESCALATE.\n", STEPS[1]]
    assert credit("unit_rewards", steps).credits.tolist() == [0.5, 0.5, 0]
    assert credit("reached_unit_rewards", steps).credits.tolist() == [0.5, 0, 0]


def test_leaving_out_a_step_costs_what_it_decides():
    without = credit("loo", STEPS).credits
    assert without[0] == pytest.approx(1)  # nothing starts at A
    assert 0 < without[1] < 1
    assert without[2] == 0


def test_truncation_counts_a_later_step_again():
    credits = credit("drca_published", STEPS).credits
    assert credits[0] == pytest.approx(1)
    assert credits.sum() > 1


def test_the_seeds_that_would_decide():
    # Mean 1, deviation 1: t(0.975, n - 1) / sqrt(n) is below 1 from 7 seeds on.
    assert paired.seeds_needed(1 + np.array([-1, 0, 1])) == "7"
    assert paired.seeds_needed(np.array([-1.0, 1.0])) == f"more than {paired.MOST_SEEDS}"


def test_differences_are_paired_by_seed_and_task():
    tasks = np.linspace(0, 1, 40)
    lines = [
        {"variant": name, "seed": seed, "final": (tasks + 0.1 * seed + gain).tolist()}
        for name, gain in (("base", 0.0), ("better", 0.05))
        for seed in (3, 1, 0, 2, 4)
    ]
    assert paired.difference(lines, "better", "base", "final")[0].startswith("5.0%")
    assert paired.difference(lines, "base", "base", "final")[0] == "–"


def test_quality_is_the_share_of_right_places():
    assert ranked_pairs.quality("old red hot", "old big hot") == pytest.approx(2 / 3)
    assert ranked_pairs.quality("old red hot", "old red hot hot") == pytest.approx(3 / 4)
    assert ranked_pairs.quality("old red hot", "") == 0


def test_rewards_are_shown_in_deviations_of_those_before_rl():
    scores = {"random": [-1, 1] * 3, "before": [1, 3] * 3, "after": [3, 5] * 3, "optimal": [5, 7] * 3}
    scored = dict.fromkeys(("its reward model", "second reward model", "quality"), scores)
    line = {"variant": "rloo", "scores": scored, "ranked": [[1, 0], [1, 1]], "equally long": [1, 0]}
    table = claims.rewarded_table([{**line, "seed": seed} for seed in range(5)])
    row = next(row for row in table.splitlines() if row.startswith("| its reward model | 5"))
    assert [float(cell.split()[0]) for cell in row.split("|")[3:8]] == [-2, 0, 2, 4, 2]


def test_the_settings_of_a_search_are_ranked_by_each_seed():
    successes = {f"{group} | {name}": k for group, names in games.SEARCH.items() for k, name in enumerate(names)}
    lines = [
        {"variant": name, "seed": seed, "final": [1] * (k if seed == 0 else 10 - k) + [0] * 10}
        for name, k in successes.items()
        for seed in (0, 1)
    ]
    row = games.search_table(lines).splitlines()[2].split(" | ")
    assert row[3:5] == ["16 x 16, then 4 x 4", "9, 9"]
    assert row[5] == "-1.00 |"


def test_the_page_has_the_tables_of_the_stored_runs():
    page = (FOLDER / "docs" / "results" / "claims.md").read_text(encoding="utf-8")
    lines = read_lines(FOLDER / "docs" / "results" / "claims.jsonl")
    for name in claims.RUNNERS:
        for table in claims.tables([line for line in lines if line["claim"] == name]).split("\n\n")[1:]:
            assert table.strip() in page
