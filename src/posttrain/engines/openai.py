"""Chat completions of OpenAI-compatible servers, and the one kind of fault they have."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.errors import InputError
from posttrain.plugins import require_module


class RequestRate:
    """Lets one request through every 60 / `per_minute` seconds; the others wait for their turn."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, *_: object) -> None:
        """Return when the next request may be sent."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._gap
        time.sleep(turn - now)


_CUT_OFF = ("length", "content_filter")
"""Finish reasons of a text that its model had not ended."""
_STOPPED_AT = ("stop_reason", "matched_stop")
"""Where vLLM and SGLang say at which stop string a text ended; not part of the OpenAI protocol."""
_REFUSES_FIELDS = (400, 422)
"""Statuses with which a server refuses a request for what is in it."""


@lru_cache(maxsize=8)
def chat_client(
    what: str,
    url: str,
    seconds: float,
    retries: int,
    api_key_variable: str | None,
    requests_per_minute: float | None = None,
) -> Any:
    """The client of a server, one for all threads. `what`: the section of the recipe that names it, for messages;
    `seconds` limits a call; `requests_per_minute` limits all requests together, those of retries included. InputError
    where the package is missing, or the key is named and not set."""
    openai = require_module("openai", what)
    key = "none"
    if api_key_variable is not None:
        key = os.environ.get(api_key_variable, "")
        if not key:
            raise InputError(f"{what}.api_key_variable names {api_key_variable}, which is not set; export it")
    http = None
    if requests_per_minute is not None:
        http = openai.DefaultHttpxClient(event_hooks={"request": [RequestRate(requests_per_minute).wait]})
    return openai.OpenAI(base_url=url, api_key=key, timeout=seconds, max_retries=retries, http_client=http)


class RemoteFailure(Exception):
    """A server gave no chat completion. The message is one sentence that names the model, the server and the fault."""


@dataclass(frozen=True)
class Written:
    """What a model behind a server wrote."""

    text: str
    """The content of its message; empty where the server sent none."""
    tokens: int | None
    """Tokens written, thoughts included, as the server counts them; None where it does not say."""
    ended: bool
    """Whether the model came to an end by itself or at a stop string; False where a limit or a filter cut it off."""
    thoughts: str = ""
    """What the server gives as thinking apart from the text (`reasoning_content` or `reasoning`)."""
    stopped_at: str | None = None
    """The stop string that ended the text, which the text does not hold; empty where the server says that none did,
    None where it does not say."""

    def with_thoughts(self) -> str:
        """The text with the thoughts in front of it as a block `<think>…</think>`, unless it begins with one of its
        own; the block stays open where a limit cut the model off before it wrote any text."""
        if not self.thoughts or self.text.lstrip().startswith("<think>"):
            return self.text
        closed = self.ended or self.text
        return f"<think>{self.thoughts}</think>{self.text}" if closed else f"<think>{self.thoughts}"


def complete(
    what: str,
    client: Any,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Written:
    """One chat completion of `model`. `client` is that of `chat_client`; `what` says in messages who the model is.

    A field that is None or empty is not sent. `extra`: further fields of the request, as JSON. The client asks again
    by itself after a time-out, a lost connection, or an answer of status 408, 409, 429 or 5xx. Raises RemoteFailure
    for every fault that is left: a status, no answer in time, nobody there, or an answer of another shape. A server
    that refuses a request is not asked again without the refused field; the message names the fields that were sent.
    """
    import openai

    limits = {"temperature": temperature, "max_tokens": max_tokens, "stop": list(stop) or None, "seed": seed}
    sent = {name: value for name, value in limits.items() if value is not None}
    where = f"{what} {model} at {str(client.base_url).rstrip('/')}"
    try:
        answer = client.chat.completions.create(
            model=model, messages=list(messages), **sent, extra_body=dict(extra) if extra else None
        )
    except openai.APIStatusError as error:
        fields = ", ".join([*sent, *(extra or {})])
        asked = (
            f"; besides the messages it was sent {fields}" if error.status_code in _REFUSES_FIELDS and fields else ""
        )
        raise RemoteFailure(
            f"{where} answered with status {error.status_code}: {shortened(str(error))}{asked}"
        ) from error
    except openai.APITimeoutError as error:
        raise RemoteFailure(f"{where} did not answer within {client.timeout:g} s") from error
    except (openai.OpenAIError, ValueError) as error:
        raise RemoteFailure(f"{where} cannot be understood or reached: {shortened(_cause(error))}") from error
    return _written(answer, where)


def shortened(text: str) -> str:
    """The first 200 characters of `text`, for messages."""
    return text if len(text) <= 200 else text[:200] + " …"


def _written(answer: Any, where: str) -> Written:
    """The parts of an answer that is a chat completion; RemoteFailure where it is none."""
    try:
        choice = answer.choices[0]
        message, reason = choice.message, choice.finish_reason
        text = message.content
    except (AttributeError, IndexError, TypeError) as error:
        raise RemoteFailure(f"{where} sent no chat completion: {shortened(str(answer))}") from error
    if text is not None and not isinstance(text, str):
        raise RemoteFailure(f"{where} sent no chat completion: its content is {shortened(repr(text))}")
    thoughts = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    further = getattr(choice, "model_extra", None) or {}
    told = [further[name] for name in _STOPPED_AT if name in further]
    tokens = getattr(getattr(answer, "usage", None), "completion_tokens", None)
    return Written(
        text or "",
        tokens if isinstance(tokens, int) and tokens >= 0 else None,
        reason not in _CUT_OFF,
        thoughts if isinstance(thoughts, str) else "",
        # A number is the id of an end token.
        (told[0] if isinstance(told[0], str) else "") if told else None,
    )


def _cause(error: Exception) -> str:
    """What the client says, and what it does not say of the error below it."""
    below = error.__cause__
    return f"{error} ({below})" if below is not None and str(below) else str(error)
