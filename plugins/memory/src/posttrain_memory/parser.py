"""Parser for the agent's messages: a thought, then either Python code to run or a reply that ends the episode.

    <think>…</think><python>…</python>
    <think>…</think><reply>…</reply>

The parser is incremental: it can read a message while it is generated, and the result does not depend on how the text
is split into pieces. The thought ends at the first `</think>`, whatever other tags it contains. Code ends at the
first `</python>` outside of Python strings. A reply ends at the first `</reply>`. Any other text except white space
makes the whole message rejected, with a reason that says what to write instead.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from posttrain.environments.game import Rejected

TAGS = ("think", "python", "reply")
"""The names of the blocks of a message."""


@dataclass(frozen=True)
class Act:
    """Code to run. `thought` is empty in the format without thinking."""

    thought: str
    code: str


@dataclass(frozen=True)
class Reply:
    """An answer to the user. `thought` is empty in the format without thinking."""

    thought: str
    text: str


@dataclass(frozen=True)
class Piece:
    """A part of a block, as it was read. The pieces of a block, joined, are its complete text including white space."""

    block: Literal["thought", "code", "reply"]
    text: str


Parsed = Act | Reply | Rejected

_LEAD = re.compile(r"\A[\s\ufeff]+")
_IN_CODE = re.compile(r"[<\n#\"']")
_IN_COMMENT = re.compile(r"[<\n]")
_IN_STRING = re.compile(r"[\\\n\"']")
"""The characters that matter outside of strings, in comments and in strings."""


def parse(message: str, thinking: bool = True) -> Parsed:
    """Parse a complete message. With `thinking`, a thought comes first; without, a think block is an error.

    A message that does not begin with `<think>` is read as if it did, because some chat templates (such as that of
    Qwen3-4B-Thinking-2507) already write the tag. It still needs `</think>`.
    """
    parser = Parser(thinking)
    parser.feed(message)
    return parser.finish()


class _State(Enum):
    START = auto()
    THOUGHT = auto()
    BETWEEN = auto()
    CODE = auto()
    REPLY = auto()
    AFTER = auto()
    """After the end of the block, or after the first error."""


class Parser:
    """Parses one message as it arrives. Use a new instance for each message."""

    def __init__(self, thinking: bool = True) -> None:
        self.thinking = thinking
        self._state = _State.START if thinking else _State.BETWEEN
        self._pending = ""
        """Text that may be the beginning of a tag. In `_State.AFTER`, all text that followed."""
        self._texts: dict[str, list[str]] = {"thought": [], "code": [], "reply": []}
        self._tagged = False
        """Whether the thought began with `<think>`."""
        self._block: Literal["", "code", "reply"] = ""
        self._closed = False
        self._code = _Code()

    @property
    def closed(self) -> bool:
        """Whether the code block or the reply has ended, so that the policy can stop."""
        return self._closed

    def feed(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are certain to belong to a block."""
        self._pending += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        for piece in pieces:
            self._texts[piece.block].append(piece.text)
        return pieces

    def finish(self) -> Parsed:
        """The result for the complete message."""
        if self._state is _State.THOUGHT:
            self._texts["thought"].append(self._pending)
            return Rejected(self._without_end_of_thought())
        if self._state is _State.CODE:
            inside = " (a string in the code is not closed either)" if self._code.in_string else ""
            return Rejected(f"no </python> after the code{inside}; end the block with </python> and stop")
        if self._state is _State.REPLY:
            return Rejected("no </reply> after the reply; end it with </reply> and stop")
        if self._state is _State.AFTER and self._closed and not self._pending.strip():
            return self._complete()
        if self._state is _State.START and not self._pending.strip():
            return Rejected(f"the message is empty; write {self._format_hint()}")
        if self._state is _State.START:
            return Rejected(self._without_end_of_thought())
        return Rejected(self._misplaced_error(self._pending.strip()))

    def _advance(self, pieces: list[Piece]) -> bool:
        """Consume one element of the pending text. Returns False if more text is needed."""
        if self._state is _State.START:
            return self._start()
        if self._state is _State.THOUGHT:
            return self._until("</think>", "thought", _State.BETWEEN, pieces)
        if self._state is _State.BETWEEN:
            return self._between()
        if self._state is _State.CODE:
            stop, ended = self._code.end(self._pending)
            self._take("code", stop, pieces)
            if ended:
                self._close("</python>")
            return ended
        if self._state is _State.REPLY:
            ended = self._until("</reply>", "reply", _State.AFTER, pieces)
            self._closed = self._closed or ended
            return ended
        return False

    def _start(self) -> bool:
        # Some files begin with a byte-order mark, and so do texts learned from them.
        self._pending = _LEAD.sub("", self._pending)
        if not self._pending or _is_prefix(self._pending, "<think>"):
            return False
        self._tagged = self._pending.startswith("<think>")
        self._pending = self._pending.removeprefix("<think>")
        self._state = _State.THOUGHT
        return True

    def _between(self) -> bool:
        text = self._pending = self._pending.lstrip()
        if not text or any(_is_prefix(text, tag) for tag in ("<python>", "<reply>")):
            return False
        for tag, state in (("<python>", _State.CODE), ("<reply>", _State.REPLY)):
            if text.startswith(tag):
                self._pending, self._state = text.removeprefix(tag), state
                self._block = "code" if state is _State.CODE else "reply"
                return True
        self._state = _State.AFTER
        return False

    def _until(self, tag: str, block: Literal["thought", "reply"], after: _State, pieces: list[Piece]) -> bool:
        place = self._pending.find(tag)
        if place < 0:
            self._take(block, _safe_length(self._pending, tag), pieces)
            return False
        self._take(block, place, pieces)
        self._pending = self._pending.removeprefix(tag)
        self._state = after
        return True

    def _close(self, tag: str) -> None:
        self._pending = self._pending.removeprefix(tag)
        self._closed, self._state = True, _State.AFTER

    def _take(self, block: Literal["thought", "code", "reply"], stop: int, pieces: list[Piece]) -> None:
        if stop:
            pieces.append(Piece(block, self._pending[:stop]))
            self._pending = self._pending[stop:]

    def _complete(self) -> Parsed:
        thought = "".join(self._texts["thought"]).strip()
        text = "".join(self._texts[self._block])
        if self._block == "code":
            code = _without_fence(text).strip("\n").rstrip()
            return Act(thought, code) if code.strip() else Rejected("the <python> block is empty; write code in it")
        if "<reply>" in text:
            return Rejected("a second <reply> inside the reply; write one <reply>…</reply>")
        # Zero-width characters are not an answer.
        if not any(sign.isprintable() and not sign.isspace() for sign in text):
            return Rejected("the <reply> is empty; write your answer in it")
        return Reply(thought, text.strip())

    def _without_end_of_thought(self) -> str:
        if self._tagged:
            return f"no </think>; write {self._format_hint()}"
        return f"no <think>…</think>; write {self._format_hint()}"

    def _misplaced_error(self, rest: str) -> str:
        """The error for `rest`, where a block should have begun or the message should have ended."""
        opened = re.match(r"</?(\w{1,40})>", rest)  # longer names are not repeated to the model
        name = opened.group(1) if opened else ""
        if self._closed:
            if name == "result":
                return "do not write <result>; stop after </python>, and the result is sent to you"
            if name in TAGS:
                written = "python" if self._block == "code" else "reply"
                return f"<{name}> after </{written}>; write one block only, <python> now and <reply> after its result"
            return f"text after </{'python' if self._block == 'code' else 'reply'}>; stop there"
        if not rest:
            missing = "after </think>" if self.thinking else "in the message"
            return f"no <python> or <reply> {missing}; write {self._format_hint()}"
        if name == "think":
            return (
                "a second <think>; think once" if self.thinking else f"<think> is not used; write {self._format_hint()}"
            )
        if name in TAGS:
            return f"</{name}> without <{name}>; write {self._format_hint()}"
        if name:
            return f"<{name}> is not a block; write {self._format_hint()}"
        return f"text outside the blocks; write {self._format_hint()}"

    def _format_hint(self) -> str:
        """The format in a few words."""
        thought = "<think>…</think> and then " if self.thinking else ""
        return f"{thought}either <python>…</python> or <reply>…</reply>"


class _Code:
    """Finds the end of the code: distinguishes code, comments and strings of Python.

    A string in single quotes ends with its line, as in Python, so a stray apostrophe does not hide the end of the
    code. Neither does a comment.
    """

    def __init__(self) -> None:
        self._quote = ""
        self._comment = False

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return bool(self._quote)

    def end(self, text: str) -> tuple[int, bool]:
        """The number of characters of `text` that are code, and whether `</python>` follows. The rest needs more
        text.
        """
        place = 0
        while place < len(text):
            signs = _IN_STRING if self._quote else _IN_COMMENT if self._comment else _IN_CODE
            match = signs.search(text, place)
            if not match:
                break
            place = match.start()
            step = self._string(text, place) if self._quote else self._plain(text, place)
            if step <= 0:
                return place, step < 0
            place += step
        return len(text), False

    def _plain(self, text: str, place: int) -> int:
        """The number of characters to advance outside of strings, at a character of `_IN_CODE`. 0: more text is
        needed. -1: the end.
        """
        sign = text[place]
        if sign == "<":
            if text.startswith("</python>", place):
                return -1
            return 0 if _is_prefix(text[place : place + len("</python>")], "</python>") else 1
        if sign == "\n":
            self._comment = False
        elif sign == "#":
            self._comment = True
        else:
            run = text[place : place + 3]
            if run == 3 * sign:
                self._quote = run
                return 3
            if run == len(run) * sign:
                return 0
            if run[1] == sign:
                return 2
            self._quote = sign
        return 1

    def _string(self, text: str, place: int) -> int:
        """The number of characters to advance inside a string, at a character of `_IN_STRING`. 0: more text is
        needed.
        """
        sign = text[place]
        if sign == "\\":
            after = text[place + 1 : place + 3]
            # A line may end with two characters.
            return 3 if after == "\r\n" else 0 if after in ("", "\r") else 2
        if sign == "\n":
            self._quote = "" if len(self._quote) == 1 else self._quote
        elif text.startswith(self._quote, place):
            length, self._quote = len(self._quote), ""
            return length
        elif _is_prefix(text[place : place + len(self._quote)], self._quote):
            return 0
        return 1


def _is_prefix(text: str, tag: str) -> bool:
    """Whether `text` is a proper prefix of `tag`."""
    return len(text) < len(tag) and tag.startswith(text)


def _safe_length(text: str, tag: str) -> int:
    """The length of `text` without a suffix that could be the beginning of `tag`. `text` does not contain `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def _without_fence(code: str) -> str:
    """`code` without a Markdown fence around all of it; inner fences stay."""
    fenced = re.fullmatch(r"\s*```(?:python|py)?[ \t]*\n(.*)\n[ \t]*```\s*", code, re.DOTALL)
    return fenced.group(1) if fenced else code
