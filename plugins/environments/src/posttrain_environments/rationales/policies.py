"""Synthetic policies: facts of a case in an everyday domain, and ordered rules that decide every case.

A policy is small enough to enumerate its cases, so properties of a written procedure are computed exactly.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from posttrain.errors import InputError

DECISIONS = ("APPROVE", "DENY", "ESCALATE")
MOST_QUESTIONS = 12
MOST_CASES = 512
"""Limits of a policy. The search for the optimal procedure is exact and takes seconds beyond them."""

Case = tuple[int, ...]
"""One value per attribute."""


@dataclass(frozen=True)
class Question:
    """A yes/no question about a case; `yes` and `no` are clauses equivalent to its answers."""

    ask: str
    yes: str
    no: str


@dataclass(frozen=True)
class Attribute:
    """A fact with `len(questions) + 1` values; question i is answered YES where the value is above i.

    One question is a yes/no fact. Several are increasing thresholds of one number, so a NO to a lower one implies NO to
    the higher ones.
    """

    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Rule:
    """`decision` where all conditions hold (`every`), or where any does."""

    conditions: tuple[tuple[int, bool], ...]
    """Index of a question in `Policy.questions`, and its required answer."""
    every: bool
    decision: str


@dataclass(frozen=True)
class Policy:
    """Ordered rules: the first that holds decides, and `default` decides all other cases. Cases have equal weight.

    InputError for an invalid policy: an unknown decision or question, questions with the same text, more than
    `MOST_QUESTIONS` questions or `MOST_CASES` cases, or one decision for all cases.
    """

    domain: str
    attributes: tuple[Attribute, ...]
    rules: tuple[Rule, ...]
    default: str

    def __post_init__(self) -> None:
        texts = [plain(question.ask) for question in self.questions]
        if len(set(texts)) < len(texts) or "" in texts:
            raise InputError(f"policy on {self.domain}: its questions must be distinct texts; reword one")
        for decision in (self.default, *(rule.decision for rule in self.rules)):
            if decision not in DECISIONS:
                raise InputError(f"policy on {self.domain}: no decision {decision!r}; use {', '.join(DECISIONS)}")
        indices = [index for rule in self.rules for index, _ in rule.conditions]
        if any(not 0 <= index < len(texts) for index in indices) or not all(rule.conditions for rule in self.rules):
            raise InputError(f"policy on {self.domain}: each rule needs conditions on questions 0 to {len(texts) - 1}")
        if len(texts) > MOST_QUESTIONS or prod(len(fact.questions) + 1 for fact in self.attributes) > MOST_CASES:
            raise InputError(
                f"policy on {self.domain}: more than {MOST_QUESTIONS} questions or {MOST_CASES} cases; remove an attribute"
            )
        if len(self.decided) < 2:
            raise InputError(
                f"policy on {self.domain} has one decision for all cases, which needs no procedure; change a rule"
            )

    @cached_property
    def questions(self) -> tuple[Question, ...]:
        """Questions of all attributes in order."""
        return tuple(question for attribute in self.attributes for question in attribute.questions)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Every assignment of values to the attributes."""
        return tuple(product(*(range(len(attribute.questions) + 1) for attribute in self.attributes)))

    @cached_property
    def _thresholds(self) -> tuple[tuple[int, int], ...]:
        """For each question, the index of its attribute and the value to exceed."""
        return tuple(
            (index, i) for index, attribute in enumerate(self.attributes) for i in range(len(attribute.questions))
        )

    def answer(self, question: int, case: Case) -> bool:
        """Return whether question `question` is answered YES in `case`."""
        attribute, threshold = self._thresholds[question]
        return case[attribute] > threshold

    def rule_of(self, case: Case) -> Rule | None:
        """Return the first rule that holds; None if the default decides."""
        for rule in self.rules:
            holds = [self.answer(question, case) == required for question, required in rule.conditions]
            if all(holds) if rule.every else any(holds):
                return rule
        return None

    def decide(self, case: Case) -> str:
        """Return the decision for `case`."""
        rule = self.rule_of(case)
        return self.default if rule is None else rule.decision

    @cached_property
    def everything(self) -> int:
        """The set of all cases. A set of cases is an integer: bit i is set where `cases[i]` belongs to it."""
        return (1 << len(self.cases)) - 1

    @cached_property
    def says_yes(self) -> tuple[int, ...]:
        """For each question, the set of cases that answer YES."""
        return tuple(
            _set_of(self.answer(question, case) for case in self.cases) for question in range(len(self.questions))
        )

    @cached_property
    def decided(self) -> dict[str, int]:
        """Decision -> the set of its cases, for decisions with at least one case."""
        outcomes = [self.decide(case) for case in self.cases]
        return {d: _set_of(outcome == d for outcome in outcomes) for d in DECISIONS if d in outcomes}

    def to_json(self) -> str:
        """Return the policy as one line of JSON, the same for equal policies."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Policy":
        """Read the result of `to_json`; InputError if the text is not a policy."""
        try:
            return _policy_of(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(
                f"this is not a policy in JSON ({type(error).__name__}: {error}): {str(text)[:60]!r}; "
                "use the `label` of a row that `posttrain data rationales` wrote"
            ) from error


def plain(question: str) -> str:
    """Return `question` in the form for comparison: lower-case letters and digits, single spaces between words."""
    return " ".join("".join(c if c.isalnum() else " " for c in question.lower()).split())


def _set_of(members: Any) -> int:
    return sum(1 << index for index, member in enumerate(members) if member)


def _policy_of(values: dict[str, Any]) -> Policy:
    attributes = tuple(
        Attribute(tuple(Question(str(q["ask"]), str(q["yes"]), str(q["no"])) for q in attribute["questions"]))
        for attribute in values["attributes"]
    )
    rules = tuple(
        Rule(
            tuple((int(index), bool(required)) for index, required in rule["conditions"]),
            bool(rule["every"]),
            rule["decision"],
        )
        for rule in values["rules"]
    )
    return Policy(str(values["domain"]), attributes, rules, values["default"])
