"""The on-disk buffer of sampled episodes.

`batch_000012.jsonl` contains a header, a line for each episode, written when the episode ends, and an end line once the
batch is complete. A file without an end line, or with a truncated last line, belongs to a step that was interrupted.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.episode import Episode
from posttrain.errors import RunError
from posttrain.rollout.driver import EpisodeRequest, EpisodeWorker, run_episodes
from posttrain.rollout.store import episode_from_record, episode_record, json_line, remove_steps
from posttrain.runs.directory import LineLog, storage_errors

FORMAT = 2
_NAME = re.compile(r"^batch_(\d+)\.jsonl$")
_SYNC_SECONDS = 1.0
"""`LineLog.sync_seconds`: a power failure may lose the episodes of this period."""


class EpisodeBuffer:
    """The episodes of one step, including those that an earlier process left on disk. A context manager."""

    def __init__(self, directory: Path, step: int, keep_partial: bool) -> None:
        """`keep_partial`: reuse the episodes of a file without an end line; otherwise delete such a file."""
        self.path = directory / f"batch_{step:06d}.jsonl"
        self.step = step
        self.end: dict[str, Any] | None = None
        """The contents of the end line; None while the batch is not complete."""
        self._header = {"format": FORMAT, "step": step}
        self._episodes: dict[tuple[int | str, ...], Episode] = {}
        self._log: LineLog | None = None
        self._read(keep_partial)

    def __enter__(self) -> "EpisodeBuffer":
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is not None:
            self._log.close()

    def collect_episodes(self, worker: EpisodeWorker[Any], requests: Sequence[EpisodeRequest]) -> list[Episode]:
        """Like `driver.collect_episodes`, but takes buffered episodes from disk and writes new ones to it.

        RunError if a complete file lacks a requested episode.
        """
        missing = [request for request in requests if request.rng_key not in self._episodes]
        if missing and self.end is not None:
            raise RunError(
                f"{self.path} is marked complete but lacks the episode of group {missing[0].group}, index "
                f"{missing[0].index}; delete the file to sample the step again"
            )
        run_episodes(worker, missing, lambda number, episode: self._write(missing[number], episode))
        # Removed from the buffer: scoring modifies the episodes, and a second call must not add scores twice.
        episodes = [self._episodes.pop(request.rng_key) for request in requests]
        if worker.scorer is not None:
            worker.scorer(episodes)
        return episodes

    def finish(self, end: dict[str, Any]) -> None:
        """Mark the batch complete; `end` is extra information to store, as plain JSON."""
        self._append(json_line({"end": end}), sync=True)
        self.end = end

    def _write(self, request: EpisodeRequest, episode: Episode) -> None:
        line = json_line({"rng_key": request.rng_key, "episode": episode_record(episode)})
        self._append(line)
        # Use the episode as it reads back from disk, so a resumed run learns from identical data.
        self._episodes[request.rng_key] = episode_from_record(json.loads(line)["episode"])

    def _append(self, line: str, sync: bool = False) -> None:
        self._log = self._log or LineLog(self.path, sync_seconds=_SYNC_SECONDS)
        if self._log.size == 0:
            self._log.append(f"{json_line(self._header)}\n".encode())
        self._log.append(f"{line}\n".encode(), sync)

    def _read(self, keep_partial: bool) -> None:
        """Read the file up to the first damaged line, and truncate it there. A file without episodes to keep is deleted."""
        if not self.path.exists():
            return
        good, self._log = 0, LineLog(self.path, sync_seconds=_SYNC_SECONDS)
        for end, line in self._log.lines():
            try:
                record = json.loads(line)
                if good == 0 and record != self._header:
                    break
                if "episode" in record:
                    self._episodes[tuple(record["rng_key"])] = episode_from_record(record["episode"])
                elif "end" in record:
                    self.end = record["end"]
            except (ValueError, KeyError, TypeError, RecursionError):
                break
            good = end
        if self.end is not None or (keep_partial and self._episodes):
            self._log.truncate(good)
        else:
            self._log.close()
            self._log = None
            self._episodes.clear()
            with storage_errors(self.path):
                self.path.unlink()


def remove_batches(directory: Path, first: int, last: int | None = None) -> None:
    """Delete the buffer files of steps `first` to `last` inclusive; without `last`, of all steps from `first` on."""
    remove_steps(directory, _NAME, first, math.inf if last is None else last)
