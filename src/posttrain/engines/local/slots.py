"""The slots of the local engine: which tokens the cache has in each, which sequence uses it, and what a pass needs of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.engines.local.cache import ID, Prefix, longest_prefix
from posttrain.engines.local.decoder import truncates
from posttrain.recipe.rollout import SamplingRecipe

MIN_PENDING_TOKENS = 4
"""Minimum number of shared prompt tokens that another sequence is computing for a request to wait for them. It is low
because all episodes of a group share them: where tasks differ by ten tokens only, a group of eight computes these once.
"""


@dataclass
class Slot:
    """One sequence of the cache."""

    ids: bytes = b""
    """Token ids whose keys and values are cached, each as `ID` bytes."""
    sequence: Any = None
    """The running sequence that uses the slot."""
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
        return [i for i, slot in enumerate(self.slots) if slot.sequence is None]

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
            usable = [slot.sequence is None and prompt.startswith(slot.ids) for slot in self.slots]
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

    def acquire(self, placement: Placement, sequence: Any, clock: int, length: int = 0) -> None:
        """Mark the slot as used by `sequence`; its shared tokens count as cached."""
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
        slot.ids, slot.sequence = sequence.prompt_ids[: ID * shared], sequence
        slot.last_used, slot.length, slot.experts = clock, length, source.experts

    def clear(self, index: int, length: int = 0) -> None:
        """Discard the cached tokens of a slot, whose next ones have the frequencies of `length`."""
        slot = self.slots[index]
        slot.ids, slot.prefix, slot.length = b"", None, length

    def release(self, index: int, ids: bytes, clock: int) -> None:
        """Free the slot. Its cached tokens `ids` remain for the episode's next turn or another prompt."""
        slot = self.slots[index]
        slot.ids, slot.sequence, slot.last_used = ids, None, clock


class Rows:
    """What a pass needs of the sequence in each slot, as arrays, so that it needs no loop over sequences."""

    def __init__(self, slots: int) -> None:
        self.length, self.computed, self.prompt, self.limit = np.zeros((4, slots), np.int64)
        """[slots]: number of prompt and sampled tokens, 0 in a free slot; of tokens whose keys and values are cached; of tokens
        of the prompt; and of tokens at most."""
        self.settings = np.zeros((2, slots))
        """Temperature, or 1 where it is 0; 1 where it is 0."""
        self.truncates, self.watched = np.zeros((2, slots), bool)
        """`watched`: somebody looks at each sampled token."""
        self.tokens = np.zeros((slots, 0), np.int64)
        self.draws = np.zeros((slots, 0))
        """[slots, tokens]: the uniform number that samples the token at this place."""
        self.logprobs = np.zeros((slots, 0), np.float32)
        self.versions = np.zeros((slots, 0), np.int64)

    def start(
        self, slot: int, prompt: np.ndarray, draws: np.ndarray, sampling: SamplingRecipe, watched: bool, computed: int
    ) -> None:
        """Begin a sequence whose token number i after the prompt is sampled by `draws[i]`."""
        limit = len(prompt) + len(draws)
        if limit > (room := self.tokens.shape[1]):
            busy = np.flatnonzero(self.length)
            for name in ("tokens", "draws", "logprobs", "versions"):
                old = getattr(self, name)
                wider = np.empty((len(old), max(limit, 2 * room)), old.dtype)  # occupies no memory before it is written
                wider[busy, :room] = old[busy]
                setattr(self, name, wider)
        self.tokens[slot, : len(prompt)], self.draws[slot, len(prompt) : limit] = prompt, draws
        self.settings[:, slot] = sampling.temperature or 1.0, not sampling.temperature
        self.truncates[slot], self.watched[slot] = truncates(sampling), watched
        self.prompt[slot] = self.length[slot] = len(prompt)
        self.computed[slot], self.limit[slot] = computed, limit

    def inputs(self, slots: np.ndarray, lengths: np.ndarray, ahead: bool) -> np.ndarray:
        """[6, S] float64 for a recorded pass over the last token of each sequence: its id, or -1 if the device alone knows
        it (`ahead`), position, slot, temperature, uniform number, and 1 where the temperature is 0."""
        ids = np.full(len(slots), -1) if ahead else self.tokens[slots, lengths - 1]
        temperatures, greedy = self.settings[:, slots]
        return np.stack([ids, lengths - 1, slots, temperatures, self.draws[slots, lengths], greedy])

    def keep(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append a sampled token to the sequence of each slot."""
        places = slots, self.length[slots]
        self.tokens[places], self.logprobs[places], self.versions[places] = tokens, logprobs, version
        self.length[slots] += 1

    def move(self, source: int, target: int) -> None:
        """Move the sequence of a slot to a free one."""
        for name, array in vars(self).items():
            by_slot = array.T if name == "settings" else array
            by_slot[target] = by_slot[source]
        self.length[source] = 0

    def end(self, slot: int) -> np.ndarray:
        """End the sequence of a slot. Returns its tokens that are cached."""
        cached = self.tokens[slot, : min(self.computed[slot], self.length[slot])]
        self.length[slot] = 0
        return cached
