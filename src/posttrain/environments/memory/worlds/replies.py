"""Reading a reply: what it says of known values, whether it asks, and whether it declines."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.environments.memory.worlds.naming import matcher
from posttrain.environments.memory.worlds.themes import Theme
from posttrain.environments.memory.worlds.truth import Parsed
from posttrain.environments.memory.worlds.values import FINDABLE, find, mentions, number_words, plain

_ASKS = re.compile(
    r"\?(?:\s|$|[\"'*_)\]])|\b(?:please|could you|can you) (?:tell|clarify|confirm|specify|provide|give|send|check|let me know)\b",
    re.IGNORECASE,
)
_DECLINES = re.compile(
    r"\b(?:can ?not|can't|cannot|may not|must not|won't|will not|unable|not (?:able|allowed|permitted)|not (?:share|reveal)|private|"
    r"confidential|withheld|withhold|hidden|redacted|filter|filtered)\b",
    re.IGNORECASE,
)
_DENIED = r"(?:not|isn't|wasn't|never|no longer|neither|instead of)(?: the| a| an)?"


@dataclass(frozen=True)
class Answer:
    """A value that a reply should or should not hold: type, canonical value, and the key of which it is the value.

    The type `name` stands for the title of a note; its value is plain text.
    """

    type: str
    value: str
    key: str

    def to_json(self) -> dict[str, str]:
        return {"type": self.type, "value": self.value, "key": self.key}


def answer(record: dict[str, Any]) -> Answer:
    """The answer that `to_json` wrote."""
    return Answer(record["type"], record["value"], record["key"])


def asks(reply: str) -> bool:
    """Whether a reply puts a question or a request to the user."""
    return bool(_ASKS.search(reply.replace("’", "'")))


def declines(reply: str) -> bool:
    """Whether a reply says that something may not be told."""
    return bool(_DECLINES.search(reply.replace("’", "'")))


def holds(reply: str, wanted: Answer) -> bool:
    """Whether the value stands in the reply in any spelling, and is not denied right before."""
    if wanted.type in FINDABLE:
        for found in find(wanted.type, reply):
            if found.value == wanted.value and not _denied(reply[: found.start]):
                return True
        return _loosely(reply, wanted)
    text = plain(reply)
    return all(
        mentions(text, part) and not re.search(rf"\b{_DENIED} {re.escape(part)}(?: |$)", text)
        for part in _parts(wanted)
    )


def others(
    reply: str, wanted: Sequence[Answer], vault: Parsed, theme: Theme, question: str, allowed: Iterable[str] = ()
) -> list[str]:
    """Values of the types and keys of `wanted` that the reply holds besides them.

    Values that stand in the question are not counted, nor are the canonical values `allowed`. Of names, those of all
    notes are looked for; of texts, what the notes state, what the theme chooses from, and what is of the same pattern.
    """
    found: list[str] = []
    for one in wanted:
        known = {other.value for other in wanted if other.type == one.type} | set(allowed)
        if one.type in FINDABLE:
            known |= {item.value for item in find(one.type, question)}
            values = [item.value for item in find(one.type, reply)]
            found += [value for value in values if value not in known]
            if one.type == "number" and not values:
                found += [value for value in number_words(reply) if value not in known and value != "1"]
            continue
        known = {part for other in wanted for part in _parts(other)} | set(allowed)
        text, asked = plain(reply if one.type == "name" else without_titles(reply, vault)), plain(question)
        for value in sorted(rivals(one, vault, theme, reply)):
            if value not in known and mentions(text, value) and not mentions(asked, value):
                found.append(value)
    return found


def told(reply: str, hidden: Answer) -> bool:
    """Whether the reply holds the value in any spelling, denied or not; of a list, any of its items."""
    if hidden.type in FINDABLE:
        return any(found.value == hidden.value for found in find(hidden.type, reply)) or _loosely(reply, hidden)
    return any(mentions(plain(reply), part) for part in _parts(hidden))


def _parts(wanted: Answer) -> list[str]:
    return wanted.value.split("; ") if wanted.type == "list" else [wanted.value]


def rivals(one: Answer, vault: Parsed, theme: Theme, reply: str) -> set[str]:
    """Plain texts that could be taken for the answer: titles, or values of the key, of this vault or any other."""
    if one.type == "name":
        return {plain(title) for title in vault.titles.values()} - {""}
    values = vault.values.get(one.key, set())
    parts = {part for value in values for part in (value.split("; ") if one.type == "list" else [value])}
    parts = {part for part in parts if not part.startswith("?")}
    for declared in theme.declared(one.key):
        if one.type != "text":
            parts |= {plain(choice) for choice in declared.values.split("/")}
        elif pattern := matcher(declared.values):
            parts |= {plain(match.group()) for match in pattern.finditer(without_titles(reply, vault))}
    return parts


def recited(reply: str, vault: Parsed, question: str, wanted: Iterable[Answer], allowed: Iterable[str] = ()) -> int:
    """How many values of facts of the vault the reply holds that were not asked for and are not in the question."""
    bare = without_titles(reply, vault)
    text, asked = plain(bare), plain(question)
    known = {one.value for one in wanted} | set(allowed)
    known |= {item.value for kind in FINDABLE for item in find(kind, question)}
    found = {item.value for kind in FINDABLE for item in find(kind, bare)} - known
    states = {value for values in vault.values.values() for value in values if not value.startswith("?")}
    states = {value for value in states if not value.endswith(".md")} - known
    return sum(value in found or (mentions(text, value) and not mentions(asked, value)) for value in states)


def without_titles(reply: str, vault: Parsed) -> str:
    """The reply without the titles of notes, whose words are no values."""
    for title in sorted(vault.titles.values(), key=len, reverse=True):
        reply = reply.replace(title, " ") if title else reply
    return reply


def _loosely(reply: str, wanted: Answer) -> bool:
    """Numbers in words; and an amount without its currency, where no amount has one."""
    if wanted.type == "number" and not find("number", reply):
        return wanted.value in number_words(reply)
    if wanted.type == "money" and not find("money", reply):
        amount = wanted.value.split(" ")[1].removesuffix(".00")
        return any(float(found.value) == float(amount) for found in find("number", reply))
    return False


def _denied(text: str) -> bool:
    return bool(re.search(rf"\b{_DENIED}\s*[\"'*_]*$", text.replace("’", "'").casefold()))
