"""The one table that a benchmark prints, the same as JSON, and results that are stored as lines."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def show(
    title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = (), json_file: str | Path | None = None
) -> None:
    """Print `rows` as a table and, where `json_file` is given, write `{"title", "machine", "rows", "notes"}` to it.

    The keys of the first row are the headings. Text stands to the left, numbers to the right, rounded to three
    significant digits in the table and whole in the file; None and NaN are a dash. `notes` follow below the table:
    the machine, the number of rounds, what the best settings were.
    """
    from rich.console import Console
    from rich.table import Table

    from posttrain.runs.machine import describe_machine

    table = Table(title=title, title_justify="left")
    for heading, value in rows[0].items():
        table.add_column(heading, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(heading)) for heading in rows[0]))
    machine = describe_machine()
    versions = ", ".join(f"{name} {machine['packages'][name]}" for name in ("torch", "transformers"))
    # Piped to a file, a table is as wide as it needs to be.
    plain = Console(soft_wrap=True)
    console = plain if plain.is_terminal else Console(width=200)
    console.print(table)
    for note in (f"{machine['processor']}, {machine['cpus_allowed']} processors; {versions}", *notes):
        console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    if json_file is not None:
        content = {"title": title, "machine": machine, "rows": [_plain(row) for row in rows], "notes": list(notes)}
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The stored results of a benchmark, one JSON object per line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line to `file`, whose folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


class Stored:
    """The results of a benchmark that are lines of a file, so that the same call makes only those that are missing."""

    def __init__(self, file: Path, *keys: str) -> None:
        """`keys`: those of a line that say which result it is."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.keys = file, keys
        self.lines = read_lines(file) if file.exists() else []

    def missing(self, wanted: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Those of the results, as values of `keys`, that have no line."""
        done = {tuple(line[key] for key in self.keys) for line in self.lines}
        return [one for one in wanted if one not in done]

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows` as a table of Markdown; the keys of the first row are the headings, and columns from the third on are to the right."""
    head = list(rows[0])
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)], *[[str(row[key]) for key in head] for row in rows]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
