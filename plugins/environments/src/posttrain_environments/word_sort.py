"""Put a word into one of four boxes by a rule that the prompt does not state: the smallest one-shot task."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from posttrain.environments.game import Game, GameRecipe, play, require, require_sound
from posttrain.environments.protocol import Baseline
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

_WORDS = [
    "ant", "arch", "bear", "book", "cat", "chair", "deer", "door", "eagle", "engine", "fence", "fox", "glass", "goat",
    "hammer", "horse",
]  # fmt: skip
"""Two words for each letter from a to h."""
_BOXES = ("red", "green", "blue", "white")


class WordSortRecipe(GameRecipe):
    """Keys of `word_sort`."""

    type: Literal["word_sort"] = "word_sort"
    """Words and boxes."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of turns. A rejected answer can be repeated; choosing a box ends the episode."""


class WordSort(Game):
    """One of sixteen words, and four boxes for two letters each: reward 1 for the box of the word's first letter.

    Only rewards reveal the rule, so a policy that has not been rewarded cannot do better than chance.
    """

    Recipe = WordSortRecipe
    actions = _BOXES

    @classmethod
    def return_range(cls, recipe: WordSortRecipe) -> tuple[float, float]:
        """A penalty in every turn, or the right box in the first."""
        return recipe.max_turns * recipe.format.penalty, 1.0

    def _begin(self, seed: int) -> None:
        self._word = str(random_stream("word_sort", seed).choice(_WORDS))
        self._chosen: str | None = None

    def _rules(self) -> str:
        return "Each word belongs into one of four boxes. Find out into which."

    def _state(self, first: bool) -> str:
        if self._chosen is None:
            return f"Word: {self._word}."
        return f"{self._word} in the {self._chosen} box: {'right' if self._chosen == self._box() else 'wrong'}."

    def _key(self) -> str:
        return f"{self._word} in {self._chosen}" if self._chosen else self._word

    def _act(self, name: str) -> float:
        self._chosen = name
        return float(name == self._box())

    def _status(self) -> tuple[bool, bool]:
        return self._chosen is not None, self._chosen == self._box()

    def _box(self) -> str:
        return _BOXES[(ord(self._word[0]) - ord("a")) // 2]

    def _plan(self) -> tuple[list[str], str]:
        return [self._box()], f"{self._word} begins with {self._word[0]}."

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Closed form: the random policy finds the right box in one case of four."""
        return {"random": Baseline(0.25, 0.25, len(seeds)), "optimal": Baseline(1.0, 1.0, len(seeds))}

    @classmethod
    def validate(cls, recipe: WordSortRecipe, seeds: Sequence[int]) -> None:
        """Exactly one of the four boxes succeeds, and it is the expert's."""
        environment = cls(recipe)
        for seed in seeds:
            best = play(environment, seed)[-1]
            require(best.terminated and best.info["success"] is True and best.reward == 1, seed, "the right box fails")
            for box in set(_BOXES) - {environment._box()}:
                other = play(environment, seed, [recipe.format.render([box], "A guess.")])[-1]
                require(other.terminated and other.info["success"] is False, seed, f"the {box} box counts as success")
            require_sound(environment, seed)
