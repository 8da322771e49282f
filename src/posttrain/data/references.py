"""The right answer that a row of prompts brings with it."""

from typing import Any

from posttrain.data.messages import Unusable, as_messages
from posttrain.data.rows import Prompt
from posttrain.recipe.data import ColumnsRecipe


def reference_answer(prompt: Prompt, columns: ColumnsRecipe) -> str | None:
    """The answer that the row gives as text: in `completion`, else in `label`, else the last one of the conversation
    in `messages` or `chosen`, from which the prompt was taken. None where there is none.
    """
    for name in (columns.completion, columns.label):
        value = prompt.row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if (found := _last_answer(value, name)) is not None:
            return found
    given = any(prompt.row.get(name) is not None for name in (columns.prompt, columns.context_messages))
    names = (columns.chosen,) if given else (columns.messages, columns.chosen)
    return next((found for name in names if (found := _last_answer(prompt.row.get(name), name)) is not None), None)


def _last_answer(value: Any, name: str) -> str | None:
    """The text of an answer, or of the last answer among messages; None for anything else."""
    if isinstance(value, str):
        return value if value.strip() else None
    try:
        messages = as_messages(value, name, "assistant") if isinstance(value, list) else []
    except Unusable:
        return None
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return said[-1] if said and isinstance(said[-1], str) and said[-1].strip() else None
