"""Reading a message of the memory agent: a thought, then either Python to run or a reply that ends the episode.

    <think>…</think><python>…</python>
    <think>…</think><reply>…</reply>

The reader goes through the text once, character by character where it matters, so that it can read a message while it
is being written, and what it finds never depends on how the text was cut into pieces. The thought ends at the first
`</think>`, whatever tags it talks about. Code ends at the first `</python>` that stands outside Python's strings. A
reply ends at the first `</reply>`. Anything else besides white space makes the message rejected as a whole, with a
reason that says what to write instead.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from posttrain.environments.game import Rejected

TAGS = ("think", "python", "reply")
"""Names of the blocks a message may hold."""


@dataclass(frozen=True)
class Act:
    """Code to run. `thought` is empty where the format has no thinking."""

    thought: str
    code: str


@dataclass(frozen=True)
class Reply:
    """An answer to the user. `thought` is empty where the format has no thinking."""

    thought: str
    text: str


@dataclass(frozen=True)
class Piece:
    """A part of a block as it was read; the pieces of a block, joined, are its whole text, white space included."""

    block: Literal["thought", "code", "reply"]
    text: str


Parsed = Act | Reply | Rejected

_LEAD = re.compile(r"\A[\s\ufeff]+")
_IN_CODE = re.compile(r"[<\n#\"']")
_IN_COMMENT = re.compile(r"[<\n]")
_IN_STRING = re.compile(r"[\\\n\"']")
"""The only signs that mean something outside strings, in comments and in strings."""


def parse(message: str, thinking: bool = True) -> Parsed:
    """What `message` asks for. `thinking`: a thought comes first; without, a block of thinking is an error.

    A message that does not begin with `<think>` is read as if it did, for some chat templates (that of
    Qwen3-4B-Thinking-2507) have written the tag already; it still needs its `</think>`.
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
    """After the end of the block, or after the first mistake."""


class Parser:
    """Reads one message as it arrives. A new one is needed for the next message."""

    def __init__(self, thinking: bool = True) -> None:
        self.thinking = thinking
        self._state = _State.START if thinking else _State.BETWEEN
        self._pending = ""
        """Text that may be the beginning of something; with `_State.AFTER`, everything that followed."""
        self._texts: dict[str, list[str]] = {"thought": [], "code": [], "reply": []}
        self._tagged = False
        """The thought began with `<think>`."""
        self._block: Literal["", "code", "reply"] = ""
        self._closed = False
        self._code = _Code()

    @property
    def closed(self) -> bool:
        """The block of code or the reply has ended: a policy has nothing more to write."""
        return self._closed

    def feed(self, text: str) -> list[Piece]:
        """Read on; returns what is certain to belong to a block by now."""
        self._pending += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        for piece in pieces:
            self._texts[piece.block].append(piece.text)
        return pieces

    def finish(self) -> Parsed:
        """What the whole message asks for."""
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
            return Rejected(f"the message is empty; write {self._form()}")
        if self._state is _State.START:
            return Rejected(self._without_end_of_thought())
        return Rejected(self._misplaced(self._pending.strip()))

    def _advance(self, pieces: list[Piece]) -> bool:
        """Read one thing from what is pending; False where more text is needed."""
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
        # Some files begin with a mark of their encoding, and so does what was learned from them.
        self._pending = _LEAD.sub("", self._pending)
        if not self._pending or _begins(self._pending, "<think>"):
            return False
        self._tagged = self._pending.startswith("<think>")
        self._pending = self._pending.removeprefix("<think>")
        self._state = _State.THOUGHT
        return True

    def _between(self) -> bool:
        text = self._pending = self._pending.lstrip()
        if not text or any(_begins(text, tag) for tag in ("<python>", "<reply>")):
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
            self._take(block, _certain(self._pending, tag), pieces)
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
        # Signs without width are no answer either.
        if not any(sign.isprintable() and not sign.isspace() for sign in text):
            return Rejected("the <reply> is empty; write your answer in it")
        return Reply(thought, text.strip())

    def _without_end_of_thought(self) -> str:
        if self._tagged:
            return f"no </think>; write {self._form()}"
        return f"no <think>…</think>; write {self._form()}"

    def _misplaced(self, rest: str) -> str:
        """What is wrong with `rest`, where a block should have begun or the message should have ended."""
        opened = re.match(r"</?(\w+)>", rest)
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
            return f"no <python> or <reply> {missing}; write {self._form()}"
        if name == "think":
            return "a second <think>; think once" if self.thinking else f"<think> is not used; write {self._form()}"
        if name in TAGS:
            return f"</{name}> without <{name}>; write {self._form()}"
        if name:
            return f"<{name}> is no block; write {self._form()}"
        return f"text outside the blocks; write {self._form()}"

    def _form(self) -> str:
        """The format in a few words."""
        thought = "<think>…</think> and then " if self.thinking else ""
        return f"{thought}either <python>…</python> or <reply>…</reply>"


class _Code:
    """Finds where code ends: a scanner that knows just enough of Python to tell code, comments and strings apart.

    A string in single quotes ends with its line, as in Python, so that a stray apostrophe hides no end. A comment hides
    none either.
    """

    def __init__(self) -> None:
        self._quote = ""
        self._comment = False

    @property
    def in_string(self) -> bool:
        """The text so far ends inside a string."""
        return bool(self._quote)

    def end(self, text: str) -> tuple[int, bool]:
        """How many characters of `text` are code, and whether `</python>` follows; the rest needs more text."""
        place = 0
        while place < len(text):
            signs = _IN_STRING if self._quote else _IN_COMMENT if self._comment else _IN_CODE
            found = signs.search(text, place)
            if not found:
                break
            place = found.start()
            step = self._string(text, place) if self._quote else self._plain(text, place)
            if step <= 0:
                return place, step < 0
            place += step
        return len(text), False

    def _plain(self, text: str, place: int) -> int:
        """Characters to go on by outside strings, from a sign of `_IN_CODE`; 0: more text is needed; -1: the end."""
        sign = text[place]
        if sign == "<":
            if text.startswith("</python>", place):
                return -1
            return 0 if _begins(text[place : place + len("</python>")], "</python>") else 1
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
        """Characters to go on by inside a string, from a sign of `_IN_STRING`; 0: more text is needed."""
        sign = text[place]
        if sign == "\\":
            after = text[place + 1 : place + 3]
            # The end of a line may be two characters.
            return 3 if after == "\r\n" else 0 if after in ("", "\r") else 2
        if sign == "\n":
            self._quote = "" if len(self._quote) == 1 else self._quote
        elif text.startswith(self._quote, place):
            length, self._quote = len(self._quote), ""
            return length
        elif _begins(text[place : place + len(self._quote)], self._quote):
            return 0
        return 1


def _begins(text: str, tag: str) -> bool:
    """Whether `text` may become `tag` with more text, and is not yet."""
    return len(text) < len(tag) and tag.startswith(text)


def _certain(text: str, tag: str) -> int:
    """Length of the part of `text` that is no beginning of `tag`, which `text` does not hold."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def _without_fence(code: str) -> str:
    """`code` without a Markdown fence around the whole of it; fences inside stay."""
    fenced = re.fullmatch(r"\s*```(?:python|py)?[ \t]*\n(.*)\n[ \t]*```\s*", code, re.DOTALL)
    return fenced.group(1) if fenced else code
