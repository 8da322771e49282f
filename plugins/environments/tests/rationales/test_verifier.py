"""Verdicts against numbers computed by hand, and against running every case one by one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.environments.tests.rationales.made import BEST, OLD, USED, text

from posttrain.environments.rewards import load_reward
from posttrain.errors import InputError
from posttrain_environments.rationales.policies import DECISIONS, Attribute, Policy, Question, Rule
from posttrain_environments.rationales.procedures import Procedure, Step, best_procedure, fewest_questions, parse, write
from posttrain_environments.rationales.verifier import OTHER_FAULTS, UNSOUND, reward, verify


def numbers(verdict):
    return verdict.factual_accuracy, verdict.logical_soundness, verdict.efficiency


def faults(verdict):
    return {(fault.step, fault.kind) for fault in verdict.faults}


A = "A. Is it used? If YES, DENY. If NO, go to Step B."
B = "B. Is it late? If YES, go to Step C. If NO, APPROVE."
C = "C. Is it big? If YES, ESCALATE. If NO, APPROVE."


@pytest.mark.parametrize(
    ("lines", "expected", "found"),
    [
        ((A, B, C), (1, 1, 1), set()),
        # `late` first: all 8 are asked it; 4 late are asked `big`... then `used`: Q = (8 + 8 + 2) / 8 against 14 / 8.
        (
            (
                "A. Is it late? If YES, go to Step B. If NO, go to Step C.",
                "B. Is it big? If YES, go to Step D. If NO, go to Step C.",
                "C. Is it used? If YES, DENY. If NO, APPROVE.",
                "D. Is it used? If YES, DENY. If NO, ESCALATE.",
            ),
            (1, 1, 14 / 20),
            set(),
        ),
        # One decision for all: 4 of 8 right, one question.
        (("A. Is it used? If YES, DENY. If NO, DENY.",), (4 / 8, 1, 1), {("A", "wrong decision"), ("A", "redundant")}),
        # YES and NO of C exchanged: its two cases end wrongly.
        ((A, B, "C. Is it big? If YES, APPROVE. If NO, ESCALATE."), (6 / 8, 1, 1), {("C", "wrong decision")}),
        # C is missing: the two late cases get no decision; 1 of 4 branches is unsound.
        ((A, B), (6 / 8, 3 / 4, 1), {("B", "dangling")}),
        # D is never reached: 2 of 8 branches.
        ((A, B, C, "D. Is it big? If YES, DENY. If NO, APPROVE."), (1, 6 / 8, 1), {("D", "unreachable")}),
        # NO of B leads back to A: 4 unused cases, 2 of which are not late and loop forever. NO of A, NO of B are on the loop.
        (
            (A, "B. Is it late? If YES, go to Step C. If NO, go to Step A.", C),
            (6 / 8, 4 / 6, 0),
            {("A", "loop"), ("B", "loop")},
        ),
        # C asks `used` again, which is NO there: its YES is impossible. 1 of 2 late cases ends wrongly; Q is still 14 / 8.
        (
            (A, B, "C. Is it used? If YES, ESCALATE. If NO, APPROVE."),
            (7 / 8, 5 / 6, 1),
            {("C", "impossible"), ("C", "wrong decision")},
        ),
        # An extra question before C, for 2 cases: Q = 16 / 8.
        (
            (
                A,
                B,
                "C. Is it late? If YES, go to Step D. If NO, go to Step D.",
                "D. Is it big? If YES, ESCALATE. If NO, APPROVE.",
            ),
            (1, 7 / 8, 14 / 16),
            {("C", "impossible"), ("C", "redundant")},
        ),
        # B's question is not in the policy: the 4 unused cases get no decision, both its branches are unsound.
        ((A, "B. Is it red? If YES, go to Step C. If NO, APPROVE.", C), (4 / 8, 4 / 6, 1), {("B", "unknown question")}),
        # No step A: nothing happens.
        ((B, C), (0, 0, 0), {("B", "unreachable"), ("C", "unreachable")}),
        # One line too many counts as one part.
        ((A, B, C, "Good luck!"), (1, 6 / 7, 1), {("", "format")}),
        ((A, B, C, "C. Is it big?"), (1, 6 / 7, 1), {("C", "format")}),
    ],
)
def test_numbers_by_hand(lines, expected, found):
    verdict = verify(text(*lines), USED)
    assert numbers(verdict) == pytest.approx(expected, abs=1e-15)
    assert faults(verdict) == found
    accuracy, soundness, efficiency = expected
    assert verdict.reward == pytest.approx(accuracy * (2 + soundness + efficiency) / 4, abs=1e-15)


def test_a_step_reached_only_by_an_impossible_answer_is_unreachable():
    lines = (
        A,
        B,
        "C. Is it big? If YES, ESCALATE. If NO, go to Step D.",
        "D. Is it late? If YES, APPROVE. If NO, go to Step E.",
    )
    verdict = verify(text(*lines, "E. Is it used? If YES, DENY. If NO, APPROVE."), USED)
    assert faults(verdict) == {("D", "impossible"), ("E", "unreachable")}
    # 10 branches less NO of D and both of E; one more question for 1 of 8 cases.
    assert numbers(verdict) == (1, 7 / 10, 14 / 15)


def test_an_answer_that_implies_another_threshold_makes_a_branch_impossible():
    lines = (
        "A. Is it over 20 days old? If YES, go to Step B. If NO, APPROVE.",
        "B. Is it over 10 days old? If YES, DENY. If NO, DENY.",
    )
    assert ("B", "impossible") in faults(verify(text(*lines), OLD))


@pytest.mark.parametrize(
    "answer", ["", "I approve.", "A. Is it used?", "<think>A. Is it used? If YES, DENY. If NO, DENY."]
)
def test_text_without_steps_scores_zero(answer):
    verdict = verify(answer, USED)
    assert (*numbers(verdict), verdict.reward) == (0, 0, 0, 0)
    assert ("", "format") in faults(verdict)


asked = st.sampled_from([question.ask for question in OLD.questions] + ["Is it red?"])
target = st.sampled_from([*"ABCDEF", *DECISIONS])
made = st.lists(
    st.builds(Step, st.sampled_from("ABCDE"), asked, target, target), min_size=1, unique_by=lambda s: s.label
)


@given(made)
def test_any_procedure_against_running_the_cases_one_by_one(steps):
    right, questions, endless = 0, 0, False
    taken = set()
    for case in OLD.cases:
        at, seen = "A", set()
        while at in {step.label for step in steps} and at not in seen:
            seen.add(at)
            step = next(step for step in steps if step.label == at)
            questions += 1
            place = next((q for q, question in enumerate(OLD.questions) if question.ask == step.question), None)
            if place is None:
                break
            taken.add((at, OLD.answer(place, case)))
            at = step.next(OLD.answer(place, case))
        else:
            endless = endless or at in seen
        right += at == OLD.decide(case)
    verdict = verify(write(Procedure(tuple(steps), "so it is.")), OLD)
    assert verdict.factual_accuracy == right / len(OLD.cases)
    most = 0 if endless or not questions else min(1, fewest_questions(OLD) * len(OLD.cases) / questions)
    assert verdict.efficiency == float(most)
    assert {fault.kind for fault in verdict.faults} <= {*UNSOUND, *OTHER_FAULTS}
    assert (verdict.logical_soundness == 1) == (not {fault.kind for fault in verdict.faults} & set(UNSOUND))
    if "Is it red?" not in {step.question for step in steps}:
        # Sound branches are among those that a case takes.
        assert round(verdict.logical_soundness * 2 * len(steps)) <= len(taken)


def test_the_reward_reads_the_policy_of_the_row():
    loaded = load_reward("posttrain_environments.rationales.verifier:reward")
    assert (loaded.function, loaded.columns) == (reward, {"label"})
    assert reward(write(BEST), USED.to_json()) == 1.0
    assert reward("", USED.to_json()) == 0.0
    assert 0 < reward(text(A, B), USED.to_json()) < 1
    with pytest.raises(ValueError, match="no text `label`"):
        reward(write(BEST), None)
    with pytest.raises(InputError, match="not a policy in JSON"):
        reward(write(BEST), "APPROVE")


def test_questions_are_compared_by_their_letters_and_digits():
    assert verify(text(A.replace("Is it used?", "is it  USED ?"), B, C), USED).reward == 1
    assert parse(A).steps[0].question == "Is it used?"


def test_the_guide_shows_the_best_procedure_of_its_policy():
    facts = (
        "Is the trip for work?",
        "Is the traveller insured?",
        "Is the passport valid?",
        "Is the stay over 14 days?",
    )
    policy = Policy(
        "visas",
        tuple(Attribute((Question(ask, "the trip is for work", "it is not"),)) for ask in facts),
        (Rule(((3, False), (0, True)), False, "ESCALATE"), Rule(((2, True), (1, True)), True, "DENY")),
        "APPROVE",
    )
    guide = (Path(__file__).parents[4] / "docs" / "reference" / "rationales.md").read_text()
    assert f"```\n{write(best_procedure(policy))}\n```" in guide
