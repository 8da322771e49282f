"""Unit credit on tasks whose optimum is known: estimators in the right and in the wrong channel.

Ten units of two choices each, a table of logits for a policy, REINFORCE with the batch's mean return at each unit as
baseline. Credit goes through the functions that training calls; nothing but numpy is needed and no time is measured.
"""

import argparse
import sys
from functools import partial

import numpy as np
from harness.options import names
from harness.table import show
from toy.credit import WAYS
from toy.study import agreement, curve, exact_curve, summary
from toy.tasks import TASKS


def main() -> None:
    """Train every way on every task and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=40, help="tasks of each kind, and runs of each way on them")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run")
    parser.add_argument("--batch", type=int, default=16, help="answers of a step")
    parser.add_argument("--rate", type=float, default=3.0, help="learning rate on the mean over answers")
    parser.add_argument("--rewards", type=int, default=200, help="random rewards whose best answers are compared")
    parser.add_argument(
        "--tasks", type=names(TASKS), default=",".join(TASKS), help="kinds of tasks, separated by commas"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    rows = []
    for kind in chosen.tasks:
        runs = [
            (way.name, way.channel, "yes" if way.right else "no", partial(curve, way, batch=chosen.batch))
            for way in WAYS
        ]
        for name, channel, right, run in [*runs, ("exact gradient", "–", "–", exact_curve)]:
            curves = [run(kind=kind, seed=s, steps=chosen.steps, rate=chosen.rate) for s in range(chosen.seeds)]
            row = {"task": kind, "credit": name, "channel": channel, "its own": right} | summary(np.stack(curves))
            print(*row.values(), sep="; ", file=sys.stderr, flush=True)
            rows.append(row)
    same = {name: agreement(name, 0.8, chosen.rewards) for name in ("prefix", "loo", "trunc")}
    notes = [
        f"{chosen.seeds} seeds, {chosen.steps} steps of {chosen.batch} answers, rate {chosen.rate:g}; 95% intervals in "
        "brackets; beta 1 (drca_published: 0.8)",
        "score: 0 for choices at random, 1 for the best of all 1,024 answers; its expectation under the policy is exact",
        f"best answer by 0.8 x sum of credits + 0.2 R is the best by R, of {chosen.rewards} rewards of `pairs`: "
        + ", ".join(f"{name} {value}" for name, value in same.items()),
    ]
    show("Credit of units on tasks whose optimum is known", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
