"""Hand-made episodes for tests."""

from typing import Any

import numpy as np

from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn


def played(
    seed: int = 0,
    rewards: tuple[float, ...] = (1.0,),
    success: bool = True,
    outcome: Outcome = Outcome.TERMINATED,
    rejected: str | None = None,
    tokens: int = 3,
    **fields: Any,
) -> Episode:
    """One episode of a turn per reward, each with a prompt of 2 tokens and an answer of `tokens`, in one stream."""
    length = len(rewards) * (2 + tokens)
    turn = np.full(length, -1, np.int32)
    paid = np.zeros(length, np.float32)
    turns, messages = [], []
    for number, reward in enumerate(rewards):
        start = number * (2 + tokens) + 2
        turn[start : start + tokens] = number
        paid[start + tokens - 1] = reward
        info: dict[str, Any] = {"success": success} if number == len(rewards) - 1 else {}
        if rejected:
            info["rejected"] = rejected
        turns.append(Turn(0, start, start + tokens, reward, StopReason.END_TOKEN, f"answer {number}", info))
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    stream = Stream(
        np.arange(length, dtype=np.int64),
        turn >= 0,
        np.where(turn >= 0, -0.5, 0).astype(np.float32),
        paid,
        turn,
        turn * 0 - (turn < 0),
    )
    values: dict[str, Any] = {"group": 0, "index": 0, "version": 0, "failure": None, "messages": messages, **fields}
    return Episode(seed=seed, streams=[stream], turns=turns, outcome=outcome, **values)
