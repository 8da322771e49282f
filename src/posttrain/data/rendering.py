"""The renderer: chat messages to tokens, for supervised training, rollouts, evaluation and serving.

An observation is rendered once, with the text that the chat template puts around it. Sampled answers remain token ids.
The template renders a sampled answer only if it rewrites history.
"""

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from posttrain.data.messages import REASONING, in_form, reasoning_of
from posttrain.data.templates import RememberedTokens, TextEncoder, either
from posttrain.data.tools import (
    SYNTAXES,
    ParsedAnswer,
    ToolCall,
    call_id,
    parse_response,
    schema,
    tools_as_text,
    with_short_ids,
)
from posttrain.errors import InputError
from posttrain.images import FIRST, MARK, whole_images
from posttrain.plugins import more
from posttrain.recipe.model import thinking_of
from posttrain.recipe.sources import texts

Message = dict[str, Any]
Tool = dict[str, Any]
"""The description of a tool in OpenAI's format."""

_ANSWER = "POSTTRAIN-ANSWER"
_THOUGHT = "<think>\nfirst thought\n</think>\n\n"
_PROBE = "posttrain_probe"
_KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "train", "primer"}
_FORMATTING = re.compile(r"</?think>|\s")


class Renderer:
    """Renders chat messages to token ids with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        """`end_tokens`: ids that end an answer, besides the one that the template writes. InputError if the template cannot
        render a conversation."""
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.end_tokens |= {self.end}
        if _ANSWER not in self._templated([{"role": "user", "content": _ANSWER}], None, True):
            raise InputError(
                f"the chat template of {tokenizer.name_or_path} omits messages that are plain text (it may be a template for "
                "images); set another template in model.chat_template"
            )
        self.rewrites_answers = not self._keeps_history("a plain answer", False)
        """The template changes earlier answers, so every turn needs its own stream."""
        self.rewrites_thoughts = not self._keeps_history(_THOUGHT + "an answer", False)
        """The template changes earlier answers that contain thinking (Qwen3 and DeepSeek drop it)."""
        self._kept: dict[tuple[bool, str, bool], bool] = {}
        self._read: dict[tuple[str, str], bool] = {}
        self._remembered = RememberedTokens(tokenizer)
        self.thinking = thinking_of(tokenizer.get_chat_template())
        """`model.thinking` of this run or of the run that exported the model; None if neither set it."""

    def prompt(self, messages: Sequence[Message], primer: str = "", tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a conversation up to the policy's answer; `primer` is text that starts the answer."""
        return self._remembered(
            messages, tools, (primer,), lambda: self.encode(self.text(messages, tools) + self.marked(primer))
        )

    def surely_longer(self, messages: Sequence[Message], tools: Sequence[Tool], tokens: int) -> bool:
        """Whether a conversation has more than `tokens` tokens however it is divided into them, found without rendering it."""
        return len(messages) > tokens or sum(map(len, texts([*messages, *tools]))) > tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def continuation(
        self, messages: Sequence[Message], end: int | None, primer: str = "", tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Return the tokens between two answers: the end of the first, `messages`, and the start of the second.

        `end`: the end token that the first answer was sampled with, which is then not repeated; None if it was cut off.
        """

        def tokens() -> list[int]:
            before: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
            text = self.text([*before, *messages], tools).partition(_ANSWER)[2]
            return self.after_answer(text + self.marked(primer), end)

        return self._remembered(messages, tools, (end, primer), tokens)

    def after_answer(self, text: str, end: int | None) -> list[int]:
        """Return the tokens of the rendered text that follows an answer. `end` as in `continuation`."""
        if end is None:
            return self.encode(text, _ANSWER)
        written = self.closes(text)
        names = self.tokenizer.convert_ids_to_tokens([end, self.end])
        # A template without ends may write the end token of another turn here: the role of the next message.
        if written and written[1] in names:
            text = written.string[written.end() :]
        return self.encode(text, names[0])

    def message_ids(
        self, messages: Sequence[Message], answer: Message, primer: str = "", tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Return the tokens of an assistant message, as the template shows it after `messages`, with its end token."""
        prompt = self.text(messages, tools) + self.marked(primer)
        return _answer(self, [*messages, answer], tools, prompt, primer)[0]

    def answer(self, text: str, after: str | None = None) -> list[int]:
        """Return the tokens of an answer text, with the end token that a policy would sample.

        `after`: the rendered text before it. By default, the template starts the answer.
        """
        text = self.marked(text)
        if after is None:
            before, after = self._opening
            text = before + text + self.before_end
        return [*self.encode(text, after), self.end]

    def answer_text(self, ids: Sequence[int]) -> str:
        """Return a sampled answer as text, without its end."""
        if not ids or ids[-1] not in self.end_tokens:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return self.tokenizer.decode(list(ids[:-1]), skip_special_tokens=False).removesuffix(self.before_end)

    def warnings(self) -> list[str]:
        """Return warnings about how the template changes conversations."""
        warnings = []
        if self.folds_system:
            warnings.append(
                "the chat template has no system role, so the system message is prepended to the first user message"
            )
        if not self.closing.search(self.text_after_answers):
            written = f"the text {self.text_after_answers.strip()!r}" if self.text_after_answers.strip() else "nothing"
            warnings.append(
                f"the chat template ends answers with {written} instead of a token of the tokenizer, so answers end with "
                f"{self.tokenizer.convert_ids_to_tokens(self.end)} and every turn becomes its own stream; set model.chat_template to a template that "
                "ends answers with a token"
            )
        return warnings

    def thinking_problem(self, messages: Sequence[Message]) -> str | None:
        """How the answers among `messages` contradict `model.thinking`; None if they do not."""
        answers = [message for message in messages if message["role"] == "assistant"]
        thoughts = [
            "</think>" in str(m.get("content")) or bool(self.reasoning_form and reasoning_of(m)) for m in answers
        ]
        if self.thinking == "off" and any(thoughts):
            return "with thinking although model.thinking is off"
        if self.thinking == "on" and not any(thoughts):
            return "without thinking although model.thinking is on"
        return None

    def notes(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
        """How a conversation is changed when it is rendered."""
        notes = []
        if self.reasoning_form is None and any(map(reasoning_of, messages)):
            notes.append("without its reasoning, which the chat template does not show")
        unread = [key for message in messages for key, value in message.items() if self._is_unread(message, key, value)]
        notes += [f"without the key `{key[:40]}` of a message, which is not rendered" for key in dict.fromkeys(unread)]
        if self.marked([*messages, *tools]) != [*messages, *tools]:
            notes.append("with the text of control tokens, which is encoded as text")
        return notes

    def _is_unread(self, message: Message, key: str, value: Any) -> bool:
        """Whether a key of a message is not in its rendered text."""
        role = message["role"]
        if key in _KNOWN_KEYS or value in (None, "", [], {}) or (role, key) == ("tool", "name"):
            return False
        if role == "assistant" and key in REASONING and isinstance(value, str | list | dict):
            return not isinstance(value, str)
        if (role, key) not in self._read:
            asked: Message = {"role": "user", "content": "x"}
            called = {"role": "assistant", "content": "", "tool_calls": [ToolCall(_PROBE, {}).message(call_id(0, 0))]}
            before = {"assistant": [asked], "tool": [asked, called]}.get(role, [])
            plain = {"role": role, "content": "x"} | ({"tool_call_id": call_id(0, 0)} if role == "tool" else {})
            after = [asked] if role == "system" else []
            self._read[role, key] = True
            with suppress(InputError):
                texts = [self.text([*before, one, *after], answering=False) for one in (plain, {**plain, key: value})]
                self._read[role, key] = texts[0] != texts[1]
        return not self._read[role, key]

    @cached_property
    def reasoning_form(self) -> str | None:
        """How the template reads the reasoning of an answer: the key of a message, `parts` of its content, or `tags` in its
        content; None if it does not show reasoning in the answer to its prompt."""
        asked = [{"role": "user", "content": "x"}]
        for form in (*REASONING, "parts"):
            answer = in_form({"role": "assistant", "content": _ANSWER}, _PROBE, form)
            with suppress(InputError):
                text = self._applied([*asked, answer], None, False)
                # A template for text prints a list of parts.
                if _PROBE in text and _ANSWER in text and not re.search("['\"]thinking['\"]", text):
                    # With thinking off, the prompt ends with an empty thought.
                    return form if text.startswith(self._applied(asked, None, True)) else None
        if "</think>" not in self.tokenizer.get_chat_template():
            return None
        # A template that removes thinking from answers shows none.
        with suppress(InputError):
            answer = in_form({"role": "assistant", "content": _ANSWER}, _PROBE, "tags")
            text = self._applied([*asked, answer], None, False)
            return "tags" if _PROBE in text or not text.startswith(self._applied(asked, None, True)) else None
        return None

    def with_reasoning(self, message: Message) -> Message:
        """Return a message with its reasoning in the form that the template reads, or without it."""
        if message.keys().isdisjoint(REASONING):
            return message
        if not (reasoning := reasoning_of(message)):  # templates print values that are no text
            return {k: v for k, v in message.items() if k not in REASONING or not isinstance(v, list | dict)}
        plain = {key: value for key, value in message.items() if key not in REASONING}
        return in_form(plain, reasoning, self.reasoning_form) if self.reasoning_form else plain

    def must_split(self, thought: bool, role: str = "user", tools: bool = False) -> bool:
        """Whether a message of `role` makes the template change earlier text, which requires a new stream.

        `thought`: an answer of the stream contains thinking; before the result of a tool, only the last answer counts.
        `tools`: the conversation has tools, which some templates move (Mistral shows them before the last user
        message).
        """
        key = thought, role, tools
        if key not in self._kept:
            plain = (_THOUGHT if thought else "") + "a plain answer"
            self._kept[key] = self._keeps_calls(thought) if role == "tool" else self._keeps_history(plain, tools)
        return not self._kept[key]

    def _keeps_history(self, answer: str, tools: bool) -> bool:
        first = [{"role": "user", "content": "first"}]
        shown = [schema(_PROBE, "A probe.", {})] if tools else []
        later = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "second"}]
        before, after = self.text(first, shown), self.text(later, shown)
        # Some templates write a space before answers, which is then sampled.
        written = after[len(before) :].lstrip()
        kept = after.startswith(before) and written.startswith(answer)
        return kept and self.closes(written[len(answer) :]) is not None

    def _keeps_calls(self, thought: bool) -> bool:
        first: list[Message] = [{"role": "user", "content": "first"}]
        shown = [schema(_PROBE, "A probe.", {})]
        call = ToolCall(_PROBE, {}).message(call_id(0, 0))
        called = [*first, {"role": "assistant", "content": _THOUGHT if thought else "", "tool_calls": [call]}]
        result = {"role": "tool", "name": _PROBE, "tool_call_id": call["id"], "content": "second"}
        before = self.text(called, shown, answering=False)
        after = self.text([*called, result], shown)
        kept = before.startswith(self.text(first, shown)) and after.startswith(before) and self.closing.search(before)
        return bool(kept) and (not thought or _THOUGHT.strip() in after)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), answering: bool = True) -> str:
        """Return the rendered text of `messages`; `answering`: up to the start of the policy's next answer.

        `tools` are descriptions in OpenAI's format. For a template without tools, they, their calls and results are
        rendered as text. Without messages, the text is what precedes an answer that opens a conversation.
        """
        if not messages:
            before, answer, _ = self.text([{"role": "assistant", "content": _ANSWER}], tools, False).partition(_ANSWER)
            if not answer:
                raise InputError("the chat template does not show an answer that opens the conversation")
            return before
        uses_tools = bool(tools) or any(one["role"] == "tool" or one.get("tool_calls") for one in messages)
        if uses_tools and not self.native_tools:
            messages, tools = tools_as_text(messages, tools), ()
        elif self._needs_ids:
            messages = with_short_ids(messages)
        messages = [self.with_reasoning(message) for message in messages]
        if self.folds_system and [one["role"] for one in messages[:2]] == ["system", "user"]:
            texts = [one["content"] for one in messages[:2]]
            if all(isinstance(text, str) for text in texts):
                messages = [{**messages[1], "content": "\n\n".join(texts)}, *messages[2:]]
        return self._templated(messages, list(tools) or None, answering)

    # -- tools --------------------------------------------------------------------------------------------------------

    @cached_property
    def native_tools(self) -> bool:
        """Whether the template shows tools, calls and results itself."""
        return self._shows_calls(1)

    @cached_property
    def several_calls(self) -> bool:
        """Whether the template supports several calls in an answer (Llama 3's does not)."""
        return not self.native_tools or self._shows_calls(2)

    @cached_property
    def _needs_ids(self) -> bool:
        """Whether the template refuses ids of calls that are not nine letters and digits (Mistral)."""
        return self.native_tools and not self._shows_calls(1, "call_")

    def _shows_calls(self, count: int, prefix: str = "") -> bool:
        ids = [prefix + call_id(0, index) for index in range(count)]
        calls = [ToolCall(_PROBE, {"x": f"{_PROBE}_argument_{i}"}).message(id) for i, id in enumerate(ids)]
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        for index, call in enumerate(calls):
            result = f"{_PROBE}_result_{index}"
            messages.append({"role": "tool", "name": _PROBE, "tool_call_id": call["id"], "content": result})
        try:
            shown = self._templated(messages, [schema(f"{_PROBE}_tool", "A probe.", {})], True)
        except InputError:
            return False
        parts = [f"{_PROBE}_{part}_{index}" for part in ("argument", "result") for index in range(count)]
        return all(part in shown for part in (f"{_PROBE}_tool", *parts))

    @cached_property
    def tool_syntax(self) -> str:
        """The syntax of calls, a key of `SYNTAXES`."""
        template = self.tokenizer.get_chat_template() if self.native_tools else ""
        if "[TOOL_CALLS]" in template:
            return "mistral"
        if "<tool_call>" not in template and '"parameters"' in template:
            return "llama"
        return "hermes"

    def parse(self, answer: str, tools: Sequence[Tool] = ()) -> ParsedAnswer:
        """Return the text and the calls of an answer: by the tokenizer's response template if it has one, else by the
        syntax of the chat template. A response template casts arguments to the types that `tools` declare."""
        if self.native_tools and getattr(self.tokenizer, "response_template", None):
            return parse_response(self.tokenizer, answer, self._opening[1], tools)
        return SYNTAXES[self.tool_syntax](answer)

    def call_message(self, answer: str, parsed: ParsedAnswer, turn: int) -> Message:
        """Return an answer as a message: with `tool_calls` where the template can show all of them, else as text."""
        if not parsed.calls or parsed.errors or (len(parsed.calls) > 1 and not self.several_calls):
            return {"role": "assistant", "content": answer}
        return parsed.message(turn)

    @cached_property
    def folds_system(self) -> bool:
        """Whether the template has no system role, so that system messages are prepended to the first user message."""
        try:
            asked = [{"role": "system", "content": _ANSWER}, {"role": "user", "content": "x"}]
            return _ANSWER not in self._templated(asked, None, True)
        except InputError:
            return True

    def _templated(self, messages: list[Message], tools: list[Any] | None, answering: bool) -> str:
        """Return the text of the template, with the marks of `TextEncoder`. InputError for an image if none can be read."""
        if not hasattr(self.tokenizer, "images") and any(MARK.search(str(one.get("content"))) for one in messages):
            raise InputError(
                f"a message has an image, and {self.tokenizer.name_or_path} reads text only; set model.path to a model that "
                f"reads images, or remove the image{more()}"
            )
        marked, marked_tools = self.marked(messages), self.marked(tools)
        text = self._applied(marked, marked_tools, answering)
        return text if (marked, marked_tools) == (messages, tools) else TextEncoder.unescaped(text)

    def _applied(self, messages: list[Message], tools: list[Any] | None, answering: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=answering
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"the chat template of {self.tokenizer.name_or_path} cannot render a conversation of roles {roles} "
                f"({type(error).__name__}: {error}); set another template in model.chat_template"
            ) from error

    # -- tokens -------------------------------------------------------------------------------------------------------

    @cached_property
    def _encoder(self) -> TextEncoder:
        written: set[int] = set()
        for roles in (("user",), ("user", "assistant", "user"), ("system", "user")):
            with suppress(InputError):
                text = self._applied([{"role": role, "content": "x"} for role in roles], None, True)
                written.update(self.document(text))
        return TextEncoder(self.tokenizer, written | self.end_tokens)

    def encode(self, text: str, after: str = "") -> list[int]:
        """Return the token ids of rendered text that continues the rendered text `after`."""
        return self._encoder.encode(text, after)

    def marked(self, value: Any) -> Any:
        """Return a text, or the texts in a value, as part of rendered text: control tokens in it are text."""
        return self._encoder.marked(value)

    def document(self, text: str) -> list[int]:
        """Return the tokens of a text that is no message. Control tokens in it are control tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def end(self) -> int:
        """The token that ends an answer in rows and written episodes."""
        return end_token_of(self.tokenizer, self.end_tokens)

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder
        return either(added[token].content for token in self.end_tokens if token in added)

    @cached_property
    def closing(self) -> re.Pattern[str]:
        """The end of a rendered answer: its end token, as group 1, and what the template writes behind it."""
        return re.compile(rf"{self._ends.pattern}(?:\s|{self._ends.pattern})*\Z")

    def closes(self, text: str) -> re.Match[str] | None:
        """The end token, as group 1, at the start of rendered text that follows an answer; None if there is none."""
        return self._ends.match(text.removeprefix(self.before_end).lstrip())

    @cached_property
    def text_after_answers(self) -> str:
        """What the template writes after the last answer of a conversation."""
        return _after_answer(self.tokenizer)[0]

    @cached_property
    def _opening(self) -> tuple[str, str]:
        """The white space that the template writes before an answer, and the rendered text before it."""
        asked = [{"role": "user", "content": "x"}]
        prompt = self.text(asked)
        answered = self.text([*asked, {"role": "assistant", "content": _ANSWER}], answering=False)
        before = answered.removeprefix(prompt).partition(_ANSWER)[0]
        return before if before.isspace() else "", prompt

    @cached_property
    def before_end(self) -> str:
        """What the template writes between an answer and its end token: a space, or another token."""
        end = self.closing.search(self.text_after_answers)
        return self.text_after_answers[: end.start()] if end else ""


def end_token_of(tokenizer: Any, end_tokens: Collection[int] = ()) -> int:
    """The token that ends an answer: the one that the chat template writes, else the tokenizer's, else one of `end_tokens`.

    InputError if there is none.
    """
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    known = {*end_tokens, tokenizer.eos_token_id}
    for text in _after_answer(tokenizer)[::-1]:
        written = [added[match[1]] for match in either(added).finditer(text)]
        if written:
            return next((token for token in written if token in known), written[-1])
    if tokenizer.eos_token_id is None and not end_tokens:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} has no eos token, and its chat template ends answers without a token; "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(end_tokens)


def _after_answer(tokenizer: Any) -> tuple[str, str]:
    """What the chat template writes after the last answer of a conversation, and after every answer."""
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    texts = []
    for messages in (answered, [*answered, answered[0]]):
        with suppress(Exception):  # a template that refuses conversations is reported by Renderer
            _, answer, text = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(_ANSWER)
            texts += [text] if answer else []
    return (texts[0], os.path.commonprefix(texts)) if texts else ("", "")  # noqa: RUF071 (these are no paths)


LossOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class TokenStream:
    """T tokens with their loss mask."""

    ids: np.ndarray
    """[T] int64."""
    trained: np.ndarray
    """[T] bool."""
    incomplete: bool = False
    """Whether the template leaves out text of an answer with loss, or of another message before it."""

    def cut(self, length: int) -> "TokenStream":
        """Return the first `length` tokens, without an image of which some would be left out."""
        length = whole_images(self.ids, 0, length)
        return replace(self, ids=self.ids[:length], trained=self.trained[:length])


def render_conversation(
    renderer: Renderer,
    messages: Sequence[Message],
    loss_on: LossOn,
    tools: Sequence[Tool] | None = None,
    first: int = 0,
) -> list[TokenStream]:
    """Return the streams of a conversation, in order. Each has at least one trained token.

    An answer is the rendered text of an assistant message up to and including its end token. A leading text given by
    the message's key `primer` is context and not trained.

    Args:
        loss_on: `assistant` trains every answer, `last_assistant` the last one, `all` every token but the first.
        tools: tool descriptions for the template.
        first: index of the first message that may be trained. Messages with `"train": false` are never trained.

    Raises:
        InputError: the template rejects the conversation, or does not show its tool calls as answers.
    """
    tools = tools or ()
    plain = [{key: value for key, value in message.items() if key not in ("train", "primer")} for message in messages]
    if loss_on == "all":
        text = renderer.text(plain, tools, answering=False)
        ids = renderer.encode(text)
        complete = all(_shows(renderer, text, message, message["role"] != "tool") for message in plain)
        return _token_streams(renderer, [(ids, [index > 0 for index in range(len(ids))])], complete)
    trained = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and index >= first and message.get("train", True)
    ]
    if loss_on == "last_assistant":
        trained = trained[-1:]
    streams: list[tuple[list[int], list[bool]]] = []
    ended: str | None = None
    complete = True
    for index in trained:
        primer = messages[index].get("primer", "")
        prompt = renderer.text(plain[:index], tools) + renderer.marked(primer)
        if ended is not None and prompt.startswith(ended):
            before = renderer.encode(prompt[len(ended) :], ended)
        else:
            streams.append(([], []))
            before = renderer.encode(prompt)
        ids, mask = streams[-1]
        answer, ended, shown = _answer(renderer, plain[: index + 1], tools, prompt, primer)
        ids += [*before, *answer]
        mask += [False] * len(before) + [True] * len(answer)
        complete &= shown and (index < trained[-1] or all(_shows(renderer, prompt, one) for one in plain[:index]))
    return _token_streams(renderer, streams, complete)


def _answer(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool], prompt: str, primer: str
) -> tuple[list[int], str | None, bool]:
    """Return the tokens of the last message as an answer to `prompt`, the rendered text up to its end token, and whether
    the template shows all of the answer.

    The text is None if the template does not end the answer with an end token. The stream then ends.
    """
    rendered = renderer.text(messages, tools, answering=False)
    if not rendered.startswith(prompt):
        # The template changes this answer, so its text is used as written.
        if messages[-1].get("tool_calls"):
            raise InputError(
                f"the template does not show the tool calls of message {len(messages)} as an answer to the messages before it"
            )
        text = renderer.with_reasoning(messages[-1]).get("content") or ""
        if prompt.rstrip().endswith("<think>") and text.lstrip().startswith("<think>"):  # DeepSeek R1
            text = text.lstrip().removeprefix("<think>").lstrip("\n")
        text = text.removeprefix(primer)
        end = renderer.tokenizer.convert_ids_to_tokens(renderer.end)
        return renderer.answer(text, prompt), prompt + renderer.marked(text) + end, True
    answer = rendered[len(prompt) :]
    shown = _shows(renderer, primer + answer, messages[-1], trained=True)
    if end := renderer.closing.search(answer):
        answer = answer[: end.end(1)]
        return renderer.encode(answer, prompt), prompt + answer, shown
    return [*renderer.encode(answer.removesuffix(renderer.text_after_answers), prompt), renderer.end], None, shown


def _shows(renderer: Renderer, rendered: str, message: Message, trained: bool = False) -> bool:
    """Whether rendered text has the text of a message, apart from white space and the tags of thinking. Results of tools and
    answers that are not `trained` may be shown in another form."""
    texts = [str(message.get("content") or ""), reasoning_of(message) if renderer.reasoning_form else ""]
    checked = trained or message["role"] in ("system", "user")
    parts = [part for text in texts for part in MARK.split(text)]
    return not checked or all(
        _FORMATTING.sub("", renderer.marked(part)) in _FORMATTING.sub("", rendered) for part in parts
    )


def _token_streams(
    renderer: Renderer, streams: Sequence[tuple[list[int], list[bool]]], complete: bool
) -> list[TokenStream]:
    made = []
    for ids, mask in streams:
        tokens = np.array(ids, dtype=np.int64)  # a policy samples none of those that are written for an image
        written = renderer.tokenizer.images.around(tokens) if (tokens >= FIRST).any() else [False] * len(ids)
        made.append(TokenStream(tokens, np.array(mask, dtype=bool) & np.logical_not(written), not complete))
    return [stream for stream in made if stream.trained.any()]
