"""Chat messages out of a row's cells: checked, with their content as text."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message: `role`, `content` (text), and what a template may read besides; `train: false` carries no loss."""


@dataclass(frozen=True)
class Conversation:
    """One supervised example; at least one assistant message."""

    messages: list[Message]
    origin: str
    """Where the row stands, for people: `train.jsonl row 12` (counted from 1; of JSON lines, the line)."""
    domain: str | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; each ends with an assistant message, and they differ."""

    prompt: list[Message]
    """Messages that both conversations begin with; empty where they share none."""
    chosen: list[Message]
    """Messages after the prompt."""
    rejected: list[Message]
    origin: str
    margin: float | None = None
    domain: str | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """One answer and whether it is good (KTO)."""

    prompt: list[Message]
    completion: list[Message]
    good: bool
    origin: str
    domain: str | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """Something to answer; the last message is not the assistant's."""

    messages: list[Message]
    origin: str
    row: dict[str, Any] = field(default_factory=dict)
    """The whole row, for rules."""
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
"""ShareGPT's `from` -> role."""
DEPTH = 32
"""Most levels of lists and objects within a message, a tool or a prompt's row; later steps recurse into them."""


class Unusable(Exception):
    """What is wrong with a row, as `category: detail`."""

    def __init__(self, category: str, detail: str = "") -> None:
        super().__init__(f"{category}: {detail}" if detail else category)


def as_messages(value: Any, name: str, role: str) -> list[Message]:
    """The cell `name`: messages, or text, which becomes one message of `role`. Raises Unusable."""
    if isinstance(value, str):
        check_value(value, f"`{name}`")
        return [{"role": role, "content": value}]
    return messages_of(value, name)


def messages_of(value: Any, name: str) -> list[Message]:
    """The cell `name`, which has to be a list of messages; their order is not checked. Raises Unusable."""
    if not isinstance(value, list):
        raise Unusable("wrong type", f"`{name}` is {kind_of(value)}, not a list of messages")
    return [_message(item, f"message {number} of `{name}`") for number, item in enumerate(value, 1)]


def _message(value: Any, where: str) -> Message:
    """The message with its content as text, and without keys that are null (parquet gives every message every key)."""
    if not isinstance(value, dict):
        raise Unusable("null" if value is None else "wrong type", f"{where} is {kind_of(value)}, not an object")
    check_value(value, where)
    role, content = value.get("role"), value.get("content")
    dropped = {"role", "content"}
    if role is None and isinstance(value.get("from"), str):
        role, content = SHAREGPT.get(value["from"], value["from"]), value.get("value")
        dropped |= {"from", "value"}
    if not isinstance(role, str) or role not in ROLES:
        raise Unusable("wrong role", f"{where} has {short(role)}; use {', '.join(ROLES)}")
    kept = {key: item for key, item in value.items() if item is not None and key not in dropped}
    calls = kept.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise Unusable("wrong type", f"`tool_calls` of {where} is not a list of objects")
    if calls and role != "assistant":
        raise Unusable("wrong role", f"{where} calls tools as {role}")
    if "weight" in kept:
        kept |= _trained_by_weight(kept.pop("weight"), kept, where)
    if not isinstance(kept.get("train", True), bool):
        raise Unusable("wrong type", f"`train` of {where} is {kind_of(kept['train'])}, not true or false")
    if not isinstance(kept.get("primer", ""), str):
        raise Unusable("wrong type", f"`primer` of {where} is {kind_of(kept['primer'])}, not text")
    return {"role": role, "content": _content(content, bool(calls), where), **kept}


def _trained_by_weight(weight: Any, kept: dict[str, Any], where: str) -> dict[str, bool]:
    """OpenAI's `weight` as `train`: 0 is not trained, 1 is, as without it."""
    if not isinstance(weight, int | float) or isinstance(weight, bool) or weight not in (0, 1):
        shown = str(weight) if type(weight) is int and abs(weight) < 1000 else short(weight)
        raise Unusable("weight is neither 0 nor 1", f"{where} has {shown}")
    if kept.get("train", bool(weight)) is not bool(weight):
        raise Unusable("weight and train disagree", f"{where} has weight {weight:g} and train {short(kept['train'])}")
    return {} if weight else {"train": False}


def _content(value: Any, calls_tools: bool, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None and calls_tools:
        return ""
    if value is None:
        raise Unusable("null", f"{where} has no content")
    parts = value if isinstance(value, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Unusable("content is not text", f"{where} holds {kind_of(value)}")
    return "".join(texts)


def check_conversation(messages: list[Message], answered: bool = True) -> None:
    """The order of roles, and that neither what comes before the first answer nor an answer is blank."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if answered and not answers:
        raise Unusable("no assistant message")
    before: str | None = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if (role == "assistant" and before in (None, "assistant")) or (
            role == "tool" and before not in ("assistant", "tool")
        ):
            raise Unusable("roles out of order", f"message {number}, {role}, follows {before or 'nothing'}")
        before = role
    asked = messages[: answers[0]] if answers else messages
    if not any(message["content"].strip() for message in asked):
        raise Unusable("empty prompt")
    for place in answers:
        if not messages[place]["content"].strip() and not messages[place].get("tool_calls"):
            raise Unusable("empty answer", f"message {place + 1}" if len(answers) > 1 else "")


def said(message: Message) -> Message:
    """The message without what only training reads."""
    return {key: value for key, value in message.items() if key not in ("train", "primer")}


def check_value(value: Any, where: str, json_only: bool = True) -> None:
    """That all text is Unicode, nothing is nested deeper than `DEPTH`, and, if `json_only`, all could stand in JSON."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEPTH:
            raise Unusable("nested too deeply", f"{where} has more than {DEPTH} levels")
        if isinstance(item, str):
            check_text(item, where)
        elif isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise Unusable("wrong type", f"{where} has a key that is not text")
            waiting += [(part, depth + 1) for entry in item.items() for part in entry]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, int):
            if item.bit_length() > 1024:
                raise Unusable("wrong type", f"{where} holds a number of {item.bit_length()} bits")
        elif json_only and not (item is None or isinstance(item, float)):
            raise Unusable("wrong type", f"{where} holds {kind_of(item)}")


def check_text(text: str, where: str) -> None:
    """Unusable where no tokenizer could take the text."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise Unusable("text is not Unicode", f"{where} holds the lone surrogate {code:#06x}") from None


def kind_of(value: Any) -> str:
    """The type in the words of the data and not of Python."""
    names = {"NoneType": "null", "str": "text", "dict": "an object", "list": "a list"}
    return names.get(type(value).__name__, f"a value of type {type(value).__name__}")


def short(value: Any) -> str:
    """The value as a few characters that can be printed anywhere."""
    if isinstance(value, str):
        return ascii(value[:40])
    return str(value) if isinstance(value, bool | float) else kind_of(value)
