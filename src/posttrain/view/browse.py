"""Pages of the episodes of a step: filtered, sorted, searched, and read from the store one episode at a time."""

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlencode

from posttrain.episode import Outcome
from posttrain.errors import InputError, RunError
from posttrain.rollout.store import StoredStep, read_head, read_record, stored_records, stored_steps
from posttrain.view.episodes import Sample

PAGE = 25
"""Episodes of a page."""
_PREVIEW = 160
_KEPT = 6
"""Files whose lists are kept in memory."""
_SEARCH_SECONDS = 1.5
"""Time that one request searches."""
SPLITS = ("train", "evaluation", "final")
ENDINGS = ("success", "no success", "terminated", "truncated", "unscored", "failed")
ORDERS = ("order", "best first", "worst first")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list of episodes."""

    step: int
    split: str
    number: int
    """Position in its file."""
    seed: int
    group: int
    index: int
    ending: str
    """`success`, or the outcome."""
    total: float
    """The return."""
    turns: int
    tokens: int
    preview: str

    @property
    def place(self) -> str:
        """The address of the episode on the page of its group."""
        values = {"step": self.step, "split": self.split, "group": self.group, "episode": self.index}
        return f"{urlencode(values)}#e{self.index}"


@dataclass(frozen=True)
class Filter:
    """Which episodes a page shows."""

    step: int | None = None
    split: str = ""
    group: int | None = None
    ending: str = ""
    least: float = -math.inf
    most: float = math.inf
    text: str = ""
    everywhere: bool = False
    """Whether `text` is searched in all steps of the split, from `step` on."""
    order: str = "order"
    page: int = 0

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "Filter":
        """The filter in an address; invalid values are left out."""

        def whole(name: str) -> int | None:
            return int(given[name]) if given.get(name, "").isdecimal() and len(given[name]) < 10 else None

        def number(name: str, default: float) -> float:
            try:
                return float(given.get(name) or default)
            except ValueError:
                return default

        return cls(
            whole("step"),
            given.get("split", "") if given.get("split") in SPLITS else "",
            whole("group"),
            given.get("ending", "") if given.get("ending") in ENDINGS else "",
            number("least", -math.inf),
            number("most", math.inf),
            given.get("text", "")[:500],
            given.get("in") == "all steps",
            given.get("order", "") if given.get("order") in ORDERS else "order",
            whole("page") or 0,
        )

    def address(self, **changed: Any) -> str:
        """The filter as the part of an address after `?`."""
        values: dict[str, Any] = {
            "step": "" if self.step is None else self.step,
            "split": self.split,
            "group": "" if self.group is None else self.group,
            "ending": self.ending,
            "least": "" if self.least == -math.inf else f"{self.least:g}",
            "most": "" if self.most == math.inf else f"{self.most:g}",
            "text": self.text,
            "in": "all steps" if self.everywhere else "this step",
            "order": self.order,
            "page": self.page,
        }
        return urlencode(values | changed)

    def admits(self, entry: Entry) -> bool:
        """Whether the filter shows the episode, apart from its text."""
        ending = self.ending in ("", entry.ending) or (self.ending == "no success" and entry.ending != "success")
        return ending and self.group in (None, entry.group) and self.least <= entry.total <= self.most


@dataclass(frozen=True)
class Found:
    """A page of episodes."""

    entries: list[Entry]
    matching: int
    """Episodes that match; with `onward`, those found so far."""
    onward: int | None = None
    """The step from which a search that took too long continues."""


class Store:
    """Cache of the episodes of recently viewed runs."""

    def __init__(self) -> None:
        self._lists: OrderedDict[tuple[Path, int], list[Entry]] = OrderedDict()
        self._lock = Lock()

    def entries(self, step: StoredStep) -> list[Entry]:
        """A line for each episode of a file. The arrays of tokens are not read."""
        key = step.path, step.path.lstat().st_mtime_ns
        with self._lock:
            if key not in self._lists:
                self._lists[key] = [entry for entry, _ in _heads(step)]
                while len(self._lists) > _KEPT:
                    self._lists.popitem(last=False)
            self._lists.move_to_end(key)
            return self._lists[key]

    def find(self, steps: Sequence[StoredStep], wanted: Filter) -> Found:
        """The page of episodes for `wanted`, of the `steps` of its split."""
        if not steps:
            raise InputError("the run has no stored episodes yet; wait for the first step")
        searched = [step for step in steps if step.step >= (wanted.step or 0)]
        if not (wanted.text and wanted.everywhere):
            searched = [steps[-1] if wanted.step is None else at_step(steps, wanted.step)]
        if not wanted.text:
            return _page([entry for entry in self.entries(searched[0]) if wanted.admits(entry)], wanted)
        until, entries, sought = time.monotonic() + _SEARCH_SECONDS, list[Entry](), wanted.text.lower()
        for step in searched:
            if entries and time.monotonic() > until:
                return _page(entries, wanted, step.step)
            entries += [entry for entry, text in _heads(step) if sought in text.lower() and wanted.admits(entry)]
        return _page(entries, wanted)


def steps_of(directory: Path, split: str) -> tuple[list[StoredStep], str]:
    """The files of a split in order of step, and the split; without one, that of the newest training or other episodes."""
    steps = list(stored_steps(directory))
    present = [one for one in SPLITS if any(step.split == one for step in steps)]
    chosen = split or (present[0] if present else "train")
    return [one for one in steps if one.split == chosen], chosen


def group_of(step: StoredStep, group: int) -> list[Sample]:
    """The episodes of a group with their credit, in order. Only these are unpacked."""
    samples, named = [], b'"group":%d,' % group
    for record in stored_records(step.path):
        if named in record and read_head(step.path, record).get("group") == group:
            samples.append(Sample("", *read_record(step.path, record)))
    return sorted(samples, key=lambda sample: sample.episode.index)


def at_step(steps: Sequence[StoredStep], step: int) -> StoredStep:
    """The file of a step; InputError if there is none."""
    for one in steps:
        if one.step == step:
            return one
    raise InputError(f"step {step} has no stored episodes; choose another step")


def _page(entries: list[Entry], wanted: Filter, onward: int | None = None) -> Found:
    if wanted.order != "order":
        entries = sorted(entries, key=lambda entry: entry.total, reverse=wanted.order == "best first")
    first = wanted.page * PAGE
    return Found(entries[first : first + PAGE], len(entries), onward)


def _heads(step: StoredStep) -> Iterator[tuple[Entry, str]]:
    """A line for each episode, and its whole text."""
    for number, record in enumerate(stored_records(step.path)):
        head = read_head(step.path, record)
        try:
            texts = [str(message.get("content", "")) for message in head["messages"]]
            texts += [str(turn["answer"]) for turn in head["turns"]]
            yield _entry(step, number, head), "\n".join([*texts, str(head["failure"] or "")])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunError(f"episode {number} of {step.path} is damaged ({error!r}); delete the file") from error


def _entry(step: StoredStep, number: int, head: Mapping[str, Any]) -> Entry:
    turns = head["turns"]
    last: dict[str, Any] = turns[-1] if turns else {"answer": "", "info": {}}
    failed = head["outcome"] == Outcome.FAILED
    success = not failed and bool(last["info"].get("success", False))
    return Entry(
        step.step,
        step.split,
        number,
        int(head["seed"]),
        int(head["group"]),
        int(head["index"]),
        "success" if success else str(head["outcome"]),
        float(sum(turn["reward"] for turn in turns)),
        len(turns),
        sum(turn["stop"] - turn["start"] for turn in turns),
        " ".join(str(head["failure"] or last["answer"])[:_PREVIEW].split()),
    )
