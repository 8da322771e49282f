"""Malformed rows: valid ones changed at random places, and random JSON values."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

USER = {"role": "user", "content": "What is 2 + 2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
BLANK = {"role": "assistant", "content": " \n"}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
FLAT = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": None}}]}
TOOL = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

VALID: dict[str, list[dict[str, Any]]] = {
    "conversation": [
        {"messages": [SYSTEM, USER, GOOD, USER, {**BAD, "train": False}, USER, GOOD], "domain": "sums"},
        {"messages": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": "2 + 2?", "completion": "4", "domain": None},
        {"context_messages": [SYSTEM, USER], "completion": [GOOD]},
        {"messages": [USER, CALL, TOOL, GOOD], "tools": TOOLS},
        {"messages": [GOOD, USER, LEGACY, {"role": "function", "name": "add", "content": None}, GOOD]},
        {"messages": [{"role": "developer", "content": "x"}, USER, FLAT, TOOL, GOOD], "tools": "[]"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}, {**GOOD, "primer": "4"}]},
    ],
    "pair": [
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 2, "domain": "sums"},
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "margin": 0.5},
        {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": "5", "tools": "[]"},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [SYSTEM, USER, GOOD, USER, GOOD], "rejected": [SYSTEM, USER, GOOD, USER, BAD]},
    ],
    "unpaired": [
        {"prompt": "2 + 2?", "completion": "4", "label": True},
        {"prompt": [SYSTEM, USER], "completion": [GOOD], "label": 0, "tools": TOOLS},
    ],
    "prompt": [
        {"prompt": "2 + 2?", "label": 4},
        {"context_messages": [SYSTEM, USER, GOOD, USER], "label": "4", "extra": {"a": [1, 2]}},
    ],
}


def malformed(kind: str, count: int, draws: np.random.Generator) -> Iterator[Any]:
    """`count` rows; one in ten is a random value, the others are valid rows with one to four changes."""
    valid = VALID[kind]
    for _ in range(count):
        if draws.random() < 0.1:
            yield value(draws, 4)
            continue
        row: Any = copy.deepcopy(valid[draws.integers(len(valid))])
        for _ in range(draws.integers(1, 5)):
            row = changed(row, draws)
        yield row


def changed(row: Any, draws: np.random.Generator) -> Any:
    """`row` with one change at a random place, which may be the whole row."""
    places = list(_places(row))
    if not places or draws.random() < 0.02:
        return value(draws, 3)
    parent, key = places[draws.integers(len(places))]
    kind = draws.integers(9)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[key] = None
    elif kind == 2:
        parent[key] = value(draws, 3)
    elif kind == 3:
        parent[key] = text(draws)
    elif kind == 4:
        other, name = places[draws.integers(len(places))]
        parent[key] = _copy(other[name])
    elif kind == 5 and isinstance(parent, list):
        parent.insert(draws.integers(len(parent) + 1), _copy(parent[key]))
    elif kind == 6 and isinstance(parent, list):
        draws.shuffle(parent)
    elif kind == 7:
        parent[key] = [parent[key]]
    elif isinstance(parent, dict):
        parent[_name(draws)] = parent.pop(key)
    return row


def _places(row: Any, depth: int = 10) -> Iterator[tuple[Any, Any]]:
    """Every value of the row except deeply nested ones, as (container, key)."""
    keys = list(row) if isinstance(row, dict) else range(len(row)) if isinstance(row, list) else []
    for key in keys:
        yield row, key
        if depth:
            yield from _places(row[key], depth - 1)


def _copy(node: Any) -> Any:
    try:
        return copy.deepcopy(node)
    except RecursionError:
        return None


_NAMES = [
    *("messages", "prompt", "completion", "chosen", "rejected", "label", "margin", "tools", "domain", "role"),
    *("content", "from", "value", "train", "primer", "tool_calls", "function_call", "arguments", "type", "text"),
    *("", "\ud800", "context_messages"),
]


def _name(draws: np.random.Generator) -> str:
    return _NAMES[draws.integers(len(_NAMES))]


def text(draws: np.random.Generator) -> str:
    """A text that is difficult to handle."""
    texts = ["", " \n\t", "\u00a0\u3000", "\ud800", "a\udfffb", "\x00", "<|im_end|>", "assistant", "user", "Assistant"]
    texts += ["[]", "[{}]", "[1", "{}", "null", "nan", "inf", "-1", "1e999", "true", "4", "5", '{"a": NaN}']
    texts += ['{"a": "\\ud800"}', '"{}"', '{"a": 1, "a": 2}', "é" * 50, "\U0001f600"]
    return texts[draws.integers(len(texts))]


def value(draws: np.random.Generator, depth: int) -> Any:
    """A random value: most of JSON's kinds, and some that only Python or a parquet file has."""
    kind = draws.integers(14 if depth else 10)
    if kind < 9:
        plain = [None, True, False, 0, 1, -1, 10**400, 0.5, float("nan"), float("inf"), -0.0, 2, 3.0, 10**5000]
        return text(draws) if kind < 4 else plain[draws.integers(len(plain))]
    if kind == 9:
        odd: list[Any] = [b"bytes", (1, 2), {1, 2}, object(), np.array([1, 2]), np.float32(1), {1: 2}, {None: "x"}]
        odd += [deep(40), deep(5000)]
        return odd[draws.integers(len(odd))]
    if kind < 12:
        return {_name(draws): value(draws, depth - 1) for _ in range(draws.integers(5))}
    return [value(draws, depth - 1) for _ in range(draws.integers(5))]


def deep(levels: int) -> Any:
    """Lists in lists."""
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made
