"""Sentences and paragraphs. Places are as in `steps`."""

import re

_CLOSERS = "\"'”’»)]*_」』）"
_ENDS = (".", "!", "?", "…")
_FULL_WIDTH_ENDS = ("。", "！", "？")
_LABEL = re.compile(r"\W*(?:[A-Z]{1,2}|\d{1,3})[.)]\W*", re.ASCII)
_ABBREVIATIONS = frozenset(
    ("mr.", "mrs.", "ms.", "dr.", "prof.", "st.", "vs.", "e.g.", "i.e.", "cf.", "etc.", "fig.", "eq.", "approx.")
)
_FULL_WIDTH = re.compile(r"[。！？]+[”’」』）]*")


def sentence_starts(text: str) -> list[tuple[int, int]]:
    """Where the sentences of `text` begin, the first one aside.

    A sentence ends with its line, with `。`, `！` or `？`, and with a word that ends in `.`, `!`, `?` or `…` (quotes and
    brackets may follow) before a word that does not begin in lower case. A label at the start of a line (`A.`, `12)`)
    and common abbreviations end none. An initial (`J. Smith`) does: it looks like the end of `go to Step B. If`.
    """
    ends = [match.end() for match in _FULL_WIDTH.finditer(text)]
    places = [(end, end) for end in ends if end < len(text) and not text[end].isspace()]
    before, first_of_line = None, True
    for word in re.finditer(r"\S+", text):
        if before is not None:
            line = text.rfind("\n", before.end(), word.start())
            ended = line >= 0 or (not (first_of_line and _LABEL.fullmatch(before[0])) and _ends(before[0], word[0]))
            if ended:
                places.append((line + 1 if line >= 0 else before.end(), word.start()))
            first_of_line = line >= 0
        before = word
    return sorted(places)


def paragraph_starts(text: str) -> list[tuple[int, int]]:
    """Where the paragraphs of `text` begin, the first one aside: at the first line with something on it after a line
    with nothing but white space."""
    places, start, blank, begun = [], 0, False, False
    for line in text.split("\n"):
        shown = line.strip()
        if shown and blank and begun:
            places.append((start, start + len(line) - len(line.lstrip())))
        blank, begun = not shown, begun or bool(shown)
        start += len(line) + 1
    return places


def _ends(word: str, following: str) -> bool:
    bare = word.rstrip(_CLOSERS)
    if not bare.endswith(_ENDS) or following[0].islower():
        return bare.endswith(_FULL_WIDTH_ENDS)
    return bare.lstrip(_CLOSERS + "(").lower() not in _ABBREVIATIONS
