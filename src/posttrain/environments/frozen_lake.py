"""Frozen lake: walk to the goal and avoid the holes. The dynamics are those of gymnasium's FrozenLake-v1."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from posttrain.environments.frozen_lake_dynamics import DIRECTIONS, best_answer, best_success, lake_of, random_success
from posttrain.environments.game import (
    Game,
    GameRecipe,
    ObservationForm,
    drawing,
    edges,
    offset,
    place,
    places,
    play,
    require,
    require_sound,
    rows_of,
    sides,
)
from posttrain.environments.protocol import Baseline, Cells
from posttrain.plugins import require_module
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.needs import needs
from posttrain.seeds import random_stream

SYMBOLS = {"player": "P", "ice": "_", "hole": "O", "goal": "G", "player_in_hole": "X", "player_on_goal": "√"}


class FrozenLakeRecipe(GameRecipe):
    """Keys of `frozen_lake`."""

    type: Literal["frozen_lake"] = "frozen_lake"
    """The frozen lake."""
    max_turns: int = Field(5, ge=1)
    """Turns after which an episode is truncated."""
    size: int = Field(4, ge=2, le=16)
    """Rows and columns of the lake."""
    frozen_probability: float = Field(0.8, gt=0, le=1)
    """Probability that a cell is ice; otherwise it is a hole."""
    slippery: bool = True
    """A move goes as intended with probability 1/3 and to each side with probability 1/3; otherwise always as intended."""
    observation: ObservationForm = "grid"
    """`grid`: a drawing; `coordinates`: positions in words; `both`; `local`: the goal and adjacent holes relative to the player."""
    edges: Annotated[bool, needs("observation", "local", refused=True)] = False
    """With `observation: local`: also name adjacent edges of the board. On slippery ice, a move against an edge is often the safest."""

    def _check(self) -> None:
        if self.slippery and self.format.actions_per_turn > 5:
            raise ValueError(
                "`format.actions_per_turn` must be at most 5 on slippery ice: the optimal policy searches all action sequences"
            )


class FrozenLake(Game):
    """Walk over slippery ice to the goal. Success is reaching the goal, with reward 1; a hole ends the episode."""

    Recipe = FrozenLakeRecipe
    actions = DIRECTIONS

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        super().__init__(recipe)
        # Fail here instead of at the first task if gymnasium is missing.
        require_module("gymnasium", "environment.type: frozen_lake")

    @classmethod
    def return_range(cls, recipe: FrozenLakeRecipe) -> tuple[float, float]:
        """A penalty in every turn, or the goal in the first."""
        return recipe.max_turns * recipe.format.penalty, 1.0

    def _begin(self, seed: int) -> None:
        self._lake = lake_of(seed, self.recipe.size, self.recipe.frozen_probability, self.recipe.slippery)
        self._cell = self._lake.start
        self._moves = 0
        count = self.recipe.max_turns * self.format.actions_per_turn
        self._slips: list[float] = random_stream("frozen_lake", seed, "slip").random(count).tolist()

    def _rules(self) -> str:
        form = self.recipe.observation
        drawn = form in ("grid", "both")
        goal = f"the goal {SYMBOLS['goal']}" if drawn else "the goal"
        hole = f"a hole {SYMBOLS['hole']}" if drawn else "a hole"
        text = f"You walk on a frozen lake. Reach {goal}; {hole} ends the game."
        if drawn:
            text += f" You are {SYMBOLS['player']}, {SYMBOLS['ice']} is ice."
        if form in ("coordinates", "both"):
            text += " Row 0 is the top, column 0 the left."
        if self.recipe.slippery:
            text += " Ice is slippery: one move in three goes as you say, the others to either side of it."
        if self.recipe.edges:
            text += " At an edge you stay."
        return text

    def _state(self, first: bool) -> str:
        form, lake = self.recipe.observation, self._lake
        if form == "local":
            holes = sides(lake.holes, self._cell, lake.size)
            text = f"Goal: {offset(lake.goal, self._cell, lake.size)}. Holes: {holes}."
            return f"{text} Edges: {edges(self._cell, lake.size, lake.size)}." if self.recipe.edges else text
        parts = [drawing(self.cells(), SYMBOLS)] if form != "coordinates" else []
        if form != "grid":
            parts.append(f"You: {place(self._cell, lake.size)}.")
            if first:
                parts[-1] += f" Goal: {place(lake.goal, lake.size)}. Holes: {places(lake.holes, lake.size)}."
        return "\n".join(parts)

    def cells(self) -> Cells:
        lake = self._lake
        cells = dict.fromkeys(range(lake.size**2), "ice") | dict.fromkeys(lake.holes, "hole")
        cells[lake.goal] = "goal"
        player = {lake.goal: "player_on_goal"} | dict.fromkeys(lake.holes, "player_in_hole")
        cells[self._cell] = player.get(self._cell, "player")
        return rows_of(cells, lake.size)

    def _key(self) -> str:
        return str(self._cell)

    def _act(self, name: str) -> float:
        self._cell = self._lake.next_cell(self._cell, DIRECTIONS.index(name), self._slips[self._moves])
        self._moves += 1
        return float(self._cell == self._lake.goal)

    def _status(self) -> tuple[bool, bool]:
        won = self._cell == self._lake.goal
        return won or self._cell in self._lake.holes, won

    def _plan(self) -> tuple[list[str], str]:
        lake = self._lake
        actions = best_answer(lake, self._cell, self.turns_left, self.format.actions_per_turn)
        names = [DIRECTIONS[action] for action in actions]
        where = offset(lake.goal, self._cell, lake.size)
        return names, f"The goal is {where}; {' then '.join(names)} is the best way there."

    @classmethod
    def baselines(cls, recipe: FrozenLakeRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Exact expectations over slipping on the lakes of these seeds, by dynamic programming.

        The optimal policy uses the rules and the turns left, but not the slips of the seed. The random policy plays
        `actions_per_turn` uniformly random actions per answer.
        """
        turns, actions, n = recipe.max_turns, recipe.format.actions_per_turn, len(seeds)
        lakes = [lake_of(seed, recipe.size, recipe.frozen_probability, recipe.slippery) for seed in seeds]
        random = sum(random_success(lake, turns * actions) for lake in lakes) / n
        optimal = sum(best_success(lake, turns, actions) for lake in lakes) / n
        return {"random": Baseline(random, random, n), "optimal": Baseline(optimal, optimal, n)}

    @classmethod
    def validate(cls, recipe: FrozenLakeRecipe, seeds: Sequence[int]) -> None:
        """The optimal policy reaches every reachable goal on firm ice, and episodes agree with a replay of their slips."""
        environment, firm_lake = cls(recipe), cls(recipe.model_copy(update={"slippery": False}))
        for seed in seeds:
            # Play the expert, then repeat its actions with gymnasium's transition table and the seed's slips only.
            steps = play(environment, seed)
            lake = environment._lake
            actions = [name for step in steps for name in step.info["actions"]]
            slips = random_stream("frozen_lake", seed, "slip").random(len(actions))
            cell = lake.start
            for name, slip in zip(actions, slips, strict=True):
                require(cell != lake.goal and cell not in lake.holes, seed, "an action was played after the end")
                cell = lake.next_cell(cell, DIRECTIONS.index(name), float(slip))
            last, won = steps[-1], cell == lake.goal
            require(last.info["success"] is won, seed, "success differs from the replay")
            require(last.terminated is (won or cell in lake.holes), seed, "the end differs from the replay")
            total = sum(step.reward for step in steps)
            require(total == float(won), seed, f"the return is {total}")
            steps = play(firm_lake, seed)
            reachable = best_success(firm_lake._lake, recipe.max_turns, recipe.format.actions_per_turn) == 1.0
            total = sum(step.reward for step in steps)
            missed = "on firm ice the optimal policy missed a reachable goal"
            require(steps[-1].info["success"] is reachable, seed, missed)
            require(total == float(reachable), seed, f"on firm ice the return is {total}")
            require_sound(environment, seed)
