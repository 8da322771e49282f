"""TensorBoard event files as lines of a metrics log."""

import importlib
import math
from pathlib import Path

from posttrain.errors import InputError
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
    try:
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        tensor_util = importlib.import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise InputError(
            f"{path}: reading event files needs tensorboard; `pip install 'posttrain[tensorboard]'`"
        ) from error
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
