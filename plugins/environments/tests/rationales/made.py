"""Policies and procedures whose numbers are known by hand."""

from posttrain_environments.rationales.policies import Attribute, Policy, Question, Rule
from posttrain_environments.rationales.procedures import Procedure, Step


def fact(word: str) -> Attribute:
    return Attribute((Question(f"Is it {word}?", f"it is {word}", f"it is not {word}"),))


USED = Policy(
    "refunds",
    (fact("used"), fact("late"), fact("big")),
    (Rule(((0, True),), True, "DENY"), Rule(((1, True), (2, True)), True, "ESCALATE")),
    "APPROVE",
)
"""Of 8 cases 4 are denied, 1 is escalated, 3 are approved. Best: 1 question for 4 cases, 2 for 2, 3 for 2: mean 14/8."""

BEST = Procedure(
    (
        Step("A", "Is it used?", "DENY", "B"),
        Step("B", "Is it late?", "C", "APPROVE"),
        Step("C", "Is it big?", "ESCALATE", "APPROVE"),
    ),
    "Used things are never taken back.",
)

OLD = Policy(
    "refunds",
    (
        Attribute(
            (
                Question("Is it over 10 days old?", "it is over 10 days old", "it is at most 10 days old"),
                Question("Is it over 20 days old?", "it is over 20 days old", "it is at most 20 days old"),
            )
        ),
        fact("used"),
    ),
    (Rule(((1, True),), True, "DENY"), Rule(((0, True), (2, True)), True, "ESCALATE")),
    "APPROVE",
)
"""3 ages times used or not: 6 cases."""


def text(*lines: str) -> str:
    """An answer of these lines and a rationale."""
    return "\n".join([*lines, "Rationale: so it is."])
