"""The in-process engine: the policy's own weights, continuous batching, and a cache that serves turns and groups.

The composition of batches depends only on the requests: a forward pass starts only when every open episode waits for
the engine, and requests that arrive between two passes are ordered by their seeds. Results are therefore bit-identical
for any timing of the environments.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.distributed.sharding import compute_dtype
from posttrain.engines.local.cache import ID, CachedLayout, Prefix, Segment, longest_prefix, positions_of
from posttrain.engines.local.cpu.kernel import PAGE
from posttrain.engines.local.cuda import RecordedDecoder
from posttrain.engines.local.decoder import Decoder, sample
from posttrain.engines.local.gate import choose_decoding
from posttrain.engines.protocol import Completion, EngineCounters, Request, StopStrings
from posttrain.episode import StopReason
from posttrain.errors import InputError, RunError
from posttrain.images import whole_images
from posttrain.models.cpu.backend import prepare_process
from posttrain.models.cuda.attention import supports
from posttrain.models.forward import base_decoder, transformer, upload
from posttrain.models.layers import lengths_of
from posttrain.models.policy import Policy
from posttrain.recipe.compose import section
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.runs.directory import cache_directory
from posttrain.seeds import random_stream

MIN_PENDING_TOKENS = 4
"""Minimum number of shared prompt tokens that another sequence is computing for a request to wait for them. It is low
because all episodes of a group share them: where tasks differ by ten tokens only, a group of eight computes these once.
"""


# -- slots of the cache -----------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """One sequence of the cache."""

    ids: bytes = b""
    """Token ids whose keys and values are cached, each as `ID` bytes."""
    busy: bool = False
    """Whether a running sequence uses the slot."""
    last_used: int = -1
    prefix: Prefix | None = None
    """A prefix of `ids` that other slots contain as well."""
    length: int = 0
    """The length that decides the rotary frequencies of the cached keys (`models.layers.Lengths.of`)."""
    experts: np.ndarray | None = None
    """`_Sequence.experts` of the sequence that computed `ids`."""


@dataclass(frozen=True)
class Placement:
    """The slot of a prompt, and the slot `source` that holds its first `shared` tokens."""

    slot: int
    source: int
    shared: int


class Slots:
    """Allocation of the cache's slots to sequences."""

    def __init__(self, count: int, whole: bool = False) -> None:
        """`whole`: a slot can only be continued after all of its tokens, and by one sequence."""
        self.slots = [Slot() for _ in range(count)]
        self._whole = whole

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    @property
    def free(self) -> list[int]:
        """Indices of the slots that no sequence uses."""
        return [i for i, slot in enumerate(self.slots) if not slot.busy]

    def invalidate(self) -> None:
        """Discard all cached tokens, and the order in which slots were used: it decides the row of a sequence in a pass, and
        the last bit of a small product can depend on its row."""
        for index, slot in enumerate(self.slots):
            self.clear(index, slot.length)
            slot.last_used = -1

    def place(self, prompt: bytes, pending: int, length: int = 0) -> Placement | None:
        """The placement that leaves the fewest tokens of `prompt`, as in `Slot.ids`, to compute. `pending`: first
        tokens of the prompt that a running sequence is about to compute. `length`: the one that decides the prompt's
        rotary frequencies. Returns None if no slot is free, or if waiting for the pending tokens saves enough."""
        free = self.free
        if not free:
            return None
        # The last token is always computed: its output predicts the first sampled token.
        prompt = prompt[:-ID]
        cached = [slot.ids if slot.length == length else b"" for slot in self.slots]
        if self._whole:
            usable = [not slot.busy and prompt.startswith(slot.ids) for slot in self.slots]
            cached = [ids if use else b"" for ids, use in zip(cached, usable, strict=True)]
        source, shared = longest_prefix(cached, prompt)
        if pending >= shared + MIN_PENDING_TOKENS:
            return None
        # A slot with exactly this prefix is an earlier turn or the same prompt: continue there. Otherwise take the
        # least recently used slot.
        prefix = prompt[: ID * shared]
        in_place = [i for i in free if shared and len(cached[i]) <= ID * (shared + 1) and cached[i].startswith(prefix)]
        target = in_place[0] if in_place else min(free, key=lambda i: (self.slots[i].last_used, i))
        return Placement(target, target if cached[target].startswith(prefix) else source, shared)

    def acquire(self, placement: Placement, prompt: bytes, clock: int, length: int = 0) -> None:
        """Mark the slot as used by a sequence; its shared tokens count as cached."""
        slot, source, shared = self.slots[placement.slot], self.slots[placement.source], placement.shared
        known = source.prefix
        if slot is source:
            if known is not None and known.tokens > shared:
                slot.prefix = None
        elif known is not None and 0 <= shared - known.tokens <= 64:  # the few more tokens are not worth another prefix
            slot.prefix = known
        elif shared < MIN_PENDING_TOKENS:
            slot.prefix = None
        else:
            slot.prefix = Prefix(shared)
            if known is None or known.tokens < shared:
                source.prefix = slot.prefix
        slot.ids, slot.busy, slot.last_used, slot.length = prompt[: ID * shared], True, clock, length

    def clear(self, index: int, length: int = 0) -> None:
        """Discard the cached tokens of a slot, whose next ones have the frequencies of `length`."""
        slot = self.slots[index]
        slot.ids, slot.prefix, slot.length = b"", None, length

    def release(self, index: int, ids: bytes, clock: int) -> None:
        """Free the slot. Its cached tokens `ids` remain for the episode's next turn or another prompt."""
        slot = self.slots[index]
        slot.ids, slot.busy, slot.last_used = ids, False, clock


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def page_bytes(policy: Policy) -> int:
    """Bytes of one page of the cache of one sequence: keys and values of all layers."""
    config = transformer(policy.model).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = compute_dtype(next(policy.model.parameters())).itemsize
    return 2 * config.num_hidden_layers * heads * PAGE * _head_size(config) * width


# -- the engine -------------------------------------------------------------------------------------------------------


class _Sequence:
    """A request in flight: its prompt, the tokens sampled so far, and its slot."""

    def __init__(
        self,
        request: Request,
        stops: StopStrings,
        future: "asyncio.Future[Completion]",
        arrived: int,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        self.request, self.stops, self.future, self.arrived, self.on_token = request, stops, future, arrived, on_token
        self.draws = random_stream("tokens", request.seed)
        self.prompt = len(request.prompt_ids)
        self.tokens = np.empty(self.prompt + request.max_tokens, dtype=np.int64)
        self.tokens[: self.prompt] = request.prompt_ids
        self.prompt_ids = self.tokens[: self.prompt].tobytes()
        """The prompt as in `Slot.ids`."""
        self.length = self.prompt
        """Number of prompt and sampled tokens."""
        self.computed = 0
        """Number of tokens whose keys and values are in the cache."""
        self.slot = -1
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.experts: np.ndarray | None = None
        """[len(tokens), R, k]: the experts of each computed token, with `model.router_replay`."""

    @property
    def pages(self) -> int:
        """Number of cache pages at the sequence's maximum length."""
        return -(-len(self.tokens) // PAGE)

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return self.length - self.computed

    @property
    def sampled(self) -> np.ndarray:
        """The sampled token ids [n] int64."""
        return self.tokens[self.prompt : self.length]


class LocalEngine:
    """Engine over a `Policy` in this process. It samples with the policy's own weights.

    engine = LocalEngine(policy, slots=64)
    """

    def __init__(
        self, policy: Policy, recipe: LocalEngineRecipe | None = None, max_context: int | None = None, **settings: Any
    ) -> None:
        """`settings`: keys of the `engine` section by name, instead of `recipe`: `slots`, the sequences held in the
        key/value cache, and `tokens_per_forward`. `max_context`: longest context in tokens, read only for
        `cache_bytes`. By default it is the model's limit on a GPU and one page on a CPU, where a longer request that
        does not fit fails alone. InputError if a setting is wrong or `cache_bytes` does not hold one such sequence."""
        if not hasattr(policy, "device"):
            raise InputError(f"the argument `policy` has the type {type(policy).__name__}; pass a Policy")
        recipe = section(LocalEngineRecipe, recipe, **settings)
        if policy.device.type == "cpu":
            prepare_process()
        self.policy = policy
        self.recipe = recipe
        self.counters = EngineCounters()
        self.capacity = recipe.slots
        """Largest number of sequences that are decoded at the same time."""
        self.version = 0
        self.before_forward: Callable[[], None] | None = None
        """Called before each forward pass, when every open episode waits for the engine. It may load weights and cancel
        requests. The same calls before the same passes give bit-identical results."""
        config, dtype = (
            transformer(policy.model).config.get_text_config(),
            compute_dtype(next(policy.model.parameters())),
        )
        flash = policy.device.type != "cpu" and supports(policy.device, dtype, _head_size(config))
        with policy.sharded.whole() if policy.sharded is not None else nullcontext():
            self._parts = choose_decoding(policy.model, flash, cache_directory() / "gate")
        if policy.recipe.router_replay and self._parts.streams:
            raise InputError(
                "model.router_replay needs an engine that computes sequences together, and the local engine computes those of "
                "this model one at a time; remove it"
            )
        self._lengths = lengths_of(base_decoder(policy.model))
        self._flash = self._parts.kind == "flash"
        self._page_limit: int | None = None
        """Largest number of pages of the cache, by `cache_bytes`."""
        most_pages = None
        if recipe.cache_bytes is not None and self._parts.streams:
            raise InputError(
                "engine.cache_bytes does not limit the caches of a model whose sequences are computed one at a time; "
                "remove it, and lower engine.slots"
            )
        if recipe.cache_bytes is not None:
            context = max_context or (PAGE if policy.device.type == "cpu" else config.max_position_embeddings)
            pages = -(-context // PAGE)
            if recipe.cache_bytes < pages * page_bytes(policy):
                raise InputError(self._too_small(context))
            if policy.device.type == "cpu":
                self._page_limit = recipe.cache_bytes // page_bytes(policy)
            else:
                most_pages = pages
                self.capacity = min(recipe.slots, recipe.cache_bytes // (pages * page_bytes(policy)))
        self._cache = self._parts.cache(self.capacity, most_pages)
        self._slots = Slots(self.capacity, self._parts.streams)
        self._source = policy
        """The policy whose weights are loaded."""
        self._decoder: Decoder | None = None
        self._renewed = False
        """Whether the decoder has the weights of `_source`."""
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._open_episodes = self._clock = 0
        self._pump: asyncio.Task[None] | None = None

    # -- the protocol -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, on_token: Callable[[int], None] | None = None) -> Completion:
        """`on_token`: called with each token as soon as it is sampled."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        stops = StopStrings(self.policy.tokenizer, request.stop_strings)
        self._waiting.append(_Sequence(request, stops, future, self._clock, on_token))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            # An interrupt stops the loop from inside this task; asyncio would report it as never retrieved.
            self._pump.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await future

    @contextmanager
    def episode(self, group: int = 0) -> Iterator[None]:
        self._open_episodes += 1
        try:
            yield
        finally:
            self._open_episodes -= 1

    def load_weights(self, version: int, source: Policy | None = None) -> None:
        """Sample with the current weights of `source`. A sharded policy keeps them gathered until `sleep`. A pass
        computes without yielding to the event loop, so this call is always between two passes."""
        self.version = version
        self._source, self._renewed = source or self.policy, False
        if self._source.sharded is not None:
            self._source.sharded.hold()
        self._slots.invalidate()
        if not self._flash:
            self._cache.trim()
        for sequence in self._running:
            sequence.computed = 0

    def sleep(self) -> None:
        """Reshard gathered weights, and free the cache of a GPU for the learner. A CPU keeps it for the next step."""
        if self._flash:
            tokens = self._cache.pages * PAGE
            self._cache = self._parts.cache(self.capacity, self._cache.most_pages)
            self._cache.reserve(tokens)  # The next step needs as many again.
            self._slots.invalidate()
            if isinstance(self._decoder, RecordedDecoder):
                self._decoder.forget()
        if self._source.sharded is not None:
            self._decoder = None
            self._source.sharded.release()

    # -- scheduling ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run forward passes until nothing is in flight."""
        while self._waiting or self._running:
            polls = 0
            while not self._all_waiting():  # environments run meanwhile
                polls += 1
                await asyncio.sleep(0 if polls < 100 else 0.001)
            try:
                if self.before_forward is not None:
                    self.before_forward()
                    self._drop_cancelled()
                    if not self._all_waiting():
                        continue  # cancelled episodes start again, or others take their place
                self._step()
            except Exception as error:
                for sequence in self._waiting + self._running:
                    if not sequence.future.done():
                        sequence.future.set_exception(RunError(f"the engine failed: {type(error).__name__}: {error}"))
                self._waiting, self._running = [], []
                self._slots = Slots(self.capacity, self._parts.streams)
                return
            await asyncio.sleep(0)

    def _all_waiting(self) -> bool:
        """Whether every open episode has sent its next request."""
        return len(self._waiting) + len(self._running) >= self._open_episodes

    def _step(self) -> None:
        """Admit requests, run one forward pass, sample, and return finished completions."""
        self._clock += 1
        self._drop_cancelled()
        self._admit()
        if not self._running:
            return
        # With a limit, sequences stay in their slots, because swapping two slots needs the memory of both.
        if not self._flash and not self._parts.streams and self._page_limit is None:
            # Move running sequences to the first slots, so that decoding reads contiguous memory.
            by_slot = {sequence.slot: sequence for sequence in self._running}
            gaps = [slot for slot in self._slots.free if slot < len(by_slot)]
            for free, busy in zip(gaps, sorted(by_slot, reverse=True), strict=False):
                self._cache.swap(free, busy, max(len(self._slots[free].ids) // ID, by_slot[busy].computed))
                slots = self._slots.slots
                slots[free], slots[busy] = slots[busy], slots[free]
                by_slot[busy].slot = free
        for sequence in self._running if self._lengths is not None else ():
            # The cached keys of a sequence may have the frequencies of another length.
            if self._slots[sequence.slot].length != (length := self._length(sequence)):
                self._slots.clear(sequence.slot, length)
                sequence.computed = 0
        layout, ordered = self._schedule()
        begun = time.perf_counter()
        self._compute(layout, ordered)
        seconds = time.perf_counter() - begun
        decoding = len(layout.singles) / sum(segment.count for segment in layout.segments)
        self.counters.decoding_seconds += seconds * decoding
        self.counters.prompt_seconds += seconds * (1 - decoding)

    def _compute(self, layout: CachedLayout, ordered: list[tuple[_Sequence, Segment]]) -> None:
        """Run the pass of `layout`, whose rows are the sequences in `ordered`, and sample."""
        spans = [(s, segment.start, segment.start + segment.count) for s, segment in ordered]
        ids = np.concatenate([s.tokens[start:end] for s, start, end in spans])
        positions = positions_of([segment for _, segment in ordered])
        layout.tokens = [s.tokens[:end] for s, _, end in spans]
        ends = np.cumsum([segment.count for _, segment in ordered]) - 1
        # A prompt that is computed in chunks samples nothing before its last chunk.
        ready = [i for i, (sequence, segment) in enumerate(ordered) if segment.count == sequence.pending]
        sequences = [ordered[i][0] for i in ready]
        sampling = [s.request.sampling for s in sequences]
        draws = [s.draws.random() for s in sequences]
        device, numbers = self.policy.device, None
        with torch.no_grad():
            if self._decoder is None or not self._renewed:
                made = self._parts.decoder(self._source.model)
                if isinstance(made, RecordedDecoder) and isinstance(self._decoder, RecordedDecoder):
                    self._decoder.renew(made)
                else:
                    self._decoder = made
                self._renewed = True
            routing = self._source.routing if self.policy.recipe.router_replay else None
            inputs = upload(ids, device), upload(positions, device), layout
            with routing.recorded() if routing is not None else nullcontext() as routed:
                if isinstance(self._decoder, RecordedDecoder):
                    numbers = self._decoder.sampled(*inputs, sampling, draws)
                if numbers is None:
                    hidden = self._decoder.hidden(*inputs)
            if routed is not None:
                self._keep_experts(spans, routed.stacked())
            self.counters.forwards += 1
            self.counters.cache_bytes = max(self.counters.cache_bytes, self._cache.bytes)
            for sequence, _, end in spans:
                sequence.computed = end
                if end <= sequence.prompt:
                    self._slots[sequence.slot].ids = sequence.prompt_ids[: ID * end]
            if not ready:
                return
            if numbers is None:
                tokens, logprobs = sample(self._decoder.logits(hidden[upload(ends[ready], device)]), sampling, draws)
                # Read from a GPU together; float64 represents ids and float32 numbers exactly.
                numbers = torch.stack([tokens.double(), logprobs.double()])
        self.counters.sampled += len(sequences)
        read = numbers.cpu().tolist()
        if any(map(math.isnan, read[1])):
            raise FloatingPointError("the model's logits are not finite")
        for sequence, token, logprob in zip(sequences, map(int, read[0]), read[1], strict=True):
            sequence.tokens[sequence.length] = token
            sequence.length += 1
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if sequence.on_token is not None:
                sequence.on_token(token)
            if (reason := self._stopped(sequence, token)) is not None:
                self._finish(sequence, reason)

    def _keep_experts(self, spans: list[tuple[_Sequence, int, int]], experts: np.ndarray) -> None:
        """Store the `experts` [T, R, k] of the tokens of a pass, those of (sequence, start, stop) in a row."""
        at = 0
        for sequence, start, stop in spans:
            if sequence.experts is None:
                sequence.experts = np.full((len(sequence.tokens), *experts.shape[1:]), -1, experts.dtype)
                if (before := self._slots[sequence.slot].experts) is not None:
                    sequence.experts[:start] = before[:start]
                self._slots[sequence.slot].experts = sequence.experts
            sequence.experts[start:stop] = experts[at : at + stop - start]
            at += stop - start

    def _schedule(self) -> tuple[CachedLayout, list[tuple[_Sequence, Segment]]]:
        """The next pass in row order: all decoding sequences, then prompts up to `tokens_per_forward`, or whole."""
        segments, budget = [], self.recipe.tokens_per_forward
        by_slot = {}
        for sequence in sorted(self._running, key=lambda s: s.pending > 1):
            if (count := sequence.pending) > 1:
                if budget <= 0:
                    break
                stop = sequence.computed + (count if self._parts.streams else min(count, budget))
                count = whole_images(sequence.tokens[: sequence.length], sequence.computed, stop) - sequence.computed
            budget -= count
            slot = self._slots[sequence.slot]
            by_slot[sequence.slot] = sequence
            segments.append(Segment(sequence.slot, sequence.computed, count, slot.prefix, slot.length))
        layout = self._parts.layout(self._cache, segments, self.policy.device)
        return layout, [(by_slot[segment.slot], segment) for segment in layout.segments]

    def _admit(self) -> None:
        """Assign free slots to waiting requests, in order of arrival, then of seed."""
        self._waiting.sort(key=lambda s: (s.arrived, s.request.seed))
        computing = [s for s in self._running if s.computed < s.prompt]
        kept_waiting = []
        free = len(self._slots.free)
        for index, sequence in enumerate(self._waiting):
            if self._page_limit is not None and sequence.pages > self._page_limit:
                sequence.future.set_exception(RunError(self._too_small(len(sequence.tokens))))
                continue
            # All running sequences may reach their maximum lengths.
            running = [*self._running, sequence]
            if not free or (self._page_limit is not None and sum(s.pages for s in running) > self._page_limit):
                kept_waiting += self._waiting[index:]
                break
            length = self._length(sequence)
            shared = [s.prompt_ids for s in computing if not self._parts.streams and self._length(s) == length]
            _, pending = longest_prefix(shared, sequence.prompt_ids[:-ID])
            placement = self._slots.place(sequence.prompt_ids, pending, length)
            if placement is None:
                kept_waiting.append(sequence)
                continue
            self._start(sequence, placement)
            computing.append(sequence)
            free -= 1
        self._waiting = kept_waiting

    def _start(self, sequence: _Sequence, placement: Placement) -> None:
        """Start `sequence` in the slot of `placement`."""
        if self._page_limit is not None:
            placement = self._make_room(sequence, placement)
        if placement.source != placement.slot:
            self._cache.copy_prefix(placement.source, placement.slot, placement.shared)
        self._slots.acquire(placement, sequence.prompt_ids, self._clock, self._length(sequence))
        self._slots[placement.slot].experts = self._slots[placement.source].experts
        sequence.slot, sequence.computed = placement.slot, placement.shared
        self.counters.reused += placement.shared
        self.counters.prefilled += sequence.prompt - placement.shared
        self._running.append(sequence)

    def _length(self, sequence: _Sequence) -> int:
        """The length that decides the rotary frequencies of the next token of `sequence`."""
        return 0 if self._lengths is None else self._lengths.of(sequence.length)

    def _make_room(self, sequence: _Sequence, placement: Placement) -> Placement:
        """Drop cached tokens of free slots, least recently used first, until `sequence` fits; returns where to start
        it. If the tokens shared with a free slot do not fit twice, the sequence starts in that slot."""
        assert self._page_limit is not None
        room = self._page_limit - sequence.pages - sum(s.pages for s in self._running)
        kept = [i for i in self._slots.free if i not in (placement.slot, placement.source)]
        kept.sort(key=lambda i: (self._slots[i].last_used, i))
        source = placement.source if not self._slots[placement.source].busy else placement.slot
        copied = source != placement.slot
        resident = self._cache.resident
        while kept and resident[kept].sum() + copied * resident[source] > room:
            self._slots.clear(kept[0])
            self._cache.drop(kept.pop(0))
        if copied and resident[kept].sum() + resident[source] > room:
            self._slots.clear(placement.slot)
            self._cache.drop(placement.slot)
            placement = Placement(source, source, placement.shared)
        self._cache.drop(placement.slot, min(sequence.pages, int(resident[placement.slot])))
        return placement

    def _too_small(self, tokens: int) -> str:
        """Why a sequence of `tokens` tokens does not fit `cache_bytes`."""
        needed = -(-tokens // PAGE) * page_bytes(self.policy)
        return (
            f"engine.cache_bytes is {self.recipe.cache_bytes:,}, but the cache of a sequence of {tokens:,} tokens takes "
            f"{needed:,} bytes; set engine.cache_bytes to {needed:,} or more, or lower rollout.tokens_per_episode"
        )

    def _stopped(self, sequence: _Sequence, token: int) -> StopReason | None:
        """Why the sequence ends with its last `token`; None if it goes on."""
        if token in self.policy.end_tokens:
            return StopReason.END_TOKEN
        if sequence.request.stop_strings and sequence.stops.matched(sequence.sampled.tolist()):
            return StopReason.STOP_STRING
        return StopReason.TURN_BUDGET if sequence.length >= len(sequence.tokens) else None

    def _finish(self, sequence: _Sequence, reason: StopReason) -> None:
        self._release(sequence)
        if not sequence.future.done():
            ids, experts = tuple(sequence.sampled.tolist()), sequence.experts
            known = None if experts is None else experts[: sequence.length - 1]
            logprobs, versions = tuple(sequence.logprobs), tuple(sequence.versions)
            sequence.future.set_result(Completion(ids, logprobs, versions, reason, known))

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._slots.release(sequence.slot, sequence.tokens[: sequence.computed].tobytes(), self._clock)

    def _drop_cancelled(self) -> None:
        self._waiting = [s for s in self._waiting if not s.future.done()]
        for sequence in [s for s in self._running if s.future.done()]:
            self._release(sequence)
