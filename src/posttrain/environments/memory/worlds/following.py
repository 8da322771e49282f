"""The second half of the two-rollout protocol: what is asked, without any memory but the notes, after an update."""

from collections.abc import Mapping

from posttrain.environments.memory.worlds.asking import Asker, display, name_answer, quoted
from posttrain.environments.memory.worlds.graph import USER, Entity
from posttrain.environments.memory.worlds.naming import slug
from posttrain.environments.memory.worlds.replies import Answer
from posttrain.environments.memory.worlds.task import MemoryTask
from posttrain.environments.memory.worlds.themes import Attribute
from posttrain.environments.memory.worlds.truth import parse
from posttrain.environments.memory.worlds.values import plain


def follow_up(update: MemoryTask, asker: Asker) -> MemoryTask:
    """The question whose right answer shows that the notes hold what `update` told: the new value, name or relation; of
    what was deleted, a question back.
    """
    change, graph, theme = update.truth["change"], asker.graph, asker.theme
    if change["op"] == "new":
        key = sorted(change["facts"])[0]
        kind = theme.kind(theme.relation(change["relation"]).target)
        # The note as the scripted solution makes it; for a model, another path is as right.
        entity = Entity(f"entities/{kind.folder}/{slug(change['name'])}.md", kind.key, change["name"])
        route = [*asker.route(change["owner"]), f"new = read_file({quoted(entity.path)})"]
        return _told(asker, entity, theme.attributes[key], change["facts"][key], route)
    entity = graph.entities[change["about"]]
    if change["op"] == "set":
        return _told(asker, entity, theme.attributes[change["key"]], change["value"], asker.route(entity.path))
    if change["op"] == "delete":
        return _forgotten(asker, entity, theme.attributes[change["key"]])
    if change["op"] == "remove":
        return _removed(asker, entity)
    return _moved(asker, entity, theme.relation(change["relation"]).label, graph.entities[change["value"]])


def forgotten(update: MemoryTask, files: Mapping[str, str]) -> bool:
    """Whether the notes (path -> text) lack what `update` takes away, so that its follow-up has to be asked back.

    Of an update that takes no fact or note away, nothing is left to lack.
    """
    change, now = update.truth.get("change", {}), parse(files, update.theme)
    if change.get("op") == "delete":
        return not now.about(change["about"], change["key"])
    if change.get("op") == "remove" and update.follow_up is not None:
        name = plain(update.follow_up.truth["point"][0])
        return change["about"] not in files and name not in {plain(title) for title in now.titles.values()}
    return True


def _forgotten(asker: Asker, entity: Entity, attribute: Attribute) -> MemoryTask:
    """A question for a fact that is no longer there."""
    whom = "" if entity.path == USER else entity.name
    question = asker.ask(asker.of(attribute.noun, whom), attribute.be == "are")
    point = [*([whom] if whom else []), attribute.noun, attribute.label]
    reply = f"My note on {whom or 'you'} does not give the {attribute.noun}. Can you tell me?"
    truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": []}
    return _task(asker, "clarification", question, truth, [*asker.route(entity.path), reply], anchor=not whom)


def _removed(asker: Asker, entity: Entity) -> MemoryTask:
    """A question for a fact of a note that is gone."""
    attribute = asker.theme.attributes[sorted(entity.facts)[0]]
    question = asker.ask(asker.of(attribute.noun, entity.name), attribute.be == "are")
    truth = {"point": [entity.name], "type": attribute.type, "key": attribute.key, "values": []}
    search = f'user = read_file("user.md")\nhits = search_files({quoted(entity.name)})'
    reply = f"There is no note on {entity.name}. Whom or what do you mean?"
    return _task(asker, "clarification", question, truth, [search, reply])


def _moved(asker: Asker, entity: Entity, label: str, target: Entity) -> MemoryTask:
    """A question for the note that a relation leads to now."""
    whom = "" if entity.path == USER else entity.name
    question = asker.ask(f"the name of {asker.of(label, whom)}")
    owner = f"The {label} of {whom}" if whom else f"Your {label}"
    truth = {"answers": [name_answer(target).to_json()]}
    solution = [*asker.route(entity.path), f"{owner} is {target.name}."]
    return _task(asker, "retrieval", question, truth, solution, anchor=not whom)


def _told(asker: Asker, entity: Entity, attribute: Attribute, value: str, route: list[str]) -> MemoryTask:
    """A question for one fact, whose canonical value is `value`."""
    whom = "" if entity.path == USER else entity.name
    question = asker.ask(asker.of(attribute.noun, whom), attribute.be == "are")
    truth = {"answers": [Answer(attribute.type, value, attribute.key).to_json()]}
    subject = f"The {attribute.noun} of {whom}" if whom else f"Your {attribute.noun}"
    reply = f"{subject} {attribute.be} {display(attribute, value)}."
    return _task(asker, "retrieval", question, truth, [*route, reply], anchor=not whom)


def _task(
    asker: Asker, kind: str, question: str, truth: Mapping[str, object], solution: list[str], anchor: bool = False
) -> MemoryTask:
    question = asker.anchored(question) if anchor else question
    return MemoryTask(kind, "follow_up", asker.theme.name, question, 0, dict(truth), solution)
