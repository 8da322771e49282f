"""Retrieval tasks: facts of the user, facts one or two links away, aggregates over several notes, and dates."""

from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal

from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.asking import TaskContext, code_literal, display, joined, name_answer
from posttrain_memory.worlds.graph import Entity
from posttrain_memory.worlds.replies import Answer
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import Attribute, Relation

_FIRST = 'user = read_file("user.md")'


def fact(context: TaskContext, hops: int, kind: str = "retrieval", variant: str | None = None) -> MemoryTask | None:
    """A fact of a note `hops` links away, or the note that a single-target relation leads to."""
    for entity in context.entities(hops):
        if kind == "retrieval" and context.random.random() < 0.2:
            task = _related(context, entity, hops)
            if task is not None:
                return task
        for attribute in context.facts(entity):
            question = context.question(attribute, entity)
            solution = [*context.route(entity.path), context.sentence(attribute, entity)]
            answers = [context.answer(attribute, entity)]
            return context.task(kind, variant or f"hop{hops}", question, hops, _truth(answers), solution)
    return None


def aggregate(context: TaskContext) -> MemoryTask | None:
    """A count, a list, a sum, or an extreme over the notes of a relation."""
    for owner, relation, targets in _groups(context):
        anchor, whose = owner.path == USER, _whose(owner, relation)
        form = context.pick(("count", "list", "sum", "most", "least", "with"))
        linked = form in ("count", "list")  # the links answer it, without the notes
        if result := _over_links(form, whose, targets) if linked else _over(context, form, whose, targets):
            question, answers, operands, reply = result
            solution = [*context.route(owner.path), *([] if linked else [_reads(targets)]), reply]
            hops = context.hops(owner.path) + (not linked)
            truth = _truth(answers, operands)
            return context.task("retrieval", "aggregate", question, min(2, hops), truth, solution, anchor)
    return None


def time(context: TaskContext) -> MemoryTask | None:
    """The first, last or next by date, or the number of days between two dates."""
    for owner, relation, targets in _groups(context):
        for attribute in _shared(context, targets, ("date",)):
            anchor, whose = owner.path == USER, _whose(owner, relation)
            dates = {target.path: date.fromisoformat(target.facts[attribute.key]) for target in targets}
            order = sorted(targets, key=lambda target: dates[target.path])
            if len(set(dates.values())) < len(dates):
                continue
            form = context.pick(("first", "last", "next", "between"))
            end = order[0] if form == "first" else order[-1]
            answers, reply = [name_answer(end)], f"{end.name}."
            if form in ("first", "last"):
                word = context.pick(("earliest", "first") if form == "first" else ("latest", "last"))
                question = f"Which of {whose} has the {word} {attribute.noun}?"
            elif form == "next":
                place = int(context.random.integers(1, len(order)))
                gap = (dates[order[place].path] - dates[order[place - 1].path]).days
                day = dates[order[place - 1].path] + timedelta(days=int(context.random.integers(0, gap)))
                question = f"After {day.isoformat()}, which of {whose} comes next by {attribute.noun}?"
                answers, reply = [name_answer(order[place])], f"{order[place].name}."
            else:
                one, other = order[0], order[1]
                days = (dates[other.path] - dates[one.path]).days
                question = f"How many days lie between the {attribute.noun} of {one.name} and the {attribute.noun} of {other.name}?"
                answers, reply = [Answer("number", str(days), "days")], f"{days} days."
                anchor = False
            solution = [*context.route(owner.path), _reads(targets), reply]
            hops = min(2, context.hops(owner.path) + 1)
            return context.task("retrieval", "time", question, hops, _truth(answers), solution, anchor)
    return _two_dates(context)


def _truth(answers: Sequence[Answer], operands: Sequence[str] = ()) -> dict[str, object]:
    stated = {"operands": sorted(set(operands))} if operands else {}
    return {"answers": [one.to_json() for one in answers], **stated}


def _related(context: TaskContext, entity: Entity, hops: int) -> MemoryTask | None:
    for edge in context.graph.edges:
        relation = context.theme.relation(edge.relation)
        if edge.source == entity.path and not relation.many:
            target = context.graph.entities[edge.target]
            whom = "" if entity.path == USER else entity.name
            question = context.ask(f"the name of {context.of(relation.label, whom)}")
            question = question if whom else context.anchored(question)
            owner = f"The {relation.label} of {whom}" if whom else f"Your {relation.label}"
            solution = [*context.route(entity.path), f"{owner} is {target.name}."]
            return context.task("retrieval", f"hop{hops}", question, hops, _truth([name_answer(target)]), solution)
    return None


def _groups(context: TaskContext) -> list[tuple[Entity, Relation, list[Entity]]]:
    """Notes near `user.md` that have a relation with at least two targets, in random order."""
    groups = []
    for owner in context.entities(0, 1):
        for relation in context.theme.relations:
            paths = context.graph.targets(owner.path, relation.key)
            if relation.many and 2 <= len(paths) <= 12:
                groups.append((owner, relation, [context.graph.entities[path] for path in paths]))
    return [groups[i] for i in context.random.permutation(len(groups))]


def _whose(owner: Entity, relation: Relation) -> str:
    return f"my {relation.plural}" if owner.path == USER else f"the {relation.plural} of {owner.name}"


def _reads(targets: Sequence[Entity]) -> str:
    paths = ", ".join(code_literal(target.path) for target in targets)
    return f"notes = [read_file(path) for path in [{paths}]]"


def _shared(context: TaskContext, targets: Sequence[Entity], types: Sequence[str]) -> list[Attribute]:
    """Facts of these types that all the notes have and no other note states, in random order."""
    return [
        attribute
        for attribute in context.facts(targets[0])
        if attribute.type in types
        and all(
            attribute.key in target.facts and (target.path, attribute.key) not in context.contested
            for target in targets
        )
    ]


def _two_dates(context: TaskContext) -> MemoryTask | None:
    """Which of two notes has the earlier date, or the days between, if no relation leads to several dates."""
    near = context.entities(1, 2)
    for one in near:
        for attribute in context.facts(one):
            others = [e for e in near if e.kind == one.kind and e is not one and attribute in context.facts(e)]
            if attribute.type != "date" or not others:
                continue
            other = others[0]
            days = [date.fromisoformat(entity.facts[attribute.key]) for entity in (one, other)]
            if days[0] == days[1]:
                continue
            reads = [f"hits = search_files({code_literal(attribute.label)})", _reads((one, other))]
            hops = max(context.hops(one.path), context.hops(other.path))
            first = one if days[0] < days[1] else other
            nouns = [f"the {attribute.noun} of {entity.name}" for entity in (one, other)]
            if context.random.random() < 0.5:
                question = f"Which comes first, {nouns[0]} or {nouns[1]}?"
                answers, reply = [name_answer(first)], f"That of {first.name}."
            else:
                gap = abs((days[0] - days[1]).days)
                question = f"How many days lie between {nouns[0]} and {nouns[1]}?"
                answers, reply = [Answer("number", str(gap), "days")], f"{gap} days."
            truth = _truth(answers)
            if answers[0].type == "name":
                truth["against"] = [name_answer(other if first is one else one).value]
            return context.task("retrieval", "time", question, hops, truth, [_FIRST, *reads, reply])
    return None


_Made = tuple[str, list[Answer], list[str], str]


def _over_links(form: str, whose: str, targets: Sequence[Entity]) -> _Made:
    if form == "count":
        answers = [Answer("number", str(len(targets)), "count")]
        return f"Counting {whose}, how many are there?", answers, [], f"There are {len(targets)}."
    names = [target.name for target in targets]
    return f"List the names of {whose}.", [name_answer(target) for target in targets], [], f"{joined(names)}."


def _over(context: TaskContext, form: str, whose: str, targets: Sequence[Entity]) -> _Made | None:
    for attribute in _shared(context, targets, ("enum",) if form == "with" else ("number", "money")):
        if form == "with":
            value = context.pick(targets).facts[attribute.key]
            count = sum(target.facts[attribute.key] == value for target in targets)
            question = f'Of how many of {whose} is the {attribute.noun} "{value}"?'
            return question, [Answer("number", str(count), "count")], [], f"Of {count}."
        amounts = [Decimal(target.facts[attribute.key].split(" ")[-1]) for target in targets]
        if form == "sum":
            code = targets[0].facts[attribute.key].split(" ")[0]
            total = f"{code} {sum(amounts):.2f}" if attribute.type == "money" else str(sum(amounts))
            question = f"Taken together, what does the {attribute.noun} of {whose} come to?"
            operands = [target.facts[attribute.key] for target in targets]
            answers = [Answer(attribute.type, total, attribute.key)]
            return question, answers, operands, f"Together {display(attribute, total)}."
        best = max(amounts) if form == "most" else min(amounts)
        if amounts.count(best) > 1:
            continue
        word = "highest" if form == "most" else "lowest"
        target = targets[amounts.index(best)]
        return f"Which of {whose} has the {word} {attribute.noun}?", [name_answer(target)], [], f"{target.name}."
    return None
