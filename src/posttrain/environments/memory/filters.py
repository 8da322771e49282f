"""Privacy filters, enforced on the trusted side.

The model never works with the vault itself but with a view of it: a copy in which everything that the rules hide is
replaced by `[hidden]`. Its code, searches, sizes and errors therefore tell nothing about hidden values, however they are
turned around. The reply and everything else that is shown are looked through once more, for values that came into the
conversation earlier. A rule that is not understood closes the vault: the view is empty and every reply is withheld.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from posttrain.environments.memory.facts import Fact, facts_of, names_of
from posttrain.environments.memory.privacy import CATEGORIES, NotUnderstood, Rule, read_rules, synonyms
from posttrain.environments.memory.redaction import (
    HIDDEN,
    Span,
    Value,
    blanked,
    occurrences,
    of_category,
    prose,
    sentence_at,
    spelled,
    telling,
    within,
)
from posttrain.environments.memory.worlds.themes import THEMES
from posttrain.environments.memory.worlds.truth import resolve
from posttrain.environments.memory.worlds.values import FINDABLE, find, links

_BLOCK = re.compile(r"<\s*filter\s*>(.*?)(?:<\s*/\s*filter\s*>|\Z)", re.DOTALL | re.IGNORECASE)
_COMMON = frozenset(
    re.findall(r"\w+", "a an the of and or in on at to by for with is are was be this that it as no not from")
)


def split_question(message: str) -> tuple[str, list[str]]:
    """The user's message without its `<filter>` blocks, and the rules in them; an unclosed block goes to the end."""
    return _BLOCK.sub(" ", message).strip(), [match.group(1).strip() for match in _BLOCK.finditer(message)]


class Filter:
    """What the rules of one conversation hide, in one vault."""

    def __init__(self, rules: Sequence[str], files: Mapping[str, str], theme: str | None = None) -> None:
        """`rules` are texts of rules, all in force at once, `files` the vault (path -> text), `theme` that of a made-up
        world if it is known. A text cannot allow what another forbids, or does not allow.

        Without a theme, sentences that state a fact cannot all be known, and more of them is hidden.
        """
        self._files = dict(files)
        self._theme = theme if theme in THEMES else None
        self._facts = facts_of(files, theme) if rules else []
        self._names = names_of(files) if rules else {}
        self.rules: list[Rule] = []
        self._allowing: list[list[Rule]] = []
        """What alone may be told, by the text that says so: one text adds to itself, another takes away from it."""
        self.problem: NotUnderstood | None = None
        """The first sentence that is no rule; then nothing at all is shown."""
        labels = frozenset(label for fact in self._facts for label in fact.labels)
        for text in rules:
            found = read_rules(text, labels, self._names)
            if isinstance(found, NotUnderstood):
                self.problem = self.problem or found
            else:
                self.rules += found
                self._allowing += [allowing] if (allowing := [rule for rule in found if rule.allow]) else []
        self.view = self._view()
        """Path -> text of the notes that the model may work with."""
        self._values = self._secret_values()

    @property
    def active(self) -> bool:
        """There are rules. Notes then cannot be changed, for the view is a copy."""
        return bool(self.rules) or self.problem is not None

    def clean(self, text: str) -> str:
        """`text`, a reply, with what must not be said replaced; withheld as a whole where a rule was not understood."""
        if self.problem is not None:
            return HIDDEN
        spans = [span for value in self._values for span in occurrences(value, text)]
        for rule in self.rules:
            if not rule.allow and rule.category and rule.about is None:
                spans += of_category(rule.category, text)
        return blanked(text, spans)

    def hides(self, fact: Fact) -> bool:
        """Whether the rules forbid to say this fact."""
        if any(self._names_fact(rule, fact) for rule in self.rules if not rule.allow):
            return True
        if fact.kind == "link":
            return False
        return any(not any(self._names_fact(rule, fact) for rule in allowing) for allowing in self._allowing)

    def _names_fact(self, rule: Rule, fact: Fact) -> bool:
        """Whether `rule` is about `fact`: forbidden ones widely, allowed ones only exactly."""
        if (
            rule.about is not None
            and rule.about != fact.about
            and not (fact.kind == "link" and rule.about == fact.value)
        ):
            return False
        if rule.category is not None:
            return _in_category(rule.category, fact, rule.allow)
        if rule.label is None:
            return True
        if rule.about != fact.about and rule.about is not None:
            return not rule.allow and self._turns(rule, fact)
        if rule.label in fact.labels:
            return True
        return not rule.allow and (self._resembles(rule.label, fact) or self._may_be_called(rule, fact))

    def _turns(self, rule: Rule, link: Fact) -> bool:
        """Whether a link back says the same as a forbidden relation."""
        return any(
            fact.kind == "link"
            and (fact.about, fact.value) == (link.value, link.about)
            and rule.label in fact.labels
            and fact.about == rule.about
            for fact in self._facts
        )

    def _may_be_called(self, rule: Rule, fact: Fact) -> bool:
        """Without a theme: whether the fact has another name of the forbidden label, or, where its note has no fact of
        any of these names, whether it is one of that note, for its name may be one that nobody knows.
        """
        if self._theme is not None or rule.label is None:
            return False
        return bool(_names(rule.label) & fact.labels) or (rule.about is not None and not self._found(rule))

    def _found(self, rule: Rule) -> bool:
        """Whether the note that a rule is about has a fact that the rule means, by one of its names."""
        own = [fact for fact in self._facts if fact.about == rule.about]
        if rule.category is not None:
            return any(_in_category(rule.category, fact, exactly=False) for fact in own)
        names = _names(rule.label or "")
        return any(names & fact.labels or self._resembles(rule.label or "", fact) for fact in own)

    def _resembles(self, label: str, fact: Fact) -> bool:
        """Whether a forbidden label that no fact of the vault has shares a word with those of this fact."""
        if any(label in other.labels for other in self._facts):
            return False
        words = set(label.split()) - _COMMON
        return any(words & set(other.split()) for other in fact.labels)

    def _view(self) -> dict[str, str]:
        if self.problem is not None:
            return {}
        if not self.rules:
            return dict(self._files)
        gone = {
            rule.about for rule in self.rules if not rule.allow and rule.about and not rule.label and not rule.category
        }
        if any(not rule.allow and rule == Rule(False) for rule in self.rules):
            return {}
        shown = {}
        for path, text in self._files.items():
            if path not in gone:
                shown[path] = blanked(text, [*self._hidden_facts(path), *self._hidden_elsewhere(path, text, gone)])
        return shown

    def _hidden_facts(self, path: str) -> Iterable[Span]:
        for fact in self._facts:
            if fact.note == path and self.hides(fact):
                yield fact.value_start, fact.value_end

    def _hidden_elsewhere(self, path: str, text: str, gone: set[str]) -> Iterable[Span]:
        """What is hidden outside of the facts that say it: the same values again, names, categories, unread sentences."""
        visible = [(f.value_start, f.value_end) for f in self._facts if f.note == path and not self.hides(f)]
        for value, about in self._hidden_values():
            for span in occurrences(value, text):
                if not within(span, visible) and (telling(value) or self._concerns(path, text, span, about)):
                    yield span
        for rule in self.rules:
            if not rule.allow and rule.category:
                for span in of_category(rule.category, text):
                    if rule.about is None or self._concerns(path, text, span, rule.about):
                        yield span
        for name, other in self._names.items():
            if other in gone:
                yield from (sentence_at(text, span) for span in spelled(name, text))
        for start, end, target, _ in links(text):
            if resolve(target, self._files) in gone:
                yield start, end
        if self._allowing:
            yield from prose(text, [fact for fact in self._facts if fact.note == path])
        elif self._theme is None:
            for rule in self.rules:
                if rule.label or rule.category:
                    yield from self._unread(rule, path, text)

    def _unread(self, rule: Rule, path: str, text: str) -> Iterable[Span]:
        """Sentences that may state the forbidden fact in words of their own: those with a word of its label, and all
        sentences about its note where no labelled fact of it was found.
        """
        words = set((rule.label or CATEGORIES[rule.category or "phone"][0]).split()) - _COMMON
        known = self._found(rule)
        for span in prose(text, [fact for fact in self._facts if fact.note == path]):
            said = set(re.findall(r"\w+", text[span[0] : span[1]].casefold()))
            about = rule.about is None or self._concerns(path, text, span, rule.about)
            if about and (words & said or (rule.about is not None and not known)):
                yield span

    def _concerns(self, path: str, text: str, span: Span, about: str) -> bool:
        """Whether the line of `span` may be about the note `about`: it stands in it, or names or links to it."""
        start, end = text.rfind("\n", 0, span[0]) + 1, text.find("\n", span[1])
        line = text[start : end if end >= 0 else len(text)]
        if path == about or any(resolve(target, self._files) == about for _, _, target, _ in links(line)):
            return True
        return any(list(spelled(name, line)) for name, other in self._names.items() if other == about)

    def _hidden_values(self) -> list[tuple[Value, str]]:
        """The values of hidden facts, and the note that each is about; names of notes are no values."""
        found: dict[tuple[Value, str], None] = {}
        for fact in self._facts:
            if fact.kind != "link" and self.hides(fact):
                text = self._files[fact.note][fact.value_start : fact.value_end]
                for value in _values(fact, text):
                    found[value, fact.about] = None
        return list(found)

    def _secret_values(self) -> list[Value]:
        """Hidden values that the view does not show: what it shows may also be said of something else."""
        everything = "\n".join(self.view.values())
        values = dict.fromkeys(value for value, _ in self._hidden_values())
        names = [Value("text", name) for name in self._hidden_names()]
        return [value for value in [*values, *names] if not any(True for _ in occurrences(value, everything))]

    def _hidden_names(self) -> list[str]:
        """Names of notes about which nothing may be said, and of those that a forbidden relation leads to."""
        gone = {rule.about for rule in self.rules if rule == Rule(False, about=rule.about) and rule.about}
        gone |= {
            fact.value for fact in self._facts if fact.kind == "link" and fact.about not in gone and self.hides(fact)
        }
        asked = {rule.about for rule in self.rules if rule.label or rule.category}
        return [name for name, path in self._names.items() if path in gone - asked]


def _names(label: str) -> frozenset[str]:
    """A label and its other names."""
    return synonyms().get(label, frozenset()) | {label}


def _values(fact: Fact, text: str) -> list[Value]:
    """What a value may be recognised by: itself, the items of a list, and the types of values within it."""
    if fact.kind in FINDABLE:
        return [Value(fact.kind, fact.value)]
    whole = text.strip().strip("*_`").strip()
    found = [Value("text", whole)]
    if fact.kind == "list" or re.search(r", | and |; ", whole):
        found += [Value("text", item) for item in re.split(r"\s*[,;]\s*(?:and\s+)?|\s+and\s+", whole) if item]
    found += [Value(kind, item.value) for kind in FINDABLE if kind != "number" for item in find(kind, whole)]
    return [value for value in found if value.text.casefold() not in _COMMON]


def _in_category(category: str, fact: Fact, exactly: bool) -> bool:
    """Whether the value of a fact is of a category: by its type, or where it is forbidden by its label, too."""
    if fact.kind == "link":
        return False
    if category == "address":
        return any("address" in label.split() and not {"email", "e-mail"} & set(label.split()) for label in fact.labels)
    if exactly or category == "number":
        return fact.kind == category
    words = {word for names in (CATEGORIES[category],) for name in names for word in name.split()} - _COMMON
    by_label = any(set(label.split()) & (words - {"number", "address", "value"}) for label in fact.labels)
    return fact.kind == category or by_label
