"""The client of OpenAI-compatible servers, for judges and remote models. Every failed request is a
`ChatRequestError`."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.data.messages import UnusableRow, picture_url
from posttrain.engines.http import RESPONSE_MIB, bounded
from posttrain.errors import InputError
from posttrain.images import folders, parts_of
from posttrain.plugins import require_module
from posttrain.redaction import redact, without_secrets

_MALFORMED = (ValueError, TypeError, AttributeError, RecursionError)
"""Exceptions of the client for JSON of another form."""
_ANSWERING: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
"""Client -> model of the request -> the name in its first response."""


class RequestRate:
    """Rate limiter for all threads: one request every 60 / `per_minute` seconds."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, *_: object) -> None:
        """Block until the next request may be sent. Extra arguments are those of an HTTP event hook and unused."""
        with self._lock:
            now = time.monotonic()
            slot = max(now, self._next)
            self._next = slot + self._gap
        time.sleep(slot - now)


@lru_cache(maxsize=8)
def chat_client(
    what: str,
    url: str,
    seconds: float,
    retries: int,
    api_key_variable: str | None,
    requests_per_minute: float | None = None,
    response_mib: int = RESPONSE_MIB,
) -> Any:
    """The client of the server at `url`, shared by all threads.

    `what`: the recipe section that names the server, for messages. `seconds`: time-out of one request, from sending it
    to the end of the response. `requests_per_minute` limits all requests together, including retries. `response_mib`:
    largest response in MiB. Raises InputError if the package openai is missing, or if the environment variable
    `api_key_variable` is not set.
    """
    openai = require_module("openai", what)
    key = "none"
    if api_key_variable is not None:
        if not (key := os.environ.get(api_key_variable, "")):
            raise InputError(f"{what}.api_key_variable names {api_key_variable}, which is not set; export it")
        redact(key)
    hooks = [RequestRate(requests_per_minute).wait] if requests_per_minute is not None else []
    http = bounded(openai.DefaultHttpxClient(event_hooks={"request": hooks}), response_mib)
    return openai.OpenAI(base_url=url, api_key=key, timeout=seconds, max_retries=retries, http_client=http)


def require_reachable(what: str, client: Any) -> None:
    """InputError if no server responds at the address of `client`; any response will do. `what`: the recipe section."""
    import openai

    try:
        client.with_options(timeout=30.0, max_retries=0).models.list()
    except openai.APIConnectionError as error:
        address = str(client.base_url).rstrip("/")
        raise InputError(
            f"{what}.url: no server answers at {address}: {shortened(_cause(error))}; start the server, or correct the address"
        ) from error
    except (openai.OpenAIError, *_MALFORMED):
        return  # Any response counts, even an error status of the list of models.


class ChatRequestError(Exception):
    """A server did not return a completion. The message names the model, the server and the cause."""

    def __init__(self, reason: str, rejected: bool = False) -> None:
        super().__init__(without_secrets(reason))
        self.rejected = rejected
        """Whether the server may have rejected a field of the request."""


@dataclass(frozen=True)
class ChatCompletion:
    """The completion of a chat model behind a server."""

    text: str
    """Content of the message; empty if the server sent none."""
    tokens: int | None
    """Number of sampled tokens, including reasoning, as counted by the server; None if it does not report it."""
    finished: bool
    """Whether the model ended the text itself or at a stop string; False if a limit or a filter cut it off."""
    reasoning: str = ""
    """Reasoning that the server returns separately from the text (`reasoning_content` or `reasoning`)."""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (JSON text) of each tool call, as the server parsed them."""

    def text_with_reasoning(self) -> str:
        """The text preceded by the reasoning as a `<think>…</think>` block, unless the text begins with such a block.
        The block stays open if the model was cut off before it wrote any text."""
        if not self.reasoning or self.text.lstrip().startswith("<think>"):
            return self.text
        end = "</think>" if self.finished or self.text else ""
        return f"<think>{self.reasoning}{end}{self.text}"


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
) -> ChatCompletion:
    """Request one chat completion of `model`.

    `client` comes from `chat_client`. `what` describes the model in messages. Fields that are None or empty are not
    sent; `extra` holds further JSON fields of the request. The client retries after time-outs, lost connections, and
    responses of status 408, 409, 429 or 5xx. Raises ChatRequestError for every other failure: an error status, a
    time-out, an unreachable server, or a response that is not a chat completion. A rejected field is not dropped and
    retried; the message names the fields that were sent.
    """
    limits = {"temperature": temperature, "max_tokens": max_tokens, "stop": list(stop) or None, "seed": seed}
    sent = {name: value for name, value in limits.items() if value is not None}
    where = f"{what} {model} at {str(client.base_url).rstrip('/')}"
    with request_errors(where, client, "the messages", [*sent, *(extra or {})]):
        response = client.chat.completions.create(
            model=model, messages=list(map(for_servers, messages)), **sent, extra_body=dict(extra) if extra else None
        )
    require_same_model(client, model, response, where)
    return _completion(response, where)


def for_servers(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form of OpenAI-compatible servers, with its images as parts. InputError for one that is not stored, or
    altered."""
    parts = parts_of(message.get("content"))
    if parts is message.get("content"):
        return dict(message)
    shown = []
    for part in parts:
        if "key" not in part:
            shown.append({**part, "text": encodable(part["text"])})
            continue
        file = next((one for folder in folders() if (one := folder / f"{part['key']}.png").is_file()), None)
        if file is None:
            raise InputError(f"an image of a message is not stored; restore {part['key']}.png in {folders()[0]}")
        try:
            url = picture_url(part["key"], file.read_bytes())
        except UnusableRow as error:
            raise InputError(f"{file}: {error}") from error
        shown.append({"type": "image_url", "image_url": {"url": url}})
    return {**message, "content": shown}


def require_same_model(client: Any, asked: str, response: Any, where: str) -> None:
    """ChatRequestError unless the response names the model of the first response of `client` to `asked` in this
    process. The first name may differ from `asked`, which may be an alias."""
    name = getattr(response, "model", None)
    if isinstance(name, str) and name != (first := _ANSWERING.setdefault(client, {}).setdefault(asked, name)):
        raise ChatRequestError(
            f"{where} answered as the model {shortened(first)} and now answers as {shortened(name)}; start the first again"
        )


@contextmanager
def request_errors(where: str, client: Any, content: str, fields: Sequence[str]) -> Iterator[None]:
    """Raise ChatRequestError for every failure of a request inside the block. `where`: the model and its server.
    `content`, `fields`: the content and fields of the request, for the message if the server rejects it."""
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        rejected = error.status_code in (400, 422) and bool(fields)
        hint = f"; besides {content} it was sent {', '.join(fields)}" if rejected else ""
        raise ChatRequestError(
            f"{where} responded with status {error.status_code}: {shortened(str(error))}{hint}", rejected
        ) from error
    except openai.APITimeoutError as error:
        raise ChatRequestError(f"{where} did not respond within {client.timeout:g} s") from error
    except RecursionError as error:
        raise ChatRequestError(f"{where} sent JSON that is nested too deep") from error
    except (openai.OpenAIError, *_MALFORMED) as error:
        raise ChatRequestError(f"{where} cannot be reached or understood: {shortened(_cause(error))}") from error


def shortened(text: str) -> str:
    """The first 200 characters of `text`, for messages, without secrets."""
    text = without_secrets(text[:10_000])
    return text if len(text) <= 200 else text[:200] + " …"


def encodable(text: str) -> str:
    """`text` with `?` for lone surrogates, which JSON can represent but UTF-8 files cannot."""
    return text.encode(errors="replace").decode()


def _completion(response: Any, where: str) -> ChatCompletion:
    """Read the response of a server; ChatRequestError if it is not a chat completion."""
    try:
        choice = response.choices[0]
        message, reason, text = choice.message, choice.finish_reason, choice.message.content
        functions = [getattr(call, "function", None) for call in getattr(message, "tool_calls", None) or ()]
        names = [encodable(str(getattr(function, "name", ""))) for function in functions]
        arguments = [encodable(str(getattr(function, "arguments", "") or "{}")) for function in functions]
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ChatRequestError(f"{where} sent no chat completion: {shortened(str(response))}") from error
    if text is not None and not isinstance(text, str):
        raise ChatRequestError(f"{where} sent no chat completion: its content is {shortened(repr(text))}")
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    tokens = getattr(getattr(response, "usage", None), "completion_tokens", None)
    return ChatCompletion(
        encodable(text or ""),
        tokens if isinstance(tokens, int) and tokens >= 0 else None,
        reason not in ("length", "content_filter"),
        encodable(reasoning) if isinstance(reasoning, str) else "",
        tuple(zip(names, arguments, strict=True)),
    )


def _cause(error: Exception) -> str:
    """The client's message, followed by that of the underlying error."""
    cause = error.__cause__
    return f"{error} ({cause})" if cause is not None and str(cause) else str(error)
