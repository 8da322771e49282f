"""Sound procedures with one known fault in one known step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from posttrain.data.rationales.policies import DECISIONS, Policy
from posttrain.data.rationales.procedures import LABELS, Procedure, Step, write
from posttrain.data.rationales.verifier import Verdict, verify

KINDS = (
    "flipped_branch",
    "wrong_decision",
    "dangling_reference",
    "unreachable_step",
    "loop",
    "redundant_question",
    "wrong_attribute",
)
"""What is done to the step:

- `flipped_branch`: what follows YES and NO change places.
- `wrong_decision`: one decision becomes another.
- `dangling_reference`: one branch leads to a step that does not exist.
- `unreachable_step`: this step is new, and nothing leads to it.
- `loop`: one branch leads to this step itself or to an earlier one, from where it is reached again.
- `redundant_question`: this step is new, stands before another and leads there whatever is answered.
- `wrong_attribute`: it asks another question of the policy.

Apart from the two kinds with a new step, which move the labels after it on by one, no other line changes.
"""


@dataclass(frozen=True)
class Corruption:
    """A procedure made worse in the step `step` (its label in `procedure`), and what that cost."""

    procedure: Procedure
    step: str
    kind: str
    verdict: Verdict


def corrupt(procedure: Procedure, policy: Policy, kind: str, random: np.random.Generator) -> Corruption | None:
    """`procedure` with one random fault of `kind` that lowers its reward; None where there is no such fault.

    The steps must be labelled A, B, C, ... in the order in which they stand. ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no corruption {kind!r}; use one of {', '.join(KINDS)}")
    before = verify(write(procedure), policy)
    candidates = list(_candidates(procedure, policy, kind))
    for place in random.permutation(len(candidates)):
        step, steps = candidates[place]
        worse = replace(procedure, steps=steps)
        verdict = verify(write(worse), policy)
        if verdict.reward < before.reward and _of_its_kind(verdict, step, kind):
            return Corruption(worse, step, kind, verdict)
    return None


_SHOWS_AS = {
    "dangling_reference": "dangling",
    "unreachable_step": "unreachable",
    "loop": "loop",
    "redundant_question": "redundant",
}


def _of_its_kind(verdict: Verdict, step: str, kind: str) -> bool:
    """Whether the verifier names the fault in that very step, for the kinds that can be told from the step."""
    wanted = _SHOWS_AS.get(kind)
    return wanted is None or any((fault.step, fault.kind) == (step, wanted) for fault in verdict.faults)


def _candidates(procedure: Procedure, policy: Policy, kind: str) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """All ways to bring the fault in: the label of the step, and the steps with it."""
    steps = procedure.steps
    if kind in ("unreachable_step", "redundant_question"):
        if len(steps) < len(LABELS):
            yield from _insertions(steps, policy, kind)
        return
    for place, step in enumerate(steps):
        for changed in _changes(steps, place, policy, kind):
            if changed != step:
                yield step.label, (*steps[:place], changed, *steps[place + 1 :])


def _changes(steps: tuple[Step, ...], place: int, policy: Policy, kind: str) -> Iterator[Step]:
    step = steps[place]
    if kind == "flipped_branch":
        yield replace(step, yes=step.no, no=step.yes)
    elif kind == "wrong_attribute":
        yield from (replace(step, question=question.ask) for question in policy.questions)
    elif kind == "wrong_decision":
        yield from (replace(step, yes=other) for other in DECISIONS if step.yes in DECISIONS)
        yield from (replace(step, no=other) for other in DECISIONS if step.no in DECISIONS)
    else:
        after = LABELS[len(steps) : len(steps) + 2] if kind == "dangling_reference" else LABELS[: place + 1]
        for target in after:
            yield replace(step, yes=target)
            yield replace(step, no=target)


def _insertions(steps: tuple[Step, ...], policy: Policy, kind: str) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Never before A, so that the rationale goes on naming the first question."""
    for place in range(1, len(steps) + (kind == "unreachable_step")):
        label = LABELS[place]
        # A redundant step takes over the label of the step it leads to, and with it all that led there.
        taken_over = kind == "redundant_question"
        moved = tuple(_moved(step, place, taken_over) for step in steps)
        rest = [step.label for step in moved[place:]]
        for question in policy.questions:
            if taken_over:
                new = [Step(label, question.ask, rest[0], rest[0])]
            else:
                ends = [*DECISIONS, *rest]
                new = [Step(label, question.ask, yes, no) for yes in ends for no in ends if yes != no]
            for step in new:
                yield label, (*moved[:place], step, *moved[place:])


def _moved(step: Step, place: int, taken_over: bool) -> Step:
    """`step` with labels from number `place` on moved by one; `taken_over` leaves references to `place` as they are."""

    def on(label: str, first: int) -> str:
        number = LABELS.index(label) if label in LABELS else -1
        return LABELS[number + 1] if number >= first else label

    first = place + 1 if taken_over else place
    return Step(on(step.label, place), step.question, on(step.yes, first), on(step.no, first))
