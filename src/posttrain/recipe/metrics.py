"""Declarations of metrics, which stand in the section of a recipe that they belong to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric of `metrics.jsonl`."""

    name: str
    meaning: str
