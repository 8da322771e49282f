"""Asynchronous rollouts: seconds per step of complete runs, for environments whose calls wait and for one that does not.

The same recipe runs with rollout.async_rollouts 0, 1 and 2. Each environment call takes `--waits` seconds, like a request to
a server. All sides compute the same, so only waiting can be hidden.
"""

import argparse
import statistics
from functools import partial
from typing import Any

from harness.models import MODELS, model_directory
from harness.options import numbers
from harness.table import show
from harness.timing import available_threads, in_turn, middle, ratio, run_side


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="SmolLM2-135M or a small random Qwen3")
    parser.add_argument("--waits", default="0,0.2,0.5", help="seconds of an environment call, separated by commas")
    parser.add_argument(
        "--async-rollouts",
        type=numbers(0),
        default="0,1,2",
        help="values of rollout.async_rollouts, separated by commas",
    )
    parser.add_argument("--rule", default="finish", help="rollout.on_new_weights")
    parser.add_argument(
        "--passes", type=int, default=4, help="learner.epochs_per_step: the amount of training per step"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps per run; the first three are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="runs per side")
    parser.add_argument("--threads", type=int, default=available_threads(), help="CPU threads per side")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    return parser.parse_args()


def main() -> None:
    """Run the sides in turn and print the table."""
    chosen = options()
    model = str(model_directory(chosen.model))
    counts = chosen.async_rollouts

    def run(async_rollouts: int, wait: float, number: int) -> dict[str, Any]:
        job = {
            "model": model,
            "async_rollouts": async_rollouts,
            "wait": wait,
            "rule": chosen.rule,
            "steps": chosen.steps,
            "seed": number,
        }
        job["epochs_per_step"] = chosen.passes
        return run_side("sides.async_rollouts_worker", job, chosen.threads)

    rows = []
    for wait in map(float, chosen.waits.split(",")):
        found = in_turn({str(count): partial(run, count, wait) for count in counts}, chosen.rounds)
        seconds = {name: [middle(o["step"]) for o in outcomes] for name, outcomes in found.items()}
        for name, outcomes in found.items():
            own = [value for o in outcomes for value in o["step"]]
            rows.append(
                {
                    "environment call": f"{wait:g} s",
                    "async_rollouts": int(name),
                    "s per step": middle(seconds[name]),
                    "standard deviation": statistics.pstdev(own),
                    "speedup": ratio(seconds[str(counts[0])], seconds[name]),
                    "sampling, s": middle([middle(o["sampling"]) for o in outcomes]),
                    "learner waits, s": middle([middle(o["waited"]) for o in outcomes]),
                    "staleness, updates": middle([middle(o["staleness"]) for o in outcomes]),
                }
            )
    notes = [
        f"{chosen.model}, {chosen.threads} threads, {chosen.rounds} rounds, rollout.on_new_weights {chosen.rule}, learner.epochs_per_step {chosen.passes}",
        "standard deviation: over steps and rounds",
    ]
    show("Asynchronous rollouts", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
