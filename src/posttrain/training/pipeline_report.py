"""The table of a whole pipeline: every stage's model beside the same reference players."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.pipeline import PipelineRecipe, PipelineStage
from posttrain.recipe.rollout import SeedRange
from posttrain.runs.files import write_atomically
from posttrain.runs.tables import PlayRow, play_tables
from posttrain.training.measure import START
from posttrain.training.table import read_players, read_tables

UNTRAINED = "untrained model"


def combined_rows(pipeline: PipelineRecipe) -> list[PlayRow]:
    """Random policy, the model before any stage, the model after each finished stage, optimal policy.

    Only stages that play the same environment on the same final seeds as the last one share a table with it.
    """
    finished = [stage for stage in _finished(pipeline) if _played(stage) is not None]
    if not finished:
        return []
    last = _played(finished[-1])
    rows: list[PlayRow] = []
    references: dict[str, PlayRow] = {}
    for stage in finished:
        if _played(stage) != last:
            continue
        for row in read_players(pipeline.directory / stage.name):
            if row.player in ("random policy", "optimal policy"):
                references[row.player] = row
            elif row.player != START:
                rows.append(replace(row, player=f"after {stage.name}"))
            elif not rows:
                rows.append(replace(row, player=f"after {stage.upstream}" if stage.upstream else UNTRAINED))
    first = [references["random policy"]] if "random policy" in references else []
    return [*first, *rows, *([references["optimal policy"]] if "optimal policy" in references else [])]


def report_pipeline(pipeline: PipelineRecipe, console: Console) -> Path | None:
    """Print what the stages measured and write it to `<pipeline>/report.md`, with links to the stages' own reports.

    Stages that played one environment share one table; every other stage shows its own.
    """
    rows = combined_rows(pipeline)
    tables = []
    if rows:
        last = next(stage for stage in reversed(_finished(pipeline)) if _played(stage) is not None)
        environment = _played(last)
        assert environment is not None
        tables += play_tables(rows, f"{pipeline.name}: {environment[0].type}, held-out seeds")
    for stage in _finished(pipeline):
        own = read_tables(pipeline.directory / stage.name)
        tables += [replace(table, title=f"{stage.name}: {table.title}") for table in own if not table.played]
    if not tables:
        return None
    links = [f"- [{stage.name}]({stage.name}/report.md)" for stage in pipeline.stages]
    parts = [f"# {pipeline.name}"]
    parts += [f"## {table.title}\n\n{table.markdown()}\n\n{table.note}" for table in tables]
    report = pipeline.directory / "report.md"
    write_atomically(report, "\n\n".join([*parts, "## Stages", "\n".join(links)]) + "\n")
    for table in tables:
        console.print(table.rich())
    console.print(f"report: {report}", highlight=False)
    return report


def _finished(pipeline: PipelineRecipe) -> list[PipelineStage]:
    return [stage for stage in pipeline.stages if (pipeline.directory / stage.name / "results.json").is_file()]


def _played(stage: PipelineStage) -> tuple[EnvironmentRecipe, SeedRange] | None:
    """The environment and the final seeds that the stage plays; None for a stage without an environment."""
    environment = getattr(stage.recipe, "environment", None)
    if environment is None:
        return None
    return environment, stage.recipe.evaluation.final_seeds  # type: ignore[union-attr]
