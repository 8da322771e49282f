"""The learning rate's schedule: a pure function of the update's number."""

import math

from posttrain.recipe.optimizer import OptimizerRecipe


def learning_rate_factor(recipe: OptimizerRecipe, update: int, total: int) -> float:
    """What the learning rate is multiplied by at `update` (0 is the first) of `total`.

    Warm-up over W updates: (update + 1) / (W + 1), so the first is small and not lost. Then, with
    x = (update - W) / (total - W) from 0 to 1 and final fraction f:
    `constant`: 1; `linear`: 1 - (1 - f) x; `cosine`: f + (1 - f) (1 + cos(pi x)) / 2.
    Source of cosine: Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, without restarts.
    """
    if update < recipe.warmup_updates:
        return (update + 1) / (recipe.warmup_updates + 1)
    if recipe.schedule == "constant":
        return 1.0
    progress = min((update - recipe.warmup_updates) / max(total - recipe.warmup_updates, 1), 1.0)
    remaining = 1 - progress if recipe.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return recipe.final_fraction + (1 - recipe.final_fraction) * remaining
