"""What judges replied, on disk: what was asked once is not asked again, in this run or another.

A file of JSON lines that is only ever added to, so that a process killed at any instant loses no reply that it had. A
line that was cut off by such a death is passed over, and the next one begins on a line of its own. Threads and processes
may share a file. It holds digests of what was asked and what was replied, and no key of a server.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from posttrain.errors import InputError


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
