"""What the runs of a study warned of, each once, with the runs that said it."""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import PosttrainError
from posttrain.recipe.study_file import Study
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics

_MOST = 12
"""Warnings in a report, those of the most runs first."""
_NAMED = 6
"""Runs that are named beside a warning."""


def messages_of(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The warnings among the lines of a run, each once, in order, on one line each."""
    told = [line.get("message") for line in lines if line["kind"] == "warning"]
    return list(dict.fromkeys(" ".join(message.split()) for message in told if isinstance(message, str)))


def warnings_of(study: Study) -> list[str]:
    """A sentence for each warning of the trials and retests in the study's directory; empty where there is none.

    Runs whose metrics are damaged are left out: they are failed trials that say so.
    """
    said: dict[str, list[str]] = {}
    counts = {"trials": 0, "retest": 0}
    for folder in counts:
        for path in sorted((study.directory / folder).glob("*")):
            metrics = RunDirectory(path).metrics
            if not metrics.is_file():
                continue
            counts[folder] += 1
            try:
                messages = messages_of(read_metrics(metrics))
            except PosttrainError:
                continue
            for message in messages:
                said.setdefault(message, []).append(f"{folder}/{path.name}")
    runs = sum(counts.values())
    ordered = sorted(said.items(), key=lambda item: -len(item[1]))
    sentences = [f"{message} ({_whose(names, runs)})" for message, names in ordered[:_MOST]]
    if len(ordered) > _MOST:
        sentences.append(f"{len(ordered) - _MOST} more warnings stand in the report.md of the runs")
    return sentences


def _whose(names: Sequence[str], runs: int) -> str:
    if len(names) == runs > 1:
        return f"all {runs} runs"
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
