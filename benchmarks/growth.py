"""How costs grow with model, context, group, turns, streams and steps: a table with fitted exponents, and a plot.

One size varies at a time, in doublings; an exponent is the slope of log cost over log size, and a verdict says whether
it is no larger than the task requires.
"""

import argparse
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from growing import engine, learner, memory
from growing.models import random_policy
from growing.series import TOLERANCE, Series
from harness.options import names
from harness.table import show
from harness.timing import available_threads

PARTS = ("engine", "learner", "memory")
HIDDEN = (64, 128, 256, 384, 512)
"""Widths of the models, each of 4 layers."""


def doublings(first: int, count: int) -> list[int]:
    """`first`, twice as much, and so on."""
    return [first << i for i in range(count)]


def measure(parts: Sequence[str], count: int, steps: int, threads: int, place: Path) -> list[Series]:
    """The series of the chosen parts, at `count` sizes each."""
    policies = [random_policy(place / f"{width}", width, 4, threads) for width in HIDDEN[: max(2, count)]]
    middle = policies[1]
    found: list[Series] = []
    if "engine" in parts:
        found += [
            engine.against_model(policies),
            engine.against_context(middle, doublings(128, count)),
            engine.against_streams(middle, doublings(4, count)),
            engine.against_group(middle, doublings(2, count)),
            *engine.against_turns(middle, doublings(2, count)),
            engine.against_finished(middle, doublings(16, count)),
        ]
    if "learner" in parts:
        found += [
            learner.against_model(policies),
            learner.against_context(middle, doublings(128, count)),
            learner.against_streams(middle, doublings(4, count)),
            learner.against_group(middle, doublings(1, min(count, 4))),
        ]
    if "memory" in parts:
        half = random_policy(place / "bfloat16", HIDDEN[0], 4, threads, "bfloat16")
        found += [memory.over_steps(policy, steps) for policy in (policies[0], half)]
    return found


def row(series: Series) -> dict[str, str | float]:
    """A line of the table."""
    first, last = series.x[0], series.x[-1]
    return {
        "part": series.part,
        "against": series.size,
        "sizes": f"{first:,.0f} to {last:,.0f}",
        "cost": series.cost,
        "at the first": float(series.y[0]),
        "at the last": float(series.y[-1]),
        "exponent": series.exponent,
        "expected": series.expected,
        "verdict": series.verdict,
    }


def plot(found: Sequence[Series], file: str) -> None:
    """Write a panel per series, both axes logarithmic, with the line of the expected exponent through the first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, NullFormatter

    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.4 * columns, 2.9 * lines), squeeze=False)
    for panel, series in zip(chain.from_iterable(axes), found, strict=False):
        panel.loglog(series.x, series.y, "o-", label=f"measured, exponent {series.exponent:.2f}")
        bound = [series.y[0] * (x / series.x[0]) ** series.expected for x in series.x]
        panel.loglog(series.x, bound, "--", color="gray", label=f"exponent {series.expected:g}")
        panel.set(title=f"{series.part}: {series.size}", xlabel=series.size, ylabel=series.cost)
        panel.title.set_size(9)
        panel.set_xticks(series.x[:: -(-len(series.x) // 5)])
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(EngFormatter(places=None, sep=""))
        low, high = panel.get_ylim()
        if high < 10 * low:
            # A cost that hardly changes would fill the panel with its noise.
            panel.set_ylim(low / 3, high * 3)
        panel.tick_params(labelsize=7, which="both")
        panel.xaxis.label.set_size(8)
        panel.yaxis.label.set_size(7)
        panel.legend(fontsize=6)
    for panel in list(chain.from_iterable(axes))[len(found) :]:
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(file, dpi=140)


def main() -> None:
    """Evaluator, print the table, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--parts", type=names(PARTS), default=",".join(PARTS), help=f"of {', '.join(PARTS)}, separated by commas"
    )
    parser.add_argument("--points", type=int, default=5, choices=range(2, 7), help="sizes, each twice the one before")
    parser.add_argument("--steps", type=int, default=1000, help="steps over which memory is watched")
    parser.add_argument("--threads", type=int, default=available_threads(), help="processor threads")
    parser.add_argument("--plot", metavar="FILE", help="also draw the series there")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        found = measure(chosen.parts, chosen.points, chosen.steps, chosen.threads, Path(place))
    if chosen.plot:
        plot(found, chosen.plot)
    notes = [
        f"random Qwen3 models of 4 layers, float32, {chosen.threads} threads; the least of several repeats",
        f"as it must: the fitted exponent is at most {TOLERANCE} above the expected one, {memory.FLAT} for memory, 0.1 for counts",
    ]
    show("Growth", [row(series) for series in found], notes, chosen.json)


if __name__ == "__main__":
    main()
