"""Draws the pictures of the README and of the site, each for light and for dark pages: `make figures`.

Curves come from docs/results, credit from posttrain's own functions on one example episode.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

FOLDER = Path(__file__).resolve().parent
# The scripts in benchmarks/ import each other by the names of their files.
sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))

from harness.table import read_lines  # noqa: E402
from learning import by_environment, height_of, small_multiples  # noqa: E402
from learning_trl import panels  # noqa: E402

RESULTS = FOLDER.parent / "results"
THEMES = {
    "light": {
        "ink": "#1f2430",
        "faint": "#8a90a0",
        "box": "#eef1f8",
        "blue": "#0072B2",
        "orange": "#D55E00",
        "green": "#00795a",
    },
    "dark": {
        "ink": "#e6e8ef",
        "faint": "#8a90a0",
        "box": "#2a3040",
        "blue": "#56B4E9",
        "orange": "#E69F00",
        "green": "#3fc79a",
    },
}
Theme = dict[str, str]
FIGURES: dict[str, tuple[tuple[float, float], Callable[[Axes, Theme], None]]] = {}
"""Name -> size in inches, and the function that draws it."""


def figure(name: str, width: float, height: float) -> Callable:
    """Register a drawing."""

    def add(draw: Callable[[Axes, Theme], None]) -> Callable:
        FIGURES[name] = ((width, height), draw)
        return draw

    return add


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, theme: Theme, color: str = "box"
) -> None:
    """A rounded box with centered text; x and y are its lower left corner."""
    edge = theme["faint"] if color == "box" else theme[color]
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=theme["box"], edgecolor=edge, linewidth=1.3)
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color=theme["ink"],
        fontsize=9.5,
        linespacing=1.35,
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    theme: Theme,
    text: str = "",
    bend: float = 0,
    both: bool = False,
) -> None:
    """An arrow, with text beside its middle."""
    style = "<|-|>" if both else "-|>"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style,
            mutation_scale=11,
            color=theme["faint"],
            linewidth=1.3,
            connectionstyle=f"arc3,rad={bend}",
        )
    )
    if text:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(middle[0], middle[1] + 0.16, text, ha="center", va="bottom", color=theme["faint"], fontsize=8.5)


def canvas(axes: Axes, width: float, height: float) -> None:
    """A drawing area without axes."""
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")


@figure("architecture", 8.4, 4.3)
def architecture(axes: Axes, theme: Theme) -> None:
    """The parts, and what they pass to each other."""
    canvas(axes, 12, 6)
    box(
        axes,
        0.2,
        5.0,
        11.6,
        0.8,
        "recipe: one typed YAML document     ·     command line and Python call the same functions",
        theme,
    )
    box(axes, 0.2, 2.9, 2.3, 1.3, "environment\nreset(seed)\nstep(text)", theme, "green")
    box(axes, 4.0, 2.9, 2.3, 1.3, "engine\nlocal, vLLM, servers", theme, "blue")
    box(axes, 7.3, 2.9, 1.9, 1.3, "episodes\nof token streams", theme)
    box(axes, 9.9, 2.9, 1.9, 1.3, "rewards\nenvironment,\nmodel, function,\njudge", theme)
    box(axes, 9.9, 0.9, 1.9, 1.3, "credit\nper token", theme, "orange")
    box(axes, 6.9, 0.9, 2.3, 1.3, "learner\none optimizer step,\none divisor", theme, "orange")
    box(axes, 0.2, 0.9, 3.6, 1.3, "run directory\nmetrics.jsonl, episodes,\ncheckpoints, report", theme)
    arrow(axes, (2.5, 3.55), (4.0, 3.55), theme, "messages | text", both=True)
    arrow(axes, (6.3, 3.55), (7.3, 3.55), theme)
    arrow(axes, (9.2, 3.55), (9.9, 3.55), theme)
    arrow(axes, (10.85, 2.9), (10.85, 2.2), theme)
    arrow(axes, (9.9, 1.55), (9.2, 1.55), theme)
    arrow(axes, (7.6, 2.2), (5.6, 2.9), theme)
    axes.text(5.95, 2.33, "weights", color=theme["faint"], fontsize=8.5, ha="center")
    arrow(axes, (6.9, 1.55), (3.8, 1.55), theme)
    for x in (1.35, 5.15, 10.85):
        arrow(axes, (x, 5.0), (x, 4.2), theme)
    axes.text(
        6,
        0.25,
        "sft, reward, dpo and distill use the same learner, checkpoints and run directory",
        ha="center",
        color=theme["faint"],
        fontsize=9,
    )


@figure("streams", 8.4, 3.1)
def streams(axes: Axes, theme: Theme) -> None:
    """The tokens of an episode with two turns, and what is stored with each."""
    canvas(axes, 18.2, 6.2)
    spans = [("observation", 4, False), ("answer", 3, True), ("observation", 4, False), ("answer", 3, True)]
    words = ["<user>", "go", "where", "?", "go", "left", "<end>", "<user>", "ice", "at", "left", "go", "up", "<end>"]
    x = 2.6
    position = 0
    for number, (name, length, sampled) in enumerate(spans):
        start = x
        for _ in range(length):
            color = theme["orange"] if sampled else theme["faint"]
            axes.add_patch(
                Rectangle(
                    (x, 3.7), 1.0, 0.9, facecolor=theme["box"], edgecolor=color, linewidth=1.5 if sampled else 0.8
                )
            )
            axes.text(x + 0.5, 4.15, words[position], ha="center", va="center", fontsize=7.5, color=theme["ink"])
            axes.text(x + 0.5, 3.0, "yes" if sampled else "–", ha="center", va="center", fontsize=8, color=theme["ink"])
            probability = f"-{0.1 * (1 + position % 4):.1f}" if sampled else "–"
            axes.text(x + 0.5, 2.2, probability, ha="center", va="center", fontsize=8, color=theme["ink"])
            reward = {6: "0", 13: "1"}.get(position, "–")
            axes.text(x + 0.5, 1.4, reward, ha="center", va="center", fontsize=8, color=theme["ink"])
            x += 1.05
            position += 1
        axes.text(
            (start + x) / 2,
            5.0,
            f"{name} {number // 2}",
            ha="center",
            fontsize=9,
            color=theme["orange"] if sampled else theme["faint"],
        )
    rows = {"ids": 4.15, "sampled": 3.0, "rollout_logprobs": 2.2, "rewards": 1.4}
    for name, y in rows.items():
        axes.text(2.4, y, name, ha="right", va="center", fontsize=8.5, color=theme["ink"], family="monospace")
    axes.text(
        9.9,
        0.45,
        "only sampled tokens have a loss; a turn's reward is on its last sampled token",
        ha="center",
        fontsize=9,
        color=theme["faint"],
    )


def example_group() -> list[Any]:
    """Two episodes of a task, each with two turns of three sampled tokens; the first one succeeds."""
    from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn

    def episode(index: int, turn_rewards: tuple[float, float]) -> Episode:
        sampled = np.array([False, False, True, True, True, False, False, True, True, True])
        rewards = np.zeros(10, dtype=np.float32)
        rewards[[4, 9]] = turn_rewards
        turn = np.array([0] * 5 + [1] * 5, dtype=np.int32)
        logprobs = np.where(sampled, -0.5, 0).astype(np.float32)
        stream = Stream(np.arange(10), sampled, logprobs, rewards, turn, np.zeros(10, dtype=np.int32))
        turns = [
            Turn(0, 2, 5, turn_rewards[0], StopReason.END_TOKEN, "", {}, "start"),
            Turn(0, 7, 10, turn_rewards[1], StopReason.END_TOKEN, "", {"success": turn_rewards[1] > 0}, f"{index}"),
        ]
        return Episode(0, 0, index, 0, [stream], turns, Outcome.TERMINATED)

    return [episode(0, (0.2, 1.0)), episode(1, (-0.2, 0.0))]


def example_credits() -> dict[str, np.ndarray]:
    """Label -> advantages of the sampled tokens of the first episode, computed by the package."""
    import posttrain

    group = example_group()
    values = [[np.linspace(0.4, 1.0, 10, dtype=np.float32)], [np.full(10, 0.3, dtype=np.float32)]]
    found = {
        "rloo": posttrain.advantages(group, "rloo"),
        "grpo": posttrain.advantages(group, "grpo"),
        "turn_returns": posttrain.advantages(group, "turn_returns"),
        "reinforce, discount 0.9": posttrain.advantages(group, "reinforce", discount=0.9),
        "gae, lambda 0.9": posttrain.advantages(
            group, "gae", values=values, gae_lambda=0.9, discount=1.0, whiten=False
        ),
    }
    return {name: credit.values[0][0][group[0].streams[0].sampled] for name, credit in found.items()}


@figure("credit", 8.4, 3.9)
def credit(axes: Axes, theme: Theme) -> None:
    """Types of credit on one episode."""
    rows = example_credits()
    largest = max(np.abs(row).max() for row in rows.values())
    axes.set_xlim(-2.6, 7.2)
    axes.set_ylim(-0.9, len(rows) + 0.5)
    axes.axis("off")
    for number, (name, row) in enumerate(reversed(rows.items())):
        axes.text(
            -0.2, number + 0.35, name, ha="right", va="center", color=theme["ink"], fontsize=9.5, family="monospace"
        )
        for token, value in enumerate(row):
            x = token + (0.5 if token > 2 else 0)
            height = 0.6 * abs(value) / largest
            axes.add_patch(
                Rectangle(
                    (x + 0.08, number),
                    0.84,
                    height,
                    facecolor=theme["blue"] if value >= 0 else theme["orange"],
                    linewidth=0,
                )
            )
            axes.text(
                x + 0.5,
                number + height + 0.04,
                f"{value:+.2f}",
                ha="center",
                va="bottom",
                fontsize=8,
                color=theme["ink"],
            )
        axes.plot([0, 6.5], [number, number], color=theme["faint"], linewidth=0.8)
    axes.text(1.5, -0.25, "turn 0: three tokens, reward 0.2", ha="center", va="top", color=theme["faint"], fontsize=9)
    axes.text(5.0, -0.25, "turn 1: three tokens, reward 1", ha="center", va="top", color=theme["faint"], fontsize=9)


@figure("async", 8.4, 2.7)
def asynchronous(axes: Axes, theme: Theme) -> None:
    """When engine and learner work, without and with asynchronous rollouts."""
    canvas(axes, 18, 6.4)

    def bar(x: float, y: float, width: float, text: str, color: str) -> None:
        axes.add_patch(
            Rectangle((x, y), width - 0.06, 0.85, facecolor=theme["box"], edgecolor=theme[color], linewidth=1.5)
        )
        axes.text(x + width / 2, y + 0.42, text, ha="center", va="center", fontsize=8, color=theme["ink"])

    for y, title in ((5.85, "async_rollouts: 0"), (2.75, "async_rollouts: 1")):
        axes.text(0, y, title, fontsize=9.5, color=theme["ink"], family="monospace")
    for y, name in ((4.75, "engine"), (3.75, "learner"), (1.65, "engine"), (0.65, "learner")):
        axes.text(2.6, y + 0.4, name, ha="right", va="center", fontsize=9, color=theme["faint"])
    for step in range(3):
        bar(3 + 5 * step, 4.75, 3, f"sample {step + 1}", "blue")
        bar(6 + 5 * step, 3.75, 2, f"train {step + 1}", "orange")
    for step in range(5):
        bar(3 + 3 * step, 1.65, 3, f"sample {step + 1}", "blue")
        if step < 4:
            bar(6 + 3 * step, 0.65, 2, f"train {step + 1}", "orange")
    axes.text(
        10.5,
        0.0,
        "time; step 3 samples with the weights after step 1 while the learner trains step 2",
        ha="center",
        fontsize=8.5,
        color=theme["faint"],
    )


@figure("pipeline", 8.4, 1.9)
def pipeline(axes: Axes, theme: Theme) -> None:
    """Stages chained with lineage."""
    canvas(axes, 14.6, 3.4)
    stages = [
        ("data", "convert"),
        ("sft", "policy"),
        ("reward", "reward model"),
        ("rl", "policy"),
        ("evaluate", "table"),
    ]
    for number, (name, makes) in enumerate(stages):
        x = 0.2 + 2.95 * number
        box(axes, x, 1.6, 2.2, 1.1, f"{name}\n{makes}", theme, "blue" if name in ("sft", "reward", "rl") else "box")
        if number:
            arrow(axes, (x - 0.75, 2.15), (x, 2.15), theme)
    arrow(axes, (4.4, 1.6), (9.9, 1.6), theme, bend=0.25)
    axes.text(
        7.3,
        0.2,
        "a stage runs again only if its recipe, its rows or an earlier model has changed",
        ha="center",
        fontsize=9,
        color=theme["faint"],
    )


def plain_axes(axes: Axes, theme: Theme, ticks: Sequence[float]) -> None:
    """Percent axes without a frame."""
    axes.set_facecolor("none")
    axes.set_ylim(0, 1.08)
    axes.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.tick_params(colors=theme["ink"], labelsize=9, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme["faint"])


@figure("board", 8.4, 3.0)
def board(axes: Axes, theme: Theme) -> None:
    """Success of each training seed of the board before and after RL."""
    lines = read_lines(RESULTS / "board.jsonl")
    names = list(dict.fromkeys(line["entry"] for line in lines))
    plain_axes(axes, theme, (0, 0.5, 1))
    for place, name in enumerate(names):
        of_entry = [line for line in lines if line["entry"] == name]
        for level, color, label in (("random", "faint", "random"), ("optimal", "green", "optimal")):
            value = of_entry[0][level]
            if value is None:
                continue
            axes.plot(
                [place - 0.34, place + 0.34],
                [value, value],
                color=theme[color],
                linewidth=1.4,
                linestyle=(0, (5, 3)),
                label=label if not place else None,
            )
        for number, line in enumerate(of_entry):
            x = place + 0.12 * (number - (len(of_entry) - 1) / 2)
            after = np.mean(line["results"] if "results" in line else [int(one) for one in line["success"]])
            # A marker, because the head of an arrow that is shorter than itself would lie below its start.
            axes.plot([x, x], [line["before"], after], color=theme["blue"], linewidth=1.4)
            axes.plot([x], [after], marker="^", markersize=5, color=theme["blue"], linewidth=0)
            axes.plot(
                [x],
                [line["before"]],
                marker="o",
                markersize=4,
                color=theme["orange"],
                linewidth=0,
                label="before RL" if not place and not number else None,
            )
    axes.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    axes.set_xlim(-0.6, len(names) - 0.4)
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.99), fontsize=8.5, frameon=False, ncols=3)
    for text in legend.get_texts():
        text.set_color(theme["ink"])
    axes.set_title(
        "each arrow: one training seed, success before and after RL", fontsize=9, color=theme["ink"], loc="left"
    )


def learning(lines: list[dict[str, Any]], axes: Axes, theme: Theme) -> None:
    """What each type of credit and each policy loss learns from the same base recipe."""
    small_multiples(axes, lines, theme["blue"], theme["faint"], theme["ink"])


for environment, chosen in by_environment(read_lines(RESULTS / "learning.jsonl")).items():
    figure(f"learning_{environment.replace(' ', '_')}", 8.4, height_of(chosen))(partial(learning, chosen))


@figure("learning_trl", 8.4, 5.0)
def learning_trl(axes: Axes, theme: Theme) -> None:
    """The same tasks learned by posttrain and by TRL."""
    colors = {"posttrain": theme["blue"], "trl": theme["orange"]}
    panels(axes, read_lines(RESULTS / "learning_trl.jsonl"), colors, theme["faint"], theme["ink"])


def draw(folder: Path = FOLDER) -> list[Path]:
    """Write all figures in both themes; returns their files."""
    files = []
    for name, (size, paint) in FIGURES.items():
        for theme_name, theme in THEMES.items():
            with plt.rc_context(
                {
                    "svg.fonttype": "none",
                    "svg.hashsalt": "posttrain",
                    "font.family": "sans-serif",
                    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
                }
            ):
                chart, axes = plt.subplots(figsize=size, layout="constrained")
                paint(axes, theme)
                files.append(folder / f"{name}_{theme_name}.svg")
                chart.savefig(files[-1], transparent=True, metadata={"Date": None, "Creator": None})
                plt.close(chart)
    return files


if __name__ == "__main__":
    for file in draw():
        print(file)
