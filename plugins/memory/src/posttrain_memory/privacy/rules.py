"""The closed language of privacy rules, parsed from English sentences.

A rule forbids something, or permits it exclusively. It names a fact by its label, a category (phone numbers, e-mail
addresses, addresses, dates, amounts of money, numbers) or everything, of one note or of all. The meaning of a
sentence outside of this language is not guessed: the caller must then show nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.theme import plain_label, themes

CATEGORIES: dict[str, tuple[str, ...]] = {
    "phone": ("phone", "phone number", "telephone", "telephone number", "mobile number", "number to call"),
    "email": ("email", "e-mail", "email address", "e-mail address", "mail address"),
    "address": ("address", "street address", "postal address", "home address"),
    "date": ("date", "calendar date"),
    "money": ("money", "amount of money", "sum of money", "money amount", "price", "amount", "money value", "sum"),
    "number": ("number", "figure", "numeric value"),
}
"""Category -> its names, in the singular."""
_GROUPS = dict.fromkeys(
    ("contact detail", "contact", "contact information", "contact data", "contact info"), ("phone", "email", "address")
)
_ALSO = tuple(
    frozenset(group.split("/"))
    for group in (
        "salary/pay/wage/wages/income/earnings/earns/compensation",
        "password/passcode/passphrase/login/credential/credentials/pwd/pw/pin/secret",
        "pin/pin code/passcode/code",
        "diagnosis/illness/disease/condition/disorder/suffers from",
        "allergy/allergies/allergic to/intolerance",
        "medication/medicine/medicines/drug/drugs/prescription/therapy/treatment",
        "birthday/birthdate/birth date/date of birth/born/dob",
        "partner/spouse/wife/husband/girlfriend/boyfriend/fiance/married to",
        "children/child/kids/kid/son/sons/daughter/daughters",
        "employer/company/works at/works for/work/employed by",
        "job/occupation/profession/position/work",
        "city/town/home town/lives in/residence",
        "religion/faith/belief/church",
        "weight/weighs",
        "age/years old",
        "bank account/account/iban/account number",
    )
)
"""Other names that people use for the same fact."""
_EVERYTHING = ("everything", "anything", "information", "detail", "data", "fact", "something", "all", "thing")


@dataclass(frozen=True)
class Rule:
    """`allow`: only this may be said; otherwise, this must not be said. `label` is a plain label, `category` a
    category; with neither, the rule covers everything. `about` is the path of a note, or None for all notes.
    """

    allow: bool
    label: str | None = None
    category: str | None = None
    about: str | None = None


@dataclass(frozen=True)
class NotUnderstood:
    """A sentence that is not a rule, and the reason."""

    sentence: str
    reason: str


_VERBS = (
    "reveal share disclose mention tell say give show expose include state name write use repeat report provide leak "
    "return quote print list discuss divulge output answer put display cite communicate"
)
_PHRASES = (
    "pass on|passing on|talk about|talking about|speak about|speaking about|give out|giving out|give away|giving away"
    "|tell me|putting"
)
_SAYING = "|".join(
    [_PHRASES, *(f"{verb}|{verb.removesuffix('e')}ing" for verb in _VERBS.split(" "))],
)
_SAID = (
    "revealed|shared|disclosed|mentioned|told|said|given|given out|given away|shown|exposed|included|stated|named|written"
    "|used|repeated|reported|provided|leaked|returned|quoted|printed|listed|discussed|divulged|output|passed on|displayed"
    "|cited|talked about|seen|made known|communicated"
)
_NEVER = (
    r"do not|don't|never|avoid|refrain from|you (?:must|may|should|shall|can|are|will) ?(?:not|never|n't)(?: allowed to)?"
    r"|you (?:mustn't|cannot|can't|shouldn't|won't|may never)|must not|may not|make sure not to|be careful not to|take care not to"
    r"|under no circumstances|without"
)
_HIDE = "hide|conceal|withhold|redact|omit|mask|leave out|remove|keep back|censor|suppress|obscure|obfuscate|hold back|protect"
_SECRET = (
    "private|secret|confidential|hidden|to yourself|off limits|off-limits|undisclosed|unsaid|protected|out of it"
    "|out of (?:your|the|any) (?:answers?|reply|replies|response|responses)|sensitive|a secret"
)
_IS = r"(?:is|are|stays?|remains?|(?:must|should|has to|have to|needs? to|shall|will) (?:be|stay|remain|be kept)|is to be kept|are to be kept|kept)"
_BUT = r"(?:but|except(?: for)?|other than|besides|apart from|save)"
_FILLER = re.compile(
    r"\b(?:please|kindly|in (?:your|the|any) (?:answers?|reply|replies|response|responses)|under any circumstances|at all|ever"
    r"|in any (?:case|way|form)|to (?:anyone|anybody|others|me|anyone else|other people)|with (?:anyone|anybody|others|anyone else|me)"
    r"|no matter (?:what|who asks|what is asked)|whatever (?:i|is) asked?|whoever asks|even if (?:i ask|asked)"
    r"|for privacy reasons|from memory|from (?:my|the) (?:notes|vault|memory)|in (?:my|the) (?:notes|vault|memory)"
    r"|when (?:you )?(?:answer|reply)(?:ing)?)\b[:,]?"
)

_FORMS: list[tuple[bool, re.Pattern[str]]] = [
    (allow, re.compile(pattern))
    for allow, pattern in [
        (True, rf"(?:{_HIDE}) (?:everything|anything|all) {_BUT} (?P<x>.+)"),
        (True, rf"(?:keep )?(?:everything|anything|all) {_BUT} (?P<x>.+?) {_IS}? ?(?:{_SECRET})"),
        (True, rf"(?:{_NEVER}) (?:{_SAYING}) (?:anything|everything|information) {_BUT} (?P<x>.+)"),
        (True, rf"(?:you may |you can )?(?:{_SAYING}) nothing {_BUT} (?P<x>.+)"),
        (True, rf"nothing {_BUT} (?P<x>.+?) (?:may|can|must|should) be (?:{_SAID})"),
        (True, rf"(?:you (?:may|can|are allowed to|must|should) )?(?:only|just) (?:{_SAYING}) (?P<x>.+)"),
        (
            True,
            rf"(?:you (?:may|can|are allowed to|must|should) )?(?:{_SAYING}) (?:only|just|nothing more than) (?P<x>.+)",
        ),
        (True, rf"(?:only|just) (?P<x>.+?) (?:may|can|must|should) be (?:{_SAID})"),
        (
            True,
            rf"(?P<x>.+?) (?:is|are) (?:all|the only thing|the only things|all that)(?: that)? (?:you )?(?:may|can) (?:be )?(?:{_SAID}|{_SAYING})",
        ),
        (False, rf"(?:{_NEVER}) (?:{_SAYING}) (?P<x>.+)"),
        (False, rf"(?:{_NEVER}) let (?P<x>.+?) (?:be (?:{_SAID})|slip)"),
        (False, rf"(?:{_SAYING}) (?P<x>(?:nothing|no).*)"),
        (False, rf"(?P<x>(?:nothing|no) .+?) (?:may|can|must|should|is to|are to) be (?:{_SAID})"),
        (False, rf"(?P<x>nothing) (?:may|can|must|should) be (?:{_SAID})"),
        (False, rf"(?:{_HIDE}) (?P<x>.+)"),
        (False, rf"keep (?P<x>.+?) (?:{_SECRET})"),
        (False, rf"(?P<x>.+?) {_IS} (?:{_SECRET})(?: information| data)?"),
        (
            False,
            rf"(?P<x>.+?) (?:must not|may not|must never|may never|should not|should never|is not to|are not to|cannot|shall not|is never to|are never to|can not) (?:be (?:{_SAID})|appear|come up)",
        ),
        (False, r"(?P<x>no .+)"),
    ]
]
"""Sentence patterns; the first match counts. `x` is what the rule is about."""


def read_rules(text: str, labels: frozenset[str], names: Mapping[str, str]) -> list[Rule] | NotUnderstood:
    """Parse all sentences of `text`. Returns the rules, or the first sentence that is not one.

    `labels` are the plain labels of the vault's facts; `names` maps lower-case names of its notes to their paths.
    """
    rules: list[Rule] = []
    rest = False
    sentences = [part for part in re.split(r"(?:[.;!](?=\s|$)|\n)", text) if part.strip()]
    for sentence in sentences:
        parsed = _sentence(sentence, labels | _vocabulary(), names)
        if isinstance(parsed, str):
            return NotUnderstood(" ".join(sentence.split())[:120], parsed)
        rules += parsed
        rest = rest or not parsed
    if rest and not any(rule.allow for rule in rules):
        return NotUnderstood("", "it forbids the rest, but allows nothing")
    return rules or NotUnderstood("", "the rule is empty")


@lru_cache(maxsize=1)
def _vocabulary() -> frozenset[str]:
    """All labels of facts and relations in generated worlds."""
    return frozenset(label for theme in themes().values() for label in theme.labels)


@lru_cache(maxsize=1)
def synonyms() -> dict[str, frozenset[str]]:
    """Label -> the names that generated worlds and people use for the same fact, including itself."""
    groups_of: dict[str, set[str]] = {}
    for theme in themes().values():
        groups: dict[str, set[str]] = {}
        for label, key in theme.labels.items():
            groups.setdefault(key, set()).add(label)
        for group in groups.values():
            for label in group:
                groups_of.setdefault(label, set()).update(group)
    for also in _ALSO:
        for label in also:
            groups_of.setdefault(label, set()).update(also)
    return {label: frozenset(group) for label, group in groups_of.items()}


def _sentence(sentence: str, labels: frozenset[str], names: Mapping[str, str]) -> list[Rule] | str:
    # Links and names first, because they may contain any word, including `and` and `of`.
    text = re.sub(
        r"\[\[([^\[\]|#]*)[^\[\]]*\]\]", lambda m: m.group(1).rsplit("/", 1)[-1].removesuffix(".md"), sentence
    )
    text = " ".join(re.sub(r"[_\"“”«»`*]", " ", text).casefold().replace("’", "'").split())
    places: list[str] = []
    for name in sorted((name for name in names if name in text), key=len, reverse=True):

        def mark(_: re.Match[str], path: str = names[name]) -> str:
            places.append(path)
            return f"@{len(places) - 1}@"

        text = re.sub(rf"(?<![\w@]){re.escape(name)}(?![\w@])", mark, text)
    text = " ".join(_FILLER.sub(" ", text).split()).strip(" ,:-")
    for allow, form in _FORMS:
        match = form.fullmatch(text)
        if match:
            return _things(match["x"].strip(" ,"), allow, labels, places)
    return "it is not a sentence of the rules' language"


def _things(text: str, allow: bool, labels: frozenset[str], places: list[str]) -> list[Rule] | str:
    """The rules for a list of things. Each has an owner or shares that of its neighbor. Empty for "everything else"."""
    if not allow and re.fullmatch(r"(?:everything|anything|nothing|all|no) else|(?:all )?the rest|nothing more", text):
        return []
    if re.search(r"\b(?:unless|until|except|but|if|when|without|while|because)\b", text):
        return "it has a condition or an exception"
    parts = [
        part.strip() for part in re.split(r",\s*(?:and|or|nor)\s+|\s+(?:and|or|nor|as well as|&)\s+|\s*,\s*", text)
    ]
    things = [_thing(part, places) for part in parts if part]
    for i in range(1, len(things)):  # "Ada's phone and email"
        if things[i][1] == "" and things[i - 1][2] == "front":
            things[i] = (things[i][0], things[i - 1][1], "front")
    for i in range(len(things) - 2, -1, -1):  # "the phone and the email of Ada"
        if things[i][1] == "" and things[i + 1][2] == "behind":
            things[i] = (things[i][0], things[i + 1][1], "behind")
    rules: list[Rule] = []
    for words, owner, _ in things:
        if owner == "!" or (owner == "?" and allow):
            return "it names someone who has no note"
        about = None if owner in ("", "?", "*") else owner
        names = _named(words, labels)
        if names is None:
            return f"{words[:40]!r} is nothing that rules can name"
        if owner == "" and not words and not allow:
            return "it does not say what it is about"
        rules += [Rule(allow, label, category, about) for label, category in names]
    return rules or "it names nothing"


def _thing(part: str, places: list[str]) -> tuple[str, str, str]:
    """The words of a thing, its owner (path; `*` all; `?` unknown; `!` unclear; empty if not given), and the owner's
    position.
    """
    words = re.sub(r"^(?:(?:the|any|all|every|each|a|an|no|of|whole|exact|full|single|other)\s+)+", "", part)
    alone = re.fullmatch(r"@(\d+)@", words)
    if alone:
        return "everything", places[int(alone[1])], "alone"
    match = re.fullmatch(r"(?P<owner>@\d+@|\w+(?: \w+){0,3})'s?\s+(?P<words>.+)", words)
    if match:
        return match["words"], _owner(match["owner"], places), "front"
    match = re.fullmatch(r"(?P<owner>my|our|their|his|her|its)\s+(?P<words>.+)", words)
    if match and "@" not in words:
        return match["words"], USER if match["owner"] in ("my", "our") else "?", "front"
    match = re.fullmatch(r"(?P<words>.*@?.*?)\s+(?:of|about|for|on|regarding|concerning|from)\s+(?P<owner>.+)", words)
    if match and _singular(plain_label(words)) not in _vocabulary():
        return match["words"], _owner(match["owner"], places), "behind"
    return words, "", ""


def _owner(text: str, places: list[str]) -> str:
    alone = re.fullmatch(r"(?:the |my |our )?@(\d+)@", text)
    if alone:
        return places[int(alone[1])]
    if text in ("me", "myself", "mine", "i", "the user", "user", "my own", "us"):
        return USER
    if re.fullmatch(
        r"(?:anyone|anybody|everyone|everybody|someone|any \w+|all(?: \w+){0,2}|every \w+|others|other people|people|any of them)",
        text,
    ):
        return "*"
    return "?"


def _named(words: str, labels: frozenset[str]) -> list[tuple[str | None, str | None]] | None:
    """Label and category of each thing that `words` name; None if they are not part of the language."""
    plain = plain_label(re.sub(r"@\d+@", " ", words))
    for text in (plain, _singular(plain)):
        if text in _EVERYTHING or text in ("nothing", ""):
            return [(None, None)]
        if text in _GROUPS:
            return [(None, category) for category in _GROUPS[text]]
        category = _category(text)
        if category is not None:
            return [(None, category)]
        if text in labels:
            return [(text, None)]
    return None


def _category(text: str) -> str | None:
    single = _singular(text)
    return next((name for name, words in CATEGORIES.items() if text in words or single in words), None)


def _singular(text: str) -> str:
    """The singular of the words before `of`, or of the whole text."""
    head, of, rest = text.partition(" of ")
    for plural, single in (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("s", "")):
        if head.endswith(plural) and not head.endswith("ss"):
            return f"{head.removesuffix(plural)}{single}{of}{rest}"
    return text
