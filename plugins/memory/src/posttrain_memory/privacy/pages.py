"""Splits Markdown notes into pieces, each with its context and the notes it may be about.

The context of a list item is what it is nested in, of a table cell its column and row, of a line its headings and the
line it continues. Code and HTML blocks are one piece, because their content has no known structure. A piece may be
about every note that it or its context names or links to.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from posttrain_memory.privacy.redaction import Index, Span, Value
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.values import links

_FENCE = re.compile(r"\s*(?:```|~~~)")
_HTML = re.compile(r"\s*(?:<[A-Za-z/]|<!--(?!.*-->)|%%(?!.*%%))")
_HEADING = re.compile(r"\s{0,3}#{1,6}(?:\s|$)")
_DELIMITERS = re.compile(r"\s*\|?\s*:?-{2,}:?\s*(?:\|\s*:?-{2,}:?\s*)*\|?\s*$")
_MARK = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)]|[a-z][.)])\s+(?:\[[ xX/-]\]\s+)?")
_QUOTE = re.compile(r"(?:\s{0,3}>)+\s?")
_CALLOUT = re.compile(r"\s*\[![\w-]+\][+-]?")
_LABEL = re.compile(
    r"[\s*_`\"'<!(\[-]*(?P<label>[^:=|\n]{1,60}?)[*_`\"']*\s*(?:::?|=>?|[-=]>|→|\s[-–—]\s)[*_`\"']*\s*(?P<value>.*)$"
)
_CELL = re.compile(r"(?:\\\||\[\[[^\[\]\n]*\]\]|[^|\n])+")
_CHAIN = 8
"""Maximum number of context texts that are passed on, so that the time is linear."""
_ANAPHORA = re.compile(
    r"\s*(?:it|its|they|their|them|this|that|these|those|he|his|she|her|which|also|and|but|or|mostly|mainly|especially|namely"
    r"|including|both|one|ones|same)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Piece:
    """Characters `start` to `end` of a note. If it has a label, `value_start` to `end` is the value.

    `label` is the text before the value, or "". `headings` are the enclosing headings, outermost first; `above` the
    other context. `kind` is heading, item, text, cell or block.
    """

    kind: str
    start: int
    end: int
    value_start: int
    label: str
    headings: tuple[str, ...]
    above: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    start: int
    text: str
    indent: int
    quoted: bool
    marked: bool


def outline(text: str) -> list[Piece]:
    """The pieces of a note in order. Every letter and digit belongs to at least one piece."""
    headings: list[tuple[int, str]] = []
    result: list[Piece] = []
    lines = list(_lines(text))
    at = 0
    lead: tuple[str, ...] = ()
    if lines[0].text.strip() == "---":
        front = next((i for i in range(1, len(lines)) if lines[i].text.strip() in ("---", "...")), 0)
        result += _nested(lines[1:front], (), (), keyed=True)[0]
        at = front
    while at < len(lines):
        line = lines[at]
        names = tuple(name for _, name in headings)
        if not line.text.strip():
            at += 1
        elif _FENCE.match(line.text):
            end = next((i for i in range(at + 1, len(lines)) if _FENCE.match(lines[i].text)), len(lines) - 1)
            result.append(_block(lines, at, end, names, lead))
            at = end + 1
        elif _HTML.match(line.text):
            end = _html_end(lines, at)
            result.append(_block(lines, at, end, names, lead))
            at = end + 1
        elif _HEADING.match(line.text) or (not line.marked and _underlined(lines, at)):
            level = len(line.text.lstrip()) - len(line.text.lstrip().lstrip("#"))
            level = level or (1 if lines[at + 1].text.lstrip().startswith("=") else 2)
            headings = [(other, name) for other, name in headings if other < level]
            above = tuple(name for _, name in headings)
            result.append(_piece("heading", line, above, ()))
            headings.append((level, line.text.strip("# \t")))
            lead = ()
            at += 1
        elif line.text.count("|") and at + 1 < len(lines) and _table(lines, at):
            end = at
            while end + 1 < len(lines) and "|" in lines[end + 1].text:
                end += 1
            result += _cells(lines[at : end + 1], names, lead)
            at = end + 1
        else:
            end = at
            while end + 1 < len(lines) and _plain(lines, end + 1):
                end += 1
            pieces, lead = _nested(lines[at : end + 1], names, lead)
            result += pieces
            at = end + 1
    return result


def _lines(text: str) -> Iterator[_Line]:
    start = 0
    for line in text.split("\n"):
        quote = _QUOTE.match(line)
        skip = quote.end() if quote else 0
        bare = line[skip:]
        indent = len(bare.expandtabs(4)) - len(bare.expandtabs(4).lstrip())
        yield _Line(start + skip, bare, indent, bool(quote), bool(_MARK.match(bare)))
        start += len(line) + 1


def _plain(lines: list[_Line], at: int) -> bool:
    """Whether a line continues a run of nested lines, which may include blank lines."""
    text = lines[at].text
    return not (
        _FENCE.match(text)
        or _HEADING.match(text)
        or _HTML.match(text)
        or (text.count("|") and at + 1 < len(lines) and _table(lines, at))
        or (not lines[at].marked and _underlined(lines, at))
    )


def _underlined(lines: list[_Line], at: int) -> bool:
    """Whether the line below makes this line a heading. The last line of front matter looks the same, but is not a
    heading.
    """
    below = lines[at + 1].text if at + 1 < len(lines) else ""
    return bool(
        lines[at].text.strip()
        and re.fullmatch(r"\s{0,3}(?:=+|-{2,})\s*", below)
        and not re.search(r":|^\s*[-=]+\s*$", lines[at].text)
    )


def _table(lines: list[_Line], at: int) -> bool:
    bars = re.sub(r"\[\[[^\[\]\n]*\]\]|\\\|", "", lines[at].text).count("|")
    below = lines[at + 1].text
    return bars > 0 and (bool(_DELIMITERS.match(below) and "-" in below) or lines[at].text.lstrip().startswith("|"))


def _piece(kind: str, line: _Line, headings: tuple[str, ...], above: tuple[str, ...]) -> Piece:
    mark = _MARK.match(line.text)
    start = mark.end() if mark else len(line.text) - len(line.text.lstrip())
    rest = line.text[start:].rstrip()
    # The colon of a URL does not end a label.
    match = _LABEL.match(rest) if kind != "heading" else None
    if match and (re.search(r"[.!?]\s", match["label"]) or re.match(r"//", match["value"]) or "[[" in match["label"]):
        owner = re.match(
            r"(?P<label>[^:\[\]]{1,60}?) (?:of|for) (?P<link>\[\[[^\[\]\n]*\]\])\W*:\s*(?P<value>.*)", rest
        )
        match = owner
    value = match.start("value") if match else 0
    label = rest[:value].strip(" \t*_`\"'<!([-:=>→–—") if match else ""
    begin = line.start + start
    return Piece(kind, begin, begin + len(rest), begin + value, label, headings, above)


def _block(lines: list[_Line], first: int, last: int, headings: tuple[str, ...], above: tuple[str, ...]) -> Piece:
    start, end = lines[first].start, lines[last].start + len(lines[last].text)
    return Piece("block", start, end, start, "", headings, above)


def _html_end(lines: list[_Line], at: int) -> int:
    """The last line of an HTML block or comment: the one that closes it, otherwise the one before a blank line."""
    text = lines[at].text.strip()
    tag = re.match(r"<([A-Za-z]+)", text)
    ends = "-->" if text.startswith("<!--") else "%%" if text.startswith("%%") else f"</{tag[1]}" if tag else ""
    if ends:
        if ends in text[2:]:
            return at
        for end in range(at + 1, len(lines)):
            if ends in lines[end].text:
                return end
    end = at
    while end + 1 < len(lines) and lines[end + 1].text.strip():
        end += 1
    return end


def _cells(lines: list[_Line], headings: tuple[str, ...], above: tuple[str, ...]) -> list[Piece]:
    """The cells of a table. Their context is the column head and the whole row."""
    headed = len(lines) > 1 and bool(_DELIMITERS.match(lines[1].text))
    heads = [cell for _, cell in _row(lines[0])] if headed else []
    cells = []
    for number, line in enumerate(lines):
        if _DELIMITERS.match(line.text):
            continue
        head = headed and number == 0
        for column, (start, cell) in enumerate(_row(line)):
            column_head = (heads[column],) if column < len(heads) and not head else ()
            row = () if head else (line.text,)
            skip = len(cell) - len(cell.lstrip())
            begin, end = line.start + start + skip, line.start + start + len(cell.rstrip())
            if end > begin:
                cells.append(
                    Piece("head" if head else "cell", begin, end, begin, "", headings, (*above, *column_head, *row))
                )
    return cells


def _row(line: _Line) -> list[tuple[int, str]]:
    outer = line.text.lstrip().startswith("|")
    first = line.text.index("|") + 1 if outer else 0
    cells = []
    for part in re.finditer(rf"(?:^|(?<=\|))({_CELL.pattern})?", line.text[first:]):
        cells.append((first + part.start(), part.group()))
    return cells


def _nested(
    lines: list[_Line], headings: tuple[str, ...], above: tuple[str, ...], keyed: bool = False
) -> tuple[list[Piece], tuple[str, ...]]:
    """The pieces of text and lists, and the context of the lines that follow. The context of a line is what it is
    indented under, continues, or follows.

    `keyed`: the lines are front matter, in which a key without indentation ends the previous one.
    """
    pieces: list[Piece] = []
    stack: list[tuple[int, str]] = []
    wrapped: list[str] = []
    lead, ends = above, ""
    previous: _Line | None = None
    blank = False
    for line in lines:
        if not line.text.strip():
            blank = True
            continue
        if re.fullmatch(r"[\s\-*_=]+", line.text):
            stack, lead, previous, blank = [], (), None, False
            continue
        goes_on = (
            previous is not None
            and not line.marked
            and (
                (not blank and line.indent >= previous.indent and not _labeled(line))
                or re.match(r":\s", line.text.lstrip())
                or bool(_ANAPHORA.match(line.text))
            )
        )
        # An emphasized line introduces everything up to the next one; a line ending in a colon introduces what
        # follows, or its list.
        listed = blank and previous is not None and previous.marked and not line.marked and not line.indent
        if lead and ((ends == "quote" and not line.quoted) or (ends == "list" and listed)):
            lead = ()
        if blank and not line.marked and not line.indent and not goes_on:
            stack = []
        if goes_on and not blank and pieces and not re.match(r":\s", line.text.lstrip()):
            # A wrapped line is one piece with the line that it continues.
            wrapped.append(line.text)
            pieces[-1] = replace(pieces[-1], end=line.start + len(line.text.rstrip()))
            previous = line
            continue
        if len(wrapped) > 1 and stack:
            stack[-1] = (stack[-1][0], "\n".join(wrapped))
        outer = [(indent, text) for indent, text in stack if indent < line.indent]
        stack = stack[-_CHAIN:] if goes_on else outer
        if keyed and not line.marked and not line.indent:
            lead = ()
        governing = (*lead, *(text for _, text in stack))
        piece = _piece("item" if line.marked else "text", line, headings, governing)
        if _resolve_link(line, piece):
            lead = (line.text,)
            ends = "quote" if _CALLOUT.match(line.text) else "list" if line.text.rstrip().endswith(":") else ""
            piece = replace(piece, above=tuple(text for _, text in stack))
        pieces.append(piece)
        stack.append((line.indent, line.text))
        wrapped = [line.text]
        previous, blank = line, False
    return pieces, () if ends == "quote" else lead


def _labeled(line: _Line) -> bool:
    """Whether a line begins with something that looks like a label of its own."""
    return bool(
        re.match(r"\s*(?:\*\*|__|\")?[^\W\d_][\w ’'/()-]{0,40}(?:\*\*|__|\")?\s*::?(?:\*\*|__)?(?:\s|$)", line.text)
    )


def _resolve_link(line: _Line, piece: Piece) -> bool:
    """Whether a line only introduces what follows: it ends in a colon, is all emphasis, or opens a callout."""
    text = line.text.strip()
    if _CALLOUT.match(text):
        return True
    return not line.marked and (
        text.endswith((":", ":**", ":__")) or bool(re.fullmatch(r"(\*\*|__|\*|_).{1,80}\1", text))
    )


_SELF = frozenset(["i", "me", "my", "mine", "myself", "we", "us", "our"])
_OFTEN = 12
"""A word counts as a reference to each name that contains it, if at most this many names do."""
_PLAIN = frozenset(
    re.findall(
        r"\S+",
        "the and for with from note notes about doctor street company club house home garden office group team project list log "
        "meeting plan day week user friend friends family",
    )
)


class Page:
    """One note. `pieces` are in order; `mentions` holds, for each piece, the paths of the notes it may be about."""

    def __init__(self, path: str, pieces: list[Piece], mentions: list[frozenset[str]]) -> None:
        self.path, self.pieces, self.mentions = path, pieces, mentions
        self.all = frozenset[str]().union(*mentions)
        """The notes that any piece mentions."""
        self._starts = [piece.start for piece in pieces]

    def touches(self, span: Span, abouts: Collection[str]) -> bool:
        """Whether a piece overlapping `span` may be about one of these notes: it is part of it, or mentions it."""
        if self.path in abouts:
            return True
        at = bisect_right(self._starts, max(span[0], span[1] - 1)) - 1
        while at >= 0 and self.pieces[at].end >= span[0]:
            if not self.mentions[at].isdisjoint(abouts):
                return True
            at -= 1
        return False

    def concerns(self, span: Span, about: str) -> bool:
        """`touches` for one note."""
        return self.touches(span, (about,))

    def knows(self, abouts: Collection[str]) -> bool:
        """Whether this note is one of these, or mentions one anywhere."""
        return self.path in abouts or not self.all.isdisjoint(abouts)


class Pages:
    """Path -> page, for all notes of a vault."""

    def __init__(
        self,
        files: Mapping[str, str],
        names: Mapping[str, str],
        resolve_link: Callable[[str], str | None],
        wanted: Collection[str],
        loose: bool,
    ) -> None:
        """`wanted` are the notes that rules are about. With `loose`, a single word of their names counts as a
        mention, and pieces have context; otherwise pieces are single lines.
        """
        self._resolve_link, self._loose, self._user = resolve_link, loose, USER in wanted
        self._paths: dict[Value, set[str]] = {}
        often = Counter(word for name in names for word in set(re.findall(r"[^\W_]{3,}", name)))
        for name, path in names.items():
            self._paths.setdefault(Value("text", name), set()).add(path)
            if loose and path in wanted:
                for word in re.findall(r"[^\W_]{3,}", name):
                    if word not in _PLAIN and often[word] <= _OFTEN:
                        self._paths.setdefault(Value("word", word), set()).add(path)
        self._index = Index(self._paths)
        self._known: dict[str, frozenset[str]] = {}
        self._pages = {path: self._page(path, text) for path, text in files.items()}

    def __getitem__(self, path: str) -> Page:
        return self._pages[path]

    def _page(self, path: str, text: str) -> Page:
        pieces = outline(text) if self._loose else _line_pieces(text)
        self._known.clear()
        named = self._mentioned(path.removesuffix(".md")) if self._loose else frozenset()
        mentions = []
        for piece in pieces:
            paths = set(named | self._mentioned(text[piece.start : piece.end]))
            for other in (*piece.headings, *piece.above):
                paths |= self._mentioned(other)
            mentions.append(frozenset(paths))
        return Page(path, pieces, mentions)

    def _mentioned(self, text: str) -> frozenset[str]:
        known = self._known.get(text)
        if known is None:
            paths = {path for _, _, value in self._index.find(text) for path in self._paths[value]}
            paths |= {
                path for _, _, target, _ in links(text.replace("\\|", "|")) if (path := self._resolve_link(target))
            }
            if self._user and self._loose and _SELF & set(re.findall(r"\w+", text.casefold())):
                paths.add(USER)
            known = self._known[text] = frozenset(paths)
        return known


def _line_pieces(text: str) -> list[Piece]:
    return [
        Piece("text", match.start(), match.end(), match.start(), "", (), ()) for match in re.finditer(r"[^\n]+", text)
    ]
