"""Rows on their way to the learner: held-out rows, the order of an epoch, and samples."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from posttrain.data.examples import read_examples
from posttrain.data.problems import Problems
from posttrain.data.rendering import LossOn, Renderer
from posttrain.data.tokens import Kind, TokenRow, load_rows, tokenise
from posttrain.episode import Stream
from posttrain.errors import InputError
from posttrain.recipe.data import DataRecipe
from posttrain.recipe.stages import RewardRecipe
from posttrain.seeds import random_stream
from posttrain.training.batches import PreferenceSide, Sample


class Rows(Protocol):
    """Training rows, an optimizer step's worth at a time."""

    problems: Problems
    """Of rows read since training began; what is read before it is counted in the data set."""

    def batch(self, step: int) -> list[TokenRow]:
        """The rows of update `step`, counted from 0; the same for the same step, whatever was asked before."""
        ...


@dataclass(frozen=True)
class DataSet:
    """The rows of a supervised stage."""

    train: Rows
    updates_per_epoch: int
    """0 where rows are streamed and nobody knows how many there are."""
    stored: list[TokenRow]
    """All training rows; empty where they are streamed."""
    validation: list[TokenRow]
    test: list[TokenRow]
    problems: Problems

    @property
    def final(self) -> list[TokenRow]:
        """Rows of the final table."""
        return self.test or self.validation


def load_data(
    kind: Kind, recipe: DataRecipe, renderer: Renderer, loss_on: LossOn, rows_per_update: int, seed: int
) -> DataSet:
    """Read, tokenise and divide the rows. InputError where there are none, or, if `strict`, where some cannot be used."""
    problems = Problems()

    def read(name: str) -> list[list[TokenRow]]:
        sources, own = getattr(recipe, name), Problems()
        limit = recipe.max_rows if name == "train" else None
        found = load_rows(kind, recipe, sources, limit, renderer, loss_on, own) if sources else []
        if sources and not any(found):
            own.require_any(", ".join(source.path for source in sources))
        problems.include(own)
        return found

    validation = [row for rows in read("validation") for row in rows]
    test = [row for rows in read("test") for row in rows]
    if recipe.streaming:
        problems.raise_if(recipe.strict)
        streamed = StreamedRows(kind, recipe, renderer, loss_on, rows_per_update, seed)
        return DataSet(streamed, 0, [], validation, test, problems)
    train = read("train")
    problems.raise_if(recipe.strict)
    if recipe.held_out:
        try:
            train, validation = hold_out(train, recipe.held_out, seed)
        except InputError as error:
            # There may be so few because the others were left out, and nothing else would say so.
            raise InputError("\n".join([str(error), *problems.summary()])) from error
    known = {_content(row) for rows in train for row in rows}
    for row in (*validation, *test):
        if _content(row) in known:
            problems.note("held out and trained on as well", row.origin)
    order = EpochRows(train, [source.weight for source in recipe.train], rows_per_update, seed)
    return DataSet(order, order.updates_per_epoch, order.rows, validation, test, problems)


def check_margins(recipe: RewardRecipe, data: DataSet) -> list[str]:
    """What to say where the loss reads margins and no training row has one above 0: InputError if the recipe names
    their column. Of streamed rows nobody knows before they are read.
    """
    if not recipe.loss.margin or not data.stored or any(row.margin for row in data.stored):
        return []
    column = recipe.data.columns.margin
    found = f"no training row has a number above 0 in the column `{column}`"
    if column != type(recipe.data.columns)().margin:
        raise InputError(f"data.columns.margin: {found}; correct the name, or set loss.margin to false")
    return [f"loss.margin has no effect: {found} (data.columns.margin)"]


def _content(row: TokenRow) -> bytes:
    return b"".join(stream.ids.tobytes() for stream in row.streams)


def hold_out(sources: list[list[TokenRow]], count: int, seed: int) -> tuple[list[list[TokenRow]], list[TokenRow]]:
    """Training rows by source, and at least `count` validation rows, drawn so that no prompt is on both sides."""
    by_prompt: dict[bytes, list[tuple[int, int]]] = {}
    for number, rows in enumerate(sources):
        for place, row in enumerate(rows):
            by_prompt.setdefault(row.prompt, []).append((number, place))
    groups = list(by_prompt.values())
    held: list[tuple[int, int]] = []
    for index in random_stream(seed, "held out").permutation(len(groups)):
        if len(held) >= count:
            break
        held += groups[index]
    if len(held) == sum(len(rows) for rows in sources):
        raise InputError(
            f"data.held_out: {count} rows would leave none of the {sum(map(len, sources))} usable ones to train on; hold out fewer"
        )
    out = set(held)
    kept = [
        [row for place, row in enumerate(rows) if (number, place) not in out] for number, rows in enumerate(sources)
    ]
    return kept, [sources[number][place] for number, place in sorted(held)]


class EpochRows:
    """Each epoch goes through the rows once, or as often as their source's weight says, in an order of its own.

    Every source that has rows gives at least one, however small its weight.
    """

    def __init__(
        self, sources: list[list[TokenRow]], weights: Sequence[float], rows_per_update: int, seed: int
    ) -> None:
        self.rows = [row for rows in sources for row in rows]
        self.problems = Problems()
        self.rows_per_update = rows_per_update
        self.seed = seed
        starts = np.cumsum([0, *map(len, sources)])
        self._sources = [np.arange(start, start + len(rows)) for start, rows in zip(starts, sources, strict=False)]
        self._takes = [
            max(round(weight * len(rows)), min(len(rows), 1)) for weight, rows in zip(weights, sources, strict=True)
        ]
        self.updates_per_epoch = math.ceil(sum(self._takes) / rows_per_update)
        if not self.updates_per_epoch:
            raise InputError("data.train: there is no row to train on; name files that have some")

    def batch(self, step: int) -> list[TokenRow]:
        epoch, part = divmod(step, self.updates_per_epoch)
        chosen = self._order(epoch)[part * self.rows_per_update : (part + 1) * self.rows_per_update]
        return [self.rows[i] for i in chosen]

    def _order(self, epoch: int) -> np.ndarray:
        draws = random_stream(self.seed, "rows", epoch)
        taken = []
        for rows, count in zip(self._sources, self._takes, strict=True):
            whole, part = divmod(count, max(len(rows), 1))
            taken += [*[rows] * whole, draws.permutation(rows)[:part]]
        return draws.permutation(np.concatenate(taken))


class StreamedRows:
    """Rows read as they are needed, each drawn at random from the `shuffle_buffer` that are held at a time."""

    def __init__(
        self,
        kind: Kind,
        recipe: DataRecipe,
        renderer: Renderer,
        loss_on: LossOn,
        rows_per_update: int,
        seed: int,
    ) -> None:
        self.recipe = recipe
        self.problems = Problems()
        """Of the rows read so far, each counted once however often it was read."""
        self.rows_per_update = rows_per_update
        self.seed = seed
        self._read: Callable[[Problems], Iterator[TokenRow]] = lambda problems: tokenise(
            read_examples(kind, recipe.train, recipe.columns, problems, recipe.max_rows),
            recipe,
            renderer,
            loss_on,
            problems,
        )
        self._drawn: Iterator[TokenRow] = iter(())
        self._next_step = -1

    def batch(self, step: int) -> list[TokenRow]:
        """The next rows; InputError, if `strict`, as soon as one of those read cannot be used."""
        if step != self._next_step:
            # After a resume: the same rows are drawn again up to where the run was.
            self.problems = Problems()
            self._drawn = self._draw(self.problems)
            for _ in islice(self._drawn, step * self.rows_per_update):
                pass
        self._next_step = step + 1
        rows = list(islice(self._drawn, self.rows_per_update))
        self.problems.raise_if(self.recipe.strict)
        return rows

    def _draw(self, problems: Problems) -> Iterator[TokenRow]:
        epoch = 0
        while True:
            held: list[TokenRow] = []
            draws = random_stream(self.seed, "streamed rows", epoch)
            found = 0
            # What is wrong with the rows is counted when they are first read.
            for row in self._read(problems if epoch == 0 else Problems()):
                found += 1
                held.append(row)
                if len(held) >= self.recipe.shuffle_buffer:
                    yield held.pop(int(draws.integers(len(held))))
            while held:
                yield held.pop(int(draws.integers(len(held))))
            if not found:
                problems.require_any(", ".join(source.path for source in self.recipe.train))
            epoch += 1


def stream_of(ids: np.ndarray, trained: np.ndarray) -> Stream:
    """Token ids [T] and which are trained [T], as a stream that nobody sampled."""
    zeros = np.zeros(len(ids), dtype=np.float32)
    nobody = np.full(len(ids), -1, dtype=np.int32)
    return Stream(ids, trained, zeros, zeros, np.where(trained, 0, -1).astype(np.int32), nobody)


def samples_of_row(row: TokenRow, number: int = -1) -> list[Sample]:
    """The row's streams as samples. With `number` >= 0 it is preference data, and `number` tells rows apart."""
    sides: list[PreferenceSide | None] = [None] * len(row.streams)
    if number >= 0:
        goods = [True, False] if len(row.streams) == 2 else [row.good]
        sides = [PreferenceSide(number, good, row.margin) for good in goods]
    return [
        Sample(
            stream=stream_of(stream.ids, stream.trained),
            label=row.origin,
            advantages=np.zeros(int(stream.trained.sum()), dtype=np.float32),
            side=side,
        )
        for stream, side in zip(row.streams, sides, strict=True)
    ]
