"""What the page of one run shows."""

from pathlib import Path
from typing import Any

from posttrain.errors import InputError, PosttrainError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.reader import read_text
from posttrain.runs.report import changed_rows, run_facts
from posttrain.runs.tables import Table, read_tables
from posttrain.view.charts import Logs, charts_of, marks_of


def charts(logs: Logs, path: Path) -> dict[str, Any]:
    """The charts of a run, and what happened at which step."""
    lines = logs.read(path / "metrics.jsonl")
    marks = [{"step": mark.step, "kind": mark.kind, "text": mark.text} for mark in marks_of(lines)]
    return {"charts": charts_of(lines), "marks": marks}


def result_tables(run: RunDirectory, missing: list[str]) -> list[Table]:
    """The final tables of a run, if it has any. Why they cannot be read is added to `missing`."""
    if not (run.path / "results.json").exists():
        return []
    try:
        return read_tables(run.path)
    except InputError as error:
        missing.append(f"{error}; the final tables are missing")
        return []


def facts(logs: Logs, path: Path) -> dict[str, Any]:
    """The recipe of a run, what differs from the defaults, and its machine. What cannot be read is in `missing`."""
    run, missing = RunDirectory(path), list[str]()
    shown: dict[str, Any] = {"facts": [], "changed": [], "recipe": "", "tables": [], "missing": missing}
    shown["tables"] = result_tables(run, missing)
    try:
        shown["facts"] = run_facts(run, logs.read(run.metrics))
        shown["changed"] = changed_rows(run)
    except PosttrainError as error:
        missing.append(str(error))
    try:
        shown["recipe"] = read_text(run.recipe_file)
    except InputError as error:
        missing.append(str(error))
    return shown
