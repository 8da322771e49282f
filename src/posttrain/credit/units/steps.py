"""Labelled steps: `A. …`, `2) …`, `**C.** …`, `Step 4: …`."""

import re
from collections.abc import Sequence
from string import ascii_uppercase

Place = tuple[int, int]
"""Where a unit may begin in a text: the first and the last character at which to cut."""


def step_starts(text: str, pattern: str, ordinal: bool) -> list[Place]:
    """Where the steps of `text` begin: from the start of the label's line to the label.

    Every match of `pattern` (multi-line) is a candidate. With `ordinal`, labels (the pattern's group `label`) must
    count 1, 2, 3, … or A, B, …, Z, AA, …, from the first on: a candidate that is not the successor of the step before
    it is text inside that step. Where numbers and letters both count up, as in lettered steps with numbered parts,
    the longer count is the steps, of equal ones the one that begins first.

    The published code takes every line that `^(\\*?[A-Z]{1,2}\\.)\\s+` matches for a step, `OK. fine` among them, and
    accepts no numbers though its documentation says so; `ordinal` false with that pattern is that reading. It counts
    offsets in a text without its blank lines; here they are those of the text itself.
    """
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if ordinal:
        counts = [_counting(matches, letters) for letters in (True, False)]
        matches = max(counts, key=lambda count: (len(count), -count[0].start() if count else 0))
    return [(match.start(), _visible(text, match.start())) for match in matches]


def closing_start(text: str, pattern: str, after: int) -> list[Place]:
    """Where what follows the steps begins: the first match of `pattern` after the character `after`; or nothing."""
    found = re.compile(pattern, re.MULTILINE).search(text, after + 1)
    return [(found.start(), _visible(text, found.start()))] if found else []


def ordinal_of(label: str) -> int | None:
    """1 for `A` or `1`, 26 for `Z` or `26`, 27 for `AA`; None for what is neither letters nor a number."""
    if label.isascii() and label.isdigit():
        return int(label)
    number = 0
    for letter in label.upper():
        if letter not in ascii_uppercase:
            return None
        number = number * 26 + ascii_uppercase.index(letter) + 1
    return number or None


def _counting(matches: Sequence[re.Match[str]], letters: bool) -> list[re.Match[str]]:
    """The matches whose labels count up from 1, of letters or of numbers."""
    count: list[re.Match[str]] = []
    for match in matches:
        label = match["label"] or ""
        if label.isdigit() != letters and ordinal_of(label) == len(count) + 1:
            count.append(match)
    return count


def _visible(text: str, start: int) -> int:
    """The first character from `start` on that is not white space; `start` where there is none."""
    found = re.compile(r"\S").search(text, start)
    return found.start() if found else start
