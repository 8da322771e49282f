"""The pages of the episodes of a step, filtered, sorted and searched, and of the episodes of a group side by side.

Episodes are read from the store one at a time.
"""

import itertools
import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlencode

from posttrain.episode import Outcome
from posttrain.errors import InputError, RunError
from posttrain.rollout.store import StoredStep, read_head, read_record, stored_records, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.view.episodes import (
    TINTS,
    Look,
    Sample,
    Tint,
    episode_page,
    parting_of,
    prompt_text,
    scale_of,
    token_decoder,
    unit_credit_recipe,
)

PAGE = 25
"""Episodes of a page."""
_KEPT = 6
"""Files whose lists are kept in memory."""
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

        split, ending, order, text = (given.get(name, "") for name in ("split", "ending", "order", "text"))
        return cls(
            whole("step"),
            split if split in SPLITS else "",
            whole("group"),
            ending if ending in ENDINGS else "",
            number("least", -math.inf),
            number("most", math.inf),
            text[:500],
            given.get("in") == "all steps",
            order if order in ORDERS else "order",
            whole("page") or 0,
        )

    def address(self, **changed: Any) -> str:
        """The filter as the part of an address after `?`."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "everywhere"}
        limits = {name: "" if math.isinf(values[name]) else f"{values[name]:g}" for name in ("least", "most")}
        values |= limits | {"in": "all steps" if self.everywhere else "this step"} | changed
        return urlencode({name: "" if value is None else value for name, value in values.items()})

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
            searched = [at_step(steps, wanted.step)]
        if not wanted.text:
            return _page([entry for entry in self.entries(searched[0]) if wanted.admits(entry)], wanted)
        until, entries, sought = time.monotonic() + 1.5, list[Entry](), wanted.text.lower()  # a request takes 1.5 s
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


def group_page(run: RunDirectory, given: Mapping[str, str], store: Store) -> dict[str, Any]:
    """The values of the template for the step, split and group in `given`."""
    wanted = Filter.of(given)
    group = wanted.group or 0
    steps, split = steps_of(run.episodes, wanted.split)
    if not steps:
        raise InputError(f"{run.path} has no stored episodes of this kind; go back to the run")
    step, samples, named = at_step(steps, wanted.step), [], b'"group":%d,' % group
    for record in stored_records(step.path):  # only the episodes of the group are unpacked
        if named in record and read_head(step.path, record).get("group") == group:
            samples.append(Sample("", *read_record(step.path, record)))
    samples.sort(key=lambda sample: sample.episode.index)
    if not samples:
        raise InputError(f"step {step.step} has no group {group}; go back to the episodes of the run")
    usual: Tint = "advantage" if any(sample.advantages for sample in samples) else "log-probability"
    in_units = any(sample.units is not None for sample in samples)
    tints = [one for one in TINTS if in_units or one != "unit credit"]
    tint: Tint = next((one for one in tints if one == given.get("tint")), usual)
    decode, credited = token_decoder(run), unit_credit_recipe(run)
    parting = parting_of(samples, decode)
    scale = scale_of(samples, tint)
    pages = []
    for number, sample in enumerate(samples):
        part = (parting.turn, parting.token) if parting and number in (parting.best, parting.worst) else None
        pages.append((sample.episode, episode_page(sample, Look(scale, tint, True, part), decode, credited, run.path)))
    # What all episodes begin with, the prompt, is shown once.
    columns = zip(*(page.messages for _, page in pages), strict=False)
    alike = itertools.takewhile(lambda row: row[0].turn is None and all(one == row[0] for one in row), columns)
    asked = [row[0] for row in alike] if len(pages) > 1 else []
    pages = [(episode, replace(page, messages=page.messages[len(asked) :])) for episode, page in pages]
    returns = [sample.episode.total_reward for sample in samples]
    groups = [entry.group for entry in store.entries(step)]
    return {
        "step": step,
        "split": split,
        "group": group,
        "before": max((one for one in groups if one < group), default=None),
        "after": min((one for one in groups if one > group), default=None),
        "asked": asked,
        "mean": statistics.fmean(returns),
        "spread": statistics.pstdev(returns),
        "pages": pages,
        "prompt": prompt_text(samples[0].episode, decode),
        "parting": parting,
        "tint": tint,
        "tints": tints,
        "scale": scale,
        "chosen": given.get("episode", ""),
    }


def at_step(steps: Sequence[StoredStep], step: int | None) -> StoredStep:
    """The file of a step, or the last one for None; InputError if there is none."""
    for one in reversed(steps):
        if step in (None, one.step):
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
        " ".join(str(head["failure"] or last["answer"])[:160].split()),
    )
