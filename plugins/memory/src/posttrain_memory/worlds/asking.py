"""Shared parts of the task makers: what can be asked, how questions are worded, how notes are reached."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml

from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.graph import Entity, Graph, value_of
from posttrain_memory.worlds.render import World
from posttrain_memory.worlds.replies import Answer
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import Attribute, Theme
from posttrain_memory.worlds.truth import Parsed, parse
from posttrain_memory.worlds.values import pick, plain, shuffled

PHRASES: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text(encoding="utf-8"))
"""How tasks are worded."""
Item = TypeVar("Item")


@dataclass
class TaskContext:
    """A world and the random generator of one task."""

    world: World
    random: np.random.Generator

    @property
    def graph(self) -> Graph:
        return self.world.graph

    @property
    def theme(self) -> Theme:
        return self.world.graph.theme

    @cached_property
    def parsed(self) -> Parsed:
        return parse(self.world.files, self.theme.name)

    @cached_property
    def distance(self) -> dict[str, int]:
        """Path -> minimum number of links from `user.md`."""
        return self.graph.distances()

    @cached_property
    def contested(self) -> set[tuple[str, str]]:
        return self.graph.contested()

    def pick(self, items: Sequence[Item]) -> Item:
        return pick(self.random, items)

    def entities(self, *distances: int) -> list[Entity]:
        """The notes at these distances from `user.md` (default: all but `user.md`), in random order."""
        matching = [
            e for p, e in self.graph.entities.items() if (self.distance[p] in distances if distances else p != USER)
        ]
        return shuffled(self.random, matching)

    def facts(self, entity: Entity) -> list[Attribute]:
        """The facts of a note that no other note states, in random order."""
        known = [a for a in self.theme.of(entity.kind) if a.key in entity.facts]
        return shuffled(self.random, [a for a in known if (entity.path, a.key) not in self.contested])

    def absent(self, entity: Entity) -> list[Attribute]:
        """The facts that notes of its kind may have but this one lacks, in random order."""
        return shuffled(self.random, [a for a in self.theme.of(entity.kind) if a.key not in entity.facts])

    def phrase(self, form: str, **values: str) -> str:
        """One of the phrases of a form, filled in."""
        return self.pick(PHRASES[form]).format(**values)

    def anchored(self, question: str) -> str:
        """The question with the title of the world, which makes it unique to this world."""
        return self.phrase("anchor", title=self.graph.title, q=question)

    def ask(self, what: str, many: bool = False) -> str:
        """A request for `what`, a noun phrase."""
        return self.phrase("ask_many" if many else "ask", x=what)

    def ask_for(self, attribute: Attribute, whom: str) -> str:
        """A request for a fact of `whom`, see `of`."""
        return self.ask(self.of(attribute.noun, whom), attribute.be == "are")

    def of(self, noun: str, whom: str) -> str:
        """`noun` of `whom` (a name or a phrase); `my noun` if `whom` is empty."""
        if not whom:
            return f"my {noun}"
        if whom.startswith(("my ", "the ")) or self.random.random() < 0.6:
            return f"the {noun} of {whom}"
        return f"{whom}'s {noun}"

    def who(self, entity: Entity) -> tuple[str, bool]:
        """A phrase that refers only to this note, and whether the question must name the world to be unambiguous.

        If single-target relations lead to the note, half of the time the phrase uses one of them, or a chain of two
        from `user.md`.
        """
        if entity.path == USER:
            return "", True
        if self.random.random() >= 0.5:
            return entity.name, False
        phrases: list[tuple[str, bool]] = []
        for edge in self.graph.edges:
            relation = self.theme.relation(edge.relation)
            if edge.target != entity.path or relation.many or self.distance[edge.source] >= self.distance[entity.path]:
                continue
            if edge.source == USER:
                phrases.append((f"my {relation.label}", True))
            else:
                source = self.graph.entities[edge.source]
                mine = [e for e in self.graph.edges if e.source == USER and e.target == source.path]
                single = [r for r in (self.theme.relation(e.relation) for e in mine) if not r.many]
                if single and self.random.random() < 0.5:
                    phrases.append((f"the {relation.label} of my {single[0].label}", True))
                else:
                    phrases.append((f"the {relation.label} of {source.name}", False))
        return shuffled(self.random, phrases)[0] if phrases else (entity.name, False)

    def question(self, attribute: Attribute, entity: Entity) -> str:
        """A question about one fact of a note."""
        whom, anchor = self.who(entity)
        text = self.ask_for(attribute, whom)
        return self.anchored(text) if anchor else text

    def task(
        self,
        kind: str,
        variant: str,
        question: str,
        hops: int,
        truth: Mapping[str, object],
        solution: Sequence[str],
        anchor: bool = False,
    ) -> MemoryTask:
        """A task of this world. With `anchor`, the question names the world."""
        question = self.anchored(question) if anchor else question
        return MemoryTask(kind, variant, self.theme.name, question, hops, dict(truth), list(solution))

    def answer(self, attribute: Attribute, entity: Entity) -> Answer:
        value = value_of(self.theme, attribute.key, entity.facts[attribute.key])
        return Answer(attribute.type, value, attribute.key)

    def sentence(self, attribute: Attribute, entity: Entity) -> str:
        """The reply that states a fact of a note."""
        shown = display(attribute, entity.facts[attribute.key])
        subject = f"Your {attribute.noun}" if entity.path == USER else f"The {attribute.noun} of {entity.name}"
        return f"{subject} {attribute.be} {shown}."

    def route(self, path: str) -> list[str]:
        """At most three code blocks that read `user.md`, the notes along the way, and the note."""
        if path == USER:
            return ['user = read_file("user.md")']
        if self.distance[path] == 1:
            return ['user = read_file("user.md")', f"note = read_file({code_literal(path)})"]
        if self.distance[path] == 2:
            middle = next(p for p in sorted(self.parsed.out[USER]) if path in self.parsed.out[p])
            reads = [f"first = read_file({code_literal(middle)})", f"note = read_file({code_literal(path)})"]
            return ['user = read_file("user.md")', *reads]
        name = self.graph.entities[path].name
        search = f"hits = search_files({code_literal(name)})"
        return ['user = read_file("user.md")', search, f"note = read_file({code_literal(path)})"]

    def hops(self, path: str) -> int:
        return min(2, self.distance[path])


def name_answer(entity: Entity) -> Answer:
    """An answer that is the name of a note."""
    return Answer("name", plain(entity.name), "name")


def code_literal(text: str) -> str:
    """A text as a Python string literal."""
    return json.dumps(text, ensure_ascii=False)


def display(attribute: Attribute, value: str) -> str:
    """A value as shown to the user."""
    if attribute.type == "number":
        return f"{value} {attribute.unit}".strip()
    if attribute.type == "money":
        code, amount = value.split(" ")
        return f"{Decimal(amount.removesuffix('.00')):,} {code}"
    if attribute.type == "phone":
        return f"+{value[0]} {value[1:4]} {value[4:7]} {value[7:]}"
    if attribute.type == "list":
        *front, last = value.split("; ")
        return f"{', '.join(front)} and {last}" if front else last
    return value


def joined(names: Sequence[str]) -> str:
    """Names in one phrase."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
