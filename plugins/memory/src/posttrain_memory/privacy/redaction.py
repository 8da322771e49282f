"""Finds exact values in text, whatever their case and separators, and replaces them."""

import html
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from phonenumbers import Leniency, NumberParseException, PhoneNumberFormat, PhoneNumberMatcher, format_number, parse

from posttrain_memory.worlds.values import FINDABLE, MONTHS, amount_of, canonical, find

HIDDEN = "[hidden]"
"""The replacement for hidden text."""

Span = tuple[int, int]

_NOISE = re.compile(
    r"<[^<>\n]{0,60}>|\]\([^()\n]{0,200}\)|[*_`~\[\]{}|…]+|%[0-9A-Fa-f]{2}|=[0-9A-F]{2}|&#?\w{1,8};|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}"
)
"""What separates or stands for the characters that a page shows."""
_ALIKE = str.maketrans("асеіорхуАВСЕНКМОРТХ", "aceiopxyABCEHKMOPTX")
"""Cyrillic letters and the Latin ones that look the same."""

_RUN = re.compile(r"[^\W_]+")
_LONGEST = 200
"""Maximum number of letters and digits of a value; longer texts are found by their beginning."""
_MONTH = "|".join([*MONTHS, *(name[:3] for name in MONTHS)])
_SIGN = r"[$€£¥₹₽₩₺]"
_COIN = rf"{_SIGN}|[A-Z]{{3}}\b|(?i:dollars?|euros?|pounds?|francs?|yen|rupees?|quid|bucks)\b"
_SCALE = r"(?:\s?(?:k|m|bn|thousand|million|billion)\b)?"
_WIDE = {
    "phone": re.compile(r"(?<![\w.])(?!\d{4}-\d\d-\d\d)\+?\(?\d(?:[ ()/·.–-]{0,3}\d){6,14}(?!\w)"),
    "email": re.compile(
        r"[^\s@<>()\[\]|,;]{1,64}@[^\s@<>()\[\]|,;]{1,255}|[\w.+-]{1,64}\s?[(\[]at[)\]]\s?[\w.-]{1,255}(?:\s?[(\[]dot[)\]]\s?\w+)*"
    ),
    "money": re.compile(
        rf"(?:{_SIGN}|\b(?:[A-Z]{{3}}|Rs\.?))\s?\d[\d.,'’]*{_SCALE}|\b\d(?:[\d.,'’ ]{{0,20}}\d)?{_SCALE}\s?(?:k\s?)?(?:{_COIN})"
    ),
    "date": re.compile(
        rf"\b\d{{1,4}}[./-]\d{{1,2}}(?:[./-]\d{{1,4}})?\b|\b(?:\d{{1,2}}(?:st|nd|rd|th|\.)?\s+(?:of\s+)?)?(?:{_MONTH})\b\.?"
        r"(?:\s+\d{1,2}(?:st|nd|rd|th)?\b)?(?:,?\s+(?:in\s+)?\d{4})?|\b(?:1[5-9]|20)\d\d\b|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    ),
    "number": re.compile(r"[^\W_]*\d[^\W_]*"),
}
"""Forms that belong to a category in notes of unknown origin, besides the values that are understood."""
_FRACTION = re.compile(r"(?<![\d.])\d{1,4}\.\d{1,5}(?![\d.])")
"""Measurements, which are no part of a phone number."""


class Index:
    """Finds many values in a text in one pass.

    Texts are compared by their letters and digits alone; phone numbers, e-mail addresses, dates and amounts also by
    what they mean.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self.values = set(values)
        self._typed: dict[tuple[str, str], set[str]] = {}
        self._squeezed: dict[str, set[str]] = {}
        for text in self.values:
            meanings = {kind: value for kind in FINDABLE if (value := canonical(kind, text)) is not None}
            for kind, value in meanings.items():
                self._typed.setdefault((kind, value), set()).add(text)
            spellings = {squeeze(text)[:_LONGEST], amount_of(meanings.get("money", ""))}
            if digits := meanings.get("phone"):
                spellings.add(digits)
                with suppress(NumberParseException):  # its form without a country code
                    number = parse(f"+{digits}")
                    national = format_number(number, PhoneNumberFormat.NATIONAL)
                    spellings |= {str(number.national_number), squeeze(national)}
            # A single digit is found only where it is the whole number or amount.
            spellings = {one for one in spellings if len(one) > 3 or not meanings}
            for spelling in spellings - {""}:
                self._squeezed.setdefault(spelling, set()).add(text)
        self._sorted = sorted(self._squeezed)
        self._kinds = {kind for kind, _ in self._typed}

    def find(self, text: str) -> Iterator[tuple[int, int, set[str]]]:
        """Start, end and values of each occurrence, unordered. Values begin and end at the edge of a word."""
        for reading, places in readings(text):
            for start, end, values in self._find(reading):
                yield places[start], places[end], values

    def _find(self, text: str) -> Iterator[tuple[int, int, set[str]]]:
        for kind in self._kinds:
            for item in find(kind, text):
                if (kind, item.value) in self._typed:
                    yield item.start, item.end, self._typed[kind, item.value]
        runs = [match.span() for match in _RUN.finditer(text)] if self._sorted else []
        parts = [squeeze(text[start:end]) for start, end in runs]
        for first in range(len(runs)):
            word = ""
            for last in range(first, len(runs)):
                word += parts[last]
                at = bisect_left(self._sorted, word)
                if at == len(self._sorted) or not self._sorted[at].startswith(word):
                    break
                if self._sorted[at] == word:
                    yield runs[first][0], runs[last][1], self._squeezed[word]

    def spans(self, text: str) -> Iterator[Span]:
        """The places of the values in `text`, unordered."""
        yield from ((start, end) for start, end, _ in self.find(text))


def squeeze(text: str) -> str:
    """The letters and digits of a text in lower case, without accents."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(sign for sign in text if not unicodedata.combining(sign))
    return "".join(_RUN.findall(text.casefold()))


def category_spans(category: str, text: str, wide: bool = True) -> list[Span]:
    """The places in `text` with the form of a category. Without `wide`, only forms that generated worlds use."""
    if not wide:
        return [(item.start, item.end) for item in find(category, text)]
    spans: list[Span] = []
    for reading, at in readings(text):
        if category == "phone":
            reading = _FRACTION.sub(lambda match: "\0" * len(match.group()), reading)
            matches = PhoneNumberMatcher(reading, None, Leniency.POSSIBLE, max_tries=len(reading) + 1)
            spans += [(at[match.start], at[match.end]) for match in matches]
        spans += [(at[item.start], at[item.end]) for item in find(category, reading)]
        spans += [(at[match.start()], at[match.end()]) for match in _WIDE[category].finditer(reading)]
    return spans


def readings(text: str) -> Iterator[tuple[str, Sequence[int]]]:
    """The text, and the text as a page shows it: without tags, targets of links and marks, with escapes decoded and
    look-alike letters as Latin ones. With each, the place in `text` of every character and of the end.
    """
    yield text, range(len(text) + 1)
    reading, places = text, list(range(len(text) + 1))
    for _ in range(3):
        pieces: list[str] = []
        kept: list[int] = []
        at = 0
        for match in _NOISE.finditer(reading):
            noise = match.group()
            if noise[0] == "&":
                shown = html.unescape(noise)
            elif noise[0] in "%=\\":
                shown = chr(int(noise.lstrip("%=\\ux"), 16))
            else:
                shown = " " if noise[0] in "<|" and noise[:3] in ("<br", "|") else ""
            pieces += [reading[at : match.start()], shown]
            kept += [*places[at : match.start()], *[places[match.start()]] * len(shown)]
            at = match.end()
        if not pieces:
            break
        reading, places = "".join([*pieces, reading[at:]]), kept + places[at:]
    reading = reading.translate(_ALIKE)
    if reading != text:
        yield reading, places


def normalized(text: str) -> str:
    """`text` without invisible and combining characters, with variants of letters, digits and signs as plain ones."""
    if text.isascii():
        return text
    characters = []
    for sign in text:
        if unicodedata.category(sign) in ("Cf", "Me") or sign in "\u034f\u0335\u0336\u115f\u1160\u3164\ufe0f":
            continue
        plain = unicodedata.normalize("NFKC", sign) if not sign.isascii() else sign
        digit = unicodedata.digit(sign, None)
        plain = str(digit) if digit is not None else plain
        characters.append(plain if plain.isascii() and sign != "…" else sign)
    return "".join(characters)


def redacted(text: str, spans: Iterable[Span]) -> str:
    """`text` with each run of overlapping or touching spans replaced by `[hidden]`."""
    pieces, at, last = [], 0, -1
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if start > last:
            pieces += [text[at:start], HIDDEN]
        last = max(last, end)
        at = last
    return "".join([*pieces, text[at:]])
