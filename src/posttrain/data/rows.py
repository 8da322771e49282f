"""Rows of data as typed examples."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message: `role`, `content` (text), and what a template may read besides; `train: false` carries no loss."""


@dataclass(frozen=True)
class Conversation:
    """One supervised example; at least one assistant message."""

    messages: list[Message]
    origin: str
    """Where the row stands, for people: `train.jsonl row 12` (counted from 1; of JSON lines, the line)."""
    domain: str | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; each ends with an assistant message, and they differ."""

    prompt: list[Message]
    """Messages that both conversations begin with; empty where they share none."""
    chosen: list[Message]
    """Messages after the prompt."""
    rejected: list[Message]
    origin: str
    margin: float | None = None
    domain: str | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """One answer and whether it is good (KTO)."""

    prompt: list[Message]
    completion: list[Message]
    good: bool
    origin: str
    domain: str | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """Something to answer; the last message is not the assistant's."""

    messages: list[Message]
    origin: str
    row: dict[str, Any] = field(default_factory=dict)
    """The whole row, for rules."""
    domain: str | None = None
    tools: list[Any] | None = None
