"""Requests to engines, and the expected answers. Also for interpreters without pytest."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Completion, Request
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe

GREEDY = SamplingRecipe(temperature=0.0)
WARM = SamplingRecipe(temperature=1.0)
SMALL = {"type": "vllm", "max_num_seqs": 8, "threads": 1, "tokens_per_forward": 512, "cache_gigabytes": 0.1}
"""Keys of an engine that starts on little memory."""


def prompt(number: int, length: int = 70) -> tuple[int, ...]:
    """Token ids 3.., another sequence for each number."""
    return tuple(3 + (7 * number + i * (number + 1)) % 200 for i in range(length))


def request(number: int = 0, sampling: SamplingRecipe = GREEDY, tokens: int = 12, seed: int = 1, **other) -> Request:
    return Request(prompt(number), sampling, seed, tokens, **other)


def answers(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    """All requests concurrently, in a separate event loop."""

    async def ask() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    return asyncio.run(ask())


def local_answers(policy: Policy, requests: Sequence[Request]) -> list[Completion]:
    """Answers of the local engine with the current weights of the policy."""
    return answers(LocalEngine(policy, LocalEngineRecipe(slots=8)), requests)


def agreed(engine: Any, policy: Policy, requests: Sequence[Request]) -> list[Completion]:
    """Answers of `engine`, which must be those of the local engine."""
    found = answers(engine, requests)
    assert [one.ids for one in found] == [one.ids for one in local_answers(policy, requests)]
    return found


def move(policy: Policy, seed: int) -> None:
    """Change every trained weight, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    policy.version += 1


def learner_logprobs(policy: Policy, asked: Request, completion: Completion) -> np.ndarray:
    """The log-probability of each sampled token, as the learner computes it."""
    ids = np.array([*asked.prompt_ids, *completion.ids], dtype=np.int64)
    sampled = np.arange(len(ids)) >= len(asked.prompt_ids)
    with torch.no_grad():
        return policy.score([ids], [sampled], asked.sampling.temperature or 1.0, 64).logprobs.numpy()


def distance(policy: Policy, asked: Request, completion: Completion) -> float:
    """The largest distance of an engine's log-probabilities from the learner's, in nats."""
    return float(np.abs(learner_logprobs(policy, asked, completion) - np.array(completion.logprobs)).max())
