"""What a pipeline's stages were made from, and which of them have to run again.

Lineage is kept in two files. `<run>/lineage.json` exists once a stage has finished: digests of its recipe, of what
it read, and of the model it exported. `<pipeline>/started.json` holds the first two for every stage begun, which tells an
interrupted stage that can be resumed from one whose recipe or inputs have changed since.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.pipeline import PipelineRecipe, PipelineStage
from posttrain.runs.files import write_atomically

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
