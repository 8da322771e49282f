"""The order of events of a run whose sampling and learning overlap: `events.jsonl` in its directory.

A line says of a batch (the episodes of a step) what depended on timing: before which forward pass the engine took which
weights, and which episodes were begun again then; besides, how many passes there were and what was sampled, as a digest
by which a replay knows that it is the same. Passes are counted from 0 in each batch.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.rollout.streams import Episode
from posttrain.runs.files import storage_errors, write_atomically

NAME = "events.jsonl"


@dataclass(frozen=True)
class NewWeights:
    """The engine took the weights after step `learned`."""

    before_pass: int
    learned: int
    version: int
    begun_again: list[list[int]] = field(default_factory=list)
    """(group, index) of the episodes that were given up then."""


@dataclass(frozen=True)
class Recorded:
    """What happened while one batch was sampled."""

    batch: int
    """The step that learns from it."""
    weights: list[NewWeights]
    passes: int
    """Forward passes of the whole batch."""
    digest: str
    """Of the episodes: their places, token ids and versions."""


class EventLog:
    """The events of a run, appended batch by batch."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME

    def append(self, recorded: Recorded) -> None:
        with storage_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(recorded)) + "\n")

    def keep_until(self, batch: int) -> None:
        """Forget the batches after `batch`: they are sampled again."""
        if not self.path.exists():
            return
        known = self.read()
        kept = "".join(json.dumps(asdict(known[number])) + "\n" for number in sorted(known) if number <= batch)
        # Also where only a last line is cut off: the next one would be written onto it.
        if kept != self.path.read_text(encoding="utf-8"):
            write_atomically(self.path, kept)

    def read(self) -> dict[int, Recorded]:
        """Batch -> its events; a last line that is cut off is left out."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be read ({error.strerror}); a run records its events where rollout.ahead is above 0"
            ) from error
        found = {}
        for number, line in enumerate(lines):
            try:
                recorded = _recorded(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines) - 1:
                    break
                raise InputError(f"{self.path}: line {number + 1} is damaged ({error}); restore the file") from error
            found[recorded.batch] = recorded
        return found


def digest_of(episodes: Sequence[Episode]) -> str:
    """16 hex digits that differ where places, token ids or versions of the episodes do."""
    made = hashlib.blake2b(digest_size=8)
    for episode in episodes:
        made.update(f"{episode.group}/{episode.index}/{episode.seed}".encode())
        for stream in episode.streams:
            made.update(stream.ids.tobytes() + stream.versions.tobytes())
    return made.hexdigest()


def require_as_recorded(recorded: Recorded, made: Recorded, run: str) -> None:
    """RunError unless a replayed batch is the recorded one."""
    for what, one, other in (
        ("new weights", [asdict(w) for w in recorded.weights], [asdict(w) for w in made.weights]),
        ("forward passes", recorded.passes, made.passes),
        ("tokens", recorded.digest, made.digest),
    ):
        if one != other:
            raise RunError(
                f"rollout.replay: batch {recorded.batch} does not fit the events of {run}: its {what} differ ({other}, recorded "
                f"were {one}); replay with the recipe, code, machine and threads of that run"
            )


def _recorded(values: dict[str, Any]) -> Recorded:
    return Recorded(**{**values, "weights": [NewWeights(**each) for each in values["weights"]]})
