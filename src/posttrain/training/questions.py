"""The rows that a generation answers."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.credit.units.offsets import align
from posttrain.credit.units.segment import CLOSING, OPENING, thinking_tokens
from posttrain.data.convert import reference_answer
from posttrain.data.messages import Prompt
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.environments.text_task import TextTask, TextTaskRecipe, prompt_table
from posttrain.episode import CUT_OFF, Episode, Turn
from posttrain.errors import InputError
from posttrain.recipe.generate import GenerateRecipe
from posttrain.rollout.driver import EpisodeRequest
from posttrain.rollout.remote_worker import THOUGHTS, server_seed
from posttrain.runs.answers import Key, line_of

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
    """The columns of `keep_columns`."""
    origin: str

    def place(self, recipe: GenerateRecipe, sample: int) -> EpisodeRequest:
        """Where the episode of a sample stands."""
        return EpisodeRequest(self.number, self.number, sample, (recipe.seed, "generate", self.number, sample))

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


def task_of(recipe: GenerateRecipe) -> TextTaskRecipe:
    """The environment that shows the rows: one turn each, and nothing scores the answer."""
    data = recipe.data
    return TextTaskRecipe(prompts=data.test, columns=data.columns, system=recipe.system, strict=data.strict)


def read_questions(recipe: GenerateRecipe) -> tuple[list[Question], Problems]:
    """The usable rows, and what is wrong with the others; InputError where there are none, where a row lacks a column
    of `keep_columns` or `data.id`, or where two rows have one id, as 1 and "1" are.
    """
    task = task_of(recipe)
    table = prompt_table(task)
    table.problems.raise_if(recipe.data.strict)
    shown = TextTask(task)
    questions: list[Question] = []
    origins: dict[str, str] = {}
    for number, row in enumerate(table.rows[: recipe.data.max_rows]):
        name = _id(recipe, row, number)
        # A file of predictions is read with its ids as text: 1 and "1" would be one row there.
        if str(name) in origins:
            raise InputError(
                f"{row.origin}: the id {name!r} in `{recipe.data.id}` is that of {origins[str(name)]} too; name another column in "
                "data.id, or leave it out"
            )
        origins[str(name)] = row.origin
        reference = reference_answer(row, recipe.data.columns)
        messages = list(shown.reset(number).messages)
        questions.append(Question(number, name, messages, reference, _kept(recipe, row), row.origin))
    return questions, table.problems


def digest_of(questions: list[Question]) -> str:
    """16 hex digits that change with the rows, their order, or what is kept of them."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(line_of({"q": [question.id, question.messages, question.reference, question.kept]}))
    return digest.hexdigest()[:16]


def too_long(
    recipe: GenerateRecipe, questions: list[Question], renderer: Renderer, most: int
) -> tuple[dict[int, str], Problems]:
    """Number of each row whose prompt leaves less than `tokens_per_turn` of `most` tokens -> why, and their summary.

    InputError where all rows are so, or one is and the data is `strict`.
    """
    wanted, problems, found = recipe.rollout.tokens_per_turn, Problems(), {}
    for question in questions:
        tokens = len(renderer.prompt(question.messages))
        if tokens + wanted > most:
            detail = f"{tokens} tokens, and rollout.tokens_per_turn = {wanted} for the answer"
            category = f"prompt leaves no room for an answer within {most} tokens"
            found[question.number] = f"{category}: {detail}"
            problems.add(category, question.origin, detail)
    problems.raise_if(recipe.data.strict)
    if len(found) == len(questions):
        raise InputError(
            f"no prompt leaves room for rollout.tokens_per_turn = {wanted} tokens of an answer within {most}; the first, "
            f"{questions[0].origin}: {found[questions[0].number]}; lower rollout.tokens_per_turn, or raise "
            "rollout.tokens_per_episode if the model can read more"
        )
    return found, problems


def _id(recipe: GenerateRecipe, row: Prompt, number: int) -> int | str:
    if recipe.data.id is None:
        return number
    value = row.row.get(recipe.data.id)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise InputError(
            f"{row.origin}: `{recipe.data.id}` is {json.dumps(value, default=str)[:60]}, no id; an id is text or a whole "
            "number, so name another column in data.id, or leave it out"
        )
    return value


def _kept(recipe: GenerateRecipe, row: Prompt) -> dict[str, Any]:
    for name in recipe.keep_columns:
        if name not in row.row:
            columns = ", ".join(f"`{column}`" for column in list(row.row)[:8])
            raise InputError(f"{row.origin} has no column `{name}`, which `keep_columns` names; it has {columns}")
    kept = {name: row.row[name] for name in recipe.keep_columns}
    try:
        line_of(kept)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{row.origin}: a column of `keep_columns` cannot be written as JSON ({error}); leave it out of `keep_columns`"
        ) from error
    return kept
