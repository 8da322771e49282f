"""Tool calls: the syntaxes of chat templates, and their parsers.

The template of a model determines the syntax, see `posttrain.data.rendering`. For a template without tools, they are
rendered as text in Hermes syntax: schemas in the system message, calls between `<tool_call>` tags, results in a user
message.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.messages import REASONING, UnusableRow, check_value
from posttrain.errors import InputError

Message = dict[str, Any]

_INSTRUCTIONS = (
    "You can call these tools:\n<tools>\n{tools}\n</tools>\n"
    'Call a tool with <tool_call>{{"name": "tool", "arguments": {{"key": "value"}}}}</tool_call>.'
)


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The id that the policy gave the call, as in the syntax of Mistral; empty if it gave none."""

    def message(self, id: str) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a message for a chat template. `id` is used if the policy gave
        none."""
        return {"id": self.id or id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer as text and tool calls."""

    text: str
    """The text outside well-formed calls, without surrounding white space."""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """One sentence for each malformed call."""

    def message(self, turn: int) -> dict[str, Any]:
        """The answer as an assistant message, with `tool_calls` if it has calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.message(call_id(turn, index)) for index, call in enumerate(self.calls)]
        return message


# -- syntaxes ---------------------------------------------------------------------------------------------------------

_JSON = json.JSONDecoder()
_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids of calls that Mistral's templates accept."""
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_XML_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*|\Z)\Z", re.DOTALL)
# A value ends where the next parameter starts, and quantifiers are possessive, so that the time is linear in the
# length.
_XML_VALUE = re.compile(r"<parameter=([^>\s<]++)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\s*+[\w-]*+\s*+)?(?:\[ARGS\])?\s*+(?=\{)")


def parse_hermes(text: str) -> ParsedAnswer:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen and SmolLM write it.

    The content may be a list of calls (SmolLM2), or `<function=name><parameter=key>value</parameter></function>`
    (Qwen3-Coder).
    """
    calls: list[ToolCall] = []
    errors: list[str] = []
    kept: list[str] = []
    end = 0
    for match in _HERMES.finditer(text):
        kept.append(text[end : match.start()])
        end = match.end()
        content = match[1]
        if not match[0].endswith("</tool_call>"):
            errors.append("a <tool_call> has no </tool_call>")
            kept.append(match[0])
            continue
        if xml := _XML_CALL.match(content):
            calls.append(ToolCall(xml[1], {key: json_or_text(value) for key, value in _XML_VALUE.findall(xml[2])}))
            continue
        read = _calls_of(content, errors)
        calls += read
        if not read:
            kept.append(match[0])
    kept.append(text[end:])
    return ParsedAnswer("".join(kept).strip(), calls, errors)


def parse_llama(text: str) -> ParsedAnswer:
    """`{"name": ..., "parameters": {...}}` as the whole answer, as Llama 3 writes it. Several are separated by
    semicolons."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{") or '"name"' not in body:
        return ParsedAnswer(text.strip())
    calls: list[ToolCall] = []
    errors: list[str] = []
    while body:
        value, body = _first_json(body, errors)
        if value is not None:
            calls += _calls_of_value(value, errors)
        body = body.lstrip(" \n\t;,")
    return ParsedAnswer("" if calls else text.strip(), calls, errors)


def parse_mistral(text: str) -> ParsedAnswer:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` (from version 11 on)."""
    before, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    errors: list[str] = []
    for part in parts:
        body = part.strip()
        if not body.startswith(("[{", "[]", "{")) and (named := _MISTRAL_NAMED.match(body)):
            value, _ = _first_json(body[named.end() :], errors)
            calls += _calls_of_value({"name": named[1], "arguments": value}, errors) if value is not None else []
        else:
            calls += _calls_of(body, errors)
    return ParsedAnswer(before.strip() if calls else text.strip(), calls, errors)


SYNTAXES: dict[str, Callable[[str], ParsedAnswer]] = {
    "hermes": parse_hermes,
    "llama": parse_llama,
    "mistral": parse_mistral,
}
"""Name of a syntax -> its parser."""


def parse_served(text: str, calls: Sequence[tuple[str, Any]]) -> ParsedAnswer:
    """An answer whose calls were parsed by a server or transformers: their names, and arguments as an object or JSON
    text."""
    parsed = ParsedAnswer(text)
    for name, arguments in calls:
        parsed.calls.extend(_calls_of_value({"name": name, "arguments": arguments}, parsed.errors))
    return parsed


def parse_response(tokenizer: Any, answer: str, prompt: str, tools: Sequence[dict[str, Any]]) -> ParsedAnswer:
    """An answer as the response template of `tokenizer` describes it. `prompt`: text whose end may start the answer, such as
    by `<think>`."""
    try:
        message = tokenizer.parse_response(answer, prefix=prompt, tools=list(tools) or None)
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(function["name"], function["arguments"]) for function in functions]
    except Exception as error:  # transformers raises errors of many types for text in another format
        return ParsedAnswer(answer, errors=[f"the answer cannot be parsed ({error})"])
    text, (thought, closed, _) = message.get("content") or "", answer.partition("</think>")
    # Thinking stays in the text, where environments and templates expect it.
    return parse_served(text if not closed or closed in text else f"{thought}{closed}\n\n{text}".strip(), calls)


def _read_json(text: str) -> tuple[Any, int]:
    """The JSON value at the start of `text`, and the position of its end.

    Raises ValueError if there is none, and for values that chat templates and clients cannot use: nesting of more than
    `DEPTH` levels, lone surrogates, numbers that are not finite.
    """
    try:
        value, end = _JSON.raw_decode(text)
        check_value(value, "it")
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnusableRow as error:
        raise ValueError(str(error)) from None
    return value, end


def _first_json(text: str, errors: list[str]) -> tuple[Any, str]:
    """The JSON value at the start of `text`, and the remaining text. If there is none, adds an error and returns
    None."""
    try:
        value, end = _read_json(text)
    except ValueError as error:
        errors.append(f"a tool call is not valid JSON ({error})")
        return None, ""
    return value, text[end:]


def _calls_of(content: str, errors: list[str]) -> list[ToolCall]:
    known = len(errors)
    value, rest = _first_json(content.strip(), errors)
    if len(errors) > known:
        return []
    if rest.strip():
        errors.append(f"a tool call has text after its JSON: {rest.strip()[:40]!r}")
        return []
    return _calls_of_value(value, errors)


def _calls_of_value(value: Any, errors: list[str]) -> list[ToolCall]:
    """The calls in a JSON value: an object, or a list of objects."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            errors.append("a tool call is not an object with a `name`")
            continue
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments, _ = _first_json(arguments or "{}", errors)
            if arguments is None:
                continue
        if not isinstance(arguments, dict):
            errors.append(f"the arguments of {item['name']} are not an object")
            continue
        id = item.get("id")
        calls.append(ToolCall(item["name"], arguments, id if isinstance(id, str) and _ID.fullmatch(id) else ""))
    return calls


def json_or_text(text: str) -> Any:
    """`text` parsed as JSON if all of it is JSON, else `text`."""
    try:
        value, end = _read_json(text.strip())
    except ValueError:
        return text
    return text if text.strip()[end:] else value


# -- tools in a conversation ------------------------------------------------------------------------------------------


def schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The description of a tool in OpenAI's format. `parameters` is a JSON schema of an object."""
    parameters = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call_id(turn: int, index: int) -> str:
    """The id of call `index` of turn `turn`, both from 0. Mistral's templates take exactly nine letters and digits."""
    return f"call{turn % 1000:03d}{index % 100:02d}"


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with nine letters and digits as ids of calls and of their results. A result without an id belongs to
    the first call that has no result."""

    def nine(id: Any) -> str:
        return str(id) if _ID.fullmatch(str(id)) else hashlib.blake2b(str(id).encode(), digest_size=5).hexdigest()[:9]

    changed: list[Message] = []
    open_calls: list[str] = []
    for turn, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            open_calls = [nine(call.get("id") or call_id(turn, place)) for place, call in enumerate(calls)]
            calls = [{**call, "id": id} for call, id in zip(calls, open_calls, strict=True)]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = nine(message.get("tool_call_id") or next(iter(open_calls), call_id(turn, 0)))
            open_calls = [id for id in open_calls if id != given]
            message = {**message, "tool_call_id": given}
        changed.append(message)
    return changed


def hermes_text(answer: ParsedAnswer) -> str:
    """An answer in Hermes syntax."""
    calls = [_call_text(call.name, call.arguments) for call in answer.calls]
    return "\n".join(part for part in (answer.text, *calls) if part)


def tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The conversation for a template without tools: schemas, calls and results as text. InputError for a call without
    a function."""
    plain: list[Message] = []
    if tools:
        listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        plain.append({"role": "system", "content": _INSTRUCTIONS.format(tools=listed)})
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "system" and plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{content}\n\n{plain[0]['content']}"}
        elif message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].get("results"):
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            parts = [content]
            for call in message["tool_calls"]:
                function = call.get("function", call) if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    raise InputError(
                        "a tool call has no function with a name; give each entry of `tool_calls` a `function`"
                    )
                parts.append(_call_text(function["name"], function.get("arguments", {})))
            plain.append({**message, "content": "\n".join(part for part in parts if part)})
        else:
            plain.append({**message, "content": content})
    kept = ("role", "content", *REASONING)
    return [{key: value for key, value in message.items() if key in kept} for message in plain]


def _call_text(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"
