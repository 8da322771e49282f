"""Shared parts of adapters to third-party text environments: turns, limits, success and the end of an episode."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from posttrain.environments.protocol import Environment, Message, Observation, Step
from posttrain.recipe.base import Text
from posttrain.recipe.components import EnvironmentRecipe


@dataclass(frozen=True)
class Outcome:
    """The effect of one answer."""

    text: str
    """The text that the environment shows next."""
    reward: float
    over: bool
    """Whether the environment ended the episode."""
    success: bool | None = None
    """Whether the episode succeeded; None: determined by the return, see `AdapterRecipe.success_return`."""
    rejected: str | None = None
    """Why the answer was invalid, if it was."""
    info: dict[str, Any] = field(default_factory=dict)


class AdapterRecipe(EnvironmentRecipe):
    """Keys of every adapter."""

    max_turns: int = Field(50, ge=1)
    """Answers after which an episode is truncated."""
    system: Text | None = None
    """System message, in place of the one that the adapter writes."""
    success_return: float = 1.0
    """Success is a return of at least this, where the environment does not report success."""


class Adapter(Environment):
    """An environment of another package. A subclass implements `_start` and `_apply`."""

    self_contained = False
    blocking = True

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        super().__init__(recipe)
        self._turns_left, self._return = 0, 0.0

    def reset(self, seed: int) -> Observation:
        """Start the task of `seed`: a system message, if there is one, and the text that the environment shows."""
        self._close()
        text, system = self._start(seed)
        self._turns_left, self._return = self.recipe.max_turns, 0.0
        system = self.recipe.system or system
        return Observation([*([{"role": "system", "content": system}] if system else []), _user(text)])

    def step(self, action: str) -> Step:
        """Apply one answer. RuntimeError after the last step."""
        if self._turns_left < 1:
            raise RuntimeError("the episode is over; call reset")
        try:
            outcome = self._apply(action)
        except BaseException:
            self._turns_left = 0
            self._close()
            raise
        self._turns_left -= 1
        self._return += outcome.reward
        truncated = not outcome.over and self._turns_left == 0
        info = dict(outcome.info)
        if outcome.rejected is not None:
            info["rejected"] = outcome.rejected
        if outcome.over or truncated:
            reached = self._return >= self.recipe.success_return - 1e-9
            info["success"] = reached if outcome.success is None else outcome.success
            self._turns_left = 0
            self._close()
        return Step([_user(outcome.text)], outcome.reward, outcome.over, truncated, info)

    def __del__(self) -> None:
        # The attribute is missing if the constructor raised.
        if hasattr(self, "_turns_left"):
            self._close()

    @abstractmethod
    def _start(self, seed: int) -> tuple[str, str | None]:
        """Start the task of `seed`. Returns the text to show, and a system message."""

    @abstractmethod
    def _apply(self, action: str) -> Outcome:
        """Apply one answer."""

    def _close(self) -> None:
        """Release the resources of the episode. Called at its end, and possibly again."""


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
