"""The one renderer: chat messages to tokens, for supervised traces, rollouts, evaluation and serving alike.

An observation becomes tokens once, by taking what the chat template puts around it. Answers are token ids and stay
so: the template is never asked to render an answer that was sampled, except where it rewrites history anyway.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

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
