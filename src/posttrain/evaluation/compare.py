"""Paired comparison of evaluations: shared items, a test per metric with Holm's correction, and the conclusion."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.errors import InputError
from posttrain.evaluation.results import Better
from posttrain.evaluation.sides import Run, Side
from posttrain.evaluation.statistics import (
    DRAWS,
    Difference,
    ItemScores,
    Kind,
    combine,
    holm,
    mcnemar,
    odds_ratio,
    paired_rates,
    resampled_sums,
    standardized_difference,
)
from posttrain.runs.directory import write_atomically
from posttrain.runs.intervals import Estimate, t_limits
from posttrain.runs.tables import Table

_ROUNDING = 1e-12
"""Differences below this fraction of the values count as zero."""


@dataclass(frozen=True)
class PairedTest:
    """The comparison of side B with side A in one metric."""

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
    """Number of items."""
    runs: tuple[int, int]
    """Number of runs of A and of B."""
    effect: Estimate | None = None
    """Odds ratio of the discordant items for McNemar's test, else Cohen's d_z; None if neither is meaningful."""
    corrected: float = math.nan
    """p after Holm's correction over all tests of the comparison."""

    @property
    def better_side(self) -> Literal["A", "B"] | None:
        """The better side, if the difference is significant at 5% after correction."""
        if not self.corrected < 0.05 or not self.difference.value or self.better == "neither":
            return None
        return "B" if (self.difference.value > 0) == (self.better == "higher") else "A"

    def with_correction(self, corrected: float) -> "PairedTest":
        return replace(self, corrected=corrected)


def paired_test(
    metric: str,
    better: Better,
    a: Sequence[ItemScores],
    b: Sequence[ItemScores],
    items: Sequence[str],
    seed: int = 0,
    draws: int = DRAWS,
) -> PairedTest:
    """Test B minus A in `metric` on `items`, which all runs of both sides must have.

    The value of a side is the mean over its runs. For one run per side and binary scores, the test is McNemar's and the
    interval Newcombe's for pairs. Otherwise both are Student's, with the variance over items (bootstrap, with the same
    items for all runs) and between the runs of a side (see `t_test`). Raises `ValueError` for fewer than two items.
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
        return PairedTest(
            metric, kind, better, value_a, value_b, difference, p, "McNemar, exact", len(items), runs, effect
        )
    drawn_a, drawn_b = (
        np.mean([combine(kind, resampled_sums(run.table(items), seed, draws)) for run in side], axis=0)
        for side in (a, b)
    )
    over_items = float(np.var(drawn_b - drawn_a)) * len(items) / (len(items) - 1)
    difference, p = t_test(totals_a, totals_b, over_items, len(items))
    if kind in ("rate", "mean"):
        # No difference is larger than that of the smallest and the largest value.
        width = 1.0 if kind == "rate" else float(np.ptp(np.concatenate([np.ravel(v) for v in (*values_a, *values_b)])))
        low, high = np.clip((difference.low, difference.high), -width, width).tolist()
        difference = replace(difference, low=low, high=high)
    dz = None
    if kind in ("rate", "mean"):
        dz = standardized_difference((np.mean(values_b, axis=0) - np.mean(values_a, axis=0)).tolist())
    return PairedTest(metric, kind, better, value_a, value_b, difference, p, "t", len(items), runs, dz)


def t_test(a: Sequence[float], b: Sequence[float], over_items: float, n: int) -> tuple[Difference, float]:
    """Mean of `b` minus mean of `a` (one value per run) with Student's t interval, and the two-sided p-value.

    `over_items`: variance of the difference over bootstrap samples of the `n` items. The squared standard error is
    `over_items` plus s^2 / R for each side with R runs, where s^2 is the variance between runs with divisor R - 1. The
    degrees of freedom are those of Welch and Satterthwaite (Satterthwaite 1946) for these terms, with n - 1 and R - 1.
    If only one side has a single run, its variance is assumed equal to that of the other side, and the degrees of
    freedom are at most the other side's R - 1. If both have a single run, the variance of training is not included.
    p is at least 2^(1 - n), the smallest p-value of a sign test on n differences. Without any variance, the limits are NaN.
    """
    from scipy.special import stdtr

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
        return Difference(value, math.nan, math.nan), 1.0 if abs(value) <= _ROUNDING * scale else 2.0 ** (1 - n)
    # Use fractions of the variance, because the square of a tiny variance underflows.
    freedom = 1 / math.fsum((part / variance) ** 2 / degrees for part, degrees in parts)
    freedom = min(freedom, most) if 1 in (len(a), len(b)) else freedom
    error = math.sqrt(variance)
    p = 1.0 if abs(value) <= _ROUNDING * scale else 2 * float(stdtr(freedom, -abs(value) / error))
    return Difference(value, *t_limits(value, error, freedom)), min(1.0, max(p, 2.0 ** (1 - n)))


def _binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


_FEW_ITEMS = 20
_FEW_RUNS = 5
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
class Comparison:
    """Every other side compared with the first."""

    baseline: str
    tests: list[tuple[str, PairedTest]]
    """(name of B, test of B against the first side)."""
    warnings: list[str]
    """Caveats about the conclusions."""
    details: list[str]
    """Messages about data that was read, left out or not compared."""

    def table(self) -> Table:
        """A table with one row per side and metric."""
        several = len({name for name, _ in self.tests}) > 1
        rows = [
            (
                *((name,) if several else ()),
                test.metric,
                value_text(test, test.a),
                value_text(test, test.b),
                f"{value_text(test, test.difference.value, signed=True)}\n{limits_text(test)}",
                _effect(test),
                p_text(test.corrected),
                str(test.n),
            )
            for name, test in self.tests
        ]
        headings = (*(("B",) if several else ()), "metric", "A", "B's" if several else "B", "B - A", "effect", "p", "n")
        who = f"A is {self.baseline}" + ("" if several else f", B is {self.tests[0][0]}")
        note = (
            f"{who}. `n` is the number of items that all runs have; intervals are 95%. Binary scores with one run per side: "
            "McNemar's exact test, Newcombe's interval for pairs, and OR, the odds ratio of the items that only one side got "
            "right. Otherwise: Student's t with the variance over items (bootstrap) and between runs, and Cohen's d_z over "
            "items. p has Holm's correction for all "
            f"{len(self.tests)} tests of this table."
        )
        return Table("", headings, rows, note, words=("B", "metric") if several else ("metric",))

    def sentence(self) -> str:
        """The conclusion: significant differences, other differences, and limits of the data."""
        significant = [_finding(self.baseline, name, test) for name, test in self.tests if test.better_side]
        names = dict.fromkeys(name for name, _ in self.tests)
        others = {
            name: [_insignificant(test) for side, test in self.tests if side == name and not test.better_side]
            for name in names
        }
        open_ = [f"between {name} and {self.baseline} in {_listed(tests)}" for name, tests in others.items() if tests]
        parts = [f"on items like these, {_listed(significant)}"] if significant else []
        if open_:
            where = "" if significant else "on items like these, "
            parts.append(f"{where}there is no significant difference {_listed(open_)}")
        if any(1 in test.runs for _, test in self.tests):
            parts.append("this says nothing about models trained with other seeds")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    def write(self, path: Path) -> None:
        """Write all numbers to `path` as JSON; raises `RunError` if that fails."""
        values = {
            "baseline": self.baseline,
            "tests": [{"side": name, **asdict(test), "better_side": test.better_side} for name, test in self.tests],
            "warnings": self.warnings,
            "details": self.details,
            "conclusion": self.sentence(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_plain(values), ensure_ascii=False, indent=1) + "\n")


def compare(sides: Sequence[Side], common: bool = False, seed: int = 0, draws: int = DRAWS) -> Comparison:
    """Compare every other side with the first in all metrics that all sides have.

    Raises `InputError` if the sides have different items. With `common`, the shared items are compared instead.
    """
    if len(sides) < 2:
        raise InputError("a comparison needs two sides; give two run directories or files")
    runs = [run for side in sides for run in side.runs]
    metrics = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    if not metrics:
        listed = "; ".join(f"{run.path}: {', '.join(run.metrics)}" for run in runs)
        raise InputError(f"the sides have no metric in common ({listed}); compare results of the same kind")
    details = [line for run in runs for line in run.details]
    neither = [name for name in metrics if runs[0].metrics[name].better == "neither"]
    metrics = [name for name in metrics if name not in neither]
    if not metrics:
        raise InputError(
            f"{', '.join(neither)}: neither larger nor smaller values are better, so there is nothing to compare"
        )
    if neither:
        details.append(f"{', '.join(neither)}: not compared, because neither larger nor smaller values are better")
    warnings = [*check_environments(runs), *(line for name in metrics for line in check_settings(name, runs))]
    shared = _shared_items(runs, common, details)
    tests = []
    for side in sides[1:]:
        for name in metrics:
            a, b = ([run.metrics[name].scores for run in one.runs] for one in (sides[0], side))
            items = [item for item in shared if all(item in scores.items for scores in (*a, *b))]
            if len(items) < len(shared):
                details.append(f"{name}: {len(shared) - len(items)} of {len(shared)} items have no value on some side")
            if len(items) < 2:
                raise InputError(
                    f"{name}: {len(items)} items have a value on both sides; a comparison needs at least two"
                )
            tests.append((side.name, paired_test(name, runs[0].metrics[name].better, a, b, items, seed, draws)))
            if len(items) < _FEW_ITEMS:
                rough = "" if tests[-1][1].test.startswith("McNemar") else ", and the interval is rough"
                warnings.append(f"{name}: with only {len(items)} items, only large differences are detectable{rough}")
    for (name, test), corrected in zip(list(tests), holm([test.p for _, test in tests]), strict=True):
        tests[tests.index((name, test))] = (name, test.with_correction(corrected))
    return Comparison(sides[0].name, tests, [*_few_runs(sides), *dict.fromkeys(warnings)], list(dict.fromkeys(details)))


def _shared_items(runs: Sequence[Run], common: bool, details: list[str]) -> list[str]:
    """The items that all runs have, sorted. Raises `InputError` if there are other items and `common` is false."""
    shared = frozenset.intersection(*(run.items for run in runs))
    others = {run.path: len(run.items - shared) for run in runs if run.items - shared}
    left_out = ", ".join(
        f"{count} of {len(run.items)} of {run.path}" for run in runs if (count := others.get(run.path))
    )
    if not shared:
        raise InputError(
            f"{runs[0].path} and {_other(runs)} have no item in common (first items: {_first(runs[0])}, {_first(runs[-1])}); "
            "compare results on the same seeds or ids"
        )
    if others and not common:
        raise InputError(
            f"the sides have different items: {len(shared)} are shared, {left_out} are not; compare the shared ones with "
            "--common, or evaluate all sides on the same items"
        )
    if others:
        details.append(f"compared on {len(shared)} shared items; left out: {left_out}")
    check_prompts(runs, shared)
    return sorted(shared)


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
    """Raises `InputError` for a metric computed with different settings; warns about perplexities of different
    models.
    """
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


def _few_runs(sides: Sequence[Side]) -> list[str]:
    counts = {side.name: len(side.runs) for side in sides}
    single = [name for name, count in counts.items() if count == 1]
    if len(single) == len(counts):
        return [
            "one training run per side: the intervals do not include the variance between training runs; give several "
            "runs per side, separated by commas"
        ]
    if single:
        return [
            f"one training run of {', '.join(single)}: its variance between training runs is unknown, and assumed equal to "
            "that of the other side"
        ]
    if min(counts.values()) < _FEW_RUNS:
        return [f"with only {min(counts.values())} training runs on a side, the interval over runs is rough"]
    return []


def _finding(baseline: str, name: str, test: PairedTest) -> str:
    better, worse = (name, baseline) if test.better_side == "B" else (baseline, name)
    return (
        f"{better} is better than {worse} in {test.metric} by {_size(test)} "
        f"({_interval(test)}, corrected p = {p_text(test.corrected)})".replace("= <", "< ")
    )


def _insignificant(test: PairedTest) -> str:
    return f"{test.metric} ({_interval(test)})"


def _interval(test: PairedTest) -> str:
    return f"95% interval of B - A: {limits_text(test)}{' pp' if test.kind == 'rate' else ''}"


def _size(test: PairedTest) -> str:
    return value_text(test, abs(test.difference.value), signed=True).removeprefix("+")


def limits_text(test: PairedTest) -> str:
    """The 95% interval of the difference, as text; a dash if it is unknown."""
    if math.isnan(test.difference.low):
        return "–"
    low, high = (
        value_text(test, limit, True).removesuffix(" pp") for limit in (test.difference.low, test.difference.high)
    )
    return f"[{low}, {high}]"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def value_text(test: PairedTest, value: float, signed: bool = False) -> str:
    """A value or a difference of the metric, as text; rates are percentages."""
    sign = "+" if signed else ""
    if test.kind == "rate":
        return f"{100 * value:{sign}.1f}{' pp' if signed else '%'}"
    return f"{value:{sign}.{4 if test.kind == 'mean' and abs(value) < 100 else 2}f}"


def p_text(p: float) -> str:
    """A p-value as text."""
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}" if p >= 1e-16 else "<1e-16"


def _effect(test: PairedTest) -> str:
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
    """`value` as a JSON value, with NaN and infinity as None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
