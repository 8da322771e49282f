"""How large an experiment has to be: final tasks and training seeds with which a comparison of two recipes shows a gain.

The spread comes from stored runs: those of the board (`spreads.json`, made by `benchmarks/board.py --spreads`), or pilot runs.
With R training seeds of each recipe on the same T tasks, the difference of the means has the variance

    e / T + (v + v') / (R T) + (s + s') / R

where s is the variance of success between training seeds, v that of a task within a seed, both with a prime for the other recipe,
and e the variance of the change between tasks. `posttrain.evaluation.paired.t_test` counts (v + v') / (R T) twice. Of a rate m, a
change by -q m turns a share q of all successes into failures, which leaves s' = (1 - q)^2 s and v' = (1 - q) (q m + (1 - q) v):
near 1, v' is several times v. The power is that of tests on drawn tasks, whose difficulties have the beta distribution with m and v.
Gains are losses of failures.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
from posttrain.recipe.run import BY_AUDIT, LOGGED_IN, StageRecipe
from posttrain.recipe.warnings import origin_of
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import read_log
from posttrain.runs.machine import describe_machine
from posttrain.runs.tables import Table
from posttrain.seeds import random_stream

SEEDS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
"""Training seeds per recipe that are planned."""
FEWEST_SEEDS = 5
"""The fewest that are recommended: the interval of a mean over training seeds needs as many."""
FEWEST_TASKS, MOST_TASKS = 30, 100_000
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
    differing: Sequence[str] = ()
    """Keys in which the recipe of the runs differs from that of the plan."""

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

    def power(self, change: float, seeds: int, tasks: int, episodes: int = 1, same: bool = False) -> float:
        """Probability that a two-sided test at 5% shows that another recipe, with the same number of training runs on the same
        tasks and paired by seed, is better by `change`, or worse if it is negative. 0 for a rate that it cannot have.

        `same`: the same tasks change in every run, rather than episodes at random. A test of single runs is one of these two
        models, whose difference is that of their recipes and of their seeds.
        """
        from scipy.special import stdtr

        size, room = abs(change), self.mean if change < 0 else 1 - self.mean
        if tasks < FEWEST or (self.kind == "rate" and size > room):
            return 0.0
        within = self.tasks - (self.noise or 0.0) * (1 - 1 / episodes)
        kept = 1 - size / room if self.kind == "rate" else 1.0
        between = self.seeds * (1 + kept**2)
        if seeds == episodes == 1 and self.kind == "rate":
            return self._mcnemar(size, room, between, tasks)
        draws = random_stream("power", seeds)
        if self.kind == "rate":
            # As many independent episodes as have this variance.
            played = max(1, round(seeds * self.tasks / within)) if within else seeds
            values, chances, noises = _changes(
                self.mean, self.tasks, self.mean * (1 - self.mean) - self.seeds, played, change, same
            )
            counts = draws.multinomial(tasks, chances, _DRAWS)
            difference = counts @ values / tasks
            over = np.maximum(counts @ values**2 / tasks - difference**2, 0.0) / (tasks - 1)
            both = counts @ noises / tasks * (seeds / played)  # of the two recipes, by the tasks that were drawn
            difference = difference * math.copysign(1, change)
        else:
            both = np.full(_DRAWS, 2 * within)
            difference = size + math.sqrt(2 * within / seeds / tasks) * draws.standard_normal(_DRAWS)
            over = 2 * within / seeds / tasks * draws.chisquare(tasks - 1, _DRAWS) / (tasks - 1)
        difference = difference + math.sqrt(between / seeds) * draws.standard_normal(_DRAWS)
        parts = [(over, tasks - 1)]  # of the squared standard error, with their degrees of freedom
        if seeds > 1:
            chi = draws.chisquare(seeds - 1, _DRAWS) / (seeds - 1)
            parts.append(((between + both / tasks) / seeds * chi, seeds - 1))
        squared = np.maximum(sum(part for part, _ in parts), 1e-300)
        freedom = 1 / np.maximum(sum((part / squared) ** 2 / degrees for part, degrees in parts), 1e-300)
        return float(np.mean(stdtr(freedom, difference / np.sqrt(squared)) > 0.975))

    def _mcnemar(self, size: float, room: float, between: float, tasks: int) -> float:
        """The power of single runs, over the differences that their seeds make."""
        places, weights = np.polynomial.hermite_e.hermegauss(15 if between else 1)
        power = 0.0
        for place, weight in zip(places, weights / weights.sum(), strict=True):
            moved = min(size + math.sqrt(between) * float(place), room)
            noise = self.tasks * (1 - abs(moved) / room) if abs(moved) < room else 0.0
            noise = min(noise, (1 - abs(moved)) / 2)
            power += weight * mcnemar_power(noise + max(moved, 0.0), noise + max(-moved, 0.0), tasks)
        return float(power)

    def changes(self, gain: float) -> list[float]:
        """The loss and the gain of this size that a rate can have; the gain alone for other measures, whose losses are alike."""
        return [gain] if self.kind != "rate" else [-gain] * (gain <= self.mean) + [gain] * (gain <= 1 - self.mean)

    def least_power(self, gain: float, seeds: int, tasks: int, episodes: int = 1, same: bool = False) -> float:
        """The smaller power of a gain and a loss of this size, for the recipe with this spread; 0 if a rate can have neither."""
        return min((self.power(change, seeds, tasks, episodes, same) for change in self.changes(gain)), default=0.0)

    def tasks_for(self, gain: float, seeds: int, episodes: int = 1, most: int = MOST_TASKS) -> int | None:
        """The fewest tasks with a `least_power` of `POWER`, at least `FEWEST_TASKS`; None if more than `most`."""

        def enough(tasks: int) -> bool:
            changes = self.changes(gain)
            return bool(changes) and all(self.power(one, seeds, tasks, episodes) >= POWER for one in changes)

        if most < FEWEST_TASKS or not enough(most):
            return None
        low, high = FEWEST_TASKS - 1, FEWEST_TASKS
        while high < most and not enough(high):
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def gain_seen(self, seeds: int, tasks: int) -> float:
        """The smallest gain with a `least_power` of `POWER`; infinite if there is none, as of a rate above 1."""
        most = max(self.mean, 1 - self.mean) if self.kind == "rate" else 1.0
        while self.kind != "rate" and tasks >= FEWEST and self.least_power(most, seeds, tasks) < POWER:
            most *= 2
        return smallest(lambda gain: self.least_power(gain, seeds, tasks), most)

    def hours(self, seeds: int, tasks: int, episodes: int) -> float:
        """Wall hours of both recipes; the model before training plays the tasks as well. If an episode was not timed, those of
        runs with their own final tasks.
        """
        evaluated = 0.0 if self.minutes_per_episode is None else 2 * tasks * episodes * self.minutes_per_episode
        return 2 * seeds * (self.minutes + evaluated) / 60

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


@lru_cache(maxsize=64)
def _changes(
    mean: float, within: float, total: float, episodes: int, change: float, same: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a task with several episodes of each recipe: by how much its success can change, [2 episodes + 1], how probable that is,
    and the mean variance between the episodes of a recipe there, of both recipes together.

    Args:
        within: variance of an episode of a task.
        total: that of an episode of any task.
        same: see `Spread.power`.
    """
    from scipy.special import betaincinv, gammaln, xlog1py, xlogy

    share = min(max(within / max(total, 1e-12), 1e-3), 1 - 1e-3)
    certain = share / (1 - share)
    before = betaincinv(mean * certain, (1 - mean) * certain, (np.arange(500) + 0.5) / 500)
    counts = np.arange(episodes + 1)
    ways = gammaln(episodes + 1) - gammaln(counts + 1) - gammaln(episodes - counts + 1)

    def chances(rate: np.ndarray) -> np.ndarray:
        return np.exp(ways + xlogy(counts, rate[:, None]) + xlog1py(episodes - counts, -rate[:, None]))

    moved = abs(change) / (mean if change < 0 else 1 - mean)
    end = float(change > 0)
    after = before if same else before + moved * (end - before)
    two = chances(after)
    if same:
        two = (1 - moved) * two + moved * chances(np.full(1, end))
    joint = chances(before).T @ two / len(before)
    varying = counts * (episodes - counts) / (episodes * max(episodes - 1, 1))
    places = (counts - counts[:, None] + episodes).ravel()
    probable, noises = (
        np.bincount(places, weights.ravel(), 2 * episodes + 1)
        for weights in (joint, joint * (varying + varying[:, None]))
    )
    there = probable > 1e-9
    values = np.arange(-episodes, episodes + 1)[there] / episodes
    return values, probable[there] / probable[there].sum(), noises[there] / probable[there]


def pilot_spread(runs: Sequence[Path], planned: StageRecipe, stages: Sequence[StageRecipe] = ()) -> Spread:
    """The spread of finished runs of one recipe with different seeds. InputError for runs that do not have one.

    Args:
        planned: the recipe of the plan, and `stages` those before it in its pipeline, which may not have been run.
    """
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
    starts = {f"{one.runs}/{one.name}/model": one.model_dump(mode="json") for one in stages}
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
        differing=_differing(recipes[0].model_dump(mode="json"), planned.model_dump(mode="json"), starts=starts),
    )


_HARDWARE = ("platform", "processor", "cpu_count", "cpus_allowed")
"""Parts of `describe_machine` that the time of a run depends on."""


_LEFT_OUT = (
    *("seed", "name", *LOGGED_IN, "audit", "guards", "checkpoint"),
    *("evaluation.start", "evaluation.final_seeds", "evaluation.episodes_per_seed"),
)
"""Keys that leave what is learned as it is, and the number of final tasks, which is planned."""


def _differing(one: Any, other: Any, key: str = "", starts: Mapping[str, Any] | None = None) -> list[str]:
    """The keys in which two recipes differ, except for those left out. Models that runs have exported are equal if the recipes of
    these runs are. `starts`: the recipes of models that `other` may start from and that may not exist."""
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        selects = not key and BY_AUDIT in (one.get("export"), other.get("export"))
        return [
            found
            for name in dict.fromkeys([*one, *other])
            if (path := f"{key}.{name}".lstrip(".")) not in _LEFT_OUT or (selects and name == "audit")
            for found in _differing(one.get(name), other.get(name), path, starts)
        ]
    if key.endswith("path") and all(isinstance(text, str) for text in (one, other)):
        ours, theirs = origin_of(one)[0], (starts or {}).get(other) or origin_of(other)[0]
        if ours and theirs and Path(one).name == Path(other).name and not _differing(ours, theirs, starts=starts):
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
    nearest = max(known, key=lambda one: sum(one.environment.get(key) == value for key, value in keys.items()))
    return replace(nearest, differing=_differing(nearest.environment, keys, "environment"))


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
        needed, episodes = spread.tasks_for(gain, seeds, 1, most), 1
        while spread.noise and needed is None and episodes < 16:
            episodes *= 2
            needed = spread.tasks_for(gain, seeds, episodes, most)
        if needed is None:
            continue
        hours = spread.hours(seeds, needed, episodes)
        money = "–" if price is None else f"{price * hours:,.2f}"
        rows.append((f"{seeds}{' *' if seeds == 1 else ''}", f"{needed:,}", str(episodes), f"{60 * hours:,.0f}", money))
        if seeds >= FEWEST_SEEDS:
            plans.append((hours, seeds, needed, episodes))
            if needed == FEWEST_TASKS:
                break
    mean = f"{100 * spread.mean:.1f}%" if spread.kind == "rate" else f"{spread.mean:.3g}"
    lines = [
        f"spread of {spread.source}: mean {mean}, standard deviation {show(math.sqrt(spread.seeds))} between training seeds"
        f"{_uncertain(spread, show)}"
    ]
    if spread.differing:
        advice = "--pilots takes finished runs of this recipe"
        lines.append(f"these runs differ from the recipe in {', '.join(spread.differing)}; {advice}")
    if plans:
        hours, seeds, needed, episodes = min(plans)
        each = f", {episodes} episodes each" if episodes > 1 else ""
        lines.append(
            f"a difference of {show(gain)} is shown in 80% of comparisons by {seeds} training seeds of each recipe and {needed:,} final "
            f"tasks{each}: {60 * hours:,.0f} minutes"
        )
        if spread.kind == "rate":
            shares = [
                f"a {'loss' if change < 0 else 'gain'} in {spread.power(change, seeds, needed, episodes):.0%}"
                for change in spread.changes(gain)
            ]
            lines.append(
                f"by this plan, {' and '.join(shares)}; if the same tasks change in every run, in "
                f"{spread.least_power(gain, seeds, needed, episodes, same=True):.0%}"
            )
    else:
        where = "" if source is None else f" on the {held:,} final tasks of {source}"
        lines.append(f"no number of training seeds up to {SEEDS[-1]} shows a difference of {show(gain)}{where}")
    for seeds, between in ((1, "recipes with a run each"), (5, "recipes with 5 training seeds each")) if held else ():
        seen = spread.gain_seen(seeds, held)
        can = "cannot show a difference" if seen == math.inf else f"show differences from {show(seen)}"
        lines.append(f"the recipe's {counted(held, 'final task')} {can} between two {between}")
    where = "on this machine" if spread.here else f"on {spread.machine}, not on this machine"
    took = f"Minutes of all runs, one after the other, as measured {where}."
    if spread.minutes_per_episode is None:
        took = (
            f"Minutes of all runs, one after the other, each the median of {spread.minutes:.0f} minutes {where}, with the final tasks "
            "of those runs: the time of an episode was not measured. --pilots measures it."
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
