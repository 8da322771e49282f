"""The table of a whole pipeline: every stage's model beside the same reference players."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from posttrain.recipe.pipeline import PipelineRecipe
from posttrain.runs.files import write_atomically
from posttrain.runs.report import ReportRow, markdown_rows, rows_table
from posttrain.training.table import read_results

UNTRAINED = "untrained model"


def combined_rows(pipeline: PipelineRecipe) -> list[ReportRow]:
    """Random policy, the model before any stage, the model after each finished stage, optimal policy.

    Only stages that play the same environment on the same final seeds as the last one share a table with it.
    """
    finished = [stage for stage in pipeline.stages if (pipeline.directory / stage.name / "results.json").is_file()]
    if not finished:
        return []
    last = finished[-1].recipe
    rows: list[ReportRow] = []
    references: dict[str, ReportRow] = {}
    for stage in finished:
        recipe = stage.recipe
        if (recipe.environment, recipe.evaluation.final_seeds) != (last.environment, last.evaluation.final_seeds):
            continue
        for row in read_results(pipeline.directory / stage.name):
            if row.player in ("random policy", "optimal policy"):
                references[row.player] = row
            elif row.player != "start of this run":
                rows.append(replace(row, player=f"after {stage.name}"))
            elif stage.upstream is None and not rows:
                rows.append(replace(row, player=UNTRAINED))
    first = [references["random policy"]] if "random policy" in references else []
    return [*first, *rows, *([references["optimal policy"]] if "optimal policy" in references else [])]


def report_pipeline(pipeline: PipelineRecipe, console: Console) -> Path | None:
    """Print the combined table and write it to `<pipeline>/report.md`, with links to the stages' own reports."""
    rows = combined_rows(pipeline)
    if not rows:
        return None
    environment = pipeline.stages[-1].recipe.environment.type
    links = [f"- [{stage.name}]({stage.name}/report.md)" for stage in pipeline.stages]
    text = (
        f"# {pipeline.name}: {environment}\n\n{markdown_rows(rows)}\n\n`n` held-out environment seeds, the same for "
        "every player; 95% intervals over seeds.\n\n## Stages\n\n" + "\n".join(links) + "\n"
    )
    report = pipeline.directory / "report.md"
    write_atomically(report, text)
    console.print(rows_table(rows, title=f"{pipeline.name}: {environment}, held-out seeds"))
    console.print(f"report: {report}", highlight=False)
    return report
