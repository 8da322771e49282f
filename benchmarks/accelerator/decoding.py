"""Decoding: tokens per second against what the device's memory and arithmetic allow."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from harness.limits import Limits, decoding_bound

from accelerator.measuring import finish
from accelerator.rows import Row
from accelerator.shapes import RandomPolicy, Shape, random_model
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Completion, Request
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.seeds import derive_seed, random_stream

IN_FLIGHT = (1, 32, 256)


def random_prompts(count: int, length: int, vocabulary: int, *name: int | str) -> list[tuple[int, ...]]:
    """`count` prompts of random tokens; `name` names the draw."""
    drawn = random_stream("benchmark prompts", *name).integers(3, vocabulary, (count, length))
    return [tuple(row) for row in drawn.tolist()]


def engine_of(policy: RandomPolicy, slots: int) -> LocalEngine:
    return LocalEngine(policy, LocalEngineRecipe(slots=slots, tokens_per_forward=8192))


def answers(
    engine: LocalEngine, prompts: Sequence[tuple[int, ...]], tokens: int, sampling: SamplingRecipe, *name: int | str
) -> list[Completion]:
    """One answer of `tokens` tokens to each prompt, all in flight together; `name` names the draws."""
    return all_answers(engine, [(prompt, tokens) for prompt in prompts], sampling, *name)


def all_answers(
    engine: LocalEngine, asked: Sequence[tuple[tuple[int, ...], int]], sampling: SamplingRecipe, *name: int | str
) -> list[Completion]:
    """`answers` to prompts with their own numbers of tokens."""

    async def one(index: int, prompt: tuple[int, ...], tokens: int) -> Completion:
        with engine.episode():
            return await engine.generate(Request(prompt, sampling, derive_seed(*name, index), tokens))

    async def together() -> list[Completion]:
        return list(await asyncio.gather(*(one(index, *wanted) for index, wanted in enumerate(asked))))

    return asyncio.run(together())


def decoding(
    shape: Shape, device: torch.device, limits: Limits, until: float, prompt: int, tokens: int, in_flight: Sequence[int]
) -> Iterator[Row]:
    """The engine with fixed numbers of requests in flight, then transformers' `generate` in the same place.

    The time to the first tokens is measured apart, with answers of one token, and taken off.
    """
    policy = RandomPolicy(shape, device)
    for count in in_flight:
        engine = engine_of(policy, count)
        try:
            # Until the cache has its size, so that no pass is recorded while the clock runs.
            answers(engine, random_prompts(count, prompt, shape.vocabulary, count, 0), tokens, SamplingRecipe(), 0)
            engine.load_weights(0)
            first = _timed(engine, shape, device, count, prompt, 1)
            engine.load_weights(0)
            whole = _timed(engine, shape, device, count, prompt, tokens)
        except Exception as error:
            # What one number in flight cannot do, another may.
            line = (str(error).splitlines() or [""])[0]
            yield Row("decoding", f"{shape.name}, {count} in flight", float("nan"), "", note=line)
            continue
        yield _row(shape, limits, count, prompt, tokens, first, whole, "engine")
        if time.monotonic() > until:
            return
    del policy
    model = random_model(shape, device, packed=False)
    for count in [n for n in in_flight if n > 1][:1]:
        first = _generate(model, shape, device, count, prompt, 1)
        whole = _generate(model, shape, device, count, prompt, min(tokens, 33))
        yield _row(shape, limits, count, prompt, min(tokens, 33), first, whole, "transformers generate")


def _timed(engine: LocalEngine, shape: Shape, device: torch.device, count: int, prompt: int, tokens: int) -> float:
    prompts = random_prompts(count, prompt, shape.vocabulary, count, tokens)
    begun = time.perf_counter()
    answers(engine, prompts, tokens, SamplingRecipe(), count, tokens)
    finish(device)
    return time.perf_counter() - begun


def _generate(model: Any, shape: Shape, device: torch.device, count: int, prompt: int, tokens: int) -> float:
    ids = torch.from_numpy(np.array(random_prompts(count, prompt, shape.vocabulary, count, tokens))).to(device)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    with torch.no_grad():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), **(settings | {"max_new_tokens": 1, "min_new_tokens": 1})
        )
        finish(device)
        begun = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        finish(device)
    return time.perf_counter() - begun


def _row(
    shape: Shape, limits: Limits, count: int, prompt: int, tokens: int, first: float, whole: float, side: str
) -> Row:
    """Steps 2..tokens, whose contexts are prompt + tokens / 2 long on average."""
    least = decoding_bound(shape, 2, count, prompt + tokens / 2, limits)
    step = max(whole - first, 1e-9) / (tokens - 1)
    note = f"{1000 * step:.2f} ms a step, at least {1000 * least:.2f}; first tokens after {1000 * first:.0f} ms"
    return Row(
        "decoding", f"{shape.name}, {count} in flight, {side}", count / step, "tokens/s", least / step, note=note
    )
