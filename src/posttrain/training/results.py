"""The beginning and the end of a training run: what it is compared with, and the tables that say what came of it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from posttrain.plugins import pip_command
from posttrain.runs import events
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.runs.report import write_report
from posttrain.runs.tables import Table, write_results
from posttrain.training.evaluators import START, TRAINED, EpisodeEvaluator, Evaluator

if TYPE_CHECKING:
    from posttrain.training.trainer import Trainer


def measure_start(trainer: "Trainer") -> None:
    """Log what the run is compared with: reference players, and the model as it starts, on the final data."""
    values: dict[str, Any] = {}
    for measure in trainer.evaluators:
        for player, reference in measure.baselines().items():
            trainer.log.write(0, "baseline", {"policy": player, **reference})
        trainer.progress.message(f"{measure.cost()} with the model as it is")
        values |= measure.final(0)
    if values:
        trainer.log.write(0, "baseline", {"policy": START, **values})


def finish(trainer: "Trainer", console: Console) -> None:
    """Measure the best checkpoint on the final data, export it, and write tables, plots and report."""
    step = trainer.restore_best()
    values: dict[str, Any] = {}
    which = "best" if trainer.choice is not None else "last"
    for measure in trainer.evaluators:
        trainer.progress.message(f"{measure.cost()} with the {which} checkpoint, step {step}")
        values |= measure.final(trainer.step)
    trainer.warn(events.drain())
    if values:
        chosen = "best on the curve's data" if trainer.choice is not None else "the last one"
        line = {"policy": TRAINED, "best_step": step, "chosen": chosen, **values}
        trainer.log.write(trainer.step, "final", line)
    if find_spec("matplotlib") is None:
        trainer.warn(
            [f"no figures are drawn without matplotlib; run `{pip_command('matplotlib')}`, then `posttrain plot`"]
        )
    directory = trainer.run.path / "model"
    trainer.model.export(directory)
    trainer.world.on_rank0(lambda: _report(trainer, directory, console))


def _report(trainer: "Trainer", directory: Path, console: Console) -> None:
    """Write tables, plots and report, and say where they are."""
    tables = write_tables(trainer.run, trainer.evaluators)
    draw_plots(trainer.run)
    write_report(trainer.run, tables, model_directory=directory)
    for table in tables:
        console.print(table.rich())
    for measure in trainer.evaluators:
        for text in measure.artefacts():
            console.print(text, highlight=False, markup=False)
    console.print(f"report: {trainer.run.report}\nmodel: {directory}", highlight=False)


def draw_plots(run: RunDirectory) -> None:
    """The run's figures; none where matplotlib is not installed, which `finish` has reported."""
    if find_spec("matplotlib") is None:
        return
    from posttrain.runs import plots

    plots.draw_plots(run)


def write_tables(run: RunDirectory, measures: Sequence[Evaluator]) -> list[Table]:
    """The final tables, from the metrics; `results.json` holds them for programs."""
    lines: dict[str, dict[str, Any]] = {}
    for line in read_metrics(run.metrics):
        if line["kind"] in ("baseline", "final"):
            lines[line["policy"]] = line
    tables = [table for measure in measures for table in measure.tables(lines)]
    rows = [row for measure in measures if isinstance(measure, EpisodeEvaluator) for row in measure.rows(lines)]
    write_results(run.path, tables, rows)
    return tables
