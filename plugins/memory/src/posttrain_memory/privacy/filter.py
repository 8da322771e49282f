"""Enforcement of privacy rules outside of the model's control.

The model works on a view of the vault: a copy in which everything hidden is replaced by `[hidden]`, including names
of notes. Its code, searches, sizes and errors therefore reveal nothing about hidden values. The reply and everything
else that is shown are redacted once more, for values that entered the conversation earlier.

A rule that is not understood closes the vault: the view is empty and every reply is withheld.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from posttrain_memory.privacy.categories import of_category
from posttrain_memory.privacy.facts import Fact, facts_of, link_resolver, names_of
from posttrain_memory.privacy.hiding import RuleMatcher, values_of
from posttrain_memory.privacy.pages import Pages
from posttrain_memory.privacy.redaction import (
    HIDDEN,
    Index,
    Span,
    Value,
    is_specific,
    normalized,
    prose,
    redacted,
    sentence_at,
    within,
)
from posttrain_memory.privacy.rules import NotUnderstood, Rule, read_rules
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.theme import themes
from posttrain_memory.worlds.values import links

_BLOCK = re.compile(r"<\s*filter\s*>(.*?)(?:<\s*/\s*filter\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_WEB_LINK = re.compile(r"!?\[[^\[\]\n]*\]\([^()\n]*\)|<[^<>\s]+>|\bhttps?://[^\s<>)\]]+")


def split_question(message: str) -> tuple[str, list[str]]:
    """The user's message without its `<filter>` blocks, and the rules in them. An unclosed block extends to the end."""
    return _BLOCK.sub(" ", message).strip(), [match.group(1).strip() for match in _BLOCK.finditer(message)]


class PrivacyFilter:
    """The effect of a conversation's privacy rules on one vault."""

    def __init__(self, rules: Sequence[str], files: Mapping[str, str], theme: str | None = None) -> None:
        """`rules` are texts of rules, all in force at once. `files` is the vault (path -> text), `theme` the theme of
        a generated world, if known.

        One text cannot allow what another forbids or does not allow. Without a theme, it is not always certain what a
        part of a note states; doubtful parts are hidden. The time is linear in the size of the vault.
        """
        self._theme = theme if theme in themes() else None
        self._files = {path: normalized(text) for path, text in files.items()} if rules else dict(files)
        self._facts = facts_of(self._files, theme) if rules else []
        self._names = names_of(self._files) if rules else {}
        self.rules: list[Rule] = []
        allowing: list[list[Rule]] = []
        """The exclusive permissions of each text. Permissions within a text add up; those of different texts
        intersect.
        """
        self.problem: NotUnderstood | None = None
        """The first sentence that is not a rule. If there is one, nothing is shown."""
        labels = frozenset(label for fact in self._facts for label in fact.labels)
        for text in rules:
            parsed = read_rules(text, labels, self._names)
            if isinstance(parsed, NotUnderstood):
                self.problem = self.problem or parsed
            else:
                self.rules += parsed
                allowing += [alone] if (alone := [rule for rule in parsed if rule.allow]) else []
        self._secrets = Index([])
        self._closed = self.problem is not None or Rule(False) in self.rules
        """Whether nothing at all may be said."""
        self.view: dict[str, str] = {} if self.active else dict(files)
        """Path -> text of the notes as the model sees them. A note whose name reveals something hidden is renamed."""
        if self.rules and not self._closed:
            self._leads = link_resolver(self._files)
            wanted = {rule.about for rule in self.rules if rule.about}
            self._pages = Pages(self._files, self._names, self._leads, wanted, self._theme is None)
            self._matcher = RuleMatcher(self.rules, allowing, self._facts, self._theme, self._pages, self._files)
            self._named = {word for name in self._names for word in re.findall(r"[^\W_]+", name)}
            """Single words from names of notes. The names themselves may be said."""
            self._view()

    @property
    def active(self) -> bool:
        """Whether there are rules. If so, notes cannot be changed, because the view is a copy."""
        return bool(self.rules) or self.problem is not None

    def clean(self, text: str) -> str:
        """`text` with everything that must not be said replaced. Withheld completely if nothing may be said or a rule
        was not understood.
        """
        if self._closed:
            return HIDDEN
        plain = normalized(text)
        spans = [(start, end) for start, end, _ in self._secrets.find_disguised(plain)]
        spans += self._secrets.squeezed(plain)
        for rule in self.rules:
            if not rule.allow and rule.category and rule.about is None:
                spans += of_category(rule.category, plain, wide=self._theme is None)
        return redacted(plain, spans) if spans else text

    def _view(self) -> None:
        """Build the view, and the index of values that a reply must not contain."""
        forbidden = [rule for rule in self.rules if not rule.allow]
        gone = {rule.about for rule in forbidden if rule.about and not rule.label and not rule.category}
        facts: dict[str, list[Fact]] = {path: [] for path in self._files}
        for fact in self._facts:
            facts[fact.note].append(fact)
        hidden = {fact for fact in self._facts if self._matcher.hides(fact)}
        whole: dict[str, list[Span]] = {}
        secret: dict[Value, set[str]] = {}
        self._words: set[Value] = set()
        for path, text in self._files.items():
            whole[path] = self._hidden_by_facts(path, facts[path], hidden, secret, gone)
            for fact in facts[path]:
                if fact in hidden and fact.kind != "link":
                    for value in self._values(text[fact.value_start : fact.value_end], fact):
                        secret.setdefault(value, set()).add(fact.about)
        index = Index(secret)
        names = Index(Value("text", name) for name, path in self._names.items() if path in gone)
        spans = {}
        for path in self._files:
            if path not in gone:
                seen = [fact for fact in facts[path] if fact not in hidden]
                spans[path] = [
                    *whole[path],
                    *self._repeated_values(path, seen, index, secret),
                    *self._by_name(path, names, gone),
                ]
        turned = self._renamed(gone, index, secret)
        for path, item in spans.items():
            self.view[turned.get(path, path)] = redacted(self._files[path], [*item, *self._links(path, item, turned)])
        names_hidden = Index(Value("text", name) for name in self._hidden_names(hidden))
        shown: set[Value] = set()
        words = set(self._named)
        for text in self.view.values():
            shown |= {value for item in (index, names_hidden) for _, _, value in item.find(text)}
            words |= set(re.findall(r"[^\W_]+", text.casefold()))
        kept = [value for value in (*secret, *names_hidden.values) if value not in shown and value.kind != "word"]
        self._secrets = Index([*kept, *(word for word in self._words if word.text.casefold() not in words)])

    def _hidden_by_facts(
        self, path: str, facts: Sequence[Fact], hidden: set[Fact], secret: dict[Value, set[str]], gone: set[str]
    ) -> list[Span]:
        """Spans of a note hidden because of the facts they state. Their values are added to `secret`."""
        text = self._files[path]
        spans = [(fact.value_start, fact.value_end) for fact in facts if fact in hidden]
        if self._theme is not None:
            spans += self._by_appearance(path)
            return [*spans, *prose(text, facts)] if self._matcher.allowing else spans
        page = self._pages[path]
        for number, span in self._matcher.pieces(path, text, page):
            spans.append(span)
            piece = page.pieces[number]
            hidden_part = text[max(span[0], piece.value_start) : span[1]]
            if piece.kind != "heading" and len(hidden_part.split()) <= 8 and not links(hidden_part):
                abouts = page.mentions[number] & self._matcher.abouts or {path}
                for value in self._values(hidden_part, None):
                    secret.setdefault(value, set()).update(abouts)
        for piece, mentions in zip(page.pieces, page.mentions, strict=True):
            if path not in gone and mentions & gone and not self._matcher.allowing:
                spans.append((piece.start, piece.end))
        if self._matcher.allowing:
            spans += self._matcher.rest(text, page, [fact for fact in facts if fact not in hidden], self._names, path)
        else:
            spans += self._matcher.unread(path, text, page, facts)
        hidden_text = [text] if path in gone else [text[start:end] for start, end in spans]
        self._words |= {value for hidden_part in hidden_text for value in self._matcher.words(hidden_part)}
        return [*spans, *self._by_appearance(path)]

    def _values(self, text: str, fact: Fact | None) -> Iterable[Value]:
        """The values in a hidden text, except single words from names of notes, because the names themselves may be
        said.
        """
        for value in values_of(text, fact, self._theme is None):
            if value.kind != "word" or (
                value.text.casefold() not in self._named and not self._matcher.says(value.text)
            ):
                yield value

    def _by_appearance(self, path: str) -> Iterable[Span]:
        """Spans that look like values of forbidden categories."""
        for rule in self.rules:
            if not rule.allow and rule.category:
                for span in of_category(rule.category, self._files[path], wide=self._theme is None):
                    if rule.about is None or self._pages[path].concerns(span, rule.about):
                        yield span

    def _repeated_values(
        self, path: str, seen: Sequence[Fact], index: Index, secret: Mapping[Value, set[str]]
    ) -> Iterable[Span]:
        """Further occurrences of hidden values, except where another note's permitted fact has the same value."""
        page = self._pages[path]
        free = sorted((fact.value_start, fact.value_end, fact.about) for fact in seen)
        for start, end, value in index.find_disguised(self._files[path]):
            abouts = secret[value]
            permitted = [about for first, last, about in free if first < end and start < last]
            here = page.touches((start, end), abouts)
            if permitted and (self._theme is not None or (not here and not abouts & set(permitted))):
                continue
            near = here or (self._theme is None and value.kind == "text" and page.knows(abouts))
            if is_specific(value) or near or self._matcher.everywhere(value):
                yield start, end

    def _by_name(self, path: str, names: Index, gone: set[str]) -> Iterable[Span]:
        """Sentences that name a note about which nothing may be said, and links to it."""
        if gone:
            text = self._files[path]
            yield from (sentence_at(text, (start, end)) for start, end, _ in names.find(text))
            yield from ((start, end) for start, end, target, _ in links(text) if self._leads(target) in gone)

    def _links(self, path: str, spans: Sequence[Span], turned: Mapping[str, str]) -> Iterable[Span]:
        """Complete links to notes whose names are hidden, and, in vaults without a theme, links that are partly
        hidden.
        """
        text = self._files[path]
        if turned:
            yield from ((start, end) for start, end, target, _ in links(text) if self._leads(target) in turned)
        if self._theme is None and spans:
            places = [(start, end) for start, end, _, _ in links(text)]
            places += [match.span() for match in _WEB_LINK.finditer(text)]
            yield from (place for place in places if within(place, spans))

    def _renamed(self, gone: set[str], index: Index, secret: Mapping[Value, set[str]]) -> dict[str, str]:
        """Path -> a neutral path, for each note whose own path would reveal something."""
        renamed: dict[str, str] = {}
        for path in sorted(self._files):
            if path in gone or path == USER:
                continue
            name = path.removesuffix(".md").replace("_", " ")
            page = self._pages[path]
            reveals = any(
                is_specific(value) or (self._theme is None and page.knows(secret[value]))
                for _, _, value in index.find(name)
            )
            for rule in self.rules if self._theme is None else ():
                if not rule.allow and rule.category and (rule.about is None or page.knows({rule.about})):
                    reveals = reveals or bool(of_category(rule.category, name))
            if reveals:
                number = len(renamed) + 1
                while f"hidden-{number}.md" in self._files:
                    number += len(self._files)
                renamed[path] = f"hidden-{number}.md"
        return renamed

    def _hidden_names(self, hidden: set[Fact]) -> list[str]:
        """Names of notes about which nothing may be said, and of targets of forbidden relations."""
        gone = {rule.about for rule in self.rules if rule == Rule(False, about=rule.about) and rule.about}
        gone |= {fact.value for fact in hidden if fact.kind == "link" and fact.about not in gone}
        asked = {rule.about for rule in self.rules if rule.label or rule.category}
        return [name for name, path in self._names.items() if path in gone - asked]
