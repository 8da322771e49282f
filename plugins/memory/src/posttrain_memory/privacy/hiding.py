"""Decides what privacy rules hide: recognized facts, and parts of notes that may state the same in another form."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

from posttrain_memory.privacy.categories import LABELS, TITLES, in_category, stem
from posttrain_memory.privacy.facts import Fact
from posttrain_memory.privacy.pages import Page, Pages, Piece
from posttrain_memory.privacy.redaction import Span, Value, prose
from posttrain_memory.privacy.rules import CATEGORIES, Rule, synonyms
from posttrain_memory.worlds.theme import themes
from posttrain_memory.worlds.truth import title
from posttrain_memory.worlds.values import FINDABLE, canonical, find, links

COMMON = frozenset(
    re.findall(r"\w+", "a an the of and or in on at to by for with is are was be this that it as no not from")
)
_GENERIC = COMMON | frozenset(
    re.findall(
        r"\S+",
        "number type name names date day time value favourite favorite home current main own my her his their other new old kind "
        "list details detail info information notes all years s first last next",
    )
)
_DULL = _GENERIC | frozenset(
    re.findall(
        r"\S+",
        "none known unknown yes see table above below since also very about some have has been they were will would should could "
        "them than then when where which what there here only just over under more most less least many much every each both same "
        "once twice still again never always often after before during between year years month months week weeks days today now "
        "good well long short high note please thing things people person work works lives with without",
    )
)
_NEUTRAL = frozenset(
    re.findall(
        r"\S+",
        "about info information details detail contact contacts facts fact basics profile data overview summary general personal "
        "glance notes properties attributes key card sheet essentials numbers the at a and of in short",
    )
)
_LONGEST = 12
_TYPED = ("email", "date", "money", "phone")


class RuleMatcher:
    """Applies rules to facts and pieces of notes. Forbidding rules are read broadly, permissions exactly."""

    def __init__(
        self,
        rules: Sequence[Rule],
        allowing: Sequence[Sequence[Rule]],
        facts: Sequence[Fact],
        theme: str | None,
        pages: Pages,
        texts: Mapping[str, str],
    ) -> None:
        """`allowing` holds the permissions of each text; a fact must be permitted by every one of them. `texts` are
        the notes (path -> text) that `pages` divides into pieces.
        """
        self.allowing = allowing
        self.abouts = frozenset(rule.about for rule in rules if rule.about)
        self._forbidding = [rule for rule in rules if not rule.allow]
        self._theme = theme
        self._labels = frozenset(label for fact in facts for label in fact.labels)
        self._about: dict[str, list[Fact]] = {}
        self._turned: dict[tuple[str, str], set[str]] = {}
        for fact in facts:
            self._about.setdefault(fact.about, []).append(fact)
            if fact.kind == "link":
                self._turned.setdefault((fact.about, fact.value), set()).update(fact.labels)
        self._terms = {rule: _terms(rule.label) for rule in self._forbidding if rule.label}
        self._found = {
            rule: self._is_found(rule) or self._is_told(rule, pages[rule.about], texts[rule.about])
            for rule in self._forbidding
            if (rule.label or rule.category) and rule.about is not None
        }
        """Rules about one note -> whether it states the fact they mean. If not, all of the note is hidden."""
        self._own = frozenset(
            stem(word)
            for rule in rules
            for name in (*_also(rule.label or ""), *CATEGORIES.get(rule.category or "", ()))
            for word in name.split()
        )

    def hides(self, fact: Fact) -> bool:
        """Whether the rules forbid a fact."""
        if any(self._names(rule, fact) for rule in self._forbidding):
            return True
        if fact.kind == "link":
            return False
        return any(not any(self._names(rule, fact) for rule in allowing) for allowing in self.allowing)

    def everywhere(self, value: Value) -> bool:
        """Whether a value with little meaning of its own is hidden in all notes, because the rule covers all notes."""
        return (
            self._theme is None
            and value.kind == "text"
            and len(value.text) >= 4
            and any(rule.label and rule.about is None for rule in self._forbidding)
        )

    def says(self, word: str) -> bool:
        """Whether the rules contain a word, in some form."""
        return _has(self._own, stem(word))

    def words(self, text: str) -> Iterator[Value]:
        """The words and digits of a hidden text that could reveal it, except those that the rules themselves contain."""
        for word in re.findall(r"[^\W_]{3,}", text):
            known = word.casefold() in _DULL or self.says(word)
            if not known and (len(word) > 3 or not word.islower()):
                yield Value("word", word)

    def pieces(self, path: str, text: str, page: Page) -> Iterator[tuple[int, Span]]:
        """The indices of the pieces of a note that may state something forbidden, and the span to hide in each."""
        notes = set()
        for rule in self._forbidding:
            if rule.label is None and rule.category is None:
                continue
            for number, piece in enumerate(page.pieces):
                if rule.about is None or path == rule.about or rule.about in page.mentions[number]:
                    start = self._from(rule, piece, text)
                    if start is not None and start < piece.end:
                        notes |= set(re.findall(r"\[\^([^\]\s]+)\]", text[piece.start : piece.end]))
                        yield number, (start, piece.end)
        for number, piece in enumerate(page.pieces):
            footnote = re.match(r"\[\^([^\]\s]+)\]", text[piece.start : piece.end])
            if footnote and footnote[1] in notes:
                yield number, (piece.start, piece.end)

    def unread(self, path: str, text: str, page: Page, facts: Sequence[Fact]) -> Iterator[Span]:
        """Sentences that may state a forbidden fact in free text: those with a word of its label, and all sentences
        of its note and about it if no labeled fact of it was recognized.
        """
        for rule in self._forbidding:
            if not rule.label and not rule.category:
                continue
            known = self._found.get(rule, False)
            words = set((rule.label or CATEGORIES[rule.category or "phone"][0]).split()) - COMMON
            for start, end in prose(text, facts):
                sentence_words = set(re.findall(r"\w+", text[start:end].casefold()))
                about = rule.about is None or page.concerns((start, end), rule.about)
                if about and (words & sentence_words or (rule.about is not None and not known)):
                    yield start, end
            if path == rule.about and not known:
                name = title(text)
                for piece in page.pieces:
                    if piece.kind in ("cell", "head", "block") or (
                        piece.kind == "heading" and text[piece.start : piece.end].strip("# ") != name
                    ):
                        yield piece.start, piece.end

    def rest(
        self, text: str, page: Page, permitted: Sequence[Fact], names: Mapping[str, str], path: str
    ) -> Iterator[Span]:
        """Everything in a note except the permitted facts and the names of notes in its title and links."""
        kept = [
            (fact.start, fact.end)
            for fact in permitted
            if fact.kind != "link" and self._plainly_governed(fact, text, page)
        ]
        for start, end, target, alias in links(text):
            stem_ = re.sub(r"[_-]+", " ", target.removesuffix(".md").rpartition("/")[2]).casefold()
            known = names.get(" ".join(alias.casefold().split()))
            if not alias or (known is not None and known == names.get(stem_, known)):
                kept.append((start, end))
        name = re.search(r"^# +(.+?)\s*$", text, re.MULTILINE)
        if name:
            kept.append(name.span())
        kept.sort()
        at = 0
        for line in re.finditer(r"[^\n]+", text):
            place = line.start()
            while at < len(kept) and kept[at][1] <= place:
                at += 1
            for start, end in kept[at:]:
                if start >= line.end():
                    break
                yield from _trimmed(text, place, max(place, start))
                place = max(place, end)
            yield from _trimmed(text, place, line.end())

    def _plainly_governed(self, fact: Fact, text: str, page: Page) -> bool:
        """Whether nothing above a fact suggests that it belongs to another note."""
        if all(rule.about is None for allowing in self.allowing for rule in allowing):
            return True
        label_words = set().union(*(label.split() for label in fact.labels))
        for piece in page.pieces:
            if piece.start <= fact.value_start < max(piece.end, piece.start + 1):
                above = piece.above if piece.kind not in ("cell", "head") else ()
                for other in (*piece.headings, *above):
                    words = set(re.findall(r"\w+", other.casefold()))
                    if other != title(text) and words - _NEUTRAL - label_words - _usual_headings():
                        return False
        return True

    def _names(self, rule: Rule, fact: Fact) -> bool:
        """Whether `rule` covers `fact`: broadly for forbidding rules, exactly for permissions."""
        if (
            rule.about is not None
            and rule.about != fact.about
            and not (fact.kind == "link" and rule.about == fact.value)
        ):
            return False
        if rule.category is not None:
            return in_category(rule.category, fact, rule.allow, self._theme is None)
        if rule.label is None:
            return True
        if rule.about != fact.about and rule.about is not None:
            # A link back states the same as a forbidden relation.
            return not rule.allow and rule.label in self._turned.get((rule.about, fact.about), ())
        if rule.label in fact.labels:
            return True
        return not rule.allow and (self._resembles(rule.label, fact) or self._may_be_synonym(rule, fact))

    def _may_be_synonym(self, rule: Rule, fact: Fact) -> bool:
        """Without a theme: whether a synonym of the forbidden label names the fact, or the note has no fact with any
        of these names, so that any of its facts may be the one meant.
        """
        if self._theme is not None or rule.label is None:
            return False
        return bool(_also(rule.label) & fact.labels) or (rule.about is not None and not self._found.get(rule, False))

    def _is_found(self, rule: Rule) -> bool:
        """Whether the note that a rule is about has the fact that the rule means, under one of its names."""
        note_facts = self._about.get(rule.about or "", [])
        if rule.category is not None:
            return any(in_category(rule.category, fact, False, self._theme is None) for fact in note_facts)
        names = _also(rule.label or "")
        return any(names & fact.labels or self._resembles(rule.label or "", fact) for fact in note_facts)

    def _is_told(self, rule: Rule, page: Page, text: str) -> bool:
        """Whether a piece of a note states what a rule means, under a label, heading or column of its own."""
        if self._theme is not None:
            return False
        for piece in page.pieces:
            start = self._from(rule, piece, text)
            if start is not None and piece.kind != "heading" and re.search(r"\w", text[start : piece.end]):
                labeled = rule.label is None or (bool(piece.label) and _mentions(self._terms[rule], piece.label))
                above = rule.label is not None and piece.kind in ("item", "cell")
                if labeled or (
                    above and any(_mentions(self._terms[rule], one) for one in (*piece.headings, *piece.above))
                ):
                    return True
        return False

    def _resembles(self, label: str, fact: Fact) -> bool:
        """Whether a forbidden label that no fact of the vault has shares a word with the labels of this fact."""
        if label in self._labels:
            return False
        words = set(label.split()) - COMMON
        return any(words & set(other.split()) for other in fact.labels)

    def _from(self, rule: Rule, piece: Piece, text: str) -> int | None:
        """Where the forbidden part of a piece begins; None if the piece is not covered."""
        content = text[piece.start : piece.end]
        if rule.category is not None:
            words = LABELS[rule.category]
            governed = any(_words(other) & TITLES[rule.category] for other in piece.headings) or any(
                _words(other) & words for other in piece.above if len(other.split()) <= 6
            )
            if governed and piece.kind != "head":
                return piece.start
            other = any(
                canonical(kind, text[piece.value_start : piece.end]) for kind in _TYPED if kind != rule.category
            )
            return piece.value_start if piece.label and _words(piece.label) & words and not other else None
        terms = self._terms[rule]
        if any(_mentions(terms, other) for other in (*piece.headings, *piece.above)):
            return piece.start
        if not _mentions(terms, content):
            return None
        if piece.label and _only(terms, piece.label):
            return piece.value_start
        return None if piece.kind in ("heading", "head") and _only(terms, content) else piece.start


def values_of(text: str, fact: Fact | None, loose: bool) -> list[Value]:
    """The values by which a hidden text can be recognized: the text itself, list items, and typed values in it. With
    `loose`, also its significant words and digits.

    `fact` is the fact whose value it is, or None for a piece of a note.
    """
    if fact is not None and fact.kind in FINDABLE:
        return [Value(fact.kind, fact.value)]
    whole = text.strip().removesuffix("-->").strip().strip("*_`").strip()
    values = [Value("text", whole)] if len(whole.split()) <= _LONGEST or not loose else []
    if (fact is not None and fact.kind == "list") or re.search(r", | and |; ", whole):
        values += [Value("text", item) for item in re.split(r"\s*[,;]\s*(?:and\s+)?|\s+and\s+", whole) if item]
    values += [Value(kind, item.value) for kind in FINDABLE if kind != "number" for item in find(kind, whole)]
    if loose:
        values += [Value("text", item) for item in re.split(r"\s*[,;/()\[\]\"|]\s*", whole)]
        if len(whole.split()) <= _LONGEST:
            values += [Value("word", word) for word in re.findall(r"[^\W_]{4,}", whole)]
        values += [Value("digits", re.sub(r"\D", "", run)) for run in re.findall(r"(?<!\w)\d[\d.,'’ ]*\d(?!\w)", whole)]
    dull = _DULL if loose else COMMON
    return [value for value in values if value.text.casefold() not in dull and re.search(r"\w", value.text)]


@cache
def _usual_headings() -> frozenset[str]:
    """The words in fact headings of generated worlds."""
    return frozenset(
        re.findall(r"\w+", " ".join(name for one in themes().values() for name in one.headings.facts).casefold())
    )


def _also(label: str) -> frozenset[str]:
    """A label and its synonyms."""
    return synonyms().get(label, frozenset()) | {label}


def _terms(label: str) -> list[frozenset[str]]:
    """Sets of stems; a text that mentions the label contains one of them. One set per significant word, or one set of
    all words.
    """
    terms = []
    for name in _also(label):
        words = set(name.split()) - COMMON
        telling = [word for word in words - _GENERIC if name == label or len(words) == 1]
        terms += [frozenset([stem(word)]) for word in telling] or [frozenset(map(stem, words or {name}))]
    return terms


def _mentions(terms: Iterable[frozenset[str]], text: str) -> bool:
    stems = _stems(text)
    return any(all(_has(stems, one) for one in term) for term in terms)


def _has(words: frozenset[str], wanted: str) -> bool:
    return wanted in words or (
        len(wanted) >= 5
        and any(len(word) >= 5 and (word.startswith(wanted) or wanted.startswith(word)) for word in words)
    )


def _only(terms: Iterable[frozenset[str]], text: str) -> bool:
    """Whether a text has no words other than those of the label."""
    wanted = frozenset[str]().union(*terms)
    return all(_has(wanted, word) or word in _GENERIC for word in _stems(text))


@lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    """The words of a text, without its links."""
    return frozenset(re.findall(r"[^\W\d_]+", re.sub(r"\[\[[^\[\]\n]*\]\]", " ", text).casefold()))


@lru_cache(maxsize=4096)
def _stems(text: str) -> frozenset[str]:
    return frozenset(map(stem, _words(text)))


def _trimmed(text: str, start: int, end: int) -> Iterator[Span]:
    """A span narrowed to its first and last letter or digit."""
    matches = list(re.finditer(r"[^\W_]", text[start:end]))
    if matches:
        yield start + matches[0].start(), start + matches[-1].end()
