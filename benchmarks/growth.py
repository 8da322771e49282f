"""How costs grow with model, context, group, turns, streams and steps: a table with fitted exponents.

One size varies at a time, in doublings; an exponent is the slope of log cost over log size, and a verdict says whether
it is no larger than the task requires.
"""

import argparse
import tempfile
from collections.abc import Sequence
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


def main() -> None:
    """Measure the parts and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--parts", type=names(PARTS), default=",".join(PARTS), help=f"of {', '.join(PARTS)}, separated by commas"
    )
    parser.add_argument("--points", type=int, default=5, choices=range(2, 7), help="sizes, each twice the one before")
    parser.add_argument("--steps", type=int, default=1000, help="steps over which memory is watched")
    parser.add_argument("--threads", type=int, default=available_threads(), help="processor threads")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        found = measure(chosen.parts, chosen.points, chosen.steps, chosen.threads, Path(place))
    notes = [
        f"random Qwen3 models of 4 layers, float32, {chosen.threads} threads; the least of several repeats",
        f"as it must: the fitted exponent is at most {TOLERANCE} above the expected one, {memory.FLAT} for memory, 0.1 for counts",
    ]
    show("Growth", [row(series) for series in found], notes, chosen.json)


if __name__ == "__main__":
    main()
