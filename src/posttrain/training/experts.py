"""Demonstrations by the expert or the random policy of an environment, as episodes for training and as rows for files.

Rows of a file contain the settings of their environment, so that training can warn if its environment differs.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.data.files import read_rows
from posttrain.data.rendering import Renderer
from posttrain.data.tools import parse_hermes
from posttrain.engines.openai import for_servers
from posttrain.environments.protocol import Environment, allowed, require_observation, require_step
from posttrain.episode import Episode, Outcome, StopReason
from posttrain.errors import InputError, RunError
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.data import SourceRecipe
from posttrain.recipe.rollout import SeedRange, shown_seeds
from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.transcript import TokenTranscript
from posttrain.seeds import random_stream

Expert = Literal["optimal", "random"]
History = Literal["episode", "turn"]
"""One row per conversation of an episode, or one row per turn."""

SETTINGS_COLUMN = "environment"
"""The column with the settings of the environment as JSON text, which every file format can store."""
_MAX_NAMED = 3
"""Maximum number of settings that a warning names."""


def expert_episodes(recipe: SftRecipe, seeds: Sequence[int], renderer: Renderer) -> list[Episode]:
    """Return `experts.per_seed` episodes of `recipe.environment` per seed. Answers count as sampled, with
    log-probability 0. InputError if the environment has no policy `experts.expert`. RunError if an answer
    does not start with the primer of the environment."""
    return [
        _expert_episode(recipe, renderer, seed, group, index)
        for group, seed in enumerate(seeds)
        for index in range(recipe.experts.per_seed)
    ]


def _expert_episode(recipe: SftRecipe, renderer: Renderer, seed: int, group: int, index: int) -> Episode:
    assert recipe.environment is not None
    environment: Environment = environment_class(recipe.environment.type)(recipe.environment)
    draws = random_stream(recipe.seed, "expert", seed)

    def draw() -> float:
        """Systematic sampling: uniform for each trace, and evenly spread over the traces of a seed."""
        return (draws.random() + index / recipe.experts.per_seed) % 1.0

    first = allowed(require_observation, environment.reset(seed), recipe.environment, seed)
    transcript = TokenTranscript(renderer, first.messages, environment.primer, first.state, first.tools)
    while True:
        try:
            share = recipe.experts.random_share
            replaced = share > 0 and draw() < share
            text = _answer(environment, "random" if replaced else recipe.experts.expert, draw)
        except NotImplementedError as error:
            by_chance = replaced or recipe.experts.expert == "random"
            key, method = ("random_share" if replaced else "expert"), ("random_answer" if by_chance else "expert")
            raise InputError(
                f"experts.{key}: {error}; add the method `{method}` to the environment, or change the key"
            ) from error
        if not text.startswith(environment.primer):
            raise RunError(
                f"the expert of {recipe.environment.type} does not start its answer with {environment.primer!r}"
            )
        ids = transcript.written(text)
        transcript.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
        step = allowed(require_step, environment.take(transcript.action), recipe.environment, seed)
        transcript.reward(step.reward, dict(step.info))
        if step.terminated or step.truncated:
            outcome = Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED
            streams, turns = transcript.streams(), transcript.turns
            return Episode(seed, group, index, 0, streams, turns, outcome, None, transcript.messages)
        transcript.observe(step.messages, new_conversation=step.new_conversation)


def expert_rows(
    recipe: EnvironmentRecipe, seeds: range, expert: Expert, history: History, run_seed: int
) -> list[dict[str, Any]]:
    """Return the episodes of `seeds` as rows, with the environment, its seed and its settings.

    With `history="episode"` there is one row per conversation (`messages`), with `"turn"` one per turn (`prompt`,
    `completion`). InputError if the environment does not have this policy, or the seeds overlap with those of RL's
    evaluation."""
    for key in ("evaluation.seeds", "evaluation.final_seeds") if recipe.rows_key is None else ():
        other = SeedRange().of_generated(key)
        if seeds.start < other.stop and other.start < seeds.stop:
            raise InputError(
                f"--start: seeds {shown_seeds(seeds)} overlap {key} ({shown_seeds(other)}); choose another start"
            )
    rows = []
    settings = settings_text(recipe)
    for seed in seeds:
        columns = {"domain": recipe.type, "seed": seed, SETTINGS_COLUMN: settings}
        tools, conversations = _conversations(recipe, seed, expert, run_seed)
        if tools:
            columns["tools"] = json.dumps(tools)
        for messages in conversations:
            if history == "episode":
                rows.append({"messages": messages, **columns})
                continue
            for index, message in enumerate(messages):
                if message["role"] == "assistant":
                    rows.append({"prompt": messages[:index], "completion": [message], **columns})
    return rows


def _conversations(
    recipe: EnvironmentRecipe, seed: int, expert: Expert, run_seed: int
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Return the tools and the conversations of an episode: one, unless the environment starts new ones."""
    environment: Environment = environment_class(recipe.type)(recipe)
    draws = random_stream(run_seed, "expert", seed)
    try:
        first = environment.reset(seed)
    except InputError as error:
        raise InputError(f"--start and --count: {error}") from error
    conversations: list[list[dict[str, Any]]] = [list(map(for_servers, first.messages))]
    turn = 0
    while True:
        try:
            text = _answer(environment, expert, draws.random)
        except NotImplementedError as error:
            raise InputError(f"{error}; choose another environment or --expert") from error
        # The primer is context and not part of the answer that is trained on.
        primer = {"primer": environment.primer} if environment.primer else {}
        answer: dict[str, Any] = {"content": text}
        if first.tools:
            answer = parse_hermes(text).message(turn)
        conversations[-1].append({"role": "assistant", **answer, **primer})
        turn += 1
        step = environment.step(text)
        if step.terminated or step.truncated:
            return first.tools, conversations
        if step.new_conversation:
            conversations.append([])
        conversations[-1] += map(for_servers, step.messages)


def _answer(environment: Environment, expert: Expert, draw: Callable[[], float]) -> str:
    """Return the next answer. NotImplementedError if the environment has no such policy."""
    return environment.expert() if expert == "optimal" else environment.random_answer(draw())


def settings_text(recipe: EnvironmentRecipe) -> str:
    """Return the keys of the environment with all defaults, for the column `SETTINGS_COLUMN`."""
    return json.dumps(recipe.model_dump(mode="json"), sort_keys=True)


def settings_warnings(recipe: EnvironmentRecipe, sources: Sequence[SourceRecipe]) -> list[str]:
    """Return a warning per local source whose first row comes from this environment with other settings.

    Rows without the column, rows of another environment and hub data sets are not checked.
    """
    current, warnings = _dotted(recipe.model_dump(mode="json")), []
    for source in sources:
        if not Path(source.path).expanduser().exists():
            continue
        first = next((row for _, row in read_rows(source) if isinstance(row, dict)), {})
        try:
            settings = json.loads(first.get(SETTINGS_COLUMN) or "")
        except (TypeError, ValueError, RecursionError):
            continue
        stored = _dotted(settings) if isinstance(settings, dict) else {}
        if stored.get("type") != recipe.type:
            continue
        different = [key for key in current if key in stored and stored[key] != current[key]]
        names = [f"environment.{key} {json.dumps(stored[key])} (here {json.dumps(current[key])})" for key in different]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        if names:
            warnings.append(
                f"the rows of {source.path} were generated with {', '.join(names[:_MAX_NAMED])}{more}, so training and "
                "evaluation differ; generate the rows again, or set these keys"
            )
    return warnings


def _dotted(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested sections by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
