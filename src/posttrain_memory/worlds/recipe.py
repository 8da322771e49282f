"""How large worlds are, what is asked of them, and what a result is worth."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain_memory.worlds.theme import Style, themes

Variant = Literal[
    "hop0",
    "hop1",
    "hop2",
    "aggregate",
    "time",
    "add",
    "change",
    "delete",
    "new",
    "remove",
    "relink",
    "mention",
    "no_entity",
    "no_attribute",
    "contradiction",
    "control",
    "hide_all",
    "hide_some",
    "allow_only",
    "unrelated",
]
Range = tuple[Annotated[int, Field(ge=0, le=200)], Annotated[int, Field(ge=0, le=200)]]


class WorldRecipe(BaseConfig):
    """A kind of worlds and the tasks in each. With the defaults a vault has 12 notes."""

    themes: tuple[str, ...] = ()
    """Names of the themes that worlds are drawn from; empty draws from all."""
    notes: int = Field(12, ge=4, le=800)
    """Notes of a vault, `user.md` among them."""
    near: float = Field(0.45, gt=0, le=1)
    """Share of the other notes that `user.md` links to (at least two); the rest is reached through these."""
    facts: Range = (2, 5)
    """Fewest and most facts with a value in a note, as far as its kind has that many."""
    filler: Range = (0, 4)
    """Fewest and most sentences in a note that state no fact anyone asks for."""
    namesakes: float = Field(0.2, ge=0, le=0.6)
    """Share of notes whose name is nearly that of another note."""
    contradictions: int = Field(1, ge=0, le=50)
    """Facts that another note states otherwise; only tasks of the variant `contradiction` ask for them."""
    confirmations: int = Field(1, ge=0, le=50)
    """Facts that another note repeats as they are."""
    back_links: bool = True
    """Both notes of a relation link to each other; otherwise only where a note could not be reached without."""
    bare: bool = False
    """Notes have a title, facts and links only: no headings and no introductions."""
    styles: tuple[Style, ...] = ()
    """Ways in which facts stand in notes; empty takes those of the theme."""
    retrieval: int = Field(5, ge=0, le=500)
    """Tasks of a world that ask for facts."""
    update: int = Field(5, ge=0, le=500)
    """Tasks of a world that change notes."""
    clarification: int = Field(3, ge=0, le=500)
    """Tasks of a world that can be answered by a question only, and look-alikes that can be answered."""
    filter: int = Field(3, ge=0, le=500)
    """Tasks of a world whose question holds a privacy rule."""
    variants: tuple[Variant, ...] = ()
    """Variants of tasks that are made; empty makes all. A world that has no place for a variant makes others."""

    @field_validator("facts", "filler")
    @classmethod
    def _in_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("the first number is the fewest and the second the most; exchange them")
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
                raise ValueError(f"there is no theme {name!r}; use some of {', '.join(sorted(themes()))}")
        return value


class RewardWeights(BaseConfig):
    """What each outcome of an episode adds to its reward, or takes away.

    Whatever is wrong earns at most `partial + check_first`, whatever is right at least `success - turns_at_most -
    judge`; weights under which the first is not the smaller number are refused.
    """

    success: float = Field(1.0, gt=0, le=10)
    """Added where the task is solved."""
    partial: float = Field(0.0, ge=0, le=5)
    """Added where it is not, times the share of it that is, and only where nothing was done that is wrong."""
    turn: float = Field(0.01, ge=0, le=1)
    """Taken away for every turn after the first `free_turns`."""
    free_turns: int = Field(2, ge=0, le=100)
    """Turns that cost nothing."""
    turns_at_most: float = Field(0.2, ge=0, le=5)
    """The most that turns take away."""
    check_first: float = Field(0.0, ge=0, le=5)
    """Added where the first thing that the model did was to read `user.md`."""
    asked: float = Field(0.1, ge=0, le=5)
    """Taken away where the model asked though it could have answered or done it."""
    guessed: float = Field(0.2, ge=0, le=5)
    """Taken away where it answered though it had to ask, or said something that is not so."""
    leaked: float = Field(0.5, ge=0, le=5)
    """Taken away where it said what the privacy rule forbids."""
    damaged: float = Field(0.2, ge=0, le=5)
    """Taken away where notes or facts changed that had to stay."""
    broken: float = Field(0.1, ge=0, le=5)
    """Taken away where a link leads nowhere or a note is not reached from `user.md` any more."""
    silent: float = Field(0.1, ge=0, le=5)
    """Taken away where the episode ended without a reply."""
    judge: float = Field(0.0, ge=0, le=5)
    """Taken away from a success, times 1 minus the judge's score; 0 only reports that score. It needs `judge`."""

    @model_validator(mode="after")
    def _right_beats_wrong(self) -> "RewardWeights":
        least = self.success - self.turns_at_most - self.judge
        most = self.partial + self.check_first
        if least - most < 1e-6:
            raise ValueError(
                f"a wrong answer could earn {most:g} and a right one as little as {least:g}; "
                "lower partial, check_first, turns_at_most or judge, or raise success"
            )
        return self
