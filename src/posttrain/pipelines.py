"""Running a pipeline: what is finished and unchanged is skipped, what changed is run again, and one line says why."""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.pipeline import PipelineRecipe, PipelineStage
from posttrain.recipe.rollout import SeedRange
from posttrain.runs.files import write_atomically
from posttrain.runs.tables import PolicyRow, policy_tables, read_policies, read_tables
from posttrain.stages import run_stage
from posttrain.training.evaluators import START

Lineage = dict[str, Any]
"""`{"recipe": digest, "inputs": {name: digest}, "outputs": {file: [bytes, digest]}}`; outputs once finished."""
_UNFINISHED = ""
"""In place of the digest of an upstream stage's model that is not there."""


def unfinished_upstream(pipeline: PipelineRecipe, stage: PipelineStage, coming: Collection[str] = ()) -> str | None:
    """A stage whose model `stage` uses, and that has neither finished nor is among those `coming` before it."""
    missing = [name for name in stage.inputs if not _read(pipeline.directory / name / "lineage.json")]
    return next((name for name in missing if name not in coming), None)


def require_upstream(pipeline: PipelineRecipe, stage: PipelineStage) -> None:
    """`InputError` unless every stage whose model `stage` uses has finished."""
    if missing := unfinished_upstream(pipeline, stage):
        raise InputError(
            f"stage {stage.name} uses the model of {missing}, which has not finished; "
            f"run `posttrain pipeline` without --only or --from, or with `--from {missing}`"
        )


def out_of_date(pipeline: PipelineRecipe, chosen: Sequence[PipelineStage]) -> list[str]:
    """A line for each finished stage that is not `chosen`, is used by those, and would be made anew by the present
    recipe: its model is used as it is.
    """
    names = {stage.name for stage in chosen}
    used: set[str] = set()
    for stage in reversed(pipeline.stages):
        if stage.name in names | used:
            used.update(stage.inputs)
    lines = []
    for stage in pipeline.stages:
        if stage.name not in used - names or not _read(pipeline.directory / stage.name / "lineage.json"):
            continue
        reason, _ = reason_to_run(pipeline, stage, lineage_of(pipeline, stage))
        if reason is not None:
            remedy = f"`--from {stage.name}` makes it anew"
            lines.append(f"stage {stage.name}: out of date ({reason}), and used as it is; {remedy}")
    return lines


def reason_to_run(pipeline: PipelineRecipe, stage: PipelineStage, lineage: Lineage) -> tuple[str | None, bool]:
    """Why the stage must run (None: it need not), and whether it can be resumed. `lineage` is the present one."""
    directory = pipeline.directory / stage.name
    if not directory.exists():
        return "not run yet", False
    finished = _read(directory / "lineage.json")
    if not finished:
        started = _read(pipeline.directory / "started.json").get(stage.name, {})
        change = _change(started, lineage) if started else "it was not started by this pipeline"
        return (f"{change} after it was interrupted", False) if change else ("it was interrupted", True)
    if change := _change(finished, lineage):
        return change, False
    there = {name: size for name, (size, _) in finished["outputs"].items()}
    if there != {name: size for name, (size, _) in _files(directory / "model", digests=False).items()}:
        return "its exported model is not the one it wrote", False
    return None, False


def _change(before: Lineage, now: Lineage) -> str | None:
    if before["recipe"] != now["recipe"]:
        return "its recipe has changed"
    changed = [name for name, digest in now["inputs"].items() if before["inputs"].get(name) != digest]
    return f"{changed[0]} has changed" if changed else None


def lineage_of(pipeline: PipelineRecipe, stage: PipelineStage) -> Lineage:
    """Digests of the stage's recipe and of everything it would read now; where the runs are kept does not count."""
    recipe = stage.recipe.model_dump(mode="json", exclude={"runs", "sinks"})
    inputs: dict[str, str] = {}
    for name in stage.inputs:
        upstream = _read(pipeline.directory / name / "lineage.json")
        inputs[f"stage {name}"] = _digest(upstream["outputs"]) if upstream else _UNFINISHED
        recipe = _renamed(recipe, str(pipeline.directory / name / "model"), f"the model of {name}")
    if stage.upstream is None and Path(stage.recipe.model.path).exists():
        inputs[f"the model {stage.recipe.model.path}"] = _digest(_files(Path(stage.recipe.model.path), digests=False))
    for path in _texts({key: value for key, value in recipe.items() if key != "out"}):
        if path.split(":")[0] != path and not Path(path).exists():
            path = path.split(":")[0]
        if Path(path).is_file():
            inputs[f"the file {path}"] = _digest(_files(Path(path), digests=True))
        elif Path(path).is_dir() and path not in (".", "..") and "/" in path:
            inputs[f"the directory {path}"] = _digest(_files(Path(path), digests=False))
    return {"recipe": _digest(recipe), "inputs": inputs}


def _renamed(value: Any, path: str, name: str) -> Any:
    """`value` with every text `path` in it as `name`: where the runs are kept does not count."""
    if isinstance(value, dict):
        return {key: _renamed(inner, path, name) for key, inner in value.items()}
    return name if value == path else value


def _texts(value: Any) -> list[str]:
    """Every text in the recipe, among them the files that it reads."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) and value else [text for item in inner for text in _texts(item)]


def record_start(pipeline: PipelineRecipe, stage: PipelineStage, lineage: Lineage) -> None:
    """Keep what a stage is begun with."""
    file = pipeline.directory / "started.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(_read(file) | {stage.name: lineage}, indent=2) + "\n")


def record_finish(pipeline: PipelineRecipe, stage: PipelineStage, lineage: Lineage) -> None:
    """Keep what a finished stage was begun with and what it exported."""
    directory = pipeline.directory / stage.name
    finished = lineage | {"outputs": _files(directory / "model", digests=True)}
    write_atomically(directory / "lineage.json", json.dumps(finished, indent=2) + "\n")


def _files(root: Path, digests: bool) -> dict[str, list[Any]]:
    """Name -> [size in bytes, digest of the content, empty without `digests`] of every file in or at `root`."""
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    found: dict[str, list[Any]] = {}
    for path in files:
        digest = ""
        if digests:
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
        found[str(path.relative_to(root))] = [path.stat().st_size, digest]
    return found


def _read(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty when there is none or it was cut short."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


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


UNTRAINED = "untrained model"


def combined_rows(pipeline: PipelineRecipe) -> list[PolicyRow]:
    """Random policy, the model before any stage, the model after each finished stage, optimal policy.

    Only stages that play the same environment on the same final seeds as the last one share a table with it.
    """
    finished = [stage for stage in _finished(pipeline) if _played(stage) is not None]
    if not finished:
        return []
    last = _played(finished[-1])
    rows: list[PolicyRow] = []
    references: dict[str, PolicyRow] = {}
    for stage in finished:
        if _played(stage) != last:
            continue
        for row in read_policies(pipeline.directory / stage.name):
            if row.policy in ("random policy", "optimal policy"):
                references[row.policy] = row
            elif row.policy != START:
                rows.append(replace(row, policy=f"after {stage.name}"))
            elif not rows:
                rows.append(replace(row, policy=f"after {stage.upstream}" if stage.upstream else UNTRAINED))
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
        tables += policy_tables(rows, f"{pipeline.name}: {environment[0].type}, held-out seeds")
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
