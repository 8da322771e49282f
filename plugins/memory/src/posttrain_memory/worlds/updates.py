"""Update tasks: facts added, changed, deleted or mentioned in passing, notes created and removed, relations moved.

Also the follow-up questions of the two-rollout protocol, asked after an update in a new conversation that knows only
the notes.
"""

from collections.abc import Mapping, Sequence

from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.asking import TaskContext, code_literal, display, name_answer
from posttrain_memory.worlds.graph import Entity, ValueSampler, distances, value_of
from posttrain_memory.worlds.naming import slug
from posttrain_memory.worlds.render import link
from posttrain_memory.worlds.replies import Answer
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import Attribute
from posttrain_memory.worlds.truth import Place, parse
from posttrain_memory.worlds.values import links, plain, shuffled


def fact_set(context: TaskContext, variant: str) -> MemoryTask | None:
    """A fact that is new to a note (`add`), gets another value (`change`), or is mentioned in passing (`mention`)."""
    sampler = ValueSampler(context.random)
    for entity in context.entities(0, 1, 2):
        new = variant == "add" or (variant == "mention" and context.random.random() < 0.4)
        for attribute in context.absent(entity) if new else context.facts(entity):
            value = sampler.other(attribute, entity.facts.get(attribute.key, ""))
            canonical = value_of(context.theme, attribute.key, value)
            if canonical == value_of(context.theme, attribute.key, entity.facts.get(attribute.key, "")):
                continue
            shown, places = display(attribute, value), context.parsed.about(entity.path, attribute.key)
            if new:
                line = f"- {attribute.label}: {shown}\n"
                edit: str | None = f"append_file({code_literal(entity.path)}, {code_literal(line)})"
            else:
                edit = _replaced(context, places[0], shown) if len(places) == 1 else None
            if edit is None:
                continue
            form = "mention" if variant == "mention" else "tell" if new else "change"
            whom = "" if entity.path == USER else entity.name
            what = context.of(attribute.noun, whom)
            question = _capitalised(context.phrase(form, x=what, v=shown, be=attribute.be))
            change = {"op": "set", "about": entity.path, "key": attribute.key, "value": canonical}
            reply = f"I noted that {what.replace('my ', 'your ', 1)} {attribute.be} {shown}."
            return _task(context, variant, question, entity.path, change, [edit], reply)
    return None


def fact_deleted(context: TaskContext) -> MemoryTask | None:
    """A fact to be deleted."""
    for entity in context.entities(0, 1, 2):
        for attribute in context.facts(entity):
            places = context.parsed.about(entity.path, attribute.key)
            edit = _removed(context, places[0]) if len(places) == 1 else None
            if edit is None:
                continue
            whom = "" if entity.path == USER else entity.name
            what = context.of(attribute.noun, whom)
            question = _capitalised(context.phrase("forget", x=what))
            change = {"op": "delete", "about": entity.path, "key": attribute.key}
            reply = f"I deleted {what.replace('my ', 'your ', 1)}."
            return _task(context, "delete", question, entity.path, change, [edit], reply)
    return None


def note_made(context: TaskContext) -> MemoryTask | None:
    """A new note with a few facts, which another note has to link to."""
    sampler = ValueSampler(context.random)
    for entity in context.graph.entities.values():
        sampler.names.reserve(entity.name)
    for owner in context.entities(0, 1):
        relations = [r for r in context.theme.relations if r.source == owner.kind]
        free = [r for r in relations if r.many]
        free += [r for r in relations if not r.many and not context.graph.targets(owner.path, r.key)]
        for relation in shuffled(context.random, free):
            kind = context.theme.kind(relation.target)
            name = sampler.names.new(kind.names)
            path = f"entities/{kind.folder}/{slug(name)}.md"
            attributes = shuffled(context.random, kind.facts)[: int(context.random.integers(1, 3))]
            facts = {attribute.key: sampler.value(attribute) for attribute in attributes}
            facts_text = " ".join(f"The {a.noun} {a.be} {display(a, facts[a.key])}." for a in attributes)
            if owner.path == USER:
                role = f"one of my {relation.plural}" if relation.many else f"my {relation.label}"
            else:
                role = (
                    f"{f'one of the {relation.plural}' if relation.many else f'the {relation.label}'} of {owner.name}"
                )
            question = context.phrase("new", name=name, rel=role, facts=facts_text)
            lines = "".join(f"- {a.label}: {display(a, facts[a.key])}\n" for a in attributes)
            creation = f"create_file({code_literal(path)}, {code_literal(f'# {name}' + chr(10) * 2 + lines)})"
            line = f"- {relation.label}: {link(Entity(path, kind.key, name))}\n"
            change = {
                "op": "new",
                "name": name,
                "facts": {key: value_of(context.theme, key, value) for key, value in facts.items()},
                "owner": owner.path,
                "relation": relation.key,
            }
            edits = [f"{creation}\nappend_file({code_literal(owner.path)}, {code_literal(line)})"]
            return _task(context, "new", question, owner.path, change, edits, f"{name} has a note now.")
    return None


def note_removed(context: TaskContext) -> MemoryTask | None:
    """A note to be removed with all links to it; all other notes stay reachable."""
    for entity in context.entities(1, 2):
        out = {path: targets - {entity.path} for path, targets in context.parsed.out.items() if path != entity.path}
        if len(distances(out, USER)) < len(out):
            continue
        edits: dict[tuple[str, int, int], str | None] = {}
        for place in context.parsed.places:
            statement = place.statement
            if statement.note != entity.path and entity.path in (statement.about, statement.value):
                edits[(statement.note, place.start, place.end)] = _unlinked(context, place, entity.path)
        known = list(edits.values())
        mentions = sum(target == entity.path for path in out for _, _, target, _ in links(context.world.files[path]))
        if len(known) > 4 or mentions != len(known) or any(edit is None for edit in known):
            continue
        code = "\n".join([f"delete_file({code_literal(entity.path)})", *(edit for edit in known if edit)])
        question = context.phrase("gone", name=entity.name)
        change = {"op": "remove", "about": entity.path}
        return _task(context, "remove", question, entity.path, change, [code], f"I removed {entity.name}.")
    return None


def relation_moved(context: TaskContext) -> MemoryTask | None:
    """A single-target relation that now leads to another note."""
    graph = context.graph
    for edge in shuffled(context.random, graph.edges):
        relation = context.theme.relation(edge.relation)
        others = [
            e.path for e in context.entities() if e.kind == relation.target and e.path not in (edge.target, edge.source)
        ]
        if relation.many or not others or context.distance[edge.source] > 1:
            continue
        new = context.pick(others)
        out = {path: set(targets) for path, targets in context.parsed.out.items()}
        out[edge.source] = (out[edge.source] - {edge.target}) | {new}
        out[edge.target] = out[edge.target] - {edge.source} if edge.back else out[edge.target]
        forward = [p for p in context.parsed.about(edge.source, edge.relation) if p.statement.value == edge.target]
        back = [p for p in context.parsed.about(edge.target, f"{edge.relation}~") if p.statement.value == edge.source]
        if len(distances(out, USER)) < len(out) or len(forward) != 1 or len(back) > 1:
            continue
        if new in graph.targets(edge.source, edge.relation):
            continue
        edits = [_replaced(context, forward[0], link(graph.entities[new]))]
        edits += [_unlinked(context, place, edge.source) for place in back]
        if any(edit is None for edit in edits):
            continue
        names = {"old": graph.entities[edge.target].name, "new": graph.entities[new].name}
        source = graph.entities[edge.source]
        if edge.source == USER:
            question = f"My {relation.label} is no longer {names['old']} but {names['new']}."
        else:
            question = context.phrase("move", rel=relation.label, whom=source.name, **names)
        change = {"op": "relink", "about": edge.source, "relation": edge.relation, "was": edge.target, "value": new}
        code = "\n".join(edit for edit in edits if edit)
        reply = f"I noted {names['new']} as {relation.label}."
        return _task(context, "relink", question, edge.source, change, [code], reply)
    return None


def _task(
    context: TaskContext,
    variant: str,
    question: str,
    path: str,
    change: Mapping[str, object],
    edits: Sequence[str],
    reply: str,
) -> MemoryTask:
    solution = [*context.route(path), *edits, reply]
    anchor = path == USER and variant not in ("new", "remove")
    return context.task("update", variant, question, context.hops(path), {"change": change}, solution, anchor)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _replaced(context: TaskContext, place: Place, new: str) -> str | None:
    """Code that replaces the value; None if its line or sentence is not unique."""
    text = context.world.files[place.statement.note]
    old = text[place.start : place.end]
    whole = text[place.start : place.value_start] + new + text[place.value_end : place.end]
    return _edit(context, place, old, whole)


def _removed(context: TaskContext, place: Place) -> str | None:
    """Code that removes the line or sentence."""
    text = context.world.files[place.statement.note]
    end = place.end + (place.end < len(text) and text[place.end] in " \n")
    return _edit(context, place, text[place.start : end], "")


def _unlinked(context: TaskContext, place: Place, target: str) -> str | None:
    """Code that removes the link to `target` from the line or sentence, or all of it if it has no other link."""
    text = context.world.files[place.statement.note]
    unit = text[place.start : place.end]
    unit_links = links(unit)
    if len(unit_links) == 1:
        return _removed(context, place)
    number = next(i for i, item in enumerate(unit_links) if item[2] == target)
    begin, end = unit_links[number][0], unit_links[number][1]
    if number:
        begin = unit_links[number - 1][1]
    else:
        end = unit_links[1][0]
    return _edit(context, place, unit, unit[:begin] + unit[end:])


def _edit(context: TaskContext, place: Place, old: str, new: str) -> str | None:
    if context.world.files[place.statement.note].count(old) != 1:
        return None
    return f"update_file({code_literal(place.statement.note)}, {code_literal(old)}, {code_literal(new)})"


def follow_up(update: MemoryTask, context: TaskContext) -> MemoryTask:
    """The question whose correct answer shows that the notes reflect `update`; after a deletion, asking back."""
    change, graph, theme = update.truth["change"], context.graph, context.theme
    attribute: Attribute | None
    if change["op"] == "new":
        key = sorted(change["facts"])[0]
        kind = theme.kind(theme.relation(change["relation"]).target)
        # The path used by the scripted solution; a model may choose another.
        entity = Entity(f"entities/{kind.folder}/{slug(change['name'])}.md", kind.key, change["name"])
        attribute, value = theme.attributes[key], change["facts"][key]
        route = [*context.route(change["owner"]), f"new = read_file({code_literal(entity.path)})"]
    else:
        entity = graph.entities[change["about"]]
        key = sorted(entity.facts)[0] if change["op"] == "remove" else change.get("key", "")
        attribute, value = theme.attributes.get(key), change.get("value", "")
        route = context.route(entity.path)
    whom = "" if entity.path == USER else entity.name
    truth: dict[str, object]
    if attribute is None:
        label, target = theme.relation(change["relation"]).label, graph.entities[change["value"]]
        question = context.ask(f"the name of {context.of(label, whom)}")
        truth = {"answers": [name_answer(target).to_json()]}
        reply = f"{f'The {label} of {whom}' if whom else f'Your {label}'} is {target.name}."
        return context.task("retrieval", "follow_up", question, 0, truth, [*route, reply], anchor=not whom)
    question, noun = context.ask_for(attribute, whom), attribute.noun
    if change["op"] in ("set", "new"):
        truth = {"answers": [Answer(attribute.type, value, attribute.key).to_json()]}
        subject = f"The {noun} of {whom}" if whom else f"Your {noun}"
        reply = f"{subject} {attribute.be} {display(attribute, value)}."
        return context.task("retrieval", "follow_up", question, 0, truth, [*route, reply], anchor=not whom)
    if change["op"] == "delete":
        point = [*([whom] if whom else []), noun, attribute.label]
        reply = f"My note on {whom or 'you'} does not give the {noun}. Can you tell me?"
    else:
        point = [whom]
        route = [f'user = read_file("user.md")\nhits = search_files({code_literal(whom)})']
        reply = f"There is no note on {whom}. Whom or what do you mean?"
    truth = {"point": point, "type": attribute.type, "key": attribute.key, "values": []}
    return context.task("clarification", "follow_up", question, 0, truth, [*route, reply], anchor=not whom)


def is_forgotten(update: MemoryTask, files: Mapping[str, str]) -> bool:
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
