"""Showing rows: text with the trained tokens highlighted, lengths, and problems."""

from collections.abc import Callable
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.data.examples import messages_column, read_examples
from posttrain.data.files import read_rows
from posttrain.data.problems import Problems
from posttrain.data.rendering import LossOn, Renderer
from posttrain.data.tokens import Kind, TokenRow, tokenize
from posttrain.errors import InputError
from posttrain.recipe.data import DataRecipe

TRAINED = "bold green"
_INSPECTED = 100
"""Rows from which the kind is inferred."""
_LABELS = frozenset(
    ["true", "false", "1", "0", "good", "bad", "chosen", "rejected", "accepted", "desirable", "undesirable"]
)
"""Labels of unpaired answers. Those that training does not accept are reported per row."""


def inspect_rows(
    recipe: DataRecipe,
    kind: Kind | None,
    make_renderer: Callable[[], Renderer],
    loss_on: LossOn,
    shown: int,
    limit: int,
    console: Console,
) -> None:
    """Print `shown` complete rows, then lengths and problems of the first `limit`. `kind` None: infer it from the columns.

    `make_renderer` is called once there is a usable row."""
    columns = recipe.columns
    if kind is None:
        kind = _inferred_kind(recipe)
    problems = Problems()
    rows: list[TokenRow] = []
    if examples := list(islice(read_examples(kind, recipe.train, columns, problems), limit)):
        renderer = make_renderer()
        rows = list(tokenize(examples, recipe, renderer, loss_on, problems))
    for row in rows[:shown]:
        _show(row, kind, renderer, console)
    if not rows:
        problems.require_any(", ".join(source.path for source in recipe.train))
    table = Table(
        "", "mean", "median", "95%", "longest", "sum", title=f"{len(rows)} usable rows ({kind})", title_justify="left"
    )
    trained = np.array([sum(int(stream.trained.sum()) for stream in row.streams) for row in rows])
    for name, values in (("tokens per row", np.array([row.tokens for row in rows])), ("trained tokens", trained)):
        cells: list[Any] = [values.mean(), np.median(values), np.quantile(values, 0.95), values.max(), values.sum()]
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    console.print(table)
    for line in problems.summary() or ["no row has a problem"]:
        console.print(line, markup=False)


def _inferred_kind(recipe: DataRecipe) -> Kind:
    """Return the kind, inferred from the columns of the first readable row and from the labels of further rows."""
    columns = recipe.columns
    rows: list[dict[str, Any]] = []
    unreadable = Problems()
    for origin, row in chain.from_iterable(read_rows(source) for source in recipe.train):
        if isinstance(row, str):
            unreadable.add_text(row, origin)
        else:
            rows.append(row)
        if len(rows) == _INSPECTED:
            break
    paths = ", ".join(source.path for source in recipe.train)
    if not rows:
        unreadable.require_any(paths)
    names = set(rows[0])
    if {columns.chosen, columns.rejected} <= names:
        return "pair"
    labels = [row[columns.label] for row in rows if row.get(columns.label) is not None]
    # Other labels, such as reference answers, do not rate an answer.
    rated = all(
        label.strip().lower() in _LABELS
        if isinstance(label, str)
        else isinstance(label, int | float) and label in (0, 1)
        for label in labels
    )
    if columns.messages not in names and columns.completion in names and labels and rated:
        return "unpaired"
    if names & {columns.messages, columns.completion, columns.text}:
        return "conversation"
    messages = messages_column(rows[0])
    example = f"columns.messages={messages}" if messages else "columns.prompt=question columns.completion=answer"
    raise InputError(
        f"{paths}: the columns {', '.join(sorted(names)) or '(none)'} are not those of conversations, pairs or unpaired answers; "
        f"name them, for example `{example}`"
    )


def _show(row: TokenRow, kind: str, renderer: Renderer, console: Console) -> None:
    names = [""] if len(row.streams) == 1 else [f"stream {number} " for number in range(1, len(row.streams) + 1)]
    names = ["chosen ", "rejected "] if kind == "pair" else names
    for name, stream in zip(names, row.streams, strict=True):
        title = f"{row.origin} {name}({len(stream.ids)} tokens, {int(stream.trained.sum())} trained)"
        console.rule(title, align="left")
        # Runs of trained and untrained tokens are decoded as a whole, so that characters of several tokens stay complete.
        text = Text()
        edges = [0, *(np.flatnonzero(np.diff(stream.trained)) + 1), len(stream.ids)]
        for start, stop in pairwise(edges):
            style = TRAINED if stream.trained[start] else "dim"
            text.append(renderer.tokenizer.decode(stream.ids[start:stop], skip_special_tokens=False), style)
        console.print(text)
