"""Scores from a language model behind an OpenAI-compatible server.

The text to grade comes from a policy that is trained on the score. It is therefore framed (`environments.untrusted`),
and a reply that does not have exactly the requested form is a failure, never a score.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from posttrain.data.messages import unique
from posttrain.engines.openai import ChatRequestError, chat_client, complete, encodable, require_reachable, shortened
from posttrain.environments.protocol import Message
from posttrain.environments.untrusted import Prompt, Texts, framed_prompt
from posttrain.errors import InputError
from posttrain.recipe.judge import JudgeRecipe, JudgeServerRecipe
from posttrain.runs.directory import LineLog

_CONVERSATION = "You grade one answer. The conversation and the answer to it stand in frames"
_REASON = '"reason": "one sentence"'
_REMEDY = (
    "; for a reasoning model set sampling.temperature to null and token_limit_field to max_completion_tokens, which "
    "changes the fields that are sent"
)


class JudgeFailure(Exception):
    """The judge returned no score: the server failed, or its reply does not have the requested form."""

    def __init__(self, reason: str, unreadable: bool = False) -> None:
        super().__init__(reason)
        self.unreadable = unreadable
        """The judge replied, but not in the requested form. A repeated request probably gives the same reply."""


@dataclass(frozen=True)
class Judgment:
    """The score of a reply, in the unit of its form, and the reason that the judge gives."""

    score: float
    reason: str


# -- forms of replies -------------------------------------------------------------------------------------------------


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


class ReplyForm(Protocol):
    """A form of reply: the request for it, and its reader."""

    identity: list[Any]
    """JSON values that identify the form in cache keys. They change whenever `read` accepts other replies."""
    instructions: str
    """The JSON object to reply with, described for the judge."""
    properties: dict[str, Any]
    """The JSON schema of each key. The reason comes first, so that the score is conditioned on it."""

    def read(self, reply: dict[str, Any]) -> float:
        """Return the score of a reply that has the last key of `properties`.

        Raises:
            ValueError: the reply is invalid. The message is a predicate of the judge ("gave the score 11, ...").
        """


class PointsReply(ReplyForm):
    """A number of points from `low` to `high`."""

    properties = {"reason": {"type": "string"}, "score": {"type": "integer"}}

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.identity = ["a JSON object with reason and score", *([low] if low else []), high]
        self.instructions = f'{{{_REASON}, "score": a whole number from {low} (worst) to {high} (best)}}'

    def read(self, reply: dict[str, Any]) -> float:
        points = reply["score"]
        is_number = isinstance(points, int | float) and not isinstance(points, bool)
        if not is_number or not self.low <= points <= self.high:
            raise ValueError(f"gave the score {_shown(points)}, which is not a number from {self.low} to {self.high}")
        return float(points)


class ClaimsReply(ReplyForm):
    """The claims of a text, each supported or not. The score is the share of supported claims, in [0, 1]."""

    identity = ["a JSON object with reason and claims"]
    instructions = f'{{{_REASON}, "claims": [{{"claim": "in a few words", "supported": true or false}}, and so on]}}'
    properties = {
        "reason": {"type": "string"},
        "claims": {
            "type": "array",
            "items": _object_schema({"claim": {"type": "string"}, "supported": {"type": "boolean"}}),
        },
    }

    def read(self, reply: dict[str, Any]) -> float:
        claims = reply["claims"]
        if not isinstance(claims, list) or not claims:
            raise ValueError(f"gave the claims {_shown(claims)}, which is not a non-empty list")
        for claim in claims:
            if not isinstance(claim, dict) or not isinstance(claim.get("supported"), bool):
                raise ValueError(f'gave the claim {_shown(claim)}, whose "supported" is not true or false')
        return sum(claim["supported"] for claim in claims) / len(claims)


class ChoiceReply(ReplyForm):
    """The better of two texts: 1 for the first, 0 for the second, 1/2 for a tie."""

    identity = ["a JSON object with reason and better"]
    instructions = f'{{{_REASON}, "better": "first" or "second" or "tie"}}'
    properties = {"reason": {"type": "string"}, "better": {"type": "string", "enum": ["first", "second", "tie"]}}

    def read(self, reply: dict[str, Any]) -> float:
        better = reply["better"]
        scores = {"first": 1.0, "second": 0.0, "tie": 0.5}
        if not isinstance(better, str) or better not in scores:
            raise ValueError(f'gave {_shown(better)} as the better text, which is not "first", "second" or "tie"')
        return scores[better]


def read_reply(text: str, form: ReplyForm) -> Judgment:
    """Read a reply: one JSON object, alone or alone in a code block.

    Raises:
        ValueError: the reply has another form. The message is a predicate of the judge.
    """
    fenced = re.fullmatch(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", text.strip(), re.DOTALL)
    score_key = list(form.properties)[-1]

    def refuse_constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    refusal = f'did not reply with one JSON object that has a "{score_key}": {shortened(text)}'
    try:
        content = fenced.group(1) if fenced else text
        reply = json.loads(content, object_pairs_hook=unique, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(refusal) from error
    if not isinstance(reply, dict) or score_key not in reply:
        raise ValueError(refusal)
    return Judgment(form.read(reply), encodable(str(reply.get("reason", ""))))


def _shown(value: Any) -> str:
    return shortened(repr(value))


# -- requests ---------------------------------------------------------------------------------------------------------


def judge_score(recipe: JudgeRecipe, messages: Sequence[Message], answer: str) -> float:
    """Return the judge's points for `answer` to `messages`, divided by `recipe.scale`: a number in [0, 1].

    Raises what `ask_judge` raises.
    """
    texts = [*((message["role"], message["content"]) for message in messages), ("answer", answer)]
    return judge_points(recipe, _CONVERSATION, recipe.rubric, recipe.scale, texts).score


def judge_points(server: JudgeServerRecipe, what: str, rubric: str, scale: int, texts: Texts) -> Judgment:
    """Ask for points from 0 to `scale`; the score is points / scale, in [0, 1]. The other arguments are those of
    `framed_prompt`. Raises what `ask_judge` raises.
    """
    form = PointsReply(0, scale)
    judgment = ask_judge(server, framed_prompt(what, rubric, form.instructions, texts), form)
    return Judgment(judgment.score / scale, judgment.reason)


def ask_judge(server: JudgeServerRecipe, prompt: Prompt, form: ReplyForm) -> Judgment:
    """Return the judge's reply to `prompt`, which asks for `form`, sampled with the settings of the recipe.

    A reply in the cache is used without a request.

    Raises:
        JudgeFailure: there is no reply after the retries of the recipe, or the reply does not have the form.
        InputError: the environment variable of the API key is not set.
    """
    judge = f"judge {server.model} at {server.url}"
    temperature, effort = server.sampling.temperature, server.sampling.reasoning_effort
    schema = {"name": "verdict", "strict": True, "schema": _object_schema(form.properties)}
    extra = {
        "response_format": {"type": "json_schema", "json_schema": schema} if server.structured else None,
        "reasoning_effort": effort,
        server.token_limit_field: server.max_tokens,
    }
    extra = {name: value for name, value in extra.items() if value is not None}

    def ask() -> str:
        """The text of a valid reply. Others raise, so that they are not cached."""
        try:
            client = judge_client(server)
            reply = complete("judge", client, server.model, prompt, temperature=temperature, extra=extra)
        except ChatRequestError as error:
            raise JudgeFailure(f"{error}{_REMEDY if error.rejected else ''}") from error
        if not reply.finished or not reply.text:
            problem = "sent an empty reply" if reply.finished else "sent a reply that is cut off"
            raise JudgeFailure(f"{judge} {problem}: {shortened(reply.text)}", unreadable=True)
        try:
            read_reply(reply.text, form)
        except ValueError as error:
            raise JudgeFailure(f"{judge} {error}", unreadable=True) from error
        return reply.text

    def readable(text: str) -> bool:
        with suppress(ValueError):
            return bool(read_reply(text, form))
        return False

    if server.cache is None:
        return read_reply(ask(), form)
    identity = [*form.identity, server.structured, *filter(None, [effort])]
    key = request_key(server.url, server.model, prompt, temperature, identity)
    return read_reply(judge_cache(server.cache).reply(key, ask, readable), form)


def check_judge(server: JudgeServerRecipe) -> None:
    """InputError if requests are impossible: a missing package or API key, or a cache that cannot be written."""
    judge_client(server)
    if server.cache is not None:
        judge_cache(server.cache)


def require_judge(server: JudgeServerRecipe) -> None:
    """InputError as for `check_judge`, or if no server responds at the judge's address."""
    check_judge(server)
    require_reachable("environment.judge", judge_client(server))


def judge_client(server: JudgeServerRecipe) -> Any:
    """Return the client of the judge's server (see `chat_client`)."""
    options = (server.url, server.timeout, server.retries, server.api_key_variable, server.requests_per_minute)
    return chat_client("environment.judge", *options)


# -- cache ------------------------------------------------------------------------------------------------------------


def request_key(*parts: Any) -> str:
    """Return a digest of everything a reply depends on (JSON values, in order): 64 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).hexdigest()


class JudgeCache:
    """A file of replies by request key, shared by processes. The first readable reply to a key is final."""

    def __init__(self, path: Path) -> None:
        """Create the file if it is missing; InputError if that is impossible."""
        self._path = path
        self.hits = 0
        """Replies returned without a request."""
        self.misses = 0
        """Requests, successful or not."""
        self._lock = Lock()
        self._key_locks: dict[str, Lock] = {}
        self._replies: dict[str, str] = {}
        self._offset = 0
        """Bytes of the file that have been read."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open().close()
        except OSError as error:
            raise InputError(f"judge.cache: {path} cannot be written ({error.strerror}); name another file") from error

    def __len__(self) -> int:
        """The number of replies in the file."""
        with self._lock:
            self._read_new_lines()
            return len(self._replies)

    def reply(self, key: str, ask: Callable[[], str], readable: Callable[[str], bool] = lambda _: True) -> str:
        """Return the reply stored under `key`, or store and return the result of `ask`.

        A stored reply that is not `readable` was written by something else, so it is replaced. Exceptions of `ask`
        propagate and nothing is stored. Threads that need the same key wait for the one that asks. Processes do not
        wait; all of them return the reply that was stored first.
        """
        with self._lock:
            key_lock = self._key_locks.setdefault(key, Lock())
        with key_lock:
            with self._lock:
                self._read_new_lines()
                stored = self._replies.get(key)
                if stored is not None and readable(stored):
                    self.hits += 1
                    return stored
                self.misses += 1
            reply = ask()
            with self._lock:
                return self._store(key, reply, readable)

    def _store(self, key: str, reply: str, readable: Callable[[str], bool]) -> str:
        with self._open() as log, log.locked():
            self._read_new_lines()
            stored = self._replies.get(key)
            if stored is None or not readable(stored):
                line = json.dumps({"key": key, "reply": reply}).encode() + b"\n"
                # A killed process may have left an incomplete line.
                log.append(b"\n" + line if log.torn else line)
                self._replies[key] = reply
            return self._replies[key]

    def _read_new_lines(self) -> None:
        """Read the complete lines that this or another process has appended."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size < self._offset:
            # The file was deleted or replaced. Replies already read stay valid.
            self._offset = 0
        if size == self._offset:
            return
        with self._open() as log:
            for end, line in log.lines(self._offset):
                self._offset = end
                try:
                    record = json.loads(line)
                    key, reply = record["key"], record["reply"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
                if isinstance(key, str) and isinstance(reply, str):
                    self._replies[key] = reply

    def _open(self) -> LineLog:
        # The file may be a link that its user made, and another process may have deleted it.
        return LineLog(self._path, os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), sync_seconds=None)


def judge_cache(path: str) -> JudgeCache:
    """Return the cache at `path`: one object per file and process."""
    return _open_cache(Path(path).absolute())


_open_cache = lru_cache(maxsize=8)(JudgeCache)
