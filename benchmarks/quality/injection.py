"""One wrong step in a right solution: a result is changed, and all that follows from it is calculated again.

Where that cannot be done exactly, nothing is done: a number must say by its value alone whether it is the changed one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from quality.arithmetic import Calculation, calculations, literals, spelled, value_of, worth, written

CONSTANTS = frozenset(map(Fraction, (0, 1, 2, 3, 4, 7, 10, 12, 24, 28, 30, 31, 50, 52, 60, 100, 365, 1000)))
"""Numbers that may stand in a step without coming from the question or from a step, so none of them tells by its value
where it came from."""


class NotExactError(ValueError):
    """Why a solution cannot be made wrong exactly."""


class _UnluckyError(NotExactError):
    """Why one wrong result will not do, where another one may."""


@dataclass(frozen=True)
class Injected:
    """A solution and the same with one wrong step."""

    right: str
    wrong: str
    place: int
    """The character, in both, at which the changed result begins."""
    changed: dict[Fraction, Fraction]
    """Result before -> result after, of the wrong step and of all that follow from it."""


def inject(question: str, solution: str, random: np.random.Generator) -> Injected:
    """Change the result of one calculation of `solution`, chosen at random among those where it can be done.

    Afterwards that calculation alone is wrong; the others are right with the numbers that they now have, numbers that
    do not follow from the changed one are as they were, and the last line, which is the final answer, differs.
    NotExactError with the reason of the last attempt where there is none.
    """
    try:
        steps = calculations(solution)
    except ValueError as error:
        raise NotExactError("a calculation is not followed by its result") from error
    reason = NotExactError("no calculation is annotated")
    for number in random.permutation(len(steps)).tolist():
        try:
            _check_origins(question, solution, steps, number)
            for value in _wrong_results(solution, steps[number], random):
                try:
                    return _changed(question, solution, steps, number, value)
                except _UnluckyError as error:
                    reason = error
        except NotExactError as error:
            reason = error
    raise reason


def _wrong_results(solution: str, step: Calculation, random: np.random.Generator) -> Iterator[Fraction]:
    """Results near the right one, in random order, none of them a number of the solution."""
    literal = solution[slice(*step.shown)]
    value, unit = value_of(literal), Fraction(1, 10 ** len(literal.partition(".")[2]))
    near = {unit * distance for distance in (1, 2, 3, 5, 10)} | {value / 10, value / 5, value / 2}
    present = {one.value for one in literals(solution)}
    candidates = sorted({value + sign * distance for distance in near for sign in (-1, 1)} - present)
    for i in random.permutation(len(candidates)).tolist():
        if candidates[i] > 0:
            yield candidates[i]


def _check_origins(question: str, solution: str, steps: list[Calculation], number: int) -> None:
    """NotExactError where a number after the step comes from nowhere: something may have been calculated in silence."""
    given = {one.value for one in literals(question)} | spelled(question) | CONSTANTS
    given |= {part for value in given for part in (value / 100, 1 - value / 100, 1 + value / 100)}
    known = given | {one.value for one in literals(solution[: steps[number].shown[1]])}
    results = {step.shown[0] for step in steps}
    stated = {step.result[0] for step in steps}
    for one in literals(solution):
        if one.start in results:
            known.add(one.value)
        elif one.start >= steps[number].shown[1] and one.start not in stated and one.value not in known:
            raise NotExactError("a number comes from nowhere")


def _changed(question: str, solution: str, steps: list[Calculation], number: int, wrong: Fraction) -> Injected:
    """The solution with the result of step `number` changed to `wrong`."""
    first = steps[number]
    old = value_of(solution[slice(*first.shown)])
    if worth_or_none(solution[slice(*first.expression)]) != old:
        raise NotExactError("a calculation is wrong or rounded already")
    changed = {old: wrong}
    new: dict[tuple[int, int], str] = {}
    _check_unambiguous(question, solution, first, old)
    for span in (first.result, first.shown):
        new[span] = _like(wrong, solution[slice(*span)])
    later = {step.start: step for step in steps[number + 1 :]}
    done = first.shown[1]
    for one in literals(solution):
        if one.start < done:
            continue
        step = next((s for s in later.values() if s.expression[0] <= one.start < s.expression[1]), None)
        if step is None:
            if one.value in changed:
                new[one.start, one.stop] = _like(changed[one.value], solution[one.start : one.stop])
            continue
        _follow(question, solution, step, changed, new)
        done = step.shown[1]
    _check_silent(solution, first.shown[1], steps, changed)
    final = literals(solution[solution.rstrip().rfind("\n") + 1 :])
    if len(final) != 1 or final[0].value not in changed:
        raise NotExactError("the final answer does not follow from the step")
    text, end = "", 0
    for (start, stop), literal in sorted(new.items()):
        text, end = text + solution[end:start] + literal, stop
    return Injected(solution, text + solution[end:], first.result[0], changed)


def _follow(
    question: str, solution: str, step: Calculation, changed: dict[Fraction, Fraction], new: dict[tuple[int, int], str]
) -> None:
    """Calculate a later step again, and update `changed` and `new`."""
    shift, expression = step.expression[0], solution[slice(*step.expression)]
    old = value_of(solution[slice(*step.shown)])
    again, end, touched = "", 0, False
    for one in literals(expression):
        if one.value in changed:
            literal = _like(changed[one.value], expression[one.start : one.stop])
            new[one.start + shift, one.stop + shift] = literal
            again, end, touched = again + expression[end : one.start] + literal, one.stop, True
    again += expression[end:]
    if not touched:
        if old in changed:
            raise NotExactError("two results are equal")
        return
    if worth_or_none(expression) != old:
        raise NotExactError("a calculation is wrong or rounded already")
    _check_unambiguous(question, solution, step, old)
    value = worth_or_none(again)
    if value is None or value == old or (old in changed and changed[old] != value):
        raise _UnluckyError("a result would not change, or change twice")
    changed[old] = value
    for span in (step.result, step.shown):
        new[span] = _like(value, solution[slice(*span)])


def _check_unambiguous(question: str, solution: str, step: Calculation, value: Fraction) -> None:
    """NotExactError where a later number of this value might be another one."""
    before = {one.value for one in literals(question + "\n" + solution[: step.result[0]])}
    if value in before or value in spelled(question):
        raise NotExactError("a result equals another number")
    behind = solution[step.shown[1] :]
    last_line = behind.rstrip().rfind("\n") + 1
    used = any(one.value == value for one in literals(behind[:last_line]))
    if (used and value in CONSTANTS) or value in spelled(solution):
        raise NotExactError("a result equals a number that steps use anyway")


def _check_silent(solution: str, start: int, steps: list[Calculation], changed: dict[Fraction, Fraction]) -> None:
    """NotExactError where a line with a changed number holds an equation without annotation."""
    end = solution.rfind("\n", 0, start) + 1
    for line in solution[end:].split("\n"):
        stop = end + len(line)
        plain, at = "", end
        for step in steps:
            if end <= step.start < stop:
                plain, at = (
                    plain + solution[at : step.start].rstrip().removesuffix("$").rstrip().removesuffix("="),
                    step.shown[1],
                )
        plain += solution[at:stop]
        if ("=" in plain or "≈" in plain) and any(one.value in changed for one in literals(line)):
            raise NotExactError("an equation is not annotated")
        end = stop + 1


def worth_or_none(expression: str) -> Fraction | None:
    """The value of a calculation; None for text that is none."""
    try:
        return worth(expression)
    except ValueError:
        return None


def _like(value: Fraction, literal: str) -> str:
    try:
        return written(value, literal)
    except ValueError as error:
        raise _UnluckyError("a new result cannot be written like the old one") from error
