"""How often comparisons show what `posttrain plan` says they show, for each entry of the laptop board.

    python benchmarks/power.py

Comparisons are drawn in two ways. "drawn": tasks with difficulties of a beta distribution that has the entry's mean and spread.
"resampled": the entry's stored runs and tasks, with replacement, planned with the spread of these five runs as a population. In side B,
a share of all successes is turned into failures at random (a loss), or of all failures into successes (a gain). A comparison counts
if the test of `posttrain compare` shows the change, with its sign.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from posttrain.evaluation.paired import t_test
from posttrain.evaluation.power import FEWEST_SEEDS, FILE, Spread
from posttrain.evaluation.statistics import mcnemar

BOARD = Path(__file__).parents[1] / "docs" / "results" / "board.jsonl"
TASKS = 400
"""Final tasks of an entry."""
Draw = Callable[[np.random.Generator, int, int, float], tuple[np.ndarray, np.ndarray]]
"""Success of both sides, [runs, tasks], for a number of runs, of tasks, and a change of B."""


def changed(success: np.ndarray, mean: float, change: float, draws: np.random.Generator) -> np.ndarray:
    """`success` with as many successes deleted, or failures turned into successes, as change its mean by `change`."""
    share = -change / mean if change < 0 else change / (1 - mean)
    return np.where(draws.random(success.shape) < share, change > 0, success)


def drawn(spread: Spread) -> Draw:
    """Comparisons of tasks whose difficulties have a beta distribution, and of seeds that differ in their mean."""
    moves = np.random.default_rng(0).normal(0, math.sqrt(spread.seeds), 10_000)
    room = np.where(moves < 0, spread.mean, 1 - spread.mean)
    kept = np.maximum(1 - np.abs(moves) / room, 0)
    # What the seeds change at random is a part of the variance of a task.
    within = (spread.tasks - float((kept * (1 - kept) * room).mean())) / float((kept**2).mean())
    share = min(max(within / (spread.mean * (1 - spread.mean)), 0.001), 0.999)
    certain = share / (1 - share)

    def draw(draws: np.random.Generator, runs: int, tasks: int, change: float) -> tuple[np.ndarray, np.ndarray]:
        rates = draws.beta(spread.mean * certain, (1 - spread.mean) * certain, tasks)

        def side() -> np.ndarray:
            moved = draws.normal(0, math.sqrt(spread.seeds), (runs, 1))
            to_end = np.minimum(np.abs(moved) / np.where(moved < 0, spread.mean, 1 - spread.mean), 1)
            return draws.random((runs, tasks)) < rates + to_end * ((moved > 0) - rates)

        return side(), changed(side(), spread.mean, change, draws)

    return draw


def resampled(stored: np.ndarray) -> Draw:
    """Comparisons of stored runs, [runs, tasks], on stored tasks, both with replacement."""

    def draw(draws: np.random.Generator, runs: int, tasks: int, change: float) -> tuple[np.ndarray, np.ndarray]:
        chosen = stored[:, draws.integers(0, stored.shape[1], tasks)]
        one, two = (chosen[draws.integers(0, len(stored), runs)] for _ in "ab")
        return one, changed(two, float(stored.mean()), change, draws)

    return draw


def population(spread: Spread, stored: np.ndarray) -> Spread:
    """The spread of comparisons that resample `stored` runs, as of all runs and tasks that there are."""
    mean, seeds = float(stored.mean()), float(stored.mean(1).var())
    rest = stored - stored.mean(1, keepdims=True) - stored.mean(0) + mean
    return replace(spread, mean=mean, seeds=seeds, tasks=float((rest**2).mean()))


def found(draw: Draw, runs: int, tasks: int, change: float, comparisons: int) -> float:
    """The share of comparisons that show the change."""
    draws, shown = np.random.default_rng(0), 0
    for _ in range(comparisons):
        a, b = (side.astype(float) for side in draw(draws, runs, tasks, change))
        differences = b.mean(0) - a.mean(0)
        if runs == 1:
            p = mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))
        else:
            over = float(differences.var()) / (tasks - 1)
            p = t_test(a.mean(1).tolist(), b.mean(1).tolist(), over, tasks, paired=True)[1]
        shown += p < 0.05 and differences.mean() * change > 0
    return shown / comparisons


def entries() -> dict[str, tuple[Spread, np.ndarray]]:
    """The shipped spread of each entry, and its stored runs, [runs, tasks]."""
    lines = [json.loads(line) for line in BOARD.read_text().splitlines()]
    spreads = {one["source"].split("board/")[1].split()[0]: Spread(**one) for one in json.loads(FILE.read_text())}
    runs = {
        name: np.array([[*map(float, line["success"])] for line in lines if line["entry"] == name]) for name in spreads
    }
    return {name: (spread, runs[name]) for name, spread in spreads.items()}


def shares(spread: Spread, draw: Draw, gain: float, comparisons: int) -> tuple[int | None, list[float]]:
    """The final tasks that are planned for `FEWEST_SEEDS`, and the shares of comparisons that show a loss and a gain."""
    tasks = spread.tasks_for(gain, FEWEST_SEEDS)
    changes = spread.changes(gain) if tasks else []
    return tasks, [found(draw, FEWEST_SEEDS, tasks or 0, change, comparisons) for change in changes]


def single(spread: Spread, draw: Draw, comparisons: int) -> tuple[float, float]:
    """The loss or gain that single runs see with `TASKS`, and the smaller share of comparisons that show it."""
    gain = spread.gain_seen(1, TASKS)
    return gain, min(found(draw, 1, TASKS, change, comparisons) for change in spread.changes(gain))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", default="", help="comma-separated; default: all")
    parser.add_argument("--detect", type=float, default=5, help="points of success")
    parser.add_argument("--comparisons", type=int, default=3000)
    chosen = parser.parse_args()
    print(
        f"| entry | tasks, {FEWEST_SEEDS} seeds | drawn: loss, gain | tasks | resampled: loss, gain | single runs: points, found |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (spread, stored) in entries().items():
        if chosen.entries and name not in chosen.entries.split(","):
            continue
        cells = [name]
        whole = population(spread, stored)
        for one, draw in ((spread, drawn(spread)), (whole, resampled(stored))):
            tasks, powers = shares(one, draw, chosen.detect / 100, chosen.comparisons)
            cells += [f"{tasks:,}" if tasks else "–", ", ".join(f"{power:.0%}" for power in powers)]
        gain, power = single(whole, resampled(stored), chosen.comparisons)
        print("|", " | ".join([*cells, f"{100 * gain:.1f}, {power:.0%}"]), "|", flush=True)


if __name__ == "__main__":
    main()
