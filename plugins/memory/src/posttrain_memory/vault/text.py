"""The tree of a vault, search, and line breaks: models see one kind, and each note keeps its own."""

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Hit(NamedTuple):
    """A matching line: its note, its 1-based number, and the line, cut around the match."""

    path: str
    line: int
    text: str


def tree(paths: Iterable[str], most: int) -> str:
    """At most `most` lines of notes and folders, indented by two spaces per level; folders end with a slash."""
    lines: list[str] = []
    open_folders: list[str] = []
    for path in sorted(paths, key=lambda path: [(n < path.count("/"), part) for n, part in enumerate(path.split("/"))]):
        *folders, name = path.split("/")
        shared = 0
        while shared < min(len(folders), len(open_folders)) and folders[shared] == open_folders[shared]:
            shared += 1
        lines += [f"{'  ' * level}{folders[level]}/" for level in range(shared, len(folders))]
        lines.append(f"{'  ' * len(folders)}{name}")
        open_folders = folders
    if len(lines) > most:
        lines = [*lines[:most], f"… {len(lines) - most} more lines"]
    return "\n".join(lines)


def search(files: Mapping[str, str], text: str, most: int, length: int) -> tuple[list[Hit], int]:
    """The first `most` lines that contain `text` (case-insensitive), by path and line, and the number of all."""
    wanted = text.casefold()
    hits: list[Hit] = []
    count = 0
    for path in sorted(files):
        # Most notes contain no match. Testing the whole note first keeps a search over a large vault cheap.
        folded = files[path].casefold()
        if wanted not in folded:
            continue
        places = [place for place, line in enumerate(folded.splitlines()) if wanted in line]
        count += len(places)
        if places and len(hits) < most:
            lines = files[path].splitlines()
            for place in places[: most - len(hits)]:
                line = lines[place]
                hits.append(Hit(path, place + 1, _cut(line, line.casefold().find(wanted), len(wanted), length)))
    return hits, count


def _cut(line: str, at: int, width: int, length: int) -> str:
    """At most `length` characters of `line` around the `width` characters at `at`, with ellipses where it was cut."""
    if len(line) <= length:
        return line
    begin = max(0, min(at + width // 2 - length // 2, len(line) - length))
    piece = line[begin : begin + length]
    return f"{'…' if begin else ''}{piece}{'…' if begin + length < len(line) else ''}"


_BREAK = re.compile("\r\n|[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_WRITTEN = re.compile("\r\n|\r")


def with_line_feeds(text: str) -> str:
    """`text` with every line break as a line feed, as models see it."""
    return _BREAK.sub("\n", text)


def replace_span(note: str, start: int, end: int, new: str) -> str:
    """`note` with characters `start` to `end` of `shown_lines(note)` replaced by `new`, which a model wrote.

    All other text keeps its line breaks. `new` gets the kind that is most frequent in the note.
    """
    # Only a two-character line break is longer than its shown form.
    breaks = [match.start() - n for n, match in enumerate(re.finditer("\r\n", note))]
    head, tail = note[: start + bisect_left(breaks, start)], note[end + bisect_left(breaks, end) :]
    pairs = len(breaks)
    counts = {"\n": note.count("\n") - pairs, "\r\n": pairs, "\r": note.count("\r") - pairs}
    usual = max(counts, key=lambda kind: counts[kind])
    plain = _WRITTEN.sub("\n", new)
    result = head + plain.replace("\n", usual) + tail
    wanted = with_line_feeds(head) + with_line_feeds(plain) + with_line_feeds(tail)
    # A lone carriage return must not merge with a line feed that now follows it.
    return result if with_line_feeds(result) == wanted else wanted


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff of two vaults (path -> text), sorted by path; empty if they are equal."""
    lines: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        names = (path if old is not None else "(new)", path if new is not None else "(deleted)")
        one, other = ([] if text is None else text.split("\n") for text in (old, new))
        lines += difflib.unified_diff(one, other, *names, n=2, lineterm="") if old != new else ()
    return "\n".join(lines)


_BLOCK = re.compile(r"<\s*filter\s*>(.*?)(?:<\s*/\s*filter\s*>|\Z)", re.DOTALL | re.IGNORECASE)


def split_question(message: str) -> tuple[str, list[str]]:
    """The user's message without its `<filter>` blocks, and the rules in them. An unclosed block extends to the end."""
    return _BLOCK.sub(" ", message).strip(), [match.group(1).strip() for match in _BLOCK.finditer(message)]
