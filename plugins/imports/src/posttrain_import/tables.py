"""The Markdown table of a command's flags, optionally compared with a recipe of this package for the same
experiment."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.recipe.compose import load_recipe
from posttrain.recipe.sources import read_file
from posttrain_import.commands import Imported, shown_value

_HEAD = "| flag | value | our key | our value | outcome | note |\n|---|---|---|---|---|---|"
_LOUD = {outcome: f"**{outcome}**" for outcome in ("unknown", "not supported")}


def markdown_table(imported: Imported, recipe: str | None = None) -> str:
    """The table `| flag | value | our key | our value | outcome | note |`.

    `recipe`: a recipe file to compare with. `our value` is then the value in this file. If it differs, the note has the
    imported value and the comment in the file. Keys that only the file sets follow with the outcome `added`; if the
    import is based on this file, only those with a comment.
    """
    ready = _Ready(recipe, imported) if recipe is not None else None
    lines = [_HEAD]
    named: set[str] = set()
    for row in imported.rows:
        values = dict(row.answer.keys)
        outcome, notes = row.answer.outcome, [_escaped(row.answer.note)] if row.answer.note else []
        if ready is not None:
            values, more = ready.compared(values)
            notes += more
            named |= values.keys()
        flag = f"({row.flag})" if row.implied else f"`{row.flag}`"
        lines.append(_line(flag, row.value, values, _LOUD.get(outcome, outcome), notes))
    for key, value, note in ready.added(named) if ready is not None else ():
        if note or not imported.files:
            lines.append(_line("–", "–", {key: value}, "added", [_escaped(note)] if note else []))
    return "\n".join(lines) + "\n"


class _Ready:
    """A recipe file that is compared with the imported recipe."""

    def __init__(self, file: str, imported: Imported) -> None:
        self._values = load_recipe([file], [], imported.stage).model_dump(mode="json")
        self._given = dict(_leaves(read_file(file).values))
        with open(file, encoding="utf-8") as stream:
            self._comments = _comments(stream.read())

    def compared(self, imported: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Our values of these keys, and notes on those that differ from the imported ones."""
        ours = {key: self._at(key) for key in imported}
        changed = {key: value for key, value in imported.items() if not _same(ours[key], value)}
        notes = [f"imported: {', '.join(dict.fromkeys(map(_cell, changed.values())))}"] if changed else []
        notes += dict.fromkeys(_escaped(self._comments[key]) for key in changed if key in self._comments)
        return {key: ours[key] if key in changed else value for key, value in imported.items()}, notes

    def added(self, named: set[str]) -> Iterator[tuple[str, Any, str]]:
        """Keys that only the file sets, with value and comment. The first key of a section has the section's
        comment."""
        for key in self._given:
            inside = any(key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in named)
            if key not in named and not inside and key != "stage":
                yield key, self._at(key), self._comments.get(key) or self._comments.pop(key.rpartition(".")[0], "")

    def _at(self, key: str) -> Any:
        value: Any = self._values
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) else None
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "path" in value[0]:
            return [source["path"] for source in value]
        return value


def _same(ours: Any, imported: Any) -> bool:
    """Whether two values are equal; a list of one value is that value."""
    one, other = ([value] if not isinstance(value, list | tuple) else list(value) for value in (ours, imported))
    return one == other


def _leaves(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _comments(text: str) -> dict[str, str]:
    """Dotted key -> the comment at the end of its line in a recipe file."""
    found: dict[str, str] = {}
    place: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = re.match(r"( *)(\w+):(?: |$)(?:.*?)(?:\s#\s(.*))?$", line)
        if match is None:
            continue
        place = [(indent, key) for indent, key in place if indent < len(match[1])]
        place.append((len(match[1]), match[2]))
        if match[3]:
            found[".".join(key for _, key in place)] = match[3]
    return found


def _line(flag: str, value: str, ours: Mapping[str, Any], outcome: str, notes: list[str]) -> str:
    keys = ", ".join(f"`{key}`" for key in ours) or "–"
    cells = [_cell(one) for one in ours.values()]
    shown = cells[:1] if len(set(cells)) == 1 else cells
    return f"| {flag} | {_escaped(value)} | {keys} | {', '.join(shown) or '–'} | {outcome} | {'; '.join(notes)} |"


def _cell(value: Any) -> str:
    return f"`{_escaped(shown_value(value))}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
