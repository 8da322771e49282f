"""Running a pipeline: what is finished and unchanged is skipped, what changed is run again, and one line says why."""

from pathlib import Path

from rich.console import Console

from posttrain.recipe.pipeline import PipelineRecipe
from posttrain.training.pipeline_lineage import (
    lineage_of,
    out_of_date,
    reason_to_run,
    record_finish,
    record_start,
    require_upstream,
)
from posttrain.training.pipeline_plan import chosen_stages
from posttrain.training.pipeline_report import report_pipeline
from posttrain.training.stage import run_stage


def run_pipeline(
    pipeline: PipelineRecipe,
    *,
    only: str | None = None,
    start_from: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[Path]:
    """Run the stages that are not finished, in order, and return the run directories of all that were asked for.

    `only` runs one stage, `start_from` that stage and those after it; stages before them must be finished, and are
    used as they are, which is said of those that the present recipe would make anew. `overwrite` runs stages again
    although nothing changed. Raises what `run_stage` raises; `InputError` for a stage that does not exist, or one
    whose upstream stage has not finished.
    """
    console = console or Console()
    chosen = chosen_stages(pipeline, only, start_from)
    for line in out_of_date(pipeline, chosen):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for stage in chosen:
        require_upstream(pipeline, stage)
        lineage = lineage_of(pipeline, stage)
        directory = pipeline.directory / stage.name
        reason, resume = ("--overwrite", False) if overwrite else reason_to_run(pipeline, stage, lineage)
        if reason is None:
            console.print(f"stage {stage.name}: finished, nothing has changed", highlight=False)
            continue
        console.print(f"stage {stage.name}: {'goes on' if resume else 'runs'} ({reason})", highlight=False)
        record_start(pipeline, stage, lineage)
        run_stage(stage.recipe, resume=resume, overwrite=not resume and directory.exists(), console=console)
        record_finish(pipeline, stage, lineage)
    report_pipeline(pipeline, console)
    return [pipeline.directory / stage.name for stage in chosen]
