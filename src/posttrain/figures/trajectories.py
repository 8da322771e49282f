"""Trajectories as pictures: the grid of a game before the first action and after each turn, one episode per row.

The states are those of a replay: an environment of the same seed gets the answers of the stored episode again. So the final
state is shown too, and pictures do not depend on how states were shown to the policy.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

from posttrain.environments.protocol import Cells, Environment, EnvironmentFactory
from posttrain.environments.unknown import Unknown
from posttrain.episode import Episode
from posttrain.figures.draw import STYLE, save
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory

NAME = "trajectories"
"""Name of the figure among the plots of a run."""
MOST_STEPS = 8
"""Steps with a row in the figure of a run."""
MOST_FRAMES = 12
"""Frames of a row. Of a longer episode, the first and the last ones are shown."""
_FRAME, _GAP, _TEXT, _HEADING, _NARROWEST = 1.1, 0.12, 0.52, 0.35, 4.0
"""In inches: side of a frame, space beside it, height of the text above a row and of the title, minimum width."""
_FLOOR, _ICE = "#EFE9DD", "#D6E9F5"
_SHAPES: dict[str, list[tuple[str, str, float]]] = {
    "wall": [("square", "#55585F", 1.0)],
    "floor": [],
    "ice": [],
    "target": [("ring", "#C0392B", 0.34)],
    "box": [("square", "#A8743A", 0.72)],
    "box_on_target": [("square", "#4E9A51", 0.72), ("ring", "#C0392B", 0.2)],
    "hole": [("disc", "#1F3A5F", 0.42)],
    "goal": [("square", "#4E9A51", 0.62)],
    "player": [("disc", "#E67E22", 0.3)],
    "player_on_target": [("ring", "#C0392B", 0.42), ("disc", "#E67E22", 0.3)],
    "player_in_hole": [("disc", "#1F3A5F", 0.42), ("disc", "#E67E22", 0.2)],
    "player_on_goal": [("square", "#4E9A51", 0.9), ("disc", "#E67E22", 0.3)],
}
"""What a cell shows on its ground: shape, color, and size (side of a square, radius otherwise) in cells."""


class Frame(NamedTuple):
    """One state of an episode, and the actions that led to it with their reward."""

    cells: Cells
    caption: str


class Row(NamedTuple):
    """The frames of one episode."""

    title: str
    frames: list[Frame]


def row_of(episode: Episode, make: Callable[[], Environment], title: str) -> Row | None:
    """The states of an episode; None if its environment has no grid, or if the replay ends before the episode."""
    environment = make()
    environment.reset(episode.seed)
    cells = environment.cells()
    if cells is None:
        return None
    frames = [Frame(cells, "start")]
    for number, turn in enumerate(episode.turns, start=1):
        step = environment.step(turn.answer)
        cells = environment.cells()
        assert cells is not None
        actions = " ".join(step.info.get("actions") or ["rejected"])
        frames.append(Frame(cells, f"{number}: {actions} {step.reward:+.1f}"))
        if (step.terminated or step.truncated) and number < len(episode.turns):
            return None
    if len(frames) > MOST_FRAMES:
        kept = MOST_FRAMES // 2
        frames = [*frames[:kept], *frames[-kept:]]
    ending = "success" if episode.success else episode.outcome.value
    return Row(f"{title} · seed {episode.seed} · {ending}, return {episode.total_reward:+.2f}", frames)


def draw(rows: Sequence[Row], title: str = "") -> Figure:
    """The figure of several episodes, one per row."""
    columns = max(len(row.frames) for row in rows)
    width, top = columns * (_FRAME + _GAP) + _GAP, _HEADING if title else 0.0
    height = top + len(rows) * (_FRAME + _TEXT)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(width, _NARROWEST), height))
        FigureCanvasAgg(figure)
        width = figure.get_figwidth()
        for number, row in enumerate(rows):
            above = height - top - number * (_FRAME + _TEXT)
            figure.text(_GAP / width, (above - 0.1) / height, row.title, fontsize=8.5, ha="left", va="top")
            for place, frame in enumerate(row.frames):
                left, bottom = _GAP + place * (_FRAME + _GAP), above - _TEXT - _FRAME + _GAP
                axes = figure.add_axes((left / width, bottom / height, _FRAME / width, _FRAME / height))
                _draw_cells(axes, frame.cells)
                axes.set_title(frame.caption, fontsize=7, loc="center", pad=2)
        if title:
            figure.text(_GAP / width, 1 - 0.08 / height, title, fontsize=12, fontweight="bold", ha="left", va="top")
    return figure


def _draw_cells(axes: Axes, cells: Cells) -> None:
    on_ice = any(name in ("ice", "hole", "goal") for row in cells for name in row)
    axes.axis("off")
    axes.set(xlim=(0, len(cells[0])), ylim=(len(cells), 0), aspect="equal")
    axes.add_patch(Rectangle((0, 0), len(cells[0]), len(cells), facecolor=_ICE if on_ice else _FLOOR, linewidth=0))
    for y, row in enumerate(cells):
        for x, name in enumerate(row):
            for shape, color, size in _SHAPES[name]:
                if shape == "square":
                    corner = (x + 0.5 - size / 2, y + 0.5 - size / 2)
                    axes.add_patch(Rectangle(corner, size, size, facecolor=color, linewidth=0))
                else:
                    look = {"facecolor": color, "linewidth": 0.0}
                    look = {"facecolor": "none", "edgecolor": color, "linewidth": 1.6} if shape == "ring" else look
                    axes.add_patch(Circle((x + 0.5, y + 0.5), size, **look))
    axes.vlines(range(1, len(cells[0])), 0, len(cells), colors="#FFFFFF", linewidth=0.6)
    axes.hlines(range(1, len(cells)), 0, len(cells[0]), colors="#FFFFFF", linewidth=0.6)


def maker_of(environment: EnvironmentRecipe | None) -> Callable[[], Environment] | None:
    """What makes environments for a replay; None where there is no grid to draw."""
    if environment is None or isinstance(environment, Unknown.Recipe):
        return None
    if environment_class(environment.type).cells is Environment.cells:
        return None
    return EnvironmentFactory(environment)


def draw_run(run: RunDirectory, environment: EnvironmentRecipe | None) -> list[Path]:
    """Draw the same held-out task at up to `MOST_STEPS` evaluations of the run into `run.plots`; returns the files.

    `environment`: that of the held-out episodes.
    """
    make = maker_of(environment)
    steps = [step for step in stored_steps(run.episodes) if step.split == "evaluation"] if make is not None else []
    if not steps or make is None:
        return []
    places = {round(place * (len(steps) - 1) / max(MOST_STEPS - 1, 1)) for place in range(MOST_STEPS)}
    stored = [(steps[place].step, read_episodes(steps[place].path).episodes) for place in sorted(places)]
    rows = [row for step, episodes in stored if episodes and (row := row_of(episodes[0], make, f"step {step}"))]
    return save(draw(rows, f"Trajectories · {run.path.resolve().name}"), run.plots, NAME, ("png",)) if rows else []
