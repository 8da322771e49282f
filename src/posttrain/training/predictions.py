"""Answers as rows of a predictions file: what was asked, what came, how it ended, with or without its thinking."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.credit.units.offsets import align
from posttrain.credit.units.thinking import CLOSING, OPENING, thinking_tokens
from posttrain.data.rendering import Renderer
from posttrain.recipe.generate import GenerateRecipe
from posttrain.rollout.driver import Place
from posttrain.rollout.remote_player import THOUGHTS, server_seed
from posttrain.rollout.streams import CUT_OFF, Episode, Turn
from posttrain.runs.answers import Key

_TAIL = 16
"""Tokens at the end of a prompt among which an opened thinking block stands."""


@dataclass(frozen=True)
class Question:
    """A row to answer."""

    number: int
    """Among the usable rows, from 0."""
    id: int | str
    messages: list[dict[str, Any]]
    """What the model is shown."""
    reference: str | None
    kept: dict[str, Any]
    """The columns of `keep`."""
    origin: str

    def place(self, recipe: GenerateRecipe, sample: int) -> Place:
        """Where the episode of a sample stands."""
        return Place(self.number, self.number, sample, (recipe.seed, "generate", self.number, sample))

    def asked(self, recipe: GenerateRecipe, sample: int) -> dict[str, Any]:
        """What is known of an answer before it is there. `seed` is null where the engine gets none."""
        place = self.place(recipe, sample)
        seed: int | None = place.request_seed(0, 0)
        if recipe.remote is not None:
            sent = recipe.remote.send_seed and recipe.sampling.temperature > 0
            seed = server_seed(place, 0, 0) if sent else None
        return {"id": self.id, "prompt": self.messages, "sample": sample, "seed": seed}


def key_of(question: Question, sample: int) -> Key:
    """What an answer is found by."""
    return question.id, sample


def prediction(
    recipe: GenerateRecipe, question: Question, sample: int, episode: Episode, renderer: Renderer | None
) -> dict[str, Any]:
    """The row of an episode of one turn. `renderer` is that of the local engine.

    `tokens` counts everything sampled, thinking and end token included; null where a server does not say. With
    `thinking: remove`, `thinking_tokens` and `thinking_characters` count what was removed; the tokens are null for a
    server, which tells no token ids.
    """
    asked, turn = question.asked(recipe, sample), episode.turns[0]
    text, removed = turn.answer, {}
    if recipe.thinking == "remove":
        found = _without_thoughts(turn) if renderer is None else _without_thinking_tokens(turn, episode, renderer)
        text, tokens, characters = found
        removed = {"thinking_tokens": tokens, "thinking_characters": characters}
    elif renderer is None:
        text = _with_thoughts(turn)
    counted = turn.stop - turn.start
    return {
        "id": asked["id"],
        "prompt": asked["prompt"],
        "prediction": text,
        "reference": question.reference,
        "sample": sample,
        "seed": asked["seed"],
        "stop_reason": str(turn.stop_reason),
        "tokens": counted if counted or renderer is not None else None,
        **removed,
        **question.kept,
    }


def _without_thinking_tokens(turn: Turn, episode: Episode, renderer: Renderer) -> tuple[str, int, int]:
    """The text after the tokens of the thinking, and how many tokens and characters those are."""
    ids: Sequence[int] = episode.streams[turn.stream].ids.tolist()
    before, sampled = ids[max(0, turn.start - _TAIL) : turn.start], list(ids[turn.start : turn.stop])
    decode = partial(renderer.tokenizer.decode, clean_up_tokenization_spaces=False)
    if sampled and sampled[-1] in renderer.end_tokens:
        sampled.pop()
    answer = align(sampled, decode)
    thought = thinking_tokens(answer, opened=decode(before).rstrip().endswith(OPENING))
    return answer.slice(thought, len(sampled)), thought, int(answer.offsets[thought])


def _without_thoughts(turn: Turn) -> tuple[str, None, int]:
    """The text after a thinking block, and how many characters of thinking there were, those that the server set
    apart included. A server may have opened the block in the prompt, so its end alone counts too.
    """
    apart, text = str(turn.info.get(THOUGHTS, "")), turn.answer
    before, closing, after = text.partition(CLOSING)
    kept = "" if before.lstrip().startswith(OPENING) else before
    if closing:
        kept = after.lstrip()
    return kept, None, len(apart) + len(text) - len(kept)


def _with_thoughts(turn: Turn) -> str:
    """The text with what the server set apart in front of it as a thinking block, open where a limit cut it off."""
    apart, text = str(turn.info.get(THOUGHTS, "")), turn.answer
    if not apart or text.lstrip().startswith(OPENING):
        return text
    closed = text or turn.stop_reason not in CUT_OFF
    return f"{OPENING}{apart}{CLOSING}{text}" if closed else f"{OPENING}{apart}"
