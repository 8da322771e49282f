"""The memory of the key/value cache: taken page by page, returned, and limited by `engine.cache_bytes`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.engines.local.cache import KeyValuePages
from posttrain.engines.local.cpu.kernel import PAGE
from posttrain.engines.local.engine import LocalEngine, page_bytes
from posttrain.engines.protocol import Request
from posttrain.errors import InputError, RunError
from posttrain.recipe.rollout import SamplingRecipe

HEADS, SIZE = 4, 64
BLOCK = HEADS * PAGE * SIZE * 4
"""Bytes of a page of keys."""


def resident_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Resident bytes of the mappings that hold `tensors`; neighboring mappings are one in the table."""
    addresses, found, inside = [tensor.data_ptr() for tensor in tensors], 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, stop = (int(address, 16) for address in name.split("-"))
            inside = any(start <= address < stop for address in addresses)
        elif inside and name == "Rss:":
            found += int(rest.split()[0]) * 1024
    return found


def test_memory_is_taken_by_writing_and_returned_by_dropping():
    cache = KeyValuePages(64)
    cache.reserve(64 * PAGE)
    like = torch.ones(1, HEADS, SIZE)
    stores = keys, values = cache.layer(0, like)
    assert keys.nbytes == 64 * 64 * BLOCK > 500e6
    before = resident_bytes(stores)
    assert before < 100e6
    cache.fill(3, 40 * PAGE)
    keys[:40, 3] = values[:40, 3] = 1.0
    assert cache.bytes == 40 * 2 * BLOCK
    assert resident_bytes(stores) - before == pytest.approx(cache.bytes, abs=4e6)
    keys[:1, 4] = 2.0
    cache.drop(3, 2)
    assert cache.bytes == 2 * 2 * BLOCK
    assert resident_bytes(stores) - before < 8e6
    assert (keys[:2, 3] == 1).all()
    assert (keys[2:40, 3] == 0).all()
    assert (keys[0, 4] == 2).all()


def test_growth_keeps_tokens_and_what_was_not_written_is_trimmed():
    cache = KeyValuePages(3)
    cache.reserve(PAGE)
    keys, _ = cache.layer(0, torch.ones(1, HEADS, SIZE))
    cache.fill(1, PAGE)
    keys[0, 1] = 5.0
    cache.reserve(4 * PAGE)
    assert (cache.keys[0][0, 1] == 5).all()
    cache.fill(0, 3 * PAGE)
    cache.trim()
    assert list(cache.resident) == [3, 1, 0]
    cache.trim()  # nothing was written: an engine that was not used keeps its memory
    assert list(cache.resident) == [3, 1, 0]
    cache.fill(0, PAGE)
    cache.trim()
    assert list(cache.resident) == [1, 0, 0]


def requests(count, prompt=150, answer=60):
    """Four kinds of prompts, each asked several times."""
    rng = np.random.default_rng(0)
    kinds = [tuple(int(t) for t in rng.integers(3, 260, prompt)) for _ in range(4)]
    return [Request(kinds[i % 4], SamplingRecipe(), i, answer) for i in range(count)]


def watched(engine, before=lambda: None):
    """A list that gets the bytes of the engine's cache after each pass. `before`: called before each pass."""
    step, seen = engine._step, []

    def watched_step():
        before()
        step()
        seen.append(engine._cache.bytes)

    engine._step = watched_step
    return seen


def answers(engine, asked):
    seen = watched(engine)

    async def run():
        return await asyncio.gather(*(engine.generate(request) for request in asked), return_exceptions=True)

    return asyncio.run(run()), seen


def test_a_limit_is_honored_and_changes_no_answer(tiny_policy):
    asked = requests(8, answer=30)
    free, _ = answers(LocalEngine(tiny_policy, slots=8), asked)
    for pages in (2, 3, 5, 8):
        limit = pages * page_bytes(tiny_policy)
        engine = LocalEngine(tiny_policy, slots=8, cache_bytes=limit)
        limited, seen = answers(engine, asked)
        assert [answer.ids for answer in limited] == [answer.ids for answer in free]
        assert 0 < max(seen) <= limit
        assert max(seen) == engine.counters.cache_bytes
    assert engine.counters.reused > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_limit_is_honored_with_cancelled_requests_and_new_weights(tiny_policy, seed):
    rng = np.random.default_rng(seed)
    pages, slots = int(rng.integers(2, 6)), int(rng.integers(1, 9))
    limit = pages * page_bytes(tiny_policy)
    engine = LocalEngine(tiny_policy, slots=slots, cache_bytes=limit, tokens_per_forward=int(rng.choice([16, 2048])))
    kinds = [rng.integers(3, 260, int(rng.integers(1, 230))).tolist() for _ in range(3)]
    seen = watched(engine, lambda: rng.random() < 0.05 and engine.load_weights(engine.version + 1))

    async def episode(number):
        prompt = kinds[number % 3][: int(rng.integers(1, 230))]
        for turn in range(2):
            most = int(rng.integers(1, 12))
            request = Request(tuple(prompt), SamplingRecipe(), 10 * number + turn, most)
            task = asyncio.ensure_future(engine.generate(request))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
                task.cancel()
            (answer,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(answer, RunError):
                assert -(-(len(prompt) + most) // PAGE) > pages
            elif not isinstance(answer, asyncio.CancelledError):
                prompt += [*answer.ids, 5, 6, 7]

    async def run():
        # Requests that wait for each other's memory would wait forever.
        await asyncio.wait_for(asyncio.gather(*(episode(number) for number in range(10))), timeout=60)

    asyncio.run(run())
    assert 0 < max(seen) <= limit
    assert engine.counters.cache_bytes == max(seen)


def test_a_page_has_the_size_that_is_reserved_for_it_and_a_request_that_never_fits_fails_alone(tiny_policy):
    engine = LocalEngine(tiny_policy, slots=2)
    answers(engine, requests(1, prompt=20, answer=3))
    assert engine._cache.bytes == page_bytes(tiny_policy)
    engine = LocalEngine(tiny_policy, slots=2, cache_bytes=2 * page_bytes(tiny_policy))
    short, long = requests(1)[0], requests(1, prompt=150, answer=200)[0]
    (first, second), _ = answers(engine, [short, long])
    assert len(first.ids) >= 1
    assert isinstance(second, RunError)
    assert f"set engine.cache_bytes to {3 * page_bytes(tiny_policy):,} or more" in str(second)


def test_a_limit_below_the_longest_sequence_is_refused_before_any_request(tiny_policy):
    page = page_bytes(tiny_policy)
    fits = LocalEngine(tiny_policy, max_context=PAGE + 1, cache_bytes=2 * page)
    assert len(answers(fits, requests(1, prompt=100, answer=29))[0][0].ids) >= 1
    with pytest.raises(
        InputError, match=rf"a sequence of {PAGE + 1} tokens takes {2 * page:,} bytes; set engine.cache"
    ):
        LocalEngine(tiny_policy, max_context=PAGE + 1, cache_bytes=2 * page - 1)
    LocalEngine(tiny_policy, cache_bytes=page)
    with pytest.raises(InputError, match=r"engine.cache_bytes is 1,000, but"):
        LocalEngine(tiny_policy, cache_bytes=1000)
