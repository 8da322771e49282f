"""Problems of rows, counted by category, with the first origins of each."""

from collections.abc import Iterable
from typing import Any

from posttrain.errors import InputError

BROKEN_FILE = "broken file"
"""The category of problems of a file, or of a part of a file, instead of a single row."""

SHOWN = 5
"""Maximum number of origins stored per category."""

_Entry = tuple[int, list[tuple[str, str]]]
"""Count, and the first origins with their details."""


class Problems:
    """Counts of rows that were skipped (`add`) or changed (`note`), by category.

    A category is a short text that is the same for all its rows. The detail describes one row.
    """

    def __init__(self) -> None:
        self.used = 0
        """Rows that were usable."""
        self._dropped: dict[str, _Entry] = {}
        self._noted: dict[str, _Entry] = {}

    @property
    def total(self) -> int:
        """Number of skipped rows and files."""
        return sum(count for count, _ in self._dropped.values())

    def add(self, category: str, origin: str, detail: str = "") -> None:
        """Count an unusable row; `origin` names its file and number."""
        _count(self._dropped, category, origin, detail)

    def add_text(self, text: str, origin: str) -> None:
        """Count a problem written as `category: detail`, or as a category alone."""
        category, _, detail = text.partition(": ")
        self.add(category, origin, detail)

    def note(self, category: str, origin: str) -> None:
        """Count a row that is used in a changed form, such as `cut to data.max_tokens`."""
        _count(self._noted, category, origin, "")

    def state(self) -> dict[str, Any]:
        """Return all counts as JSON values."""
        return {"used": self.used, "dropped": self._dropped, "noted": self._noted}

    def include(self, state: dict[str, Any]) -> None:
        """Add the counts of another object, whose `state` this is, also after a JSON round trip, after those of this one."""
        self.used += state["used"]
        for entries, others in ((self._dropped, state["dropped"]), (self._noted, state["noted"])):
            for category, (count, places) in others.items():
                earlier, known = entries.get(category, (0, []))
                listed = [*known, *((origin, detail) for origin, detail in places)]
                entries[category] = (earlier + count, listed[:SHOWN])

    def summary(self) -> list[str]:
        """Return a line per category, most frequent first, skipped rows before changed rows.

        Example: `3 rows dropped: empty answer (train.jsonl row 4, row 9 and 1 more)`. The detail of the first row
        follows if it has one.
        """
        lines = []
        for category, (count, places) in _by_count(self._dropped):
            noun = "file" if category == BROKEN_FILE else "row"
            detail = f"; first: {places[0][1]}" if places[0][1] else ""
            lines.append(f"{_number(count, noun)} dropped: {category} ({_places(count, places)}{detail})")
        for category, (count, places) in _by_count(self._noted):
            lines.append(f"{_number(count, 'row')} {category} ({_places(count, places)})")
        return lines

    def raise_if(self, strict: bool) -> None:
        """InputError with the first problem if `strict` and there is one."""
        if not strict or not self._dropped:
            return
        category, (_, places) = next(iter(self._dropped.items()))
        origin, detail = places[0]
        problem = f"{category}: {detail}" if detail else category
        others = f"; {_number(self.total - 1, 'more problem')}" if self.total > 1 else ""
        raise InputError(f"{origin}: {problem}{others}; correct the data, or skip such rows with `strict: false`")

    def require_any(self, what: str) -> None:
        """Raise InputError that `what` (names of files) has no usable row. Call it if no row was returned."""
        if not self._dropped:
            raise InputError(f"{what}: no rows; name a file that has rows")
        category, (count, places) = next(iter(_by_count(self._dropped)))
        detail = f": {places[0][1]}" if places[0][1] else ""
        remedy = "correct the data, or set its column names in `columns`"
        if category.startswith("broken UTF-8"):
            remedy = "save the file as UTF-8"
        elif category.startswith("broken"):
            remedy = "correct the data"
        if category == BROKEN_FILE:
            remedy = "replace the file, or remove it from the recipe"
        if category.endswith("data.max_tokens"):
            remedy = "raise data.max_tokens"
        raise InputError(
            f"{what}: no usable row; {_number(self.total, 'problem')}, most often {category} "
            f"({_places(count, places)}){detail}; {remedy}"
        )


def _count(entries: dict[str, _Entry], category: str, origin: str, detail: str) -> None:
    count, places = entries.get(category, (0, []))
    if count < SHOWN:
        # On one line, with code points escaped that terminals cannot print.
        shown = [" ".join(text.encode("utf-8", "backslashreplace").decode().split()) for text in (origin, detail)]
        places.append((shown[0], shown[1]))
    entries[category] = (count + 1, places)


def _by_count(entries: dict[str, _Entry]) -> Iterable[tuple[str, _Entry]]:
    return sorted(entries.items(), key=lambda item: -item[1][0])


def _places(count: int, places: list[tuple[str, str]]) -> str:
    """Return the origins with each file named once, and the number of further ones."""
    shown, previous = [], None
    for origin, _ in places:
        name, separator, row = origin.rpartition(" row ")
        shown.append(f"row {row}" if separator and name == previous else origin)
        previous = name
    more = f" and {count - len(places):,} more" if count > len(places) else ""
    return ", ".join(shown) + more


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
