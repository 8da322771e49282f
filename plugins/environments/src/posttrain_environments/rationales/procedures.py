"""Procedures of labeled steps with a rationale: writing, parsing any text, and the optimal one for a policy.

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

from posttrain_environments.rationales.policies import DECISIONS, Policy

_NEXT = rf"(?:go to step ([A-Z])|({'|'.join(DECISIONS)}))"
# These match lines with white space collapsed to single spaces.
_STEP = re.compile(rf"([A-Z])\. ?([^?]*[^? ] ?\?) ?If YES, ?{_NEXT}\. ?If NO, ?{_NEXT}\.?", re.IGNORECASE | re.ASCII)
_LABEL = re.compile(r"([A-Z])\.(?: |$)")
_RATIONALE = re.compile(r"Rationale: ?(.+)", re.IGNORECASE | re.ASCII)
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A question and the target of each answer: a decision, or the label of a step.

    ValueError if `parse` could not read the step: a label other than A to Z, or a question that is not one line of
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
                raise ValueError(f"a target is a step label or a decision, not {target!r}")

    def next(self, answer: bool) -> str:
        """Return the target of YES (`answer` true) or NO."""
        return self.yes if answer else self.no


LABELS = tuple(ascii_uppercase)


@dataclass(frozen=True)
class Procedure:
    """Steps in written order, starting at step A. `rationale` is one line of text.

    ValueError if two steps have the same label, or the rationale is empty, not single-spaced or not one line.
    """

    steps: tuple[Step, ...]
    rationale: str

    def __post_init__(self) -> None:
        if len({step.label for step in self.steps}) < len(self.steps):
            raise ValueError("two steps of a procedure have the same label")
        if not self.rationale or self.rationale != " ".join(self.rationale.split()):
            raise ValueError(f"a rationale is one line of single-spaced words, not {self.rationale!r}")


class Problem(NamedTuple):
    """A line that violates the format; `step` is its label, empty if it has none."""

    step: str
    message: str


class Reading(NamedTuple):
    """The parsed parts of a text: steps with distinct labels, the rationale or "", and every other line as a
    problem.
    """

    steps: tuple[Step, ...]
    rationale: str
    problems: tuple[Problem, ...]


def write(procedure: Procedure) -> str:
    """Return the text of `procedure`, which `parse` reads without problems."""
    lines = []
    for step in procedure.steps:
        yes, no = (f"go to Step {target}" if target in LABELS else target for target in (step.yes, step.no))
        lines.append(f"{step.label}. {step.question} If YES, {yes}. If NO, {no}.")
    return "\n".join([*lines, f"Rationale: {procedure.rationale}"])


def parse(text: str) -> Reading:
    """Parse any text without raising.

    The case of keywords and the amount of white space are ignored, and a leading `<think>...</think>` is skipped. Of
    several steps with the same label, or several rationales, the first counts.
    """
    steps: dict[str, Step] = {}
    rationale = ""
    problems = []
    thought = _THOUGHT.match(text)
    lines = text[thought.end() if thought else 0 :].splitlines()
    for line in filter(None, (" ".join(line.split()) for line in lines)):
        match = _STEP.fullmatch(line)
        label = _LABEL.match(line)
        reason = _RATIONALE.fullmatch(line)
        if match and match[1] in LABELS:
            question = " ".join(match[2][:-1].split()) + "?"
            step = Step(match[1].upper(), question, (match[3] or match[4]).upper(), (match[5] or match[6]).upper())
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
    """Return a procedure that decides every case as `policy` does with the fewest questions on average.

    Ties go to the question listed first, and equal subtrees are written once. ValueError if the procedure has more
    than 26 steps.
    """
    plan = _Plan(policy)
    nodes: dict[tuple[int, str | int, str | int], int] = {}

    def node(cases: int) -> str | int:
        """Return a decision, or the number of the step that handles `cases`; equal steps share a number."""
        question = plan.solve(cases)[1]
        if question is None:
            return next(decision for decision, members in policy.decided.items() if not cases & ~members)
        yes = policy.says_yes[question]
        key = (question, node(cases & yes), node(cases & ~yes))
        return nodes.setdefault(key, len(nodes))

    start = node(policy.everything)
    keys = list(nodes)
    order: list[int] = []

    def visit(target: str | int) -> None:
        if isinstance(target, int) and target not in order:
            visit(keys[target][2])
            visit(keys[target][1])
            order.append(target)

    visit(start)
    order.reverse()  # topological order: every step precedes its targets
    if len(order) > len(LABELS):
        raise ValueError(
            f"the optimal procedure of this policy on {policy.domain} has {len(order)} steps, more than 26"
        )
    names: dict[str | int, str] = {node_number: LABELS[index] for index, node_number in enumerate(order)}
    steps = tuple(
        Step(
            names[node_number],
            " ".join(policy.questions[question].ask.split()),
            names.get(yes, str(yes)),
            names.get(no, str(no)),
        )
        for node_number in order
        for question, yes, no in [keys[node_number]]
    )
    return Procedure(steps, _rationale(policy, keys[order[0]][0], steps))


def fewest_questions(policy: Policy) -> Fraction:
    """Return the minimum mean number of questions with which every case can be decided correctly; exact."""
    return Fraction(_Plan(policy).solve(policy.everything)[0], len(policy.cases))


class _Plan:
    """Exact dynamic programming over the sets of cases that are consistent with the answers so far."""

    def __init__(self, policy: Policy) -> None:
        self.solve = cache(self._solve)
        self._says_yes = policy.says_yes
        self._decided = tuple(policy.decided.values())

    def _solve(self, cases: int) -> tuple[int, int | None]:
        """Return the minimum number of questions summed over `cases`, and the first question; (0, None) where all cases
        have the same decision.
        """
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


def _rationale(policy: Policy, first: int, steps: tuple[Step, ...]) -> str:
    """Return a true sentence on why the question `first` comes first."""
    question, start = policy.questions[first], steps[0]
    opening = f'"{question.ask}" comes first because'
    for clause, target in ((question.yes, start.yes), (question.no, start.no)):
        if target in DECISIONS:
            return f"{opening} if {clause} the decision is always {target}."
    if_yes, if_no = _questions_from(start.yes, steps), _questions_from(start.no, steps)
    for clause, here, there in ((question.yes, if_yes, if_no), (question.no, if_no, if_yes)):
        only = [text for text in here if text not in there]
        if only:
            return f'{opening} "{only[0]}" matters only if {clause}.'
    return f"{opening} the same answers to the rest end differently with it."


def _questions_from(label: str, steps: tuple[Step, ...]) -> list[str]:
    """Return the questions of the step `label` and of all steps reachable from it, in order."""
    reached = {label}
    for step in steps:  # topological order: every step precedes its targets
        if step.label in reached:
            reached |= {step.yes, step.no}
    return [step.question for step in steps if step.label in reached]
