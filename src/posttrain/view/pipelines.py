"""Pipelines as a graph of stages: from the records that `posttrain pipeline` leaves in the stages' directories."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.recipe.pipeline import STAGE
from posttrain.view.scan import Scanner, State, Summary

WIDTH, HEIGHT, GAP_X, GAP_Y = 230, 84, 60, 26
"""Size of the box of a stage, and the space between boxes, in pixels."""


@dataclass(frozen=True)
class Stage:
    """One box of the graph."""

    name: str
    state: State
    run: Summary | None
    """None for a stage that converts data."""
    inputs: tuple[str, ...]
    x: int
    y: int


@dataclass(frozen=True)
class Graph:
    """The stages of a pipeline with their places."""

    stages: list[Stage]
    arrows: list[tuple[int, int, int, int]]
    """From x, y to x, y."""
    width: int
    height: int


def pipelines_among(found: Mapping[str, Path]) -> list[str]:
    """The names of the pipelines that the runs in `found` are stages of."""
    parents = {
        name.rpartition("/")[0]: path.parent for name, path in found.items() if (path / "lineage.json").is_file()
    }
    return sorted(name for name in parents if name)


def graph_of(scanner: Scanner, name: str) -> Graph:
    """The graph of the pipeline `name`, stages to the right of those that they use."""
    found = scanner.find()
    folder = scanner.folder / name
    started = _read(folder / "started.json")
    inputs = {stage: _inputs(record) for stage, record in started.items()}
    inputs |= {path.parent.name: _inputs(_read(path)) for path in sorted(folder.glob("*/lineage.json"))}
    runs = {path.name: scanner.summary(run, path) for run, path in found.items() if path.parent == folder}
    inputs |= {stage: () for stage in runs if stage not in inputs}
    known = {stage: tuple(one for one in used if one in inputs) for stage, used in inputs.items()}
    columns = _columns(known)
    rows: dict[int, int] = {}
    stages = []
    for stage in sorted(known, key=lambda stage: (columns[stage], stage)):
        column = columns[stage]
        row = rows.get(column, 0)
        rows[column] = row + 1
        run = runs.get(stage)
        done: State = "finished" if "outputs" in _read(folder / stage / "lineage.json") else "stopped"
        x, y = column * (WIDTH + GAP_X), row * (HEIGHT + GAP_Y)
        stages.append(Stage(stage, run.state if run else done, run, known[stage], x, y))
    return Graph(stages, _arrows(stages), *_size(stages))


def _columns(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The longest path from a stage without inputs; a circle, which only a damaged record has, is cut."""
    columns = dict.fromkeys(inputs, 0)
    for _ in inputs:
        for stage, used in inputs.items():
            columns[stage] = min(len(inputs), max((columns[one] + 1 for one in used), default=0))
    return columns


def _arrows(stages: Sequence[Stage]) -> list[tuple[int, int, int, int]]:
    places = {stage.name: stage for stage in stages}
    return [
        (places[used].x + WIDTH, places[used].y + HEIGHT // 2, stage.x, stage.y + HEIGHT // 2)
        for stage in stages
        for used in stage.inputs
    ]


def _size(stages: Sequence[Stage]) -> tuple[int, int]:
    right = max((stage.x for stage in stages), default=0) + WIDTH
    return right + 2, max((stage.y for stage in stages), default=0) + HEIGHT + 2


def _read(file: Path) -> dict[str, Any]:
    """A record of the pipeline; empty if it cannot be read."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _inputs(record: Any) -> tuple[str, ...]:
    """The stages that a stage uses; its other inputs are files."""
    inputs = record.get("inputs") if isinstance(record, dict) else None
    names = map(str, inputs) if isinstance(inputs, dict) else ()
    return tuple(name.removeprefix(STAGE) for name in names if name.startswith(STAGE))
