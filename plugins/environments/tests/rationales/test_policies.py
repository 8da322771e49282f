"""Policies: cases, decisions, JSON, and invalid ones."""

import json

import pytest
from plugins.environments.tests.rationales.made import OLD, USED, fact

from posttrain.errors import InputError
from posttrain.seeds import random_stream
from posttrain_environments.rationales.domains import DOMAINS, describe, draw_policy
from posttrain_environments.rationales.policies import DECISIONS, Policy, Rule, plain


def test_the_first_matching_rule_decides_every_case():
    assert len(USED.cases) == 8
    assert {case: USED.decide(case) for case in USED.cases} == {
        (used, late, big): "DENY" if used else "ESCALATE" if late and big else "APPROVE"
        for used in (0, 1)
        for late in (0, 1)
        for big in (0, 1)
    }


def test_either_condition_suffices_in_a_rule_with_or():
    policy = Policy("x", (fact("used"), fact("late")), (Rule(((0, True), (1, False)), False, "DENY"),), "APPROVE")
    assert [policy.decide(case) for case in policy.cases] == ["DENY", "APPROVE", "DENY", "DENY"]


def test_thresholds_of_a_number_increase():
    answers = {age: (OLD.answer(0, (age, 0)), OLD.answer(1, (age, 0))) for age in (0, 1, 2)}
    assert answers == {0: (False, False), 1: (True, False), 2: (True, True)}
    assert [OLD.decide(case) for case in OLD.cases] == ["APPROVE", "APPROVE", "APPROVE", "ESCALATE", "DENY", "DENY"]
    # Sets of cases agree with the cases one by one.
    for policy in (USED, OLD):
        for place, case in enumerate(policy.cases):
            assert [members >> place & 1 for members in policy.says_yes] == [
                policy.answer(question, case) for question in range(len(policy.questions))
            ]
            assert [d for d, members in policy.decided.items() if members >> place & 1] == [policy.decide(case)]


def test_json_gives_the_same_policy_back():
    for policy in (USED, OLD, *(draw_policy(random_stream("test", number)) for number in range(20))):
        assert Policy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "{}", '{"domain": 1}', "7", '{"attributes": [1], "rules": [], "domain": "x"}', "[" * 9999,
])  # fmt: skip
def test_the_error_names_a_text_that_is_not_a_policy(text):
    with pytest.raises(InputError, match="not a policy in JSON"):
        Policy.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default": "MAYBE"}, "no decision 'MAYBE'"),
        ({"rules": []}, "one decision for all cases"),
        ({"rules": [{"conditions": [[9, True]], "every": True, "decision": "DENY"}]}, "questions 0 to 2"),
        ({"rules": [{"conditions": [], "every": True, "decision": "DENY"}]}, "needs conditions"),
        ({"attributes": 10 * json.loads(USED.to_json())["attributes"]}, "distinct texts"),
        (
            {"attributes": [{"questions": [{"ask": f"Is it {n}?", "yes": "", "no": ""}]} for n in range(10)]},
            "more than 12 questions or 512 cases",
        ),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        Policy.from_json(json.dumps({**json.loads(USED.to_json()), **change}))


def test_domains_are_well_formed():
    assert len(DOMAINS) >= 12
    for domain in DOMAINS.values():
        assert len(domain.facts) >= 6
        assert len({plain(fact[0]) for fact in domain.facts}) == len(domain.facts)
        for ask, yes, no, *thresholds in domain.facts:
            assert ask.endswith("?")
            assert ask.count("?") == 1
            assert yes != no
            assert not {"and", "or", "if"} & set(f"{yes} {no}".split())
            for numbers in thresholds:
                assert ["{}" in part for part in (ask, yes, no)] == [True] * 3
                values = [int(number) for number in numbers.split()]
                assert values == sorted(set(values))


def test_drawn_policies_need_every_rule_and_condition():
    for number in range(60):
        policy = draw_policy(random_stream("test", number))
        assert 3 <= len(policy.attributes) <= 6
        assert {policy.rule_of(case) for case in policy.cases} == {*policy.rules, None}
        used = {place for rule in policy.rules for place, _ in rule.conditions}
        assert used == set(range(len(policy.questions)))


def test_the_text_has_every_condition_and_decision_in_order():
    openings = set()
    for number in range(60):
        random = random_stream("test", number)
        policy = draw_policy(random)
        words = describe(policy, random)
        openings.add(words.split()[0])
        place = 0
        for rule in policy.rules:
            for question, wanted in rule.conditions:
                clause = policy.questions[question].yes if wanted else policy.questions[question].no
                place = words.index(clause, place)
        said = words.upper().replace("APPROVED", "APPROVE").replace("DENIED", "DENY")
        assert all(decision in said for decision in {policy.default, *(rule.decision for rule in policy.rules)})
        assert not any(
            decision in said for decision in set(DECISIONS) - {policy.default, *(r.decision for r in policy.rules)}
        )
    assert len(openings) > 5
