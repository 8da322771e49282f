"""A comparison of several sides: which items they share, all tests with their correction, and what follows."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.errors import InputError
from posttrain.evaluation.scores import DRAWS, ItemScores, Kind, combine, resampled_sums
from posttrain.evaluation.sides import Run, Side
from posttrain.evaluation.statistics import (
    Difference,
    Estimate,
    holm,
    mcnemar,
    odds_ratio,
    paired_rates,
    standardised_difference,
)
from posttrain.evaluation.text_metrics import Better
from posttrain.runs.files import write_atomically
from posttrain.runs.tables import Table

_ROUNDING = 1e-12
"""Differences below this share of the values themselves are none."""


@dataclass(frozen=True)
class Paired:
    """B against A in one metric."""

    metric: str
    kind: Kind
    better: Better
    a: float
    b: float
    difference: Difference
    """B minus A with its 95% interval."""
    p: float
    test: Literal["McNemar, exact", "t"]
    n: int
    """Items."""
    runs: tuple[int, int]
    """Runs of A and of B."""
    effect: Estimate | None = None
    """Odds ratio of the discordant items for McNemar's test, else Cohen's d_z; None where neither means anything."""
    corrected: float = math.nan
    """p after Holm's correction over all comparisons of a report."""

    @property
    def better_side(self) -> Literal["A", "B"] | None:
        """Which side is better, where that can be told at 5% after correction."""
        if not self.corrected < 0.05 or not self.difference.value or self.better == "neither":
            return None
        return "B" if (self.difference.value > 0) == (self.better == "higher") else "A"

    def with_correction(self, corrected: float) -> "Paired":
        return replace(self, corrected=corrected)


def paired(
    metric: str,
    better: Better,
    a: Sequence[ItemScores],
    b: Sequence[ItemScores],
    items: Sequence[str],
    seed: int = 0,
    draws: int = DRAWS,
) -> Paired:
    """B minus A in `metric` on `items`, which every run of both sides has; ValueError with fewer than two items.

    The value of a side is the mean over its runs. With one run a side and answers that are right or wrong, the test is
    McNemar's and the interval Newcombe's for pairs. Otherwise both are Student's, with the variance of a bootstrap over
    items (the same ones for all runs) and that between the runs of a side (see `t_test`).
    """
    if len(items) < 2:
        raise ValueError(f"a comparison needs two items, got {len(items)}")
    kind: Kind = "mean" if "mean" in {run.kind for run in (*a, *b)} else a[0].kind
    values_a, values_b = ([combine(kind, run.table(items)) for run in side] for side in (a, b))
    totals_a, totals_b = ([float(combine(kind, run.table(items).sum(0))) for run in side] for side in (a, b))
    value_a, value_b = float(np.mean(totals_a)), float(np.mean(totals_b))
    runs = (len(a), len(b))
    if kind == "rate" and runs == (1, 1) and _binary(values_a[0]) and _binary(values_b[0]):
        only_a = int(((values_a[0] == 1) & (values_b[0] == 0)).sum())
        only_b = int(((values_a[0] == 0) & (values_b[0] == 1)).sum())
        difference = paired_rates(values_a[0].tolist(), values_b[0].tolist())
        p, effect = mcnemar(only_a, only_b), odds_ratio(only_a, only_b)
        return Paired(metric, kind, better, value_a, value_b, difference, p, "McNemar, exact", len(items), runs, effect)
    drawn_a, drawn_b = (
        np.mean([combine(kind, resampled_sums(run.table(items), seed, draws)) for run in side], axis=0)
        for side in (a, b)
    )
    over_items = float(np.var(drawn_b - drawn_a)) * len(items) / (len(items) - 1)
    difference, p = t_test(totals_a, totals_b, over_items, len(items))
    if kind == "rate":
        difference = replace(difference, low=max(difference.low, -1.0), high=min(difference.high, 1.0))
    dz = None
    if kind in ("rate", "mean"):
        dz = standardised_difference((np.mean(values_b, axis=0) - np.mean(values_a, axis=0)).tolist(), seed)
    return Paired(metric, kind, better, value_a, value_b, difference, p, "t", len(items), runs, dz)


def t_test(a: Sequence[float], b: Sequence[float], over_items: float, n: int) -> tuple[Difference, float]:
    """Mean of `b` minus mean of `a`, the values of the runs of two sides, with Student's t interval and two-sided p.

    `over_items`: variance of the difference over draws of the `n` items. The squared standard error is that plus, of
    each side of R runs, s^2 / R, s^2 being the variance between its runs with divisor R - 1; the degrees of freedom are
    Welch and Satterthwaite's (Satterthwaite 1946) of these parts, with n - 1 and R - 1. Where one side alone has a
    single run, its variance is taken to be the other's (Student's test with one value on a side), and the degrees of
    freedom are at most the other's R - 1. Where both have, no variance of training is in it. p is at least 2^(1 - n),
    the least that the signs of n differences can give.
    """
    from scipy.special import stdtr, stdtrit

    value_a, value_b = float(np.mean(a)), float(np.mean(b))
    value = value_b - value_a
    parts, most = [(over_items, n - 1)], n - 1
    if min(len(a), len(b)) > 1:
        parts += [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in (a, b)]
    elif max(len(a), len(b)) > 1:
        several = max(a, b, key=len)
        most = len(several) - 1
        parts.append((float(np.var(several, ddof=1)) * (1 / len(several) + 1), most))
    scale = max(abs(value_a), abs(value_b))
    variance = math.fsum(part for part, _ in parts)
    if variance <= (_ROUNDING * scale) ** 2:
        return Difference(value, value, value), 1.0 if abs(value) <= _ROUNDING * scale else 2.0 ** (1 - n)
    # Shares of the variance, for the square of a tiny one is 0.
    freedom = 1 / math.fsum((part / variance) ** 2 / own for part, own in parts)
    freedom = min(freedom, most) if 1 in (len(a), len(b)) else freedom
    error = math.sqrt(variance)
    half = float(stdtrit(freedom, 0.975)) * error
    p = 1.0 if abs(value) <= _ROUNDING * scale else 2 * float(stdtr(freedom, -abs(value) / error))
    return Difference(value, value - half, value + half), min(1.0, max(p, 2.0 ** (1 - n)))


def _binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


_FEW_ITEMS = 20
_FEW_RUNS = 5
_SAME = ("signature", "encoder", "layer", "verifier", "judge", "rubric", "normalized", "model")
"""What has to be the same for two values of a metric to be compared."""


@dataclass(frozen=True)
class Comparison:
    """Every other side against the first."""

    baseline: str
    tests: list[tuple[str, Paired]]
    """Name of B, and B against the first side."""
    warnings: list[str]
    remarks: list[str]

    def table(self) -> Table:
        """A row for each side and metric."""
        several = len({name for name, _ in self.tests}) > 1
        rows = [
            (
                *((name,) if several else ()),
                test.metric,
                _value(test, test.a),
                _value(test, test.b),
                f"{_value(test, test.difference.value, signed=True)}\n{_limits(test)}",
                _effect(test),
                _p(test.corrected),
                str(test.n),
            )
            for name, test in self.tests
        ]
        headings = (*(("B",) if several else ()), "metric", "A", "B's" if several else "B", "B - A", "effect", "p", "n")
        who = f"A is {self.baseline}" + ("" if several else f", B is {self.tests[0][0]}")
        note = (
            f"{who}. `n` is items that all runs have; intervals are 95%. Right or wrong answers, one run a side: McNemar's "
            "exact test, Newcombe's interval for pairs, and OR, the odds ratio of the items that one side alone got right. "
            "Otherwise: Student's t with the variance over items (by bootstrap) and between runs, and Cohen's d_z over "
            "items, with an interval from ten items on. p is Holm's, corrected for all "
            f"{len(self.tests)} tests of this table."
        )
        return Table("", headings, rows, note, words=("B", "metric") if several else ("metric",))

    def sentence(self) -> str:
        """What can and what cannot be concluded."""
        can = [_finding(self.baseline, name, test) for name, test in self.tests if test.better_side]
        names = dict.fromkeys(name for name, _ in self.tests)
        doubts = {
            name: [_doubt(test) for own, test in self.tests if own == name and not test.better_side] for name in names
        }
        cannot = [f"between {name} and {self.baseline} in {_listed(own)}" for name, own in doubts.items() if own]
        parts = [f"on items like these, {_listed(can)}"] if can else []
        if cannot:
            where = "" if can else "on items like these, "
            parts.append(f"{where}no difference can be told {_listed(cannot)}")
        if any(1 in test.runs for _, test in self.tests):
            parts.append("whether it would be so again if the models were trained with other seeds cannot be concluded")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    def write(self, path: Path) -> None:
        """Write all numbers to `path` as JSON; RunError where the disk refuses."""
        values = {
            "baseline": self.baseline,
            "tests": [{"side": name, **asdict(test), "better_side": test.better_side} for name, test in self.tests],
            "warnings": self.warnings,
            "remarks": self.remarks,
            "conclusion": self.sentence(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_plain(values), ensure_ascii=False, indent=1) + "\n")


def compare(sides: Sequence[Side], common: bool = False, seed: int = 0, draws: int = DRAWS) -> Comparison:
    """Compare every other side with the first, in all metrics that all sides have.

    InputError where sides are of different items, unless `common`, which compares the items that all runs have.
    """
    if len(sides) < 2:
        raise InputError("a comparison needs two sides; name two run directories or files")
    runs = [run for side in sides for run in side.runs]
    metrics = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    if not metrics:
        listed = "; ".join(f"{run.path}: {', '.join(run.metrics)}" for run in runs)
        raise InputError(f"the sides have no metric in common ({listed}); compare results of the same kind")
    remarks = [line for run in runs for line in run.remarks]
    neither = [name for name in metrics if runs[0].metrics[name].better == "neither"]
    metrics = [name for name in metrics if name not in neither]
    if not metrics:
        raise InputError(f"{', '.join(neither)}: neither more nor less is better, so sides cannot be compared by it")
    if neither:
        remarks.append(f"{', '.join(neither)}: not compared, for neither more nor less is better")
    warnings = [*_same_environment(runs), *(line for name in metrics for line in _same_measure(name, runs))]
    shared = _shared(runs, common, remarks)
    tests = []
    for side in sides[1:]:
        for name in metrics:
            a, b = ([run.metrics[name].scores for run in one.runs] for one in (sides[0], side))
            items = [item for item in shared if all(item in own.items for own in (*a, *b))]
            if len(items) < len(shared):
                remarks.append(f"{name}: {len(shared) - len(items)} of {len(shared)} items have no value on some side")
            if len(items) < 2:
                raise InputError(f"{name}: {len(items)} items have a value on both sides; a comparison needs two")
            tests.append((side.name, paired(name, runs[0].metrics[name].better, a, b, items, seed, draws)))
            if len(items) < _FEW_ITEMS:
                rough = "" if tests[-1][1].test.startswith("McNemar") else ", and its interval is a rough one"
                warnings.append(f"{name}: {len(items)} items are few: only a large difference can be told{rough}")
    for (name, test), corrected in zip(list(tests), holm([test.p for _, test in tests]), strict=True):
        tests[tests.index((name, test))] = (name, test.with_correction(corrected))
    return Comparison(sides[0].name, tests, [*_few_runs(sides), *dict.fromkeys(warnings)], list(dict.fromkeys(remarks)))


def _shared(runs: Sequence[Run], common: bool, remarks: list[str]) -> list[str]:
    """The items that all runs have, in the order of the first; InputError where that is not all there are."""
    shared = frozenset.intersection(*(run.items for run in runs))
    others = {run.path: len(run.items - shared) for run in runs if run.items - shared}
    left_out = ", ".join(
        f"{count} of {len(run.items)} of {run.path}" for run in runs if (count := others.get(run.path))
    )
    if not shared:
        raise InputError(
            f"{runs[0].path} and {_other(runs)} have no item in common (first: {_first(runs[0])} and {_first(runs[-1])}); "
            "compare results on the same seeds or ids"
        )
    if others and not common:
        raise InputError(
            f"the sides are of different items: {len(shared)} are shared, and {left_out} are not; compare the shared ones "
            "with --common, or evaluate both on the same"
        )
    if others:
        remarks.append(f"compared on {len(shared)} shared items; left out: {left_out}")
    known = [run for run in runs if run.digests]
    different = [item for item in shared if len({run.digests.get(item) for run in known}) > 1]
    if different:
        raise InputError(
            f"{len(different)} of {len(shared)} items have another prompt or reference on another side, the first of them "
            f"{min(different)[:40]}; compare answers to the same prompts"
        )
    return sorted(shared)


def _same_environment(runs: Sequence[Run]) -> list[str]:
    """A warning for keys of the environment that differ between runs; InputError where it is another environment."""
    played = [run for run in runs if run.environment is not None]
    found = []
    for run in played[1:]:
        one, other = played[0].environment or {}, run.environment or {}
        if one.get("type") != other.get("type"):
            raise InputError(
                f"{played[0].path} played {one.get('type')} and {run.path} played {other.get('type')}; compare runs of one "
                "environment"
            )
        keys = [key for key in one if one[key] != other.get(key)]
        if keys:
            found.append(
                f"{played[0].path} and {run.path} differ in environment.{', environment.'.join(keys)}, so seeds may be other "
                "tasks"
            )
    return found


def _same_measure(name: str, runs: Sequence[Run]) -> list[str]:
    """InputError where a metric was measured in another way in another run; perplexities of other models are told of."""
    one = runs[0]
    for run in runs[1:]:
        known, other = one.metrics[name].about, run.metrics[name].about
        key = next((key for key in _SAME if known.get(key) != other.get(key)), None)
        if key == "model" and one.metrics[name].scores.kind == "perplexity":
            return [f"{name} is of {known[key]} and {other[key]}, and comparable only where they share a tokenizer"]
        if key is not None:
            raise InputError(
                f"{name} of {one.path} is with {key} {known.get(key)} and of {run.path} with {other.get(key)}; measure both alike"
            )
    return []


def _few_runs(sides: Sequence[Side]) -> list[str]:
    counts = {side.name: len(side.runs) for side in sides}
    single = [name for name, count in counts.items() if count == 1]
    if len(single) == len(counts):
        return [
            "one training run a side: the intervals are about these models, not about what training again would give; "
            "name several runs a side with commas"
        ]
    if single:
        return [
            f"one training run of {', '.join(single)}: how much its training varies is not known, and taken to be as much "
            "as that of the other side"
        ]
    if min(counts.values()) < _FEW_RUNS:
        return [f"{min(counts.values())} training runs of a side are few: the interval over them is a rough one"]
    return []


def _finding(baseline: str, name: str, test: Paired) -> str:
    ahead, behind = (name, baseline) if test.better_side == "B" else (baseline, name)
    return (
        f"{ahead} is better than {behind} in {test.metric} by {_size(test)} "
        f"({_interval(test)}, corrected p = {_p(test.corrected)})".replace("= <", "< ")
    )


def _doubt(test: Paired) -> str:
    return f"{test.metric} ({_interval(test)})"


def _interval(test: Paired) -> str:
    return f"95% interval of B - A: {_limits(test)}{' pp' if test.kind == 'rate' else ''}"


def _size(test: Paired) -> str:
    return _value(test, abs(test.difference.value), signed=True).removeprefix("+")


def _limits(test: Paired) -> str:
    low, high = (_value(test, limit, True).removesuffix(" pp") for limit in (test.difference.low, test.difference.high))
    return f"[{low}, {high}]"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _value(test: Paired, value: float, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if test.kind == "rate":
        return f"{100 * value:{sign}.1f}{' pp' if signed else '%'}"
    return f"{value:{sign}.{4 if test.kind == 'mean' and abs(value) < 100 else 2}f}"


def _p(p: float) -> str:
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}" if p >= 1e-16 else "<1e-16"


def _effect(test: Paired) -> str:
    if test.effect is None or math.isnan(test.effect.value):
        return "–"
    name = "OR" if test.test.startswith("McNemar") else "d_z"
    limits = "" if math.isnan(test.effect.low) else f"\n[{test.effect.low:.2f}, {test.effect.high:.2f}]"
    return f"{name} {test.effect.value:.2f}{limits}"


def _other(runs: Sequence[Run]) -> str:
    return runs[-1].path if len(runs) == 2 else "the others"


def _first(run: Run) -> str:
    return min(run.items)[:40]


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON has not as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
