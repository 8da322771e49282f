"""A language model behind an OpenAI-compatible server that judges texts.

What is judged was written by a policy that is paid for the score. It is therefore framed by a mark made from the
text itself, which the text cannot hold (`framing`), and a reply that is not exactly what was asked for is a failure and
no score (`judge_replies`).
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from posttrain.engines.openai import ChatRequestError, chat_client, complete, shortened
from posttrain.environments.framing import Prompt, framed_prompt
from posttrain.environments.judge_replies import Judged, PointsReply, ReplyForm, read_reply, reply_schema
from posttrain.environments.protocol import Message
from posttrain.errors import InputError
from posttrain.recipe.judge import JudgeRecipe, JudgeServerRecipe


def question_key(*parts: Any) -> str:
    """A digest of all that a reply depends on: JSON values, in order; 64 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).hexdigest()


class JudgeCache:
    """Replies by the key of what was asked. The first reply to a key stays the reply, for every process."""

    def __init__(self, path: Path) -> None:
        """Makes the file where it is missing; InputError where that is not possible."""
        self._path = path
        self.hits = 0
        """Replies given without asking."""
        self.misses = 0
        """Times that something was asked, with or without success."""
        self._lock = Lock()
        self._asking: dict[str, Lock] = {}
        self._replies: dict[str, str] = {}
        self._read = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise InputError(f"judge.cache: {path} cannot be written ({error.strerror}); name another file") from error

    def __len__(self) -> int:
        """Replies in the file."""
        with self._lock:
            self._catch_up()
            return len(self._replies)

    def reply(self, key: str, ask: Callable[[], str]) -> str:
        """The reply kept under `key`, or what `ask` gives, which is then kept. What `ask` raises is raised and not kept.

        Threads that want the same key wait for the one that asks; processes do not, and agree on what came first.
        """
        with self._lock:
            turn = self._asking.setdefault(key, Lock())
        with turn:
            with self._lock:
                self._catch_up()
                if key in self._replies:
                    self.hits += 1
                    return self._replies[key]
                self.misses += 1
            given = ask()
            with self._lock:
                return self._keep(key, given)

    def _keep(self, key: str, given: str) -> str:
        with self._path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up()
            if key not in self._replies:
                line = json.dumps({"key": key, "reply": given}).encode() + b"\n"
                # Unbuffered and in one piece: what is written survives the process.
                left = memoryview(line if _ends_in_newline(file) else b"\n" + line)
                while left:
                    left = left[os.write(file.fileno(), left) :]
                self._replies[key] = given
            return self._replies[key]

    def _catch_up(self) -> None:
        """Read the whole lines that were added since the last time, by whomever."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size < self._read:
            # The file was deleted or replaced; what is known is still true.
            self._read = 0
        if size == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.split(b"\n"):
            try:
                record = json.loads(line)
                key, given = record["key"], record["reply"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(key, str) and isinstance(given, str):
                self._replies.setdefault(key, given)


def judge_cache(path: str) -> JudgeCache:
    """The cache in a file, one for all threads of the process."""
    return _judge_cache(Path(path).absolute())


@lru_cache(maxsize=8)
def _judge_cache(path: Path) -> JudgeCache:
    return JudgeCache(path)


def _ends_in_newline(file: BinaryIO) -> bool:
    """Whether a file (opened to read and append) is empty or its last line is whole."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return True
    file.seek(size - 1)
    return file.read(1) == b"\n"


_TEMPERATURE = 0.0
_CONVERSATION = "You grade one answer. The conversation and the answer to it stand in frames"


class JudgeFailure(Exception):
    """The judge gave no score: the server failed, or its reply is not the JSON object that was asked for."""

    def __init__(self, reason: str, unreadable: bool = False) -> None:
        super().__init__(reason)
        self.unreadable = unreadable
        """Whether there is a reply, which is not what was asked for; asked again, the judge may well say the same."""


@dataclass(frozen=True)
class Verdict:
    """What a judge thinks: a score in [0, 1], and why, in its words."""

    score: float
    reason: str


def judge_score(recipe: JudgeRecipe, messages: Sequence[Message], answer: str) -> float:
    """The judge's points for `answer` to `messages`, divided by `recipe.scale`: a number in [0, 1].

    Raises what `verdict` raises.
    """
    return verdict(recipe, judge_prompt(recipe, messages, answer), recipe.scale).score


def verdict(server: JudgeServerRecipe, prompt: Prompt, scale: int) -> Verdict:
    """What the judge says to `prompt` (see `points_prompt`), its points from 0 to `scale` divided by `scale`.

    Raises what `ask_judge` raises.
    """
    judged = ask_judge(server, prompt, PointsReply(0, scale))
    return Verdict(judged.value / scale, judged.reason)


def ask_judge(server: JudgeServerRecipe, prompt: Prompt, form: ReplyForm) -> Judged:
    """What the judge replies to `prompt`, which asks for `form`.

    The judge is asked at temperature 0, and not at all where the cache has its reply. Raises JudgeFailure where it gives
    none, after the retries of the recipe; InputError where the environment variable of the key is not set.
    """

    def ask() -> str:
        text = _asked(server, prompt, form)
        # What cannot be read is raised here, and so never kept.
        _read(text, server, form)
        return text

    if server.cache is None:
        return _read(ask(), server, form)
    key = question_key(server.url, server.model, prompt, _TEMPERATURE, [*form.identity, server.structured])
    return _read(judge_cache(server.cache).reply(key, ask), server, form)


def prepare_judge(server: JudgeServerRecipe) -> None:
    """InputError where the judge cannot be asked: no package, no key, or a cache that cannot be written."""
    judge_client(server)
    if server.cache is not None:
        judge_cache(server.cache)


def judge_client(server: JudgeServerRecipe) -> Any:
    """The client of the judge's server, as `chat_client` makes it."""
    how = (server.url, server.timeout, server.retries, server.api_key_variable, server.requests_per_minute)
    return chat_client("environment.judge", *how)


def judge_prompt(recipe: JudgeRecipe, messages: Sequence[Message], answer: str) -> Prompt:
    """The two chat messages to the judge: the task, and the framed texts. The same input gives the same prompt."""
    texts = [*((message["role"], message["content"]) for message in messages), ("answer", answer)]
    return points_prompt(_CONVERSATION, recipe.rubric, recipe.scale, texts)


def points_prompt(what: str, rubric: str, scale: int, texts: Sequence[tuple[str, str]]) -> Prompt:
    """A prompt for `verdict`: see `framed_prompt`."""
    return framed_prompt(what, rubric, PointsReply(0, scale).asked, texts)


def _asked(server: JudgeServerRecipe, prompt: Prompt, form: ReplyForm) -> str:
    """The whole text of the judge's reply."""
    extra = {"response_format": reply_schema(form)} if server.structured else None
    client, limit = judge_client(server), server.max_tokens
    try:
        written = complete(
            "judge", client, server.model, prompt, temperature=_TEMPERATURE, max_tokens=limit, extra=extra
        )
    except ChatRequestError as error:
        raise JudgeFailure(str(error)) from error
    if not written.finished or not written.text:
        how = "sent an empty reply" if written.finished else "broke off its reply"
        raise JudgeFailure(f"{_where(server)} {how}: {shortened(written.text)}", unreadable=True)
    return written.text


def _read(text: str, server: JudgeServerRecipe, form: ReplyForm) -> Judged:
    try:
        return read_reply(text, form)
    except ValueError as error:
        raise JudgeFailure(f"{_where(server)} {error}", unreadable=True) from error


def _where(server: JudgeServerRecipe) -> str:
    return f"judge {server.model} at {server.url}"
