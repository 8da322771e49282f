"""Writing and reading procedures, and the best one against an exhaustive search."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.environments.tests.rationales.made import BEST, OLD, USED

from posttrain.seeds import random_stream
from posttrain_environments.rationales.domains import draw_policy
from posttrain_environments.rationales.policies import DECISIONS
from posttrain_environments.rationales.procedures import (
    LABELS,
    Procedure,
    Step,
    best_procedure,
    fewest_questions,
    parse,
    write,
)
from posttrain_environments.rationales.verifier import verify

lines = st.text(min_size=1).map(lambda text: " ".join(text.split())).filter(bool)
questions = lines.map(lambda text: " ".join(text.replace("?", " ").split())).filter(bool).map(lambda text: f"{text}?")
targets = st.sampled_from([*LABELS, *DECISIONS])
steps = st.builds(Step, st.sampled_from(LABELS), questions, targets, targets)
procedures = st.builds(
    Procedure, st.lists(steps, max_size=8, unique_by=lambda step: step.label).map(tuple), rationale=lines
)


@given(procedures)
def test_written_procedures_are_parsed_back(procedure):
    reading = parse(write(procedure))
    assert (Procedure(reading.steps, reading.rationale), reading.problems) == (procedure, ())


# The Kelvin sign and the long s are equal to K and S for some ways of ignoring case.
_STEP_PARTS = (
    *("A.", "B. ", "Is it used?", "?", " If YES, ", "If NO, ", "go to Step "),
    *("B", "DENY", "APPROVE.", "Rationale:"),
)
_OTHER_PARTS = ("\n", " ", "\u2028", "\x1c", "\x00", "\ud800", "\u212a", "\u017f", "<think>", "</think>")
pieces = st.sampled_from((*_STEP_PARTS, *_OTHER_PARTS))


@given(st.one_of(st.text(), st.lists(pieces, max_size=30).map("".join)))
def test_any_text_can_be_read_and_judged(text):
    reading = parse(text)
    assert len({step.label for step in reading.steps}) == len(reading.steps)
    verdict = verify(text, USED)
    assert 0 <= verdict.reward <= 1
    assert reading.steps or verdict.reward == 0


def test_the_written_form_and_what_reading_ignores():
    assert write(BEST) == (
        "A. Is it used? If YES, DENY. If NO, go to Step B.\n"
        "B. Is it late? If YES, go to Step C. If NO, APPROVE.\n"
        "C. Is it big? If YES, ESCALATE. If NO, APPROVE.\n"
        "Rationale: Used things are never taken back."
    )

    # Reading ignores white space, the case of keywords, and a thought.
    text = (
        "<think>\nA. hm\n</think>\n\n  A.  Is   it used ? if yes, deny.  IF NO, Go To step b\n\nrationale:  why   not "
    )
    assert parse(text) == ((Step("A", "Is it used?", "DENY", "B"),), "why not", ())


@pytest.mark.parametrize(
    ("line", "step", "message"),
    [
        ("D. Is it? If YES, DENY.", "D", "not of the form of a step"),
        ("A. Is it big? If YES, DENY. If NO, DENY.", "A", "a second step has this label"),
        ("D. Is it? Is it? If YES, DENY. If NO, DENY.", "D", "not of the form of a step"),
        ("D. Is it? If YES, MAYBE. If NO, DENY.", "D", "not of the form of a step"),
        ("d. Is it? If YES, DENY. If NO, DENY.", "", "neither a step nor the rationale"),
        ("Rationale: again", "", "neither a step nor the rationale"),
        ("Here is the procedure:", "", "neither a step nor the rationale"),
    ],
)
def test_every_other_line_is_a_problem_with_its_label(line, step, message):
    reading = parse(f"{write(BEST)}\n{line}")
    assert reading.steps == BEST.steps
    ((found, said),) = reading.problems
    assert found == step
    assert said.startswith(message)
    reading = parse(write(BEST).rpartition("\n")[0])
    assert [problem.message for problem in reading.problems] == ["there is no line `Rationale: ...`"]


@pytest.mark.parametrize(
    "values",
    [("AA", "Is it?", "B", "DENY"), ("A", "Is it", "B", "DENY"), ("A", "?", "B", "DENY"), ("A", "Is it?", "b", "DENY")],
)
def test_a_step_that_could_not_be_read_back_is_refused(values):
    with pytest.raises(ValueError, match="not"):
        Step(*values)


def test_the_best_procedures_by_hand():
    assert fewest_questions(USED) == Fraction(14, 8)
    assert best_procedure(USED).steps == BEST.steps
    # `over 20 days` for all 6 cases, `used` for the 4 younger ones, `over 10 days` for the 2 used ones of these.
    assert fewest_questions(OLD) == Fraction(6 + 4 + 2, 6)


def _by_search(policy, cases=None) -> Fraction:
    """The minimum mean number of questions by exhaustive search, independent of the package."""

    def total(cases):
        if len({policy.decide(case) for case in cases}) <= 1:
            return 0
        splits = [
            ([c for c in cases if policy.answer(q, c)], [c for c in cases if not policy.answer(q, c)])
            for q in range(len(policy.questions))
        ]
        return len(cases) + min(total(yes) + total(no) for yes, no in splits if yes and no)

    return Fraction(total(policy.cases), len(policy.cases))


@pytest.mark.parametrize("number", range(25))
def test_the_best_procedure_is_as_short_as_an_exhaustive_search_finds(number):
    policy = draw_policy(random_stream("test", "best", number))
    if len(policy.questions) > 5:
        policy = USED
    procedure = best_procedure(policy)
    assert fewest_questions(policy) == _by_search(policy)
    asked = 0
    for case in policy.cases:
        target = "A"
        while target not in DECISIONS:
            step = next(step for step in procedure.steps if step.label == target)
            place = next(q for q, question in enumerate(policy.questions) if question.ask == step.question)
            target = step.next(policy.answer(place, case))
            asked += 1
        assert target == policy.decide(case)
    assert Fraction(asked, len(policy.cases)) == fewest_questions(policy)


def test_rationales_are_true():
    """Each of the first two forms says something that can be checked on the cases."""
    forms = set()
    for number in range(80):
        policy = draw_policy(random_stream("test", "rationale", number))
        said = best_procedure(policy).rationale
        first = next(q for q, question in enumerate(policy.questions) if said.startswith(f'"{question.ask}"'))
        question = policy.questions[first]
        clause = said.removesuffix(".").split(" if ")[-1].split(" the decision is always ")[0]
        there = [case for case in policy.cases if policy.answer(first, case) == (clause == question.yes)]
        elsewhere = [case for case in policy.cases if case not in there]
        if " the decision is always " in said:
            forms.add("always")
            assert clause in (question.yes, question.no)
            assert {policy.decide(case) for case in there} == {said.removesuffix(".").split()[-1]}
        elif "matters only" in said:
            forms.add("matters")
            asked = said.split('"')[3]
            place = next(q for q, other in enumerate(policy.questions) if other.ask == asked)
            # Elsewhere the answers to all the other questions settle the decision without it.
            settled: dict = {}
            for case in elsewhere:
                others = tuple(policy.answer(q, case) for q in range(len(policy.questions)) if q != place)
                assert settled.setdefault(others, policy.decide(case)) == policy.decide(case)
    assert forms == {"always", "matters"}
