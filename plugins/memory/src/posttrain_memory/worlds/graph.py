"""The typed graph of a world: notes with facts, relations, and statements about other notes."""

from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import NamedTuple

import numpy as np

from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.naming import Namer, fill, slug
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.theme import Attribute, Relation, Theme, themes
from posttrain_memory.worlds.values import canonical, pick, shuffled


class Statement(NamedTuple):
    """One statement in a vault: the note `note` says that `key` of the note `about` is `value`.

    Values are canonical. For a relation, `key` is its key (with a trailing `~` for the inverse) and `value` the path
    of the other note. An invalid value is kept with a `?` in front.
    """

    note: str
    about: str
    key: str
    value: str


@dataclass
class Entity:
    """A note: path, kind (`user` for `user.md`), title, and facts (key -> value as written in the theme)."""

    path: str
    kind: str
    name: str
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Edge:
    """`source` links to `target` under a relation. `back`: the target links back."""

    source: str
    relation: str
    target: str
    back: bool = True


@dataclass
class Graph:
    """The facts of a world. `user.md` always exists; `claims` are facts of one note that another note states."""

    theme_name: str
    entities: dict[str, Entity]
    edges: list[Edge] = field(default_factory=list)
    claims: list[Statement] = field(default_factory=list)

    @property
    def theme(self) -> Theme:
        return themes()[self.theme_name]

    @property
    def title(self) -> str:
        return self.entities[USER].name

    def statements(self) -> frozenset[Statement]:
        """All statements of the vault, without duplicates."""
        facts = [(path, *fact) for path, entity in self.entities.items() for fact in entity.facts.items()]
        stated = {Statement(path, path, key, value_of(self.theme, key, value)) for path, key, value in facts}
        for edge in self.edges:
            stated.add(Statement(edge.source, edge.source, edge.relation, edge.target))
            if edge.back:
                stated.add(Statement(edge.target, edge.target, f"{edge.relation}~", edge.source))
        return frozenset(stated | set(self.claims))

    def targets(self, source: str, relation: str) -> list[str]:
        """Paths of the notes that `source` links to under the relation."""
        return [edge.target for edge in self.edges if edge.source == source and edge.relation == relation]

    def contested(self) -> set[tuple[str, str]]:
        """Path and key of each fact that more than one note states, with the same value or another."""
        return {(claim.about, claim.key) for claim in self.claims}

    def distances(self) -> dict[str, int]:
        """Path -> minimum number of links from `user.md`, for all reachable notes."""
        out: dict[str, set[str]] = {path: set() for path in self.entities}
        for edge in self.edges:
            out[edge.source].add(edge.target)
            if edge.back:
                out[edge.target].add(edge.source)
        for claim in self.claims:
            out[claim.note].add(claim.about)
        return distances(out, USER)


def distances(out: dict[str, set[str]], start: str) -> dict[str, int]:
    """Node -> minimum number of steps from `start`, for all reachable nodes. `out` maps each node to its successors."""
    steps, front = {start: 0}, [start]
    while front:
        ahead = []
        for node in front:
            for other in sorted(out.get(node, ())):
                if other not in steps:
                    steps[other] = steps[node] + 1
                    ahead.append(other)
        front = ahead
    return steps


def value_of(theme: Theme, key: str, text: str) -> str:
    """The canonical value of a fact, or the text with a `?` in front if it is not valid."""
    value = canonical(theme.attributes[key].type, text)
    return f"?{text.strip()}" if value is None else value


class ValueSampler:
    """Samples names and values for one world; names and contact details are unique."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.names = Namer(random)
        self._used: set[str] = set()

    def value(self, attribute: Attribute) -> str:
        """A random value of the attribute. Phone numbers, e-mail addresses and texts are unique as far as possible."""
        for _ in range(30):
            value = self._value(attribute)
            if attribute.type in ("enum", "list", "number") or value.casefold() not in self._used:
                break
        self._used.add(value.casefold())
        return value

    def other(self, attribute: Attribute, *known: str) -> str:
        """A random value of the attribute that is not among `known`."""
        for _ in range(200):
            value = self.value(attribute)
            if value not in known:
                return value
        raise AssertionError(f"{attribute.label} has no value besides {known}")

    def _value(self, attribute: Attribute) -> str:
        random, values = self.random, attribute.values
        if attribute.type == "number":
            least, most = (int(end) for end in values.split("-"))
            return str(int(random.integers(least, most + 1)))
        if attribute.type == "money":
            span, code = values.split(" ")
            low, high = (int(end) for end in span.split("-"))
            step = 1 if high < 100 else 5 if high < 2000 else 50
            cents = pick(random, ("00", "00", "00", "50")) if high < 1000 else "00"
            return f"{code} {int(random.integers(low, high + 1)) // step * step or step}.{cents}"
        if attribute.type == "date":
            first, last = (int(year) for year in values.split("-"))
            days = (date(last, 12, 31) - date(first, 1, 1)).days
            return (date(first, 1, 1) + timedelta(days=int(random.integers(days + 1)))).isoformat()
        if attribute.type == "phone":
            return f"1{random.integers(201, 989)}55501{random.integers(0, 100):02d}"
        if attribute.type == "email":
            name = slug(fill("{first} {surname}", random)).replace("_", pick(random, (".", "_", "-")))
            return f"{name}@{slug(fill('{place}', random))}.{pick(random, ('example', 'test'))}"
        if attribute.type == "enum":
            return pick(random, values.split("/"))
        if attribute.type == "list":
            items = shuffled(random, values.split("/"))[: int(random.integers(2, 4))]
            return "; ".join(sorted(items, key=str.casefold))
        return fill(values, random)


def build(theme: Theme, recipe: WorldRecipe, random: np.random.Generator) -> Graph:
    """The graph of a world of `recipe.notes` notes, all reachable from `user.md` over links."""
    sampler = ValueSampler(random)
    title = sampler.names.new(theme.titles)
    graph = Graph(theme.name, {USER: Entity(USER, "user", title)})
    _facts(graph, graph.entities[USER], recipe, sampler)
    ring = max(2, round((recipe.notes - 1) * recipe.near))
    while len(graph.entities) < recipe.notes:
        _grow(graph, recipe, sampler, from_user=len(graph.entities) <= ring)
    _join(graph, recipe, sampler)
    _repeat(graph, recipe, sampler)
    return graph


def _grow(graph: Graph, recipe: WorldRecipe, sampler: ValueSampler, from_user: bool) -> None:
    """Add one note linked to an existing one. A single-target relation is used once per source."""
    places: list[tuple[Entity, Relation, bool]] = []
    taken = {(edge.source, edge.relation) for edge in graph.edges}
    for entity in graph.entities.values():
        if from_user and entity.path != USER:
            continue
        for relation in graph.theme.relations:
            if relation.source == entity.kind and (relation.many or (entity.path, relation.key) not in taken):
                places.append((entity, relation, True))
            elif relation.target == entity.kind and relation.source != "user":
                places.append((entity, relation, False))
    forward = [place for place in places if place[2]]
    # A link from the existing note reads better than one to it, so the latter is the exception.
    at, relation, ahead = pick(sampler.random, forward if forward and sampler.random.random() < 0.85 else places)
    kind = graph.theme.kind(relation.target if ahead else relation.source)
    name = None
    alike = [entity for entity in graph.entities.values() if entity.kind == kind.key]
    if alike and sampler.random.random() < recipe.namesakes:
        name = sampler.names.near(pick(sampler.random, alike).name, kind.names)
    name = name or sampler.names.new(kind.names)
    entity = Entity(f"entities/{kind.folder}/{slug(name)}.md", kind.key, name)
    graph.entities[entity.path] = entity
    _facts(graph, entity, recipe, sampler)
    if ahead:
        graph.edges.append(Edge(at.path, relation.key, entity.path, recipe.back_links))
    else:
        graph.edges.append(Edge(entity.path, relation.key, at.path, True))


def _facts(graph: Graph, entity: Entity, recipe: WorldRecipe, sampler: ValueSampler) -> None:
    least, most = recipe.facts
    count = int(sampler.random.integers(least, most + 1))
    # In the order of the theme, so that notes of a kind look alike.
    attributes = graph.theme.of(entity.kind)
    chosen = sorted(sampler.random.permutation(len(attributes))[:count])
    entity.facts = {attributes[i].key: sampler.value(attributes[i]) for i in chosen}


def _join(graph: Graph, recipe: WorldRecipe, sampler: ValueSampler) -> None:
    """Add relations between existing notes, about one for every second note."""
    notes = [entity for entity in graph.entities.values() if entity.path != USER]
    for entity in shuffled(sampler.random, notes)[: len(notes) // 2]:
        for relation in shuffled(sampler.random, graph.theme.relations):
            taken = graph.targets(entity.path, relation.key)
            known = {entity.path, *taken}
            free = [other.path for other in notes if other.kind == relation.target and other.path not in known]
            if relation.source == entity.kind and free and (relation.many or not taken):
                graph.edges.append(Edge(entity.path, relation.key, pick(sampler.random, free), recipe.back_links))
                break


def _repeat(graph: Graph, recipe: WorldRecipe, sampler: ValueSampler) -> None:
    """Let other notes state facts too: first with different values, then with the same values."""
    facts = [(entity, key) for entity in graph.entities.values() if entity.path != USER for key in entity.facts]
    facts = shuffled(sampler.random, facts)
    # Every note keeps at least one fact that only it states, so that there is something to ask for.
    for number in range(recipe.contradictions + recipe.confirmations):
        done = graph.contested()
        free = [
            (entity, key)
            for entity, key in facts
            if (entity.path, key) not in done
            and sum(path == entity.path for path, _ in done) < len(entity.facts) - 1
            # Free text is written exactly as in the theme, which a claim would not preserve.
            and graph.theme.attributes[key].type != "text"
        ]
        if not free:
            return
        entity, key = free[0]
        attribute = next(a for a in graph.theme.of(entity.kind) if a.key == key)
        value = entity.facts[key]
        if number < recipe.contradictions:
            value = sampler.other(attribute, value)
        near = {edge.source for edge in graph.edges if edge.target == entity.path}
        note = pick(sampler.random, sorted(near - {entity.path}) or [USER])
        graph.claims.append(Statement(note, entity.path, key, value_of(graph.theme, attribute.key, value)))
