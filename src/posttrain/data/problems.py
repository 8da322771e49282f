"""What was wrong with rows: counted by kind, with the places where it was found first."""

from collections.abc import Iterable
from typing import Any

from posttrain.errors import InputError

BROKEN_FILE = "broken file"
"""The category of a problem that concerns a file, or a part of one, and not a single row."""

SHOWN = 5
"""Places kept of each kind of problem."""

_Entry = tuple[int, list[tuple[str, str]]]
"""How often, and the first places with what was found there."""


class Problems:
    """Counts of rows that were left out (`add`) or used in another form (`note`), by category.

    A category is a short text that stays the same from row to row; the detail says what is wrong with this one.
    """

    def __init__(self) -> None:
        self.used = 0
        """Rows that the readers took for usable."""
        self._dropped: dict[str, _Entry] = {}
        self._noted: dict[str, _Entry] = {}

    @property
    def total(self) -> int:
        """Problems that cost a row or a file."""
        return sum(count for count, _ in self._dropped.values())

    def add(self, category: str, origin: str, detail: str = "") -> None:
        """Count a row that cannot be used; `origin` names its file and number."""
        _count(self._dropped, category, origin, detail)

    def add_text(self, text: str, origin: str) -> None:
        """Count a problem written as `category: detail`, or as a category alone."""
        category, _, detail = text.partition(": ")
        self.add(category, origin, detail)

    def note(self, category: str, origin: str) -> None:
        """Count a row that is used, but not as it stands: `cut to data.max_tokens`."""
        _count(self._noted, category, origin, "")

    def include(self, other: "Problems") -> None:
        """Add what `other` counted, after what was counted here."""
        self.used += other.used
        for mine, theirs in ((self._dropped, other._dropped), (self._noted, other._noted)):
            for category, (count, places) in theirs.items():
                before, known = mine.get(category, (0, []))
                mine[category] = (before + count, [*known, *places][:SHOWN])

    def state(self) -> dict[str, Any]:
        """Everything counted, as JSON values."""
        return {"used": self.used, "dropped": self._dropped, "noted": self._noted}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Problems":
        """The inverse of `state`, also after a way through JSON."""
        problems = cls()
        problems.used = state["used"]
        for mine, stored in ((problems._dropped, state["dropped"]), (problems._noted, state["noted"])):
            for category, (count, places) in stored.items():
                mine[category] = (count, [(origin, detail) for origin, detail in places])
        return problems

    def summary(self) -> list[str]:
        """A line for each category, the most frequent first, rows left out before rows changed:
        `3 rows dropped: empty answer (train.jsonl row 4, row 9 and 1 more)`.

        What was found in the first row follows where there is more to say than the category.
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
        """InputError naming the first problem if `strict` and there is one."""
        if not strict or not self._dropped:
            return
        category, (_, places) = next(iter(self._dropped.items()))
        origin, detail = places[0]
        found = f"{category}: {detail}" if detail else category
        others = f"; {_number(self.total - 1, 'other problem')} of the kind or another" if self.total > 1 else ""
        raise InputError(f"{origin}: {found}{others}; correct the data, or leave such rows out with `strict: false`")

    def require_any(self, what: str) -> None:
        """InputError that no row of `what` (names of files) can be used; for a caller that was left without any."""
        if not self._dropped:
            raise InputError(f"{what}: there are no rows; name a file that has some")
        category, (count, places) = next(iter(_by_count(self._dropped)))
        detail = f": {places[0][1]}" if places[0][1] else ""
        remedy = "correct the data, or name its columns in `columns`"
        if category == BROKEN_FILE:
            remedy = "get the file anew, or leave it out"
        raise InputError(
            f"{what}: no usable row; {_number(self.total, 'problem')}, most often {category} "
            f"({_places(count, places)}){detail}; {remedy}"
        )


def _count(entries: dict[str, _Entry], category: str, origin: str, detail: str) -> None:
    count, places = entries.get(category, (0, []))
    if count < SHOWN:
        places.append((_printable(origin), _printable(detail)))
    entries[category] = (count + 1, places)


def _by_count(entries: dict[str, _Entry]) -> Iterable[tuple[str, _Entry]]:
    return sorted(entries.items(), key=lambda item: -item[1][0])


def _places(count: int, places: list[tuple[str, str]]) -> str:
    """Origins, each file named once, and how many more there are."""
    shown, file = [], None
    for origin, _ in places:
        name, separator, row = origin.rpartition(" row ")
        shown.append(f"row {row}" if separator and name == file else origin)
        file = name
    more = f" and {count - len(places):,} more" if count > len(places) else ""
    return ", ".join(shown) + more


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _printable(text: str) -> str:
    """On one line; names and texts from broken files may hold code points that no terminal takes."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())
