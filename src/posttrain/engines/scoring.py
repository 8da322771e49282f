"""Log-probabilities of given tokens from a model behind a server, using its completions endpoint with token ids as
prompt."""

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.engines.openai import ChatRequestError, chat_client, request_errors, require_same_model, shortened
from posttrain.errors import InputError
from posttrain.recipe.teacher import TeacherRecipe

_PROBED = 48
"""Number of tokens whose text is compared with the server's when a run starts."""
_ID = "token_id:"
"""Prefix of token names from servers that name tokens by their ids (`return_tokens_as_token_ids` of vLLM)."""
_MARKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
"""Characters that represent white space in the names of tokens."""


@dataclass(frozen=True)
class ScoredPrompt:
    """Log-probabilities in nats of the T tokens of a prompt, except the first."""

    logprobs: list[float]
    """[T]; NaN for the first token."""
    top: list[dict[int, float]]
    """[T]: token id -> log-probability of the most probable tokens; empty for the first token."""
    texts: list[str | None]
    """[T]: the text of each token according to the server; None if it does not report the text."""


class ScoringServers:
    """Servers with one model, which score prompts. Requests go to the servers in turn, several at a time."""

    def __init__(self, recipe: TeacherRecipe) -> None:
        """InputError if the package openai or an API key is missing."""
        self.recipe = recipe
        settings = (recipe.timeout, recipe.retries, recipe.api_key_variable)
        # 32,000 tokens, each with 64 log-probabilities, are about 150 MiB.
        self._clients = [chat_client("teacher", url, *settings, response_mib=256) for url in recipe.urls]
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._model = recipe.model

    def score(self, prompts: Sequence[Sequence[int]], top: int) -> list[ScoredPrompt | ChatRequestError]:
        """Score token ids, with the `top` most probable tokens at each position. Returns the error of a failed request."""

        def scored(ids: Sequence[int]) -> ScoredPrompt | ChatRequestError:
            with self._lock:
                client = self._clients[next(self._turn) % len(self._clients)]
            try:
                return self._score(client, list(ids), top)
            except ChatRequestError as error:
                return error

        with ThreadPoolExecutor(self.recipe.max_concurrent) as threads:
            return list(threads.map(scored, prompts))

    def check_tokenizer(self, decode: Callable[[int], str], vocabulary: int) -> list[str]:
        """Compare the texts of some tokens with `decode` of their ids; returns a warning if a server reports no texts.

        Raises:
            InputError: a text differs, so the teacher has another tokenizer; or a server does not answer.
        """
        ids: list[int] = []
        for token in dict.fromkeys(np.linspace(0, vocabulary - 1, 8 * _PROBED).astype(int).tolist()):
            word = decode(token)
            if len(word.strip()) > 1 and word.strip().isalnum() and word.isascii() and len(ids) < _PROBED:
                ids.append(token)
        unknown = False
        for url, client in zip(self.recipe.urls, self._clients, strict=True):
            try:
                answer = self._score(client, ids, 0)
            except ChatRequestError as error:
                raise InputError(f"teacher.urls: {error}") from error
            unknown |= all(text is None for text in answer.texts[1:])
            for token, text in list(zip(ids, answer.texts, strict=True))[1:]:
                if text is not None and text.translate(_MARKS).strip() != decode(token).strip():
                    raise InputError(
                        f"teacher.urls: the model at {url} does not have the tokenizer of the policy: token {token} is {text!r} "
                        f"there and {decode(token)!r} here; distill from a teacher with the policy's tokenizer"
                    )
        reason = "the server reports no text of tokens, so its tokenizer cannot be compared with the policy's"
        return [f"teacher.urls: {reason}"] if unknown else []

    def _score(self, client: Any, ids: list[int], top: int) -> ScoredPrompt:
        model = self._model_name(client)
        where = f"the teacher {model} at {str(client.base_url).rstrip('/')}"
        fields: dict[str, Any]
        if self.recipe.protocol == "prompt_logprobs":
            fields = {"max_tokens": 1, "extra_body": {"prompt_logprobs": top}}
        else:
            fields = {"max_tokens": 0, "echo": True, "logprobs": top}
            if top:
                fields["extra_body"] = {"return_tokens_as_token_ids": True}
        sent = [name for name in fields if name != "extra_body"] + list(fields.get("extra_body", {}))
        with request_errors(where, client, "the prompt", sent):
            response = client.completions.create(model=model, prompt=ids, temperature=1.0, **fields)
        require_same_model(client, model, response, where)
        read = _read_prompt_logprobs if self.recipe.protocol == "prompt_logprobs" else _read_echo
        try:
            scored = read(response.choices[0], ids)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ChatRequestError(
                f"{where} sent no log-probabilities of the prompt ({type(error).__name__}: {shortened(str(error))}); change "
                f"teacher.protocol or the server"
            ) from error
        fewest = min((len(entries) for entries in scored.top[1:]), default=top)
        if fewest < top:
            raise ChatRequestError(
                f"{where} sent {fewest} of the {top} most probable tokens; lower loss.top_k, or raise the server's limit "
                "(`--max-logprobs` of vLLM)"
            )
        return scored

    def _model_name(self, client: Any) -> str:
        with self._lock:
            if self._model is None:
                where, name = f"the teacher at {str(client.base_url).rstrip('/')}", None
                with request_errors(where, client, "", []):
                    listed = client.models.list()
                with suppress(AttributeError, LookupError, TypeError):
                    name = listed.data[0].id
                if not isinstance(name, str):
                    raise ChatRequestError(f"{where} lists no model; set teacher.model")
                self._model = name
            return self._model


def _read_prompt_logprobs(choice: Any, ids: list[int]) -> ScoredPrompt:
    """The field `prompt_logprobs` of vLLM: for each token except the first, id -> {logprob, rank, decoded_token}."""
    entries = choice.prompt_logprobs
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} entries for {len(ids)} tokens")
    logprobs, tops, texts = [math.nan], [dict[int, float]()], list[str | None]([None])
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        values = {int(key): _number(value["logprob"]) for key, value in entry.items()}
        logprobs.append(values[token])
        # The token itself is listed even if it is not among the most probable ones.
        tops.append(dict(sorted(values.items(), key=lambda item: (-item[1], item[0]))))
        texts.append(_text(entry[str(token)].get("decoded_token")))
    return ScoredPrompt(logprobs, tops, texts)


def _read_echo(choice: Any, ids: list[int]) -> ScoredPrompt:
    """The field `logprobs` of OpenAI completions with `echo`; tokens of `top_logprobs` are named by their ids."""
    returned = choice.logprobs
    logprobs = [math.nan, *(_number(value) for value in returned.token_logprobs[1 : len(ids)])]
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(ids)} tokens")
    listed: Sequence[Mapping[str, float] | None] = returned.top_logprobs or [None] * len(ids)
    named = [{}, *(entry or {} for entry in listed[1 : len(ids)])]
    tops = [{int(k.removeprefix(_ID)): _number(v) for k, v in entry.items() if k.startswith(_ID)} for entry in named]
    texts = [_text(value) for value in returned.tokens[: len(ids)]]
    if len(texts) != len(ids):
        raise ValueError(f"{len(texts)} texts for {len(ids)} tokens")
    return ScoredPrompt(logprobs, tops, texts)


def _text(value: Any) -> str | None:
    """The text of a token; None if the server does not report it or names the token by its id."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"the text of a token is {value!r}")
    return None if value is None or value.startswith(_ID) else value


def _number(value: Any) -> float:
    """A log-probability. ValueError if it is not a finite number, or above 0."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
        raise ValueError(f"the log-probability is {value!r}")
    return float(value)
