"""How the engine's cost grows: with the model, the context, requests in flight, groups, turns, and what is over."""

import asyncio
import time
from collections.abc import Sequence

from growing.series import Series
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.seeds import derive_seed, random_stream

DECODED = 16
"""Tokens of an answer whose decoding is timed."""


def made_up_prompt(policy: Policy, tokens: int, *name: int | str) -> list[int]:
    """Random token ids."""
    return random_stream("growth", *name).integers(3, len(policy.tokenizer), size=tokens).tolist()


def answer_all(engine: LocalEngine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds until every prompt has its answer of `tokens` tokens, and the answers."""

    async def ask() -> list[list[int]]:
        requests = [
            Request(tuple(prompt), SamplingRecipe(), derive_seed("growth", number), tokens)
            for number, prompt in enumerate(prompts)
        ]
        return [list(c.ids) for c in await asyncio.gather(*(engine.generate(request) for request in requests))]

    begun = time.perf_counter()
    answers = asyncio.run(ask())
    return time.perf_counter() - begun, answers


def decoding_seconds(policy: Policy, in_flight: int, context: int, repeats: int = 3) -> float:
    """Seconds of one decoding step: the least of what answers of 1 + DECODED tokens take beyond those of one token."""
    engine = LocalEngine(policy, LocalEngineRecipe(slots=in_flight, tokens_per_forward=max(2048, context)))
    found = []
    for repeat in range(repeats + 1):
        prompts = [made_up_prompt(policy, context, "decoding", i, repeat) for i in range(in_flight)]
        # The second time everything is cached but the last token.
        answer_all(engine, prompts, 1)
        short, _ = answer_all(engine, prompts, 1)
        long, _ = answer_all(engine, prompts, 1 + DECODED)
        if repeat:
            found.append((long - short) / DECODED)
    return max(min(found), 1e-9)


def against_model(policies: Sequence[Policy]) -> Series:
    """A decoding step of 8 requests over parameters."""
    series = Series("engine", "parameters", "seconds a decoding step, 8 in flight", 1.0)
    for policy in policies:
        count = sum(parameter.numel() for parameter in policy.model.parameters())
        series.add(count, decoding_seconds(policy, 8, 64))
    return series


def against_context(policy: Policy, contexts: Sequence[int]) -> Series:
    """A decoding step of 8 requests over the tokens that each has behind it."""
    series = Series("engine", "tokens of context", "seconds a decoding step, 8 in flight", 1.0)
    for context in contexts:
        series.add(context, decoding_seconds(policy, 8, context))
    return series


def against_streams(policy: Policy, counts: Sequence[int]) -> Series:
    """A decoding step over requests in flight."""
    series = Series("engine", "requests in flight", "seconds a decoding step", 1.0)
    for count in counts:
        series.add(count, decoding_seconds(policy, count, 64))
    return series


def against_group(policy: Policy, groups: Sequence[int]) -> Series:
    """Prompt tokens computed for a group whose shared prompt has 256 tokens, over its size.

    Each answer computes the prompt's last token for itself, so the count is 255 + size.
    """
    series = Series("engine", "group size", "prompt tokens computed", 0.0, 0.1)
    for group in groups:
        engine = LocalEngine(policy, LocalEngineRecipe(slots=max(groups)))
        answer_all(engine, [made_up_prompt(policy, 256, "group", group)] * group, 2)
        series.add(group, engine.counters.prefilled)
    return series


def against_turns(policy: Policy, turns: Sequence[int]) -> tuple[Series, Series]:
    """Prompt tokens computed, and seconds, for episodes of so many turns of 32 tokens read and 8 written."""
    tokens = Series("engine", "turns", "prompt tokens computed, 4 episodes", 1.0, 0.05)
    # Attention over a history that grows evenly costs its square at most.
    seconds = Series("engine", "turns", "seconds, 4 episodes", 1.5)
    for count in turns:
        engine = LocalEngine(policy, LocalEngineRecipe(slots=4))
        contexts = [made_up_prompt(policy, 32, "turns", count, i) for i in range(4)]
        spent = 0.0
        for turn in range(count):
            step, answers = answer_all(engine, contexts, 8)
            spent += step
            for i, answer in enumerate(answers):
                contexts[i] = contexts[i] + answer + made_up_prompt(policy, 32, "turns", count, i, turn)
        tokens.add(count, engine.counters.prefilled)
        seconds.add(count, spent)
    return tokens, seconds


def against_finished(policy: Policy, finished: Sequence[int]) -> Series:
    """Seconds for 4 answers of 17 tokens over the answers that the same engine has given before."""
    series = Series("engine", "answers given before", "seconds for 4 answers", 0.0)
    engine = LocalEngine(policy, LocalEngineRecipe(slots=8))
    done = 0
    for count in finished:
        while done < count:
            prompts = [made_up_prompt(policy, 16, "finished", done + i) for i in range(min(8, count - done))]
            answer_all(engine, prompts, 2)
            done += len(prompts)
        spent = []
        for repeat in range(5):
            prompts = [made_up_prompt(policy, 16, "timed", count, repeat, i) for i in range(4)]
            spent.append(answer_all(engine, prompts, 1 + DECODED)[0])
        done += 20
        series.add(count, min(spent))
    return series
