"""What a training step saves by computing the prefixes that its episodes share once, against every episode alone.

    python benchmarks/prefixes.py runs/memory/rl --steps 1,25,50

The episodes are those that a run has stored. Each side computes log-probabilities and their gradients for all sampled tokens
of a step with the same model.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.options import numbers
from harness.table import show
from harness.timing import in_turn, middle

import posttrain
from posttrain.models.packing import row_length
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.training.updater import Sample, pack, samples_of_episodes


def main() -> None:
    """Measure the sides in turn for each step and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run of reinforcement learning with stored episodes")
    parser.add_argument(
        "--steps", type=numbers(1), default="1", help="steps whose episodes are taken, separated by commas"
    )
    parser.add_argument("--model", default="packaged:smollm2-135m", help="of the family that sampled the episodes")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    chosen = parser.parse_args()
    policy = Policy(ModelRecipe(path=chosen.model, dtype=chosen.dtype, threads=chosen.threads))
    result = posttrain.Result.open(chosen.run)
    rows = []
    for step in chosen.steps:
        samples = samples_of_episodes(result.episodes(step), step)
        packed = pack(samples, chosen.tokens_per_batch)
        sides = {
            "nothing": _side(policy, samples, [[index] for index in range(len(samples))]),
            "prefixes": _side(policy, samples, packed),
        }
        found = in_turn(sides, chosen.rounds, warmup=1)
        seconds = {name: middle([second for second, _ in outcomes]) for name, outcomes in found.items()}
        for name, outcomes in found.items():
            rows.append(
                {
                    "step": str(step),
                    "shared": name,
                    "episodes": len(samples),
                    "tokens of a row": outcomes[0][1],
                    "seconds": seconds[name],
                    "times as fast": seconds["nothing"] / seconds[name],
                }
            )
    show("Shared prefixes in training", rows, [f"{chosen.model}, {chosen.rounds} rounds"], chosen.json)


def _side(
    policy: Policy, samples: Sequence[Sample], groups: Sequence[Sequence[int]]
) -> Callable[[int], tuple[float, int]]:
    """A function that returns the seconds of one gradient, with a forward pass for each group, and the tokens computed."""

    def run(number: int) -> tuple[float, int]:
        begun = time.perf_counter()
        tokens = 0
        for group in groups:
            streams = [samples[i].stream.ids for i in group]
            scores = policy.score(streams, [samples[i].stream.sampled for i in group], 1.0, 512)
            scores.logprobs.sum().backward()
            tokens += row_length(streams)
        policy.model.zero_grad()
        return time.perf_counter() - begun, tokens

    return run


if __name__ == "__main__":
    main()
