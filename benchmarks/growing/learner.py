"""How the learner's cost grows: with the model, the length of streams, their number, and the size of groups."""

import time
from collections.abc import Sequence

import numpy as np

from growing.engine import made_up_prompt
from growing.series import Series
from posttrain.models.policy import Policy

ANSWER = 32
"""Tokens of an answer."""
CHUNK = 256
"""Positions whose logits are held at a time."""


def backward_seconds(policy: Policy, streams: Sequence[Sequence[int]], answer: int, repeats: int = 3) -> float:
    """Least seconds of a forward and backward pass over the last `answer` tokens of each stream."""
    arrays = [np.array(stream, dtype=np.int64) for stream in streams]
    sampled = [np.arange(len(stream)) >= len(stream) - answer for stream in streams]
    found = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        with policy.training_mode():
            scores = policy.score(arrays, sampled, 1.0, CHUNK)
        scores.logprobs.mean().neg().backward()
        found.append(time.perf_counter() - begun)
        policy.model.zero_grad(set_to_none=True)
    return min(found[1:])


def streams_of(policy: Policy, count: int, prompt: int, answer: int, shared: bool = False) -> list[list[int]]:
    """`count` streams of a prompt, which may be shared, and an answer."""
    return [
        made_up_prompt(policy, prompt, "prompt", 0 if shared else i) + made_up_prompt(policy, answer, "answer", i)
        for i in range(count)
    ]


def against_model(policies: Sequence[Policy]) -> Series:
    """Eight streams of 64 tokens over parameters."""
    series = Series("learner", "parameters", "seconds, 8 streams of 64 tokens", 1.0)
    for policy in policies:
        count = sum(parameter.numel() for parameter in policy.model.parameters())
        series.add(count, backward_seconds(policy, streams_of(policy, 8, 32, ANSWER), ANSWER))
    return series


def against_context(policy: Policy, lengths: Sequence[int]) -> Series:
    """One stream over its length; attention may cost its square, everything else its length."""
    series = Series("learner", "tokens of a stream", "seconds, 1 stream", 1.3)
    for length in lengths:
        series.add(length, backward_seconds(policy, streams_of(policy, 1, length // 2, length // 2), length // 2))
    return series


def against_streams(policy: Policy, counts: Sequence[int]) -> Series:
    """Streams of 64 tokens over their number."""
    series = Series("learner", "streams", "seconds, streams of 64 tokens", 1.0)
    for count in counts:
        series.add(count, backward_seconds(policy, streams_of(policy, count, 32, ANSWER), ANSWER))
    return series


def against_group(policy: Policy, groups: Sequence[int]) -> Series:
    """Answers of 32 tokens to one prompt of 256 tokens over their number: the prompt is computed once.

    With a prompt that is eight answers long, the cost of groups up to that size is to grow much slower than they do.
    """
    series = Series("learner", "group size", "seconds, a prompt of 256 and answers of 32", 0.8)
    for group in groups:
        series.add(group, backward_seconds(policy, streams_of(policy, group, 256, ANSWER, shared=True), ANSWER))
    return series
