"""Evaluation of a policy in an environment on held-out seeds."""

from typing import Any

from posttrain.evaluation.summary import Evaluation, summarise
from posttrain.recipe.rollout import EvaluationRecipe
from posttrain.rollout.driver import EpisodePlayer, Place, play_all
from posttrain.rollout.streams import Episode


def evaluate(
    player: EpisodePlayer[Any], recipe: EvaluationRecipe, run_seed: int, left_out: frozenset[int] = frozenset()
) -> tuple[Evaluation, list[Episode]]:
    """Play every held-out seed that is not `left_out`; returns the summary and the episodes.

    The random numbers depend on the run seed and the held-out seed alone, so two evaluations of one run differ by
    the policy and by nothing else. `player.sampling` should be `recipe.sampling`.
    """
    places = [
        Place(seed, group, index, (run_seed, "evaluation", group, index))
        for group, seed in enumerate(range(recipe.seeds.start, recipe.seeds.stop))
        if seed not in left_out
        for index in range(recipe.episodes_per_seed)
    ]
    episodes = play_all(player, places)
    return summarise(episodes), episodes
