"""The reward of the RL benchmarks: cheap, and different for nearly every answer, so that every answer has credit."""

from typing import Any


def share_of_letters(answer: str) -> float:
    """Share of `a` to `m` among the characters of the answer."""
    return sum("a" <= character <= "m" for character in answer.lower()) / max(1, len(answer))


def of_completions(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """The same for TRL: each completion is a list of one message."""
    return [share_of_letters(messages[0]["content"]) for messages in completions]
