"""The one renderer: chat messages to tokens, for supervised traces, rollouts, evaluation and serving alike.

An observation becomes tokens once, by taking what the chat template puts around it. Answers are token ids and stay
so: the template is never asked to render an answer that was sampled, except where it rewrites history anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from posttrain.errors import InputError

Message = dict[str, Any]

_ANSWER = "POSTTRAIN-ANSWER"
_THOUGHT = "<think>\nfirst thought\n</think>\n\n"


class Renderer:
    """Chat messages to token ids with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        """`end_tokens`: the ids that end an answer; `InputError` if the template cannot render a conversation."""
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        if _ANSWER not in self._templated([{"role": "user", "content": _ANSWER}], None, True):
            raise InputError(
                f"the chat template of {tokenizer.name_or_path} leaves out messages that are plain text (it may be one for "
                "images); name another template in model.chat_template"
            )
        self.rewrites_answers = not self._keeps_history("a plain answer")
        """The template changes plain earlier answers: every turn needs a stream of its own."""
        self.rewrites_thoughts = not self._keeps_history(_THOUGHT + "an answer")
        """The template changes earlier answers that hold thinking (Qwen3 and DeepSeek drop it)."""

    def prompt(self, messages: Sequence[Message], primer: str = "") -> list[int]:
        """Tokens of a conversation up to where the policy answers; `primer` is text put in its mouth."""
        return self.encode(self.text(messages) + primer)

    def continuation(self, messages: Sequence[Message], ended: bool, primer: str = "") -> list[int]:
        """Tokens between an answer and the next one: the end of the answer, `messages`, and the start of the next.

        `ended`: the answer's last token was an end token, which then is not repeated.
        """
        text = self.text([{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}, *messages])
        ids = self.encode(text.partition(_ANSWER)[2] + primer)
        return ids[1:] if ended and ids and ids[0] in self.end_tokens else ids

    def answer(self, text: str) -> list[int]:
        """Tokens of a written answer, with the end token that a policy would sample."""
        return [*self.encode(text), self.tokenizer.eos_token_id]

    def answer_text(self, ids: Sequence[int]) -> str:
        """A sampled answer as text, without its end token."""
        kept = ids[:-1] if ids and ids[-1] in self.end_tokens else ids
        return self.tokenizer.decode(list(kept), skip_special_tokens=False)

    def remarks(self) -> list[str]:
        """What the template does to conversations that a user should know."""
        folded = (
            "the chat template has no system role, so a system message stands at the head of the first user message"
        )
        return [folded] if self.folds_system else []

    def must_split(self, answer: str) -> bool:
        """Whether the template would change `answer` once it is history, so that the next turn starts a new stream."""
        return self.rewrites_answers or (self.rewrites_thoughts and "</think>" in answer)

    def _keeps_history(self, answer: str) -> bool:
        first = [{"role": "user", "content": "first"}]
        later = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "second"}]
        return self.text(later).startswith(self.text(first) + answer)

    def text(self, messages: Sequence[Message], tools: list[Any] | None = None, answering: bool = True) -> str:
        """What the chat template makes of `messages`; `answering`: up to where the policy's next answer begins."""
        shown = _folded(messages) if self.folds_system else list(messages)
        return self._templated(shown, tools, answering)

    @cached_property
    def folds_system(self) -> bool:
        """The template has no place for a system message, which then stands at the head of the first user message."""
        try:
            text = self._templated(
                [{"role": "system", "content": _ANSWER}, {"role": "user", "content": "x"}], None, True
            )
        except InputError:
            return True
        return _ANSWER not in text

    def _templated(self, messages: list[Message], tools: list[Any] | None, answering: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=answering
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"the chat template of {self.tokenizer.name_or_path} cannot render a conversation of roles {roles} "
                f"({type(error).__name__}: {error}); name another template in model.chat_template"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of text that already holds what the template puts around it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _folded(messages: Sequence[Message]) -> list[Message]:
    """The messages with a leading system message at the head of the user's message after it."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return list(messages)
    system, user = messages[0]["content"], messages[1]["content"]
    if not (isinstance(system, str) and isinstance(user, str)):
        return list(messages)
    return [{**messages[1], "content": f"{system}\n\n{user}"}, *messages[2:]]


LossOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class TokenStream:
    """T tokens and which of them are trained."""

    ids: np.ndarray
    """[T] int64."""
    trained: np.ndarray
    """[T] bool."""

    def cut(self, length: int) -> "TokenStream":
        """The first `length` tokens."""
        return TokenStream(self.ids[:length], self.trained[:length])


def render_conversation(
    renderer: Renderer, messages: Sequence[Message], loss_on: LossOn, tools: list[Any] | None = None, first: int = 0
) -> list[TokenStream]:
    """The streams of a conversation, in order; each has a trained token.

    `loss_on`: `assistant` trains every answer, `last_assistant` the last one, `all` every token that has one before
    it. Messages before index `first`, and those with `"train": false`, are never trained. An answer is what the
    template makes of the message, up to its end token; what its key `primer` says it begins with is context, not
    trained. InputError where the template refuses the conversation.
    """
    plain = [{key: value for key, value in message.items() if key not in ("train", "primer")} for message in messages]
    if loss_on == "all":
        ids = renderer.encode(renderer.text(plain, tools, answering=False))
        return _finished([(ids, [place > 0 for place in range(len(ids))])])
    if tools and renderer.text(plain, tools) == renderer.text(plain):
        raise InputError("the template shows nothing of the tools")
    trained = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place >= first and message.get("train", True)
    ]
    if loss_on == "last_assistant":
        trained = trained[-1:]
    streams: list[tuple[list[int], list[bool]]] = []
    said: str | None = None
    left = ""
    for place in trained:
        prompt = renderer.text(plain[:place], tools) + messages[place].get("primer", "")
        if said is not None and prompt.startswith(said):
            before = renderer.encode(left + prompt[len(said) :])
        else:
            streams.append(([], []))
            before = renderer.encode(prompt)
        ids, mask = streams[-1]
        answer, said, left = _answer(renderer, plain[: place + 1], tools, prompt, messages[place].get("primer", ""))
        if len(answer) < 2 and messages[place].get("tool_calls"):
            raise InputError(f"the template shows nothing of message {place + 1}; it may not know tool calls")
        ids += [*before, *answer]
        mask += [False] * len(before) + [True] * len(answer)
    return _finished(streams)


def _answer(
    renderer: Renderer, messages: Sequence[Message], tools: list[Any] | None, prompt: str, primer: str
) -> tuple[list[int], str | None, str]:
    """Tokens of the last message as an answer to `prompt`; the text so far; and how much of it follows the end token.

    The text is None where the template ends an answer otherwise than the policy: nothing can follow such an answer.
    """
    tokenizer = renderer.tokenizer
    whole = renderer.text(messages, tools, answering=False)
    if not whole.startswith(prompt):
        # The template does not show an answer the way it is given, so it is taken as written.
        written = _without_open_thought(messages[-1].get("content") or "", prompt).removeprefix(primer)
        end = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
        return renderer.answer(written), prompt + written + end, ""
    rest = whole[len(prompt) :]
    encoded = tokenizer(rest, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    ends = [place for place, token in enumerate(ids) if token in renderer.end_tokens]
    if not ends:
        return [*ids, tokenizer.eos_token_id], None, ""
    return ids[: ends[-1] + 1], whole, rest[encoded["offset_mapping"][ends[-1]][1] :]


def _without_open_thought(content: str, prompt: str) -> str:
    """`content` without an opening tag that the prompt has already given (DeepSeek R1)."""
    opened = prompt.rstrip().endswith("<think>") and content.lstrip().startswith("<think>")
    return content.lstrip().removeprefix("<think>").lstrip("\n") if opened else content


def _finished(streams: Sequence[tuple[list[int], list[bool]]]) -> list[TokenStream]:
    made = [TokenStream(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool)) for ids, mask in streams]
    return [stream for stream in made if stream.trained.any()]
