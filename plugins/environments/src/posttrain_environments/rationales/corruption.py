"""Corruptions of sound procedures: one known fault in one known step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from posttrain_environments.rationales.policies import DECISIONS, Policy
from posttrain_environments.rationales.procedures import LABELS, Procedure, Step, write
from posttrain_environments.rationales.verifier import Verdict, verify

KINDS = (
    "flipped_branch",
    "wrong_decision",
    "dangling_reference",
    "unreachable_step",
    "loop",
    "redundant_question",
    "wrong_attribute",
)
"""Kinds of faults:

- `flipped_branch`: the targets of YES and NO are swapped.
- `wrong_decision`: a decision is replaced by another.
- `dangling_reference`: a branch leads to a step that does not exist.
- `unreachable_step`: a new step that no branch leads to.
- `loop`: a branch leads to the step itself, or to an earlier step that leads back to it.
- `redundant_question`: a new step before another, with both branches leading to it.
- `wrong_attribute`: the step asks another question of the policy.

The two kinds with a new step shift the labels after it by one. Otherwise no other line changes.
"""


@dataclass(frozen=True)
class Corruption:
    """A procedure with a fault in the step `step` (a label of `procedure`), and its verdict."""

    procedure: Procedure
    step: str
    kind: str
    verdict: Verdict


def corrupt(procedure: Procedure, policy: Policy, kind: str, random: np.random.Generator) -> Corruption | None:
    """Return `procedure` with a random fault of `kind` that lowers its reward; None if there is none.

    The steps must be labeled A, B, C, ... in order. ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown corruption {kind!r}; use one of {', '.join(KINDS)}")
    before = verify(write(procedure), policy)
    candidates = list(_candidates(procedure, policy, kind))
    for index in random.permutation(len(candidates)):
        step, steps = candidates[index]
        worse = replace(procedure, steps=steps)
        verdict = verify(write(worse), policy)
        # The verifier attributes some kinds to a step, which must be this one.
        expected = _FAULT_OF.get(kind)
        reported = expected is None or any((fault.step, fault.kind) == (step, expected) for fault in verdict.faults)
        if verdict.reward < before.reward and reported:
            return Corruption(worse, step, kind, verdict)
    return None


_FAULT_OF = {
    "dangling_reference": "dangling",
    "unreachable_step": "unreachable",
    "loop": "loop",
    "redundant_question": "redundant",
}


def _candidates(procedure: Procedure, policy: Policy, kind: str) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Yield every way to add the fault: the label of the step, and all steps."""
    steps = procedure.steps
    if kind in ("unreachable_step", "redundant_question"):
        if len(steps) < len(LABELS):
            yield from _insertions(steps, policy, kind)
        return
    for index, step in enumerate(steps):
        for changed in _changes(steps, index, policy, kind):
            if changed != step:
                yield step.label, (*steps[:index], changed, *steps[index + 1 :])


def _changes(steps: tuple[Step, ...], index: int, policy: Policy, kind: str) -> Iterator[Step]:
    step = steps[index]
    if kind == "flipped_branch":
        yield replace(step, yes=step.no, no=step.yes)
    elif kind == "wrong_attribute":
        yield from (replace(step, question=question.ask) for question in policy.questions)
    elif kind == "wrong_decision":
        yield from (replace(step, yes=other) for other in DECISIONS if step.yes in DECISIONS)
        yield from (replace(step, no=other) for other in DECISIONS if step.no in DECISIONS)
    else:
        targets = LABELS[len(steps) : len(steps) + 2] if kind == "dangling_reference" else LABELS[: index + 1]
        for target in targets:
            yield replace(step, yes=target)
            yield replace(step, no=target)


def _insertions(steps: tuple[Step, ...], policy: Policy, kind: str) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Yield insertions after step A only, so that the rationale still names the first question."""
    for index in range(1, len(steps) + (kind == "unreachable_step")):
        label = LABELS[index]
        # A redundant step takes the label of the step it leads to, and with it all branches to that step.
        keeps_references = kind == "redundant_question"
        shifted = tuple(_shifted(step, index, keeps_references) for step in steps)
        rest = [step.label for step in shifted[index:]]
        for question in policy.questions:
            if keeps_references:
                new = [Step(label, question.ask, rest[0], rest[0])]
            else:
                ends = [*DECISIONS, *rest]
                new = [Step(label, question.ask, yes, no) for yes in ends for no in ends if yes != no]
            for step in new:
                yield label, (*shifted[:index], step, *shifted[index:])


def _shifted(step: Step, index: int, keeps_references: bool) -> Step:
    """Return `step` with labels from `index` on shifted by one; `keeps_references`: except branches to `index`."""

    def shift(label: str, first: int) -> str:
        number = LABELS.index(label) if label in LABELS else -1
        return LABELS[number + 1] if number >= first else label

    first = index + 1 if keeps_references else index
    return Step(shift(step.label, index), step.question, shift(step.yes, first), shift(step.no, first))
