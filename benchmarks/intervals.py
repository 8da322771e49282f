"""How often the intervals of 95% that posttrain prints contain the truth.

    python benchmarks/intervals.py --out docs/results/intervals.md

Each row draws samples from a distribution whose truth is known, and computes the interval with the function that prints it.
Rates are not drawn but counted: every possible result has its probability. See docs/results/intervals.md.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.crossed import crossed_mean
from harness.distributions import RARE, VALUES, Draws, Values, success_rates
from harness.table import markdown
from scipy.stats import binom

from posttrain.evaluation.paired import paired_test
from posttrain.evaluation.statistics import (
    Difference,
    ItemScores,
    combine,
    estimate,
    item_means,
    odds_ratio,
    paired_rates,
    probability_above,
    ratio,
    standardized_difference,
)
from posttrain.evaluation.summary import mean_at_k, pass_rates
from posttrain.runs.intervals import Estimate, clustered_rate, mean, mean_difference, seed_mean, success_rate
from posttrain.seeds import random_stream

LEAST, MOST = 0.935, 0.965
"""Coverage that is as claimed; below, the reason is named."""
Interval = Estimate | Difference


@dataclass(frozen=True)
class Row:
    """An interval, and samples whose truth is known."""

    number: str
    """What is printed."""
    data: str
    truth: float
    sample: Callable[[Draws], Interval] | None = None
    counted: Callable[[], Iterator[tuple[float, Interval]]] | None = None
    """The probability of each possible result, and its interval."""
    why: str = ""
    """Why the coverage is not as claimed."""
    share: float = 1.0
    """Of the samples of other rows, for slow ones."""


@dataclass(frozen=True)
class Coverage:
    """What was found for a row."""

    row: Row
    right: float
    """Share of the printed intervals that contain the truth; NaN if none is printed."""
    printed: float
    """Share of the samples that have an interval."""

    @property
    def note(self) -> str:
        return "" if not self.printed or LEAST <= self.right <= MOST else self.row.why or "NOT AS CLAIMED"


def measure(row: Row, samples: int) -> Coverage:
    """Simulate or count a row."""
    if row.counted is not None:
        results: Any = row.counted()
    else:
        assert row.sample is not None
        draws = random_stream("intervals", row.number, row.data)
        count = max(1, round(samples * row.share))
        results = ((1 / count, row.sample(draws)) for _ in range(count))
    right = printed = 0.0
    for chance, interval in results:
        if math.isnan(interval.low):
            continue
        printed += chance
        # The truth is computed from the parameters, so that it may be a rounding error beside a limit.
        right += chance * (interval.low - 1e-9 <= row.truth <= interval.high + 1e-9)
    return Coverage(row, right / printed if printed else math.nan, printed)


# -- rates --------------------------------------------------------------------------------------------------------------


def rates() -> list[Row]:
    """Success, accuracy and other rates of independent items; pairs of rates."""
    rows = []
    for n in (8, 32, 64, 256):
        rows += [counted("rate", f"n = {n}, p = {p:g}", n, p, success_rate) for p in (0.01, 0.02, 0.05, 0.3, 0.5)]
    for p in ((0.25, 0.25, 0.25, 0.25), (0.3, 0.1, 0.2, 0.4), (0.0, 0.02, 0.02, 0.96), (0.45, 0.02, 0.08, 0.45)):
        for n in (8, 32, 128):
            data = f"n = {n}, {p[0]:g} both, {p[1]:g} only A, {p[2]:g} only B"
            sample = partial(of_pairs, n, p)
            rows.append(Row("difference of paired rates", data, p[2] - p[1], sample, why=FEW_RESULTS))
    rows += [
        counted("odds ratio of pairs", f"{n} pairs differ, ratio {odds:g}", n, odds / (1 + odds), odds_of, odds)
        for n, odds in ((5, 1.0), (20, 3.0))
    ]
    return rows


FEW_RESULTS = "few possible results"


def counted(
    number: str, data: str, n: int, p: float, interval: Callable[[int, int], Interval], truth: float | None = None
) -> Row:
    """A row whose sample is a number of successes in `n` trials."""

    def results() -> Iterator[tuple[float, Interval]]:
        return ((float(binom.pmf(x, n, p)), interval(x, n)) for x in range(n + 1))

    return Row(number, data, p if truth is None else truth, counted=results, why=FEW_RESULTS)


def odds_of(successes: int, n: int) -> Estimate:
    return odds_ratio(n - successes, successes)


def of_pairs(n: int, chances: Sequence[float], draws: Draws) -> Difference:
    both, only_a, only_b, neither = draws.multinomial(n, chances).tolist()
    return paired_rates(
        [1.0] * (both + only_a) + [0.0] * (only_b + neither),
        [1.0] * both + [0.0] * only_a + [1.0] * only_b + [0.0] * neither,
    )


def clusters() -> list[Row]:
    """Several attempts per task, whose chances of success differ."""
    rows = []
    for tasks in (4, 8, 16, 64):
        for attempts, p, alike in ((4, 0.5, 0.0), (4, 0.3, 0.4), (16, 0.1, 0.4), (4, 0.02, 0.4)):
            data = f"{tasks} tasks x {attempts}, p = {p:g}, correlation {alike:g}"
            sample = partial(several_attempts, tasks, attempts, p, alike)
            rows.append(Row("rate of several attempts", data, p, sample, why=FEW_TASKS, share=0.5))
    for tasks in (8, 32, 128):
        # Chances of success are uniform: pass@k is 1 - E(1 - q)^k = k / (k + 1).
        for name, truth, metric in (
            ("pass@1", 1 / 2, lambda attempts: pass_rates(attempts)[1]),
            ("pass@4", 4 / 5, lambda attempts: pass_rates(attempts)[4]),
            ("mean@k", 1 / 2, mean_at_k),
        ):
            sample = partial(any_difficulty, metric, tasks)
            rows.append(Row(name, f"{tasks} tasks x 8, any difficulty", truth, sample, why=FEW_TASKS))
    return rows


FEW_TASKS = "how alike attempts are is little known"


def several_attempts(tasks: int, attempts: int, p: float, alike: float, draws: Draws) -> Estimate:
    certain = 1 / alike - 1 if alike else 0.0
    chances = draws.beta(p * certain, (1 - p) * certain, size=tasks) if alike else np.full(tasks, p)
    return clustered_rate((draws.binomial(attempts, chances) / attempts).tolist(), tasks * attempts)


def any_difficulty(metric: Callable[[dict[int, list[bool]]], Estimate], tasks: int, draws: Draws) -> Estimate:
    return metric({task: (draws.random(8) < chance).tolist() for task, chance in enumerate(draws.random(tasks))})


# -- means --------------------------------------------------------------------------------------------------------------


SIZES = (3, 5, 8, 16, 32, 64, 256)
WIDE = "allows for values that the sample lacks"
SKEWED = "Student's and Johnson's intervals joined"


def means() -> list[Row]:
    """Mean returns and scores over tasks, of known and of unknown range."""
    few = list(mean_rows("normal", VALUES["normal"], False, (16, 63)))
    return few + [
        row
        for name, values in VALUES.items()
        for known in (False, True)
        if values.bounds or not known
        for row in mean_rows(name, values, known, SIZES if known else (64, 256))
    ]


def mean_rows(name: str, values: Values, known: bool, sizes: Sequence[int]) -> Iterator[Row]:
    number, bounds = (f"mean of {'known' if known else 'unknown'} range", values.bounds if known else None)
    for n in sizes:
        sample = partial(drawn_mean, lambda drawn: mean(drawn, bounds), values, n)
        share = 0.5 if not known or n > 64 else 0.125
        yield Row(number, f"n = {n}, {name}", values.truth, sample, why=WIDE if known else SKEWED, share=share)


def drawn_mean(interval: Callable[[list[float]], Estimate], values: Values, n: int, draws: Draws) -> Estimate:
    return interval(values.draw(draws, n).tolist())


def rare() -> list[Row]:
    """Means of unknown range whose samples may lack the value that matters."""
    rows = [row for name, values in RARE.items() for row in mean_rows(name, values, False, (64, 256))]
    rows += [
        seed_row("mean over training seeds", n, name, success_rates()[name])
        for n in (5, 10, 20)
        for name in ("30% fail", "10% fail")
    ]
    return [replace(row, why=UNSEEN) for row in rows]


def seed_row(number: str, n: int, name: str, values: Values, rate: bool = True, **more: Any) -> Row:
    sample = partial(drawn_mean, partial(seed_mean, rate=rate), values, n)
    return Row(number, f"{n} seeds, {name}", values.truth, sample, **more)


UNSEEN = "samples without the rare value"


def differences() -> list[Row]:
    """Paired and unpaired differences, and effects."""
    rows = []
    for n in (5, 10, 30):
        for name, why in (("normal", ""), ("exponential", "long tails")):
            sample = partial(paired, VALUES[name], n)
            rows.append(Row("mean of paired differences", f"n = {n}, {name}", 0.3, sample, why=why))
        effect = Values(lambda draws, n: draws.normal(0.5, 1, n), 0.5)
        rows.append(Row("effect d_z", f"n = {n}, normal", 0.5, partial(drawn_mean, standardized_difference, effect, n)))
    why = "the variance between few runs is little known"
    for runs, n in (((1, 1), 5), ((1, 1), 10), ((1, 1), 30), ((3, 3), 20), ((2, 5), 20), ((1, 3), 20)):
        data = f"{n} items, {runs[0]} and {runs[1]} runs"
        rows.append(Row("`compare`, mean", data, 0.0, partial(compared, runs, n), why=why, share=0.5))
    return rows


def paired(values: Values, n: int, draws: Draws) -> Estimate:
    return mean_difference((values.draw(draws, n) - values.draw(draws, n) + 0.3).tolist())


def compared(runs: tuple[int, int], n: int, draws: Draws) -> Difference:
    """Models without a difference; items differ in difficulty, and runs from each other where there are several."""
    items = [str(number) for number in range(n)]
    hard = draws.normal(size=n)
    between = 0.0 if runs == (1, 1) else 0.3
    sides = [
        [
            item_means("mean", zip(items, hard + between * draws.normal() + draws.normal(size=n), strict=True))
            for _ in range(count)
        ]
        for count in runs
    ]
    return paired_test("score", "higher", sides[0], sides[1], items, draws=300).difference


# -- metrics that are not means over items ------------------------------------------------------------------------------


def metrics() -> list[Row]:
    """Loss, perplexity, and metrics of text and of judges."""
    rows = []
    # Log-normal lengths differ by a factor of seven in two thirds of the rows.
    for sizes, lengths, tokens, mean_tokens, why in (
        ((2, 3, 10, 30, 100), " of 5 to 199 tokens", lambda draws, n: draws.integers(5, 200, n), 102, "few rows"),
        (
            *((10, 30, 100), ", log-normal lengths", lambda draws, n: np.exp(draws.normal(4, 1, n)), math.exp(4 + 0.5)),
            "a few long rows decide",
        ),
    ):
        for n in sizes:
            data, sample = f"{n} rows{lengths}", partial(loss, tokens, n)
            rows.append(Row("validation loss, perplexity", data, 1 + 20 / mean_tokens, sample, why=why))
    bleu = float(combine("bleu", sentences(200_000, random_stream("intervals", "sentences")).sum(0)))
    for n in (8, 30, 100):
        rows.append(
            Row("BLEU", f"{n} sentences", bleu, lambda draws, n=n: scored("bleu", sentences(n, draws)), share=0.2)
        )
    for m, n in ((5, 5), (10, 10), (5, 40), (40, 40)):
        for shift in (0, 1, 2):
            data = f"{m} good and {n} bad, {shift} deviations apart"
            rows.append(above("accuracy of unpaired answers", data, m, n, shift))
    return rows


def above(number: str, data: str, m: int, n: int, shift: int) -> Row:
    """The probability that one of `m` normal values is above one of `n` that are so many deviations lower."""

    def sample(draws: Draws) -> Estimate:
        return probability_above([draws.normal(shift, 1, m)], [draws.normal(0, 1, n)])

    return Row(number, data, 0.5 * (1 + math.erf(shift / 2)), sample, why=FEW_RESULTS, share=0.5)


def loss(lengths: Callable[[Draws, int], np.ndarray], n: int, draws: Draws) -> Estimate:
    """A row has 20 nats and a random number of nats per token with mean 1."""
    tokens = lengths(draws, n)
    return ratio(tokens * draws.gamma(2, 0.5, n) + 20, tokens)


def sentences(n: int, draws: Draws) -> np.ndarray:
    """[n, 10]: sacrebleu's counts: lengths of answer and reference, correct n-grams and all n-grams of one to four words."""
    words = draws.integers(8, 30, n)
    total = words[:, None] - np.arange(4)
    skill = draws.beta(6, 3, n)[:, None] ** np.arange(1, 5)
    return np.concatenate([words[:, None], words[:, None] + 1, draws.binomial(total, skill), total], axis=1).astype(
        float
    )


def scored(kind: Any, table: np.ndarray) -> Estimate:
    return estimate(ItemScores(kind, {str(number): row for number, row in enumerate(table)}))


# -- training seeds -----------------------------------------------------------------------------------------------------


def seeds() -> list[Row]:
    """Results over training seeds."""
    rows, skewed = [], "skewed towards 0 or 1, or two modes"
    for name, values in success_rates().items():
        if not name.endswith("fail"):
            for n in (4, 5, 8, 10, 20) if name == "normal, 70% ± 5" else (5, 10):
                rows.append(seed_row("mean over training seeds, rate", n, name, values, why=skewed, share=10))
    for n in (5, 10):
        for name, tails in (("normal", "long"), ("uniform", "short"), ("Student's t of 3", "long")):
            number, more = "mean over training seeds, loss or return", {"why": f"{tails} tails", "share": 50}
            rows.append(seed_row(number, n, name, VALUES[name], rate=False, **more))
        for shift in (0, 1, 2):
            data = f"{n} seeds a side, {shift} deviations apart"
            rows.append(above("probability of improvement", data, n, n, shift))
    for board in BOARDS:
        truth = board_truth(*board)
        for n, tasks in ((5, 200), (5, 50), (10, 64)):
            data = f"{n} x {tasks}, {truth:.1%}, seeds {board[1]:g}, tasks {board[2]:g}"
            rows.append(Row("training seeds x tasks", data, truth, partial(played, board, n, tasks), why=skewed))
    return rows


BOARDS = ((0.5, 0.4, 1.0), (2.2, 0.05, 1.5), (6.0, 0.7, 0.5), (3.0, 1.0, 1.0), (1.0, 0.0, 2.5), (4.0, 0.3, 2.0))


def success(level: float, seed: Any, task: Any) -> Any:
    return 1 / (1 + np.exp(-level - seed - task))


def board_truth(level: float, of_seeds: float, of_tasks: float) -> float:
    draws = random_stream("intervals", "board", str(level)).standard_normal((2, 400_000))
    return float(success(level, of_seeds * draws[0], of_tasks * draws[1]).mean())


def played(board: tuple[float, float, float], n: int, tasks: int, draws: Draws) -> Estimate:
    level, of_seeds, of_tasks = board
    chance = success(level, of_seeds * draws.normal(size=(n, 1)), of_tasks * draws.normal(size=(1, tasks)))
    return crossed_mean(draws.random((n, tasks)) < chance, rate=True)


# -- the table ----------------------------------------------------------------------------------------------------------

PAGE = """# Coverage of intervals

```console
$ python benchmarks/intervals.py --out docs/results/intervals.md
```

This draws samples whose truth is known, computes each interval with the function that prints it, and writes the tables below (in a
checkout).

`coverage`: percent of the printed intervals that contain the truth. `printed`: percent of samples that have an interval.
A claim of 95% is met between 93.5 and 96.5; outside, the note has the reason. Rates are computed exactly. The others are drawn:
2,000 samples, 250 to 1,000 of slow rows and more of fast ones, so a number varies by one point (2,000) to three (250).

Below 93.5 are the rows of the last table, whose samples may lack the value that matters: of unknown range and with a probability
below 5%, or training runs that rarely fail. Five uniform seeds have 93.4, as Student's t has there. Above 96.5 is caution. Where
the range is known, an interval allows for values that the sample lacks, and with few results, tasks or seeds, it is either too wide
or too narrow.
"""

GROUPS: dict[str, Callable[[], list[Row]]] = {
    "Rates": rates,
    "Several attempts per task": clusters,
    "Means": means,
    "Differences": differences,
    "Losses and metrics": metrics,
    "Training seeds": seeds,
    "What a sample may lack": rare,
}


def every_rate() -> str:
    """Markdown with the exact coverage of the interval of a rate over all rates."""
    rows = []
    truth = np.linspace(0.0005, 0.9995, 1999)
    for n in (2, 5, 8, 16, 32, 64, 256):
        known = [success_rate(x, n) for x in range(n + 1)]
        low, high = (np.array([getattr(one, side) for one in known])[:, None] for side in ("low", "high"))
        covered = (binom.pmf(np.arange(n + 1)[:, None], n, truth) * ((low <= truth) & (truth <= high))).sum(0)
        shares = {"lowest": covered.min(), "mean": covered.mean(), "in the middle half": covered[500:1500].mean()}
        rows.append(
            {"number": "rate", "samples": f"n = {n}", **{name: f"{100 * one:.1f}" for name, one in shares.items()}}
        )
    return markdown(rows)


def table(found: Sequence[Coverage]) -> str:
    """Markdown with a row per interval."""
    rows = []
    for one in found:
        shares = {"coverage": f"{100 * one.right:.1f}" if one.printed else "–", "printed": f"{100 * one.printed:.1f}"}
        rows.append({"number": one.row.number, "samples": one.row.data, **shares, "note": one.note})
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000, help="of a row; slow rows have fewer")
    parser.add_argument("--groups", default=",".join(GROUPS), help="tables to make, separated by commas")
    parser.add_argument("--out", type=Path, help="page to write")
    chosen = parser.parse_args()
    parts = [PAGE, f"## Every rate\n\n{every_rate()}"]
    print(parts[1])
    for name in chosen.groups.split(","):
        parts.append(f"## {name}\n\n{table([measure(row, chosen.samples) for row in GROUPS[name]()])}")
        print(parts[-1], flush=True)
    if chosen.out:
        chosen.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
