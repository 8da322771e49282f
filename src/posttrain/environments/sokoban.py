"""Sokoban: push every box onto a target. Rooms are made by playing backwards, so each can be solved."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from posttrain.environments.game import (
    Game,
    GameRecipe,
    ObservationForm,
    check_symbols,
    drawing,
    offset,
    place,
    places,
    play,
    require,
    require_sound,
    sides,
)
from posttrain.environments.protocol import Baseline
from posttrain.environments.sokoban_rooms import Room, State, random_player, room_of, shortest_solution
from posttrain.recipe.base import Part
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

ACTIONS = ("Up", "Down", "Left", "Right")
_MOST_STATES = 4000
_PLAYS = 256


class SokobanSymbols(Part):
    """How the room is drawn."""

    wall: str = "#"
    """A wall."""
    floor: str = "_"
    """Free floor."""
    target: str = "O"
    """A target without a box."""
    box: str = "X"
    """A box beside the targets."""
    box_on_target: str = "√"
    """A box on a target."""
    player: str = "P"
    """The player."""
    player_on_target: str = "S"
    """The player on a target."""


class SokobanRecipe(GameRecipe):
    """Keys of `sokoban`."""

    type: Literal["sokoban"] = "sokoban"
    """Sokoban."""
    max_turns: int = Field(5, ge=1)
    """Turns after which an episode is cut off."""
    dim_x: int = Field(6, ge=4, le=16)
    """Columns of the room, walls included."""
    dim_y: int = Field(6, ge=4, le=16)
    """Rows of the room, walls included."""
    num_boxes: int = Field(1, ge=1, le=6)
    """Boxes, and as many targets."""
    search_depth: int = Field(30, ge=1)
    """Most moves that the room is played backwards from its solution."""
    player_moves: int = Field(0, ge=0)
    """Random steps of the player, away from the boxes, after the room was made."""
    step_reward: float = -0.1
    """Reward of every move, and of a turn without one."""
    box_on_reward: float = 1.0
    """Reward of pushing a box onto a target."""
    box_off_reward: float = -1.0
    """Reward of pushing a box off a target."""
    solved_reward: float = 10.0
    """Reward of the move that puts the last box on a target."""
    observation: ObservationForm = "grid"
    """`grid`: a drawing; `coordinates`: places in words; `both`; `local`: boxes, targets, walls from the player."""
    symbols: SokobanSymbols = SokobanSymbols()

    @model_validator(mode="after")
    def _fits(self) -> "SokobanRecipe":
        check_symbols(self.symbols.model_dump())
        if max(self.dim_x, self.dim_y) < 5:
            raise ValueError("`dim_x` and `dim_y` are both below 5, too small to push a box; raise one to 5 or more")
        if 3 * self.num_boxes > (self.dim_x - 2) * (self.dim_y - 2):
            raise ValueError(
                f"`num_boxes` {self.num_boxes} do not fit into {self.dim_x} x {self.dim_y}; enlarge the room"
            )
        return self

    def pay(self, room: Room, before: State, after: State) -> float:
        """Reward of the move from `before` to `after`."""
        pushed_on = len(after[1] & room.targets) - len(before[1] & room.targets)
        reward = self.step_reward
        if pushed_on:
            reward += self.box_on_reward if pushed_on > 0 else self.box_off_reward
        return reward + (self.solved_reward if room.solved(after) else 0.0)


class Sokoban(Game):
    """Push every box onto a target. Success is all boxes on targets."""

    Recipe = SokobanRecipe
    actions = ACTIONS

    def _begin(self, seed: int) -> None:
        self._room, self._place = _room(self.recipe, seed)

    def _rules(self) -> str:
        s, form = self.recipe.symbols, self.recipe.observation
        several = self.recipe.num_boxes > 1
        if form in ("coordinates", "local"):
            task = f"Push {'every box onto a target' if several else 'the box onto the target'}."
        else:
            task = (
                f"Push {'every' if several else 'the'} box {s.box} onto {'a' if several else 'the'} target {s.target}."
            )
            task += f" You are {s.player}, or {s.player_on_target} on a target; {s.wall} is wall, {s.floor} floor"
            task += f", {s.box_on_target} a box on a target." if several else "."
        text = f"{task} Walk into a box to push it; you cannot pull, nor push two at once."
        if form in ("coordinates", "both"):
            text += " Row 0 is the top, column 0 the left."
        return text

    def _state(self, first: bool) -> str:
        form, room = self.recipe.observation, self._room
        if form == "local":
            return self._surroundings()
        parts = [self._drawing()] if form != "coordinates" else []
        if form != "grid":
            player, boxes = self._place
            parts.append(f"You: {place(player, room.columns)}. Boxes: {places(boxes, room.columns)}.")
            if first:
                parts[-1] += f" Targets: {places(room.targets, room.columns)}."
                if form == "coordinates":
                    parts[-1] += f" Floor: {places(room.floor, room.columns)}."
        return "\n".join(parts)

    def _surroundings(self) -> str:
        room, (player, boxes) = self._room, self._place
        away = {
            name: "; ".join(offset(cell, player, room.columns) for cell in sorted(cells))
            for name, cells in (("Box", boxes), ("Target", room.targets))
        }
        walls = set(range(room.rows * room.columns)) - set(room.floor)
        return f"Box: {away['Box']}. Target: {away['Target']}. Walls: {sides(walls, player, room.columns)}."

    def _drawing(self) -> str:
        room, symbols, (player, boxes) = self._room, self.recipe.symbols, self._place
        cells = dict.fromkeys(range(room.rows * room.columns), symbols.wall) | dict.fromkeys(room.floor, symbols.floor)
        cells |= dict.fromkeys(room.targets, symbols.target) | dict.fromkeys(boxes, symbols.box)
        cells |= dict.fromkeys(boxes & room.targets, symbols.box_on_target)
        cells[player] = symbols.player_on_target if player in room.targets else symbols.player
        return drawing(cells, room.rows, room.columns)

    def _key(self) -> str:
        player, boxes = self._place
        return f"{player} {sorted(boxes)}"

    def _act(self, name: str) -> float:
        before = self._place
        self._place = self._room.move(before, self._room.directions()[ACTIONS.index(name)])
        return self.recipe.pay(self._room, before, self._place)

    def _standing_still(self) -> float:
        return self.recipe.step_reward

    def _ended(self) -> bool:
        return self._room.solved(self._place)

    def _succeeded(self) -> bool:
        return self._room.solved(self._place)

    def _plan(self) -> tuple[list[str], str]:
        way = shortest_solution(self._room, self._place)
        if way is None:
            return [ACTIONS[0]], "No solution is left."
        names = [ACTIONS[number] for number in way[: self.format.actions_per_turn]]
        moves = "1 more move" if len(way) == 1 else f"{len(way)} more moves"
        return names, f"The shortest solution takes {moves}, now {' then '.join(names)}."

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """The player of shortest solutions, played out, and the player of uniformly random moves.

        The random player is exact while a room has at most 4000 states within reach; rooms with more are played 256
        times each, and then the interval is that of this sampling. "optimal" is left out for rooms too large to
        search.
        """
        assert isinstance(recipe, SokobanRecipe)
        found = {"random": _random_baseline(recipe, seeds)}
        try:
            games = [play(cls(recipe), seed) for seed in seeds]
        except NotImplementedError:
            return found
        success = sum(steps[-1].info["success"] for steps in games) / len(seeds)
        paid = sum(step.reward for steps in games for step in steps) / len(seeds)
        return found | {"optimal": Baseline(success, paid, len(seeds))}

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> None:
        """Every room is solved by its shortest solution, which earns full reward, and by nothing shorter."""
        assert isinstance(recipe, SokobanRecipe)
        for seed in seeds:
            room, start = _room(recipe, seed)
            way = shortest_solution(room, start)
            if way is None:
                raise AssertionError(f"seed {seed}: the room has no solution")
            # The whole solution, even where the recipe's turns would end before it.
            environment = cls(recipe.model_copy(update={"max_turns": len(way)}))
            steps = play(environment, seed, [recipe.format.render([ACTIONS[number]], "") for number in way])
            paid = sum(step.reward for step in steps)
            full = recipe.solved_reward + recipe.num_boxes * recipe.box_on_reward + len(way) * recipe.step_reward
            require(steps[-1].terminated and steps[-1].info["success"] is True, seed, "the solution does not solve it")
            off = sum(
                len(room.targets & before) > len(room.targets & after) for before, after in _boxes(room, start, way)
            )
            full += off * (recipe.box_on_reward + recipe.box_off_reward)
            require(abs(paid - full) < 1e-9, seed, f"the solution was paid {paid}, not {full}")
            require(not any(step.info.get("success") for step in steps[:-1]), seed, "it was solved too early")
            require_sound(cls(recipe), seed)


def _boxes(room: Room, state: State, way: Sequence[int]) -> list[tuple[frozenset[int], frozenset[int]]]:
    """The boxes before and after each move."""
    found = []
    for number in way:
        reached = room.move(state, room.directions()[number])
        found.append((state[1], reached[1]))
        state = reached
    return found


def _random_baseline(recipe: SokobanRecipe, seeds: Sequence[int]) -> Baseline:
    moves, n = recipe.max_turns * recipe.format.actions_per_turn, len(seeds)
    success = paid = variance = 0.0
    sampled = False
    for seed in seeds:
        room, start = _room(recipe, seed)
        exact = random_player(room, start, moves, partial(recipe.pay, room), _MOST_STATES)
        if exact is None:
            sampled = True
            exact = _random_plays(recipe, seed, moves)
            # One success and one failure more than seen, so that 0 of 256 is not taken for certain.
            p = (exact[0] * _PLAYS + 1) / (_PLAYS + 2)
            variance += p * (1 - p) / _PLAYS
        success, paid = success + exact[0] / n, paid + exact[1] / n
    half = 1.96 * variance**0.5 / n
    interval = (max(0.0, success - half), min(1.0, success + half)) if sampled else None
    return Baseline(success, paid, n, interval)


def _random_plays(recipe: SokobanRecipe, seed: int, moves: int) -> tuple[float, float]:
    """Share of `_PLAYS` random plays that solve the room, and their mean return."""
    room, start = _room(recipe, seed)
    chosen = random_stream("sokoban", seed, "random player").integers(4, size=(_PLAYS, moves)).tolist()
    directions = room.directions()
    solved = paid = 0.0
    for numbers in chosen:
        state = start
        for number in numbers:
            reached = room.move(state, directions[number])
            paid += recipe.pay(room, state, reached)
            state = reached
            if room.solved(state):
                solved += 1
                break
    return solved / _PLAYS, paid / _PLAYS


def _room(recipe: SokobanRecipe, seed: int) -> tuple[Room, State]:
    return room_of(seed, recipe.dim_y, recipe.dim_x, recipe.num_boxes, recipe.search_depth, recipe.player_moves)
