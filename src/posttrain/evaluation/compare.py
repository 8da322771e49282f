"""A comparison of several sides: which items they share, all tests with their correction, and what follows."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.evaluation.comparisons import holm
from posttrain.evaluation.paired import Paired, paired
from posttrain.evaluation.scores import DRAWS
from posttrain.evaluation.sides import Run, Side
from posttrain.runs.files import write_atomically
from posttrain.runs.tables import Table

_FEW_ITEMS = 20
_FEW_RUNS = 5
_SAME = ("signature", "encoder", "layer", "verifier", "judge", "rubric", "normalised", "model")
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
