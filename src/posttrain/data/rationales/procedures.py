"""Written procedures: labelled steps and a rationale, their reading from any text, and the best one for a policy.

A. Was the item used? If YES, DENY. If NO, go to Step B.
B. Is there a receipt? If YES, APPROVE. If NO, ESCALATE.
Rationale: "Was the item used?" comes first because if the item was used the decision is always DENY.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from string import ascii_uppercase
from typing import NamedTuple

from posttrain.data.rationales.policies import DECISIONS, Policy

_NEXT = rf"(?:go to step ([A-Z])|({'|'.join(DECISIONS)}))"
# These match lines whose white space has become single spaces.
_STEP = re.compile(rf"([A-Z])\. ?([^?]*[^? ] ?\?) ?If YES, ?{_NEXT}\. ?If NO, ?{_NEXT}\.?", re.IGNORECASE | re.ASCII)
_LABEL = re.compile(r"([A-Z])\.(?: |$)")
_RATIONALE = re.compile(r"Rationale: ?(.+)", re.IGNORECASE | re.ASCII)
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One question and what follows each answer: a decision, or the label of a step.

    ValueError where it could not be read back: a label that is not one of A to Z, or a question that is not one line of
    single-spaced words with its only question mark at the end.
    """

    label: str
    question: str
    yes: str
    no: str

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"a step label is a letter from A to Z, not {self.label!r}")
        words = self.question[:-1].split()
        if self.question != " ".join(words) + "?" or not words or "?" in self.question[:-1]:
            raise ValueError(f"a question is one line that ends with its only question mark, not {self.question!r}")
        for target in (self.yes, self.no):
            if target not in LABELS and target not in DECISIONS:
                raise ValueError(f"what follows is a step label or a decision, not {target!r}")

    def next(self, answer: bool) -> str:
        """What follows YES (`answer` true) or NO."""
        return self.yes if answer else self.no


LABELS = tuple(ascii_uppercase)


@dataclass(frozen=True)
class Procedure:
    """Steps in the order they are written; the step A is the first to be done. `rationale` is one line of text.

    ValueError where two steps have one label, or the rationale is empty, not single-spaced or not one line.
    """

    steps: tuple[Step, ...]
    rationale: str

    def __post_init__(self) -> None:
        if len({step.label for step in self.steps}) < len(self.steps):
            raise ValueError("two steps of a procedure have the same label")
        if not self.rationale or self.rationale != " ".join(self.rationale.split()):
            raise ValueError(f"a rationale is one line of single-spaced words, not {self.rationale!r}")


class Problem(NamedTuple):
    """A line that breaks the format; `step` is the label it begins with, empty where it has none."""

    step: str
    message: str


class Reading(NamedTuple):
    """What could be read of a text: steps with different labels, the rationale or "", and every line that is neither."""

    steps: tuple[Step, ...]
    rationale: str
    problems: tuple[Problem, ...]


def write(procedure: Procedure) -> str:
    """The text of `procedure`; `parse` reads it back without problems."""
    lines = [
        f"{step.label}. {step.question} If YES, {_follows(step.yes)}. If NO, {_follows(step.no)}."
        for step in procedure.steps
    ]
    return "\n".join([*lines, f"Rationale: {procedure.rationale}"])


def parse(text: str) -> Reading:
    """Read any text; never raises. Case of keywords and amounts of white space do not matter, a leading
    `<think>...</think>` is passed over, and of several steps with one label (or rationales) the first counts."""
    steps: dict[str, Step] = {}
    rationale = ""
    problems = []
    thought = _THOUGHT.match(text)
    lines = text[thought.end() if thought else 0 :].splitlines()
    for line in filter(None, (" ".join(line.split()) for line in lines)):
        found = _STEP.fullmatch(line)
        label = _LABEL.match(line)
        reason = _RATIONALE.fullmatch(line)
        if found and found[1] in LABELS:
            step = _read_step(found)
            if step.label in steps:
                problems.append(Problem(step.label, "a second step has this label"))
            else:
                steps[step.label] = step
        elif label:
            problems.append(Problem(label[1], f"not of the form of a step: {line[:80]!r}"))
        elif reason and not rationale:
            rationale = reason[1]
        else:
            problems.append(Problem("", f"neither a step nor the rationale: {line[:80]!r}"))
    if not rationale:
        problems.append(Problem("", "there is no line `Rationale: ...`"))
    return Reading(tuple(steps.values()), rationale, tuple(problems))


def best_procedure(policy: Policy) -> Procedure:
    """A procedure that decides every case as `policy` does with the fewest questions on average; ties go to the question
    listed first. Equal continuations are written once. ValueError where it takes more than 26 steps."""
    plan = _Plan(policy)
    nodes: dict[tuple[int, str | int, str | int], int] = {}

    def node(cases: int) -> str | int:
        """A decision, or the number of the step that goes on with `cases`; equal steps get one number."""
        question = plan.solve(cases)[1]
        if question is None:
            return next(decision for decision, members in policy.decided.items() if not cases & ~members)
        yes = policy.says_yes[question]
        key = (question, node(cases & yes), node(cases & ~yes))
        return nodes.setdefault(key, len(nodes))

    start = node(policy.everything)
    keys = list(nodes)
    order: list[int] = []

    def visit(place: str | int) -> None:
        if isinstance(place, int) and place not in order:
            visit(keys[place][2])
            visit(keys[place][1])
            order.append(place)

    visit(start)
    order.reverse()  # every step stands before those it goes on to
    if len(order) > len(LABELS):
        raise ValueError(f"the best procedure for this policy on {policy.domain} takes {len(order)} steps, over 26")
    names: dict[str | int, str] = {place: LABELS[number] for number, place in enumerate(order)}
    steps = tuple(
        Step(
            names[place],
            " ".join(policy.questions[question].ask.split()),
            names.get(yes, str(yes)),
            names.get(no, str(no)),
        )
        for place in order
        for question, yes, no in [keys[place]]
    )
    return Procedure(steps, _rationale(policy, keys[order[0]][0], steps))


def fewest_questions(policy: Policy) -> Fraction:
    """The smallest mean number of questions, over all cases, with which every case can be decided right; exact."""
    return Fraction(_Plan(policy).solve(policy.everything)[0], len(policy.cases))


class _Plan:
    """Exact dynamic programming over sets of cases that the answers so far leave possible."""

    def __init__(self, policy: Policy) -> None:
        self.solve = cache(self._solve)
        self._says_yes = policy.says_yes
        self._decided = tuple(policy.decided.values())

    def _solve(self, cases: int) -> tuple[int, int | None]:
        """Fewest questions asked, summed over `cases`, and the first of them; (0, None) where all end alike."""
        if any(not cases & ~members for members in self._decided):
            return 0, None
        best: tuple[int, int | None] | None = None
        for question, yes in enumerate(self._says_yes):
            if cases & yes and cases & ~yes:
                total = cases.bit_count() + self.solve(cases & yes)[0] + self.solve(cases & ~yes)[0]
                if best is None or total < best[0]:
                    best = total, question
        assert best is not None, "two cases with the same answers are one case"
        return best


def _follows(target: str) -> str:
    return f"go to Step {target}" if target in LABELS else target


def _read_step(found: re.Match[str]) -> Step:
    question = " ".join(found[2][:-1].split()) + "?"
    return Step(found[1].upper(), question, (found[3] or found[4]).upper(), (found[5] or found[6]).upper())


def _rationale(policy: Policy, first: int, steps: tuple[Step, ...]) -> str:
    """A true sentence on why the question `first` is the first."""
    question, start = policy.questions[first], steps[0]
    opening = f'"{question.ask}" comes first because'
    for clause, target in ((question.yes, start.yes), (question.no, start.no)):
        if target in DECISIONS:
            return f"{opening} if {clause} the decision is always {target}."
    if_yes, if_no = _asked_from(start.yes, steps), _asked_from(start.no, steps)
    for clause, here, there in ((question.yes, if_yes, if_no), (question.no, if_no, if_yes)):
        only = [text for text in here if text not in there]
        if only:
            return f'{opening} "{only[0]}" matters only if {clause}.'
    return f"{opening} the same answers to the rest end differently with it."


def _asked_from(label: str, steps: tuple[Step, ...]) -> list[str]:
    """Questions of the step `label` and of all that can follow it, in order."""
    reached = {label}
    for step in steps:  # in an order where every step stands before those it goes on to
        if step.label in reached:
            reached |= {step.yes, step.no}
    return [step.question for step in steps if step.label in reached]
