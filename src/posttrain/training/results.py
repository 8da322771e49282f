"""The results of a training run: final tables, plots and report."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.evaluation.verdict import run_verdict
from posttrain.recipe.rollout import evaluated_environment, return_source
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.runs.report import write_report
from posttrain.runs.tables import EVALUATED, START, TRAINED, Results, Table, read_verdict, show_line, write_results
from posttrain.training.evaluators import EpisodeEvaluator, Evaluator


def report_results(
    run: RunDirectory, evaluators: Sequence[Evaluator], model_directory: Path, console: Console, plots: bool
) -> None:
    """Write tables, plots (if `plots`) and report, and print the tables and where the files are."""
    tables = write_tables(run, evaluators)
    if plots and find_spec("matplotlib") is not None:  # `Trainer.finish` warns if it is not installed
        from posttrain.figures import trajectories
        from posttrain.figures.plots import draw_plots

        draw_plots(run)
        trajectories.draw_run(run, evaluated_environment(run.load_recipe(to_run=True)))
    write_report(run, model_directory)
    for table in tables:
        console.print(table)
    for evaluator in evaluators:
        for line in evaluator.artifacts:
            console.print(line, highlight=False, markup=False)
    for line in (f"report: {run.report}", f"model: {model_directory}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    verdict = read_verdict(run.path)
    audits = [line["message"] for line in read_metrics(run.metrics) if line["kind"] == "audit" and "message" in line]
    lines = verdict.lines if verdict is not None else ()
    for line in [*lines, *(one for one in audits[-1:] if not any(one in shown for shown in lines))]:
        show_line(console, line)


def write_tables(run: RunDirectory, evaluators: Sequence[Evaluator]) -> list[Table]:
    """The final tables, from the metrics log. Also writes them to `results.json`."""
    lines: dict[str, dict[str, Any]] = {}
    recipe = run.load_recipe(to_run=True)
    for line in read_metrics(run.metrics):
        if line["kind"] in ("baseline", "final"):
            of_model = line["policy"] in (START, TRAINED, EVALUATED)
            lines[line["policy"]] = {**line, "return_source": return_source(recipe, of_model)}
    tables = [table for evaluator in evaluators for table in evaluator.tables(lines)]
    played = [each for each in evaluators if isinstance(each, EpisodeEvaluator)]
    tasks = {part: listed for each in played for part, listed in each.listed_tasks().items()}
    rows = [row for each in played for row in each.rows(lines)]
    verdict = run_verdict(run) if TRAINED in lines else None
    write_results(run.path, Results(tables, rows, tasks, return_source(recipe), verdict))
    return tables
