"""Runs that are compared with each other, made without training."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain.recipe.stages import RlRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog


def finished(success: float, n: int = 64) -> dict[str, Any]:
    """An evaluation or final line."""
    return {"success": success, "success_low": success - 0.1, "success_high": success + 0.1, "n": n}


def make_run(
    folder: Path, name: str, paid: Callable[[int], float] = float, steps: int = 4, ended: bool = True, **keys: Any
) -> Path:
    """A run of `steps` steps; step s has the return `paid(s)` and half of it as success, and keys `keys`."""
    recipe: Mapping[str, Any] = {"name": name, "runs": str(folder), "steps": 4, "environment": {"type": "bandit"}}
    run = RunDirectory.create(RlRecipe.model_validate({**recipe, **keys}))
    with MetricsLog(run, []) as log:
        for step in range(steps + 1):
            if step:
                log.write(step, "train", {"rollout/return": paid(step), "optimizer/gradient_norm": math.exp(step)})
            if step % 2 == 0:
                score = paid(step) / 20
                scores = {"score/update": score, "score/update_low": score - 0.1, "score/update_high": score + 0.1}
                log.write(step, "evaluation", finished(paid(step) / 10) | scores)
        if ended:
            log.write(steps, "final", {"policy": "trained", "best_step": steps, **finished(paid(steps) / 10, 200)})
    return run.path
