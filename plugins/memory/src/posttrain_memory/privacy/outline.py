"""Parts of a Markdown note about a label: its value, the rest of its paragraph, what is nested below it, its section,
its column. A line that mentions the label in other words than `label: value` is about it as a whole.
"""

import re
from collections.abc import Callable, Iterator

from posttrain_memory.privacy.redaction import Span

_HEADING = re.compile(r"\s{0,3}(#{1,6})\s+(.*)")
_UNDERLINE = re.compile(r"\s{0,3}(=+|-{3,})\s*")
_QUOTE = re.compile(r"(?:\s{0,3}>)*")
_ITEM = re.compile(r"[\s>]*(?:[-*+•]|\d{1,3}[.)])\s")
_LABEL = re.compile(
    r"[^\w|\n]{0,40}(?:\[[ xX]\]\s+|\d{1,3}[.)]\s+)?[*_`\"'(]{0,4}(?P<label>[^\W_][^:=|→\n]{0,60}?)[*_`\"')\]]{0,4}"
    r"\s*(?:::?|=>?|→|\s[-–—]\s)[*_`\"']{0,4}\s*(?P<value>.*)"
)
_TITLE = re.compile(r"[\W_]{0,20}(?:\*\*|__|\[!\w+\]|<summary>|%%|<!--)[^:.]*|[^:.]*:\s*[*_]*")
"""A line that introduces what follows: in bold, a callout, the start of a comment, or words with a colon."""
_CLOSES = re.compile(r"</.*|.*-->|%%")
_CELL = re.compile(r"(?:\\\||\[\[[^\[\]\n]*\]\]|[^|\n])+")
_WORD = re.compile(r"[^\W_]+")
_OWN = 7
"""The level of a section that a line without marks of a heading introduces."""


def parts_under(text: str, size: int, matches: Callable[[str], bool]) -> Iterator[Span]:
    """The spans of `text` about a label of `size` words, in order. `matches` says whether a text mentions it."""
    lines = text.split("\n")
    start, section, indent, paragraph, fenced = 0, 0, -1, False, False
    columns: set[int] | None = None
    listed = False
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        bare = line[_QUOTE.match(line).end() :]  # type: ignore[union-attr]
        depth = len(bare) - len(bare.lstrip())
        begin, first, end = start, start + len(line) - len(bare.lstrip()), start + len(line)
        start = end + 1
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        heading = None if fenced else _HEADING.match(bare)
        marks, words = (heading[1], heading[2]) if heading else ("", bare)
        under = _UNDERLINE.fullmatch(below) if bare.strip() and not fenced and "|" not in bare else None
        if under and not marks and ":" not in bare and bare.strip(" -"):
            marks = "#" if under[1][0] == "=" else "##"
        opens = not bare.strip() or bool(_ITEM.match(bare))
        label = None if marks or not bare.strip() else _LABEL.match(line)
        other = label is not None and bool(label["value"]) and len(label["label"].split()) <= 3
        paragraph = paragraph and not opens and not marks and not other
        listed = listed and bool(_ITEM.match(bare))
        named = bool(bare.strip()) and matches(words)
        says_more = named and len(_WORD.findall(words)) > size
        title = not opens and (not below.strip() or label is None) and bool(_TITLE.fullmatch(bare.strip()))
        closes = section == _OWN and bool(_CLOSES.fullmatch(bare.strip()))
        if closes or (section == _OWN and not named and title):
            section = 0
        if marks:
            if not section or len(marks) <= section:
                section, indent, columns = len(marks) if named else 0, -1, None
            elif section:
                yield first, end
            if says_more:
                yield first, end
        elif not bare.strip():
            columns = None
        elif section or paragraph or listed or (indent >= 0 and depth > indent):
            yield first, end
        elif line.count("|") > 1 or (columns is not None and "|" in line) or (_is_rule(below) and "|" in line):
            indent, cells = -1, [match.span() for match in _CELL.finditer(line) if match.group().strip()]
            header = columns is None and _is_rule(below)
            if columns is None:
                columns = {n for n, (a, b) in enumerate(cells) if header and matches(line[a:b])}
            elif not _is_rule(line):
                yield from ((begin + cells[n][0], begin + cells[n][1]) for n in columns if n < len(cells))
            place = next((n for n, (a, b) in enumerate(cells) if matches(line[a:b])), len(cells))
            if not header and place + 1 < len(cells):
                yield begin + cells[place + 1][0], end
        elif named:
            indent, paragraph = depth, True
            value = label["value"] if label and matches(label["label"]) else None
            listed = value == "" and not _ITEM.match(bare)
            if label and value is not None and len(_WORD.findall(label["label"])) <= size:
                yield begin + label.start("value"), end
            elif says_more:
                yield first, end
            section = _OWN if title or not (says_more or value or opens or below.strip()) else 0
        else:
            indent = -1


def _is_rule(line: str) -> bool:
    """Whether a line separates the head of a table from its rows."""
    return "-" in line and not set(line) - set(" \t|:-")
