"""Shared parts of the built-in games: the answer format, the turn loop, checks for `validate`, and grids as text."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.environments.protocol import Cells, Environment, Observation, Step
from posttrain.recipe.base import BaseConfig, Text
from posttrain.recipe.components import EnvironmentRecipe

# -- answer format ----------------------------------------------------------------------------------------------------

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Rejected:
    """An answer that could not be parsed. `reason` is a short text, never empty, and is shown to the policy."""

    reason: str


class FormatRecipe(BaseConfig):
    """How the policy writes an answer, and the penalty for an answer in another form."""

    thinking: bool = False
    """The answer is `<think>…</think><answer>…</answer>`; otherwise `<answer>…</answer>` alone."""
    prime: bool = False
    """Start every answer for the policy: with `<think>` when thinking and `<answer>` otherwise."""
    penalty: float = Field(-0.1, le=0)
    """Added to the reward of a turn whose answer is rejected."""
    separator: Text = "||"
    """Separates the actions of one answer."""
    actions_per_turn: int = Field(1, ge=1, le=10)
    """Maximum number of actions in one answer; an answer with more is rejected."""

    @field_validator("separator")
    @classmethod
    def _separator_is_visible(cls, value: str) -> str:
        if value != value.strip() or not value or "<" in value or ">" in value or any(c.isalnum() for c in value):
            raise ValueError("a separator consists of punctuation other than < and >, without surrounding spaces")
        return value

    def primer(self) -> str:
        """The text that starts every answer: `<think>`, `<answer>`, or nothing."""
        if not self.prime:
            return ""
        return "<think>" if self.thinking else "<answer>"

    def render(self, actions: Sequence[str], thought: str = "") -> str:
        """Return the answer that plays `actions`, the inverse of `parse`. `thought` must not contain any of `TAGS`."""
        answer = f"<answer>{f' {self.separator} '.join(actions)}</answer>"
        return f"<think>{thought}</think>{answer}" if self.thinking else answer

    def instructions(self, names: Sequence[str]) -> str:
        """Return the sentences of the prompt that describe the format; `names` are two or more actions."""
        forms = [f"<answer>{name}</answer>" for name in names]
        choice = f"{', '.join(forms[:-1])} or {forms[-1]}"
        text = (
            f"Answer only <think>your reason</think> and then {choice}." if self.thinking else f"Answer only {choice}."
        )
        if self.actions_per_turn > 1:
            several = f"{names[0]} {self.separator} {names[1]}"
            text += f" An answer may hold up to {self.actions_per_turn} actions: <answer>{several}</answer>."
        return text

    def parse(self, text: str, names: Sequence[str]) -> tuple[str, ...] | Rejected:
        """Return the actions of the answer `text` (primer included), spelled as in `names`, or why it is rejected.

        White space around tags and actions and the case of actions are ignored. Any other text outside the tags is an
        error. Chat markup must have been removed before.
        """
        content = self._content(text)
        if isinstance(content, Rejected):
            return content
        if not content:
            return Rejected("empty answer")
        words = [word.strip() for word in content.split(self.separator)]
        if len(words) > self.actions_per_turn:
            return Rejected(f"too many actions: {len(words)}, allowed {self.actions_per_turn}")
        known = {name.casefold(): name for name in names}
        for word in words:
            if word.casefold() not in known:
                return Rejected(f"unknown action '{' '.join(word[:24].split())}'")
        return tuple(known[word.casefold()] for word in words)

    def _content(self, text: str) -> str | Rejected:
        """Return the text between `<answer>` and `</answer>` if `text` follows the format."""
        expected = TAGS if self.thinking else TAGS[2:]
        for tag in TAGS:
            if text.count(tag) > 1:
                return Rejected(f"more than one {tag}")
            if tag in text and tag not in expected:
                return Rejected(f"{tag} is not part of the format")
        for tag in ("<answer>", *expected):
            if tag not in text:
                return Rejected(f"no {tag}")
        positions = [text.index(tag) for tag in expected]
        if positions != sorted(positions):
            return Rejected("tags in the wrong order")
        outside = text[: positions[0]] + text[positions[-1] + len(expected[-1]) :]
        if self.thinking:
            outside += text[positions[1] + len("</think>") : positions[2]]
        if outside.strip():
            return Rejected("text outside the tags")
        return text[positions[-2] + len("<answer>") : positions[-1]].strip()


# -- games ------------------------------------------------------------------------------------------------------------


class GameRecipe(EnvironmentRecipe):
    """Keys of every built-in game."""

    format: FormatRecipe = FormatRecipe()
    """How answers are written, and the penalty for a rejected one."""


class Game(Environment):
    """A game of named actions. Subclasses implement the start, the effect of an action, and the text of a state."""

    actions: tuple[str, ...]
    """Names of the actions, at least two; set by the class or by `_begin`."""
    idle_reward = 0.0
    """Reward of a turn without an action."""

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        super().__init__(recipe)
        self.format: FormatRecipe = self.recipe.format
        self.primer = self.format.primer()
        self.turns_left = 0

    def reset(self, seed: int) -> Observation:
        """Start the game of `seed`: a system message with the rules and a user message with the state."""
        self.turns_left = self.recipe.max_turns
        self._begin(seed)
        turns = f"You have {self.turns_left} turn{'s' if self.turns_left > 1 else ''}."
        rules = f"{self._rules()} {turns}\n{self.format.instructions(self.actions)}"
        state = {"role": "user", "content": self._state(first=True)}
        return Observation([{"role": "system", "content": rules}, state], self._key())

    def step(self, action: str) -> Step:
        """Play the actions of one answer in order until the game ends. A rejected answer plays none.

        `info["actions"]` are the actions played. `messages` show the final state even when the episode is over.
        """
        if self.turns_left < 1:
            raise RuntimeError("the episode is over; call reset")
        self.turns_left -= 1
        parsed = self.format.parse(action, self.actions)
        info: dict[str, Any]
        if isinstance(parsed, Rejected):
            info, notice = {"rejected": parsed.reason}, f"Rejected: {parsed.reason}.\n"
            reward = self.idle_reward + self.format.penalty
        else:
            info, notice, reward = {"actions": []}, "", 0.0
            for name in parsed:
                reward += self._act(name)
                info["actions"].append(name)
                if self._status()[0]:
                    break
        terminated, won = self._status()
        truncated = not terminated and self.turns_left == 0
        if terminated:
            self.turns_left = 0
        if terminated or truncated:
            info["success"] = won
        state = {"role": "user", "content": notice + self._state(first=False)}
        return Step([state], reward, terminated, truncated, info, self._key())

    @classmethod
    def negative_rewards(cls, recipe: Any) -> str | None:
        """The penalty for a rejected answer, unless it is 0."""
        return "environment.format.penalty" if recipe.format.penalty < 0 else None

    @classmethod
    def reports_scores(cls, recipe: EnvironmentRecipe) -> bool:
        """False: a game has one reward."""
        return False

    def expert(self) -> str:
        """Return an optimal answer in the current state, with a one-line reason where the format has thinking."""
        if self.turns_left < 1:
            raise RuntimeError("the episode is over; call reset")
        actions, thought = self._plan()
        return self.format.render(actions, thought)

    def random_answer(self, draw: float) -> str:
        """Return `actions_per_turn` uniformly random actions: the digits of `draw` in base len(actions)."""
        base, count = len(self.actions), self.format.actions_per_turn
        number = min(int(draw * base**count), base**count - 1)
        chosen = [self.actions[number // base**digit % base] for digit in range(count)]
        return self.format.render(chosen, "I pick at random.")

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Set up the game of `seed`."""

    @abstractmethod
    def _rules(self) -> str:
        """Return the rules, as briefly as possible."""

    @abstractmethod
    def _state(self, first: bool) -> str:
        """Return the state as shown to the policy. `first`: in the first message, with everything that is constant."""

    @abstractmethod
    def _key(self) -> str:
        """Return a name of the state within this game that does not depend on its display or the turns left."""

    @abstractmethod
    def _act(self, name: str) -> float:
        """Apply the action `name` and return its reward."""

    @abstractmethod
    def _status(self) -> tuple[bool, bool]:
        """Whether the game is over by its own rules, and whether it is won in the current state."""

    @abstractmethod
    def _plan(self) -> tuple[list[str], str]:
        """Return the optimal actions of the next answer, and a reason in one line."""


# -- checks for `validate` --------------------------------------------------------------------------------------------


def require(condition: bool, seed: int, problem: str) -> None:
    """Raise the AssertionError of `validate` unless `condition` holds, even with `python -O`."""
    if not condition:
        raise AssertionError(f"seed {seed}: {problem}")


def play(environment: Environment, seed: int, answers: Iterable[str] | None = None) -> list[Step]:
    """Return the steps of an episode played by the expert, or with `answers`, until it ends."""
    environment.reset(seed)
    actions = iter(answers) if answers is not None else iter(environment.expert, None)
    steps: list[Step] = []
    for action in actions:
        steps.append(environment.step(action))
        if steps[-1].terminated or steps[-1].truncated:
            break
    return steps


def require_sound(environment: Game, seed: int) -> None:
    """Check requirements of every game: resets repeat, invalid answers get no reward, the end is final."""
    require(environment.reset(seed) == environment.reset(seed), seed, "two resets differ")
    steps = play(environment, seed, ["nonsense"] * environment.recipe.max_turns)
    require(len(steps) == environment.recipe.max_turns, seed, "rejected answers ended the episode early")
    require(steps[-1].info.get("success") is False, seed, "rejected answers count as success")
    require(all(step.info.get("rejected") for step in steps), seed, "an invalid answer was not rejected")
    require(sum(step.reward for step in steps) <= 0, seed, "rejected answers got a reward")
    try:
        environment.step(environment.random_answer(0.0))
    except RuntimeError:
        return
    raise AssertionError(f"seed {seed}: a step was possible after the end")


# -- grids as text ----------------------------------------------------------------------------------------------------

ObservationForm = Literal["grid", "coordinates", "both", "local"]
"""`grid`: a drawing; `coordinates`: positions in words; `both`; `local`: positions relative to the player."""


def rows_of(cells: Mapping[int, str], columns: int) -> Cells:
    """Return `cells` (row * columns + column -> name) by rows."""
    return [[cells[row * columns + column] for column in range(columns)] for row in range(len(cells) // columns)]


def drawing(cells: Cells, symbols: Mapping[str, str]) -> str:
    """Return the grid as text, one line per row. `symbols`: name of a cell -> its symbol."""
    return "\n".join(" ".join(symbols[name] for name in row) for row in cells)


def place(cell: int, columns: int) -> str:
    """`row 1, column 2`, counted from 0 at the top left."""
    return f"row {cell // columns}, column {cell % columns}"


def places(cells: Iterable[int], columns: int) -> str:
    """`(1, 2), (3, 0)`: rows and columns of several cells."""
    return ", ".join(f"({cell // columns}, {cell % columns})" for cell in sorted(cells)) or "none"


def offset(cell: int, origin: int, columns: int) -> str:
    """`2 down, 1 right`: the way from `origin` to `cell`, or `here`."""
    down, right = cell // columns - origin // columns, cell % columns - origin % columns
    parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return ", ".join(parts) or "here"


def sides(cells: Iterable[int], origin: int, columns: int) -> str:
    """`left, up`: the neighbors of `origin` that are among `cells`, or `none`."""
    members = set(cells)
    row, column = divmod(origin, columns)
    neighbors = {
        "left": (row, column - 1),
        "right": (row, column + 1),
        "up": (row - 1, column),
        "down": (row + 1, column),
    }
    names = [name for name, (r, c) in neighbors.items() if 0 <= c < columns and r * columns + c in members]
    return ", ".join(names) or "none"


def edges(origin: int, rows: int, columns: int) -> str:
    """`left, up`: the directions in which `origin` has no neighbor on the board, or `none`."""
    row, column = divmod(origin, columns)
    off = {"left": column == 0, "right": column == columns - 1, "up": row == 0, "down": row == rows - 1}
    return ", ".join(name for name, at_edge in off.items() if at_edge) or "none"
