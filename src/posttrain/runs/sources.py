"""What is plotted and reported together: runs and TensorBoard logs, each with its metrics under a name of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.event_files import event_directories, read_events
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import Line


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
