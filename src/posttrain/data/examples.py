"""Converting rows to typed examples.

For any row, the functions in this file return an example of `posttrain.data.messages`, or raise UnusableRow. Every example
satisfies:

- Roles are system, user, assistant and tool.
- An assistant message follows a message of another role, or opens the conversation before a user message; a tool message
  follows an assistant or a tool message.
- Contents are Unicode text. No answer is blank unless it calls tools, and the prompt is not blank.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.data.files import read_rows
from posttrain.data.messages import (
    ConversationExample,
    Message,
    PairExample,
    PromptExample,
    TextExample,
    UnpairedExample,
    UnusableRow,
    as_messages,
    check_conversation,
    check_text,
    check_value,
    kind_of,
    messages_of,
    objects,
    read_json,
    short,
    without_training_keys,
)
from posttrain.data.problems import Problems
from posttrain.errors import InputError, require_type
from posttrain.images import rows_from
from posttrain.recipe.compose import section
from posttrain.recipe.data import ColumnsRecipe, SourceRecipe

Kind = Literal["conversation", "pair", "unpaired", "prompt"]
Example = ConversationExample | TextExample | PairExample | UnpairedExample | PromptExample

_LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels as text, as in CSV."""


def load_dataset(
    source: str | Path | Sequence[str | Path],
    kind: Kind = "conversation",
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    max_rows: int | None = None,
    strict: bool = False,
) -> list[Any]:
    """Read and check the rows of a data set.

        pairs = posttrain.load_dataset("pairs.jsonl", "pair", columns={"prompt": "question"})

    Args:
        source: a `.parquet`, `.jsonl`, `.json` or `.csv` file, a directory of those, a hub id, or a list of them.
        kind: what a row is: `conversation` (sft), `pair` (dpo, reward), `unpaired` (kto; a pair becomes one good and
            one bad answer) or `prompt` (rl, generate).
        split, subset: of hub data sets.
        columns: names of the columns that differ from the defaults, by the keys of `columns` in a recipe.
        max_rows: maximum number of usable rows from each source.
        strict: raise for rows that cannot be used. Otherwise they are left out with a warning that names them.

    Returns:
        `ConversationExample`, `PairExample`, `UnpairedExample` or `PromptExample` objects of `posttrain.data.messages`.

    Raises:
        InputError: there is no such file or data set, no row is usable, or any row is unusable and `strict` is set.
    """
    require_type("source", source, str, Path, Sequence)
    require_type("kind", kind, str)
    require_type("max_rows", max_rows, int, type(None))
    require_type("strict", strict, bool)
    if kind not in ROW_FUNCTIONS:
        raise InputError(f"there is no `kind` {kind!r}; use one of {', '.join(ROW_FUNCTIONS)}")
    if max_rows is not None and max_rows < 1:
        raise InputError(f"the argument `max_rows` is {max_rows}; pass 1 or more, or None")
    listed = [source] if isinstance(source, str | Path) else source
    for path in listed:
        require_type("source", path, str, Path)
    sources = [section(SourceRecipe, path=path, split=split, subset=subset) for path in listed]
    problems = Problems()
    rows = list(read_examples(kind, sources, section(ColumnsRecipe, columns), problems, max_rows))
    problems.raise_if(strict)
    if not rows:
        problems.require_any(", ".join(str(path) for path in listed))
    for message in problems.summary():
        warnings.warn(message, stacklevel=2)
    return rows


def read_examples(
    kind: Kind, sources: list[SourceRecipe], columns: ColumnsRecipe, problems: Problems, max_rows: int | None = None
) -> Iterator[Any]:
    """Yield the usable rows of the sources, one source after the other, reading lazily.

    Unusable rows are counted in `problems`. `max_rows` limits the usable rows of each source. A pair read as `unpaired`
    is one row and two examples. InputError, at the call, for a source that does not exist.
    """
    opened = [(read_rows(source), source.folder) for source in sources]

    def examples() -> Iterator[Example]:
        for rows, folder in opened:
            taken = 0
            for origin, row in rows:
                row = _usual_columns(row, columns, origin, problems)
                try:
                    if isinstance(row, str):  # the problem of a row that could not be read
                        raise UnusableRow(row)
                    with rows_from(folder):
                        example = ROW_FUNCTIONS[kind](row, origin, columns)
                except UnusableRow as problem:
                    problems.add_text(str(problem), origin)
                    continue
                problems.used += 1
                taken += 1
                if kind == "unpaired" and isinstance(example, PairExample):
                    shared = (example.origin, example.domain, example.tools, example.weight)
                    yield UnpairedExample(example.prompt, example.chosen, True, *shared)
                    yield UnpairedExample(example.prompt, example.rejected, False, *shared)
                else:
                    yield example
                if taken == max_rows:
                    break

    return examples()


def conversation(row: Any, origin: str, columns: ColumnsRecipe) -> ConversationExample | TextExample:
    """Read `messages` (also ShareGPT's `from` and `value`), a prompt and a completion, or plain `text`."""
    chat = (columns.messages, columns.prompt, columns.context_messages, columns.completion)
    if _cells(row).get(columns.text) is not None and all(row.get(name) is None for name in chat):
        if not isinstance(row[columns.text], str) or not row[columns.text].strip():
            raise UnusableRow("empty or wrong type", f"`{columns.text}` is {short(row[columns.text])}, not a text")
        check_text(row[columns.text], f"`{columns.text}`")
        return TextExample(row[columns.text], origin, _domain(row, columns), _weight(row, columns))
    if row.get(columns.messages) is not None:
        messages = messages_of(row[columns.messages], columns.messages)
    else:
        prompt = _prompt(row, columns)
        if prompt is None and columns.completion in row:
            raise _missing(row, columns.prompt, columns.context_messages)
        if prompt is None:
            name = messages_column(row)
            hint = f"; to read `{name[:40]}`, set `columns.messages={name[:40]}`" if name else ""
            raise _missing(row, columns.messages, columns.prompt, hint=hint)
        messages = [*prompt, *_answer(row, columns.completion, prompt)]
    check_conversation(messages)
    return ConversationExample(messages, origin, **_common(row, columns))


def pair(row: Any, origin: str, columns: ColumnsRecipe) -> PairExample:
    """Read chosen and rejected answers to a prompt, or two conversations with common first messages."""
    prompt = _prompt(_cells(row), columns)
    if prompt is None:
        if any(isinstance(row.get(name), str) for name in (columns.chosen, columns.rejected)):
            raise UnusableRow(
                "answers as text without a prompt",
                f"needs the column `{columns.prompt}`, or whole conversations in `{columns.chosen}` and "
                f"`{columns.rejected}`",
            )
        prompt = []
    chosen = _answer(row, columns.chosen, prompt)
    rejected = _answer(row, columns.rejected, prompt)
    for side in (chosen, rejected):
        check_conversation([*prompt, *side])
    compared = [list(map(without_training_keys, side)) for side in (chosen, rejected)]
    if compared[0] == compared[1]:
        raise UnusableRow("chosen equals rejected")
    if not prompt:
        last = min(map(len, compared)) - 1  # the last message of either is its answer
        shared = next((i for i in range(last) if compared[0][i] != compared[1][i]), last)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    for side in (chosen, rejected):
        _check_trained(side)
    margin, value = None, row.get(columns.margin)
    if value is not None and not (isinstance(value, str) and not value.strip()):
        margin = _as_number(value)
        if not 0 <= margin < math.inf:
            raise UnusableRow("margin is not a number of 0 or more", f"`{columns.margin}` is {short(value)}")
    return PairExample(prompt, chosen, rejected, origin, margin, **_common(row, columns))


def unpaired(row: Any, origin: str, columns: ColumnsRecipe) -> UnpairedExample | PairExample:
    """Read a prompt, a completion and a label, or a pair in a row that has no completion."""
    has = {name for name, value in _cells(row).items() if value is not None}
    if columns.completion not in has and {columns.chosen, columns.rejected} <= has:
        return pair(row, origin, columns)
    prompt = _prompt(row, columns)
    if prompt is None:
        raise _missing(row, columns.prompt, columns.context_messages)
    completion = _answer(row, columns.completion, prompt)
    check_conversation([*prompt, *completion])
    _check_trained(completion)
    return UnpairedExample(prompt, completion, _label(row, columns), origin, **_common(row, columns))


def prompt(row: Any, origin: str, columns: ColumnsRecipe) -> PromptExample:
    """Read a prompt, or the messages before the last answer of a conversation or of a chosen one.

    The example keeps the complete row.
    """
    messages = _prompt(_cells(row), columns)
    if messages is None:
        name = next((name for name in (columns.messages, columns.chosen) if isinstance(row.get(name), list)), None)
        if name is None:
            raise _missing(row, columns.prompt, columns.context_messages)
        messages = messages_of(row[name], name)
        check_conversation(messages)
        messages = messages[: max(n for n, message in enumerate(messages) if message["role"] == "assistant")]
    check_value(row, "the row", json_only=False)
    return PromptExample(messages, origin, row, _domain(row, columns), _tools(row, columns))


ROW_FUNCTIONS: dict[Kind, Callable[[Any, str, ColumnsRecipe], Example]] = {
    "conversation": conversation,
    "pair": pair,
    "unpaired": unpaired,
    "prompt": prompt,
}


def _usual_columns(row: Any, columns: ColumnsRecipe, origin: str, problems: Problems) -> Any:
    """A row of Alpaca (`instruction`, `input`, `output`, `system`, `history`) or ShareGPT (`conversations`, `system`) with
    the columns of `columns`, and a note in `problems`; any other row unchanged, but for a `system` text before messages.
    """
    if not isinstance(row, dict):
        return row
    system = row.get("system")
    opened = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    chat: Any = row.get(columns.messages)
    first = chat[0] if isinstance(chat, list) and chat and isinstance(chat[0], dict) else {}
    if opened and (first.get("role") or first.get("from") or "system") not in ("system", "developer"):
        problems.note("system message from the column system", origin)
        return {**row, columns.messages: [*opened, *chat]}
    usual = ("messages", "prompt", "context_messages", "completion", "text", "chosen")
    if any(row.get(getattr(columns, name)) is not None for name in usual):
        return row
    if isinstance(row.get("instruction"), str) and "output" in row:
        given, earlier = row.get("input"), row.get("history")
        question = f"{row['instruction']}\n{given}" if isinstance(given, str) and given.strip() else row["instruction"]
        pairs = earlier if isinstance(earlier, list) and all(isinstance(one, list) for one in earlier) else []
        turns: list[Any] = [text for one in pairs for text in one]  # questions with their answers
        if any(len(one) != 2 for one in pairs) or not all(isinstance(text, str) for text in turns):
            turns = []
        turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate([*turns, question])]
        problems.note(
            "read as Alpaca: prompt from instruction, input, history and system, completion from output", origin
        )
        return {**row, columns.prompt: [*opened, *turns], columns.completion: row["output"]}
    if isinstance(row.get("conversations"), list):
        problems.note("read as ShareGPT: messages from conversations and system", origin)
        return {**row, columns.messages: [*opened, *row["conversations"]]}
    return row


def _cells(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UnusableRow("wrong type", f"the row is {kind_of(row)}, not an object")
    return row


def messages_column(row: dict[str, Any]) -> str | None:
    """Return the name of a column of messages, such as ShareGPT's `conversations`; None if there is none."""
    for name, value in row.items():
        messages = isinstance(name, str) and isinstance(value, list) and value
        if messages and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value):
            return name
    return None


def _missing(row: dict[str, Any], *names: str, hint: str = "") -> UnusableRow:
    """Return the problem that none of the columns has a value."""
    if empty := [name for name in names if name in row]:
        return UnusableRow("null", f"in `{empty[0]}`")
    columns = ", ".join(f"`{name[:40]}`" if isinstance(name, str) else kind_of(name) for name in list(row)[:8])
    expected = " or ".join(f"`{name}`" for name in names)
    return UnusableRow("missing column", f"needs {expected}, has {columns or 'none'}{hint}")


def _prompt(row: dict[str, Any], columns: ColumnsRecipe) -> list[Message] | None:
    """Return the messages of the prompt; None if the row has no column for it."""
    name = next((name for name in (columns.prompt, columns.context_messages) if row.get(name) is not None), None)
    if name is None:
        return None
    messages = as_messages(row[name], name, "user")
    if messages and messages[-1]["role"] == "assistant":
        raise UnusableRow("prompt ends with assistant", f"in `{name}`")
    check_conversation(messages, answered=False)
    return messages


def _answer(row: dict[str, Any], name: str, prompt: list[Message]) -> list[Message]:
    """Return the messages of the column without a leading copy of `prompt`."""
    if row.get(name) is None:
        raise _missing(row, name)
    messages = as_messages(row[name], name, "assistant")
    if prompt and list(map(without_training_keys, messages[: len(prompt)])) == list(map(without_training_keys, prompt)):
        messages = messages[len(prompt) :]
    elif prompt and messages and messages[0]["role"] != "assistant":
        raise UnusableRow("roles out of order", f"`{name}` starts with {messages[0]['role']} instead of the prompt")
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRow("no assistant message", f"in `{name}`")
    if messages[-1]["role"] != "assistant":
        raise UnusableRow("answer ends with another role", f"`{name}` ends with {messages[-1]['role']}")
    return messages


def _check_trained(messages: list[Message]) -> None:
    if not any(message["role"] == "assistant" and message.get("train", True) for message in messages):
        raise UnusableRow("nothing is trained", "every message of the answer has `train: false`")


def _label(row: dict[str, Any], columns: ColumnsRecipe) -> bool:
    value = row.get(columns.label)
    if value is None:
        raise _missing(row, columns.label)
    if isinstance(value, str) and value.strip().lower() in _LABELS:
        return _LABELS[value.strip().lower()]
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise UnusableRow(
        "label is neither true nor false", f"`{columns.label}` is {short(value)}; write true or false, or 1 or 0"
    )


def _common(row: dict[str, Any], columns: ColumnsRecipe) -> dict[str, Any]:
    """The domain, tools and weight of a row."""
    return {"domain": _domain(row, columns), "tools": _tools(row, columns), "weight": _weight(row, columns)}


def _weight(row: dict[str, Any], columns: ColumnsRecipe) -> float:
    if columns.weight is None:
        return 1.0
    if row.get(columns.weight) is None:
        raise _missing(row, columns.weight)
    weight = _as_number(row[columns.weight])
    if not 0 < weight < math.inf:
        raise UnusableRow("weight is not a number above 0", f"`{columns.weight}` is {weight:g}")
    return weight


def _as_number(value: Any) -> float:
    """`value` as a number, text of a number included; NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        return math.nan


def _domain(row: dict[str, Any], columns: ColumnsRecipe) -> str | None:
    value = row.get(columns.domain)
    if value is not None and not isinstance(value, str):
        raise UnusableRow("wrong type", f"`{columns.domain}` is {kind_of(value)}, not text")
    check_text(value or "", f"`{columns.domain}`")
    return value or None


def _tools(row: dict[str, Any], columns: ColumnsRecipe) -> list[Any] | None:
    category, where = "tools are not a list of objects", f"those in `{columns.tools}`"
    value = read_json(objects(row.get(columns.tools), category, where), category, where)
    if value is None or (isinstance(value, list) and not value):
        return None
    wrong = [one for one in value if not isinstance(one, dict)] if isinstance(value, list) else [value]
    if wrong:
        raise UnusableRow(
            category, f"`{columns.tools}` {'holds' if isinstance(value, list) else 'is'} {short(wrong[0])}"
        )
    return [_tool(tool, category, where) for tool in value]


def _tool(tool: dict[str, Any], category: str, where: str) -> dict[str, Any]:
    """Return the description of a tool with its JSON texts decoded."""
    keys = ("function", "parameters", "input_schema")
    tool = {key: objects(item, category, where) if key in keys else item for key, item in tool.items()}
    inner = tool.get("function")
    return {**tool, "function": _tool(inner, category, where)} if isinstance(inner, dict) else tool
