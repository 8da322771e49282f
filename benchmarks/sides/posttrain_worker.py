"""Our side: the local engine through its public protocol."""

import asyncio
import time
from collections import deque
from statistics import median
from typing import Any

from sides.pipe import Answer, serve


def start(settings: dict[str, Any]) -> tuple[str, Answer]:
    """The local engine over `settings["model"]` with weights of `settings["dtype"]`, on `settings["threads"]`."""
    import posttrain
    from posttrain.engines.local.engine import LocalEngine
    from posttrain.models.policy import Policy
    from posttrain.recipe.engines import LocalEngineRecipe
    from posttrain.recipe.model import ModelRecipe

    policy = Policy(ModelRecipe(path=settings["model"], dtype=settings["dtype"], threads=settings["threads"]))
    # Every side samples the requested number of tokens.
    policy.end_tokens = frozenset()
    engines: dict[int, LocalEngine] = {}

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        slots = job["in_flight"]
        if slots not in engines:
            # One cache at a time, as a rollout has it.
            engines.clear()
            engines[slots] = LocalEngine(policy, LocalEngineRecipe(slots=slots))
        engine = engines[slots]
        before = engine.counters.reused
        begun = time.perf_counter()
        tokens, ends = asyncio.run(_answer_all(engine, job))
        return {
            "seconds": time.perf_counter() - begun,
            "tokens": tokens,
            "first": median(end - begun for end in ends),
            "reused": engine.counters.reused - before,
        }

    return posttrain.__version__, answer


async def _answer_all(engine: Any, job: dict[str, Any]) -> tuple[int, list[float]]:
    """Sampled tokens, and when each request was answered, with at most `in_flight` requests at a time."""
    from posttrain.engines.protocol import Request
    from posttrain.recipe.rollout import SamplingRecipe
    from posttrain.seeds import derive_seed

    sampling = SamplingRecipe(temperature=job["temperature"])
    remaining = deque(enumerate(zip(job["prompts"], job["lengths"], strict=True)))
    ends: list[float] = []
    tokens = 0

    async def ask_on() -> None:
        nonlocal tokens
        while remaining:
            number, (prompt, length) = remaining.popleft()
            seed = derive_seed(job["seed"], "benchmark", number)
            completion = await engine.generate(Request(tuple(prompt), sampling, seed, length))
            tokens += len(completion.ids)
            ends.append(time.perf_counter())

    await asyncio.gather(*(ask_on() for _ in range(job["in_flight"])))
    return tokens, ends


if __name__ == "__main__":
    serve(start)
