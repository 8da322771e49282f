"""Rows of the supervised stages: training and held-out rows, the order of an epoch, samples for the learner, and the
loop."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from rich.console import Console

from posttrain.data.examples import read_examples
from posttrain.data.held_out import as_count, divide, nothing_left
from posttrain.data.messages import UnpairedExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import LossOn, Renderer
from posttrain.data.tokens import Kind, TokenRow, load_rows, tokenize
from posttrain.episode import Stream
from posttrain.errors import InputError
from posttrain.recipe.data import DataRecipe, FixedRowsRecipe
from posttrain.recipe.supervised import SupervisedRecipe
from posttrain.seeds import random_stream
from posttrain.training.trainer import Trainer
from posttrain.training.updater import Objective, PreferenceSide, Sample, Samples, Totals, means

Output = TypeVar("Output")
RARE = 0.05
"""Share of rows below which a label is rare."""


@dataclass(frozen=True)
class DataSet:
    """The rows of a supervised stage."""

    train: "EpochRows | StreamedRows"
    updates_per_epoch: int
    """0 for streamed rows, whose number is unknown."""
    stored: list[TokenRow]
    """All training rows; empty for streamed rows."""
    validation: list[TokenRow]
    test: list[TokenRow]
    problems: Problems
    ptx: bool = False
    """As `Sample.ptx`."""

    @property
    def final(self) -> list[TokenRow]:
        """The rows of the final table."""
        return self.test or self.validation

    def batch(self, step: int) -> list[Sample]:
        """The samples of update `step`, counted from 0, of rows that are not preference data."""
        return [replace(sample, ptx=self.ptx) for row in self.train.batch(step) for sample in samples_of_row(row)]


def load_data(
    kind: Kind, recipe: DataRecipe, renderer: Renderer, loss_on: LossOn, rows_per_update: int, seed: int
) -> DataSet:
    """Read, tokenize and split the rows. InputError if there are none or, with `strict`, if a row is unusable."""
    problems = Problems()

    def read(name: str) -> list[list[TokenRow]]:
        sources, split_problems = getattr(recipe, name), Problems()
        limit = recipe.max_rows if name == "train" else None
        rows = load_rows(kind, recipe, sources, limit, renderer, loss_on, split_problems) if sources else []
        if sources and not any(rows):
            split_problems.require_any(", ".join(source.path for source in sources))
        problems.include(split_problems.state())
        return rows

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
            train, validation, drawn = hold_out(train, recipe.held_out, seed, not test)
            test = test or drawn
        except InputError as error:
            # Unusable rows may be the reason for the small number, so report them too.
            raise InputError("\n".join([str(error), *problems.summary()])) from error
    trained = {_content(row) for rows in train for row in rows}
    for row in (*validation, *test):
        if _content(row) in trained:
            problems.note("both held out and trained on", row.origin)
    order = EpochRows(train, [source.weight for source in recipe.train], rows_per_update, seed)
    return DataSet(order, order.updates_per_epoch, order.rows, validation, test, problems)


def check_rows(recipe: SupervisedRecipe, data: DataSet) -> list[str]:
    """Return warnings about rows that the loss of the recipe cannot use well. InputError if it cannot be computed.

    Margins of streamed rows are not checked. Their labels are those that the first steps are drawn from, and only warned of.
    """
    columns, streaming = recipe.data.columns, recipe.data.streaming
    if recipe.kind != "unpaired":
        margins = getattr(recipe.loss, "margin", False)
        if not (margins and data.stored) or any(row.margin for row in data.stored):
            return []
        problem = f"no training row has a number above 0 in the column `{columns.margin}`"
        if columns.margin != type(columns)().margin:
            raise InputError(f"data.columns.margin: {problem}; correct the name, or set loss.margin to false")
        return [f"loss.margin has no effect: {problem} (data.columns.margin)"]
    labels = [row.chosen for row in data.stored]
    if streaming:
        read = itertools.islice(
            read_examples("unpaired", recipe.data.train, columns, Problems()), recipe.data.shuffle_buffer
        )
        labels = [one.label for one in read if isinstance(one, UnpairedExample)]
    good = sum(labels)
    count, rare, common = min((good, "good", "bad"), (len(labels) - good, "bad", "good"))
    problem = f"{count} of {'the first ' * streaming}{len(labels)} training rows are {rare} answers"
    if not count and not streaming:
        raise InputError(
            f"{', '.join(source.path for source in recipe.data.train)}: {problem} (data.columns.label), and `loss.type: kto` "
            f"compares good answers with bad ones; add {rare} answers, or train on pairs or with `posttrain sft`"
        )
    weight = "loss.desirable_weight" if rare == "good" else "loss.undesirable_weight"
    return [f"{problem}, so {common} ones decide the loss; add some, or raise {weight}"] * (count < RARE * len(labels))


def _content(row: TokenRow) -> bytes:
    return b"".join(stream.ids.tobytes() for stream in row.streams)


def hold_out(
    sources: list[list[TokenRow]], held_out: float, seed: int, test: bool
) -> tuple[list[list[TokenRow]], list[TokenRow], list[TokenRow]]:
    """Divide rows into training rows by source, validation rows and test rows, which share no prompt.

    `held_out`: the minimum number (int) or share (float) of rows to hold out. If `test`, half of them are test rows.
    """
    places = [(number, row) for number, rows in enumerate(sources) for row in rows]
    prompts = [row.prompt for _, row in places]
    different = list(dict.fromkeys(prompts))
    order = [different[place] for place in random_stream(seed, "held out").permutation(len(different))]
    count = as_count(held_out, len(places))
    train, validation, final = divide(prompts, order, count - count // 2 * test, count // 2 * test)
    if not train or len(validation) + len(final) < count:
        raise InputError(nothing_left(count, len(places)))
    kept = [[places[index][1] for index in train if places[index][0] == number] for number in range(len(sources))]
    return kept, [places[index][1] for index in validation], [places[index][1] for index in final]


class EpochRows:
    """Rows in epochs, each with its own order. The weight of a source is the number of its passes per epoch.

    Every source with rows contributes at least one row per epoch, however small its weight.
    """

    def __init__(
        self, sources: list[list[TokenRow]], weights: Sequence[float], rows_per_update: int, seed: int
    ) -> None:
        self.rows = [row for rows in sources for row in rows]
        self.problems = Problems()
        """Problems of rows read during training. Problems of rows read earlier are in `DataSet.problems`."""
        self.rows_per_update = rows_per_update
        self.seed = seed
        starts = np.cumsum([0, *map(len, sources)])
        self._sources = [np.arange(start, start + len(rows)) for start, rows in zip(starts, sources, strict=False)]
        self._counts = [
            max(round(weight * len(rows)), min(len(rows), 1)) for weight, rows in zip(weights, sources, strict=True)
        ]
        self.updates_per_epoch = math.ceil(sum(self._counts) / rows_per_update)
        if not self.updates_per_epoch:
            raise InputError("data.train: no rows to train on; name files that have rows")

    def batch(self, step: int) -> list[TokenRow]:
        """Return the rows of update `step`, counted from 0. The result does not depend on earlier calls."""
        epoch, part = divmod(step, self.updates_per_epoch)
        draws = random_stream(self.seed, "rows", epoch)
        passes_of_sources = []
        for rows, count in zip(self._sources, self._counts, strict=True):
            passes, rest = divmod(count, max(len(rows), 1))
            passes_of_sources += [*[rows] * passes, draws.permutation(rows)[:rest]]
        order = draws.permutation(np.concatenate(passes_of_sources))
        return [self.rows[i] for i in order[part * self.rows_per_update : (part + 1) * self.rows_per_update]]


class StreamedRows:
    """Rows read lazily and drawn at random from a buffer of `shuffle_buffer`."""

    def __init__(
        self, kind: Kind, recipe: DataRecipe, renderer: Renderer, loss_on: LossOn, rows_per_update: int, seed: int
    ) -> None:
        self.recipe = recipe
        self.problems = Problems()
        """Problems of the rows read so far; repeated reads count once."""
        self.rows_per_update = rows_per_update
        self.seed = seed
        self.kind, self.renderer, self.loss_on = kind, renderer, loss_on
        self._drawn: Iterator[TokenRow] = iter(())
        self._next_step = -1

    def batch(self, step: int) -> list[TokenRow]:
        """Return the next rows. With `strict`, InputError as soon as a row is unusable."""
        if step != self._next_step:
            # After a resume, draw the same rows again up to this step.
            self.problems = Problems()
            self._drawn = self._draw(self.problems)
            for _ in itertools.islice(self._drawn, step * self.rows_per_update):
                pass
        self._next_step = step + 1
        rows = list(itertools.islice(self._drawn, self.rows_per_update))
        self.problems.raise_if(self.recipe.strict)
        return rows

    def _draw(self, problems: Problems) -> Iterator[TokenRow]:
        recipe = self.recipe
        for epoch in itertools.count():
            buffer: list[TokenRow] = []
            draws = random_stream(self.seed, "streamed rows", epoch)
            counted = problems if epoch == 0 else Problems()  # problems are counted in the first epoch only
            examples = read_examples(self.kind, recipe.train, recipe.columns, counted, recipe.max_rows)
            row: TokenRow | None = None
            for row in tokenize(examples, recipe, self.renderer, self.loss_on, counted):
                buffer.append(row)
                if len(buffer) >= recipe.shuffle_buffer:
                    yield buffer.pop(int(draws.integers(len(buffer))))
            while buffer:
                yield buffer.pop(int(draws.integers(len(buffer))))
            if row is None:
                problems.require_any(", ".join(source.path for source in recipe.train))


def stream_of(ids: np.ndarray, trained: np.ndarray) -> Stream:
    """Return token ids [T] and their loss mask [T] as a stream without an engine version."""
    zeros = np.zeros(len(ids), dtype=np.float32)
    no_version = np.full(len(ids), -1, dtype=np.int32)
    return Stream(ids, trained, zeros, zeros, np.where(trained, 0, -1).astype(np.int32), no_version)


def samples_of_row(row: TokenRow, number: int = -1) -> list[Sample]:
    """Return the row's streams as samples. For preference data, `number` >= 0 identifies the row in its batch."""
    sides: list[PreferenceSide | None] = [None] * len(row.streams)
    if number >= 0:
        labels = [True, False] if len(row.streams) == 2 else [row.chosen]
        sides = [PreferenceSide(number, chosen, row.margin) for chosen in labels]
    return [
        Sample(
            stream=stream_of(stream.ids, stream.trained),
            label=row.origin,
            advantages=np.zeros(int(stream.trained.sum()), dtype=np.float32),
            side=side,
            weight=row.weight,
        )
        for stream, side in zip(row.streams, sides, strict=True)
    ]


def samples_of_compared(rows: Sequence[TokenRow]) -> list[Sample]:
    """The samples of preference data, whose rows are identified by their place in `rows`."""
    return [sample for number, row in enumerate(rows) for sample in samples_of_row(row, number)]


def fixed_rows(section: FixedRowsRecipe | None, rows_per_update: int, renderer: Renderer, seed: int) -> DataSet | None:
    """Supervised rows, loaded at the start, for policy updates of RL with `ptx` and of off-policy distillation. InputError if
    there are none."""
    if section is None:
        return None
    supervised = DataRecipe.model_validate(section.data.model_dump())
    data = load_data("conversation", supervised, renderer, section.loss_on, rows_per_update, seed)
    return replace(data, ptx=True)


def train_on(
    trainer: Trainer[Output],
    data: DataSet | None,
    batch: Callable[[int], list[Sample]],
    objective_for: Callable[[Samples], Objective[Output]],
    resume: bool,
    console: Console,
    learned: Callable[[Totals], None] | None = None,
) -> None:
    """Make the run's updates, evaluate and save on schedule, and finish.

    `data`: rows whose problems are reported at the end. `batch` returns the samples of an update, counted from 0.
    `objective_for` returns the objective of an update's samples. It may first set fields of the samples, for example
    reference log-probabilities. `learned` is called with the metrics of each update as (sum, count), before the
    checkpoint of its step, and may add metrics.
    """
    learner, steps = trainer.learner, trainer.steps
    if resume:
        trainer.resume()
    with trainer.working(console):
        trainer.begin()
        while trainer.step < steps and not trainer.audit_stops:
            with trainer.phase("rows"):
                samples = batch(trainer.step)
                objective = objective_for(samples)
            with trainer.interrupts.critical():
                before = learner.trained_tokens
                with trainer.phase("update"):
                    totals = learner.update(samples, objective)
                if learned is not None:
                    learned(totals)
                metrics = means(totals) | {"optimizer/learning_rate": learner.optimizer.learning_rate}
                metrics["tokens/trained"] = float(learner.trained_tokens - before)
                metrics["speed/tokens_per_second"] = metrics["tokens/trained"] / trainer.seconds["update"]
                trainer.finish_step(metrics)
                read = data.train.problems.summary() if data is not None and trainer.step == steps else []
                trainer.warn([*learner.take_warnings(), *read])
            trainer.evaluate_and_save(metrics)
        trainer.finish()
