"""Scores of a written procedure for its policy, from running it on every case.

With N cases, Q the mean number of questions that the procedure asks, and Q* the minimum mean with which all cases can
be decided correctly:

    factual accuracy  = cases decided as the policy decides them / N
    logical soundness = sound branches / (2 * steps + format problems)
    efficiency        = min(1, Q* / Q), and 0 if some case loops forever
    reward            = accuracy * (2 + soundness + efficiency) / 4

A step has two branches, YES and NO. A branch is sound if its step is reachable from A, some case that reaches the step
takes the branch, it leads to a decision or an existing step, and it does not lead back to its own step. Only optimal
procedures have reward 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from posttrain_environments.rationales.policies import DECISIONS, Policy, plain
from posttrain_environments.rationales.procedures import Reading, Step, fewest_questions, parse

UNSOUND = ("format", "unreachable", "impossible", "dangling", "loop", "unknown question")
"""Kinds of faults that make a branch unsound."""
OTHER_FAULTS = ("wrong decision", "redundant")
"""Kinds that lower accuracy or efficiency instead: a step decides cases wrongly; both answers have the same target."""


class Fault(NamedTuple):
    """A fault of the step `step` (empty for the whole text); `kind` is in `UNSOUND` or `OTHER_FAULTS`."""

    step: str
    kind: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """The scores of a procedure, each in [0, 1]; all are 0 if no step could be parsed."""

    factual_accuracy: float
    logical_soundness: float
    efficiency: float
    reward: float
    faults: tuple[Fault, ...]


def verify(answer: str, policy: Policy) -> Verdict:
    """Parse `answer` as a procedure and run it on all cases of `policy`. Any text has a verdict."""
    reading = parse(answer)
    faults = [Fault(step, "format", message) for step, message in reading.problems]
    if not reading.steps:
        return Verdict(0.0, 0.0, 0.0, 0.0, (*faults, Fault("", "format", "there is no step")))
    graph = _Graph(reading, policy)
    unsound = graph.unsound_branches(faults)
    correct, asked = graph.run(faults)
    branches = 2 * len(reading.steps)
    accuracy = Fraction(correct, len(policy.cases))
    soundness = Fraction(branches - unsound, branches + len(reading.problems))
    efficiency = min(Fraction(1), _fewest(policy) * len(policy.cases) / asked) if asked else Fraction(0)
    reward = accuracy * (2 + soundness + efficiency) / 4
    faults += [
        Fault(step.label, "redundant", "both answers lead to the same place")
        for step in reading.steps
        if step.yes == step.no
    ]
    return Verdict(float(accuracy), float(soundness), float(efficiency), float(reward), tuple(faults))


_fewest = lru_cache(maxsize=1024)(fewest_questions)


class _Graph:
    """The steps as a graph, run on sets of cases (bits of integers, as in `Policy`)."""

    def __init__(self, reading: Reading, policy: Policy) -> None:
        self._policy = policy
        self._steps = {step.label: step for step in reading.steps}
        known = {plain(question.ask): index for index, question in enumerate(policy.questions)}
        self._question = {step.label: known.get(plain(step.question)) for step in reading.steps}

    def unsound_branches(self, faults: list[Fault]) -> int:
        """Return the number of unsound branches and add their faults to `faults`."""
        arriving = self._arrivals()
        after = {label: self._reachable(label) for label in self._steps}
        count = 0
        for label, step in self._steps.items():

            def fault(kind: str, message: str, label: str = label) -> None:
                faults.append(Fault(label, kind, message))

            if not arriving[label]:
                led = "A" in self._steps and label in self._reachable("A")
                fault("unreachable", "no case gets here" if led else "no step leads here from A")
                count += 2
            elif self._question[label] is None:
                fault("unknown question", f"the policy has no question {step.question!r}")
                count += 2
            else:
                count += sum(self._unsound(step, answer, arriving[label], after, fault) for answer in (True, False))
        return count

    def run(self, faults: list[Fault]) -> tuple[int, int]:
        """Return the number of correct decisions, and of questions summed over the cases (0 if a case never ends).

        Faults of steps that decide cases wrongly are added to `faults`.
        """
        correct = asked = 0
        walking = {"A": self._policy.everything} if "A" in self._steps else {}
        wrong: dict[tuple[str, str], int] = {}
        # Answers never change, so a case that reaches a step twice loops forever.
        for _ in self._steps:
            moved: dict[str, int] = {}
            for label, cases in walking.items():
                asked += cases.bit_count()
                question = self._question[label]
                if question is None:
                    continue
                for answer in (True, False):
                    target, part = self._steps[label].next(answer), cases & self._cases_with(question, answer)
                    if target in DECISIONS:
                        matching = (part & self._policy.decided.get(target, 0)).bit_count()
                        correct += matching
                        if part.bit_count() > matching:
                            wrong[label, target] = wrong.get((label, target), 0) + part.bit_count() - matching
                    elif target in self._steps and part:
                        moved[target] = moved.get(target, 0) | part
            walking = moved
        faults += [
            Fault(label, "wrong decision", f"{target} is wrong for {number} of the cases that end here")
            for (label, target), number in wrong.items()
        ]
        return correct, 0 if walking else asked

    def _cases_with(self, question: int, answer: bool) -> int:
        yes = self._policy.says_yes[question]
        return yes if answer else self._policy.everything & ~yes

    def _arrivals(self) -> dict[str, int]:
        """Return step -> cases that reach it. At a question unknown to the policy, every case takes both branches."""
        arriving = dict.fromkeys(self._steps, 0)
        pending = [("A", self._policy.everything)]
        while pending:
            label, cases = pending.pop()
            if label not in self._steps or not cases & ~arriving[label]:
                continue
            arriving[label] |= cases
            question = self._question[label]
            for answer in (True, False):
                part = cases if question is None else cases & self._cases_with(question, answer)
                pending.append((self._steps[label].next(answer), part))
        return arriving

    def _reachable(self, start: str) -> set[str]:
        """Return the steps reachable from `start` by one or more branches, whether or not a case takes them."""
        reached: set[str] = set()
        pending = [start]
        while pending:
            step = self._steps[pending.pop()]
            new = {target for target in (step.yes, step.no) if target in self._steps} - reached
            reached |= new
            pending += new
        return reached

    def _unsound(
        self, step: Step, answer: bool, arriving: int, after: dict[str, set[str]], fault: Callable[[str, str], None]
    ) -> bool:
        """Return whether a branch is unsound and report its faults to `fault`; `arriving` are the cases that reach the
        step.
        """
        question, target, name = self._question[step.label], step.next(answer), "YES" if answer else "NO"
        assert question is not None
        reasons = []
        if not arriving & self._cases_with(question, answer):
            reasons.append(("impossible", f"no case that gets here answers {name}"))
        if target not in DECISIONS and target not in self._steps:
            reasons.append(("dangling", f"{name} leads to Step {target}, which does not exist"))
        if target in self._steps and (target == step.label or step.label in after[target]):
            reasons.append(("loop", f"{name} leads to Step {target}, from where one can come back here"))
        for kind, message in reasons:
            fault(kind, message)
        return bool(reasons)


_policy = lru_cache(maxsize=1024)(Policy.from_json)


def reward(answer: str, label: Any) -> float:
    """Return the reward of `answer` in [0, 1] (see the module); `label` is the policy of the row as JSON.

    ValueError if `label` is not text, InputError if it is not a policy.
    """
    return _verdict(answer, label).reward


def scores(answer: str, label: Any) -> dict[str, float]:
    """Return the reward as `score`, and the three numbers that it consists of."""
    verdict = _verdict(answer, label)
    parts = ("factual_accuracy", "logical_soundness", "efficiency")
    return {"score": verdict.reward} | {name: getattr(verdict, name) for name in parts}


def _verdict(answer: str, label: Any) -> Verdict:
    if not isinstance(label, str):
        raise ValueError("the row has no text `label` with its policy; use prompts of `posttrain data rationales`")
    return verify(answer, _policy(label))
