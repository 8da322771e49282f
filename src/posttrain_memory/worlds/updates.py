"""Update tasks: facts added, changed, deleted or mentioned in passing, notes created and removed, relations moved.

Also the follow-up questions of the two-rollout protocol, asked after an update in a new conversation that knows only
the notes.
"""

from collections.abc import Mapping

from posttrain_memory.worlds.asking import Asker, display, name_answer, quoted
from posttrain_memory.worlds.graph import USER, Drawing, Entity, distances, value_of
from posttrain_memory.worlds.naming import slug
from posttrain_memory.worlds.render import link
from posttrain_memory.worlds.replies import Answer
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import Attribute
from posttrain_memory.worlds.truth import Place, parse
from posttrain_memory.worlds.values import links, plain, shuffled

_TELL = (
    "Please note: {x} {be} {v}.",
    "For the record, {x} {be} {v}.",
    "Write down that {x} {be} {v}.",
    "Add this to my notes: {x} {be} {v}.",
)
_CHANGE = (
    "A correction: {x} {be} {v}.",
    "Please change {x} to {v}.",
    "What you have is out of date: {x} {be} {v} now.",
    "Set {x} to {v}.",
)
_FORGET = (
    "Please forget {x}.",
    "Delete {x} from my notes.",
    "Please take out {x}; that is out of date and there is nothing new.",
    "I do not want {x} in the notes any more.",
)
_MENTION = (
    "What a day: rain from the left, a queue at the baker, and then I hear that {x} {be} now {v}. Well, time for tea.",
    "I slept badly, but the walk was lovely. Oh, and {x} {be} {v} these days, I was told. Talk to you tomorrow!",
    "Funny how things go: first the bus breaks down, then it turns out that {x} {be} {v} now, and it is only noon.",
    "You should have seen the sky this morning. Somebody said in passing that {x} {be} {v} now. Anyway, thanks for listening.",
)
_NEW = (
    "Please make a note on {name}, {rel}. {facts}",
    "There is somebody or something new: {name}, {rel}. {facts} Please keep that.",
    "I want {name} in my notes: {rel}. {facts}",
)
_GONE = (
    "{name} is history. Delete the note and every mention of it.",
    "Please remove {name} from my notes altogether, links and all.",
    "I no longer need the note on {name}; take it away, and whatever points to it.",
)
_MOVE = (
    "The {rel} of {whom} is no longer {old} but {new}.",
    "{whom} has another {rel} now: {new} instead of {old}. Please correct it.",
)


def fact_set(asker: Asker, variant: str) -> MemoryTask | None:
    """A fact that is new to a note (`add`), gets another value (`change`), or is mentioned in passing (`mention`)."""
    drawing = Drawing(asker.random)
    for entity in asker.entities(0, 1, 2):
        new = variant == "add" or (variant == "mention" and asker.random.random() < 0.4)
        for attribute in asker.absent(entity) if new else asker.facts(entity):
            value = drawing.other(attribute, entity.facts.get(attribute.key, ""))
            if value_of(asker.theme, attribute.key, value) == value_of(
                asker.theme, attribute.key, entity.facts.get(attribute.key, "")
            ):
                continue
            edit = _added(entity, attribute, value) if new else _changed(asker, entity, attribute, value)
            if edit is None:
                continue
            forms = _MENTION if variant == "mention" else _TELL if new else _CHANGE
            whom = "" if entity.path == USER else entity.name
            what = asker.of(attribute.noun, whom)
            question = _upper(asker.pick(forms).format(x=what, v=display(attribute, value), be=attribute.be))
            change = {
                "op": "set",
                "about": entity.path,
                "key": attribute.key,
                "value": value_of(asker.theme, attribute.key, value),
            }
            reply = f"I noted that {what.replace('my ', 'your ', 1)} {attribute.be} {display(attribute, value)}."
            return _task(asker, variant, question, entity.path, change, [edit], reply, anchor=not whom)
    return None


def fact_deleted(asker: Asker) -> MemoryTask | None:
    """A fact to be deleted."""
    for entity in asker.entities(0, 1, 2):
        for attribute in asker.facts(entity):
            places = asker.parsed.about(entity.path, attribute.key)
            edit = _removed(asker, places[0]) if len(places) == 1 else None
            if edit is None:
                continue
            whom = "" if entity.path == USER else entity.name
            what = asker.of(attribute.noun, whom)
            question = _upper(asker.pick(_FORGET).format(x=what))
            change = {"op": "delete", "about": entity.path, "key": attribute.key}
            reply = f"I deleted {what.replace('my ', 'your ', 1)}."
            return _task(asker, "delete", question, entity.path, change, [edit], reply, anchor=not whom)
    return None


def note_made(asker: Asker) -> MemoryTask | None:
    """A new note with a few facts, which another note has to link to."""
    drawing = Drawing(asker.random)
    for entity in asker.graph.entities.values():
        drawing.names.take(entity.name)
    for owner in asker.entities(0, 1):
        free = [r for r in asker.theme.relations if r.source == owner.kind and r.many]
        free += [
            r
            for r in asker.theme.relations
            if r.source == owner.kind and not r.many and not asker.graph.targets(owner.path, r.key)
        ]
        for relation in shuffled(asker.random, free):
            kind = asker.theme.kind(relation.target)
            name = drawing.names.new(kind.names)
            path = f"entities/{kind.folder}/{slug(name)}.md"
            attributes = shuffled(asker.random, kind.facts)[: int(asker.random.integers(1, 3))]
            facts = {attribute.key: drawing.value(attribute) for attribute in attributes}
            told = " ".join(f"The {a.noun} {a.be} {display(a, facts[a.key])}." for a in attributes)
            mine = owner.path == USER
            role = f"one of my {relation.plural}" if relation.many else f"my {relation.label}"
            if not mine:
                role = f"one of the {relation.plural} of {owner.name}" if relation.many else ""
                role = role or f"the {relation.label} of {owner.name}"
            question = asker.pick(_NEW).format(name=name, rel=role, facts=told)
            lines = "".join(f"- {a.label}: {display(a, facts[a.key])}\n" for a in attributes)
            made = f"create_file({quoted(path)}, {quoted(f'# {name}' + chr(10) * 2 + lines)})"
            line = f"- {relation.label}: {link(Entity(path, kind.key, name))}\n"
            change = {
                "op": "new",
                "name": name,
                "facts": {key: value_of(asker.theme, key, value) for key, value in facts.items()},
                "owner": owner.path,
                "relation": relation.key,
            }
            edits = [f"{made}\nappend_file({quoted(owner.path)}, {quoted(line)})"]
            return _task(asker, "new", question, owner.path, change, edits, f"{name} has a note now.")
    return None


def note_removed(asker: Asker) -> MemoryTask | None:
    """A note to be removed with all links to it; all other notes stay reachable."""
    for entity in asker.entities(1, 2):
        out = {path: targets - {entity.path} for path, targets in asker.parsed.out.items() if path != entity.path}
        if len(distances(out, USER)) < len(out):
            continue
        edits: dict[tuple[str, int, int], str | None] = {}
        for place in asker.parsed.places:
            said = place.statement
            if said.note != entity.path and entity.path in (said.about, said.value):
                edits[(said.note, place.start, place.end)] = _unlinked(asker, place, entity.path)
        known = list(edits.values())
        mentions = sum(target == entity.path for path in out for _, _, target, _ in links(asker.world.files[path]))
        if len(known) > 4 or mentions != len(known) or any(edit is None for edit in known):
            continue
        code = "\n".join([f"delete_file({quoted(entity.path)})", *(edit for edit in known if edit)])
        question = asker.pick(_GONE).format(name=entity.name)
        change = {"op": "remove", "about": entity.path}
        return _task(asker, "remove", question, entity.path, change, [code], f"I removed {entity.name}.")
    return None


def relation_moved(asker: Asker) -> MemoryTask | None:
    """A single-target relation that now leads to another note."""
    graph = asker.graph
    for edge in shuffled(asker.random, graph.edges):
        relation = asker.theme.relation(edge.relation)
        others = [
            e.path for e in asker.entities() if e.kind == relation.target and e.path not in (edge.target, edge.source)
        ]
        if relation.many or not others or asker.distance[edge.source] > 1:
            continue
        new = asker.pick(others)
        out = {path: set(targets) for path, targets in asker.parsed.out.items()}
        out[edge.source] = (out[edge.source] - {edge.target}) | {new}
        out[edge.target] = out[edge.target] - {edge.source} if edge.back else out[edge.target]
        forward = [p for p in asker.parsed.about(edge.source, edge.relation) if p.statement.value == edge.target]
        back = [p for p in asker.parsed.about(edge.target, f"{edge.relation}~") if p.statement.value == edge.source]
        if len(distances(out, USER)) < len(out) or len(forward) != 1 or len(back) > 1:
            continue
        if new in graph.targets(edge.source, edge.relation):
            continue
        edits = [_replaced(asker, forward[0], link(graph.entities[new]))]
        edits += [_unlinked(asker, place, edge.source) for place in back]
        if any(edit is None for edit in edits):
            continue
        names = {"old": graph.entities[edge.target].name, "new": graph.entities[new].name}
        source = graph.entities[edge.source]
        if edge.source == USER:
            question = f"My {relation.label} is no longer {names['old']} but {names['new']}."
        else:
            question = asker.pick(_MOVE).format(rel=relation.label, whom=source.name, **names)
        change = {"op": "relink", "about": edge.source, "relation": edge.relation, "was": edge.target, "value": new}
        code = "\n".join(edit for edit in edits if edit)
        reply = f"I noted {names['new']} as {relation.label}."
        return _task(asker, "relink", question, edge.source, change, [code], reply, anchor=edge.source == USER)
    return None


def _task(
    asker: Asker,
    variant: str,
    question: str,
    path: str,
    change: Mapping[str, object],
    edits: list[str],
    reply: str,
    anchor: bool = False,
) -> MemoryTask:
    question = asker.anchored(question) if anchor else question
    solution = [*asker.route(path), *edits, reply]
    return MemoryTask(
        "update", variant, asker.theme.name, question, asker.hops(path), {"change": dict(change)}, solution
    )


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _added(entity: Entity, attribute: Attribute, value: str) -> str:
    return (
        f"append_file({quoted(entity.path)}, {quoted(f'- {attribute.label}: {display(attribute, value)}' + chr(10))})"
    )


def _changed(asker: Asker, entity: Entity, attribute: Attribute, value: str) -> str | None:
    places = asker.parsed.about(entity.path, attribute.key)
    return _replaced(asker, places[0], display(attribute, value)) if len(places) == 1 else None


def _replaced(asker: Asker, place: Place, new: str) -> str | None:
    """Code that replaces the value; None if its line or sentence is not unique."""
    text = asker.world.files[place.statement.note]
    old = text[place.start : place.end]
    whole = text[place.start : place.value_start] + new + text[place.value_end : place.end]
    return _edit(asker, place, old, whole)


def _removed(asker: Asker, place: Place) -> str | None:
    """Code that removes the line or sentence."""
    text = asker.world.files[place.statement.note]
    end = place.end + (place.end < len(text) and text[place.end] in " \n")
    return _edit(asker, place, text[place.start : end], "")


def _unlinked(asker: Asker, place: Place, target: str) -> str | None:
    """Code that removes the link to `target` from the line or sentence, or all of it if it has no other link."""
    text = asker.world.files[place.statement.note]
    unit = text[place.start : place.end]
    found = links(unit)
    if len(found) == 1:
        return _removed(asker, place)
    number = next(i for i, item in enumerate(found) if item[2] == target)
    begin, end = found[number][0], found[number][1]
    if number:
        begin = found[number - 1][1]
    else:
        end = found[1][0]
    return _edit(asker, place, unit, unit[:begin] + unit[end:])


def _edit(asker: Asker, place: Place, old: str, new: str) -> str | None:
    if asker.world.files[place.statement.note].count(old) != 1:
        return None
    return f"update_file({quoted(place.statement.note)}, {quoted(old)}, {quoted(new)})"


def follow_up(update: MemoryTask, asker: Asker) -> MemoryTask:
    """The question whose correct answer shows that the notes reflect `update`: about the new value, name or relation.
    For a deletion, asking back is correct.
    """
    change, graph, theme = update.truth["change"], asker.graph, asker.theme
    if change["op"] == "new":
        key = sorted(change["facts"])[0]
        kind = theme.kind(theme.relation(change["relation"]).target)
        # The path used by the scripted solution; a model may choose another.
        entity = Entity(f"entities/{kind.folder}/{slug(change['name'])}.md", kind.key, change["name"])
        route = [*asker.route(change["owner"]), f"new = read_file({quoted(entity.path)})"]
        return _told(asker, entity, theme.attributes[key], change["facts"][key], route)
    entity = graph.entities[change["about"]]
    if change["op"] == "set":
        return _told(asker, entity, theme.attributes[change["key"]], change["value"], asker.route(entity.path))
    if change["op"] == "delete":
        return _forgotten(asker, entity, theme.attributes[change["key"]])
    if change["op"] == "remove":
        return _note_removed(asker, entity)
    return _moved(asker, entity, theme.relation(change["relation"]).label, graph.entities[change["value"]])


def forgotten(update: MemoryTask, files: Mapping[str, str]) -> bool:
    """Whether the notes (path -> text) no longer state what `update` removes, so that its follow-up must be asked
    back.

    True for updates that remove no fact or note.
    """
    change, now = update.truth.get("change", {}), parse(files, update.theme)
    if change.get("op") == "delete":
        return not now.about(change["about"], change["key"])
    if change.get("op") == "remove" and update.follow_up is not None:
        name = plain(update.follow_up.truth["point"][0])
        return change["about"] not in files and name not in {plain(title) for title in now.titles.values()}
    return True


def _forgotten(asker: Asker, entity: Entity, attribute: Attribute) -> MemoryTask:
    """A question about a deleted fact."""
    whom = "" if entity.path == USER else entity.name
    question = asker.ask(asker.of(attribute.noun, whom), attribute.be == "are")
    point = [*([whom] if whom else []), attribute.noun, attribute.label]
    reply = f"My note on {whom or 'you'} does not give the {attribute.noun}. Can you tell me?"
    truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": []}
    return _follow_up_task(asker, "clarification", question, truth, [*asker.route(entity.path), reply], anchor=not whom)


def _note_removed(asker: Asker, entity: Entity) -> MemoryTask:
    """A question about a fact of a removed note."""
    attribute = asker.theme.attributes[sorted(entity.facts)[0]]
    question = asker.ask(asker.of(attribute.noun, entity.name), attribute.be == "are")
    truth = {"point": [entity.name], "type": attribute.type, "key": attribute.key, "values": []}
    search = f'user = read_file("user.md")\nhits = search_files({quoted(entity.name)})'
    reply = f"There is no note on {entity.name}. Whom or what do you mean?"
    return _follow_up_task(asker, "clarification", question, truth, [search, reply])


def _moved(asker: Asker, entity: Entity, label: str, target: Entity) -> MemoryTask:
    """A question about the new target of a relation."""
    whom = "" if entity.path == USER else entity.name
    question = asker.ask(f"the name of {asker.of(label, whom)}")
    owner = f"The {label} of {whom}" if whom else f"Your {label}"
    truth = {"answers": [name_answer(target).to_json()]}
    solution = [*asker.route(entity.path), f"{owner} is {target.name}."]
    return _follow_up_task(asker, "retrieval", question, truth, solution, anchor=not whom)


def _told(asker: Asker, entity: Entity, attribute: Attribute, value: str, route: list[str]) -> MemoryTask:
    """A question about one fact, whose canonical value is `value`."""
    whom = "" if entity.path == USER else entity.name
    question = asker.ask(asker.of(attribute.noun, whom), attribute.be == "are")
    truth = {"answers": [Answer(attribute.type, value, attribute.key).to_json()]}
    subject = f"The {attribute.noun} of {whom}" if whom else f"Your {attribute.noun}"
    reply = f"{subject} {attribute.be} {display(attribute, value)}."
    return _follow_up_task(asker, "retrieval", question, truth, [*route, reply], anchor=not whom)


def _follow_up_task(
    asker: Asker, kind: str, question: str, truth: Mapping[str, object], solution: list[str], anchor: bool = False
) -> MemoryTask:
    question = asker.anchored(question) if anchor else question
    return MemoryTask(kind, "follow_up", asker.theme.name, question, 0, dict(truth), solution)
