"""Supervised samples from an environment's own players, rendered exactly as rollouts render episodes."""

from typing import Any, Literal

from posttrain.data.rendering import Renderer
from posttrain.data.settings import COLUMN, settings_text
from posttrain.environments.protocol import Environment
from posttrain.episode import Episode, Outcome, StopReason
from posttrain.errors import InputError, RunError
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import EvaluationRecipe, SeedRange
from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.transcript import TokenTranscript
from posttrain.seeds import random_stream


def expert_episodes(recipe: SftRecipe, renderer: Renderer) -> list[Episode]:
    """One episode per seed of `experts.seeds`; its answers count as sampled, with log-probability 0."""
    seeds = recipe.experts.seeds
    return [_play(recipe, renderer, seed) for seed in range(seeds.start, seeds.stop)]


def _play(recipe: SftRecipe, renderer: Renderer, seed: int) -> Episode:
    assert recipe.environment is not None
    environment: Environment = environment_class(recipe.environment.type)(recipe.environment)
    draws = random_stream(recipe.seed, "expert", seed)
    conversation = TokenTranscript(renderer, environment.reset(seed).messages, environment.primer)
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


History = Literal["episode", "turn"]


def expert_rows(
    recipe: EnvironmentRecipe, seeds: SeedRange, expert: Literal["optimal", "random"], history: History, run_seed: int
) -> list[dict[str, Any]]:
    """One row per conversation of an episode (`messages`), or one per turn (`prompt`, `completion`), with the environment, its seed and its settings.

    `InputError` where the environment has no such player, or where the seeds are those that RL evaluates on.
    """
    held_out = EvaluationRecipe()
    for name, other in (("seeds", held_out.seeds), ("final_seeds", held_out.final_seeds)):
        if seeds.overlaps(other):
            raise InputError(f"--start: seeds {seeds} overlap evaluation.{name} ({other}); choose another start")
    rows = []
    settings = settings_text(recipe)
    for seed in range(seeds.start, seeds.stop):
        about = {"domain": recipe.type, "seed": seed, COLUMN: settings}
        for messages in _played(recipe, seed, expert, run_seed):
            if history == "episode":
                rows.append({"messages": messages, **about})
                continue
            for place, message in enumerate(messages):
                if message["role"] == "assistant":
                    rows.append({"prompt": messages[:place], "completion": [message], **about})
    return rows


def _played(recipe: EnvironmentRecipe, seed: int, expert: str, run_seed: int) -> list[list[dict[str, Any]]]:
    """The conversations of an episode; one, unless the environment begins another."""
    environment: Environment = environment_class(recipe.type)(recipe)
    draws = random_stream(run_seed, "expert", seed)
    try:
        conversations: list[list[dict[str, Any]]] = [list(environment.reset(seed).messages)]
    except InputError as error:
        raise InputError(f"--start and --count: {error}") from error
    while True:
        try:
            text = environment.expert() if expert == "optimal" else environment.random_answer(draws.random())
        except NotImplementedError as error:
            raise InputError(f"{error}; choose another environment or --expert") from error
        # What is put in the policy's mouth is part of the context, not of what it learns to say.
        primer = {"primer": environment.primer} if environment.primer else {}
        conversations[-1].append({"role": "assistant", "content": text, **primer})
        step = environment.step(text)
        if step.terminated or step.truncated:
            return conversations
        if step.fresh:
            conversations.append([])
        conversations[-1] += step.messages
