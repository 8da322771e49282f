"""The rows that a generation answers."""

import hashlib
import json
from typing import Any

from posttrain.data.problems import Problems
from posttrain.data.references import reference_answer
from posttrain.data.rendering import Renderer
from posttrain.data.rows import Prompt
from posttrain.environments.text_task import TextTask, TextTaskRecipe, prompt_table
from posttrain.errors import InputError
from posttrain.recipe.generate import GenerateRecipe
from posttrain.runs.answers import line_of
from posttrain.training.predictions import Question


def task_of(recipe: GenerateRecipe) -> TextTaskRecipe:
    """The environment that shows the rows: one turn each, and nothing scores the answer."""
    data = recipe.data
    return TextTaskRecipe(prompts=data.test, columns=data.columns, system=recipe.system, strict=data.strict)


def read_questions(recipe: GenerateRecipe) -> tuple[list[Question], Problems]:
    """The usable rows, and what is wrong with the others; InputError where there are none, where a row lacks a column
    of `keep` or `data.id`, or where two rows have one id, as 1 and "1" are.
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
    for name in recipe.keep:
        if name not in row.row:
            columns = ", ".join(f"`{column}`" for column in list(row.row)[:8])
            raise InputError(f"{row.origin} has no column `{name}`, which `keep` names; it has {columns}")
    kept = {name: row.row[name] for name in recipe.keep}
    try:
        line_of(kept)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{row.origin}: a column of `keep` cannot be written as JSON ({error}); leave it out of `keep`"
        ) from error
    return kept
