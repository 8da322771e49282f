"""Clarification tasks: questions that can only be answered by asking back, and similar questions that can be
answered.
"""

from collections.abc import Mapping

from posttrain_memory.worlds.asking import Asker, display, quoted
from posttrain_memory.worlds.graph import Drawing
from posttrain_memory.worlds.retrieval import fact
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.values import shuffled


def no_entity(asker: Asker) -> MemoryTask | None:
    """A fact of someone whose name resembles that of a note, but who is not mentioned in the vault."""
    drawing = Drawing(asker.random)
    for entity in asker.graph.entities.values():
        drawing.names.take(entity.name)
    for entity in asker.entities():
        for attribute in asker.facts(entity):
            name = drawing.names.near(entity.name, asker.theme.kind(entity.kind).names)
            if name is None:
                break
            question = asker.ask(asker.of(attribute.noun, name), attribute.be == "are")
            code = ['user = read_file("user.md")', f"hits = search_files({quoted(name)})"]
            reply = f"There is no note on {name}. Did you mean {entity.name}?"
            truth = {"point": [name], "type": attribute.type, "key": attribute.key, "values": []}
            return _task(asker, "no_entity", question, 0, truth, [*code, reply])
    return None


def no_attribute(asker: Asker) -> MemoryTask | None:
    """A fact that the note does not have."""
    for entity in asker.entities():
        for attribute in asker.absent(entity):
            question = asker.ask(asker.of(attribute.noun, entity.name), attribute.be == "are")
            reply = f"My note on {entity.name} does not give the {attribute.noun}. Can you tell me?"
            point = [entity.name, attribute.noun, attribute.label]
            truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": []}
            solution = [*asker.route(entity.path), reply]
            return _task(asker, "no_attribute", question, asker.hops(entity.path), truth, solution)
    return None


def contradiction(asker: Asker) -> MemoryTask | None:
    """A fact for which two notes state different values."""
    graph = asker.graph
    for claim in shuffled(asker.random, graph.claims):
        entity = graph.entities[claim.about]
        attribute = next(a for a in asker.theme.of(entity.kind) if a.key == claim.key)
        own = asker.answer(attribute, entity).value
        if own == claim.value or sum(c.about == claim.about and c.key == claim.key for c in graph.claims) > 1:
            continue
        question = asker.ask(asker.of(attribute.noun, entity.name), attribute.be == "are")
        other = display(attribute, claim.value)
        reply = (
            f"My notes disagree on the {attribute.noun} of {entity.name}: one says "
            f"{display(attribute, entity.facts[claim.key])}, another {other}. Which of them is right?"
        )
        point = [entity.name, attribute.noun, attribute.label]
        truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": [own, claim.value]}
        solution = [*asker.route(entity.path), f"other = read_file({quoted(claim.note)})", reply]
        return _task(asker, "contradiction", question, asker.hops(entity.path), truth, solution)
    return None


def control(asker: Asker) -> MemoryTask | None:
    """A fact that is present: stated twice with the same value, or of a note with a similarly named one, or any
    other.
    """
    graph = asker.graph
    if asker.random.random() < 0.5:
        for claim in shuffled(asker.random, graph.claims):
            entity = graph.entities[claim.about]
            attribute = next(a for a in asker.theme.of(entity.kind) if a.key == claim.key)
            one = asker.answer(attribute, entity)
            same = {c.value for c in graph.claims if c.about == claim.about and c.key == claim.key}
            if same == {one.value}:
                question = asker.ask(asker.of(attribute.noun, entity.name), attribute.be == "are")
                solution = [*asker.route(entity.path), asker.sentence(attribute, entity)]
                truth = {"answers": [one.to_json()]}
                return _task(asker, "control", question, asker.hops(entity.path), truth, solution)
    for hops in shuffled(asker.random, (1, 2)):
        task = fact(asker, hops, "clarification", "control")
        if task is not None:
            return task
    return None


def _task(
    asker: Asker, variant: str, question: str, hops: int, truth: Mapping[str, object], solution: list[str]
) -> MemoryTask:
    return MemoryTask("clarification", variant, asker.theme.name, question, hops, dict(truth), solution)
