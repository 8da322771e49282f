"""Examples of each kind, and chat messages parsed and checked from the cells of a row."""

import base64
import json
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from posttrain.images import Pictured, forgetting, mark
from posttrain.plugins import entry_points, load, more
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


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Values of `role` -> role."""
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Values of `from` in ShareGPT rows -> role, besides those of `ROLES`."""
_TEXT_PARTS = ["text", "input_text", "output_text"]


REASONING = (
    *("reasoning_content", "reasoning", "thinking", "thinking_content", "thought", "thoughts", "analysis"),
    "reasoning_details",
)
"""Keys under which a message has its reasoning, as text or as parts of text. Rows are read into the first."""


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
    """Return the list of messages of the cell `name`, which may be JSON text, without checking their order. Raises
    UnusableRow."""
    category, where = "messages are not a list of objects", f"those in `{name}`"
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = read_json(value, category, where)
    if isinstance(value, list) and all(isinstance(item, str) and item.lstrip().startswith("{") for item in value):
        value = objects(value, category, where)
    if not isinstance(value, list):
        raise UnusableRow("wrong type", f"`{name}` is {kind_of(value)}, not a list of messages")
    messages = [_message(item, f"message {number} of `{name}`") for number, item in enumerate(value, 1)]
    names = {
        str(call["id"]): call["function"]["name"] for m in messages for call in m.get("tool_calls", []) if "id" in call
    }
    for message in messages:
        # Some templates show the name of the tool with its result.
        if message["role"] == "tool" and (id := str(message.get("tool_call_id", ""))) in names:
            message.setdefault("name", names[id])
    return messages


def _message(value: Any, where: str) -> Message:
    """Return the message in the form of `ROLES` and `tool_calls`, with its content as text and without null keys."""
    if not isinstance(value, dict):
        raise UnusableRow("null" if value is None else "wrong type", f"{where} is {kind_of(value)}, not an object")
    check_value(
        {key: item for key, item in value.items() if key != "content" or not isinstance(item, list | Pictured)}, where
    )
    value = {**value, "content": read_parts(value.get("content"), where)}
    role, content = value.get("role"), value["content"]
    dropped = {"role", "content"}
    if role is None and isinstance(value.get("from"), str):
        role, content = SHAREGPT.get(value["from"], value["from"]), value.get("value")
        dropped |= {"from", "value"}
    if not isinstance(role, str) or role not in ROLES:
        raise UnusableRow("wrong role", f"{where} has {short(role)}; use {', '.join(ROLES)}")
    role = ROLES[role]
    kept = {key: item for key, item in value.items() if item is not None and key not in dropped}
    if role == "assistant":
        content = _take_reasoning(kept, content, where)
    calls, legacy = (
        objects(kept.pop(key, None), "wrong type", f"`{key}` of {where}") for key in ("tool_calls", "function_call")
    )
    calls = [] if calls is None else calls
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UnusableRow("wrong type", f"`tool_calls` of {where} is not a list of objects")
    if legacy and (calls or not isinstance(legacy, dict)):
        problem = "is given with `tool_calls`" if calls else f"is {kind_of(legacy)}, not an object"
        raise UnusableRow("wrong type", f"`function_call` of {where} {problem}")
    calls = [legacy] if legacy else calls
    if calls and role != "assistant":
        raise UnusableRow("wrong role", f"{where} calls tools as {role}")
    if calls:
        kept["tool_calls"] = [_call(call, where) for call in calls]
    if "weight" in kept:
        kept |= _trained_by_weight(kept.pop("weight"), kept, where)
    if not isinstance(kept.get("train", True), bool):
        raise UnusableRow("wrong type", f"`train` of {where} is {kind_of(kept['train'])}, not true or false")
    if not isinstance(kept.get("primer", ""), str):
        raise UnusableRow("wrong type", f"`primer` of {where} is {kind_of(kept['primer'])}, not text")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    # Other keys of parts are kept beside the text, so that they are counted if the template does not read them.
    kept |= {
        f"content.{key}": item for part in parts for key, item in part.items() if item and key not in ("type", "text")
    }
    return {"role": role, "content": content_text(content, bool(calls) or role == "tool", where), **kept}


def read_parts(content: Any, where: str) -> Any:
    """The content of a message, in which plug-ins (`posttrain.parts`) have replaced parts such as images by text. Raises
    UnusableRow."""
    if not isinstance(content, list):
        return content
    known, read = entry_points("posttrain.parts"), []
    for part in content:
        if (kind := str(part.get("type")) if isinstance(part, dict) else "") in known:
            part = {"type": "text", "text": load("posttrain.parts", kind)(part, where)}
        else:
            check_value(part, where)
        read.append(part)
    return read


def picture_url(key: str, png: bytes) -> str:
    """The PNG file of a stored image as a data URL. UnusableRow if it does not have the pixels of its key."""
    where = f"the picture {key}.png"
    if "image" not in entry_points("posttrain.parts"):
        raise UnusableRow("image cannot be checked", f"{where} needs posttrain-images{more()}")
    with ExitStack() as later, forgetting(later):
        shown = load("posttrain.parts", "image")({"type": "image", "bytes": png}, where)
    if shown != mark(key):
        raise UnusableRow("image was altered", f"{where} does not have the pixels of its name; restore it")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Keys of the arguments of a call; the first that is there counts."""
_BESIDE_ARGUMENTS = {"id", "type", "index", "strict", "description"}
"""Keys of a call without arguments that say nothing about them."""


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call in OpenAI's form, with its arguments as an object. Templates would quote arguments that are text.

    A call without `function` is itself the function, as in `function_call`.
    """
    given = {key: item for key, item in call.items() if item is not None}
    head: dict[str, Any] = {key: given.pop(key) for key in ("id", "type") if key in given}
    function = objects(given.pop("function", None), "wrong type", f"`function` of a call in {where}")
    if function is None:
        head, function, given = {**head, "type": "function"}, given, {}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise UnusableRow("tool call without a name", f"in {where}")
    rest = {key: item for key, item in function.items() if item is not None and key != "name"}
    # Beside the function, where some writers put them.
    rest |= {key: given.pop(key) for key in _ARGUMENTS if key in given and not rest.get(key)}
    keys = [key for key in _ARGUMENTS if key in rest]
    key = next(iter(keys), None)
    if sum(bool(rest[one]) for one in keys) > 1:
        raise UnusableRow("tool call with several arguments", f"{' and '.join(keys)} of {short(name)} in {where}")
    if key is None and not _BESIDE_ARGUMENTS.issuperset(rest):
        raise UnusableRow("tool call without `arguments`", f"that of {short(name)} in {where}")
    if key is not None:
        category = "arguments of a tool call are not an object"
        arguments = read_json(rest.pop(key), category, f"those of {short(name)} in {where}")
        if not isinstance(arguments, dict | None):
            raise UnusableRow(category, f"those of {short(name)} in {where} are {kind_of(arguments)}")
        rest = {"arguments": arguments or {}, **rest}
    return {**head, "function": {"name": name, **rest}, **given}


def objects(value: Any, category: str, where: str) -> Any:
    """Return a value, and the items of a list, decoded where they are JSON text, as in many Parquet files. Raises UnusableRow
    of `category`."""
    value = read_json(value, category, where) if isinstance(value, str) else value
    if isinstance(value, list):
        return [objects(item, category, where) if isinstance(item, str) else item for item in value]
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of JSON that refuses an object with a key twice, of which one value would be lost."""
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return made


def read_json(value: Any, category: str, where: str) -> Any:
    """Return a value of JSON types with finite numbers, decoded as often as it is JSON text. Blank text is None.

    Raises UnusableRow of `category` for anything else, and for an object with a key twice.
    """

    try:
        while isinstance(value, str):
            value = json.loads(value, object_pairs_hook=unique) if value.strip() else None
        check_value(value, where)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise UnusableRow(category, f"{where} are not JSON ({str(error)[:80]})") from None
    return value


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
    texts = [text for text in texts if text.strip()]
    for key in REASONING:
        # Parts repeat the text where a message has both.
        if (text := _text_of(message.get(key))) and (not texts or "".join(text.split()) == "".join(texts[0].split())):
            texts += [] if texts else [text]
            del message[key]
    if thought:
        inner = [
            next((part[key] for key in ("thinking", "reasoning", "text") if key in part), None) for part in thought
        ]
        texts.append("\n".join(content_text(text, False, f"the reasoning of {where}") for text in inner))
        content = [part for part in parts if part not in thought] or ""
    different = {text.strip(): text for text in texts if text.strip()}
    if len(different) > 1:
        raise UnusableRow("several reasonings", f"{where} has different texts in its keys for reasoning")
    tags = (
        re.match(r"\s*<think>(.*?)</think>\s*", content, re.DOTALL) if isinstance(content, str) and different else None
    )
    if tags and (inside := "".join(tags[1].split())):
        # Some writers give it twice. The template would show both.
        if inside != "".join(next(iter(different)).split()):
            raise UnusableRow("several reasonings", f"{where} has one in its content and another one beside it")
        return content
    if different:
        message["reasoning_content"] = next(iter(different.values()))
    return content[tags.end() :] if tags else content


def _text_of(reasoning: Any) -> str:
    """The text of reasoning that is an object or a list of objects; empty unless all of it is text."""
    if isinstance(reasoning, list):
        texts = [part if isinstance(part, str) else _text_of(part) for part in reasoning]
        return "\n".join(texts) if all(texts) else ""
    keys = ("text", "thinking", "reasoning", "summary", "content")
    text = next((reasoning[key] for key in keys if key in reasoning), "") if isinstance(reasoning, dict) else ""
    return text if isinstance(text, str) else _text_of(text)


def content_text(value: Any, optional: bool, where: str) -> str:
    """The content of a message as one text; `optional`: it may be missing. Raises UnusableRow."""
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if value is None:
        raise UnusableRow("null", f"{where} has no content")
    texts = []
    for part in value if isinstance(value, list) and value else [None]:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            shown = f"a part of type {kind[:40]}" if isinstance(kind, str) else kind_of(value)
            raise UnusableRow("content is not text", f"{where} holds {shown}, and only text is supported{more()}")
        texts.append(text)
    text = "".join(texts)
    return Pictured(text) if any(isinstance(one, Pictured) for one in texts) else text


def reasoning_of(message: Message) -> str:
    """The reasoning of an assistant message; empty if it has none."""
    texts = [message.get(key) for key in REASONING if message["role"] == "assistant"]
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def in_form(message: Message, reasoning: str, form: str) -> Message:
    """Return a message with reasoning in a form of `Renderer.reasoning_form`."""
    content = message.get("content") or ""
    if form == "parts":
        parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}]
        return {**message, "content": parts}
    if form == "tags":
        return {**message, "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
    return {**message, form: reasoning}


def check_conversation(messages: list[Message], answered: bool = True) -> None:
    """Check the order of roles, and that no answer and no prompt is blank. Raises UnusableRow.

    An assistant's message may open the conversation before a user's, and is trained like every other answer.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    opens = answers[:1] == [0] and [message["role"] for message in messages[1:2]] == ["user"]
    before: str | None = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if (role == "assistant" and before in (None, "assistant") and not (opens and number == 1)) or (
            role == "tool" and before not in ("assistant", "tool")
        ):
            raise UnusableRow("roles out of order", f"message {number}, {role}, follows {before or 'nothing'}")
        before = role
    later = answers[1:] if opens else answers
    if answered and not later:
        raise UnusableRow("no assistant message")
    prompt = messages[int(opens) : later[0]] if later else messages[int(opens) :]
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
