"""One task in a vault: a question, its truth, and a scripted solution."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from posttrain.errors import InputError

Retrieval = Literal["hop0", "hop1", "hop2", "aggregate", "time"]
Update = Literal["add", "change", "delete", "new", "remove", "relink", "mention"]
Clarification = Literal["no_entity", "no_attribute", "contradiction", "control"]
Filter = Literal["hide_all", "hide_some", "allow_only", "unrelated"]
Variant = Literal[Retrieval, Update, Clarification, Filter]
VARIANTS: dict[str, tuple[str, ...]] = {
    "retrieval": get_args(Retrieval),
    "update": get_args(Update),
    "clarification": get_args(Clarification),
    "filter": get_args(Filter),
}
"""Kind of tasks -> its variants."""
KINDS = tuple(VARIANTS)


@dataclass(frozen=True)
class MemoryTask:
    """A question to a memory agent, with everything needed to score its episode.

    `truth` holds JSON values: `answers` that the reply must state (retrieval, filter, answerable clarification), with
    `operands` that it may state and names `against` that it may not; `change` (update, see `changes.expected`);
    `point` with `type`, `key` and `values` (clarification: what the reply must name, and the values it must not
    choose between); `rule` and `hidden` (filter). Tasks of files may have instead `judge`, the text that a judge grades,
    with its `rubric`, or `asked_after`, if `follow_up` alone decides (update). `hops` is the number of links from `user.md` to the requested fact.
    `solution` is a list of code blocks followed by the reply. `follow_up` is the question asked after an update, see
    `updates.follow_up`.
    """

    kind: str
    variant: str
    theme: str
    question: str
    hops: int
    truth: dict[str, Any] = field(hash=False)
    solution: list[str] = field(hash=False)
    follow_up: "MemoryTask | None" = None

    @property
    def scripted(self) -> bool:
        """Whether the solution is complete, and a program can check it."""
        return "judge" not in self.truth and "asked_after" not in self.truth

    @property
    def reply(self) -> str:
        """The last part of the solution: the reply to the user. Empty if none is known."""
        return self.solution[-1] if self.solution else ""

    @property
    def code(self) -> list[str]:
        """The code blocks of the solution, in order."""
        return self.solution[:-1]

    @property
    def asks(self) -> bool:
        """Whether asking the user is correct."""
        return "point" in self.truth

    def to_record(self) -> dict[str, Any]:
        """The task as JSON values."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**record, "follow_up": self.follow_up.to_record()} if self.follow_up else record


def task_of(record: dict[str, Any]) -> MemoryTask:
    """The task of a record. Raises InputError if the record is invalid."""
    names = set(MemoryTask.__dataclass_fields__) - {"follow_up"}
    missing = names - set(record)
    if missing:
        raise InputError(
            f"the record of a memory task lacks {', '.join(sorted(missing))}; write it again with `posttrain data worlds`"
        )
    after = record.get("follow_up")
    return MemoryTask(**{name: record[name] for name in names}, follow_up=task_of(after) if after else None)
