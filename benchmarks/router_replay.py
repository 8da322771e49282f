"""Router replay: how far the learner's log-probabilities are from the engine's, and what is learned, with and without.

    python benchmarks/router_replay.py

A random Qwen3-MoE of 4 layers, each with 16 experts of which a token uses 4, learns in bfloat16 to say many letters. Both sides
have the same seeds. With `rollout.async_rollouts` 1, weights are those of the step before.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.table import show

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.families import save_family

import posttrain
from posttrain.runs.metrics import read_metrics

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MEASURED = ("policy/mismatch", "router/changed", "optimizer/gradient_norm", "rollout/return")


def run(model: Path, runs: Path, seed: int, steps: int, ahead: int, replay: bool) -> dict[str, float]:
    """Means over the steps of a run; of the return over the last fifth of them."""
    recipe: dict[str, Any] = {
        "name": f"{seed}-{ahead}-{replay}",
        "runs": str(runs),
        "seed": seed,
        "steps": steps,
        "model": {"path": str(model), "dtype": "bfloat16", "threads": 1, "router_replay": replay},
        "environment": {"type": str(Path(__file__).parents[1] / "tests/training/letters.py"), "max_turns": 2},
        "rollout": {"groups_per_step": 2, "episodes_per_group": 8, "tokens_per_turn": 12, "tokens_per_episode": 400},
        "optimizer": {"learning_rate": 1e-3},
        "learner": {"updates_per_step": 2},
        "evaluation": {"every": 0, "final_seeds": {"start": 200_000, "count": 1}},
    }
    recipe["rollout"]["async_rollouts"] = ahead
    result = posttrain.rl(recipe)
    lines = [line for line in read_metrics(result.run / "metrics.jsonl") if line["kind"] == "train"]
    last = lines[-max(1, steps // 5) :]
    return {
        name: statistics.mean(line[name] for line in (last if name == "rollout/return" else lines)) for name in MEASURED
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_family(Path(folder) / "model", "qwen3_moe", **SHAPE)
        for ahead in (0, 1):
            for replay in (False, True):
                runs = [run(model, Path(folder), seed, options.steps, ahead, replay) for seed in range(options.seeds)]
                row: dict[str, Any] = {"rollout.async_rollouts": ahead, "router_replay": str(replay).lower()}
                for name in MEASURED:
                    values = [one[name] for one in runs]
                    row |= {name: statistics.mean(values), f"sd of {name}": statistics.pstdev(values)}
                rows.append(row)
    show(f"Router replay, {options.seeds} seeds", rows, json_file=options.json)


if __name__ == "__main__":
    main()
