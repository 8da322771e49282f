"""Environments of gymnasium with text or with a few named actions."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from posttrain.environments.game import FormatRecipe, Game, GameRecipe, Rejected
from posttrain.environments.global_random import GlobalRandom
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import Executes, Mark, Text
from posttrain.recipe.components import EnvironmentRecipe


@dataclass(frozen=True)
class _Spec:
    """Description of an environment whose actions and observations are numbers, for the policy."""

    actions: tuple[str, ...]
    rules: str
    ends_in_success: bool = False
    """Whether reaching the goal is the only termination."""


_LAKE = _Spec(
    ("Left", "Down", "Right", "Up"),
    "Walk from S over ice (F) to the goal (G). H is a hole. You are at the marked cell.",
)
_SPECS = {
    "FrozenLake-v1": _LAKE,
    "FrozenLake8x8-v1": _LAKE,
    "CliffWalking-v1": _Spec(
        ("Up", "Right", "Down", "Left"),
        "Walk from the lower left to the target T at the lower right. Stepping into the cliff C takes you back to the start.",
        ends_in_success=True,
    ),
    "Taxi-v4": _Spec(
        ("South", "North", "East", "West", "Pick up", "Drop off"),
        "You drive the taxi (marked cell). Pick up the passenger at one of R, G, Y, B and drop them off at the destination.",
    ),
    "Blackjack-v1": _Spec(
        ("Stick", "Hit"), "Blackjack. Each state is your sum, the dealer's card, and whether you have a usable ace."
    ),
}
_SPECS["Taxi-v3"], _SPECS["CliffWalking-v0"] = _SPECS["Taxi-v4"], _SPECS["CliffWalking-v1"]
_best: dict[tuple[str, str], tuple[int, ...]] = {}
"""Name and keys of an environment -> its optimal actions, by state."""
_DISCOUNT = 0.999
"""Discount of value iteration. Below 1, so that the expert takes the shortest path."""


class _AnyText(FormatRecipe):
    """Answers whose content is any text."""

    def parse(self, text: str, names: Sequence[str]) -> tuple[str, ...] | Rejected:
        content = self._content(text)
        return content if isinstance(content, Rejected) else (content,)

    def instructions(self, names: Sequence[str]) -> str:
        thought = "<think>your reason</think> and then " if self.thinking else ""
        return f"Answer only {thought}<answer>your text</answer>."


class GymnasiumRecipe(GameRecipe):
    """Keys of `gymnasium`."""

    type: Text = "gymnasium"
    """An environment of gymnasium."""
    id: Executes = "FrozenLake-v1"
    """Its name for `gymnasium.make`, with `module:` in front if a module registers it."""
    keys: Annotated[dict[str, Any], Mark("executes", "id")] = {}
    """Arguments of `gymnasium.make`."""
    actions: list[Text] = []
    """Names of the actions 0, 1, ... of a discrete action space. Default: the numbers, and words for FrozenLake, Taxi,
    CliffWalking and Blackjack.
    """
    rules: Text | None = None
    """Description of the task in the system message."""
    observation: Literal["auto", "text", "value"] = "auto"
    """`text`: what `render` writes with `render_mode="ansi"`; `value`: the observation itself; `auto`: text where there
    is one.
    """
    success_return: float | None = None
    """Success is a return of at least this. Default: `is_success` in `info`, else an end by its own rules with a return
    above 0.
    """
    max_turns: int = Field(50, ge=1)
    """Turns after which an episode is truncated."""


class Gymnasium(Game):
    """An environment of gymnasium with a discrete or text action space."""

    Recipe = GymnasiumRecipe
    self_contained = False

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError if gymnasium is not installed, or the environment cannot be created or shown as text."""
        super().__init__(recipe)
        self._env = self._made()
        space = self._env.action_space
        kind = type(space).__name__
        if kind == "Discrete":
            spec = _SPECS.get(self.recipe.id)
            given = self.recipe.actions or (spec.actions if spec else [str(n) for n in range(int(space.n))])
            if len(given) != space.n:
                raise InputError(f"environment.actions: {self.recipe.id} has {space.n} actions, not {len(given)}")
            self.actions = tuple(given)
        elif kind == "Text":
            self.actions, self.format = ("text", "text"), _AnyText(**self.recipe.format.model_dump())
        else:
            raise InputError(
                f"environment.id: the actions of {self.recipe.id} are {space}; use an environment with a Discrete or Text space"
            )
        self._discrete = kind == "Discrete"

    def _made(self) -> Any:
        gymnasium = require_module("gymnasium", "environment.type gymnasium")
        modes: list[Any] = [{"render_mode": "ansi"}] if self.recipe.observation != "value" else []
        modes += [{}] if self.recipe.observation != "text" else []
        error: Exception | None = None
        with warnings.catch_warnings():
            # Warnings about versions and render modes.
            warnings.simplefilter("ignore")
            for mode in modes:
                try:
                    env = gymnasium.make(self.recipe.id, **{**self.recipe.keys, **mode})
                    if mode and "ansi" not in env.metadata.get("render_modes", []):
                        continue
                    self._rendered = bool(mode)
                    return env
                except Exception as raised:
                    error = raised
        reason = f"{type(error).__name__}: {error}" if error else "it has no render mode `ansi`"
        raise InputError(f"environment.id: gymnasium cannot make {self.recipe.id} ({reason})")

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """The toy-text environments of gymnasium."""
        known = require_module("gymnasium", "environment.type gymnasium").registry
        tasks: list[dict[str, Any]] = [{"id": name, "max_turns": 100} for name in _SPECS if name in known]
        firm = [
            {"id": n, "keys": {"is_slippery": False}, "max_turns": 100} for n in known if n.startswith("FrozenLake")
        ]
        return [*tasks, *firm]

    def _begin(self, seed: int) -> None:
        self._random = GlobalRandom("gymnasium", self.recipe.id, seed)
        with self._random.active():
            self._observation, _ = self._env.reset(seed=seed)
        self._over = self._terminated = False
        self._return, self._info = 0.0, dict[str, Any]()

    def _rules(self) -> str:
        spec = _SPECS.get(self.recipe.id)
        return self.recipe.rules or (spec.rules if spec else f"Solve the task {self.recipe.id}.")

    def _state(self, first: bool) -> str:
        if not self._rendered:
            return str(self._observation)
        # Terminal colors mark a cell.
        text = str(self._env.render())
        return text.replace("\x1b[41m", "[").replace("\x1b[43m", "[").replace("\x1b[0m", "]").strip("\n")

    def _key(self) -> str:
        return str(self._observation)

    def _act(self, name: str) -> float:
        action = self.actions.index(name) if self._discrete else name
        if not self._discrete and not self._env.action_space.contains(action):
            return 0.0
        with self._random.active():
            self._observation, reward, ended, cut, self._info = self._env.step(action)
        self._over, self._terminated = bool(ended or cut), bool(ended)
        self._return += float(reward)
        return float(reward)

    def _status(self) -> tuple[bool, bool]:
        if self.recipe.success_return is not None:
            return self._over, self._return >= self.recipe.success_return
        if "is_success" in self._info:
            return self._over, bool(self._info["is_success"])
        spec = _SPECS.get(self.recipe.id)
        won = self._return > 0 or (spec is not None and spec.ends_in_success)
        return self._over, self._terminated and won

    def _plan(self) -> tuple[list[str], str]:
        model = getattr(self._env.unwrapped, "P", None)
        if model is None or not self._discrete:
            raise NotImplementedError(f"{self.recipe.id} has no transition table, so no expert is known")
        key = self.recipe.id, repr(sorted(self.recipe.keys.items()))
        if key not in _best:
            _best[key] = _optimal_actions(model)
        return [self.actions[_best[key][int(self._env.unwrapped.s)]]], "The best action by value iteration."


def _optimal_actions(transitions: Any) -> tuple[int, ...]:
    """The optimal action of every state, by value iteration.

    `transitions[state][action]` is a list of (probability, next state, reward, whether the episode ends).
    """
    states, actions = len(transitions), len(transitions[0])
    rewards = np.zeros((states, actions))
    following = np.zeros((states, actions, states))
    for state in range(states):
        for action in range(actions):
            for probability, reached, reward, end in transitions[state][action]:
                rewards[state, action] += probability * reward
                if not end:
                    following[state, action, reached] += probability
    values = np.zeros(states)
    for _ in range(20_000):
        new = (rewards + _DISCOUNT * following @ values).max(axis=1)
        if np.abs(new - values).max() < 1e-10:
            break
        values = new
    choices = (rewards + _DISCOUNT * following @ values).argmax(axis=1)
    return tuple(int(choice) for choice in choices)
