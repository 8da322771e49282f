"""What the built-in games share: named actions in an answer format, turns, rejections, the end of an episode."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from posttrain.environments.answers import FormatRecipe, Rejected
from posttrain.environments.protocol import Environment, Message, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class GameRecipe(EnvironmentRecipe):
    """Keys that every built-in game has."""

    format: FormatRecipe = FormatRecipe()
    """How answers are written, and what a rejected one costs."""


class Game(Environment):
    """A game of named actions. Subclasses say how it begins, what an action does, and how the state looks."""

    actions: tuple[str, ...]
    """Names of the actions, at least two, set by `_begin` or by the class."""

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        super().__init__(recipe)
        self.format: FormatRecipe = self.recipe.format
        self.primer = self.format.primer()
        self.turns_left = 0

    def reset(self, seed: int) -> Observation:
        """Start the game of `seed`: a system message with the rules, a user message with the state."""
        self.turns_left = self.recipe.max_turns
        self._begin(seed)
        turns = f"You have {self.turns_left} turn{'s' if self.turns_left > 1 else ''}."
        rules = f"{self._rules()} {turns}\n{self.format.instructions(self.actions)}"
        return Observation([{"role": "system", "content": rules}, _user(self._state(first=True))], self._key())

    def step(self, action: str) -> Step:
        """Play one answer: its actions in order until the game ends; a rejected answer plays none.

        `info["actions"]` are the actions played. The last state is in `messages` even when the episode is over.
        """
        if self.turns_left < 1:
            raise RuntimeError("the episode is over; call reset")
        self.turns_left -= 1
        parsed = self.format.parse(action, self.actions)
        info: dict[str, Any]
        if isinstance(parsed, Rejected):
            info, notice = {"rejected": parsed.reason}, f"Rejected: {parsed.reason}.\n"
            reward = self._standing_still() + self.format.penalty
        else:
            info, notice, reward = {"actions": []}, "", 0.0
            for name in parsed:
                reward += self._act(name)
                info["actions"].append(name)
                if self._ended():
                    break
        terminated = self._ended()
        truncated = not terminated and self.turns_left == 0
        if terminated:
            self.turns_left = 0
        if terminated or truncated:
            info["success"] = self._succeeded()
        return Step([_user(notice + self._state(first=False))], reward, terminated, truncated, info, self._key())

    def expert(self) -> str:
        """The best answer in the current state, with a one-line reason where the format has thinking."""
        if self.turns_left < 1:
            raise RuntimeError("the episode is over; call reset")
        actions, thought = self._plan()
        return self.format.render(actions, thought)

    def random_answer(self, draw: float) -> str:
        """As many uniformly random actions as an answer may hold: the digits of `draw` in base len(actions)."""
        base, count = len(self.actions), self.format.actions_per_turn
        number = min(int(draw * base**count), base**count - 1)
        chosen = [self.actions[number // base**place % base] for place in range(count)]
        return self.format.render(chosen, "I pick at random.")

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Set up the game of `seed`."""

    @abstractmethod
    def _rules(self) -> str:
        """The rules, as short as they can be told."""

    @abstractmethod
    def _state(self, first: bool) -> str:
        """The state as the policy sees it; `first`: in the first message, with what never changes."""

    @abstractmethod
    def _key(self) -> str:
        """A name of the state within this game, however it is shown; the turns left are no part of it."""

    @abstractmethod
    def _act(self, name: str) -> float:
        """Do the action `name`; returns its reward."""

    @abstractmethod
    def _ended(self) -> bool:
        """The game is over by its own rules."""

    @abstractmethod
    def _succeeded(self) -> bool:
        """The game, if it ended now, was won."""

    @abstractmethod
    def _plan(self) -> tuple[list[str], str]:
        """The best actions for the next answer, and a reason in one line."""

    def _standing_still(self) -> float:
        """The reward of a turn in which nothing was done."""
        return 0.0


def require(condition: bool, seed: int, complaint: str) -> None:
    """Raise the AssertionError of `validate` unless `condition` holds; it stays under `python -O`."""
    if not condition:
        raise AssertionError(f"seed {seed}: {complaint}")


def play(environment: Environment, seed: int, answers: Iterable[str] | None = None) -> list[Step]:
    """The steps of an episode in which the expert plays, or `answers` are given until the episode ends."""
    environment.reset(seed)
    given = iter(answers) if answers is not None else iter(environment.expert, None)
    steps: list[Step] = []
    for answer in given:
        steps.append(environment.step(answer))
        if steps[-1].terminated or steps[-1].truncated:
            break
    return steps


def require_sound(environment: Game, seed: int) -> None:
    """Require what holds for every game: reset repeats itself, nonsense earns nothing, nothing follows the end."""
    require(environment.reset(seed) == environment.reset(seed), seed, "two resets differ")
    steps = play(environment, seed, ["nonsense"] * environment.recipe.max_turns)
    require(len(steps) == environment.recipe.max_turns, seed, "answers that were rejected ended the episode early")
    require(steps[-1].info.get("success") is False, seed, "rejected answers count as success")
    require(all(step.info.get("rejected") for step in steps), seed, "nonsense was not rejected")
    require(sum(step.reward for step in steps) <= 0, seed, "rejected answers earned a reward")
    try:
        environment.step(environment.random_answer(0.0))
    except RuntimeError:
        return
    raise AssertionError(f"seed {seed}: a step was taken after the end")


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


ObservationForm = Literal["grid", "coordinates", "both", "local"]
"""A drawing of the grid, a sentence with the places of things, one after the other, or what lies where from the player."""


def drawing(cells: Mapping[int, str], rows: int, columns: int) -> str:
    """The symbols of `cells` (row * columns + column -> symbol), one line per row."""
    return "\n".join(" ".join(cells[row * columns + column] for column in range(columns)) for row in range(rows))


def place(cell: int, columns: int) -> str:
    """`row 1, column 2`, counted from 0 at the top left."""
    return f"row {cell // columns}, column {cell % columns}"


def offset(cell: int, origin: int, columns: int) -> str:
    """`2 down, 1 right`: how to get from `origin` to `cell`, or `here`."""
    down, right = cell // columns - origin // columns, cell % columns - origin % columns
    parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return ", ".join(parts) or "here"


def sides(cells: Iterable[int], origin: int, columns: int) -> str:
    """`left, up`: on which sides of `origin` one of `cells` lies, or `none`."""
    found = set(cells)
    row, column = divmod(origin, columns)
    beside = {"left": (row, column - 1), "right": (row, column + 1), "up": (row - 1, column), "down": (row + 1, column)}
    named = [name for name, (r, c) in beside.items() if 0 <= c < columns and r * columns + c in found]
    return ", ".join(named) or "none"


def places(cells: Iterable[int], columns: int) -> str:
    """`(1, 2), (3, 0)`: row and column of several cells."""
    return ", ".join(f"({cell // columns}, {cell % columns})" for cell in sorted(cells)) or "none"


def check_symbols(symbols: Mapping[str, str]) -> None:
    """ValueError unless the symbols are single words without tags and no two are alike."""
    for name, symbol in symbols.items():
        if not symbol or any(c.isspace() or c in "<>" for c in symbol):
            raise ValueError(f"`symbols.{name}` is {symbol!r}; a symbol has no space and no < or >, and is not empty")
    if len(set(symbols.values())) < len(symbols):
        raise ValueError(f"`symbols` uses one symbol twice among {' '.join(symbols.values())}; make them differ")
