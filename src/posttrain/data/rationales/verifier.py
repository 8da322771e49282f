"""What a written procedure is worth for its policy, by doing it on every case.

With N cases, Q the mean number of questions that the procedure asks and Q* the smallest mean with which all cases can be
decided right:

    factual accuracy  = cases decided as the policy decides them / N
    logical soundness = sound branches / (2 * steps + problems of format)
    efficiency        = min(1, Q* / Q), and 0 where some case runs in a loop for ever
    reward            = accuracy * (2 + soundness + efficiency) / 4

A step has two branches, YES and NO. A branch is sound where its step is reached from A, some case that gets there takes
it, it leads to a decision or to a step that exists, and not back to its own step. Only the best procedures earn 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from posttrain.data.rationales.policies import DECISIONS, Policy, plain
from posttrain.data.rationales.procedures import Reading, Step, fewest_questions, parse

UNSOUND = ("format", "unreachable", "impossible", "dangling", "loop", "unknown question")
"""Kinds of faults that make branches unsound."""
OTHER_FAULTS = ("wrong decision", "redundant")
"""Kinds that cost accuracy or efficiency instead: the step ends cases wrongly; its answers lead to the same place."""


class Fault(NamedTuple):
    """What is wrong in the step `step` (empty where no step is meant); `kind` is in `UNSOUND` or `OTHER_FAULTS`."""

    step: str
    kind: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """All four numbers lie in 0 to 1; 0 throughout where no step could be read."""

    factual_accuracy: float
    logical_soundness: float
    efficiency: float
    reward: float
    faults: tuple[Fault, ...]


def verify(answer: str, policy: Policy) -> Verdict:
    """Read `answer` as a procedure and do it on all cases of `policy`; any text gets a verdict."""
    reading = parse(answer)
    faults = [Fault(step, "format", message) for step, message in reading.problems]
    if not reading.steps:
        return Verdict(0.0, 0.0, 0.0, 0.0, (*faults, Fault("", "format", "there is no step")))
    graph = _Graph(reading, policy)
    unsound = graph.unsound_branches(faults)
    right, asked = graph.run(faults)
    branches = 2 * len(reading.steps)
    accuracy = Fraction(right, len(policy.cases))
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
    """Steps as a graph that sets of cases (bits of integers, as in `Policy`) walk through."""

    def __init__(self, reading: Reading, policy: Policy) -> None:
        self._policy = policy
        self._steps = {step.label: step for step in reading.steps}
        known = {plain(question.ask): place for place, question in enumerate(policy.questions)}
        self._question = {step.label: known.get(plain(step.question)) for step in reading.steps}

    def unsound_branches(self, faults: list[Fault]) -> int:
        """The number of unsound branches; their faults are added to `faults`."""
        arriving = self._arrivals()
        after = {label: self._reachable(label) for label in self._steps}
        count = 0
        for label, step in self._steps.items():

            def fault(kind: str, message: str, label: str = label) -> None:
                faults.append(Fault(label, kind, message))

            if not arriving[label]:
                fault("unreachable", "no case gets here" if self._leads_here(label) else "no step leads here from A")
                count += 2
            elif self._question[label] is None:
                fault("unknown question", f"the policy knows no question {step.question!r}")
                count += 2
            else:
                count += sum(self._unsound(step, answer, arriving[label], after, fault) for answer in (True, False))
        return count

    def run(self, faults: list[Fault]) -> tuple[int, int]:
        """Cases decided right, and questions asked summed over the cases: 0 where a case never ends or none is asked.

        Steps that decide cases wrongly are added to `faults`.
        """
        right = asked = 0
        walking = {"A": self._policy.everything} if "A" in self._steps else {}
        wrong: dict[tuple[str, str], int] = {}
        # Answers never change, so a case that comes to a step twice comes back for ever.
        for _ in self._steps:
            moved: dict[str, int] = {}
            for label, cases in walking.items():
                asked += cases.bit_count()
                question = self._question[label]
                if question is None:
                    continue
                for answer in (True, False):
                    target, part = self._steps[label].next(answer), cases & self._says(question, answer)
                    if target in DECISIONS:
                        good = (part & self._policy.decided.get(target, 0)).bit_count()
                        right += good
                        if part.bit_count() > good:
                            wrong[label, target] = wrong.get((label, target), 0) + part.bit_count() - good
                    elif target in self._steps and part:
                        moved[target] = moved.get(target, 0) | part
            walking = moved
        faults += [
            Fault(label, "wrong decision", f"{target} is wrong for {number} of the cases that end here")
            for (label, target), number in wrong.items()
        ]
        return right, 0 if walking else asked

    def _says(self, question: int, answer: bool) -> int:
        yes = self._policy.says_yes[question]
        return yes if answer else self._policy.everything & ~yes

    def _arrivals(self) -> dict[str, int]:
        """Step -> cases that ever get there; a question that the policy does not know lets every case go both ways."""
        arriving = dict.fromkeys(self._steps, 0)
        waiting = [("A", self._policy.everything)]
        while waiting:
            label, cases = waiting.pop()
            if label not in self._steps or not cases & ~arriving[label]:
                continue
            arriving[label] |= cases
            question = self._question[label]
            for answer in (True, False):
                part = cases if question is None else cases & self._says(question, answer)
                waiting.append((self._steps[label].next(answer), part))
        return arriving

    def _reachable(self, start: str) -> set[str]:
        """Steps that some chain of one or more answers leads to from `start`, whether or not a case can give them."""
        reached: set[str] = set()
        waiting = [start]
        while waiting:
            step = self._steps[waiting.pop()]
            new = {target for target in (step.yes, step.no) if target in self._steps} - reached
            reached |= new
            waiting += new
        return reached

    def _leads_here(self, label: str) -> bool:
        return "A" in self._steps and label in self._reachable("A")

    def _unsound(
        self, step: Step, answer: bool, arriving: int, after: dict[str, set[str]], fault: Callable[[str, str], None]
    ) -> bool:
        """Whether a branch of a step that `arriving` reach is unsound; says why to `fault`."""
        question, target, name = self._question[step.label], step.next(answer), "YES" if answer else "NO"
        assert question is not None
        reasons = []
        if not arriving & self._says(question, answer):
            reasons.append(("impossible", f"no case that gets here answers {name}"))
        if target not in DECISIONS and target not in self._steps:
            reasons.append(("dangling", f"{name} leads to Step {target}, which does not exist"))
        if target in self._steps and (target == step.label or step.label in after[target]):
            reasons.append(("loop", f"{name} leads to Step {target}, from where one can come back here"))
        for kind, message in reasons:
            fault(kind, message)
        return bool(reasons)


_policy = lru_cache(maxsize=1024)(Policy.from_json)


def reward(answer: str, label: Any = None) -> float:
    """Combined reward of `answer`, 0 to 1 (see `verifier`); `label` of the row is the policy as JSON.

    ValueError if the row has no text `label`, InputError if that is not a policy.
    """
    return _verdict(answer, label).reward


def scores(answer: str, label: Any = None) -> dict[str, float]:
    """As `reward`, which is `score`, with the three numbers that it is made of."""
    found = _verdict(answer, label)
    parts = ("factual_accuracy", "logical_soundness", "efficiency")
    return {"score": found.reward} | {name: getattr(found, name) for name in parts}


def _verdict(answer: str, label: Any) -> Verdict:
    if not isinstance(label, str):
        raise ValueError("the row has no text `label` with its policy; use prompts of `posttrain data rationales`")
    return verify(answer, _policy(label))
