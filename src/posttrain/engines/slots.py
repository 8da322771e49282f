"""Which tokens the rows of the cache hold, who uses them, and where a new prompt has least left to compute."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from posttrain.engines.plan import Prefix

WORTH_WAITING = 16
"""Prompt tokens that make it worth a pass to wait for a neighbour who is computing them."""
NEARLY = 64
"""Tokens by which what two slots share may be longer than the beginning they are known to share already."""


@dataclass
class Slot:
    """A row of the cache: the tokens whose keys and values it holds, and whether a sequence is using it."""

    held: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    busy: bool = False
    last_used: int = -1
    prefix: Prefix | None = None
    """A beginning of `held` that other slots hold too."""


@dataclass(frozen=True)
class Placement:
    """Where a prompt goes, and the `shared` tokens of it that slot `source` holds."""

    slot: int
    source: int
    shared: int


class Slots:
    """The rows of the cache."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    @property
    def free(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if not slot.busy]

    def forget(self) -> None:
        """Nothing that was computed counts any longer."""
        for slot in self.slots:
            slot.held, slot.prefix = np.empty(0, dtype=np.int64), None

    def place(self, prompt: np.ndarray, coming: int) -> Placement | None:
        """Where `prompt` has least left to compute; None when no slot is free, or a neighbour is about to have
        `coming` tokens of it ready, enough more than any slot holds.
        """
        free = self.free
        if not free:
            return None
        # The last token is always computed anew: its output is what the first sampled token is drawn from.
        cached = [common_prefix(slot.held, prompt[:-1]) for slot in self.slots]
        source = int(np.argmax(cached))
        shared = cached[source]
        if coming >= shared + WORTH_WAITING:
            return None
        # A slot that holds just this prefix is an earlier turn, or the same prompt asked again: continue there.
        # Otherwise take the longest unused.
        in_place = [i for i in free if cached[i] == shared > 0 and len(self.slots[i].held) - shared <= 1]
        target = in_place[0] if in_place else min(free, key=lambda i: (self.slots[i].last_used, i))
        return Placement(target, target if cached[target] == shared else source, shared)

    def take(self, placement: Placement, prompt: np.ndarray, clock: int) -> None:
        """Let a sequence use the slot; the shared tokens are taken to be there."""
        slot, source = self.slots[placement.slot], self.slots[placement.source]
        if slot is not source:
            slot.prefix = self._common(source, placement.shared)
        elif slot.prefix is not None and slot.prefix.tokens > placement.shared:
            slot.prefix = None
        slot.held, slot.busy, slot.last_used = prompt[: placement.shared], True, clock

    def release(self, index: int, held: np.ndarray, clock: int) -> None:
        """Free the slot but remember what it holds, for the episode's next turn or a neighbour's prompt."""
        slot = self.slots[index]
        slot.held, slot.busy, slot.last_used = held, False, clock

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Pairs (free, busy) of slots to exchange so that the busy ones are the first."""
        busy = [i for i, slot in enumerate(self.slots) if slot.busy]
        free = [i for i in range(len(busy)) if not self.slots[i].busy]
        return zip(free, reversed(busy), strict=False)

    def swap(self, one: int, other: int) -> None:
        """Exchange what two slots hold and who uses them."""
        self.slots[one], self.slots[other] = self.slots[other], self.slots[one]

    def _common(self, source: Slot, shared: int) -> Prefix | None:
        """The mark of what a slot now has in common with `source`."""
        known = source.prefix
        if known is not None and 0 <= shared - known.tokens <= NEARLY:
            return known
        if shared < WORTH_WAITING:
            return None
        made = Prefix(shared)
        if known is None or known.tokens < shared:
            source.prefix = made
        return made


def common_prefix(held: np.ndarray, prompt: np.ndarray) -> int:
    """Number of leading tokens that two id arrays share."""
    length = min(len(held), len(prompt))
    if length == 0 or held[0] != prompt[0]:
        return 0
    differs = held[:length] != prompt[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
