"""What fits together where sampling runs ahead of learning."""

from posttrain.recipe.optimizer import LearnerRecipe
from posttrain.recipe.rollout import RolloutRecipe


def updates_behind(rollout: RolloutRecipe, learner: LearnerRecipe) -> int:
    """The most optimizer updates between the weights that a step's episodes begin with and those that learn from them."""
    return rollout.ahead * learner.updates_per_step * learner.passes


def refuse_ahead(
    rollout: RolloutRecipe, learner: LearnerRecipe, processes: int, scored: bool, ray: bool, engine: str
) -> None:
    """Refuse rules on stale episodes that contradict each other or that no episode could pass, and what cannot be kept
    with `engine`."""
    if rollout.replay is not None and (ray or engine != "local"):
        raise ValueError(
            "`rollout.replay` follows the forward passes of an engine in this process, and those of engines outside are not "
            "counted; replay with `engine.type: local` and without `hardware.ray`"
        )
    if (rollout.stale == "drop") != (rollout.stale_after is not None):
        raise ValueError(
            "`rollout.stale: drop` and `rollout.stale_after` belong together: the latter says how old an episode may be; "
            "give both or neither"
        )
    if rollout.ahead and processes > 1 and scored:
        raise ValueError(
            "with `rollout.ahead` above 0 the first process samples and scores by itself, and with `hardware.processes` above "
            "1 the reward model of `reward.path` is divided among all; set one of the three otherwise"
        )
    if rollout.ahead and rollout.on_new_weights == "continue" and ray:
        raise ValueError(
            "engines of a Ray cluster take new weights between rollouts alone, so `rollout.on_new_weights: continue` cannot be "
            "kept; use finish or restart"
        )
    behind = updates_behind(rollout, learner)
    if rollout.stale_after is not None and rollout.on_new_weights == "finish" and rollout.stale_after < behind:
        raise ValueError(
            f"with `rollout.on_new_weights: finish` every episode is {behind} updates old when it is learned from "
            f"(`rollout.ahead` {rollout.ahead} x updates per step), so `rollout.stale_after` = {rollout.stale_after} would "
            "drop them all; raise it, or use continue or restart"
        )
