"""Running a pipeline: stages in order, skipping those that are finished and unchanged, with one line per stage.

A finished stage writes `lineage.json`: digests of its recipe, its inputs and its outputs. A stage runs again if its
recipe or one of its inputs has changed.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.data.convert import convert_files
from posttrain.errors import InputError
from posttrain.planning.dry_run import tasks_of
from posttrain.recipe.components import environment_class
from posttrain.recipe.pipeline import STAGE, ConvertRecipe, PipelineRecipe, PipelineStage
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.run import LOGGED_IN
from posttrain.recipe.sources import texts
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.recipe.warnings import thinking_differs
from posttrain.rollout.store import stored_steps
from posttrain.runs.directory import write_atomically
from posttrain.runs.evaluated import evaluated_checkpoints
from posttrain.runs.reader import is_file, read_json
from posttrain.runs.report import Report
from posttrain.runs.sources import open_sources
from posttrain.runs.storage import STARTED
from posttrain.runs.tables import (
    IMPROVED,
    START,
    PolicyRow,
    evaluated_table,
    policy_tables,
    read_run_results,
    read_verdict,
    show_line,
)
from posttrain.stages import run_stage
from posttrain.terminal import new_console

Lineage = dict[str, Any]
"""`{"recipe": digest, "inputs": {name: digest}, "outputs": {file: [bytes, digest]}}`; `outputs` once finished."""
UNTRAINED = "untrained model"
_MISSING = ""
"""The digest of an upstream model that does not exist."""


def run_pipeline(
    pipeline: PipelineRecipe,
    *,
    only: str | None = None,
    start_from: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    check_trained: Callable[[Path], None] | None = None,
) -> list[Path]:
    """Run the unfinished stages in order and return the run directories of all selected stages that are runs.

    Args:
        only: run only this stage. Earlier stages must have finished. Their models are used unchanged, with a warning if
            the current recipe would produce a different model.
        start_from: like `only`, for this stage and those after it.
        overwrite: run the selected stages even if nothing has changed.
        check_trained: called with the run of each selected stage that trains a model, when it has finished. Their recipes
            are checked first: a stage that cannot show that it learned anything is an InputError.

    Raises:
        InputError: an unknown stage, or a stage whose upstream stage has not finished. Also raises the errors of
            `run_stage`.
    """
    console = console or new_console()
    selected = chosen_stages(pipeline, only, start_from)
    for line in out_of_date(pipeline, selected):
        show_line(console, line)
    strict = [stage for stage in selected if check_trained is not None and stage.recipe.trains]
    for stage in strict:
        _require_verdict(stage)
    for stage in selected:
        if missing := unfinished_upstream(pipeline, stage):
            raise InputError(
                f"stage {stage.name} uses {_made(pipeline, missing)}, which has not finished; "
                f"run `posttrain pipeline` without --only or --from, or with `--from {missing}`"
            )
        lineage = lineage_of(pipeline, stage)
        directory, started = pipeline.directory / stage.name, pipeline.directory / STARTED
        reason, resume = ("--overwrite", False) if overwrite else reason_to_run(pipeline, stage, lineage)
        if reason is None:
            show_line(console, f"stage {stage.name}: finished, nothing has changed")
        else:
            if stage in strict:  # an earlier stage may have written its rows since
                _require_verdict(stage)
            show_line(console, f"stage {stage.name}: {'resumes' if resume else 'runs'} ({reason})")
            pipeline.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(started, json.dumps(_read(started) | {stage.name: lineage}, indent=2) + "\n")
            if isinstance(stage.recipe, ConvertRecipe):
                _convert(stage.recipe, directory, console)
            else:
                run_stage(stage.recipe, resume=resume, overwrite=not resume and directory.exists(), console=console)
            finished = lineage | {"outputs": _outputs(directory, stage, digests=True)}
            write_atomically(directory / "lineage.json", json.dumps(finished, indent=2) + "\n")
        verdict = read_verdict(directory)
        if verdict is not None and verdict.outcome != IMPROVED:
            show_line(console, f"stage {stage.name}: {verdict.sentence}")
        if check_trained is not None and stage.recipe.trains:
            check_trained(directory)
    report_pipeline(pipeline, console)
    return [pipeline.directory / stage.name for stage in selected if not stage.files]


def _require_verdict(stage: PipelineStage) -> None:
    from posttrain.training.checks import require_verdict  # imports torch

    try:
        require_verdict(stage.recipe)
    except InputError as error:
        raise InputError(f"stage {stage.name}: {error}") from error


def _convert(recipe: ConvertRecipe, directory: Path, console: Console) -> None:
    """Write the files of a `convert` stage, and a report with the numbers of rows read, skipped and written."""
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        show_line(console, line)

    convert_files(recipe, directory, report)
    listed = "\n".join(f"- {line}" for line in lines)
    write_atomically(directory / "report.md", f"# {recipe.name}\n\nSource: {recipe.source or 'the hub'}\n\n{listed}\n")


def evaluate_checkpoints(recipe: EvaluateRecipe) -> PipelineRecipe:
    """Return the evaluations of all checkpoints at `recipe.model.path` as a pipeline, one stage for each.

    The path is a run, or a pattern of checkpoints such as `runs/run/checkpoints/step_00001*`. InputError if there are
    none.
    """
    path = recipe.model.path
    pattern = f"{path}/checkpoints/step_*" if (Path(path) / "checkpoints").is_dir() else path
    folders = [Path(match) for match in sorted(glob(pattern))]
    models = {folder: folder / "policy" if (folder / "policy").is_dir() else folder for folder in folders}
    models = {folder: model for folder, model in models.items() if list(model.glob("*config.json"))}
    if not models:
        raise InputError(
            f"model.path {path}: --all found no checkpoints; name a run with checkpoints, or a pattern in quotes, such as "
            "'runs/run/checkpoints/step_*'"
        )
    distinct = len({folder.name for folder in models}) == len(models)
    stages = []
    for folder, model in models.items():
        # RUN/checkpoints/step_N of several runs
        name = folder.name if distinct else f"{folder.parents[1].name}-{folder.name}"
        values = {"model": recipe.model.model_copy(update={"path": str(model)}), "name": name}
        values["runs"] = str(Path(recipe.runs) / recipe.name)
        stages.append(PipelineStage(name=name, recipe=recipe.model_copy(update=values)))
    return PipelineRecipe(name=recipe.name, runs=recipe.runs, stages=stages)


# -- planning ---------------------------------------------------------------------------------------------------------


def chosen_stages(pipeline: PipelineRecipe, only: str | None, start_from: str | None) -> list[PipelineStage]:
    """Return the stages selected by `--only` or `--from`, in order; InputError for an unknown stage."""
    names = [stage.name for stage in pipeline.stages]
    for option, name in (("--only", only), ("--from", start_from)):
        if name is not None and name not in names:
            raise InputError(f"{option} {name}: the pipeline has no such stage; its stages are {', '.join(names)}")
    if only is not None and start_from is not None:
        raise InputError("--only and --from exclude each other; use one of them")
    if only is not None:
        return [stage for stage in pipeline.stages if stage.name == only]
    return pipeline.stages[names.index(start_from) :] if start_from is not None else pipeline.stages


def planned(pipeline: PipelineRecipe, only: str | None, start_from: str | None, overwrite: bool) -> list[str]:
    """Return a line per stage: whether `run_pipeline` would run, resume or skip it, and why.

    InputError for an unknown stage.
    """
    selected = chosen_stages(pipeline, only, start_from)
    earlier = {stage.name: stage.recipe for stage in pipeline.stages}
    option = f"--only {only}" if only is not None else f"--from {start_from}"
    lines = out_of_date(pipeline, selected)
    running: set[str] = set()
    for stage in pipeline.stages:
        if stage not in selected:
            lines.append(f"stage {stage.name}: skipped ({option})")
            continue
        if missing := unfinished_upstream(pipeline, stage, running):
            made = _made(pipeline, missing)
            lines.append(f"stage {stage.name}: could not run; it uses {made}, which has not finished")
            running.add(stage.name)
            continue
        reason, resume = reason_to_run(pipeline, stage, lineage_of(pipeline, stage))
        if overwrite:
            reason, resume = "--overwrite", False
        state = "finished, nothing has changed"
        if reason is not None:
            state = f"would {'resume' if resume else 'run'} ({reason})"
        elif changing := [name for name in stage.inputs if name in running]:
            kind = "makes different files" if _converted(pipeline, changing[0]) else "exports a different model"
            state = f"would run if {' or '.join(changing)} {kind}"
        running |= {stage.name} if state.startswith("would") else set()
        lines.append(f"stage {stage.name}: {state}")
        for name in stage.inputs:
            origin = earlier[name]
            if isinstance(stage.recipe, ConvertRecipe) or isinstance(origin, ConvertRecipe):
                continue
            path = str(pipeline.directory / name / "model")
            differences = thinking_differs(stage.recipe, path, origin.model_dump(mode="json"), f"stage {name}")
            lines += [f"stage {stage.name}: warning: {warning}" for warning in differences]
    return lines


def unfinished_upstream(pipeline: PipelineRecipe, stage: PipelineStage, running: Collection[str] = ()) -> str | None:
    """Return a stage whose model or files `stage` uses and that is neither finished nor in `running`; None if there is
    none."""
    waiting = [name for name in stage.inputs if name not in running]
    return next((name for name in waiting if not _read(pipeline.directory / name / "lineage.json")), None)


def _converted(pipeline: PipelineRecipe, name: str) -> list[str]:
    """Return the names of the files that the stage `name` writes; empty if it exports a model."""
    return next(stage.files for stage in pipeline.stages if stage.name == name)


def _made(pipeline: PipelineRecipe, name: str) -> str:
    """The output of the stage `name`, in words."""
    return f"the {'files' if _converted(pipeline, name) else 'model'} of {name}"


def out_of_date(pipeline: PipelineRecipe, selected: Sequence[PipelineStage]) -> list[str]:
    """Return a warning per finished stage that `selected` use without running it, and that has changed."""
    names = {stage.name for stage in selected}
    used: set[str] = set()
    for stage in reversed(pipeline.stages):
        if stage.name in names | used:
            used.update(stage.inputs)
    lines = []
    for stage in pipeline.stages:
        name = stage.name
        if name not in used - names or not _read(pipeline.directory / name / "lineage.json"):
            continue
        reason, _ = reason_to_run(pipeline, stage, lineage_of(pipeline, stage))
        if reason is not None:
            lines.append(f"stage {name}: out of date ({reason}), but used; run it again with `--from {name}`")
    return lines


def reason_to_run(pipeline: PipelineRecipe, stage: PipelineStage, lineage: Lineage) -> tuple[str | None, bool]:
    """Return why the stage must run (None: it is up to date), and whether it can be resumed.

    `lineage` is the current one, from `lineage_of`.
    """
    directory = pipeline.directory / stage.name
    if not directory.exists():
        return "not run yet", False
    finished = _read(directory / "lineage.json")
    if not finished:
        started = _read(pipeline.directory / STARTED).get(stage.name, {})
        change = _change(started, lineage) if started else "it was not started by this pipeline"
        return (f"{change} after it was interrupted", False) if change else ("it was interrupted", not stage.files)
    if change := _change(finished, lineage):
        return change, False
    sizes = {name: size for name, (size, _) in _outputs(directory, stage, digests=False).items()}
    if {name: size for name, (size, _) in finished["outputs"].items()} == sizes:
        return None, False
    return f"{'its files were' if stage.files else 'its exported model was'} modified", False


# -- lineage ----------------------------------------------------------------------------------------------------------


def lineage_of(pipeline: PipelineRecipe, stage: PipelineStage) -> Lineage:
    """Return the digests of the stage's recipe and of its current inputs. The location of the runs does not matter."""
    if isinstance(stage.recipe, ConvertRecipe):
        source = Path(stage.recipe.source).expanduser() if stage.recipe.source is not None else None
        if source is None or not source.exists():
            return {"recipe": _digest(stage.recipe.model_dump(mode="json", exclude={"runs"})), "inputs": {}}
        # Only the rows matter, not the location of the folder.
        digest = _digest(_files(source, digests=True))
        recipe = stage.recipe.model_dump(mode="json", exclude={"runs", "source"})
        return {"recipe": _digest(recipe), "inputs": {"the data": digest}}
    text = json.dumps(stage.recipe.model_dump(mode="json", exclude=set(LOGGED_IN)))
    inputs: dict[str, str] = {}
    for name in stage.inputs:
        directory, upstream = pipeline.directory / name, _read(pipeline.directory / name / "lineage.json")
        inputs[f"{STAGE}{name}"] = _digest(upstream["outputs"]) if upstream else _MISSING
        made = {"model": f"the model of {name}"} | {file: f"{file} of {name}" for file in _converted(pipeline, name)}
        for file, instead in made.items():  # whole texts, which are in quotes
            text = text.replace(json.dumps(str(directory / file)), json.dumps(instead))
    recipe = json.loads(text)
    if stage.upstream is None and Path(stage.recipe.model.path).exists():
        model = Path(stage.recipe.model.path)
        # Files of two checkpoints have equal sizes, so use the digests in the checkpoint.
        sealed = _read(model.parent / "manifest.json").get("files", {})
        policy = {name: digest for name, digest in sealed.items() if name.startswith(f"{model.name}/")}
        inputs[f"the model {stage.recipe.model.path}"] = _digest(policy or _files(model, digests=False))
    for path in texts({key: value for key, value in recipe.items() if key != "out"}):
        path = path if Path(path).exists() else path.split(":")[0]
        if Path(path).is_file():
            inputs[f"the file {path}"] = _digest(_files(Path(path), digests=True))
        elif Path(path).is_dir() and path not in (".", "..") and "/" in path:
            inputs[f"the directory {path}"] = _digest(_files(Path(path), digests=False))
    return {"recipe": _digest(recipe), "inputs": inputs}


def _outputs(directory: Path, stage: PipelineStage, digests: bool) -> dict[str, list[Any]]:
    """Return the files of the stage's exported model, or its converted files, in the form of `_files`."""
    if not stage.files:
        return _files(directory / "model", digests)
    made = _files(directory, digests)
    return {name: made[name] for name in stage.files if name in made}


def _change(before: Lineage, now: Lineage) -> str | None:
    if before["recipe"] != now["recipe"]:
        return "its recipe has changed"
    changed = [name for name, digest in now["inputs"].items() if before["inputs"].get(name) != digest]
    return f"{changed[0]} has changed" if changed else None


def _files(root: Path, digests: bool) -> dict[str, list[Any]]:
    """Return name -> [size in bytes, digest of the content] of every file in or at `root`.

    Without `digests` they are empty.
    """
    paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    files: dict[str, list[Any]] = {}
    for path in paths:
        digest = ""
        if digests:
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
        files[str(path.relative_to(root))] = [path.stat().st_size, digest]
    return files


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; empty if the file is missing or truncated."""
    try:
        return read_json(file)
    except InputError:
        return {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# -- report -----------------------------------------------------------------------------------------------------------


def report_pipeline(pipeline: PipelineRecipe, console: Console) -> Path | None:
    """Print the results of the stages and write them to `<pipeline>/report.md`, with links to the stages' reports.

    Stages that play the same environment on the same tasks share one table, with a column of returns for each reward
    (`policy_tables`). The tables of other stages follow. Returns the path, or None if there are no results.
    """
    finished = _finished(pipeline)
    tables, played = [], played_stages(pipeline)
    for stages in played:
        title = f"{pipeline.name}: {_played(stages[0]).type}, held-out seeds"
        if len(played) > 1:
            title += f" of {', '.join(stage.name for stage in stages)}"
        tables += policy_tables(combined_rows(pipeline, stages), title)
    for stage in finished:
        stage_tables = read_run_results(pipeline.directory / stage.name).tables
        tables += [replace(table, title=f"{stage.name}: {table.title}") for table in stage_tables if not table.played]
    evaluated = open_sources([pipeline.directory / one.name for one in finished if one.recipe.stage == "evaluate"])
    groups = evaluated_checkpoints(evaluated)
    tables += filter(None, (evaluated_table(name, lines) for name, lines in groups.items()))
    if not tables:
        return None
    figures: list[Path] = []
    if groups and find_spec("matplotlib") is not None:
        from posttrain.figures.plots import draw_evaluated

        figures = draw_evaluated(groups, pipeline.directory / "plots")
    links = [f"[{stage.name}]({stage.name}/report.md)" for stage in pipeline.stages]
    report = pipeline.directory / "report.md"
    images = [(figure.stem, f"plots/{figure.name}") for figure in figures]
    write_atomically(report, Report(pipeline.name, tables=tables).markdown(images, titled=True, links=links))
    for table in tables:
        console.print(table)
    show_line(console, f"report: {report}")
    for stage in reversed(finished):
        run = pipeline.directory / stage.name
        steps = [stored.step for stored in stored_steps(run / "episodes") if stored.split == "train"]
        if steps:  # the last stage that trained on episodes
            figure = run / "plots" / "learning_curve.png"
            if figure.is_file():
                show_line(console, f"figure: {figure}")
            show_line(console, f"to see episodes: posttrain episodes {run} --step {max(steps)} --group 0")
            break
    return report


def played_stages(pipeline: PipelineRecipe) -> list[list[PipelineStage]]:
    """Return the finished stages with an environment, in groups that play the same one on the same final seeds. The group
    of the last stage is the first."""
    groups: list[tuple[Any, list[PipelineStage]]] = []
    for stage in reversed(_finished(pipeline)):
        if _played(stage) is None:
            continue
        played = _played(stage), tasks_of(stage.recipe).test  # type: ignore[arg-type]
        for other, stages in groups:
            if other == played:
                stages.insert(0, stage)
                break
        else:
            groups.append((played, [stage]))
    return [stages for _, stages in groups]


def combined_rows(pipeline: PipelineRecipe, stages: Sequence[PipelineStage]) -> list[PolicyRow]:
    """Return rows for the policies without a model, the model before any of `stages` and after each of them, and the
    optimal policy. `stages` are of one group of `played_stages`.

    The model before a stage is included again where another reward gives the returns.
    """
    before = ("random policy", *environment_class(_played(stages[0]).type).scripted_baselines)
    rows: list[PolicyRow] = []
    baselines: dict[str, PolicyRow] = {}
    for stage in stages:
        for row in read_run_results(pipeline.directory / stage.name).policies:
            if row.policy in (*before, "optimal policy"):
                baselines[row.policy] = row
            elif row.policy != START:
                name = stage.name if stage.recipe.stage == "evaluate" else f"after {stage.name}"
                rows.append(replace(row, policy=name))
            elif row.return_source not in {earlier.return_source for earlier in rows}:
                rows.append(replace(row, policy=f"after {stage.upstream}" if stage.upstream else UNTRAINED))
    first, last = ([baselines[one] for one in names if one in baselines] for names in (before, ["optimal policy"]))
    return [*first, *rows, *last]


def _finished(pipeline: PipelineRecipe) -> list[PipelineStage]:
    return [stage for stage in pipeline.stages if is_file(pipeline.directory / stage.name / "results.json")]


def _played(stage: PipelineStage) -> Any:
    """Return the environment of the stage's final table; None for a stage without an environment."""
    return evaluated_environment(stage.recipe)
