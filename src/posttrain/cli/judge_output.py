"""How `posttrain evaluate judge` shows what it does, and keeps and shows what came of it."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from posttrain.evaluation.judged import Judgement
    from posttrain.evaluation.rubrics import Question


def preview(questions: Sequence["Question"]) -> None:
    """The first prompt as it would be sent, and how many there are."""
    for message in questions[0].prompt if questions else []:
        typer.echo(f"--- {message['role']}\n{message['content']}")
    typer.echo(f"--- {len(questions):,} such requests, fewer where the cache knows the reply")


@contextmanager
def progress() -> Iterator[Callable[[int, int, int], None]]:
    """A bar in a terminal, ten lines elsewhere."""
    if not sys.stderr.isatty():
        yield _lines
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("judging", total=None)

        def update(done: int, total: int, failed: int) -> None:
            about = f"judging, {failed} without a verdict" if failed else "judging"
            bar.update(task, completed=done, total=total, description=about)

        yield update


def _lines(done: int, total: int, failed: int) -> None:
    if done * 10 // total > (done - 1) * 10 // total:
        typer.echo(f"judged {done:,} of {total:,}{f', {failed:,} without a verdict' if failed else ''}", err=True)


def keep(found: "Judgement", records: Path) -> None:
    """Write the records, and the numbers beside them."""
    from posttrain.runs.files import storage_errors, write_atomically

    with storage_errors(records):
        records.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(records, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found.records))
    if found.results.measured:
        found.results.write(records.with_suffix(".json"))
    else:
        # Numbers of an earlier try would be taken for those of this one.
        records.with_suffix(".json").unlink(missing_ok=True)


def show(found: "Judgement", records: Path, kept: Path) -> None:
    """Print what was found; RunError where the server failed or nothing could be scored."""
    from rich.console import Console

    from posttrain.errors import RunError

    if found.results.measured:
        table = found.results.table()
        Console(highlight=False).print(table.rich())
        typer.echo(table.note)
    for line in [*found.results.remarks(), *found.remarks]:
        typer.echo(line)
    typer.echo(f"records: {records}" + (f", numbers: {records.with_suffix('.json')}" if found.results.measured else ""))
    if found.unanswered:
        raise RunError(
            f"the judge did not answer for {found.unanswered:,} of {len(found.records):,} rows, which have no score; run "
            f"the same command again to ask for these alone (what it said is in {kept})"
        )
    if not found.results.measured:
        raise RunError(
            "no row has a score; read the records, try a judge that follows instructions better, or --structured"
        )
