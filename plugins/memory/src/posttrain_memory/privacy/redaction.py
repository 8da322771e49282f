"""Finds hidden values in text, in all their spellings, and replaces them."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from posttrain_memory.privacy.facts import Fact
from posttrain_memory.privacy.readings import fold, readings
from posttrain_memory.worlds.values import FINDABLE, find, links, number_words

HIDDEN = "[hidden]"
"""The replacement for hidden text."""

Span = tuple[int, int]

_WORD = re.compile(r"[^\W_]+")
_RUN = re.compile(r"\d(?:[\W_]{0,12}\d)*")
_SCALED = re.compile(r"(\d[\d.,]*)\s?(k|m|mio|mn|thousand|million)\b", re.IGNORECASE)
_SCALES = {"k": 3, "thousand": 3, "m": 6, "mio": 6, "mn": 6, "million": 6}
_ONES = re.findall(
    r"\S+", "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_ONES += ["seventeen", "eighteen", "nineteen"]
_TENS = dict(
    zip(re.findall(r"\S+", "twenty thirty forty fifty sixty seventy eighty ninety"), range(20, 100, 10), strict=True)
)
NUMERALS = frozenset([*_ONES, *_TENS, "oh", "hundred", "thousand", "million"])
"""English number words."""
_TAIL = 7
_GLUED = 6
"""Values with at least this many letters are also found inside a word."""


@dataclass(frozen=True)
class Value:
    """A value that must not be said. `text` is canonical for types that can be recognized, otherwise as written.
    `kind` is such a type, `text`, `word` (a significant word of a text) or `digits` (the digits of an amount in a
    text).
    """

    kind: str
    text: str


def is_specific(value: Value) -> bool:
    """Whether a value is so specific that it means the same wherever it occurs."""
    return value.kind in ("phone", "email", "date", "money", "digits") or (
        value.kind == "text" and (len(value.text) >= 12 or bool(re.search(r"\d", value.text)))
    )


class Index:
    """Finds many values in a text in one pass, in all their known spellings."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._words: dict[tuple[str, ...], list[Value]] = {}
        self._lengths: dict[str, set[int]] = {}
        """First word -> the numbers of words of the values that begin with it."""
        self._typed: dict[tuple[str, str], Value] = {}
        self._digits: dict[str, list[Value]] = {}
        self._tails: dict[str, list[Value]] = {}
        self._squeezed: dict[str, Value] = {}
        self.values = list(dict.fromkeys(values))
        for value in self.values:
            self._add(value)
        self._kinds = {kind for kind, _ in self._typed}

    def _add(self, value: Value) -> None:
        if value.kind in FINDABLE:
            self._typed[value.kind, value.text] = value
        if value.kind in ("phone", "money", "number", "digits"):
            digits = re.sub(r"\D", "", re.sub(r"\.00?$", "", value.text.split(" ")[-1]))
            if len(digits) >= 3:
                self._digits.setdefault(digits, []).append(value)
            if value.kind == "phone" and len(digits) >= _TAIL:
                self._tails.setdefault(digits[-_TAIL:], []).append(value)
        elif value.kind not in FINDABLE:
            spellings = {value.text.casefold(), fold(value.text.casefold())}
            for parts in filter(None, (tuple(_WORD.findall(spelling)) for spelling in spellings)):
                self._words.setdefault(parts, []).append(value)
                self._lengths.setdefault(parts[0], set()).add(len(parts))
                if len("".join(parts)) >= 5:
                    self._squeezed.setdefault("".join(parts), value)

    def find(self, text: str) -> Iterator[tuple[int, int, Value]]:
        """Start, end and value of each occurrence, unordered. Time is linear in the text and independent of the
        number of values.
        """
        if self._words:
            yield from self._spelled(text)
        for kind in self._kinds:
            for item in find(kind, text):
                if (kind, item.value) in self._typed:
                    yield item.start, item.end, self._typed[kind, item.value]
        if "number" in self._kinds:
            for match in re.finditer(r"[a-z]+", text, re.IGNORECASE):
                for number in number_words(match.group()):
                    if ("number", number) in self._typed:
                        yield match.start(), match.end(), self._typed["number", number]
        if self._digits or self._tails:
            yield from self._numerals(text)

    def find_disguised(self, text: str) -> Iterator[tuple[int, int, Value]]:
        """`find` in all readings of a text."""
        for reading in readings(text):
            yield from ((*reading.span(start, end), value) for start, end, value in self.find(reading.text))

    def squeezed(self, text: str) -> Iterator[Span]:
        """Spans of a short text that contain a value with separators between its letters (`l u-p u s`), in all
        readings. Time is linear in the number of values.
        """
        for reading in readings(text):
            yield from (reading.span(*span) for span in self._squeezed_in(reading.text))

    def _squeezed_in(self, text: str) -> Iterator[Span]:
        places = [match.start() for match in re.finditer(r"[^\W_]", text)]
        squeezed = "".join(text[place].casefold()[:1] for place in places)
        for wanted in self._squeezed:
            at = squeezed.find(wanted)
            while at >= 0:
                first, last = places[at], places[at + len(wanted) - 1] + 1
                before, after = text[first - 1 : first], text[last : last + 1]
                glued = last - first == len(wanted) >= _GLUED and self._squeezed[wanted].kind == "text"
                if glued or (not before.isalnum() and not (after.isalnum() and after != "s")):
                    yield first, last
                at = squeezed.find(wanted, at + 1)

    def _spelled(self, text: str) -> Iterator[tuple[int, int, Value]]:
        words = [(match.group().casefold(), match.start(), match.end()) for match in _WORD.finditer(text)]
        for i, (word, start, end) in enumerate(words):
            if word.endswith("s") and 1 in self._lengths.get(word[:-1], ()):
                yield from ((start, end, value) for value in self._words[(word[:-1],)])
            for length in self._lengths.get(word, ()):
                run = words[i : i + length]
                if len(run) < length or any(after[1] - before[2] > 4 for before, after in pairwise(run)):
                    continue
                parts = tuple(one for one, _, _ in run)
                matches = self._words.get(parts, [])
                if length > 1 and parts[-1].endswith("s"):
                    matches = [*matches, *self._words.get((*parts[:-1], parts[-1][:-1]), [])]
                yield from ((start, run[-1][2], value) for value in matches)

    def _numerals(self, text: str) -> Iterator[tuple[int, int, Value]]:
        for run in _RUN.finditer(text):
            groups = [
                (m.group(), run.start() + m.start(), run.start() + m.end()) for m in re.finditer(r"\d+", run.group())
            ]
            for i in range(len(groups)):
                digits = ""
                for group, _, end in groups[i:]:
                    digits += group
                    if len(digits) > 20:
                        break
                    yield from ((groups[i][1], end, value) for value in self._meant(digits))
        for match in _SCALED.finditer(text):
            whole, _, part = match[1].replace(",", ".").rstrip(".").rpartition(".")
            whole, part = (whole, part) if whole else (part, "")
            digits = (whole + part.ljust(_SCALES[match[2].casefold()], "0")).replace(".", "").lstrip("0")
            yield from ((match.start(), match.end(), value) for value in self._meant(digits))
        for start, end, digits in numerals(text):
            yield from ((start, end, value) for value in self._meant(digits))

    def _meant(self, digits: str) -> Iterator[Value]:
        yield from self._digits.get(digits, ())
        if len(digits) >= _TAIL:
            yield from self._tails.get(digits[-_TAIL:], ())


def numerals(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and digits of numbers in words: `one hundred twenty thousand`, or digit by digit, `four one seven`."""
    run: list[re.Match[str]] = []
    for match in [*re.finditer(r"[a-z]+", text, re.IGNORECASE), None]:
        if match and match.group().casefold() == "and" and run:
            continue
        if match and match.group().casefold() in NUMERALS and (not run or match.start() - run[-1].end() <= 6):
            run.append(match)
            continue
        if run:
            words = [one.group().casefold() for one in run]
            yield run[0].start(), run[-1].end(), _spelled_number(words)
        run = [match] if match and match.group().casefold() in NUMERALS else []


def _spelled_number(words: Sequence[str]) -> str:
    if len(words) > 1 and all(word == "oh" or (word in _ONES and _ONES.index(word) < 10) for word in words):
        return "".join("0" if word == "oh" else str(_ONES.index(word)) for word in words)
    total = part = 0
    for word in words:
        if word in ("thousand", "million"):
            total, part = total + (part or 1) * (1_000 if word == "thousand" else 1_000_000), 0
        elif word == "hundred":
            part = (part or 1) * 100
        else:
            part += _TENS.get(word, 0) or (_ONES.index(word) if word in _ONES else 0)
    return str(total + part)


def normalized(text: str) -> str:
    """`text` without zero-width characters, and with full-width letters, digits and signs replaced by ordinary ones."""
    if text.isascii():
        return text
    characters = []
    for sign in text:
        if unicodedata.category(sign) == "Cf" or sign in "\u034f\u115f\u1160\u3164\ufe0f":
            continue
        plain = unicodedata.normalize("NFKC", sign) if not sign.isascii() else sign
        characters.append(plain if plain.isascii() and sign != "…" else sign)
    return "".join(characters)


def prose(text: str, facts: Sequence[Fact]) -> Iterable[Span]:
    """Sentences of a note outside of headings, links and recognized facts."""
    taken = sorted([(fact.start, fact.end) for fact in facts] + [(start, end) for start, end, _, _ in links(text)])
    at = 0
    for line in re.finditer(r"[^\n]+", text):
        stripped = line.group().lstrip()
        if stripped.startswith("#") or re.fullmatch(r"[\s|:-]+", line.group()):
            continue
        while at < len(taken) and taken[at][1] <= line.start():
            at += 1
        for match in re.finditer(r"\S.*?(?:[.!?](?=\s|$)|$)", line.group()):
            start, end = line.start() + match.start(), line.start() + match.end()
            for first, last in taken[at:]:
                if first >= end:
                    break
                if last > start:
                    if first > start:
                        yield start, first
                    start = max(start, last)
            if end > start and re.search(r"\w", text[start:end]):
                yield start, end


def sentence_at(text: str, span: Span) -> Span:
    """The sentence or line around `span`."""
    before = max(text.rfind("\n", 0, span[0]), *(text.rfind(f"{sign} ", 0, span[0]) + 1 for sign in ".!?"))
    ends = [
        place for place in (text.find("\n", span[1]), *(text.find(f"{sign} ", span[1]) for sign in ".!?")) if place >= 0
    ]
    return max(before + 1, 0), min(ends, default=len(text))


def within(span: Span, spans: Iterable[Span]) -> bool:
    """Whether a span overlaps any of the others."""
    return any(start < span[1] and span[0] < end for start, end in spans)


def redacted(text: str, spans: Iterable[Span]) -> str:
    """`text` with each run of overlapping spans replaced by `[hidden]`."""
    pieces, at = [], 0
    merged: list[list[int]] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    for start, end in merged:
        pieces += [text[at:start], HIDDEN]
        at = end
    return "".join([*pieces, text[at:]])
