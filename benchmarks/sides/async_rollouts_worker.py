"""A whole run of posttrain with an environment whose every call takes a while."""

import io
import json
import sys
from pathlib import Path
from typing import Any

SKIPPED = 3
"""Steps at the beginning that are not counted: the buffer fills in them."""
SLOW = '''
import time

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class Slow(Environment):
    """Each call takes `wait` seconds; each turn pays for different letters."""

    class Recipe(EnvironmentRecipe):
        wait: float = 0.0
        """Seconds."""

    def reset(self, seed):
        self.turn = 0
        return Observation([{"role": "user", "content": f"Task {seed}: say many letters."}])

    def step(self, action):
        time.sleep(self.recipe.wait)
        self.turn += 1
        paid = 0.1 * len({c for c in action if c.isalpha()})
        return Step([{"role": "user", "content": "More."}], paid, self.turn == self.recipe.max_turns, False, {})
'''


def main() -> None:
    """Run the job and write what its steps took."""
    from pydantic import TypeAdapter
    from rich.console import Console

    from posttrain.recipe.stages import Recipe
    from posttrain.runs.metrics import read_metrics
    from posttrain.stages import run_stage

    job = json.loads(Path(sys.argv[1]).read_text())
    place = Path(job["place"])
    (place / "slow.py").write_text(SLOW)
    values: dict[str, Any] = {
        "stage": "rl",
        "runs": str(place),
        "seed": max(0, job["seed"]),
        "model": {"path": job["model"]},
        "environment": {"type": str(place / "slow.py"), "max_turns": 3, "wait": job["wait"]},
        "steps": job["steps"],
        "rollout": {
            "groups_per_step": 2,
            "episodes_per_group": 4,
            "tokens_per_turn": 16,
            "tokens_per_episode": 512,
            "environment_timeout": 60.0,
            "async_rollouts": job["async_rollouts"],
            **({"on_new_weights": job["rule"]} if job["async_rollouts"] else {}),
        },
        "optimizer": {"learning_rate": 1e-5},
        "learner": {"epochs_per_step": job["epochs_per_step"]},
        "evaluation": {
            "every": 0,
            "seeds": {"start": 1_000_000, "count": 1},
            "final_seeds": {"start": 2_000_000, "count": 1},
        },
        "checkpoint": {"every": 1000, "keep": 1},
    }
    run = run_stage(TypeAdapter(Recipe).validate_python(values), console=Console(file=io.StringIO()))
    lines = [line for line in read_metrics(run.metrics) if line["kind"] == "train"][SKIPPED:]

    def column(*names: str) -> list[float]:
        return [next((line[name] for name in names if name in line), 0.0) for line in lines]

    result = {
        "step": column("time/step"),
        "sampling": column("time/sampling", "time/rollout"),
        "waited": column("time/waited_for_rollout", "time/rollout"),
        "staleness": column("policy/staleness_mean"),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
