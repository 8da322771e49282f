"""Games of TextArena for one player."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Annotated, Any

from pydantic import Field

from posttrain.environments.global_random import GlobalRandom
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import EXECUTES, Text
from posttrain.recipe.components import EnvironmentRecipe
from posttrain_environments.base import Adapter, AdapterRecipe, Outcome

_WRAPPED = ("-raw", "-train")
"""Suffixes of names under which a game is registered again with other wrappers."""
_INVALID = "attempted an invalid move"
"""Text with which games report an invalid move."""
_lock = Lock()


class TextArenaRecipe(AdapterRecipe):
    """Keys of `textarena`."""

    type: Text = "textarena"
    """A game of TextArena for one player."""
    game: Text = "GuessTheNumber-v0"
    """The name of the game. `posttrain env list textarena` lists them."""
    keys: Annotated[dict[str, bool | int | float | str], EXECUTES] = {}
    """Arguments of the game's class, in place of those that it is registered with."""
    max_turns: int = Field(100, ge=1)
    """Answers after which an episode is truncated. Games have limits of their own."""


class TextArena(Adapter):
    """A game of TextArena for one player. Success is a return of at least `success_return`."""

    Recipe = TextArenaRecipe

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError if TextArena is not installed or has no such game."""
        super().__init__(recipe)
        if self.recipe.game not in _registry():
            raise InputError(
                f"environment.game: TextArena has no game {self.recipe.game!r}; `posttrain env list textarena` lists them"
            )
        self._game: Any = None

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """Games that start with one player, and games that do not start at all, such as those with missing files."""
        return [{"game": name} for name in sorted(_registry()) if not name.endswith(_WRAPPED) and _for_one(name)]

    def _start(self, seed: int) -> tuple[str, None]:
        self._random = GlobalRandom("textarena", self.recipe.game, seed)
        with self._random.active(), contextlib.redirect_stdout(io.StringIO()):
            self._game = _made(self.recipe.game, self.recipe.keys)
            self._game.reset(num_players=1, seed=seed)
            return self._observed(), None

    def _apply(self, action: str) -> Outcome:
        with self._random.active():
            over, _ = self._game.step(action)
            text = self._observed()
            rejected = "invalid move" if _INVALID in text else None
            if not over:
                return Outcome(text, 0.0, False, rejected=rejected)
            rewards, facts = self._game.close()
        known = (facts or {}).get(0, {})
        rejected = "invalid move" if known.get("invalid_move") else None
        info = {key: known[key] for key in ("reason",) if known.get(key)}
        # A game without rewards has no result. This is a failure and must not become a reward of 0.
        if not rewards or rewards.get(0) is None:
            raise RuntimeError(f"{self.recipe.game} ended without a reward")
        return Outcome(text, float(rewards[0]), True, rejected=rejected, info=info)

    def _observed(self) -> str:
        """The new messages of the game, without the player's own."""
        _, messages = self._game.get_observation()
        if isinstance(messages, str):
            return messages
        return "\n".join(text for _, text, kind in messages if getattr(kind, "name", "") != "PLAYER_ACTION")


def _registry() -> Mapping[str, Any]:
    require_module("textarena", "environment.type textarena")
    registry: Mapping[str, Any] = require_module(
        "textarena.envs.registration", "environment.type textarena"
    ).ENV_REGISTRY
    return registry


def _made(name: str, keys: Mapping[str, Any]) -> Any:
    """The game without wrappers, which would repeat earlier messages in every observation."""
    raw = f"{name}-raw"
    make = require_module("textarena", "environment.type textarena").make
    return make(raw if raw in _registry() else name, **keys)


@cache
def _for_one(name: str) -> bool:
    """Whether one player can start the game, or no number of players can."""
    with _lock, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            with GlobalRandom("textarena").active():
                _made(name, {}).reset(num_players=1, seed=0)
        except Exception as error:
            # Games reject a wrong number of players with an AssertionError or ValueError.
            return "player" not in str(error).lower()
        return True
