"""Names that are unique within a world and do not contain each other, and values from patterns."""

import re
from pathlib import Path

import numpy as np
import yaml

from posttrain_memory.worlds.values import mentions, pick, plain

_WORDS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
_FIRST = _WORDS["first"]
_PARTS = {"surname": ("front", "middle", "surname_end"), "place": ("front", "middle", "place_end")}
"""Slot of a pattern -> the parts of an invented word; other slots are words as they are."""
_SLOT = re.compile(r"\{(\w+)\}|\[([^\[\]]*)\]|(#)|(@)")


def fill(pattern: str, random: np.random.Generator) -> str:
    """A random text from a pattern: `{first}`, `{surname}`, `{person}` and `{place}` are invented names, `[a/b]` is a
    choice, `#` is a digit and `@` a capital letter.
    """

    def value(match: re.Match[str]) -> str:
        slot, choices, digit, letter = match.groups()
        if choices is not None:
            return pick(random, choices.split("/"))
        if digit:
            return str(int(random.integers(1, 10)))
        if letter:
            return pick(random, "ABCDEFGHJKLMNPRSTUVWXYZ")
        return _invented(slot, random)

    return _SLOT.sub(value, pattern)


def _invented(slot: str, random: np.random.Generator) -> str:
    if slot == "person":
        return f"{_invented('first', random)} {_invented('surname', random)}"
    return "".join(pick(random, _WORDS[part]) for part in _PARTS.get(slot, (slot,)))


def slug(name: str) -> str:
    """The file name of a note without its suffix: lower case, words joined by `_`, ASCII letters and digits only."""
    return "_".join(re.findall(r"[a-z0-9]+", name.casefold()))


def matcher(pattern: str) -> re.Pattern[str] | None:
    """A regular expression for texts of a pattern. None if it contains names, which may be any words."""
    if re.search(r"\{\w+\}", pattern):
        return None
    text, last = "", 0
    for match in _SLOT.finditer(pattern):
        text += re.escape(pattern[last : match.start()])
        choices = "|".join(map(re.escape, (match[2] or "").split("/")))
        text += r"\d" if match[3] else "[a-z]" if match[4] else f"(?:{choices})"
        last = match.end()
    return re.compile(rf"(?<!\w){text + re.escape(pattern[last:])}(?!\w)", re.IGNORECASE)


class Namer:
    """Draws the names of one world. No name equals another, contains another as words, or has the same file name."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._plain: list[str] = []
        self._slugs: set[str] = {"user"}

    def new(self, patterns: tuple[str, ...]) -> str:
        """A new name from one of the patterns. A surname is added once the patterns are exhausted."""
        for attempt in range(400):
            name = fill(pick(self._random, patterns), self._random)
            if attempt > 60:
                name = f"{name} {_invented('surname', self._random)}"
            if self.reserve(name):
                return name
        raise AssertionError(f"no free name for {patterns}")

    def near(self, name: str, patterns: tuple[str, ...]) -> str | None:
        """A name similar to `name` with the literal words of the patterns, such as `Clinic`; None if there is none."""
        words = name.split()
        fixed = set(re.findall(r"[A-Za-z]+", _SLOT.sub(lambda match: match.group(2) or "", " ".join(patterns))))
        for _ in range(40):
            place = int(self._random.integers(len(words)))
            if len(words[place]) < 4 or not words[place][0].isupper() or words[place] in fixed:
                continue
            word = words[place]
            if place == 0 and word in _FIRST:
                same = [first for first in _FIRST if first[0] == word[0] and first != word]
                word = pick(self._random, same or _FIRST)
            else:
                stem = word[:-1] if word[-1] in "esy" else word
                word = stem + pick(self._random, ("s", "e", "er", "ton", "son", "by", "ley"))
            other = [*words[:place], word, *words[place + 1 :]]
            if self.reserve(" ".join(other)):
                return " ".join(other)
        return None

    def reserve(self, name: str) -> bool:
        """Reserve `name`. Returns False if it is not available."""
        words = plain(name)
        if not words or slug(name) in self._slugs:
            return False
        if any(mentions(words, other) or mentions(other, words) for other in self._plain):
            return False
        self._plain.append(words)
        self._slugs.add(slug(name))
        return True
