"""How large an experiment has to be: final tasks and training seeds with which a comparison of two recipes shows a gain.

The spread comes from stored runs: those of the board (`spreads.json`, made by `benchmarks/board.py --spreads`), or pilot runs.
With R training seeds of each recipe on the same T tasks, `posttrain.evaluation.paired.t_test` has the squared standard error

    2 v / (R T) + 2 (s + v / T) / R

where s is the variance of success between training seeds and v that of a task within a seed. The variance of the difference
itself is smaller, 2 s / R + 2 v / (R T), because the test counts v twice. The power is that of tests whose difference and
variances are drawn from normal and chi-square distributions.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.environments.protocol import return_range
from posttrain.episode import reports_success
from posttrain.errors import InputError
from posttrain.evaluation.statistics import Kind
from posttrain.recipe.detectable import FEWEST, POWER, mcnemar_power, smallest
from posttrain.recipe.plan import TaskSplit, counted
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.run import LOGGED_IN, StageRecipe
from posttrain.recipe.warnings import origin_of
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import read_log
from posttrain.runs.machine import describe_machine
from posttrain.runs.tables import Table
from posttrain.seeds import random_stream

SEEDS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
"""Training seeds per recipe that are planned."""
FEWEST_TASKS, MOST_TASKS = 20, 100_000
_DRAWS = 4_000
"""Comparisons that are drawn for a power."""
FILE = Path(__file__).with_name("spreads.json")


@dataclass(frozen=True)
class Spread:
    """The spread of a metric over training seeds and final tasks, from runs of one recipe on the same tasks."""

    source: str
    """The runs, in words."""
    environment: dict[str, Any]
    """The keys of the evaluated environment."""
    kind: Kind
    mean: float
    seeds: float
    """Variance between training seeds, without that of their tasks."""
    tasks: float
    """Variance of the mean of a task within a seed."""
    noise: float | None
    """The part of `tasks` that is divided by the number of episodes per task; None if every task was played once."""
    runs: int
    minutes: float
    """Wall minutes of a run, in the median; without its final tasks if `minutes_per_episode` is known."""
    minutes_per_episode: float | None
    """Wall minutes of a final episode; None if it was not measured."""
    machine: str
    """The processor."""
    here: bool = False
    """Whether this machine made the runs."""

    @classmethod
    def of(cls, results: Sequence[np.ndarray], **about: Any) -> "Spread":
        """From the results of each run, [tasks, episodes per task]. `about`: the other fields. ValueError for fewer than two
        runs or tasks.
        """
        table = np.stack([one.mean(1) for one in results])
        (runs, tasks), center = table.shape, table.mean()
        if runs < 2 or tasks < 2:
            raise ValueError(f"a spread needs two runs and two tasks, got {runs} and {tasks}")
        rest = table - table.mean(1, keepdims=True) - table.mean(0) + center
        within = float((rest**2).sum()) / ((runs - 1) * (tasks - 1))
        between = max(0.0, float(table.mean(1).var(ddof=1)) - within / tasks)
        episodes = results[0].shape[1]
        noise = None if episodes == 1 else float(np.mean([one.var(1, ddof=1).mean() for one in results]))
        if noise is not None:  # `tasks` is the variance of one episode
            within += noise * (1 - 1 / episodes)
        return cls(mean=float(center), seeds=between, tasks=within, noise=noise, runs=runs, **about)

    def power(self, gain: float, seeds: int, tasks: int, episodes: int = 1) -> float:
        """Probability that a two-sided test at 5% shows a difference of `gain` between two recipes with `seeds` training runs
        each, paired by seed, on the same `tasks`. A single run each is a test of these two models, not of their recipes.
        """
        from scipy.special import stdtr

        if tasks < FEWEST:
            return 0.0
        if seeds == episodes == 1 and self.kind == "rate":
            # The largest share of tasks that differ: if a share of all successes is lost, or of all failures becomes success.
            mean, varying = max(self.mean, 1 - self.mean), 2 * self.tasks
            share = min(1.0, max(gain, varying + gain * max(0.0, 1 - varying / mean)))
            return mcnemar_power((share + gain) / 2, (share - gain) / 2, tasks)
        within = (self.tasks - (self.noise or 0.0) * (1 - 1 / episodes)) / tasks
        if self.kind == "rate" and 0 < self.mean < 1:
            # Of both recipes on average: the variance of a rate is largest at 1/2, and the other one may be on either side.
            others = [min(max(self.mean + change, 0.0), 1.0) for change in (-gain, gain)]
            within *= (1 + max(rate * (1 - rate) for rate in others) / (self.mean * (1 - self.mean))) / 2
        several = seeds > 1
        draws = random_stream("power", seeds)
        # The parts of the squared standard error, as a test would estimate them, and their degrees of freedom.
        parts = [(2 * within / seeds * draws.chisquare(tasks - 1, _DRAWS) / (tasks - 1), tasks - 1)]
        if several:
            between = 2 * (self.seeds + within) / seeds
            parts.append((between * draws.chisquare(seeds - 1, _DRAWS) / (seeds - 1), seeds - 1))
        deviation = math.sqrt(2 * within / seeds + several * 2 * self.seeds / seeds)
        difference = gain + deviation * draws.standard_normal(_DRAWS)
        squared = np.maximum(sum(part for part, _ in parts), 1e-300)
        freedom = 1 / sum((part / squared) ** 2 / degrees for part, degrees in parts)
        return float(np.mean(stdtr(freedom, difference / np.sqrt(squared)) > 0.975))

    def tasks_for(self, gain: float, seeds: int, episodes: int = 1) -> int | None:
        """The fewest tasks with a power of `POWER`, at least `FEWEST_TASKS`; None if more than `MOST_TASKS`."""
        low, high = FEWEST_TASKS - 1, FEWEST_TASKS
        while self.power(gain, seeds, high, episodes) < POWER:
            low, high = high, 2 * high
            if high > MOST_TASKS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.power(gain, seeds, middle, episodes) >= POWER else (middle, high)
        return high

    def gain_seen(self, seeds: int, tasks: int, episodes: int = 1) -> float:
        """The smallest gain that is shown with a power of `POWER`; infinite if there is none, as of a rate above 1."""
        most = 1.0
        while self.kind != "rate" and tasks >= FEWEST and self.power(most, seeds, tasks, episodes) < POWER:
            most *= 2
        return smallest(lambda gain: self.power(gain, seeds, tasks, episodes), most)

    def hours(self, seeds: int, tasks: int, episodes: int) -> float | None:
        """Wall hours of both recipes; the model before training plays the tasks as well. None if an episode was not timed."""
        if self.minutes_per_episode is None:
            return None
        return 2 * seeds * (self.minutes + 2 * tasks * episodes * self.minutes_per_episode) / 60

    def show(self, value: float) -> str:
        """A difference in the unit of the measure, as text."""
        return f"{100 * value:.1f} points" if self.kind == "rate" else f"{value:.3g}"

    def gain_of(self, detect: float | None, recipe: StageRecipe) -> float:
        """The gain to plan for: `detect` points of a rate, or a difference of another measure in its own unit. By default a
        tenth of the standard deviation of a task in a run, which is 5 points for a rate of 50%. InputError for more than there
        can be.
        """
        if detect is None:
            return 0.05 if self.kind == "rate" else 0.1 * math.sqrt(self.seeds + self.tasks)
        environment = evaluated_environment(recipe)
        most, what = 100.0, "points of a share"
        if self.kind != "rate":
            added = getattr(recipe, "reward", None) is not None or environment is None
            bounds = None if added or environment is None else return_range(environment)
            most, what = math.inf if bounds is None else bounds[1] - bounds[0], "the range of the returns"
        if not 0 < detect < math.inf or detect > most:
            limit = "" if most == math.inf else f" and at most {most:g}, {what}"
            raise InputError(f"--detect {detect:g} is not a difference; give a number above 0{limit}")
        return detect / 100 if self.kind == "rate" else detect


def pilot_spread(runs: Sequence[Path]) -> Spread:
    """The spread of finished runs of one recipe with different seeds. InputError for runs that do not have one."""
    if len(runs) < 2:
        raise InputError("--pilots needs two or more runs, separated by commas, such as runs/a,runs/b")
    results, minutes, per_episode, machines = [], [], [], []
    recipes: list[Any] = []
    for path in runs:
        run = RunDirectory.open(path)
        finals = [one for one in stored_steps(run.episodes) if one.split == "final"]
        log = read_log(run.metrics)
        ends = [line["time/run"] for line in log if line["kind"] == "final" and line.get("time/run")]
        if not finals or not ends:
            raise InputError(f"{path} has no final episodes; give finished runs of an environment")
        recipes.append(run.load_recipe())
        machines.append(run.load_environment())
        episodes = read_episodes(max(finals, key=lambda one: one.step).path).episodes
        rate = reports_success(episodes) and getattr(recipes[-1].evaluation, "metric", None) != "return"
        by_task: dict[int, list[float]] = {}
        for episode in (one for one in episodes if one.has_return):
            by_task.setdefault(episode.seed, []).append(float(episode.success) if rate else episode.total_reward)
        results.append(by_task)
        # Evaluations and checkpoints of the last step are part of the final minutes, which are overestimated a little.
        trained = float(np.nanmax(log.columns.get("time/run", np.zeros(1)), initial=0.0))
        per_episode.append((ends[-1] - trained) / 60 / len(episodes))
        minutes.append(ends[-1] / 60 - per_episode[-1] * len(episodes))
    for path, recipe in zip(runs[1:], recipes[1:], strict=True):
        if differing := _differing(recipes[0].model_dump(mode="json"), recipe.model_dump(mode="json")):
            raise InputError(
                f"--pilots: {runs[0]} and {path} differ in {', '.join(differing)}; give runs of one recipe, each with another seed"
            )
    if len({recipe.seed for recipe in recipes}) < len(runs):
        raise InputError("--pilots: runs have the same seed; give runs of one recipe, each with another seed")
    shared = sorted(set.intersection(*(set(one) for one in results)))
    least = min((len(one[task]) for one in results for task in shared), default=0)
    if len(shared) < 2:
        raise InputError("--pilots: the runs share fewer than two final tasks; give runs of one recipe")
    tables = [np.array([one[task][:least] for task in shared]) for one in results]
    if not np.ptp(tables):
        raise InputError(
            "--pilots: all final results are equal, so they show no spread; give runs that sometimes succeed"
        )
    return Spread.of(
        tables,
        source=f"{counted(len(runs), 'pilot run')} on {counted(len(shared), 'shared task')}",
        environment=keys_of_environment(recipes[0]),
        kind="rate" if rate else "mean",
        minutes=float(np.median(minutes)),
        minutes_per_episode=measured if (measured := float(np.median(per_episode))) > 0 else None,
        machine=" and ".join(sorted({str(one.get("processor")) for one in machines})),
        here=all(
            one.get(key) == value for one in machines for key, value in describe_machine().items() if key in _HARDWARE
        ),
    )


_HARDWARE = ("platform", "processor", "cpu_count", "cpus_allowed")
"""Parts of `describe_machine` that the time of a run depends on."""


def _differing(one: Any, other: Any, key: str = "") -> list[str]:
    """The keys in which two recipes differ, except for the seed and what controls only the storage. Models that runs have
    exported are equal if the recipes of these runs are."""
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        left_out = () if key else ("seed", "name", *LOGGED_IN)
        return [
            found
            for name in dict.fromkeys([*one, *other])
            if name not in left_out
            for found in _differing(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))
        ]
    if key.endswith("path") and all(isinstance(text, str) for text in (one, other)):
        origins = [origin_of(text)[0] for text in (one, other)]
        if all(origins) and Path(one).name == Path(other).name and not _differing(origins[0], origins[1]):
            return []
    return [key]


def keys_of_environment(recipe: StageRecipe) -> dict[str, Any]:
    """The keys of the evaluated environment."""
    environment = evaluated_environment(recipe)
    if environment is None:
        raise InputError("a plan of tasks and seeds needs an environment; set environment.type")
    return environment.model_dump(mode="json")


def stored_spread(recipe: StageRecipe) -> Spread:
    """The spread of the board's runs in the environment of `recipe`: of the same keys, else of the type with the most equal
    keys if tasks are generated. InputError if there is none.
    """
    keys, environment = keys_of_environment(recipe), evaluated_environment(recipe)
    spreads = [Spread(**one) for one in json.loads(FILE.read_text())]
    known = [one for one in spreads if one.environment == keys]
    if not known and environment is not None and environment.rows_key is None:
        known = [one for one in spreads if one.environment["type"] == keys["type"]]
    if not known:
        raise InputError(
            f"no runs in {keys['type']} with these tasks are stored; give two finished runs, --pilots runs/a,runs/b"
        )
    return max(known, key=lambda one: sum(one.environment.get(key) == value for key, value in keys.items()))


def plan_lines(
    recipe: StageRecipe, spread: Spread, gain: float, tasks: TaskSplit | None, price: float | None
) -> tuple[list[str], Table]:
    """What shows a `gain` (of a rate, in [0, 1]) over another recipe, and the table of training seeds.

    Args:
        tasks: the tasks of the recipe; None if they are unknown.
        price: of an hour of a machine that makes one run at a time.
    """
    show = spread.show
    source = None if tasks is None else tasks.held_out_source
    held = 0 if tasks is None else len(tasks.test)
    most = held if source is not None else MOST_TASKS
    rows, plans = [], []
    for seeds in SEEDS:
        needed, episodes = spread.tasks_for(gain, seeds), 1
        while spread.noise and (needed or MOST_TASKS) > most and episodes < 16:
            episodes *= 2
            needed = spread.tasks_for(gain, seeds, episodes)
        if needed is None or needed > most:
            continue
        hours = spread.hours(seeds, needed, episodes)
        money = "–" if price is None or hours is None else f"{price * hours:,.2f}"
        took = "–" if hours is None else f"{60 * hours:,.0f}"
        rows.append((f"{seeds}{' *' if seeds == 1 else ''}", f"{needed:,}", str(episodes), took, money))
        # Without times, the fewest final episodes.
        cost = 2 * seeds * needed * episodes if hours is None else hours
        plans += [(cost, seeds, needed, episodes)] if seeds > 1 else []
        if needed == FEWEST_TASKS and seeds > 1:
            break
    mean = f"{100 * spread.mean:.1f}%" if spread.kind == "rate" else f"{spread.mean:.3g}"
    lines = [
        f"spread of {spread.source}: mean {mean}, standard deviation {show(math.sqrt(spread.seeds))} between training seeds"
        f"{_uncertain(spread, show)}"
    ]
    keys = keys_of_environment(recipe)
    if differing := sorted(key for key in {*keys, *spread.environment} if spread.environment.get(key) != keys.get(key)):
        lines.append(
            f"these runs have another environment.{', environment.'.join(differing)}; --pilots takes other runs"
        )
    if plans:
        _, seeds, needed, episodes = min(plans)
        hours = spread.hours(seeds, needed, episodes)
        each = f", {episodes} episodes each" if episodes > 1 else ""
        lines.append(
            f"a difference of {show(gain)} is shown in 80% of comparisons by {seeds} training seeds of each recipe and {needed:,} final "
            f"tasks{each}" + ("" if hours is None else f": {60 * hours:,.0f} minutes")
        )
    else:
        where = "" if source is None else f" on the {held:,} final tasks of {source}"
        lines.append(f"no number of training seeds up to {SEEDS[-1]} shows a difference of {show(gain)}{where}")
    for seeds, between in ((1, "models"), (5, "recipes with 5 training seeds each")) if held else ():
        seen = spread.gain_seen(seeds, held)
        can = "cannot show a difference" if seen == math.inf else f"show differences from {show(seen)}"
        lines.append(f"the recipe's {counted(held, 'final task')} {can} between two {between}")
    where = "on this machine" if spread.here else f"on {spread.machine}, not on this machine"
    took = f"Minutes of all runs, one after the other, as measured {where}."
    if spread.minutes_per_episode is None:
        took = (
            f"A stored run took {spread.minutes:.0f} minutes with its own final tasks, {where}; minutes and money of this plan are "
            "unknown, because the time of an episode was not measured. --pilots measures it."
        )
    note = f"Both recipes share training seeds and tasks. {took} * one run each compares two models, not their recipes."
    return lines, Table("", ("seeds per recipe", "final tasks", "episodes each", "minutes", "money"), rows, note)


def _uncertain(spread: Spread, show: Callable[[float], str]) -> str:
    """The 95% interval of the standard deviation between seeds, by the chi-square distribution, in words."""
    if not spread.seeds:
        return f" (too small for {counted(spread.runs, 'run')} to show)"
    from scipy.special import chdtri

    degrees = spread.runs - 1
    low, high = (math.sqrt(spread.seeds * degrees / float(chdtri(degrees, share))) for share in (0.025, 0.975))
    return f" (95%: {show(low)} to {show(high)})"
