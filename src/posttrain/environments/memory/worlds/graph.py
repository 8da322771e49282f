"""The typed graph of a world: notes with facts, relations between them, and what notes say about other notes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from posttrain.environments.memory.worlds.themes import THEMES, Theme
from posttrain.environments.memory.worlds.values import canonical

USER = "user.md"


class Statement(NamedTuple):
    """What one place of a vault says: in the note `note`, of the note `about`, the `value` of `key`.

    Values are canonical. Of a relation, `key` is its key (with `~` behind where it is read backwards) and `value` the
    path of the other note. A value that is none of its type is kept with a `?` in front.
    """

    note: str
    about: str
    key: str
    value: str


@dataclass
class Entity:
    """A note: its path, its kind (`user` for `user.md`), its title, and key -> value as spelt in the declaration."""

    path: str
    kind: str
    name: str
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Edge:
    """`source` names `target` under a relation; `back`: the target names the source, too."""

    source: str
    relation: str
    target: str
    back: bool = True


@dataclass
class Graph:
    """The truth of a world. The note `user.md` is always there; claims are facts of one note that stand in another."""

    theme_name: str
    entities: dict[str, Entity]
    edges: list[Edge] = field(default_factory=list)
    claims: list[Statement] = field(default_factory=list)

    @property
    def theme(self) -> Theme:
        return THEMES[self.theme_name]

    @property
    def title(self) -> str:
        return self.entities[USER].name

    def statements(self) -> frozenset[Statement]:
        """Everything that the vault has to say, once each."""
        said = {
            Statement(path, path, key, value_of(self.theme, key, value))
            for path, entity in self.entities.items()
            for key, value in entity.facts.items()
        }
        for edge in self.edges:
            said.add(Statement(edge.source, edge.source, edge.relation, edge.target))
            if edge.back:
                said.add(Statement(edge.target, edge.target, f"{edge.relation}~", edge.source))
        return frozenset(said | set(self.claims))

    def targets(self, source: str, relation: str) -> list[str]:
        """Paths of the notes that `source` names under the relation."""
        return [edge.target for edge in self.edges if edge.source == source and edge.relation == relation]

    def contested(self) -> set[tuple[str, str]]:
        """Path and key of what more than one note states, alike or not."""
        return {(claim.about, claim.key) for claim in self.claims}

    def distances(self) -> dict[str, int]:
        """Path -> fewest links from `user.md`, of all notes that can be reached."""
        out: dict[str, set[str]] = {path: set() for path in self.entities}
        for edge in self.edges:
            out[edge.source].add(edge.target)
            if edge.back:
                out[edge.target].add(edge.source)
        for claim in self.claims:
            out[claim.note].add(claim.about)
        return distances(out, USER)


def distances(out: dict[str, set[str]], start: str) -> dict[str, int]:
    """Node -> fewest steps from `start`, of all nodes that can be reached; `out` are the nodes after each node."""
    found, front = {start: 0}, [start]
    while front:
        ahead = []
        for node in front:
            for other in sorted(out.get(node, ())):
                if other not in found:
                    found[other] = found[node] + 1
                    ahead.append(other)
        front = ahead
    return found


def value_of(theme: Theme, key: str, text: str) -> str:
    """The canonical value of a fact as it is written, or the text with a `?` in front where it is no such value."""
    value = canonical(theme.attributes[key].type, text)
    return f"?{text.strip()}" if value is None else value
