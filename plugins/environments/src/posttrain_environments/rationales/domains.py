"""Everyday domains, random policies, and their descriptions in English."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posttrain.errors import InputError
from posttrain_environments.rationales.policies import DECISIONS, Attribute, Policy, Question, Rule


@dataclass(frozen=True)
class Domain:
    """The parts of the policies of a domain."""

    name: str
    institution: str
    case: str
    facts: tuple[tuple[str, ...], ...]
    """Question, clause for YES, clause for NO, and for a number its thresholds in increasing order."""


def _domain(block: str) -> Domain:
    (name, institution, case), *facts = (tuple(part.strip() for part in line.split("|")) for line in block.splitlines())
    return Domain(name, institution, case, tuple(facts))


_FILE = Path(__file__).with_name("domains.txt")
DOMAINS = {domain.name: domain for domain in map(_domain, _FILE.read_text(encoding="utf-8").strip().split("\n\n"))}
"""Name -> domain. Each paragraph of the file has the name, the institution that decides, and a case; then the facts, see
`Domain.facts`, in which {} is a threshold.
"""


def draw_policy(random: np.random.Generator) -> Policy:
    """Return a policy of a random domain: 3 to 6 facts and 2 to 4 rules of 1 or 2 conditions, all of them necessary."""
    while True:
        domain = list(DOMAINS.values())[random.integers(len(DOMAINS))]
        count = int(random.integers(3, 7))
        indices = random.permutation(len(domain.facts))[:count]
        attributes = tuple(_attribute(domain.facts[index], random) for index in indices)
        policy = _with_rules(domain.name, attributes, random)
        if policy is not None:
            return policy


def describe(policy: Policy, random: np.random.Generator) -> str:
    """Return the policy in English, in one of several forms. The domain must be one of `DOMAINS`."""
    domain = DOMAINS[policy.domain]
    place = f"{_pick(PLACES, random)} {domain.institution}"
    clauses = []
    for rule in policy.rules:
        answers = [policy.questions[at].yes if wanted else policy.questions[at].no for at, wanted in rule.conditions]
        clauses.append(((" and " if rule.every else " or ").join(answers), rule.decision))
    form = int(random.integers(5))
    if form == 0:
        heading = f"{place}, {domain.name}. The first rule that holds decides."
        lines = [f"{number}. If {when}: {decision}." for number, (when, decision) in enumerate(clauses, 1)]
        return "\n".join([heading, *lines, f"{len(clauses) + 1}. In all other cases: {policy.default}."])
    if form == 1:
        parts = [f"if {when}, {decision}" for when, decision in clauses]
        body = "; otherwise, ".join(parts)
        return f"Policy of {place} on {domain.name}: {body}; in all other cases, {policy.default}."
    if form == 2:
        parts = [f"is {_DONE[decision]} where {when}" for when, decision in clauses]
        body = ". Failing that, it ".join(parts)
        return f"At {place} each {domain.case} {body}. Every other one is {_DONE[policy.default]}."
    if form == 3:
        parts = [f"{decision} when {when}" for when, decision in clauses]
        return (
            f"{place} ({domain.name}): {policy.default}, unless one of these holds; take the first. {'; '.join(parts)}."
        )
    parts = [f"{decision} whenever {when}" for when, decision in clauses]
    return f"How {place} treats each {domain.case}: {'. If not, '.join(parts)}. Else {policy.default}."


PLACES = (
    "Ashford", "Elm Street", "Fairfield", "Greenway", "Harbour", "Hillcrest", "Kingsley", "Lakeview", "Maple",
    "Marlow", "Northgate", "Oakham", "Old Mill", "Pinewood", "Quayside", "Redhill", "Riverside", "Stonebridge",
    "Westbrook",
)  # fmt: skip
"""Names of the institutions."""
_DONE = {"APPROVE": "approved", "DENY": "denied", "ESCALATE": "escalated"}


def _pick(options: Sequence[str], random: np.random.Generator) -> str:
    return options[int(random.integers(len(options)))]


def _attribute(fact: tuple[str, ...], random: np.random.Generator) -> Attribute:
    if len(fact) == 3:
        return Attribute((Question(*fact),))
    *texts, known = fact
    thresholds = known.split()
    places = sorted(random.permutation(len(thresholds))[: int(random.integers(1, 3))])
    return Attribute(tuple(Question(*(text.replace("{}", thresholds[place]) for text in texts)) for place in places))


def _with_rules(domain: str, attributes: tuple[Attribute, ...], random: np.random.Generator) -> Policy | None:
    """Return a policy with random rules; None if a question is unused or a part is redundant."""
    count = sum(len(attribute.questions) for attribute in attributes)
    owner = [place for place, attribute in enumerate(attributes) for _ in attribute.questions]
    rules: list[Rule] = []
    before = ""
    for _ in range(int(random.integers(2, 5))):
        size = int(random.integers(1, 3))
        chosen = [int(place) for place in random.permutation(count)[:size]]
        if len({owner[place] for place in chosen}) < size:
            return None  # two conditions on one number may contradict each other, or read badly
        before = _pick([decision for decision in DECISIONS if decision != before], random)
        conditions = tuple((place, bool(random.integers(2))) for place in chosen)
        rules.append(Rule(conditions, size == 1 or bool(random.integers(2)), before))
    default = _pick([decision for decision in DECISIONS if decision != before], random)
    if {place for rule in rules for place, _ in rule.conditions} != set(range(count)):
        return None
    try:
        policy = Policy(domain, attributes, tuple(rules), default)
    except InputError:
        return None
    return policy if _each_decides(policy) else None


def _each_decides(policy: Policy) -> bool:
    """Whether the default and every rule decide some case, and no rule or condition is redundant."""
    ends = [policy.rule_of(case) for case in policy.cases]
    if set(ends) != {*policy.rules, None}:
        return False
    for place, rule in enumerate(policy.rules):
        kept = [(), *((condition,) for condition in rule.conditions if len(rule.conditions) > 1)]
        for conditions in kept:
            instead = (replace(rule, conditions=conditions),) if conditions else ()
            try:
                shorter = replace(policy, rules=(*policy.rules[:place], *instead, *policy.rules[place + 1 :]))
            except InputError:
                continue  # all cases would have the same decision
            if shorter.decided == policy.decided:
                return False
    return True
