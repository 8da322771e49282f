"""Which stages of a pipeline a call is about, and what it would do with each; runs nothing."""

from posttrain.errors import InputError
from posttrain.recipe.pipeline import PipelineRecipe, PipelineStage
from posttrain.training.pipeline_lineage import lineage_of, out_of_date, reason_to_run, unfinished_upstream


def chosen_stages(pipeline: PipelineRecipe, only: str | None, start_from: str | None) -> list[PipelineStage]:
    """The stages that `--only` or `--from` leaves, in order; `InputError` where there is no such stage."""
    names = [stage.name for stage in pipeline.stages]
    for option, name in (("--only", only), ("--from", start_from)):
        if name is not None and name not in names:
            raise InputError(f"{option} {name}: the pipeline has no such stage; its stages are {', '.join(names)}")
    if only is not None and start_from is not None:
        raise InputError("--only and --from exclude each other; give one of them")
    if only is not None:
        return [stage for stage in pipeline.stages if stage.name == only]
    return pipeline.stages[names.index(start_from) :] if start_from is not None else pipeline.stages


def planned(pipeline: PipelineRecipe, only: str | None, start_from: str | None, overwrite: bool) -> list[str]:
    """A line for every stage: it would run and why, could not, is finished, or is left out.

    `InputError` where there is no such stage.
    """
    chosen = chosen_stages(pipeline, only, start_from)
    option = f"--only {only}" if only is not None else f"--from {start_from}"
    lines = out_of_date(pipeline, chosen)
    running: set[str] = set()
    for stage in pipeline.stages:
        if stage not in chosen:
            lines.append(f"stage {stage.name}: skipped ({option})")
            continue
        if missing := unfinished_upstream(pipeline, stage, running):
            lines.append(f"stage {stage.name}: could not run; it uses the model of {missing}, which has not finished")
            running.add(stage.name)
            continue
        reason, resume = reason_to_run(pipeline, stage, lineage_of(pipeline, stage))
        again = [name for name in stage.inputs if name in running]
        if overwrite:
            reason, resume = "--overwrite", False
        if reason is not None:
            lines.append(f"stage {stage.name}: would {'go on' if resume else 'run'} ({reason})")
            running.add(stage.name)
        elif again:
            lines.append(f"stage {stage.name}: would run if {' or '.join(again)} exports another model than before")
            running.add(stage.name)
        else:
            lines.append(f"stage {stage.name}: finished, nothing has changed")
    return lines
