"""`posttrain watch`: the terminal display of a run that another process trains."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import Progress
from posttrain.runs.panels import Line
from posttrain.runs.tables import headline
from posttrain.terminal import new_console
from posttrain.view.charts import Logs
from posttrain.view.run_pages import result_tables
from posttrain.view.scan import summarize

_POLL_SECONDS = 0.5
_SHOWN = 20
"""Number of earlier lines that are printed first."""


def watch_run(path: Path, console: Console | None = None) -> None:
    """Print the last lines of the run, then each new one, the final tables, and how it ended."""
    run, console = RunDirectory.open(path), console or new_console(highlight=False)
    recipe = run.load_recipe()
    logs, printed = Logs(), 0
    lines = logs.read(run.metrics)
    title, steps = f"{recipe.stage} {recipe.name}", getattr(recipe, "steps", None) or 1
    start = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
    with Progress(steps, title, start, console) as progress:
        hidden = max(0, len(lines) - _SHOWN)
        if hidden:
            progress.message(f"{hidden} earlier lines are not shown")
        printed = hidden
        while True:
            running = run.is_running()  # before the lines, so that none is missed at the end
            lines = logs.read(run.metrics)
            if len(lines) < printed:  # a resumed run took back what came after its checkpoint
                progress.message("the run was resumed from an earlier step")
                printed = len(lines)
            for line in lines[printed:]:
                _show(progress, line)
            printed = len(lines)
            if not running:
                break
            time.sleep(_POLL_SECONDS)
    for table in result_tables(run, []):
        console.print(table)
    console.print(_ending(run, lines), markup=False, soft_wrap=True)


def _ending(run: RunDirectory, lines: list[Line]) -> str:
    """How the run ended, as one sentence."""
    summary = summarize(run.path.name, run, running=False)
    if summary.state == "failed":
        return summary.reason
    if summary.state == "finished":
        return headline(lines) or f"{run.path} finished after step {summary.step}"
    advice = "" if summary.stage == "evaluate" else f"; `posttrain {summary.stage} --resume {run.path}` continues it"
    return f"{run.path} stopped after step {summary.step}{advice}"


def _show(progress: Progress, line: dict[str, Any]) -> None:
    if line["kind"] in ("train", "evaluation"):
        progress.update(line["step"], line)
    elif line["kind"] == "warning":
        progress.message(f"step {line['step']}: {line.get('message', '')}")
