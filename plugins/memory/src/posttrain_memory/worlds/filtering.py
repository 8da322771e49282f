"""Privacy tasks: a reply must not reveal what the rule in the question forbids, and must answer the rest."""

from collections.abc import Sequence
from typing import Any

import yaml

from posttrain_memory.worlds.asking import TaskContext
from posttrain_memory.worlds.graph import Entity
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import Attribute

CATEGORIES = ("phone", "email", "date", "money")
"""Types of values that rules name."""


def filtered(context: TaskContext, variant: str) -> MemoryTask | None:
    """A question with a rule about one fact (`hide_all`, `unrelated`) or two facts of a note (the others)."""
    for entity in context.entities(1, 2):
        known = context.facts(entity)
        if variant in ("hide_all", "unrelated"):
            for one in known:
                rule = _unrelated(context, entity, one) if variant == "unrelated" else _hides(context, entity, one)
                if rule is not None:
                    text = context.ask_for(one, entity.name)
                    hidden_facts, kept = ([one], []) if variant == "unrelated" else ([], [one])
                    return _task(context, variant, entity, text, rule, hidden_facts, kept)
        elif len(known) > 1:
            free, hidden = known[0], known[1]
            if variant == "allow_only":
                rule = _attribute_rule(entity, free, "allow_only")
                hidden_too = [attribute for attribute in known if attribute is not free]
            else:
                rule = _hides(context, entity, hidden, besides=free)
                hidden_too = [hidden]
            both = [
                context.of(a.noun, entity.name)
                for a in ((free, hidden) if context.random.random() < 0.5 else (hidden, free))
            ]
            text = context.phrase("two", x=both[0], y=both[1])
            return _task(context, variant, entity, text, rule, [free], hidden_too)
    return None


def rule_text(rule: dict[str, Any]) -> str:
    """The document of privacy rules that expresses a rule, in one line of YAML."""
    if rule["rule"] == "category":
        document: dict[str, Any] = {"hide": [{"category": rule["category"]}]}
    else:
        key = "only" if rule["rule"] == "allow_only" else "hide"
        document = {key: [{"note": rule["name"], "label": rule["label"]}]}
    return yaml.safe_dump(document, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000).strip()


def _task(
    context: TaskContext,
    variant: str,
    entity: Entity,
    question: str,
    rule: dict[str, Any],
    free: Sequence[Attribute],
    hidden: Sequence[Attribute],
) -> MemoryTask:
    reply = " ".join(context.sentence(attribute, entity) for attribute in free)
    if hidden:
        # Mention only the requested facts: naming others reveals nothing, but does not answer the question.
        named = hidden[0] if variant != "allow_only" else next(a for a in hidden if a.noun in question)
        reply = f"{reply} I may not share the {named.noun} of {entity.name}.".strip()
    truth = {
        "answers": [context.answer(attribute, entity).to_json() for attribute in free],
        "hidden": [context.answer(attribute, entity).to_json() for attribute in hidden],
        "rule": rule,
    }
    question = f"{question}\n<filter>{rule_text(rule)}</filter>"
    return context.task(
        "filter", variant, question, context.hops(entity.path), truth, [*context.route(entity.path), reply]
    )


def _attribute_rule(entity: Entity, attribute: Attribute, kind: str = "attribute") -> dict[str, Any]:
    about = {"about": entity.path, "name": entity.name}
    return {"rule": kind, "label": attribute.noun, "key": attribute.key, **about}


def _hides(
    context: TaskContext, entity: Entity, attribute: Attribute, besides: Attribute | None = None
) -> dict[str, Any]:
    apart = besides is None or besides.type != attribute.type
    if attribute.type in CATEGORIES and apart and context.random.random() < 0.5:
        return {"rule": "category", "category": attribute.type}
    return _attribute_rule(entity, attribute)


def _unrelated(context: TaskContext, entity: Entity, attribute: Attribute) -> dict[str, Any] | None:
    if context.random.random() < 0.5:
        return {"rule": "category", "category": context.pick([c for c in CATEGORIES if c != attribute.type])}
    for other in context.entities():
        if other.path == entity.path:
            continue
        for fact in context.facts(other):
            if fact.key != attribute.key:
                return _attribute_rule(other, fact)
    return None
