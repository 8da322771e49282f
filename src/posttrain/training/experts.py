"""Supervised samples from an environment's own players, rendered exactly as rollouts render episodes."""

from posttrain.data.rendering import Renderer
from posttrain.environments.protocol import Environment
from posttrain.errors import InputError, RunError
from posttrain.recipe.components import environment_class
from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.conversation import Conversation
from posttrain.rollout.streams import Episode, Outcome, StopReason
from posttrain.seeds import random_stream


def expert_episodes(recipe: SftRecipe, renderer: Renderer) -> list[Episode]:
    """One episode per seed of `experts.seeds`; its answers count as sampled, with log-probability 0."""
    seeds = recipe.experts.seeds
    return [_play(recipe, renderer, seed) for seed in range(seeds.start, seeds.stop)]


def _play(recipe: SftRecipe, renderer: Renderer, seed: int) -> Episode:
    assert recipe.environment is not None
    environment: Environment = environment_class(recipe.environment.type)(recipe.environment)
    draws = random_stream(recipe.seed, "expert", seed)
    conversation = Conversation(renderer, environment.reset(seed).messages, environment.primer)
    while True:
        try:
            text = (
                environment.expert()
                if recipe.experts.expert == "optimal"
                else environment.random_answer(draws.random())
            )
        except NotImplementedError as error:
            raise InputError(f"experts.expert: {error}; choose another environment for this stage") from error
        if not text.startswith(environment.primer):
            raise RunError(
                f"the expert of {recipe.environment.type} does not start its answer with {environment.primer!r}"
            )
        ids = renderer.answer(text.removeprefix(environment.primer))
        answer = conversation.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
        step = environment.step(answer)
        conversation.reward(step.reward, dict(step.info))
        if step.terminated or step.truncated:
            outcome = Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED
            return Episode(
                seed,
                seed - recipe.experts.seeds.start,
                0,
                0,
                conversation.streams(),
                conversation.turns,
                outcome,
                None,
                conversation.messages,
            )
        conversation.observe(step.messages, fresh=step.fresh)
