"""Renders a graph as a vault of Markdown notes. `truth.parse` recovers the statements without the graph."""

from dataclasses import dataclass

import numpy as np

from posttrain.seeds import random_stream
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.graph import Entity, Graph, build
from posttrain_memory.worlds.naming import fill
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.theme import Attribute, Theme, themes
from posttrain_memory.worlds.values import pick, shuffled, spell


@dataclass
class World:
    """A world: its seed, graph, and vault (path -> text)."""

    seed: int
    graph: Graph
    files: dict[str, str]


def make_world(seed: int, recipe: WorldRecipe) -> World:
    """The world of a seed. It is a function of the seed and the recipe, except the numbers of tasks."""
    random = random_stream("memory world", seed)
    theme = themes()[pick(random, recipe.themes or sorted(themes()))]
    graph = build(theme, recipe, random)
    words = random_stream("memory world", seed, "words")
    return World(seed, graph, {path: note(graph, entity, recipe, words) for path, entity in graph.entities.items()})


def note(graph: Graph, entity: Entity, recipe: WorldRecipe, random: np.random.Generator) -> str:
    """The text of one note: title, introduction, facts, relations, claims about other notes, and filler sentences."""
    theme = graph.theme
    style = pick(random, recipe.styles or theme.styles)
    facts = fact_lines(theme, entity, style, random)
    relations = _relation_lines(graph, entity, style, random)
    rest = []
    for claim in graph.claims:
        if claim.note == entity.path:
            other = graph.entities[claim.about]
            attribute = next(a for a in theme.of(other.kind) if a.key == claim.key)
            rest.append(f"- {attribute.label} of {link(other)}: {spelling(attribute, claim.value, random)}")
    blocks: list[list[str]] = []
    if style == "front":
        blocks.append(["---", *facts, "---"])
    blocks.append([f"# {entity.name}"])
    if not recipe.bare:
        intro = theme.intro if entity.path == USER else theme.kind(entity.kind).intro
        blocks.append([pick(random, intro).replace("{name}", entity.name)])
    headings = [
        [f"## {pick(random, texts)}"] if not recipe.bare else []
        for texts in (theme.headings.facts, theme.headings.relations, theme.headings.other)
    ]
    if style != "front":
        blocks += [[*headings[0]], facts]
    if relations:
        blocks += [[*headings[1]], relations]
    idle = _filler(theme, recipe, random)
    if rest or idle:
        blocks += [[*headings[2]], rest, *idle]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def fact_lines(theme: Theme, entity: Entity, style: str, random: np.random.Generator) -> list[str]:
    """The lines that state the facts of a note in a style; in prose, one paragraph."""
    stated = []
    for attribute in theme.of(entity.kind):
        if attribute.key in entity.facts:
            stated.append((attribute, spelling(attribute, entity.facts[attribute.key], random)))
    if style == "prose":
        sentences = [a.sentence.replace("{name}", entity.name).replace("{value}", text) for a, text in stated]
        return [" ".join(sentences)] if sentences else []
    lines = [_line(style, a.label, text) for a, text in stated]
    return ["| what | value |", "| --- | --- |", *lines] if style == "table" and lines else lines


def spelling(attribute: Attribute, value: str, random: np.random.Generator) -> str:
    """A value of an attribute as written in a note."""
    return spell(attribute.type, value, random, attribute.unit)


def link(entity: Entity) -> str:
    """The wikilink to a note: its path and its name."""
    return f"[[{entity.path}|{entity.name}]]"


def _line(style: str, label: str, text: str) -> str:
    return {
        "bullets": f"- {label}: {text}",
        "bold": f"- **{label}**: {text}",
        "plain": f"{label}: {text}  ",
        "front": f"{label}: {text}",
        "table": f"| {label} | {text} |",
    }[style]


def _relation_lines(graph: Graph, entity: Entity, style: str, random: np.random.Generator) -> list[str]:
    """One line for each relation of a note and each inverse, with links to all its targets."""
    theme, named = graph.theme, graph.entities
    # No tables, because the `|` of a link would end the cell.
    linked = style if style in ("bullets", "bold", "plain") else "bullets"
    lines = []
    for relation in theme.relations:
        forward = [link(named[path]) for path in graph.targets(entity.path, relation.key)]
        back = [
            link(named[edge.source])
            for edge in graph.edges
            if edge.target == entity.path and edge.relation == relation.key and edge.back
        ]
        if forward and style == "prose":
            text = relation.sentence.replace("{name}", entity.name)
            lines.append(text.replace("{value}", ", ".join(forward)))
        elif forward:
            lines.append(_line(linked, relation.plural if forward[1:] else relation.label, ", ".join(forward)))
        if back:
            lines.append(_line(linked, relation.inverse_plural if back[1:] else relation.inverse, ", ".join(back)))
    return lines


def _filler(theme: Theme, recipe: WorldRecipe, random: np.random.Generator) -> list[list[str]]:
    """Paragraphs of sentences that state no fact."""
    count = int(random.integers(recipe.filler[0], recipe.filler[1] + 1))
    sentences: list[str] = []
    while len(sentences) < count:
        drawn = [fill(text, random) for text in shuffled(random, theme.filler)]
        sentences += drawn[: count - len(sentences)]
    paragraphs = []
    while sentences:
        size = int(random.integers(1, 5))
        paragraphs.append([" ".join(sentences[:size])])
        sentences = sentences[size:]
    return paragraphs
