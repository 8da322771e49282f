"""Running a pipeline: what is finished and unchanged is skipped, what changed is run again, and one line says why.

Lineage is kept in two files. `<run>/lineage.json` exists once a stage has finished: digests of its recipe, of what
it read, and of the model it exported. `<pipeline>/started.json` holds the first two for every stage begun, which tells an
interrupted stage that can be resumed from one whose recipe or inputs have changed since.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.errors import InputError
from posttrain.recipe.pipeline import PipelineRecipe, PipelineStage
from posttrain.runs.files import write_atomically
from posttrain.training.pipeline_report import report_pipeline
from posttrain.training.stage import run_stage

Lineage = dict[str, Any]
"""`{"recipe": digest, "inputs": {name: digest}, "outputs": {file: [bytes, digest]}}`; outputs once finished."""


def run_pipeline(
    pipeline: PipelineRecipe,
    *,
    only: str | None = None,
    start_from: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[Path]:
    """Run the stages that are not finished, in order, and return the run directories of all that were asked for.

    `only` runs one stage, `start_from` that stage and those after it; stages before them must be finished.
    `overwrite` runs stages again although nothing changed. Raises what `run_stage` raises; `InputError` for a stage
    that does not exist, or one whose upstream stage has not finished.
    """
    console = console or Console()
    chosen = _chosen(pipeline, only, start_from)
    for stage in chosen:
        lineage = _lineage(pipeline, stage)
        directory = pipeline.directory / stage.name
        reason, resume = ("--overwrite", False) if overwrite else _reason(pipeline, stage, lineage)
        if reason is None:
            console.print(f"stage {stage.name}: finished, nothing has changed", highlight=False)
            continue
        console.print(f"stage {stage.name}: {'goes on' if resume else 'runs'} ({reason})", highlight=False)
        _record_start(pipeline, stage, lineage)
        run_stage(stage.recipe, resume=resume, overwrite=not resume and directory.exists(), console=console)
        finished = lineage | {"outputs": _files(directory / "model", digests=True)}
        write_atomically(directory / "lineage.json", json.dumps(finished, indent=2) + "\n")
    report_pipeline(pipeline, console)
    return [pipeline.directory / stage.name for stage in chosen]


def _chosen(pipeline: PipelineRecipe, only: str | None, start_from: str | None) -> list[PipelineStage]:
    names = [stage.name for stage in pipeline.stages]
    for option, name in (("--only", only), ("--from", start_from)):
        if name is not None and name not in names:
            raise InputError(f"{option} {name}: the pipeline has no such stage; its stages are {', '.join(names)}")
    if only is not None and start_from is not None:
        raise InputError("--only and --from exclude each other; give one of them")
    if only is not None:
        return [stage for stage in pipeline.stages if stage.name == only]
    return pipeline.stages[names.index(start_from) :] if start_from is not None else pipeline.stages


def _reason(pipeline: PipelineRecipe, stage: PipelineStage, lineage: Lineage) -> tuple[str | None, bool]:
    """Why the stage must run (None: it need not), and whether it can be resumed."""
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


def _lineage(pipeline: PipelineRecipe, stage: PipelineStage) -> Lineage:
    """Digests of the stage's recipe and of everything it reads; where the runs are kept does not count."""
    recipe = stage.recipe.model_dump(mode="json", exclude={"runs", "sinks"})
    inputs: dict[str, str] = {}
    for name in stage.inputs:
        upstream = _read(pipeline.directory / name / "lineage.json")
        if not upstream:
            raise InputError(
                f"stage {stage.name} uses the model of {name}, which has not finished; "
                f"run `posttrain pipeline` without --only or --from, or with `--from {name}`"
            )
        inputs[f"stage {name}"] = _digest(upstream["outputs"])
        recipe = _renamed(recipe, str(pipeline.directory / name / "model"), f"the model of {name}")
    if stage.upstream is None and Path(stage.recipe.model.path).exists():
        inputs[f"the model {stage.recipe.model.path}"] = _digest(_files(Path(stage.recipe.model.path), digests=False))
    for path in _texts(recipe):
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


def _record_start(pipeline: PipelineRecipe, stage: PipelineStage, lineage: Lineage) -> None:
    file = pipeline.directory / "started.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(_read(file) | {stage.name: lineage}, indent=2) + "\n")


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
