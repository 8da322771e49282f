"""Line breaks of notes: a model is shown one kind, each note keeps its own."""

import re
from bisect import bisect_left

_BREAK = re.compile("\r\n|[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_WRITTEN = re.compile("\r\n|\r")


def shown_lines(text: str) -> str:
    """`text` with every line break as a model is shown it, a line feed."""
    return _BREAK.sub("\n", text)


def replaced(note: str, start: int, end: int, new: str) -> str:
    """`note` with the characters `start` to `end` of `shown_lines(note)` replaced by `new`, which a model wrote.

    All else keeps its line breaks, and `new` gets those that the note has most of.
    """
    # Only a line break of two characters takes more room than what is shown of it.
    breaks = [match.start() - n for n, match in enumerate(re.finditer("\r\n", note))]
    head, tail = note[: start + bisect_left(breaks, start)], note[end + bisect_left(breaks, end) :]
    pairs = len(breaks)
    counts = {"\n": note.count("\n") - pairs, "\r\n": pairs, "\r": note.count("\r") - pairs}
    usual = max(counts, key=lambda kind: counts[kind])
    plain = _WRITTEN.sub("\n", new)
    found = head + plain.replace("\n", usual) + tail
    wanted = shown_lines(head) + shown_lines(plain) + shown_lines(tail)
    # A lone carriage return must not become one line break with a line feed that comes to stand behind it.
    return found if shown_lines(found) == wanted else wanted
