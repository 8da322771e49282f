"""Written conversations as token streams with loss masks, rendered as the policy would meet them.

Each answer that is trained follows exactly the tokens that `Renderer.prompt` gives for what comes before it, so a
model is taught in the context in which it will answer. Where a chat template rewrites history (Qwen3 and DeepSeek
drop earlier thinking), the answers of one conversation stand in several streams, each with the history of its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from posttrain.data.rendering import Message, Renderer
from posttrain.errors import InputError

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
