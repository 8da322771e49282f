"""The buffer of sampled episodes on disk: one file per step, a line per episode as soon as that has ended.

`batch_000012.jsonl` holds a header, the episodes, and, once all are there, an end. A file without an end, or whose last
line is cut off, is of a step that was being sampled when the run was killed.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from posttrain.episode import Episode
from posttrain.errors import InputError, RunError
from posttrain.rollout.driver import EpisodeRequest, EpisodeWorker, run_episodes
from posttrain.rollout.store import episode_of, episode_record, json_line
from posttrain.runs.files import storage_errors, sync_directory, write_atomically

FORMAT = 1
_NAME = re.compile(r"^batch_(\d+)\.jsonl$")
_SYNC_SECONDS = 1.0
"""What a power failure may take: a killed process loses nothing."""


class EpisodeBuffer:
    """The episodes of one step, those of an earlier process first. A context manager: it closes the file."""

    def __init__(self, directory: Path, step: int, keep_partial: bool) -> None:
        """`keep_partial`: go on with the episodes of a file without an end; else such a file is begun anew."""
        self.path = buffer_file(directory, step)
        self.step = step
        self.end: dict[str, Any] | None = None
        """What was said when all episodes were there; None until then."""
        self._episodes: dict[tuple[int | str, ...], Episode] = {}
        self._file: IO[bytes] | None = None
        self._synced = time.monotonic()
        self._read(keep_partial)
        self.tokens_before = sum(episode.sampled_tokens for episode in self._episodes.values())
        """Sampled tokens of the episodes that the file held."""

    @property
    def complete(self) -> bool:
        return self.end is not None

    def __enter__(self) -> "EpisodeBuffer":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def collect_episodes(self, player: EpisodeWorker[Any], places: Sequence[EpisodeRequest]) -> list[Episode]:
        """As `collect_episodes`, but episodes that the file has are not played again, and those played are written to it."""
        missing = [place for place in places if place.rng_key not in self._episodes]
        if missing and self.complete:
            raise RunError(
                f"{self.path} says that all its episodes are there, and lacks that of group {missing[0].group}, index "
                f"{missing[0].index}; delete the file to sample the step again"
            )
        run_episodes(player, missing, lambda number, episode: self._write(missing[number], episode))
        # Taken out: scores are added to them, and a second asking would add those twice.
        played = [self._episodes.pop(place.rng_key) for place in places]
        if player.scorer is not None:
            player.scorer(played)
        return played

    def finish(self, said: dict[str, Any]) -> None:
        """All episodes are there; `said` is what else to keep of them, as plain JSON."""
        self._append(json_line({"end": said}), sync=True)
        self.end = said

    def _write(self, place: EpisodeRequest, episode: Episode) -> None:
        record = json_line({"place": place.rng_key, "episode": episode_record(episode)})
        self._append(record)
        # What is learned from is what can be read back, whether the run is killed or not.
        self._episodes[place.rng_key] = episode_of(json.loads(record)["episode"])

    def _append(self, line: str, sync: bool = False) -> None:
        with storage_errors(self.path):
            file = self._file or self._open()
            file.write(f"{line}\n".encode())
            file.flush()
            if sync or time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(file.fileno())
                self._synced = time.monotonic()

    def _open(self) -> IO[bytes]:
        """The file at its end; a new one gets its header."""
        new = not self.path.exists()
        self._file = open(self.path, "ab")  # noqa: SIM115
        if new:
            self._file.write(f"{json_line({'format': FORMAT, 'step': self.step})}\n".encode())
            sync_directory(self.path.parent)
        return self._file

    def _read(self, keep_partial: bool) -> None:
        """Take what the file holds up to its first line that is not whole, and cut off the rest."""
        if not self.path.exists():
            return
        good, content = 0, self.path.read_bytes()
        for number, line in enumerate(content.splitlines(keepends=True)):
            try:
                record = json.loads(line)
                if not line.endswith(b"\n") or (number == 0 and record != {"format": FORMAT, "step": self.step}):
                    break
                if "episode" in record:
                    self._episodes[tuple(record["place"])] = episode_of(record["episode"])
                elif "end" in record:
                    self.end = record["end"]
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
        if self.complete or (keep_partial and self._episodes):
            with storage_errors(self.path):
                os.truncate(self.path, good)
        else:
            self._episodes.clear()
            with storage_errors(self.path):
                self.path.unlink()


def buffer_file(directory: Path, step: int) -> Path:
    return directory / f"batch_{step:06d}.jsonl"


def remove_batches(directory: Path, first: int, last: int | None = None) -> None:
    """Delete the files of steps `first` to `last`, both included; without `last`, of all later ones too."""
    for path in directory.glob("batch_*.jsonl"):
        found = _NAME.match(path.name)
        if found and int(found[1]) >= first and (last is None or int(found[1]) <= last):
            with storage_errors(path):
                path.unlink(missing_ok=True)


NAME = "events.jsonl"


@dataclass(frozen=True)
class WeightUpdate:
    """The engine took the weights after step `learned`."""

    before_forward: int
    step: int
    version: int
    restarted: list[list[int]] = field(default_factory=list)
    """(group, index) of the episodes that were given up then."""


@dataclass(frozen=True)
class BatchEvents:
    """What happened while one batch was sampled."""

    batch: int
    """The step that learns from it."""
    weights: list[WeightUpdate]
    forward_passes: int
    """Forward passes of the whole batch."""
    digest: str
    """Of the episodes: their places, token ids and versions."""


class EventLog:
    """The events of a run, appended batch by batch."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME

    def append(self, recorded: BatchEvents) -> None:
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

    def read(self) -> dict[int, BatchEvents]:
        """Batch -> its events; a last line that is cut off is left out."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be read ({error.strerror}); a run records its events where rollout.async_rollouts is above 0"
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


def episodes_digest(episodes: Sequence[Episode]) -> str:
    """16 hex digits that differ where places, token ids or versions of the episodes do."""
    made = hashlib.blake2b(digest_size=8)
    for episode in episodes:
        made.update(f"{episode.group}/{episode.index}/{episode.seed}".encode())
        for stream in episode.streams:
            made.update(stream.ids.tobytes() + stream.versions.tobytes())
    return made.hexdigest()


def check_replay(recorded: BatchEvents, made: BatchEvents, run: str) -> None:
    """RunError unless a replayed batch is the recorded one."""
    for what, one, other in (
        ("new weights", [asdict(w) for w in recorded.weights], [asdict(w) for w in made.weights]),
        ("forward passes", recorded.forward_passes, made.forward_passes),
        ("tokens", recorded.digest, made.digest),
    ):
        if one != other:
            raise RunError(
                f"rollout.replay: batch {recorded.batch} does not fit the events of {run}: its {what} differ ({other}, recorded "
                f"were {one}); replay with the recipe, code, machine and threads of that run"
            )


def _recorded(values: dict[str, Any]) -> BatchEvents:
    return BatchEvents(**{**values, "weights": [WeightUpdate(**each) for each in values["weights"]]})
