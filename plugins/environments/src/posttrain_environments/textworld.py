"""Games of TextWorld, generated from a seed and compiled once."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.environments.game import play, require
from posttrain.environments.global_random import GlobalRandom
from posttrain.plugins import require_module
from posttrain.recipe.base import EXECUTES, Text, Writes
from posttrain.recipe.components import EnvironmentRecipe
from posttrain_environments.base import Adapter, AdapterRecipe, Outcome

Challenge = Literal["simple", "coin_collector", "treasure_hunter", "cooking"]
_SETTINGS: dict[str, dict[str, Any]] = {
    "simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "coin_collector": {"level": 1},
    "treasure_hunter": {"level": 1},
    "cooking": {
        "recipe": 1,
        "take": 1,
        "go": 1,
        "open": True,
        "cook": False,
        "cut": False,
        "drop": False,
        "recipe_seed": 0,
        "split": None,
    },
}
"""Challenge -> its default settings, which a recipe may override."""
_LONGEST_COMMAND = 100
_WRONG = "wait"

_lock = Lock()
"""Generator, compiler and interpreter are not thread-safe."""


class TextWorldRecipe(AdapterRecipe):
    """Keys of `textworld`."""

    type: Text = "textworld"
    """A generated text adventure."""
    challenge: Challenge = "coin_collector"
    """The kind of game."""
    settings: Annotated[dict[str, bool | int | str], EXECUTES] = {}
    """Settings of the challenge, for example `{level: 5}` for `coin_collector` and `treasure_hunter`, `{goal: brief}`
    for `simple` and `{take: 2, cook: true}` for `cooking`.
    """
    games: int = Field(1000, ge=1)
    """Number of different games: the game of a seed is that of `seed % games`. Each is compiled once, in one to ten
    seconds.
    """
    commands: bool = False
    """Show the admissible commands in every message."""
    cache: Writes = "~/.cache/posttrain/textworld"
    """Folder of compiled games."""


class TextWorld(Adapter):
    """A text adventure of TextWorld. Success is the end of its quest. The reward is the share of the game's score."""

    Recipe = TextWorldRecipe

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError if TextWorld is not installed."""
        super().__init__(recipe)
        self._textworld = require_module("textworld", "environment.type textworld")
        self._game: Any = None

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """Four challenges in several sizes."""
        levels = [1, 5, 10, 20]
        tasks: list[dict[str, Any]] = [
            {"challenge": "simple", "settings": {"goal": goal}} for goal in ("detailed", "brief", "none")
        ]
        tasks += [{"challenge": "coin_collector", "settings": {"level": level}} for level in (*levels, 105, 205)]
        tasks += [{"challenge": "treasure_hunter", "settings": {"level": level}} for level in levels]
        tasks += [{"challenge": "cooking"}]
        return [
            *tasks,
            {"challenge": "cooking", "settings": {"recipe": 2, "take": 2, "go": 6, "cook": True, "cut": True}},
        ]

    def _start(self, seed: int) -> tuple[str, str]:
        with _lock:
            infos = self._textworld.EnvInfos(
                admissible_commands=True, policy_commands=True, won=True, score=True, max_score=True
            )
            file = _game_file(self.recipe, seed % self.recipe.games)
            self._game = self._textworld.start(str(file), infos)
            self._state = self._game.reset()
        self._score = 0
        return self._shown(), (
            "You play a text adventure. Answer only with one command, such as `take key` or `go east`. "
            f"You have {self.recipe.max_turns} commands."
        )

    def _apply(self, action: str) -> Outcome:
        command = action.strip()
        if not command or "\n" in command or len(command) > _LONGEST_COMMAND:
            reason = f"a command is one line of at most {_LONGEST_COMMAND} characters"
            return Outcome(f"Rejected: {reason}.", 0.0, False, rejected=reason)
        with _lock:
            self._state, score, over = self._game.step(command)
        # The score is None until the first change.
        gained, self._score = (score or 0) - self._score, score or 0
        return Outcome(self._shown(), gained / max(1, self._state.max_score or 1), bool(over), bool(self._state.won))

    def _shown(self) -> str:
        """The output of the game without the banner, the prompt and the line with the score."""
        text = re.sub(r"(?s)^.*\$\$[^\n]*\n", "", self._state.feedback or "")
        text = re.sub(r"\n>[^\n]*\s*$", "", text)
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if self.recipe.commands:
            text += f"\nCommands: {', '.join(self._state.admissible_commands)}"
        return text

    def _close(self) -> None:
        if getattr(self, "_game", None) is not None:
            self._game.close()
            self._game = None

    def expert(self) -> str:
        """The next command of the winning policy, which TextWorld adapts to the state."""
        if self._turns_left < 1:
            raise RuntimeError("the episode is over; call reset")
        commands = self._state.policy_commands
        return str(commands[0]) if commands else _WRONG

    def random_answer(self, draw: float) -> str:
        """One of the admissible commands."""
        commands = self._state.admissible_commands
        return str(commands[min(int(draw * len(commands)), len(commands) - 1)])

    @classmethod
    def validate(cls, recipe: TextWorldRecipe, seeds: Sequence[int]) -> None:
        """The winning policy earns the whole score, and waiting earns nothing."""
        for seed in sorted({seed % recipe.games for seed in seeds}):
            won = play(cls(recipe), seed)
            require(won[-1].info["success"], seed, f"the winning policy does not win within {recipe.max_turns} turns")
            total = sum(step.reward for step in won)
            require(abs(total - 1) < 1e-9, seed, f"the winning policy earns {total:g}, not 1")
            waited = play(cls(recipe), seed, [_WRONG] * recipe.max_turns)
            require(not waited[-1].info["success"], seed, "waiting wins")
            require(sum(step.reward for step in waited) <= 0, seed, "waiting is rewarded")


def _game_file(recipe: TextWorldRecipe, seed: int) -> Path:
    """The compiled game of `seed`, from the cache if possible."""
    textworld = require_module("textworld", "environment.type textworld")
    settings = {**_SETTINGS[recipe.challenge], **recipe.settings}
    name = json.dumps([textworld.__version__, recipe.challenge, settings, seed], sort_keys=True)
    key = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    folder = Path(recipe.cache).expanduser() / key
    if not (folder / "game.z8").is_file():
        _compile(recipe.challenge, settings, seed, folder)
    return folder / "game.z8"


def _compile(challenge: str, settings: Mapping[str, Any], seed: int, folder: Path) -> None:
    """Generate and compile a game, and move its files to `folder` atomically, so that other processes find all or
    none.
    """
    challenges = require_module("textworld.challenges", "environment.type textworld").CHALLENGES
    generator = require_module("textworld.generator", "environment.type textworld")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="making", dir=folder.parent))
    try:
        options = require_module("textworld", "environment.type textworld").GameOptions()
        with GlobalRandom("textworld", challenge, seed).active():
            options.seeds = seed
            options.path = str(made / "game.z8")
            generator.compile_game(challenges[f"tw-{challenge}"][1](settings, options), options)
        try:
            os.rename(made, folder)
        except OSError:
            # Another process was first.
            if not (folder / "game.z8").is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
