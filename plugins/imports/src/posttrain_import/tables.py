"""The table of a command's flags: for the terminal, and as Markdown, optionally compared with a recipe of this package."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.recipe.compose import load_recipe
from posttrain.recipe.sources import read_file
from posttrain_import.commands import Imported, shown_value
from posttrain_import.rows import SET

if TYPE_CHECKING:
    from rich.table import Table

_LOUD = {outcome: f"**{outcome}**" for outcome in ("unknown", "not supported")}


def terminal_table(imported: Imported) -> "Table":
    """The flags of a command and their results."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    title = f"{imported.program.framework} as posttrain {imported.stage}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("flag", overflow="fold", max_width=36)
    table.add_column("", no_wrap=True)
    table.add_column("here", overflow="fold")
    for row in imported.rows:
        here = [f"{key}={shown_value(value)}" for key, value in row.answer.keys.items()]
        table.add_row(
            escape(row.label if row.value == SET else f"{row.label} {row.value}"),
            row.answer.outcome,
            escape("\n".join([*here, *([row.answer.note] if row.answer.note else [])])),
        )
    return table


def markdown_table(imported: Imported, recipe: str | None = None) -> str:
    """The table `| flag | value | our key | our value | outcome | note |`.

    `recipe`: a recipe file to compare with. `our value` is then the value in this file. If it differs, the note has the
    imported value and the comment in the file. Keys that only the file sets follow with the outcome `added`; if the
    import is based on this file, only those with a comment.
    """
    lines = ["| flag | value | our key | our value | outcome | note |\n|---|---|---|---|---|---|"]
    recipe_values = load_recipe([recipe], [], imported.stage).model_dump(mode="json") if recipe else {}
    comments = _comments(Path(recipe).read_text(encoding="utf-8")) if recipe else {}
    named: set[str] = set()
    for row in imported.rows:
        ours = dict(row.answer.keys)
        notes = [_escaped(row.answer.note)] if row.answer.note else []
        if recipe:
            ours = {key: _at(recipe_values, key) for key in ours}
            changed = {key: value for key, value in row.answer.keys.items() if _listed(ours[key]) != _listed(value)}
            notes += [f"imported: {', '.join(dict.fromkeys(map(_cell, changed.values())))}"] if changed else []
            notes += dict.fromkeys(_escaped(comments[key]) for key in changed if key in comments)
            ours = {key: ours[key] if key in changed else value for key, value in row.answer.keys.items()}
            named |= ours.keys()
        flag = f"({row.flag})" if row.implied else f"`{row.flag}`"
        lines.append(_line(flag, row.value, ours, _LOUD.get(row.answer.outcome, row.answer.outcome), notes))
    for key in dict(_leaves(read_file(recipe).values)) if recipe else ():
        if key == "stage" or any(f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in named):
            continue
        # The first key of a section has the comment of the section.
        note = comments.get(key) or comments.pop(key.rpartition(".")[0], "")
        if note or not imported.program.files:
            lines.append(_line("–", "–", {key: _at(recipe_values, key)}, "added", [_escaped(note)] if note else []))
    return "\n".join(lines) + "\n"


def _at(values: Any, key: str) -> Any:
    """The value of a dotted key; the paths of a list of data files."""
    for part in key.split("."):
        values = values[part] if isinstance(values, Mapping) else None
    if isinstance(values, list) and values and isinstance(values[0], Mapping) and "path" in values[0]:
        return [source["path"] for source in values]
    return values


def _listed(value: Any) -> list[Any]:
    """A value as a list: a list of one value is that value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _leaves(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _comments(text: str) -> dict[str, str]:
    """Dotted key -> the comment at the end of its line in a recipe file."""
    comments: dict[str, str] = {}
    place: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = re.match(r"( *)(\w+):(?: |$)(?:.*?)(?:\s#\s(.*))?$", line)
        if match is None:
            continue
        place = [(indent, key) for indent, key in place if indent < len(match[1])]
        place.append((len(match[1]), match[2]))
        if match[3]:
            comments[".".join(key for _, key in place)] = match[3]
    return comments


def _line(flag: str, value: str, ours: Mapping[str, Any], outcome: str, notes: list[str]) -> str:
    keys = ", ".join(f"`{key}`" for key in ours) or "–"
    cells = [_cell(one) for one in ours.values()]
    shown = cells[:1] if len(set(cells)) == 1 else cells
    return f"| {flag} | {_escaped(value)} | {keys} | {', '.join(shown) or '–'} | {outcome} | {'; '.join(notes)} |"


def _cell(value: Any) -> str:
    return f"`{_escaped(shown_value(value))}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
