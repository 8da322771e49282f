"""Notes as pieces, each with the notes that it may be about: those that it, or what governs it, names or links to."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from posttrain.environments.memory.outline import Piece, outline
from posttrain.environments.memory.privacy import USER
from posttrain.environments.memory.redaction import Index, Span, Value
from posttrain.environments.memory.worlds.values import links

_SELF = frozenset(["i", "me", "my", "mine", "myself", "we", "us", "our"])
_OFTEN = 12
"""Names that may share a word for it to mean each of them; one in more is no name."""
_PLAIN = frozenset(
    re.findall(
        r"\S+",
        "the and for with from note notes about doctor street company club house home garden office group team project list log "
        "meeting plan day week user friend friends family",
    )
)


class Page:
    """One note. `pieces` in order of their places; `mentions` of each the paths of the notes it may be about."""

    def __init__(self, path: str, pieces: list[Piece], mentions: list[frozenset[str]]) -> None:
        self.path, self.pieces, self.mentions = path, pieces, mentions
        self.all = frozenset[str]().union(*mentions)
        """The notes that any piece mentions."""
        self._starts = [piece.start for piece in pieces]

    def touches(self, span: Span, abouts: Collection[str]) -> bool:
        """Whether a piece around `span` may be about one of these notes: it stands in it, or mentions it."""
        if self.path in abouts:
            return True
        at = bisect_right(self._starts, max(span[0], span[1] - 1)) - 1
        while at >= 0 and self.pieces[at].end >= span[0]:
            if not self.mentions[at].isdisjoint(abouts):
                return True
            at -= 1
        return False

    def concerns(self, span: Span, about: str) -> bool:
        """As `touches`, of one note."""
        return self.touches(span, (about,))

    def knows(self, abouts: Collection[str]) -> bool:
        """Whether the note is one of these, or mentions one anywhere."""
        return self.path in abouts or not self.all.isdisjoint(abouts)


class Pages:
    """Path -> page, of all notes of a vault."""

    def __init__(
        self,
        files: Mapping[str, str],
        names: Mapping[str, str],
        leads: Callable[[str], str | None],
        wanted: Collection[str],
        loose: bool,
    ) -> None:
        """`wanted` are the notes that rules are about. `loose`: one word of their names is a mention, too, and pieces are
        governed by others; otherwise they are single lines.
        """
        self._leads, self._loose, self._user = leads, loose, USER in wanted
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
        pieces = outline(text) if self._loose else _lines(text)
        self._known.clear()
        named = self._mentioned(path.removesuffix(".md")) if self._loose else frozenset()
        mentions = []
        for piece in pieces:
            found = set(named | self._mentioned(text[piece.start : piece.end]))
            for other in (*piece.headings, *piece.above):
                found |= self._mentioned(other)
            mentions.append(frozenset(found))
        return Page(path, pieces, mentions)

    def _mentioned(self, text: str) -> frozenset[str]:
        known = self._known.get(text)
        if known is None:
            found = {path for _, _, value in self._index.find(text) for path in self._paths[value]}
            found |= {path for _, _, target, _ in links(text.replace("\\|", "|")) if (path := self._leads(target))}
            if self._user and self._loose and _SELF & set(re.findall(r"\w+", text.casefold())):
                found.add(USER)
            known = self._known[text] = frozenset(found)
        return known


def _lines(text: str) -> list[Piece]:
    return [
        Piece("text", match.start(), match.end(), match.start(), "", (), ()) for match in re.finditer(r"[^\n]+", text)
    ]
