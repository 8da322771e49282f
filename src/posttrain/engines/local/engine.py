"""The in-process engine: the policy's own weights, continuous batching, and a cache that serves turns and groups.

The composition of batches depends only on the requests: a forward pass starts only when every open episode waits for
the engine, and requests that arrive between two passes are ordered by their seeds. Results are therefore bit-identical
for any timing of the environments.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.distributed.sharding import compute_dtype
from posttrain.engines.local.cache import ID, CachedLayout, Segment, longest_prefix
from posttrain.engines.local.cpu.kernel import PAGE
from posttrain.engines.local.cuda import RecordedDecoder
from posttrain.engines.local.decoder import Decoder, read_later, sample
from posttrain.engines.local.gate import choose_decoding
from posttrain.engines.local.slots import Placement, Rows, Slots
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
    """A request in flight. Its tokens, and what a pass needs of it, are in the engine's `Rows` while it has a slot."""

    def __init__(
        self,
        request: Request,
        stops: StopStrings,
        future: "asyncio.Future[Completion]",
        arrived: int,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        self.request, self.stops, self.future, self.arrived, self.on_token = request, stops, future, arrived, on_token
        self.prompt = np.array(request.prompt_ids, dtype=np.int64)
        self.prompt_ids = self.prompt.tobytes()
        """The prompt as in `Slot.ids`."""
        self.limit = len(self.prompt) + request.max_tokens
        """Largest number of prompt and sampled tokens."""
        self.slot = -1
        self.experts: np.ndarray | None = None
        """[limit, R, k]: the experts of each computed token, with `model.router_replay`."""

    @property
    def pages(self) -> int:
        """Number of cache pages at the sequence's maximum length."""
        return -(-self.limit // PAGE)


@dataclass(frozen=True)
class _Pass:
    """A forward pass that was started."""

    slots: np.ndarray
    """[S]: the slots whose sequences sample."""
    lengths: np.ndarray
    """[S]: their tokens before."""
    read: Callable[[], np.ndarray] | None
    """Waits for the sampled tokens and their log-probabilities [2, S]; None if nothing is sampled."""
    tokens: int
    decoding: int
    """How many of the tokens are not those of prompts."""
    recorded: bool = False
    """Whether a recording sampled, which keeps its tokens on the device."""


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
        self._flash = self._parts.flash
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
        self._slots, self._rows = Slots(self.capacity, self._parts.streams), Rows(self.capacity)
        self._device = policy.device
        self._source = policy
        """The policy whose weights are loaded."""
        self._decoder: Decoder | None = None
        self._renewed = False
        """Whether the decoder has the weights of `_source`."""
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._ahead: _Pass | None = None
        """The next pass, if it was started before the tokens of the last one were read."""
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
        self._forget()
        if not self._flash:
            self._cache.trim()

    def sleep(self) -> None:
        """Reshard gathered weights, and free the cache of a GPU for the learner. A CPU keeps it for the next step."""
        if self._flash:
            tokens = self._cache.pages * PAGE
            self._cache = self._parts.cache(self.capacity, self._cache.most_pages)
            self._cache.reserve(tokens)  # The next step needs as many again.
            self._forget()
            if isinstance(self._decoder, RecordedDecoder):
                self._decoder.forget()
        if self._source.sharded is not None:
            self._decoder = None
            self._source.sharded.release()

    def _forget(self) -> None:
        """Discard all cached tokens, and a pass that was started from them."""
        self._ahead = None
        self._slots.invalidate()
        self._rows.computed[:] = 0

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
                self._waiting, self._running, self._ahead = [], [], None
                self._slots, self._rows = Slots(self.capacity, self._parts.streams), Rows(self.capacity)
                return
            await asyncio.sleep(0)

    def _all_waiting(self) -> bool:
        """Whether every open episode has sent its next request."""
        return len(self._waiting) + len(self._running) >= self._open_episodes

    @torch.no_grad()
    def _step(self) -> None:
        """Admit requests, run the next passes, sample, and return finished completions."""
        self._clock += 1
        self._drop_cancelled()
        begun = time.perf_counter()
        passes, self._ahead = [] if self._ahead is None else [self._ahead], None
        if not passes:
            self._admit()
            if not self._running:
                return
            self._arrange()
            passes = self._start_passes()
        self._ahead = self._start_ahead(passes)
        for each in passes:
            self._collect(each)
        self._ahead = self._ahead if self._running else None
        seconds = time.perf_counter() - begun
        decoding = sum(each.decoding for each in passes) / sum(each.tokens for each in passes)
        self.counters.decoding_seconds += seconds * decoding
        self.counters.prompt_seconds += seconds * (1 - decoding)

    def _arrange(self) -> None:
        """Prepare the slots of the running sequences for a pass."""
        # With a limit, sequences stay in their slots, because swapping two slots needs the memory of both.
        moving = not self._flash and not self._parts.streams and self._page_limit is None
        if moving and max(sequence.slot for sequence in self._running) >= len(self._running):
            # Move running sequences to the first slots, so that decoding reads contiguous memory.
            by_slot = {sequence.slot: sequence for sequence in self._running}
            gaps = [slot for slot in self._slots.free if slot < len(by_slot)]
            for free, busy in zip(gaps, sorted(by_slot, reverse=True), strict=False):
                self._cache.swap(free, busy, max(len(self._slots[free].ids) // ID, int(self._rows.computed[busy])))
                slots = self._slots.slots
                slots[free], slots[busy] = slots[busy], slots[free]
                self._rows.move(busy, free)
                by_slot[busy].slot = free
        for sequence in self._running if self._lengths is not None else ():
            # The cached keys of a sequence may have the frequencies of another length.
            length = self._length(int(self._rows.length[sequence.slot]))
            if self._slots[sequence.slot].length != length:
                self._slots.clear(sequence.slot, length)
                self._rows.computed[sequence.slot] = 0

    def _start_passes(self) -> list[_Pass]:
        """Start a pass with a token of each decoding sequence, and prompts up to `tokens_per_forward`, or whole. Decoding
        sequences have a pass of their own where it is recorded."""
        if self._decoder is None or not self._renewed:
            made = self._parts.decoder(self._source.model)
            if isinstance(made, RecordedDecoder) and isinstance(self._decoder, RecordedDecoder):
                self._decoder.renew(made)
            else:
                self._decoder = made
            self._renewed = True
        slots = np.array([sequence.slot for sequence in self._running])
        single = self._rows.length[slots] - self._rows.computed[slots] == 1
        decoding, prompts = slots[single], slots[~single]
        if not isinstance(self._decoder, RecordedDecoder) or not self._decoder.records or not len(decoding):
            return [self._compute(self._schedule(np.concatenate([decoding, prompts])))]
        first = self._start_recorded(decoding) or self._compute(self._schedule(decoding))
        return [first, *([self._compute(self._schedule(prompts))] if len(prompts) else [])]

    def _start_recorded(self, slots: np.ndarray, ahead: bool = False) -> _Pass | None:
        """Replay the pass that decodes one token of each of `slots`; None if it is not recorded. `ahead`: their last tokens
        are still on the device."""
        assert isinstance(self._decoder, RecordedDecoder)
        slots, rows = np.sort(slots), self._rows
        lengths = rows.length[slots] + ahead
        self._cache.reserve(int(lengths.max()))
        samples = not rows.truncates[slots].any()
        inputs, out = rows.inputs(slots, lengths, ahead), None
        if samples or not ahead:
            out = self._decoder.replayed(inputs, self._cache, self._device, samples, ahead)
        if out is None:
            return None
        rows.computed[slots] = lengths
        self._count_pass()
        read = read_later(out) if samples else self._sample(out, slots, lengths)
        return _Pass(slots, lengths, read, len(slots), len(slots), recorded=samples)

    def _start_ahead(self, passes: list[_Pass]) -> _Pass | None:
        """Start the next pass before the tokens of `passes` are read, which are its inputs on the device; None where it needs
        more than them. It computes the last token of sequences that turn out to have ended as well.

        It depends on the requests alone, so that the passes of a run are always the same."""
        last = passes[0]
        admits = bool(self._waiting) and len(self._running) < self.capacity
        if len(passes) > 1 or not last.recorded or admits or self.before_forward is not None:
            return None
        rows, slots, lengths = self._rows, last.slots, last.lengths
        goes_on = (rows.length[slots] == lengths) & (lengths + 1 < rows.limit[slots])
        return self._start_recorded(slots[goes_on], ahead=True) if goes_on.any() else None

    def _compute(self, layout: CachedLayout) -> _Pass:
        """Run the pass of `layout`, and sample where it has the last known token of a sequence."""
        assert self._decoder is not None
        rows, device, segments = self._rows, self._device, layout.segments
        slots, starts, counts = np.array([(s.slot, s.start, s.count) for s in segments], dtype=np.int64).T
        stops, ends = starts + counts, counts.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(stops - ends, counts)
        ids = rows.tokens[np.repeat(slots, counts), positions]
        layout.tokens = [rows.tokens[slot, :stop] for slot, stop in zip(slots.tolist(), stops.tolist(), strict=True)]
        # A prompt that is computed in chunks samples nothing before its last chunk.
        ready = stops == rows.length[slots]
        routing = self._source.routing if self.policy.recipe.router_replay else None
        with routing.recorded() if routing is not None else nullcontext() as routed:
            hidden = self._decoder.hidden(upload(ids, device), upload(positions, device), layout)
        if routed is not None:
            self._keep_experts(segments, routed.stacked())
        self._count_pass()
        rows.computed[slots] = stops
        for index in np.flatnonzero(stops <= rows.prompt[slots]).tolist():
            slot = self._slots[int(slots[index])]
            assert slot.sequence is not None
            slot.ids = slot.sequence.prompt_ids[: ID * int(stops[index])]
        chosen, lengths, read = slots[ready], stops[ready], None
        if len(chosen):
            read = self._sample(hidden[upload(ends[ready] - 1, device)], chosen, lengths)
        return _Pass(chosen, lengths, read, len(ids), len(layout.singles))

    def _sample(self, hidden: torch.Tensor, slots: np.ndarray, lengths: np.ndarray) -> Callable[[], np.ndarray]:
        """Sample from the last hidden states [S, hidden] of the sequences in `slots`; see `_Pass.read`."""
        assert self._decoder is not None
        sampling = [self._sequence(slot).request.sampling for slot in slots.tolist()]
        tokens, logprobs = sample(self._decoder.logits(hidden), sampling, self._rows.draws[slots, lengths])
        # Read from a GPU together; float64 represents ids and float32 numbers exactly.
        return read_later(torch.stack([tokens.double(), logprobs.double()]))

    def _collect(self, computed: _Pass) -> None:
        """Keep what a pass sampled, and return the completions that end with it."""
        if computed.read is None:
            return
        rows, read = self._rows, computed.read()
        # Others were cancelled, or ended before this pass, which was started ahead.
        live = rows.length[computed.slots] == computed.lengths
        slots, lengths, (tokens, logprobs) = computed.slots[live], computed.lengths[live], read[:, live]
        if np.isnan(logprobs).any():
            raise FloatingPointError("the model's logits are not finite")
        self.counters.sampled += len(slots)
        rows.keep(slots, tokens, logprobs, self.version)
        ends = np.equal.outer(tokens, list(self.policy.end_tokens)).any(1)
        for index in np.flatnonzero(ends | (lengths + 1 >= rows.limit[slots]) | rows.watched[slots]).tolist():
            sequence, token = self._sequence(int(slots[index])), int(tokens[index])
            if sequence.on_token is not None:
                sequence.on_token(token)
            if (reason := self._stopped(sequence, token)) is not None:
                self._finish(sequence, reason)

    def _sequence(self, slot: int) -> _Sequence:
        sequence = self._slots[slot].sequence
        assert sequence is not None
        return sequence

    def _count_pass(self) -> None:
        self.counters.forwards += 1
        self.counters.cache_bytes = max(self.counters.cache_bytes, self._cache.bytes)

    def _keep_experts(self, segments: list[Segment], experts: np.ndarray) -> None:
        """Store the `experts` [T, R, k] of the tokens of a pass, those of `segments` in a row."""
        at = 0
        for segment in segments:
            sequence, start, stop = self._sequence(segment.slot), segment.start, segment.start + segment.count
            if sequence.experts is None:
                sequence.experts = np.full((sequence.limit, *experts.shape[1:]), -1, experts.dtype)
                if (before := self._slots[segment.slot].experts) is not None:
                    sequence.experts[:start] = before[:start]
                self._slots[segment.slot].experts = sequence.experts
            sequence.experts[start:stop] = experts[at : at + segment.count]
            at += segment.count

    def _schedule(self, slots: np.ndarray) -> CachedLayout:
        """The layout of the next tokens of the sequences in `slots`: the pending one, or prompts up to `tokens_per_forward`."""
        segments, budget, rows = [], self.recipe.tokens_per_forward, self._rows
        for slot, start, length in zip(
            *(part.tolist() for part in (slots, rows.computed[slots], rows.length[slots])), strict=True
        ):
            if (count := length - start) > 1:
                if budget <= 0:
                    break
                stop = start + (count if self._parts.streams else min(count, budget))
                count = whole_images(rows.tokens[slot, :length], start, stop) - start
            budget -= count
            cached = self._slots[slot]
            segments.append(Segment(slot, start, count, cached.prefix, cached.length))
        layout: CachedLayout = self._parts.layout(self._cache, segments, self._device)
        return layout

    def _admit(self) -> None:
        """Assign free slots to waiting requests, in order of arrival, then of seed."""
        if not self._waiting:
            return
        self._waiting.sort(key=lambda s: (s.arrived, s.request.seed))
        computing = [s for s in self._running if self._rows.computed[s.slot] < len(s.prompt)]
        kept_waiting = []
        free = len(self._slots.free)
        for index, sequence in enumerate(self._waiting):
            if self._page_limit is not None and sequence.pages > self._page_limit:
                sequence.future.set_exception(RunError(self._too_small(sequence.limit)))
                continue
            # All running sequences may reach their maximum lengths.
            running = [*self._running, sequence]
            if not free or (self._page_limit is not None and sum(s.pages for s in running) > self._page_limit):
                kept_waiting += self._waiting[index:]
                break
            length = self._length(len(sequence.prompt))
            shared = [
                s.prompt_ids for s in computing if not self._parts.streams and self._length(len(s.prompt)) == length
            ]
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
        self._slots.acquire(placement, sequence, self._clock, self._length(len(sequence.prompt)))
        sequence.slot = placement.slot
        request, watched = sequence.request, sequence.on_token is not None or bool(sequence.request.stop_strings)
        draws = random_stream("tokens", request.seed).random(request.max_tokens)
        self._rows.start(sequence.slot, sequence.prompt, draws, request.sampling, watched, placement.shared)
        self.counters.reused += placement.shared
        self.counters.prefilled += len(sequence.prompt) - placement.shared
        self._running.append(sequence)

    def _length(self, tokens: int) -> int:
        """The length that decides the rotary frequencies of the next token of a sequence of `tokens` tokens."""
        return 0 if self._lengths is None else self._lengths.of(tokens)

    def _make_room(self, sequence: _Sequence, placement: Placement) -> Placement:
        """Drop cached tokens of free slots, least recently used first, until `sequence` fits; returns where to start
        it. If the tokens shared with a free slot do not fit twice, the sequence starts in that slot."""
        assert self._page_limit is not None
        room = self._page_limit - sequence.pages - sum(s.pages for s in self._running)
        kept = [i for i in self._slots.free if i not in (placement.slot, placement.source)]
        kept.sort(key=lambda i: (self._slots[i].last_used, i))
        source = placement.source if self._slots[placement.source].sequence is None else placement.slot
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
        length = int(self._rows.length[sequence.slot])
        sampled = self._rows.tokens[sequence.slot, len(sequence.prompt) : length]
        if sequence.request.stop_strings and sequence.stops.matched(sampled.tolist()):
            return StopReason.STOP_STRING
        return StopReason.TURN_BUDGET if length >= sequence.limit else None

    def _finish(self, sequence: _Sequence, reason: StopReason) -> None:
        if not sequence.future.done():
            rows, length, experts = self._rows, int(self._rows.length[sequence.slot]), sequence.experts
            places = sequence.slot, slice(len(sequence.prompt), length)
            ids, logprobs = tuple(rows.tokens[places].tolist()), tuple(rows.logprobs[places].tolist())
            known = None if experts is None else experts[: length - 1]
            sequence.future.set_result(Completion(ids, logprobs, tuple(rows.versions[places].tolist()), reason, known))
        self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._slots.release(sequence.slot, self._rows.end(sequence.slot).tobytes(), self._clock)

    def _drop_cancelled(self) -> None:
        self._waiting = [s for s in self._waiting if not s.future.done()]
        for sequence in [s for s in self._running if s.future.done()]:
            self._release(sequence)
