"""Retrieval tasks: facts of the user, facts one or two links away, aggregates over several notes, and dates."""

from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal

from posttrain_memory.worlds.asking import Asker, display, joined, name_answer, quoted
from posttrain_memory.worlds.graph import USER, Entity
from posttrain_memory.worlds.replies import Answer
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import Attribute, Relation

_FIRST = 'user = read_file("user.md")'


def fact(asker: Asker, hops: int, kind: str = "retrieval", variant: str | None = None) -> MemoryTask | None:
    """A fact of a note `hops` links away, or the note that a single-target relation leads to."""
    for entity in asker.entities(hops):
        if kind == "retrieval" and asker.random.random() < 0.2:
            task = _related(asker, entity, hops)
            if task is not None:
                return task
        for attribute in asker.facts(entity):
            question = asker.question(attribute, entity)
            solution = [*asker.route(entity.path), asker.sentence(attribute, entity)]
            answers = [asker.answer(attribute, entity)]
            return _task(asker, kind, variant or f"hop{hops}", question, hops, answers, solution)
    return None


def aggregate(asker: Asker) -> MemoryTask | None:
    """A count, a list, a sum, or an extreme over the notes of a relation."""
    for owner, relation, targets in _groups(asker):
        whose, anchor = _whose(asker, owner, relation)
        form = asker.pick(("count", "list", "sum", "most", "least", "with"))
        made: _Made | None
        if form in ("count", "list"):
            made = _all_of(form, whose, relation, targets)
        elif form == "with":
            made = _with(asker, whose, targets)
        else:
            made = _over(asker, form, whose, targets)
        if made is not None:
            question, answers, operands, reply = made
            reads = [] if form in ("count", "list") else [_reads(targets)]
            solution = [*asker.route(owner.path), *reads, reply]
            hops = asker.hops(owner.path) + (form not in ("count", "list"))
            question = asker.anchored(question) if anchor else question
            return _task(asker, "retrieval", "aggregate", question, min(2, hops), answers, solution, operands)
    return None


def time(asker: Asker) -> MemoryTask | None:
    """The first, last or next by date, or the number of days between two dates."""
    for owner, relation, targets in _groups(asker):
        for attribute in _shared(asker, targets, ("date",)):
            whose, anchor = _whose(asker, owner, relation)
            dates = {target.path: date.fromisoformat(target.facts[attribute.key]) for target in targets}
            order = sorted(targets, key=lambda target: dates[target.path])
            if len(set(dates.values())) < len(dates):
                continue
            form = asker.pick(("first", "last", "next", "between"))
            operands: list[str] = []
            answers = [name_answer(order[0] if form == "first" else order[-1])]
            reply = f"{(order[0] if form == 'first' else order[-1]).name}."
            if form in ("first", "last"):
                word = asker.pick(("earliest", "first") if form == "first" else ("latest", "last"))
                question = f"Which of {whose} has the {word} {attribute.noun}?"
            elif form == "next":
                place = int(asker.random.integers(1, len(order)))
                gap = (dates[order[place].path] - dates[order[place - 1].path]).days
                day = dates[order[place - 1].path] + timedelta(days=int(asker.random.integers(0, gap)))
                question = f"After {day.isoformat()}, which of {whose} comes next by {attribute.noun}?"
                answers, reply = [name_answer(order[place])], f"{order[place].name}."
            else:
                one, other = order[0], order[1]
                days = (dates[other.path] - dates[one.path]).days
                question = f"How many days lie between the {attribute.noun} of {one.name} and the {attribute.noun} of {other.name}?"
                answers, reply = [Answer("number", str(days), "days")], f"{days} days."
                anchor = False
            solution = [*asker.route(owner.path), _reads(targets), reply]
            question = asker.anchored(question) if anchor else question
            hops = min(2, asker.hops(owner.path) + 1)
            return _task(asker, "retrieval", "time", question, hops, answers, solution, operands)
    return _two_dates(asker)


def _task(
    asker: Asker,
    kind: str,
    variant: str,
    question: str,
    hops: int,
    answers: Sequence[Answer],
    solution: list[str],
    operands: Sequence[str] = (),
) -> MemoryTask:
    truth: dict[str, object] = {"answers": [one.to_json() for one in answers]}
    if operands:
        truth["operands"] = sorted(set(operands))
    return MemoryTask(kind, variant, asker.theme.name, question, hops, truth, solution)


def _related(asker: Asker, entity: Entity, hops: int) -> MemoryTask | None:
    for edge in asker.graph.edges:
        relation = asker.theme.relation(edge.relation)
        if edge.source == entity.path and not relation.many:
            target = asker.graph.entities[edge.target]
            whom = "" if entity.path == USER else entity.name
            question = asker.ask(f"the name of {asker.of(relation.label, whom)}")
            question = question if whom else asker.anchored(question)
            owner = f"The {relation.label} of {whom}" if whom else f"Your {relation.label}"
            solution = [*asker.route(entity.path), f"{owner} is {target.name}."]
            return _task(asker, "retrieval", f"hop{hops}", question, hops, [name_answer(target)], solution)
    return None


def _groups(asker: Asker) -> list[tuple[Entity, Relation, list[Entity]]]:
    """Notes near `user.md` that have a relation with at least two targets, in random order."""
    found = []
    for owner in asker.entities(0, 1):
        for relation in asker.theme.relations:
            paths = asker.graph.targets(owner.path, relation.key)
            if relation.many and 2 <= len(paths) <= 12:
                found.append((owner, relation, [asker.graph.entities[path] for path in paths]))
    return [found[i] for i in asker.random.permutation(len(found))]


def _whose(asker: Asker, owner: Entity, relation: Relation) -> tuple[str, bool]:
    if owner.path == USER:
        return f"my {relation.plural}", True
    return f"the {relation.plural} of {owner.name}", False


def _reads(targets: Sequence[Entity]) -> str:
    paths = ", ".join(quoted(target.path) for target in targets)
    return f"notes = [read_file(path) for path in [{paths}]]"


def _shared(asker: Asker, targets: Sequence[Entity], types: Sequence[str]) -> list[Attribute]:
    """Facts of these types that all the notes have and no other note states, in random order."""
    return [
        attribute
        for attribute in asker.facts(targets[0])
        if attribute.type in types
        and all(
            attribute.key in target.facts and (target.path, attribute.key) not in asker.contested for target in targets
        )
    ]


def _two_dates(asker: Asker) -> MemoryTask | None:
    """Which of two notes of a kind comes first, or the days between them, if no relation leads to several dates."""
    near = asker.entities(1, 2)
    for one in near:
        for attribute in asker.facts(one):
            others = [e for e in near if e.kind == one.kind and e is not one and attribute in asker.facts(e)]
            if attribute.type != "date" or not others:
                continue
            other = others[0]
            days = [date.fromisoformat(entity.facts[attribute.key]) for entity in (one, other)]
            if days[0] == days[1]:
                continue
            reads = [f"hits = search_files({quoted(attribute.label)})", _reads((one, other))]
            hops = max(asker.hops(one.path), asker.hops(other.path))
            first = one if days[0] < days[1] else other
            nouns = [f"the {attribute.noun} of {entity.name}" for entity in (one, other)]
            if asker.random.random() < 0.5:
                question = f"Which comes first, {nouns[0]} or {nouns[1]}?"
                answers, reply = [name_answer(first)], f"That of {first.name}."
            else:
                gap = abs((days[0] - days[1]).days)
                question = f"How many days lie between {nouns[0]} and {nouns[1]}?"
                answers, reply = [Answer("number", str(gap), "days")], f"{gap} days."
            task = _task(asker, "retrieval", "time", question, hops, answers, [_FIRST, *reads, reply])
            if answers[0].type == "name":
                task.truth["against"] = [name_answer(other if first is one else one).value]
            return task
    return None


_Made = tuple[str, list[Answer], list[str], str]


def _all_of(form: str, whose: str, relation: Relation, targets: Sequence[Entity]) -> _Made:
    if form == "count":
        answers = [Answer("number", str(len(targets)), "count")]
        return f"Counting {whose}, how many are there?", answers, [], f"There are {len(targets)}."
    names = [target.name for target in targets]
    return f"List the names of {whose}.", [name_answer(target) for target in targets], [], f"{joined(names)}."


def _with(asker: Asker, whose: str, targets: Sequence[Entity]) -> _Made | None:
    for attribute in _shared(asker, targets, ("enum",)):
        value = asker.pick(targets).facts[attribute.key]
        count = sum(target.facts[attribute.key] == value for target in targets)
        question = f'Of how many of {whose} is the {attribute.noun} "{value}"?'
        return question, [Answer("number", str(count), "count")], [], f"Of {count}."
    return None


def _over(asker: Asker, form: str, whose: str, targets: Sequence[Entity]) -> _Made | None:
    for attribute in _shared(asker, targets, ("number", "money")):
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
