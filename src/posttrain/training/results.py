"""The results of a run: final tables, plots and report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import write_atomically
from posttrain.runs.metrics import read_metrics
from posttrain.runs.plots import draw_plots
from posttrain.runs.report import write_report
from posttrain.runs.tables import PlayRow, Table
from posttrain.training.evaluators import EpisodeEvaluator, Evaluator


def report_results(run: RunDirectory, evaluators: Sequence[Evaluator], model_directory: Path, console: Console) -> None:
    """Write tables, plots and report, and print the tables and where the files are."""
    tables = write_tables(run, evaluators)
    draw_plots(run)
    write_report(run, tables, model_directory=model_directory)
    for table in tables:
        console.print(table.rich())
    for evaluator in evaluators:
        for line in evaluator.artefacts():
            console.print(line, highlight=False, markup=False)
    console.print(f"report: {run.report}\nmodel: {model_directory}", highlight=False)


def write_tables(run: RunDirectory, evaluators: Sequence[Evaluator]) -> list[Table]:
    """The final tables, from the metrics log. Also writes them to `results.json`."""
    lines: dict[str, dict[str, Any]] = {}
    for line in read_metrics(run.metrics):
        if line["kind"] in ("baseline", "final"):
            lines[line["player"]] = line
    tables = [table for evaluator in evaluators for table in evaluator.tables(lines)]
    players = [
        asdict(row)
        for evaluator in evaluators
        if isinstance(evaluator, EpisodeEvaluator)
        for row in evaluator.rows(lines)
    ]
    content = {"tables": [table.values() for table in tables], "players": players}
    write_atomically(run.path / "results.json", json.dumps(content, indent=1) + "\n")
    return tables


def read_players(path: Path) -> list[PlayRow]:
    """The rows of the environment's table of the run at `path`; empty for a run without an environment."""
    return [_play_row(row) for row in _results(path)["players"]]


def read_tables(path: Path) -> list[Table]:
    """The final tables of the run at `path`."""
    return [
        Table(**{**table, "headings": tuple(table["headings"]), "rows": [tuple(row) for row in table["rows"]]})
        for table in _results(path)["tables"]
    ]


def _results(path: Path) -> dict[str, Any]:
    return json.loads((path / "results.json").read_text(encoding="utf-8"))


def _play_row(values: Mapping[str, Any]) -> PlayRow:
    limits = {key: tuple(values[key]) if values[key] else None for key in ("interval", "return_interval")}
    scores = {name: tuple(score) for name, score in values.get("scores", {}).items()}
    return PlayRow(**{**values, **limits, "scores": scores})
