"""Where a text holds what is hidden: values in all their spellings, categories by their looks, sentences; and blanking it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posttrain.environments.memory.facts import Fact
from posttrain.environments.memory.worlds.values import FINDABLE, find, links, number_words

HIDDEN = "[hidden]"
"""What stands where something is hidden."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Value:
    """A value that must not be said. `text` is canonical for the types that can be found, else as it was written."""

    kind: str
    text: str


def telling(value: Value) -> bool:
    """Whether a value is so particular that it means the same wherever it stands."""
    return value.kind in ("phone", "email", "date", "money") or (
        value.kind == "text" and (len(value.text) >= 12 or bool(re.search(r"\d", value.text)))
    )


def occurrences(value: Value, text: str) -> Iterable[Span]:
    """Where `text` holds the value, in any spelling that is known."""
    if value.kind in FINDABLE:
        for found in find(value.kind, text):
            if found.value == value.text:
                yield found.start, found.end
        if value.kind == "number":
            for match in re.finditer(r"[a-z]+", text, re.IGNORECASE):
                if value.text in number_words(match.group()):
                    yield match.span()
        elif value.kind in ("phone", "money"):
            yield from _digits(value, text)
        return
    yield from spelled(value.text, text)


def _digits(value: Value, text: str) -> Iterable[Span]:
    """The digits of a phone number or of an amount of at least three digits, however they are set apart."""
    amount = re.sub(r"\.00$", "", value.text.split(" ")[-1])
    digits = re.sub(r"\D", "", amount)
    if len(digits) >= 3:
        pattern = r"[\s,.()/+-]{0,3}".join(digits)
        yield from (match.span() for match in re.finditer(rf"(?<!\d){pattern}(?!\d)", text))


def spelled(words: str, text: str) -> Iterable[Span]:
    """Where `text` holds the words, in any case, with any signs and spaces between them, or none."""
    parts = re.findall(r"[^\W_]+", words)
    if parts and parts[-1].casefold() in text.casefold():
        pattern = r"[\W_]{0,4}".join(re.escape(part) for part in parts)
        yield from (match.span() for match in re.finditer(rf"(?<![^\W_]){pattern}(?![^\W_])", text, re.IGNORECASE))


def of_category(category: str, text: str) -> list[Span]:
    """Where `text` holds values of a category that can be told by their looks."""
    if category == "address":
        street = r"\b\d{1,4}[a-z]? (?:[A-Z][\w'-]+ ){1,3}(?:Street|Road|Lane|Avenue|Square|Way|Drive|Court|Place|Row|Quay|Hill|Terrace|Close|Walk|Alley)\b"
        return [match.span() for match in re.finditer(street, text)]
    return [(found.start, found.end) for found in find(category, text)]


def prose(text: str, facts: Sequence[Fact]) -> Iterable[Span]:
    """Sentences of a note outside headings, links and the facts that were read in it."""
    taken = sorted([(fact.start, fact.end) for fact in facts] + [(start, end) for start, end, _, _ in links(text)])
    for line in re.finditer(r"[^\n]+", text):
        stripped = line.group().lstrip()
        if stripped.startswith("#") or re.fullmatch(r"[\s|:-]+", line.group()):
            continue
        for match in re.finditer(r"\S.*?(?:[.!?](?=\s|$)|$)", line.group()):
            start, end = line.start() + match.start(), line.start() + match.end()
            for first, last in taken:
                if first < end and last > start:
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


def within(span: Span, spans: Sequence[Span]) -> bool:
    return any(start < span[1] and span[0] < end for start, end in spans)


def blanked(text: str, spans: Iterable[Span]) -> str:
    """`text` with each run of overlapping spans replaced by `[hidden]`."""
    merged: list[list[int]] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    for start, end in reversed(merged):
        text = f"{text[:start]}{HIDDEN}{text[end:]}"
    return text
