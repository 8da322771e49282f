"""Examples of each kind, and chat messages parsed and checked from the cells of a row."""

import json
from dataclasses import dataclass, field
from typing import Any

from posttrain.recipe.data import DEPTH

Message = dict[str, Any]
"""A chat message: `role`, `content` (text), and other keys that a template may read. `train: false` has no loss."""


@dataclass(frozen=True)
class ConversationExample:
    """A supervised example with at least one assistant message."""

    messages: list[Message]
    origin: str
    """File and row for messages: `train.jsonl row 12` (counted from 1; in JSON lines, the line number)."""
    domain: str | None = None
    tools: list[Any] | None = None
    weight: float = 1.0
    """Weight of the row in the training loss."""


@dataclass(frozen=True)
class TextExample:
    """Plain text to train on."""

    text: str
    origin: str
    domain: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class PairExample:
    """Two different answers to one prompt; each ends with an assistant message."""

    prompt: list[Message]
    """The common first messages of both conversations; may be empty."""
    chosen: list[Message]
    """Messages after the prompt."""
    rejected: list[Message]
    origin: str
    margin: float | None = None
    domain: str | None = None
    tools: list[Any] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class UnpairedExample:
    """An answer with a binary label (KTO)."""

    prompt: list[Message]
    completion: list[Message]
    label: bool
    """True: the answer is desirable."""
    origin: str
    domain: str | None = None
    tools: list[Any] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class PromptExample:
    """A prompt; its last message is not the assistant's."""

    messages: list[Message]
    origin: str
    row: dict[str, Any] = field(default_factory=dict)
    """The complete row, for rules."""
    domain: str | None = None
    tools: list[Any] | None = None


ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""Values of `from` in ShareGPT rows -> role."""


REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message has its reasoning as text. Rows are read into the first."""


class UnusableRow(Exception):
    """A row cannot be used. The message is `category: detail`."""

    def __init__(self, category: str, detail: str = "") -> None:
        super().__init__(f"{category}: {detail}" if detail else category)


def as_messages(value: Any, name: str, role: str) -> list[Message]:
    """Return the messages of the cell `name`; text becomes one message of `role`. Raises UnusableRow."""
    if isinstance(value, str):
        check_value(value, f"`{name}`")
        return [{"role": role, "content": value}]
    return messages_of(value, name)


def messages_of(value: Any, name: str) -> list[Message]:
    """Return the list of messages of the cell `name`, without checking their order. Raises UnusableRow."""
    if not isinstance(value, list):
        raise UnusableRow("wrong type", f"`{name}` is {kind_of(value)}, not a list of messages")
    return [_message(item, f"message {number} of `{name}`") for number, item in enumerate(value, 1)]


def _message(value: Any, where: str) -> Message:
    """Return the message with its content as text and without null keys (parquet adds every key to every message)."""
    if not isinstance(value, dict):
        raise UnusableRow("null" if value is None else "wrong type", f"{where} is {kind_of(value)}, not an object")
    check_value(value, where)
    role, content = value.get("role"), value.get("content")
    dropped = {"role", "content"}
    if role is None and isinstance(value.get("from"), str):
        role, content = SHAREGPT.get(value["from"], value["from"]), value.get("value")
        dropped |= {"from", "value"}
    if not isinstance(role, str) or role not in ROLES:
        raise UnusableRow("wrong role", f"{where} has {short(role)}; use {', '.join(ROLES)}")
    kept = {key: item for key, item in value.items() if item is not None and key not in dropped}
    if role == "assistant":
        content = _take_reasoning(kept, content, where)
    calls = kept.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UnusableRow("wrong type", f"`tool_calls` of {where} is not a list of objects")
    if calls and role != "assistant":
        raise UnusableRow("wrong role", f"{where} calls tools as {role}")
    if calls:
        kept["tool_calls"] = [_with_object(call) for call in calls]
    if "weight" in kept:
        kept |= _trained_by_weight(kept.pop("weight"), kept, where)
    if not isinstance(kept.get("train", True), bool):
        raise UnusableRow("wrong type", f"`train` of {where} is {kind_of(kept['train'])}, not true or false")
    if not isinstance(kept.get("primer", ""), str):
        raise UnusableRow("wrong type", f"`primer` of {where} is {kind_of(kept['primer'])}, not text")
    return {"role": role, "content": _content(content, bool(calls), where), **kept}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, parsed if they are JSON text, as in OpenAI's files. Templates
    would quote the text.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _trained_by_weight(weight: Any, kept: dict[str, Any], where: str) -> dict[str, bool]:
    """Return OpenAI's `weight` as `train`: 0 is `train: false`, 1 is the default."""
    if not isinstance(weight, int | float) or isinstance(weight, bool) or weight not in (0, 1):
        shown = str(weight) if type(weight) is int and abs(weight) < 1000 else short(weight)
        raise UnusableRow("weight is neither 0 nor 1", f"{where} has {shown}")
    if kept.get("train", bool(weight)) is not bool(weight):
        raise UnusableRow(
            "weight and train disagree", f"{where} has weight {weight:g} and train {short(kept['train'])}"
        )
    return {} if weight else {"train": False}


def _take_reasoning(message: dict[str, Any], content: Any, where: str) -> Any:
    """Move the reasoning of a message, from any of its keys or from parts of its content, to `reasoning_content`. Returns
    the rest of the content."""
    parts = content if isinstance(content, list) else []
    thought = [part for part in parts if isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")]
    texts = [message.pop(key) for key in REASONING if isinstance(message.get(key), str)]
    if thought:
        inner = [
            next((part[key] for key in ("thinking", "reasoning", "text") if key in part), None) for part in thought
        ]
        texts.append("\n".join(_content(text, False, f"the reasoning of {where}") for text in inner))
        content = [part for part in parts if part not in thought] or ""
    different = {text.strip(): text for text in texts if text.strip()}
    if len(different) > 1:
        raise UnusableRow("several reasonings", f"{where} has different texts in its keys for reasoning")
    if different:
        message["reasoning_content"] = next(iter(different.values()))
    return content


def _content(value: Any, calls_tools: bool, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None and calls_tools:
        return ""
    if value is None:
        raise UnusableRow("null", f"{where} has no content")
    parts = value if isinstance(value, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise UnusableRow("content is not text", f"{where} holds {kind_of(value)}")
    return "".join(texts)


def check_conversation(messages: list[Message], answered: bool = True) -> None:
    """Check the order of roles, and that no answer and no prompt is blank. Raises UnusableRow."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if answered and not answers:
        raise UnusableRow("no assistant message")
    before: str | None = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if (role == "assistant" and before in (None, "assistant")) or (
            role == "tool" and before not in ("assistant", "tool")
        ):
            raise UnusableRow("roles out of order", f"message {number}, {role}, follows {before or 'nothing'}")
        before = role
    prompt = messages[: answers[0]] if answers else messages
    if not any(message["content"].strip() for message in prompt):
        raise UnusableRow("empty prompt")
    for index in answers:
        if not messages[index]["content"].strip() and not messages[index].get("tool_calls"):
            raise UnusableRow("empty answer", f"message {index + 1}" if len(answers) > 1 else "")


def without_training_keys(message: Message) -> Message:
    """Return the message without the keys that only training reads."""
    return {key: value for key, value in message.items() if key not in ("train", "primer")}


def check_value(value: Any, where: str, json_only: bool = True) -> None:
    """Check that text is Unicode, nesting is at most `DEPTH`, and, if `json_only`, all types are JSON types."""
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > DEPTH:
            raise UnusableRow("nested too deeply", f"{where} has more than {DEPTH} levels")
        if isinstance(item, str):
            check_text(item, where)
        elif isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise UnusableRow("wrong type", f"{where} has a key that is not text")
            pending += [(part, depth + 1) for entry in item.items() for part in entry]
        elif isinstance(item, list):
            pending += [(part, depth + 1) for part in item]
        elif isinstance(item, int):
            if item.bit_length() > 1024:
                raise UnusableRow("wrong type", f"{where} holds a number of {item.bit_length()} bits")
        elif json_only and not (item is None or isinstance(item, float)):
            raise UnusableRow("wrong type", f"{where} holds {kind_of(item)}")


def check_text(text: str, where: str) -> None:
    """Raise UnusableRow if the text has a lone surrogate, which tokenizers reject."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UnusableRow("text is not Unicode", f"{where} holds the lone surrogate {code:#06x}") from None


def kind_of(value: Any) -> str:
    """Return the type of `value` in JSON terms."""
    names = {"NoneType": "null", "str": "text", "dict": "an object", "list": "a list"}
    return names.get(type(value).__name__, f"a value of type {type(value).__name__}")


def short(value: Any) -> str:
    """Return `value` as a short ASCII text."""
    if isinstance(value, str):
        return ascii(value[:40])
    return str(value) if isinstance(value, bool | float) else kind_of(value)
