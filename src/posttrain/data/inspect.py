"""Rows as a person reads them: text with the trained tokens coloured, lengths, and what cannot be used."""

from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.data.examples import messages_column, read_examples
from posttrain.data.problems import Problems
from posttrain.data.readers import read_rows
from posttrain.data.rendering import LossOn, Renderer, TokenStream
from posttrain.data.tokens import Kind, TokenRow, tokenise
from posttrain.errors import InputError
from posttrain.recipe.data import DataRecipe

TRAINED = "bold green"
_LOOKED_AT = 100
"""Rows from which the kind is told."""
_VERDICTS = frozenset(
    ["true", "false", "1", "0", "good", "bad", "chosen", "rejected", "accepted", "desirable", "undesirable"]
)
"""Labels that judge an answer. Most of them are not read as such, and then each row says so."""


def inspect_rows(
    recipe: DataRecipe,
    kind: Kind | None,
    renderer: Renderer,
    loss_on: LossOn,
    shown: int,
    limit: int,
    console: Console,
) -> None:
    """Print `shown` rows whole, then lengths and problems of the first `limit`. `kind` None is told from the columns."""
    columns = recipe.columns
    if kind is None:
        kind = _kind(recipe)
    problems = Problems()
    examples = islice(read_examples(kind, recipe.train, columns, problems), limit)
    rows = list(tokenise(examples, recipe, renderer, loss_on, problems))
    for row in rows[:shown]:
        _show(row, kind, renderer, console)
    if not rows:
        problems.require_any(", ".join(source.path for source in recipe.train))
    console.print(_lengths(rows, kind))
    problems_found = problems.summary()
    for line in problems_found or ["no row has a problem"]:
        console.print(line, markup=False)


def _kind(recipe: DataRecipe) -> Kind:
    """AlreadyReported from the columns of the first row that can be read, and from the labels of some more."""
    columns = recipe.columns
    rows: list[dict[str, Any]] = []
    unread = Problems()
    for origin, row in chain.from_iterable(read_rows(source) for source in recipe.train):
        if isinstance(row, str):
            unread.add_text(row, origin)
        else:
            rows.append(row)
        if len(rows) == _LOOKED_AT:
            break
    paths = ", ".join(source.path for source in recipe.train)
    if not rows:
        unread.require_any(paths)
    names = set(rows[0])
    if {columns.chosen, columns.rejected} <= names:
        return "pair"
    labels = [row[columns.label] for row in rows if row.get(columns.label) is not None]
    if columns.messages not in names and columns.completion in names and labels and all(map(_judges, labels)):
        return "verdict"
    if columns.messages in names or columns.completion in names:
        return "conversation"
    messages = messages_column(rows[0])
    example = f"columns.messages={messages}" if messages else "columns.prompt=question columns.completion=answer"
    raise InputError(
        f"{paths}: the columns {', '.join(sorted(names)) or '(none)'} are not those of conversations, pairs or verdicts; "
        f"name them, for example `{example}`"
    )


def _judges(label: Any) -> bool:
    """Whether the label is a verdict on an answer, and not, for example, the right answer itself."""
    if isinstance(label, str):
        return label.strip().lower() in _VERDICTS
    return isinstance(label, bool | int | float) and label in (0, 1)


def _show(row: TokenRow, kind: str, renderer: Renderer, console: Console) -> None:
    names = [""] if len(row.streams) == 1 else [f"stream {place + 1} " for place in range(len(row.streams))]
    names = ["chosen ", "rejected "] if kind == "pair" else names
    for name, stream in zip(names, row.streams, strict=True):
        about = f"{row.origin} {name}({len(stream.ids)} tokens, {int(stream.trained.sum())} trained)"
        console.rule(about, align="left")
        console.print(_coloured(stream, renderer))


def _coloured(stream: TokenStream, renderer: Renderer) -> Text:
    """Runs of tokens that are alike, decoded together, so that characters of several tokens come out whole."""
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(stream.trained)) + 1), len(stream.ids)]
    for start, stop in pairwise(edges):
        style = TRAINED if stream.trained[start] else "dim"
        text.append(renderer.tokenizer.decode(stream.ids[start:stop], skip_special_tokens=False), style)
    return text


def _lengths(rows: list[TokenRow], kind: str) -> Table:
    lengths = np.array([row.tokens for row in rows])
    trained = np.array([sum(int(stream.trained.sum()) for stream in row.streams) for row in rows])
    table = Table(
        "", "mean", "median", "95%", "longest", "sum", title=f"{len(rows)} usable rows ({kind})", title_justify="left"
    )
    for name, values in (("tokens of a row", lengths), ("trained tokens", trained)):
        cells: list[Any] = [values.mean(), np.median(values), np.quantile(values, 0.95), values.max(), values.sum()]
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells))
    return table
