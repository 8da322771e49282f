"""What a training step saves by computing once what its episodes share: prompts, or whole prefixes, against nothing shared.

    posttrain benchmark prefixes runs/memory/rl --steps 1,25,50

The episodes are those that a run has stored. Each side computes log-probabilities and their gradients for all sampled tokens
of a step, with the same model and the same limit of tokens per forward pass; they differ in how much of a row is stored once.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness.table import show
from harness.timing import in_turn, middle

import posttrain
from posttrain.models import packing
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.training import updater
from posttrain.training.updater import pack, samples_of_episodes

TREE_ORDER = packing.tree_order


def nothing(streams: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Every stream alone."""
    return [(index, 0) for index in range(len(streams))]


def main() -> None:
    """Measure the sides in turn for each step and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run of reinforcement learning with stored episodes")
    parser.add_argument("--steps", default="1", help="steps whose episodes are taken, separated by commas")
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
    for step in map(int, chosen.steps.split(",")):
        samples = samples_of_episodes(result.episodes(step), step)
        prompts = _prompts_only(samples)
        sides = {
            "nothing": _side(policy, samples, nothing, chosen.tokens_per_batch),
            "prompts": _side(policy, samples, prompts, chosen.tokens_per_batch),
            "prefixes": _side(policy, samples, TREE_ORDER, chosen.tokens_per_batch),
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


def _prompts_only(samples: Sequence[updater.Sample]) -> Callable[[Sequence[np.ndarray]], list[tuple[int, int]]]:
    """An order in which only prompts are shared, by the streams' own masks."""
    lengths = {s.stream.ids.tobytes(): packing.prompt_length(s.stream.sampled) for s in samples}

    def order(streams: Sequence[np.ndarray]) -> list[tuple[int, int]]:
        prompts = [streams[i][: lengths[streams[i].tobytes()]].tobytes() for i in range(len(streams))]
        by_prompt = sorted(range(len(streams)), key=lambda index: prompts[index])
        return [
            (index, lengths[streams[index].tobytes()] if at and prompts[by_prompt[at - 1]] == prompts[index] else 0)
            for at, index in enumerate(by_prompt)
        ]

    return order


def _side(
    policy: Policy, samples: Sequence[updater.Sample], order: Any, budget: int
) -> Callable[[int], tuple[float, int]]:
    """A function that returns the seconds of one gradient, and the tokens that were computed."""

    def run(number: int) -> tuple[float, int]:
        with _shared(order):
            begun = time.perf_counter()
            tokens = 0
            for group in pack(samples, budget):
                streams = [samples[i].stream.ids for i in group]
                scores = policy.score(streams, [samples[i].stream.sampled for i in group], 1.0, 512)
                scores.logprobs.sum().backward()
                tokens += packing.row_length(streams)
            policy.model.zero_grad()
            return time.perf_counter() - begun, tokens

    return run


@contextmanager
def _shared(order: Any) -> Any:
    packing.tree_order = updater.tree_order = order
    distinct = packing.PackedRow.distinct
    if order is not TREE_ORDER:
        packing.PackedRow.distinct = lambda row: (np.arange(len(row.targets)), np.arange(len(row.targets)))
    try:
        yield
    finally:
        packing.tree_order = updater.tree_order = TREE_ORDER
        packing.PackedRow.distinct = distinct


if __name__ == "__main__":
    main()
