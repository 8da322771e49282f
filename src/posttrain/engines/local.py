"""The in-process engine: the policy's own weights, continuous batching, a cache shared across turns and groups.

What is computed together is a function of the requests alone: a forward pass starts only when every open episode
waits for the engine, and requests that arrive between two passes are ordered by their seeds. So the same run gives
the same bits whatever the environments' timing.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.engines.cache import CachedLayout, KeyValueSlab, Segment
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.engines.sampler import sample
from posttrain.errors import RunError
from posttrain.models.forward import hidden_states, logits_of
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import EngineRecipe
from posttrain.rollout.streams import StopReason
from posttrain.seeds import random_stream

WORTH_WAITING = 16
"""Prompt tokens that make it worth a pass to wait for a neighbour who is computing them."""


@dataclass(eq=False)
class _Sequence:
    """A request in flight: its answer so far, and the slot it runs in."""

    request: Request
    future: "asyncio.Future[Completion]"
    arrived: int
    draws: np.random.Generator
    prompt: np.ndarray
    slot: int = -1
    computed: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that stand in the context and are not in the cache yet."""
        return len(self.prompt) + len(self.ids) - self.computed

    def tokens_of(self, segment: Segment) -> list[int]:
        """The ids of a segment, which lies in the prompt or in the answer, never across."""
        if segment.start < len(self.prompt):
            return self.prompt[segment.start : segment.start + segment.count].tolist()
        start = segment.start - len(self.prompt)
        return self.ids[start : start + segment.count]


@dataclass
class _Slot:
    """A row of the cache: the tokens whose keys and values it holds, and who is using it."""

    held: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    busy: bool = False
    last_used: int = -1


class LocalEngine:
    """Engine over a `Policy` in this process."""

    def __init__(self, policy: Policy, recipe: EngineRecipe) -> None:
        self.policy = policy
        self.recipe = recipe
        self.counters = EngineCounters()
        self.capacity = recipe.slots
        self._slab = KeyValueSlab(recipe.slots)
        self._slots = [_Slot() for _ in range(recipe.slots)]
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._open_episodes = 0
        self._clock = 0
        self._pump: asyncio.Task[None] | None = None

    # -- the protocol -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        prompt = np.array(request.prompt_ids, dtype=np.int64)
        self._waiting.append(_Sequence(request, future, self._clock, random_stream("tokens", request.seed), prompt))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            # An interrupt ends the loop from inside this task; asyncio would report it as never retrieved.
            self._pump.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await future

    @contextmanager
    def episode(self) -> Iterator[None]:
        self._open_episodes += 1
        try:
            yield
        finally:
            self._open_episodes -= 1

    def load_weights(self, tensors: Mapping[str, Any] | None, version: int) -> None:
        """The weights are the policy's own; what was cached under the old ones is forgotten."""
        assert tensors is None, "the local engine shares the policy's weights"
        for slot in self._slots:
            slot.held = np.empty(0, dtype=np.int64)

    # -- scheduling ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Compute until nothing is in flight."""
        while self._waiting or self._running:
            await self._until_all_wait()
            try:
                self._step()
            except Exception as error:
                self._abandon(error)
                return
            await asyncio.sleep(0)

    async def _until_all_wait(self) -> None:
        """Let the environments move until every open episode has asked for its next answer or closed."""
        looks = 0
        while len(self._waiting) + len(self._running) < self._open_episodes:
            looks += 1
            await asyncio.sleep(0 if looks < 100 else 0.001)

    def _abandon(self, error: Exception) -> None:
        """Hand a failure of the engine to everyone who waits for it."""
        for sequence in self._waiting + self._running:
            if not sequence.future.done():
                sequence.future.set_exception(RunError(f"the engine failed: {type(error).__name__}: {error}"))
        self._waiting, self._running = [], []
        self._slots = [_Slot() for _ in self._slots]

    def _step(self) -> None:
        """Admit what fits, run one forward pass, sample, and hand out what is finished."""
        self._clock += 1
        self._drop_cancelled()
        self._admit()
        work = self._schedule()
        layout = CachedLayout(self._slab, [segment for _, segment in work])
        by_slot = {sequence.slot: sequence for sequence, _ in work}
        ordered = [(by_slot[segment.slot], segment) for segment in layout.segments]
        ids = [token for sequence, segment in ordered for token in sequence.tokens_of(segment)]
        positions = [p for _, seg in ordered for p in range(seg.start, seg.start + seg.count)]
        ends = np.cumsum([segment.count for _, segment in ordered]) - 1
        # A prompt that is computed in pieces has nothing to sample until its last piece.
        ready = [i for i, (sequence, segment) in enumerate(ordered) if segment.count == sequence.pending]
        with torch.no_grad():
            hidden = hidden_states(self.policy.model, torch.tensor(ids), torch.tensor(positions), layout)
            self.counters.forwards += 1
            for sequence, segment in ordered:
                sequence.computed += segment.count
                if segment.start < len(sequence.prompt):
                    self._slots[sequence.slot].held = sequence.prompt[: sequence.computed]
            if not ready:
                return
            sequences = [ordered[i][0] for i in ready]
            tokens, logprobs = sample(
                logits_of(self.policy.model, hidden[torch.from_numpy(ends[ready])]),
                [s.request.sampling for s in sequences],
                [s.draws.random() for s in sequences],
            )
        self.counters.sampled += len(sequences)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            reason = self._stop_reason(sequence)
            if reason is not None:
                self._finish(sequence, reason)

    def _schedule(self) -> list[tuple[_Sequence, Segment]]:
        """The tokens of the next pass: every decoding sequence, then prompts as far as the token budget goes."""
        work, budget = [], self.recipe.tokens_per_forward
        for sequence in sorted(self._running, key=lambda s: s.pending > 1):
            if sequence.pending > 1 and budget <= 0:
                break
            count = 1 if sequence.pending == 1 else min(sequence.pending, budget)
            budget -= count
            work.append((sequence, Segment(sequence.slot, sequence.computed, count)))
        return work

    def _admit(self) -> None:
        """Give waiting requests a slot, in order of arrival and then of seed, as long as slots are free."""
        self._waiting.sort(key=lambda s: (s.arrived, s.request.seed))
        computing = [s for s in self._running if s.computed < len(s.prompt)]
        kept_waiting = []
        for sequence in self._waiting:
            # The last token is always computed anew: its output is what the first sampled token is drawn from.
            prefix = sequence.prompt[:-1]
            free = [i for i, slot in enumerate(self._slots) if not slot.busy]
            cached = [_common_prefix(slot.held, prefix) for slot in self._slots]
            source = int(np.argmax(cached))
            coming = max((_common_prefix(s.prompt, prefix) for s in computing), default=0)
            if not free or coming >= cached[source] + WORTH_WAITING:
                kept_waiting.append(sequence)
                continue
            self._place(sequence, free, cached, source)
            computing.append(sequence)
        self._waiting = kept_waiting

    def _place(self, sequence: _Sequence, free: list[int], cached: list[int], source: int) -> None:
        """Start `sequence` in a free slot with as much of its prompt as any slot holds."""
        shared = cached[source]
        in_place = [i for i in free if cached[i] == shared and shared == len(self._slots[i].held) > 0]
        # A slot that holds just this prefix is an earlier turn: continue there. Otherwise take the longest unused.
        target = in_place[0] if in_place else min(free, key=lambda i: (self._slots[i].last_used, i))
        if shared and target != source and cached[target] < shared:
            self._slab.copy_prefix(source, target, shared)
        slot = self._slots[target]
        slot.held, slot.busy, slot.last_used = sequence.prompt[:shared], True, self._clock
        sequence.slot, sequence.computed = target, shared
        self.counters.reused += shared
        self.counters.prefilled += len(sequence.prompt) - shared
        self._running.append(sequence)

    def _stop_reason(self, sequence: _Sequence) -> StopReason | None:
        if sequence.ids[-1] in self.policy.end_tokens:
            return StopReason.END_TOKEN
        if sequence.request.stop_strings:
            text = self.policy.tokenizer.decode(sequence.ids)
            if any(stop in text for stop in sequence.request.stop_strings):
                return StopReason.STOP_STRING
        return StopReason.TURN_BUDGET if len(sequence.ids) >= sequence.request.max_tokens else None

    def _finish(self, sequence: _Sequence, reason: StopReason) -> None:
        self._release(sequence)
        if not sequence.future.done():
            sequence.future.set_result(Completion(tuple(sequence.ids), tuple(sequence.logprobs), reason))

    def _release(self, sequence: _Sequence) -> None:
        """Free the slot but remember what it holds, for the episode's next turn or a neighbour's prompt."""
        self._running.remove(sequence)
        slot = self._slots[sequence.slot]
        tokens = np.concatenate([sequence.prompt, np.array(sequence.ids, dtype=np.int64)])
        slot.held = tokens[: sequence.computed]
        slot.busy, slot.last_used = False, self._clock

    def _drop_cancelled(self) -> None:
        self._waiting = [s for s in self._waiting if not s.future.done()]
        for sequence in [s for s in self._running if s.future.done()]:
            self._release(sequence)


def _common_prefix(held: np.ndarray, prompt: np.ndarray) -> int:
    """Number of leading tokens that two id arrays share."""
    length = min(len(held), len(prompt))
    differs = np.flatnonzero(held[:length] != prompt[:length])
    return int(differs[0]) if len(differs) else length
