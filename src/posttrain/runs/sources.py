"""What is plotted and reported together: runs and TensorBoard logs, each with its metrics under a name of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import Line

_OURS = ("train", "evaluation")
"""Kinds of lines whose metrics are drawn. A sink names its tags `kind/metric`; of `baseline`, `final` and `warning` lines
the words, such as which player it was, are not in an event file."""
_NOT_DRAWN = ("baseline", "final", "warning")


def event_directories(path: Path) -> list[Path]:
    """What TensorBoard takes for one run each: the file `path`, or the directories with event files from `path` down."""
    if path.is_file():
        return [path]
    return sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()})


def read_events(path: Path) -> list[Line]:
    """The scalars of an event file, or of the event files of one directory, in order of step.

    Tags that a run's `tensorboard` sink wrote get the names that they have in metrics.jsonl; any other tag is a metric
    of training under its own name. Where a step was written twice, as by a resumed run, the later value stands.
    `InputError` where tensorboard is not installed, or nothing in `path` is a scalar.
    """
    values = _scalars(path)
    if not values:
        raise InputError(
            f"{path} holds no scalars; give an event file of TensorBoard (its name holds `tfevents`), a directory of "
            "such files, or the directory of a posttrain run"
        )
    ours = all(tag.partition("/")[0] in (*_OURS, *_NOT_DRAWN) for tag in values)
    lines: dict[tuple[str, int], Line] = {}
    for tag, points in values.items():
        kind, key = tag.split("/", 1) if ours else ("train", tag)
        if kind in _NOT_DRAWN:
            continue
        for step, value in points.items():
            line = lines.setdefault((kind, step), {"step": step, "kind": kind})
            line[key] = value if math.isfinite(value) else None
            if line[key] is None:
                line.setdefault("nonfinite", []).append(key)
    return [lines[place] for place in sorted(lines, key=lambda place: (place[1], place[0]))]


def _scalars(path: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value."""
    purpose = f"{path}: an event file"
    accumulator = require_module("tensorboard.backend.event_processing.event_accumulator", purpose)
    tensor_util = require_module("tensorboard.util.tensor_util", purpose)
    everything = {"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1}
    events = accumulator.EventAccumulator(str(path), size_guidance=everything)
    try:
        events.Reload()
    except Exception as error:  # of whatever kind: its readers raise as they like
        raise InputError(
            f"{path} cannot be read as event files ({error}); give files that TensorBoard shows"
        ) from error
    tags = events.Tags()
    found = {tag: {point.step: float(point.value) for point in events.Scalars(tag)} for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        # TensorFlow 2 writes scalars as tensors without dimensions.
        points = {point.step: tensor_util.make_ndarray(point.tensor_proto) for point in events.Tensors(tag)}
        found[tag] = {s: float(v) for s, v in points.items() if v.shape == () and v.dtype.kind in "fiu"}
    return {tag: points for tag, points in found.items() if points}


@dataclass(frozen=True)
class Source:
    """One run, or one log of TensorBoard."""

    name: str
    """Unlike those of the others."""
    path: Path
    lines: list[Line]
    recipe: Mapping[str, Any] | None = None
    """As its file says it, unchecked, since an older version may have written it; None where it is not known."""
    run: RunDirectory | None = None
    """None for a log of TensorBoard."""

    @property
    def stage(self) -> str | None:
        return None if self.recipe is None else self.recipe.get("stage")

    @property
    def seed(self) -> int | None:
        return None if self.recipe is None else self.recipe.get("seed")

    @property
    def steps(self) -> int:
        """The last training step so far."""
        return max((line["step"] for line in self.lines if line["kind"] == "train"), default=0)

    @property
    def unfinished(self) -> str | None:
        """How far a run has come that has not ended, as `3 of 60 steps`; None for one that has, or where it is not known."""
        steps = None if self.recipe is None else self.recipe.get("steps")
        ended = any(line["kind"] == "final" for line in self.lines)
        return f"{self.steps} of {steps} steps" if isinstance(steps, int) and not ended else None


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Every run and log of `paths`; a directory of logs may hold several.

    `InputError` for what is neither, and for a path given twice; `RunError` for damaged metrics.
    """
    places: list[Path] = []
    for path in paths:
        places += [path] if _may_be_run(path) else event_directories(path) or [path]
    whole = [place.resolve() for place in places]
    for place, resolved in zip(places, whole, strict=True):
        if whole.count(resolved) > 1:
            raise InputError(f"{place} is given twice; give every run once")
    return [_open(place, name) for place, name in zip(places, _names(whole), strict=True)]


def _may_be_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file() or (path / "environment.json").is_file()


def _open(path: Path, name: str) -> Source:
    if path.is_file() or (not _may_be_run(path) and event_directories(path)):
        return Source(name, path, read_events(path))
    run = RunDirectory.open(path)
    return Source(name, path, read_metrics(run.metrics), _recipe(run), run)


def _recipe(run: RunDirectory) -> Mapping[str, Any] | None:
    try:
        recipe = yaml.safe_load(run.recipe_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return recipe if isinstance(recipe, dict) else None


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many parts before it as it takes to tell all of them apart."""
    most = max((len(path.parts) for path in paths), default=1)
    for parts in range(1, most + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names if paths else []
