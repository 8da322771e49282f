"""How places on a grid are told to a policy."""

from collections.abc import Iterable, Mapping
from typing import Literal

ObservationForm = Literal["grid", "coordinates", "both", "local"]
"""A drawing of the grid, a sentence with the places of things, one after the other, or what lies where from the player."""


def drawing(cells: Mapping[int, str], rows: int, columns: int) -> str:
    """The symbols of `cells` (row * columns + column -> symbol), one line per row."""
    return "\n".join(" ".join(cells[row * columns + column] for column in range(columns)) for row in range(rows))


def place(cell: int, columns: int) -> str:
    """`row 1, column 2`, counted from 0 at the top left."""
    return f"row {cell // columns}, column {cell % columns}"


def offset(cell: int, origin: int, columns: int) -> str:
    """`2 down, 1 right`: how to get from `origin` to `cell`, or `here`."""
    down, right = cell // columns - origin // columns, cell % columns - origin % columns
    parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return ", ".join(parts) or "here"


def sides(cells: Iterable[int], origin: int, columns: int) -> str:
    """`left, up`: on which sides of `origin` one of `cells` lies, or `none`."""
    found = set(cells)
    row, column = divmod(origin, columns)
    beside = {"left": (row, column - 1), "right": (row, column + 1), "up": (row - 1, column), "down": (row + 1, column)}
    named = [name for name, (r, c) in beside.items() if 0 <= c < columns and r * columns + c in found]
    return ", ".join(named) or "none"


def places(cells: Iterable[int], columns: int) -> str:
    """`(1, 2), (3, 0)`: row and column of several cells."""
    return ", ".join(f"({cell // columns}, {cell % columns})" for cell in sorted(cells)) or "none"


def check_symbols(symbols: Mapping[str, str]) -> None:
    """ValueError unless the symbols are single words without tags and no two are alike."""
    for name, symbol in symbols.items():
        if not symbol or any(c.isspace() or c in "<>" for c in symbol):
            raise ValueError(f"`symbols.{name}` is {symbol!r}; a symbol has no space and no < or >, and is not empty")
    if len(set(symbols.values())) < len(symbols):
        raise ValueError(f"`symbols` uses one symbol twice among {' '.join(symbols.values())}; make them differ")
