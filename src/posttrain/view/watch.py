"""`posttrain watch`: the terminal display of a run that another process trains."""

import time
from pathlib import Path

from rich.console import Console

from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import Line, read_log
from posttrain.runs.metrics import Progress, parse_line, read_metrics
from posttrain.runs.tables import headline
from posttrain.terminal import new_console
from posttrain.view.run_pages import Growing, result_tables
from posttrain.view.scan import summarize

_POLL_SECONDS = 0.5
_SHOWN = 20
"""Number of earlier lines that are printed first."""


def watch_run(path: Path, console: Console | None = None) -> None:
    """Print the last lines of the run, then each new one, the final tables, and how it ended."""
    run, console = RunDirectory.open(path), console or new_console(highlight=False)
    recipe = run.load_recipe()
    start = summarize(run.path.name, run, running=False).step
    file, title = Growing(run.metrics), f"{recipe.stage} {recipe.name}"
    with Progress(getattr(recipe, "steps", None) or 1, title, start, console) as progress:
        shown = 0
        while True:
            running = run.is_running()  # before the lines, so that none is missed at the end
            lines, replaced = file.added()
            if replaced and shown:  # what came after the checkpoint was taken back
                progress.message("the run was resumed from an earlier step")
            elif len(lines) > _SHOWN and not shown:
                progress.message(f"{len(lines) - _SHOWN} earlier lines are not shown")
            for raw in lines[-_SHOWN:] if replaced else lines:
                _show(progress, _parsed(run, raw))
            shown += len(lines)
            if not running:
                break
            time.sleep(_POLL_SECONDS)
    for table in result_tables(run, []):
        console.print(table)
    console.print(_ending(run), markup=False, soft_wrap=True)


def _parsed(run: RunDirectory, raw: bytes) -> Line:
    try:
        return parse_line(raw)
    except ValueError:
        return read_metrics(run.metrics)[-1]  # raises the error with the number of the line


def _ending(run: RunDirectory) -> str:
    """How the run ended, as one sentence."""
    summary = summarize(run.path.name, run, running=False)
    if summary.state == "failed":
        return summary.reason
    if summary.state == "finished":
        return headline(read_log(run.metrics)) or f"{run.path} finished after step {summary.step}"
    advice = "" if summary.stage == "evaluate" else f"; `posttrain {summary.stage} --resume {run.path}` continues it"
    return f"{run.path} stopped after step {summary.step}{advice}"


def _show(progress: Progress, line: Line) -> None:
    if line["kind"] in ("train", "evaluation"):
        progress.update(line["step"], line)
    elif line["kind"] == "warning":
        progress.message(f"step {line['step']}: {line.get('message', '')}")
