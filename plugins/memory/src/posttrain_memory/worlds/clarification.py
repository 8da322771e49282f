"""Clarification tasks: questions that need asking back, and similar ones that can be answered."""

from posttrain_memory.worlds.asking import TaskContext, code_literal, display
from posttrain_memory.worlds.graph import ValueSampler
from posttrain_memory.worlds.retrieval import fact
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.values import shuffled


def no_entity(context: TaskContext) -> MemoryTask | None:
    """A fact of someone whose name resembles that of a note, but who is not mentioned in the vault."""
    sampler = ValueSampler(context.random)
    for entity in context.graph.entities.values():
        sampler.names.reserve(entity.name)
    for entity in context.entities():
        for attribute in context.facts(entity):
            name = sampler.names.near(entity.name, context.theme.kind(entity.kind).names)
            if name is None:
                break
            question = context.ask_for(attribute, name)
            code = ['user = read_file("user.md")', f"hits = search_files({code_literal(name)})"]
            reply = f"There is no note on {name}. Did you mean {entity.name}?"
            truth = {"point": [name], "type": attribute.type, "key": attribute.key, "values": []}
            return context.task("clarification", "no_entity", question, 0, truth, [*code, reply])
    return None


def no_attribute(context: TaskContext) -> MemoryTask | None:
    """A fact that the note does not have."""
    for entity in context.entities():
        for attribute in context.absent(entity):
            question = context.ask_for(attribute, entity.name)
            reply = f"My note on {entity.name} does not give the {attribute.noun}. Can you tell me?"
            point = [entity.name, attribute.noun, attribute.label]
            truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": []}
            solution = [*context.route(entity.path), reply]
            return context.task("clarification", "no_attribute", question, context.hops(entity.path), truth, solution)
    return None


def contradiction(context: TaskContext) -> MemoryTask | None:
    """A fact for which two notes state different values."""
    graph = context.graph
    for claim in shuffled(context.random, graph.claims):
        entity = graph.entities[claim.about]
        attribute = next(a for a in context.theme.of(entity.kind) if a.key == claim.key)
        value = context.answer(attribute, entity).value
        if value == claim.value or sum(c.about == claim.about and c.key == claim.key for c in graph.claims) > 1:
            continue
        question = context.ask_for(attribute, entity.name)
        other = display(attribute, claim.value)
        reply = (
            f"My notes disagree on the {attribute.noun} of {entity.name}: one says "
            f"{display(attribute, entity.facts[claim.key])}, another {other}. Which of them is right?"
        )
        point = [entity.name, attribute.noun, attribute.label]
        truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": [value, claim.value]}
        solution = [*context.route(entity.path), f"other = read_file({code_literal(claim.note)})", reply]
        return context.task("clarification", "contradiction", question, context.hops(entity.path), truth, solution)
    return None


def control(context: TaskContext) -> MemoryTask | None:
    """A fact that is present: stated twice alike, or of a note with a similarly named one, or any other."""
    graph = context.graph
    if context.random.random() < 0.5:
        for claim in shuffled(context.random, graph.claims):
            entity = graph.entities[claim.about]
            attribute = next(a for a in context.theme.of(entity.kind) if a.key == claim.key)
            one = context.answer(attribute, entity)
            same = {c.value for c in graph.claims if c.about == claim.about and c.key == claim.key}
            if same == {one.value}:
                question = context.ask_for(attribute, entity.name)
                solution = [*context.route(entity.path), context.sentence(attribute, entity)]
                truth = {"answers": [one.to_json()]}
                return context.task("clarification", "control", question, context.hops(entity.path), truth, solution)
    for hops in shuffled(context.random, (1, 2)):
        task = fact(context, hops, "clarification", "control")
        if task is not None:
            return task
    return None
