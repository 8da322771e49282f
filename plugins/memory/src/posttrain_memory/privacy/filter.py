"""Enforcement of privacy rules outside of the model's control.

The model works on a view of the vault: a copy in which everything hidden is replaced by `[hidden]`, including names
of notes. Its code, searches, sizes and errors therefore reveal nothing about hidden values. The reply and everything
else that is shown are redacted once more, for values that entered the conversation earlier.

Rules that are not understood close the vault: the view is empty and every reply is withheld.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from posttrain_memory.privacy.facts import Fact, facts_of, names_of
from posttrain_memory.privacy.outline import parts_under
from posttrain_memory.privacy.redaction import HIDDEN, Index, Span, category_spans, normalized, redacted, squeeze
from posttrain_memory.privacy.rules import NotUnderstood, Selected, parse_rules, select
from posttrain_memory.vault.links import Notes
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.theme import plain_label, themes
from posttrain_memory.worlds.values import links

_LINK = re.compile(r"\[\[[^\[\]|\n]*\|?([^\[\]\n]*)\]\]")
_TITLE = re.compile(r"^# +(.+?)\s*$", re.MULTILINE)
_SPECIFIC = 3
"""Minimum number of letters and digits of a value that is hidden wherever it occurs; of a number, one more."""

_ITEMS = 12
"""Maximum number of words of a text whose items are hidden too."""

_NEUTRAL = frozenset(
    ["about", "basic", "contact", "data", "detail", "fact", "information", "key", "note", "number", "profile"]
)
"""Stems of the words in headings that do not change whom a fact is about."""


class PrivacyFilter:
    """The effect of a conversation's privacy rules on one vault."""

    def __init__(self, rules: Sequence[str], files: Mapping[str, str], theme: str | None = None) -> None:
        """`rules`: sets of rules (`RuleSet`), all in force. `files`: path -> text. `theme`: of a generated world."""
        self.problem: NotUnderstood | None = None
        """The first set of rules that is not understood. If there is one, nothing is shown."""
        self.active = bool(rules)
        """Whether there are rules. If so, notes cannot be changed, because the view is a copy."""
        self._theme = theme if theme in themes() else None
        self._files = {path: normalized(text) for path, text in files.items()} if rules else {}
        self._names = names_of(self._files)
        self._hide: list[Selected] = []
        self._only: list[list[Selected]] = []
        """The exclusive permissions of each set. Those of one set add up; those of different sets intersect."""
        self._all = self._secrets = Index([])
        self._read(rules)
        self.view: dict[str, str] = {} if self.active else dict(files)
        """Path -> text of the notes as the model sees them. A note whose name reveals something hidden is renamed."""
        if self.active and self.problem is None:
            self._view()

    def clean(self, text: str) -> str:
        """`text` with hidden values replaced; withheld if rules are not understood or hide all notes."""
        if self.problem is not None or (self._files and not self.view):
            return HIDDEN
        plain = normalized(text)
        spans = [*self._secrets.spans(plain), *self._by_form(plain, None)]
        return redacted(plain, spans) if spans else text

    def _read(self, rules: Sequence[str]) -> None:
        for text in rules:
            parsed = parse_rules(text)
            if isinstance(parsed, NotUnderstood):
                self.problem = self.problem or parsed
                continue
            selected = [select(rule, self._names, self._files) for rule in (*parsed.hide, *parsed.only)]
            if None in selected:
                rule = (*parsed.hide, *parsed.only)[selected.index(None)]
                self.problem = self.problem or NotUnderstood(" ".join(text.split())[:120], f"no note is {rule.note!r}")
            known = [one for one in selected if one is not None]
            self._hide += known[: len(parsed.hide)]
            self._only += [known[len(parsed.hide) :]] if parsed.only else []

    def _view(self) -> None:
        """Build the view, and the index of values that a reply must not contain."""
        gone = {path for path in self._files if any(one.whole and one.concerns(path) for one in self._hide)}
        facts = facts_of(self._files, self._theme)
        back = {(fact.value, fact.about) for fact in facts if fact.kind == "link" and self._hides(fact)}
        hidden = {
            fact
            for fact in facts
            if self._hides(fact)
            or fact.about in gone
            or (fact.kind == "link" and (fact.value in gone or (fact.about, fact.value) in back))
        }
        spans: dict[str, list[Span]] = {path: [] for path in self._files}
        for fact in hidden:
            spans[fact.note].append((fact.value_start, fact.value_end))
        for one in self._hide:
            for path in self._files if one.rule.label and self._theme is None else ():
                spans[path] += self._labeled(path, one) if one.concerns(path) else self._elsewhere(path, one)
        shown: dict[str, list[Fact]] = {path: [] for path in self._files}
        for fact in facts:
            shown[fact.note] += [] if fact in hidden else [fact]
        for path, text in self._files.items():
            spans[path] += self._unfound(path, text, facts)
            spans[path] += self._rest(path, text, shown[path]) if self._only else ()
        index, exact = self._indexes(gone, spans, facts, hidden)
        renamed = self._renamed(gone, [index, exact])
        resolve = Notes(self._files).resolve_or_none
        for path, text in self._files.items():
            if path in gone:
                continue
            places = [*spans[path], *self._by_form(text, path), *exact.spans(text)]
            places += index.spans(text)
            for start, end, target, _ in links(text):
                if resolve(target) in gone or resolve(target) in renamed:
                    places.append((start, end))
            self.view[renamed.get(path, path)] = redacted(text, places)
        kept = {value for one in (self._all, exact) for value in one.values}
        told = {value for text in self.view.values() for _, _, values in self._all.find(text) for value in values}
        self._secrets = Index(kept - told)

    def _indexes(
        self, gone: set[str], spans: Mapping[str, Sequence[Span]], facts: Sequence[Fact], hidden: set[Fact]
    ) -> tuple[Index, Index]:
        """The hidden values that all notes are searched for: those that are specific, and those that a rule or the
        name of a hidden note gives exactly. A value that a visible fact of the same label states too, or a visible
        note is called, is not hidden elsewhere.
        """

        def inside(place: int, spans: Sequence[Span]) -> bool:
            """Whether a place is in the last of the sorted spans that begin before it."""
            at = bisect_right(spans, (place, sys.maxsize))
            return at > 0 and place < spans[at - 1][1]

        labels = {label for fact in hidden for label in fact.labels}
        taken = {path: sorted(places) for path, places in spans.items()}
        free = {
            squeeze(self._files[fact.note][fact.value_start : fact.value_end])
            for fact in facts
            if fact not in hidden and fact.labels & labels and not inside(fact.value_start, taken[fact.note])
        }
        free |= {squeeze(name) for name, path in self._names.items() if path not in gone}
        texts = [self._files[path][start:end] for path, places in spans.items() for start, end in places]
        secrets = {piece for text in texts for piece in _pieces(_LINK.sub(r",\1,", text)) if squeeze(piece) not in free}
        self._all = Index(secrets)
        specific = [value for value in secrets if len(squeeze(value)) >= _SPECIFIC + value.isdigit()]
        exact = [one.rule.value for one in self._hide if one.rule.value and one.rule.label is None]
        # The facts of a generated world are all known, so equal values of others stay.
        names = [name for name, path in self._names.items() if path in gone]
        return Index(specific if self._theme is None else ()), Index([*exact, *names])

    def _hides(self, fact: Fact) -> bool:
        """Whether the rules forbid a fact."""
        if any(self._covers(one, fact, exactly=self._theme is not None) for one in self._hide):
            return True
        return fact.kind != "link" and any(not any(self._covers(s, fact, True) for s in only) for only in self._only)

    def _covers(self, one: Selected, fact: Fact, exactly: bool) -> bool:
        rule = one.rule
        if not one.concerns(fact.about) or (rule.value and squeeze(rule.value) not in squeeze(fact.value)):
            return False
        if rule.label and not any(_names_label(rule.label, label, exactly) for label in fact.labels):
            return False
        text = self._files[fact.note][fact.value_start : fact.value_end]
        unnamed = not rule.category or fact.kind == rule.category
        return unnamed or (not exactly and bool(category_spans(rule.category or "", text)))

    def _labeled(self, path: str, one: Selected) -> Iterator[Span]:
        """The parts of a note under the label of a rule, in which its category or value occurs, if it has one."""
        label, text = one.rule.label or "", self._files[path]
        for start, end in parts_under(text, len(label.split()), lambda words: _names_label(label, words, False)):
            part = text[start:end]
            if one.rule.value and squeeze(one.rule.value) not in squeeze(part):
                continue
            if not one.rule.category or category_spans(one.rule.category, part):
                yield start, end

    def _elsewhere(self, path: str, one: Selected) -> Iterator[Span]:
        """The parts of another note under the label of a rule that stand beside or below the name of its note."""
        text = self._files[path]
        names = [name for name, other in self._names.items() if one.concerns(other) and len(name) > 1]
        if not any(name in text.casefold() for name in names):
            return
        regions = list(parts_under(text, 1, lambda words: any(_stems(name) <= _stems(words) for name in names)))
        for start, end in self._labeled(path, one):
            line = text[text.rfind("\n", 0, start) + 1 : end].casefold()
            if any(name in line for name in names) or any(a <= start < b for a, b in regions):
                yield start, end

    def _by_form(self, text: str, path: str | None) -> list[Span]:
        """The places with the form of a hidden category: in the note `path`, or in any text if it is None."""
        wanted = {
            one.rule.category
            for one in self._hide
            if one.rule.category
            and not one.rule.label
            and not one.rule.value
            and (one.notes is None or one.concerns(*filter(None, [path])))
        }
        return [span for name in wanted for span in category_spans(name, text, wide=self._theme is None)]

    def _unfound(self, path: str, text: str, facts: Sequence[Fact]) -> Iterator[Span]:
        """All of a note but its title, if it lacks the label that a rule names: other words may tell the fact."""
        for one in self._hide:
            if one.rule.label is None or one.notes != {path} or any(self._labeled(path, one)):
                continue
            if not any(self._covers(one, fact, self._theme is not None) for fact in facts):
                yield from self._rest(path, text, [], links_too=False)

    def _rest(self, path: str, text: str, permitted: Sequence[Fact], links_too: bool = True) -> Iterator[Span]:
        """Everything in a note except the permitted facts, and the names of notes in its title and links."""
        if permitted and all(any(one.whole and one.concerns(path) for one in only) for only in self._only):
            return
        kept = [(f.start, f.end) for f in permitted if f.kind != "link" and (self._theme or _plain_place(text, f))]
        for start, end, target, alias in links(text) if links_too else ():
            stem = re.sub(r"[_-]+", " ", target.removesuffix(".md").rpartition("/")[2]).casefold()
            known = self._names.get(" ".join(alias.casefold().split()))
            if not alias or (known is not None and known == self._names.get(stem, known)):
                kept.append((start, end))
        title = _TITLE.search(text)
        kept += [title.span()] if title else []
        at = 0
        for start, end in [*sorted(kept), (len(text), len(text))]:
            for match in re.finditer(r"[^\W_](?:[^\n]*[^\W_])?", text[at:start]):
                yield at + match.start(), at + match.end()
            at = max(at, end)

    def _renamed(self, gone: set[str], indexes: Sequence[Index]) -> dict[str, str]:
        """Path -> neutral path of each note whose name contains something hidden."""
        renamed: dict[str, str] = {}
        neutral = (f"hidden-{number}.md" for number in count(1))
        for path in sorted(set(self._files) - gone - {USER}):
            name = re.sub(r"[/_.]", " ", path.removesuffix(".md"))
            if any(any(index.spans(name)) for index in indexes) or self._by_form(name, path):
                renamed[path] = next(other for other in neutral if other not in self._files)
        return renamed


def _plain_place(text: str, fact: Fact) -> bool:
    """Whether nothing above a fact suggests that it belongs to something else than its note."""
    headings = re.findall(r"^#{2,6}\s+(.*)|^(?:---+|===+)$", text[: fact.start], re.MULTILINE)
    line = text[text.rfind("\n", 0, fact.start) + 1 : fact.end]
    return line[:1].strip() != "" and (not headings or not _stems(headings[-1]) - _NEUTRAL)


def _pieces(text: str) -> list[str]:
    """A hidden text and, unless it is long, the items in it."""
    text = re.sub(r"^(?:[-*+>]|\d+[.)])\s+", "", text.strip().removesuffix("-->").strip())
    items = re.split(r"\s*(?:[,;()|:\[\]]|^[-*+])\s*(?:and\s+)?|\s+and\s+", text) if len(text.split()) <= _ITEMS else []
    return [one for one in {text, *items} if len(squeeze(one)) > 1 or re.search(r"\d", one)]


def _names_label(wanted: str, label: str, exactly: bool) -> bool:
    """Whether a label of a note is the one of a rule; unless `exactly`, also if it has more words, or in the plural."""
    if exactly:
        return plain_label(wanted) == plain_label(label)
    return _stems(wanted) <= _stems(label)


def _stems(text: str) -> set[str]:
    words = re.findall(r"[^\W_]+", text.casefold())
    return {re.sub(r"(?:y|ies|es|s)$", "", word) if len(word) > 3 else word for word in words}
