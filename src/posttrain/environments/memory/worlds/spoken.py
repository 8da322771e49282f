"""Values as replies say them: in more spellings than notes have, and numbers in words.

Where a spelling leaves a choice (03/04/2024, 1.250, a phone number without its country), a value that is known is meant.
"""

import re
from collections.abc import Iterable
from datetime import date
from decimal import Decimal

from posttrain.environments.memory.worlds.values import find

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
_ONES += ["seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORTH = {word: number for number, word in enumerate(_ONES)} | {word: 20 + 10 * i for i, word in enumerate(_TENS)}
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[ -](?:{'|'.join(_ONES[1:10])})\b)?|(?:{'|'.join(reversed(_ONES))})\b)"
_BELOW_1000 = rf"(?:(?:a|{'|'.join(_ONES[1:10])})[ -]hundred(?:(?: and)? {_BELOW_100})?|{_BELOW_100})"
_WORDED = re.compile(
    rf"(?<![\w-])(?:(?:a|{_BELOW_1000})[ -]thousand(?:(?:,| and)? {_BELOW_1000})?|{_BELOW_1000})(?![\w-])",
    re.IGNORECASE,
)
_SPACE = "[ \u00a0\u2009\u202f'’]"
_GROUPED = re.compile(rf"(?<![\d+.,(/-])(?<!\d )\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!{_SPACE}?\d|-\d)")
_DOTTED = re.compile(r"(?<![\w.,])\d{1,3}(?:\.\d{3})+(?:,\d{1,2})?(?![\w]|[.,]\d)")
_COMMA = re.compile(r"(?<![\w.,])\d+,\d{1,2}(?!\w|[,.]\d)")
_THOUSANDS = re.compile(r"(?<![\w.,])(\d+(?:\.\d+)?) ?k(?!\w)", re.IGNORECASE)
_YEAR_FIRST = re.compile(r"(?<![\w/.-])(\d{4})([/.-])(\d{1,2})\2(\d{1,2})(?!\w|[/.-]\d)")
_YEAR_LAST = re.compile(r"(?<![\w/.-])(\d{1,2})([/.-])(\d{1,2})\2(\d{4}|\d{2})(?!\w|[/.-]\d)")
_SEPTEMBER = re.compile(r"\bsept\b", re.IGNORECASE)
_RANGE = re.compile(r"(?<=\d)\s?[/–—-]\s?(?=\d)")


def said(kind: str, text: str, known: Iterable[str] = (), words: bool = True) -> list[str]:
    """The canonical values of one of the `FINDABLE` types that a reply says, from left to right.

    `known` are canonical values that are meant where there is a choice. Numbers in words count with `words`, but for
    `one`, which is a number only where that is known. Amounts need no currency where none has one: they are bare
    numbers then, unless such an amount is known.
    """
    meant = set(known)
    if kind == "email":
        return [found.value for found in find(kind, text)]
    if kind != "money":
        text = _dated(text, meant)
    if kind == "phone":
        return [_phone(found.value, meant) for found in find(kind, text)]
    if kind == "date":
        return [found.value for found in find(kind, text)]
    text = _numerals(kind, text, meant, words)
    if kind == "money" and (found := find(kind, text)):
        return [item.value for item in found]
    amounts = {amount_of(value): value for value in meant} if kind == "money" else {}
    return [amounts.get(item.value, item.value) for item in find("number", text)]


def bare_amounts(text: str) -> set[str]:
    """The numbers of a reply that are no amounts with a currency and may be amounts without, as canonical numbers."""
    text = _numerals("money", text, set(), words=False)
    return {found.value for found in find("number", _without("money", text))}


def amount_of(money: str) -> str:
    """The canonical number of a canonical amount of money; other text as it is."""
    match = re.fullmatch(r"[A-Z]{3} (\d+)(\.\d+)?", money)
    if not match:
        return money
    cents = (match[2] or "").rstrip("0").rstrip(".")
    return f"{match[1]}{cents}"


def _numerals(kind: str, text: str, known: set[str], words: bool) -> str:
    """The text with numbers in words as digits, thousands not set apart, and ranges as two numbers."""
    if words:
        text = _WORDED.sub(lambda match: _worded(match.group(), known), text)
    text = _without("date", _dated(text, set()))
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    if kind == "money":
        text = _DOTTED.sub(lambda match: match.group().replace(".", "").replace(",", "."), text)
        text = _COMMA.sub(lambda match: match.group().replace(",", "."), text)
        return _THOUSANDS.sub(lambda match: f"{Decimal(match[1]) * 1000:f}", text)
    text = _DOTTED.sub(lambda match: _known_whole(match.group(), known), text)
    return _RANGE.sub(" to ", _without("phone", text))


def _known_whole(text: str, known: set[str]) -> str:
    """1.250 as 1250 where that is a known number."""
    whole = text.replace(".", "")
    return whole if whole in known else text


def _worded(text: str, known: set[str]) -> str:
    """The digits of a number in words."""
    total = part = 0
    for word in re.findall(r"[a-z]+", text.casefold()):
        if word == "thousand":
            total, part = max(part, 1) * 1000, 0
        elif word == "hundred":
            part = max(part, 1) * 100
        else:
            part += _WORTH.get(word, 0)
    number = str(total + part)
    return text if number == "1" and number not in known else number


def _dated(text: str, known: set[str]) -> str:
    """The text with dates in digits as YYYY-MM-DD."""
    text = _YEAR_FIRST.sub(lambda m: _date(m.group(), known, (m[1], m[3], m[4])), text)
    text = _YEAR_LAST.sub(lambda m: _date(m.group(), known, (m[4], m[3], m[1]), (m[4], m[1], m[3])), text)
    return _SEPTEMBER.sub("Sep", text)


def _date(text: str, known: set[str], *readings: tuple[str, str, str]) -> str:
    """The first reading (year, month, day) that is known, else the first that is a date; the text where none is."""
    found = []
    for year, month, day in readings:
        century = "" if len(year) == 4 else "19" if int(year) > 69 else "20"
        try:
            found.append(date(int(century + year), int(month), int(day)).isoformat())
        except ValueError:
            continue
    return next((one for one in found if one in known), found[0] if found else text)


def _phone(digits: str, known: set[str]) -> str:
    """The known number that these digits are, with or without its country; else the digits."""
    bare = digits.lstrip("0")
    ends = [one for one in known if one.endswith(bare) and len(bare) >= 9 and len(one) - len(bare) <= 3]
    return ends[0] if len(ends) == 1 else digits


def _without(kind: str, text: str) -> str:
    """The text with blanks for the values of a type."""
    for found in reversed(find(kind, text)):
        text = f"{text[: found.start]}{' ' * (found.end - found.start)}{text[found.end :]}"
    return text
