"""Recipe keys of generated worlds, their tasks, and rewards."""

from typing import Annotated

from pydantic import Field, field_validator

from posttrain.recipe.base import BaseConfig, Text
from posttrain_memory.worlds.task import Variant
from posttrain_memory.worlds.theme import Style, themes

Range = tuple[Annotated[int, Field(ge=0, le=200)], Annotated[int, Field(ge=0, le=200)]]


class WorldRecipe(BaseConfig):
    """A kind of generated worlds and their tasks. By default a vault has 12 notes."""

    themes: tuple[Text, ...] = ()
    """Names of the themes to draw worlds from; empty uses all."""
    notes: int = Field(12, ge=4, le=800)
    """Number of notes in a vault, including `user.md`."""
    near: float = Field(0.45, gt=0, le=1)
    """Share of the other notes that `user.md` links to (at least two). The rest is reached through these."""
    facts: Range = (2, 5)
    """Minimum and maximum number of facts in a note, as far as its kind has that many."""
    filler: Range = (0, 4)
    """Minimum and maximum number of sentences in a note that state no fact."""
    namesakes: float = Field(0.2, ge=0, le=0.6)
    """Share of notes whose name resembles that of another note."""
    contradictions: int = Field(1, ge=0, le=50)
    """Number of facts for which another note states a different value. Only tasks of the variant `contradiction` ask
    for them.
    """
    confirmations: int = Field(1, ge=0, le=50)
    """Number of facts that another note repeats."""
    back_links: bool = True
    """Both notes of a relation link to each other. Otherwise only where a note would be unreachable."""
    bare: bool = False
    """Notes consist of a title, facts and links only, without headings and introductions."""
    styles: tuple[Style, ...] = ()
    """Layouts of facts in notes; empty uses those of the theme."""
    retrieval: int = Field(5, ge=0, le=500)
    """Number of tasks per world that ask for facts."""
    update: int = Field(5, ge=0, le=500)
    """Number of tasks per world that change notes."""
    clarification: int = Field(3, ge=0, le=500)
    """Number of tasks per world that can only be answered by asking back, including similar ones that can be
    answered.
    """
    filter: int = Field(3, ge=0, le=500)
    """Number of tasks per world whose question contains a privacy rule."""
    variants: tuple[Variant, ...] = ()
    """Task variants to generate; empty generates all. Where a world has no room for a variant, other variants of the same kind in this list take its place. If none has room, the world has fewer tasks."""

    @field_validator("facts", "filler")
    @classmethod
    def _in_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("the minimum is larger than the maximum; exchange them")
        return value

    @field_validator("facts")
    @classmethod
    def _some_fact(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] < 1:
            raise ValueError("every note has at least one fact; use 1 or more")
        return value

    @field_validator("themes")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in themes():
                raise ValueError(f"unknown theme {name!r}; choose from {', '.join(sorted(themes()))}")
        return value


class RewardWeights(BaseConfig):
    """Reward added or subtracted for each outcome of an episode.

    A wrong episode earns at most `partial + check_first` and the sum over messages with code, a right one at least
    `success - turns_at_most - judge`. Weights for which the first is not smaller than the second are rejected.
    """

    success: float = Field(1.0, gt=0, le=10)
    """Added if the task is solved."""
    partial: float = Field(0.0, ge=0, le=5)
    """Added if the task is not solved and nothing wrong was done, times the solved share."""
    turn: float = Field(0.01, ge=0, le=1)
    """Subtracted for every turn after the first `free_turns`."""
    free_turns: int = Field(2, ge=0, le=100)
    """Number of turns without cost."""
    turns_at_most: float = Field(0.2, ge=0, le=5)
    """Maximum total subtracted for turns."""
    check_first: float = Field(0.0, ge=0, le=5)
    """Added if the first tool call reads `user.md`."""
    code: float = Field(0.0, ge=0, le=5)
    """Added for the first message with code, in its turn. It falls linearly to 0 over `code_turns` such messages."""
    code_turns: int = Field(4, ge=1, le=100)
    """Number of messages with code that are rewarded."""
    asked: float = Field(0.1, ge=0, le=5)
    """Subtracted if the model asks although it could have answered or acted."""
    guessed: float = Field(0.2, ge=0, le=5)
    """Subtracted if the model answers although it should have asked, or says something false."""
    leaked: float = Field(0.5, ge=0, le=5)
    """Subtracted if the reply says what the privacy rule forbids."""
    damaged: float = Field(0.2, ge=0, le=5)
    """Subtracted if notes or facts changed that should have stayed."""
    broken: float = Field(0.1, ge=0, le=5)
    """Subtracted if a link becomes broken or a note becomes unreachable from `user.md`."""
    silent: float = Field(0.1, ge=0, le=5)
    """Subtracted if the episode ends without a reply."""
    judge: float = Field(0.0, ge=0, le=5)
    """Subtracted from a success, times 1 minus the judge's score. 0 only reports the score. Requires `judge`."""

    def code_reward(self, number: int) -> float:
        """The reward of the message with code of that number, from 0."""
        return self.code * max(0.0, 1 - number / self.code_turns)

    @property
    def form(self) -> float:
        """The most that an episode earns for its form, right or wrong."""
        return self.check_first + sum(map(self.code_reward, range(self.code_turns)))

    def _check(self) -> None:
        least = self.success - self.turns_at_most - self.judge
        most = self.partial + self.form
        if least - most < 1e-6:
            raise ValueError(
                f"a wrong answer could earn {most:g} and a right one as little as {least:g}; "
                "lower partial, check_first, code, turns_at_most or judge, or raise success"
            )
