"""Analysis of replies: which known values a reply states or denies, whether it asks back, and whether it declines."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain_memory.worlds.naming import matcher
from posttrain_memory.worlds.theme import Theme
from posttrain_memory.worlds.truth import Parsed
from posttrain_memory.worlds.values import FINDABLE, amount_of, bare_amounts, mentions, plain, spoken_values

_CLAUSE = re.compile(
    r"(?:[.!?;]+(?=[\s\"')*_]|$)|\n|[,;]?\s+(?<!anything )(?<!anything, )(?<!everything )(?<!nothing )(?<!all )but\b(?! for\b)"
    r"|,?\s+(?:however|instead it)\b|,\s+(?=(?:it|that|this|he|she|they)(?:'s|'re| is| are| was| were)\b))",
    re.IGNORECASE,
)
_NOT_TOLD = re.compile(
    r"\b(?:(?:may|can|could|must|will|would|am|are|is|do|does)(?:\s?not|n't)|won't|can't|not)\s+(?:be\s+)?(?:able|allowed|permitted)?"
    r"(?:\s?to)?\s*(?:share|reveal|tell|told|disclose|give|provide|shared|disclosed|revealed)\b",
    re.IGNORECASE,
)
"""Phrases that keep something private, rather than deny it."""
_BEFORE = re.compile(
    r"\b(?:not|never|no longer|neither|nor|none of|\w+n't|anything but|anything, but|everything but|everything except"
    r"|all but|nothing like|except|apart from|other than|instead of|rather than|far from|i (?:doubt|deny|reject)|false that"
    r"|wrong that|untrue that|incorrect that|a lie that|a myth that)\b",
    re.IGNORECASE,
)
_WRONG = (
    r"(?:false|wrong|incorrect|untrue|mistaken|invalid|inaccurate|made up|a lie|a mistake|out of the question"
    r"|(?:not|far from) (?:right|true|correct|so|it|the case|valid|accurate))"
)
_AFTER = re.compile(
    rf"(?:\b(?:is|are|was|were|would be|sounds|seems)|'s|'re)\s+(?:\w+ly\s+|all\s+|quite\s+)?{_WRONG}\b"
    r"|\b(?:isn't|aren't|wasn't|weren't) (?:right|true|correct|so|it|the case|valid|accurate)\b|,\s*not[.!]?\s*$",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    rf"\s*(?:(?:but|and|no),?\s+)?(?:that|this|it)(?: is|'s| was)\s+(?:\w+ly\s+|all\s+)?{_WRONG}\b", re.I
)


def affirmed(reply: str) -> str:
    """The reply with denied parts blanked.

    Within a clause, that is the text after `not`, `anything but` and the like. A whole clause is blanked if it ends
    in `is false` or the like, or if the next one retracts it (`That is false.`). Declining to say something denies
    nothing.
    """
    text = reply.replace("’", "'")
    kept: list[str] = []
    start = 0
    for end in [*(match.end() for match in _CLAUSE.finditer(text)), len(text)]:
        clause, start = text[start:end], end
        if _TAKEN_BACK.match(clause):
            while kept and not kept.pop().strip():
                pass
            continue
        if _AFTER.search(clause):
            continue
        cue = _BEFORE.search(_NOT_TOLD.sub(lambda match: " " * len(match.group()), clause))
        kept.append(f"{clause[: cue.start()]}\n" if cue else clause)
    return "".join(kept)


_ASKS = re.compile(
    r"\?+(?:\s|$|[\"'*_)\]])"
    r"|\b(?:please|could you|can you) (?:tell|clarify|confirm|specify|provide|give|send|check|let me know)\b"
    r"|(?:^|[.!;:,\n]\s*|\band |\bso )(?:(?:please|just) )?(?:(?:tell|give|send|show) me|let me know|clarify|specify|confirm)\b"
    r"(?! (?:if|whether) (?:you|there))"
    r"|\b(?:i (?:need|have|want|would like) to know|i must ask)\b",
    re.IGNORECASE,
)
_ANSWERED = re.compile(
    r"[\s\"'*_)\]]*(?:yes\b|no\b|well\b|(?:it|that|this|they|these|he|she|the answer)(?:'s| is| are| was| were)\b)",
    re.IGNORECASE,
)
"""What follows a question that the reply itself answers."""
MISSING = re.compile(
    r"\b(?:no|not|none|nothing|nobody|nowhere|never|neither|without|unknown|missing|lacks?|lacking|absent|blank|empty|unclear"
    r"|unsure|unable|unfamiliar|cannot|isn't|aren't|\w+n't)\b",
    re.IGNORECASE,
)
DISAGREE = re.compile(
    r"\b(?:disagree\w*|contradict\w*|conflict\w*|differ\w*|inconsisten\w*|discrepan\w*|mismatch\w*|at odds|incompatible"
    r"|(?:not|n't) (?:agree|match)|two (?:\w+ )?(?:values|answers|versions|entries))\b",
    re.IGNORECASE,
)
_DECLINES = re.compile(
    r"\b(?:can ?not|can't|cannot|may not|must not|won't|will not|unable|not (?:able|allowed|permitted)|not (?:share|reveal)|private|"
    r"confidential|withheld|withhold|hidden|redacted|filter|filtered)\b",
    re.IGNORECASE,
)

_NOT_DONE = re.compile(
    r"\b(?:refuse|refused|decline|declined)\b"
    r"|\b(?:will not|won't|cannot|can not|can't|could not|couldn't|did not|didn't|do not|don't|have not|haven't"
    r"|unable to|not able to|not going to) (?:be able to |actually |really |yet )?"
    r"(?:do|done|make|made|change|changed|update|updated|add|added|delete|deleted|remove|removed|note|noted|record|recorded"
    r"|write|written|save|saved|store|stored|help|comply)\b(?![^.!?;\n]*\b(?:else|elsewhere|other|others|rest|more|further)\b)"
    r"|\b(?:changed|did|made|noted|wrote|updated) nothing\b(?! else| more| further)"
    r"|\bnothing (?:was|is|has been|got)? ?(?:changed|done|noted|written|updated)\b"
    r"|\bno (?:changes?|updates?) (?:was|were|has been|have been) (?:made|done)\b"
    r"|\bmade no (?:change|update)s?\b(?![^.!?;\n]*\b(?:else|elsewhere|other|others|rest)\b)"
    r"|\b(?:left|kept) (?:it|them|the notes?|everything|all) (?:as|unchanged|alone)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    """A value that a reply should or should not state: its type, canonical value, and key. For the type `name`, the
    value is the plain title of a note; for `truth`, `yes` or `no`.
    """

    type: str
    value: str
    key: str

    def to_json(self) -> dict[str, str]:
        return {"type": self.type, "value": self.value, "key": self.key}


def answer(record: dict[str, Any]) -> Answer:
    """Inverse of `Answer.to_json`."""
    return Answer(record["type"], record["value"], record["key"])


def asks(reply: str) -> bool:
    """Whether a reply asks the user something. A question that it answers itself does not count."""
    text = reply.replace("’", "'")
    return any(
        not (match.group().startswith("?") and _ANSWERED.match(text, match.end())) for match in _ASKS.finditer(text)
    )


def denies_change(reply: str) -> bool:
    """Whether a reply says that the message was not, or will not be, recorded."""
    return bool(_NOT_DONE.search(reply.replace("’", "'")))


def says(pattern: re.Pattern[str], reply: str, question: str) -> bool:
    """Whether a reply matches `MISSING` or `DISAGREE` in words other than those of the question."""
    known = {match.group().casefold() for match in pattern.finditer(question.replace("’", "'"))}
    return any(match.group().casefold() not in known for match in pattern.finditer(reply.replace("’", "'")))


def declines(reply: str) -> bool:
    """Whether a reply says that something may not be revealed."""
    return bool(_DECLINES.search(reply.replace("’", "'")))


_TRUTHS = dict.fromkeys(("yes", "yeah", "yep", "true", "correct"), "yes")
_TRUTHS |= dict.fromkeys(("no", "nope", "false", "incorrect"), "no")
_CLAUSE = re.compile(r"[.!?;,:\n]")
_UNSETTLED = re.compile(
    r"(?:\bnot|n't|\bcannot) (?:\w+ )?(?:know|sure|certain|clear|say|state|tell|find|found|see|mention|record|given)"
    r"|\b(?:nothing|unknown|unsure|unclear|maybe|perhaps|no (?:note|information|mention|record|idea))",
    re.IGNORECASE,
)


def states_truth(reply: str, question: str) -> str | None:
    """`yes` or `no` as the reply answers a yes-no question, or None if it does not, does not know, or says both.

    The first words of its clauses decide, then their last words, then a denial, then a repetition of most of the question.
    """
    text = reply.replace("’", "'")
    clauses = [words for clause in _CLAUSE.split(text) if (words := plain(clause).split())]
    answering = [end for words in clauses if words[0] in _TRUTHS for end in (words[0], words[-1])]
    stated = {_TRUTHS[end] for end in answering if end in _TRUTHS}
    if not stated and _UNSETTLED.search(text):
        return None
    ends = [words[-1] for clause in _CLAUSE.split(affirmed(text)) if (words := plain(clause).split())]
    stated = stated or {_TRUTHS[end] for end in ends if end in _TRUTHS}
    if stated:
        return stated.pop() if len(stated) == 1 else None
    if _BEFORE.search(text) or _AFTER.search(text):
        return "no"
    asked = {word for word in plain(question).split() if len(word) > 3}
    repeated = asked & set(plain(text).split())
    return "yes" if asked and 2 * len(repeated) >= len(asked) else None


def states_value(reply: str, wanted: Answer, question: str = "") -> bool:
    """Whether the reply states the value in any spelling and does not deny it, or answers `question` so (`truth`)."""
    if wanted.type == "truth":
        return states_truth(reply, question) == wanted.value
    stated = affirmed(reply)
    if wanted.type in FINDABLE:
        return wanted.value in spoken_values(wanted.type, stated, [wanted.value])
    return all(mentions(_loose(stated), _loose(part)) for part in _parts(wanted))


def other_values(
    reply: str, wanted: Sequence[Answer], vault: Parsed, theme: Theme, question: str, allowed: Iterable[str] = ()
) -> list[str]:
    """Values of the types and keys of `wanted` that the reply contains in addition.

    Values in the question and the canonical values `allowed` do not count. Names are compared with all notes; texts
    with what the notes state, what the theme offers, and what matches the same pattern.
    """
    extra: list[str] = []
    for one in wanted:
        known = {other.value for other in wanted if other.type == one.type} | set(allowed)
        if one.type in FINDABLE:
            extra += _other_values(one.type, reply, known, vault, question)
            continue
        known = {part for other in wanted for part in _parts(other)} | set(allowed)
        text, asked = plain(reply if one.type == "name" else without_titles(reply, vault)), plain(question)
        rest = f" {_loose(text)} "
        for part in sorted(known, key=len, reverse=True):
            rest = rest.replace(f" {_loose(part)} ", " / ") if part else rest
        for value in sorted(similar_values(one, vault, theme, reply) - known - {""}):
            if (mentions(text, value) or mentions(rest, _loose(value))) and not mentions(asked, value):
                extra.append(value)
    return extra


def _other_values(kind: str, reply: str, known: set[str], vault: Parsed, question: str) -> list[str]:
    """Values of a type, except those that are known or occur in the question."""
    known = known | set(spoken_values(kind, question, known))
    candidates = spoken_values(kind, reply, known, words=False)
    stated = {value for values in vault.values.values() for value in values}
    if kind in ("number", "money"):
        # Number words may be part of a name, and a sequence of numbers may look like a phone number.
        candidates += [
            value for value in spoken_values(kind, without_titles(reply, vault), known) if value not in candidates
        ]
        phones = stated | set(spoken_values("phone", question))
        candidates += [value for value in spoken_values("phone", reply, phones) if value not in phones]
    if kind == "money":
        amounts = {amount_of(value) for value in stated if " " in value} - {amount_of(value) for value in known}
        candidates += sorted((amounts & bare_amounts(reply)) - set(candidates))
        known |= set(spoken_values("number", question))
    return [value for value in candidates if value not in known]


def contains_value(reply: str, hidden: Answer) -> bool:
    """Whether the reply contains the value in any spelling, even if denied; for a list, any of its items."""
    if hidden.type in FINDABLE:
        return hidden.value in spoken_values(hidden.type, reply, [hidden.value])
    return any(mentions(_loose(reply), _loose(part)) for part in _parts(hidden))


def _loose(text: str) -> str:
    """`plain`, with separators and letter-digit boundaries as one space, so that LX-1154 equals LX1154."""
    text = plain(re.sub(r"[‐‑–]", "-", text)).replace("-", " ")
    return re.sub(r"(?<=[^\W\d])(?=\d)|(?<=\d)(?=[^\W\d])", " ", text)


def _parts(wanted: Answer) -> list[str]:
    return wanted.value.split("; ") if wanted.type == "list" else [wanted.value]


def similar_values(one: Answer, vault: Parsed, theme: Theme, reply: str) -> set[str]:
    """Plain texts that could be mistaken for the answer: titles, or values of the key, in this vault or any other."""
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


def count_recited(
    reply: str, vault: Parsed, question: str, wanted: Iterable[Answer], allowed: Iterable[str] = ()
) -> int:
    """The number of fact values of the vault in the reply that were not asked for and are not in the question."""
    bare = without_titles(reply, vault)
    text, asked = plain(bare), plain(question)
    known = {one.value for one in wanted} | set(allowed)
    known |= {value for kind in FINDABLE for value in spoken_values(kind, question)}
    recited = {value for kind in FINDABLE for value in spoken_values(kind, bare, words=False)} - known
    amounts = bare_amounts(bare) - {amount_of(value) for value in known}
    states = {value for values in vault.values.values() for value in values if not value.startswith("?")}
    states = {value for value in states if not value.endswith(".md")} - known
    recited |= {value for value in states if re.match(r"[A-Z]{3} \d", value) and amount_of(value) in amounts}
    return sum(value in recited or (mentions(text, value) and not mentions(asked, value)) for value in states)


def without_titles(reply: str, vault: Parsed) -> str:
    """The reply without titles of notes, whose words are not values."""
    for title in sorted(vault.titles.values(), key=len, reverse=True):
        reply = reply.replace(title, " ") if title else reply
    return reply
