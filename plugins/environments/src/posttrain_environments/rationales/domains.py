"""Everyday domains, random policies, and their descriptions in English."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.errors import InputError
from posttrain_environments.rationales.policies import DECISIONS, Attribute, Policy, Question, Rule

# For each domain: its name, the institution that decides, and a case; then its facts (see `Domain.facts`). {} is a
# threshold.
_DOMAINS = """
refunds | Store | refund request
Was the item used? | the item was used | the item was not used
Is there a receipt? | there is a receipt | there is no receipt
Was the item on sale? | the item was on sale | the item was at full price
Is the item damaged? | the item is damaged | the item is undamaged
Is the customer a member? | the customer is a member | the customer is not a member
Did it cost more than {} dollars? | it cost more than {} dollars | it cost at most {} dollars | 50 100 200 500
Was it bought over {} days ago? | it was bought over {} days ago | it was bought at most {} days ago | 14 30 60 90

library loans | Library | loan extension
Is the book reserved? | the book is reserved | the book is not reserved
Does the reader owe fees? | the reader owes fees | the reader owes no fees
Is the reader a student? | the reader is a student | the reader is not a student
Is it a reference book? | it is a reference book | it is not a reference book
Is the loan overdue? | the loan is overdue | the loan is not overdue
Was it extended over {} times? | it was extended over {} times | it was extended at most {} times | 1 2 3 5

building permits | Town Hall | permit application
Is the house listed? | the house is listed | the house is not listed
Do the neighbours agree? | the neighbours agree | the neighbours object
Is the site on a flood plain? | the site is on a flood plain | the site is off the flood plain
Are the plans signed? | the plans are signed | the plans are unsigned
Does it face the street? | it faces the street | it does not face the street
Is it taller than {} metres? | it is taller than {} metres | it is at most {} metres tall | 3 4 6 10

visas | Consulate | visa application
Is the passport valid? | the passport is valid | the passport has expired
Is there an invitation? | there is an invitation | there is no invitation
Was a visa refused before? | a visa was refused before | no visa was refused before
Is the traveller insured? | the traveller is insured | the traveller is not insured
Is the trip for work? | the trip is for work | the trip is private
Is the stay over {} days? | the stay is over {} days | the stay is at most {} days | 14 30 60 90

leave requests | Works | leave request
Is the season busy? | the season is busy | the season is quiet
Is a stand-in named? | a stand-in is named | no stand-in is named
Is the worker on probation? | the worker is on probation | the worker is past probation
Is the leave unpaid? | the leave is unpaid | the leave is paid
Is it a family emergency? | it is a family emergency | it is no family emergency
Is it longer than {} days? | it is longer than {} days | it is at most {} days long | 2 5 10 20

allotments | Garden Society | plot application
Does the applicant live nearby? | the applicant lives nearby | the applicant lives far away
Was a plot given up before? | a plot was given up before | no plot was given up before
Will bees be kept? | bees will be kept | no bees will be kept
Is the plot shared? | the plot is shared | the plot is not shared
Is a shed planned? | a shed is planned | no shed is planned
Is the plot over {} square metres? | the plot is over {} square metres | the plot is at most {} square metres | 50 100 200

car rental | Garage | booking
Is the driver's licence clean? | the driver's licence is clean | the driver's licence has points
Was a deposit paid? | a deposit was paid | no deposit was paid
Does the trip cross a border? | the trip crosses a border | the trip stays in the country
Is there a second driver? | there is a second driver | there is no second driver
Is it a sports car? | it is a sports car | it is not a sports car
Is the driver older than {}? | the driver is older than {} | the driver is at most {} years old | 21 25 30 70

insurance claims | Mutual | claim
Was the police told? | the police was told | the police was not told
Are there photos? | there are photos | there are no photos
Is the premium paid? | the premium is paid | the premium is unpaid
Was it a storm? | it was a storm | it was not a storm
Was a claim made this year? | a claim was made this year | no claim was made this year
Is the damage over {} euros? | the damage is over {} euros | the damage is at most {} euros | 200 500 1000 5000

school trips | School | trip proposal
Have all parents agreed? | all parents have agreed | some parents have not agreed
Is a first-aider coming? | a first-aider is coming | no first-aider is coming
Is swimming planned? | swimming is planned | no swimming is planned
Is it in term time? | it is in term time | it is in the holidays
Is the bus booked? | the bus is booked | the bus is not booked
Are there over {} pupils? | there are over {} pupils | there are at most {} pupils | 15 20 30 60

dog adoption | Shelter | adoption
Is there a garden? | there is a garden | there is no garden
Are there small children? | there are small children | there are no small children
Is the flat rented? | the flat is rented | the flat is owned
Did the landlord agree? | the landlord agreed | the landlord did not agree
Has the family had a dog? | the family has had a dog | the family has never had a dog
Is the dog alone over {} hours? | the dog is alone over {} hours | the dog is alone at most {} hours | 3 4 6 8

museum loans | Museum | loan of a work
Is the painting fragile? | the painting is fragile | the painting is robust
Is the hall guarded? | the hall is guarded | the hall is unguarded
Is the borrower abroad? | the borrower is abroad | the borrower is in the country
Is transport insured? | transport is insured | transport is not insured
Did the donor consent? | the donor consented | the donor did not consent
Is it for over {} months? | it is for over {} months | it is for at most {} months | 3 6 12 24

parking permits | Council | permit request
Does the driver live here? | the driver lives here | the driver lives elsewhere
Is the car electric? | the car is electric | the car is not electric
Are there unpaid fines? | there are unpaid fines | there are no unpaid fines
Is the driver disabled? | the driver is disabled | the driver is not disabled
Is there a garage? | there is a garage | there is no garage
Does the home have over {} cars? | the home has over {} cars | the home has at most {} cars | 1 2 3

film permits | Film Office | shooting request
Will a road be closed? | a road will be closed | no road will be closed
Are there stunts? | there are stunts | there are no stunts
Will a drone fly? | a drone will fly | no drone will fly
Is it filmed at night? | it is filmed at night | it is filmed by day
Is it a student film? | it is a student film | it is not a student film
Is the crew over {} people? | the crew is over {} people | the crew is at most {} people | 5 10 20 50

small loans | Credit Union | loan application
Is the income steady? | the income is steady | the income is unsteady
Is there a guarantor? | there is a guarantor | there is no guarantor
Was a payment missed? | a payment was missed | no payment was missed
Is the loan for a home? | the loan is for a home | the loan is not for a home
Is the applicant a saver here? | the applicant is a saver here | the applicant is no saver here
Is it over {} thousand? | it is over {} thousand | it is at most {} thousand | 2 5 10 20
"""


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


DOMAINS = {domain.name: domain for domain in map(_domain, _DOMAINS.strip().split("\n\n"))}


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
