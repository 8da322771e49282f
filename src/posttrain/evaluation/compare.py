"""The comparison of evaluated models: all values, paired differences from one of them, and the conclusion.

`posttrain compare` and the page of several runs print the same `Comparison`.
"""

import csv
import io
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.evaluation.paired import PairedTest, paired_test
from posttrain.evaluation.results import Better, estimate_cells
from posttrain.evaluation.sides import Run, Side
from posttrain.evaluation.statistics import DRAWS, Kind, combine, estimate, holm
from posttrain.recipe.detectable import LEVEL
from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.runs.intervals import Estimate, seed_mean
from posttrain.runs.tables import Table

FORMATS = (".json", ".md", ".csv")
"""Suffixes of the files that a comparison can be written to."""
_ARROWS: dict[Better, str] = {"higher": " ↑", "lower": " ↓", "neither": ""}
_FEW_ITEMS = 20
_FEW_RUNS = 5
_FEWEST_PAIRS = 3
_LISTED = 8
"""Items of one side that are named."""
_SETTINGS = (
    "signature",
    "encoder",
    "layer",
    "verifier",
    "judge",
    "rubric",
    "normalized",
    "shots",
    "task version",
    "model",
)
"""Settings that must be equal for two values of a metric to be comparable."""


@dataclass(frozen=True)
class Entry:
    """One metric of one side."""

    side: str
    metric: str
    kind: Kind
    better: Better
    value: Estimate
    """Over all items of a single run, or over the training runs of the side (`seed_mean`); `n` counts these."""
    runs: int
    """Number of training runs."""
    test: PairedTest | None
    """Test of this side (B) against the base (A) on their shared items; None for the base, or if nothing can be tested."""

    @property
    def difference(self) -> str:
        """The difference from the base with its interval, and `*` if it is significant; empty without a test."""
        if self.test is None:
            return ""
        mark = " *" if self.test.better_side else ""
        return f"{self.test.text(self.test.difference.value, signed=True)} {self.test.limits}{mark}"


@dataclass(frozen=True)
class Comparison:
    """The values of several sides, and the test of every other side against `base`."""

    base: str
    sides: list[str]
    metrics: list[str]
    entries: list[Entry]
    """By metric, then by side, without metrics that a side lacks."""
    warnings: list[str]
    """Caveats about the conclusions."""
    details: list[str]
    """Messages about data that was read, left out or not compared."""

    @property
    def tests(self) -> list[tuple[str, PairedTest]]:
        """(name of B, test of B against the base)."""
        return [(entry.side, entry.test) for entry in self.entries if entry.test]

    def table(self) -> Table:
        """A row per metric and side, with all numbers."""
        rows = [
            (
                f"{entry.metric}{_ARROWS[entry.better]}",
                entry.side,
                "\n".join(estimate_cells(entry.kind, entry.value)),
                f"{entry.value.n}{' runs' if entry.runs > 1 else ''}",
                entry.difference.replace(" [", "\n[") or "–",
                *((test.effect_text, test.p_text, str(test.n)) if (test := entry.test) else ("–",) * 3),
            )
            for entry in self.entries
        ]
        headings = ("metric", "model", "value", "n", f"minus {self.base}", "effect", "p", "shared")
        note = (
            " `shared` is the number of items that both have. Binary scores of one run: McNemar's exact test, Newcombe's "
            "interval for pairs, and OR, the odds ratio of the items that only one got right. Otherwise: Student's t with the "
            "variance over items (bootstrap) and between runs, paired by training seed where both sides have the same ones, and "
            "Cohen's d_z over items."
        )
        return Table("", headings, rows, self._note() + note, words=("metric", "model"))

    def matrix(self) -> Table:
        """Sides x metrics. A cell has the value, its interval, and the difference from the base."""
        better = {entry.metric: entry.better for entry in self.entries}
        cells = {
            (entry.side, entry.metric): "\n".join(
                filter(None, (*estimate_cells(entry.kind, entry.value), entry.difference))
            )
            for entry in self.entries
        }
        rows = [(name, *(cells.get((name, metric), "–") for metric in self.metrics)) for name in self.sides]
        headings = ("model", *(f"{metric}{_ARROWS[better[metric]]}" for metric in self.metrics))
        return Table("Models", headings, rows, self._note(), words=("model",))

    def _note(self) -> str:
        return (
            "Brackets: 95% intervals over items, or over training runs. ↑: higher is better, ↓: lower is better. Signed "
            f"numbers: difference from {self.base} on the items that both have, with its interval; * p < 0.05 after Holm's "
            f"correction for the {len(self.tests)} differences of this table."
        )

    def sentence(self) -> str:
        """The conclusion: significant differences, other differences, and limits of the data."""
        level, significant = LEVEL / max(len(self.tests), 1), []

        def limits(test: PairedTest) -> str:
            if math.isnan(test.difference.low):
                return f"{test.text(test.difference.value, signed=True)} on each of {test.n} items"
            return f"95% interval of B - A: {test.limits}{' pp' if test.kind == 'rate' else ''}"

        def visible(test: PairedTest) -> str:
            """The difference that could have been seen, for a test without a significant one."""
            size = test.visible(level)
            if size == math.inf:
                return "; a comparison of so few runs or items cannot show any difference"
            text = test.text(size, signed=True).removeprefix("+")
            return (
                "" if math.isnan(size) else f"; only differences of {text} or more are shown by 80% of such comparisons"
            )

        for name, test in self.tests:
            if test.better_side:
                better, worse = (name, self.base) if test.better_side == "B" else (self.base, name)
                size = test.text(abs(test.difference.value), signed=True).removeprefix("+")
                corrected = f"corrected p = {test.p_text}".replace("= <", "< ")
                significant.append(
                    f"{better} is better than {worse} in {test.metric} by {size} ({limits(test)}, {corrected})"
                )
        others = {
            name: [
                f"{test.metric} ({limits(test)}{visible(test)})"
                for side, test in self.tests
                if side == name and not test.better_side
            ]
            for name in self.sides
        }
        open_ = [f"between {name} and {self.base} in {_listed(tests)}" for name, tests in others.items() if tests]
        parts = [f"on items like these, {_listed(significant)}"] if significant else []
        if open_:
            where = "" if significant else "on items like these, "
            parts.append(f"{where}there is no significant difference {_listed(open_)}")
        if any(1 in test.runs for _, test in self.tests):
            parts.append("this says nothing about models trained with other seeds")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    def csv(self) -> str:
        """All numbers, unrounded, with a line per metric and side. Rates are in [0, 1]. Unknown values are empty."""
        columns = ["model", "metric", "better", "value", "low", "high", "n", "base", "difference"]
        columns += ["difference_low", "difference_high", "p", "p_corrected", "shared"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for entry in self.entries:
            compared: list[object] = [""] * 7
            if (test := entry.test) is not None:
                limits = (test.difference.low, test.difference.high)
                compared = [self.base, test.difference.value, *limits, test.p, test.corrected, test.n]
            cells = [entry.side, entry.metric, entry.better, *entry.value.limits, entry.value.n, *compared]
            writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells])
        return text.getvalue()

    def json(self) -> str:
        """All numbers and messages."""
        tests = [{"side": name, **asdict(test), "better_side": test.better_side} for name, test in self.tests]
        values = [{"side": one.side, "metric": one.metric, **asdict(one.value)} for one in self.entries]
        told = {"warnings": self.warnings, "details": self.details, "conclusion": self.sentence()}
        content = {"base": self.base, "values": values, "tests": tests, **told}
        return json.dumps(_plain(content), ensure_ascii=False, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write `path` in the format of its suffix, one of `FORMATS`; raises `RunError` if that fails."""
        table, messages = self.matrix(), [*self.details, *(f"warning: {line}" for line in self.warnings)]
        make = {
            ".json": self.json,
            ".csv": self.csv,
            ".md": lambda: "\n\n".join([table.markdown(), table.note, *messages, self.sentence()]) + "\n",
        }[path.suffix]
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, make())


def require_formats(paths: Sequence[Path]) -> None:
    """Raises `InputError` for a path whose suffix is not in `FORMATS`."""
    for path in paths:
        if path.suffix not in FORMATS:
            raise InputError(f"--out {path} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


def compare(
    sides: Sequence[Side],
    metrics: Sequence[str] | None = None,
    base: str | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> Comparison:
    """Compare every other side with one of them, on the items that both have.

    Args:
        metrics: the metrics, in this order; None: all, in the order of the files.
        base: the side that the others are compared with; None: the first.
        seed, draws: seed and number of samples of the bootstrap.

    Raises:
        InputError: an unknown base, nothing to compare, a metric computed with different settings, or items with equal
            ids and different prompts or references.
    """
    if len(sides) < 2:
        raise InputError("a comparison needs two sides; give two run directories or files")
    names = [side.name for side in sides]
    if base is not None and base not in names:
        raise InputError(f"--base {base} is not one of the sides; use one of {', '.join(names)}")
    first = sides[0] if base is None else sides[names.index(base)]
    runs = [run for side in sides for run in side.runs]
    known = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    chosen = known if metrics is None else [metric for metric in dict.fromkeys(metrics) if metric in known]
    details = [line for run in runs for line in run.details]
    warnings = check_environments(runs)
    rewards = sorted({run.metrics["return"].about.get("reward", "") for run in runs if "return" in run.metrics} - {""})
    if len(rewards) > 1 and "return" in chosen:
        if metrics is not None:
            raise InputError(
                f"{_listed(rewards)} gave the returns, which cannot be compared; leave out --metric return"
            )
        warnings.append(f"return: not compared, because {_listed(rewards)} gave the returns")
        chosen.remove("return")
    for side in sides:
        for run in side.runs:
            check_prompts([*first.runs, run], {item for one in first.runs for item in one.items} & run.items)
    entries = []
    for metric in chosen:
        having = [run for run in runs if metric in run.metrics]
        warnings += check_settings(metric, having)
        if (better := having[0].metrics[metric].better) == "neither":
            details.append(f"{metric}: not compared, because neither larger nor smaller values are better")
        for run in having:
            left_out = run.metrics[metric].left_out
            details += [f"{run.path}: {metric}: {count} left out: {why}" for why, count in left_out.items()]
        for side in sides:
            if scores := side.scores(metric):
                tested = better != "neither" and side is not first and bool(first.scores(metric))
                test = _test(metric, better, first, side, warnings, seed, draws) if tested else None
                kind = scores[0].kind
                if tested and kind == "rate":
                    details += _one_sided(metric, first, side)
                values = [float(combine(one.kind, one.table().sum(0))) for one in scores]
                value = estimate(scores[0]) if len(scores) == 1 else seed_mean(values, kind == "rate")
                entries.append(Entry(side.name, metric, kind, better, value, len(scores), test))
    if not any(entry.test for entry in entries):
        raise InputError(_nothing(first, sides, chosen))
    corrected = iter(holm([entry.test.p for entry in entries if entry.test]))
    entries = [replace(one, test=one.test and replace(one.test, corrected=next(corrected))) for one in entries]
    single, fewest = [side.name for side in sides if len(side.runs) == 1], min(len(side.runs) for side in sides)
    if len(single) == len(sides):
        few = (
            "one training run per side: the intervals do not include the variance between training runs; give several "
            "runs per side, separated by commas"
        )
    elif single:
        few = (
            f"one training run of {', '.join(single)}: its variance between training runs is unknown, and assumed equal to "
            "that of the other side"
        )
    else:
        few = f"with only {fewest} training runs on a side, the interval over runs is rough" * (fewest < _FEW_RUNS)
    warnings = list(dict.fromkeys([few] * bool(few) + warnings))
    return Comparison(first.name, names, chosen, entries, warnings, list(dict.fromkeys(details)))


def _test(
    metric: str, better: Better, base: Side, side: Side, warnings: list[str], seed: int, draws: int
) -> PairedTest | None:
    """The test of `side` against `base`; None if they share fewer than two items."""
    sides, paired = _paired(metric, base, side, warnings)
    a, b = ([run.metrics[metric].scores for run in runs] for runs in sides)
    items = [frozenset(scores.items) for scores in (*a, *b)]
    shared = sorted(frozenset.intersection(*items))
    if len(shared) < max(map(len, items)):
        left_out = ", ".join(
            f"{len(one) - len(shared)} of {len(one)} of {run.path}"
            for one, run in zip(items, [run for runs in sides for run in runs], strict=True)
            if len(one) > len(shared)
        )
        warnings.append(f"{metric}: compared on {len(shared)} shared items; left out: {left_out}")
    if len(shared) < 2:
        return None
    test = paired_test(metric, better, a, b, shared, seed, draws, paired)
    if len(shared) < _FEW_ITEMS:
        rough = "" if test.test.startswith("McNemar") else ", and the interval is rough"
        warnings.append(f"{metric}: with only {len(shared)} items, only large differences are detectable{rough}")
    return test


def _paired(metric: str, base: Side, side: Side, warnings: list[str]) -> tuple[list[list[Run]], bool]:
    """The runs of both sides that are tested, and whether they are paired by training seed.

    Seeds that only one side has are left out if at least three are shared, and half of those of either side. Fewer pairs would
    leave so few degrees of freedom that all runs, unpaired, show more.
    """
    sides = [sorted(part.having(metric), key=lambda run: -1 if run.seed is None else run.seed) for part in (base, side)]
    seeds = [[run.seed for run in runs] for runs in sides]
    shared = set(seeds[0]) & set(seeds[1]) - {None}
    most = max(map(len, sides))
    if not shared or most == 1 or 1 in map(len, sides):
        return sides, False
    listed = ", ".join(map(str, sorted(one for one in shared if one is not None)))
    if any(None in one or len(set(one)) < len(one) for one in seeds):
        why = "a side has a seed twice, or a run without one"
    elif seeds[0] == seeds[1]:
        return sides, True
    elif len(shared) >= _FEWEST_PAIRS and 2 * len(shared) >= most:
        others = [run.path for runs in sides for run in runs if run.seed not in shared]
        warnings.append(
            f"{metric}: paired on the training seeds of both sides, {listed}; left out of the difference: {', '.join(others)}"
        )
        return [[run for run in runs if run.seed in shared] for runs in sides], True
    else:
        why = f"pairs need {_FEWEST_PAIRS} seeds that both sides have, and half of each side's"
    warnings.append(f"{metric}: not paired by training seed, although both sides have {listed}: {why}")
    return sides, False


def _one_sided(metric: str, base: Side, side: Side) -> list[str]:
    """The shared items on which every run of one side has 1 and every run of the other has 0, for each of the two."""
    sides = (base, side)
    shared = frozenset.intersection(*(frozenset(one.items) for part in sides for one in part.scores(metric)))
    lines = []
    for winner, loser in (sides, sides[::-1]):
        wanted = [(scores.items, value) for part, value in ((winner, 1), (loser, 0)) for scores in part.scores(metric)]
        items = [one for one in shared if all(of[one][0] == value * of[one][1] for of, value in wanted)]
        items.sort(key=lambda item: (len(item), item))  # seeds by number
        if items:
            listed = ", ".join(item[:40] for item in items[:_LISTED]) + (", …" if len(items) > _LISTED else "")
            lines.append(
                f"{metric}: only {winner.name}, not {loser.name}: {len(items)} of {len(shared)} items ({listed})"
            )
    return lines


def _nothing(base: Side, sides: Sequence[Side], metrics: Sequence[str]) -> str:
    """Why no side can be compared with `base`."""
    shared = [name for name in metrics if all(side.scores(name) for side in sides)]
    runs = [run for side in sides for run in side.runs]
    if not shared:
        listed = "; ".join(f"{run.path}: {', '.join(run.metrics)}" for run in runs)
        return f"the sides have no metric in common ({listed}); compare results of the same kind"
    if all(run.metrics[name].better == "neither" for name in shared for run in base.runs):
        return f"{', '.join(shared)}: neither larger nor smaller values are better, so there is nothing to compare"
    items = ", ".join(min(run.items)[:40] for run in (runs[0], runs[-1]))
    return (
        f"{runs[0].path} and {runs[-1].path if len(runs) == 2 else 'the others'} have fewer than two items in common (first "
        f"items: {items}); compare results on the same seeds or ids"
    )


def check_prompts(runs: Sequence[Run], shared: Collection[str]) -> None:
    """Raises `InputError` if an item of `shared` has different prompts or references in different runs."""
    known = [run for run in runs if run.digests]
    different = [item for item in shared if len({run.digests.get(item) for run in known}) > 1]
    if different:
        raise InputError(
            f"{len(different)} of {len(shared)} items have different prompts or references on different sides, for example "
            f"{min(different)[:40]}; compare answers to the same prompts"
        )


def check_environments(runs: Sequence[Run]) -> list[str]:
    """Warnings for environment keys that differ between runs; raises `InputError` for different environments."""
    played = [run for run in runs if run.environment is not None]
    differences = []
    for run in played[1:]:
        one, other = played[0].environment or {}, run.environment or {}
        if one.get("type") != other.get("type"):
            raise InputError(
                f"{played[0].path} is on {one.get('type')} and {run.path} on {other.get('type')}; compare runs on the same "
                "environment"
            )
        keys = [key for key in one if one[key] != other.get(key)]
        if keys:
            differences.append(
                f"{played[0].path} and {run.path} differ in environment.{', environment.'.join(keys)}, so equal seeds may "
                "be different tasks"
            )
    return differences


def check_settings(name: str, runs: Sequence[Run]) -> list[str]:
    """Raises `InputError` for a metric computed with different settings; warns about perplexities of different models."""
    one = runs[0]
    for run in runs[1:]:
        known, other = one.metrics[name].about, run.metrics[name].about
        key = next((key for key in _SETTINGS if known.get(key) != other.get(key)), None)
        if key == "model" and one.metrics[name].scores.kind == "perplexity":
            return [f"{name} is from {known[key]} and {other[key]}, comparable only if they share a tokenizer"]
        if key is not None:
            raise InputError(
                f"{name} has {key} {known.get(key)} in {one.path} and {other.get(key)} in {run.path}; use the same settings"
            )
    return []


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _plain(value: Any) -> Any:
    """`value` as a JSON value, with NaN and infinity as None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
