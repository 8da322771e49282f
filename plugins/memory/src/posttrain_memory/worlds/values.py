"""Typed values in the spellings that people use: normalized, spelled, and found in text.

The canonical spelling is text: a number `1250`, money `EUR 1250.00`, a date `2024-05-31`, a phone number as digits,
an e-mail address in lower case, a list as sorted items joined by `; `, other text in lower case.

Replies use more spellings than notes, including number words (`spoken_values`). Ambiguous spellings (03/04/2024,
1.250, a phone number without country code) are resolved to a known value.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import TypeVar

import numpy as np

FINDABLE = ("number", "money", "date", "phone", "email")
"""Types whose values can be recognized in running text."""

MONTHS = re.findall(r"\w+", "January February March April May June July August September October November December")
CURRENCIES = {"USD": ("$", "dollars"), "EUR": ("€", "euros"), "GBP": ("£", "pounds")}

_MONTH = "|".join(f"{name}|{name[:3]}" for name in MONTHS)
_AMOUNT = r"\d{1,3}(?:,\d{3})+(?:\.\d{1,2})?|\d+(?:\.\d{1,2})?"
_UNITS = {sign: code for code, signs in CURRENCIES.items() for sign in (*signs, signs[1][:-1], code)}
_UNIT = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))
_DATE = re.compile(
    rf"\b(?P<iso>\d{{4}}-\d{{2}}-\d{{2}})\b"
    rf"|\b(?P<d1>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<m1>{_MONTH})\.?,? (?P<y1>\d{{4}})\b"
    rf"|\b(?P<m2>{_MONTH})\.? (?P<d2>\d{{1,2}})(?:st|nd|rd|th)?,? (?P<y2>\d{{4}})\b"
    r"|\b(?P<d3>\d{1,2})\.(?P<m3>\d{1,2})\.(?P<y3>\d{4})\b",
    re.IGNORECASE,
)
_MONEY = re.compile(
    rf"(?<![\w.,])(?P<before>{_UNIT})\s?(?P<a1>{_AMOUNT})(?![\d])|(?<![\w.,])(?P<a2>{_AMOUNT})\s?(?P<after>{_UNIT})(?!\w)",
    re.IGNORECASE,
)
_PHONE = re.compile(r"(?<![\w.@])\+?\(?\d[\d ()./-]{6,18}\d(?!\w)")
_DOMAIN = re.compile(r"[\w-]+(?:\.[\w-]+)+\b")
_NUMBER = re.compile(r"(?<![\w@.,/-])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d|st\b|nd\b|rd\b|th\b)")
_LINK = re.compile(r"\[\[([^\[\]|#\n]*)(?:#[^\[\]|\n]*)?(?:\|([^\[\]\n]*))?\]\]")
_BETWEEN = re.compile(r"(?:(?<!\s)\s+)?[,;]\s*(?:and\s+)?|(?<!\s)\s+(?:and|&)\s+")
"""Separators between list items. The pattern starts at the first of several spaces, so that it stays linear."""
_PATTERNS = {"money": _MONEY, "date": _DATE, "phone": _PHONE, "number": _NUMBER}

Item = TypeVar("Item")


@dataclass(frozen=True)
class Found:
    """A value in a text: characters `start` to `end`, and its canonical spelling."""

    start: int
    end: int
    value: str


def pick(random: np.random.Generator, items: Sequence[Item]) -> Item:
    """One of `items`, uniformly at random. `items` must not be empty."""
    return items[int(random.integers(len(items)))]


def shuffled(random: np.random.Generator, items: Sequence[Item]) -> list[Item]:
    """`items` in random order."""
    return [items[i] for i in random.permutation(len(items))]


def canonical(kind: str, text: str) -> str | None:
    """The canonical spelling of `text` as a value of type `kind`; None if it is not such a value.

    A number may be followed by a unit, which is ignored.
    """
    text = text.strip().strip("*_`").strip()
    if not text:
        return None
    if kind == "number":
        match = _NUMBER.match(text)
        rest = text[match.end() :].strip() if match else ""
        return _number(match.group()) if match and re.fullmatch(r"[^\d,;]{0,24}", rest) else None
    if kind == "list":
        items = {plain(item) for item in _BETWEEN.split(text)} - {""}
        return "; ".join(sorted(items)) or None
    if kind in FINDABLE:
        matches = find(kind, text.rstrip("."))
        whole = len(matches) == 1 and matches[0].start == 0 and matches[0].end == len(text.rstrip("."))
        return matches[0].value if whole else None
    return plain(text) or None


def find(kind: str, text: str) -> list[Found]:
    """The values of one of the `FINDABLE` types in a text, from left to right.

    Digits of dates, phone numbers and e-mail addresses are not numbers; digits of dates are not phone numbers.
    """
    if kind in ("number", "phone"):
        text = _without(text, _DATE, _LINK)
    if kind == "email":
        return [Found(start, end, text[start:end].casefold()) for start, end in _emails(text)]
    if kind == "number":
        places = [0, *(place for span in _emails(text) for place in span), len(text)]
        pieces = [text[start:end] for start, end in pairwise(places)]
        text = _without("".join("\x00" * len(piece) if n % 2 else piece for n, piece in enumerate(pieces)), _PHONE)
    values = []
    for match in _PATTERNS[kind].finditer(text):
        value = _read(kind, match)
        if value is not None:
            values.append(Found(match.start(), match.end(), value))
    return values


def spell(kind: str, value: str, random: np.random.Generator, unit: str = "") -> str:
    """A common spelling of a canonical value, chosen at random. `canonical` reads each of them back."""
    if kind == "number":
        digits = pick(random, (value, f"{int(value):,}"))
        return f"{digits} {unit}".strip()
    if kind == "money":
        code, amount = value.split(" ")
        whole = amount.removesuffix(".00")
        sign, word = CURRENCIES[code]
        grouped = f"{Decimal(whole):,}"
        return pick(random, (f"{sign}{grouped}", f"{whole} {code}", f"{code} {grouped}", f"{grouped} {word}"))
    if kind == "date":
        day = date.fromisoformat(value)
        month = MONTHS[day.month - 1]
        return pick(random, (value, value, f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"))
    if kind == "phone":
        sign = pick(random, (" ", "-"))
        return f"+{sign.join((value[0], value[1:4], value[4:7], value[7:]))}"
    if kind == "list":
        *front, last = value.split("; ")
        return pick(random, (", ".join([*front, last]), f"{', '.join(front)} and {last}" if front else value))
    return value


def plain(text: str) -> str:
    """A text as compared: lower case, links as displayed, without punctuation and leading article."""
    text = (
        _LINK.sub(lambda m: m[2] or m[1].rsplit("/", 1)[-1].removesuffix(".md").replace("_", " "), text)
        .casefold()
        .replace("’", "'")
    )
    text = re.sub(r"'s\b", "", text)
    words = re.findall(r"[^\W_]+(?:[-'][^\W_]+)*", text)
    while words and words[0] in ("the", "a", "an"):
        words = words[1:]
    return " ".join(words)


def mentions(text: str, words: str) -> bool:
    """Whether the plain text `text` contains the plain text `words`, as whole words."""
    return f" {words} " in f" {text} "


def links(text: str) -> list[tuple[int, int, str, str]]:
    """The wikilinks of a text: start, end, target without heading, and displayed text (may be empty)."""
    return [(m.start(), m.end(), m.group(1).strip(), (m.group(2) or "").strip()) for m in _LINK.finditer(text)]


def _without(text: str, *patterns: re.Pattern[str]) -> str:
    for pattern in patterns:
        text = pattern.sub(lambda match: "\x00" * len(match.group()), text)
    return text


def _emails(text: str) -> Iterator[tuple[int, int]]:
    r"""Start and end of each e-mail address: `\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b`, in time linear in the text.

    The regular expression itself would be quadratic on a long sequence of dots and words.
    """
    begin, at = 0, text.find("@")
    while at >= 0:
        start = at
        while start > begin and (text[start - 1] in ".+-_" or text[start - 1].isalnum()):
            start -= 1
        # A name begins at a word boundary: after leading punctuation, unless a word ends right before it.
        while start < at and text[start] in ".+-" and not (start == begin > 0):
            start += 1
        domain = _DOMAIN.match(text, at + 1) if start < at else None
        if domain:
            begin = domain.end()
            yield start, begin
        at = text.find("@", max(begin, at + 1))


def _number(text: str) -> str | None:
    digits = text.replace(",", "")
    # Python refuses to convert very long integers; they are compared as text.
    if len(digits) > 300:
        return digits
    try:
        number = Decimal(digits)
    except InvalidOperation:
        return None
    return str(int(number)) if number == number.to_integral_value() else str(number.normalize())


def _read(kind: str, match: re.Match[str]) -> str | None:
    if kind == "number":
        return _number(match.group())
    if kind == "phone":
        digits = re.sub(r"\D", "", match.group())
        return digits if 8 <= len(digits) <= 15 else None
    if kind == "money":
        name = match["before"] or match["after"]
        unit = _UNITS.get(name.casefold()) or _UNITS.get(name.upper())
        amount = Decimal((match["a1"] or match["a2"]).replace(",", ""))
        return f"{unit} {amount:.2f}" if unit else None
    try:
        if match["iso"]:
            return date.fromisoformat(match["iso"]).isoformat()
        if match["d3"]:
            return date(int(match["y3"]), int(match["m3"]), int(match["d3"])).isoformat()
        name = (match["m1"] or match["m2"])[:3].capitalize()
        month = [month[:3] for month in MONTHS].index(name) + 1
        return date(int(match["y1"] or match["y2"]), month, int(match["d1"] or match["d2"])).isoformat()
    except ValueError:
        return None


_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
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


def spoken_values(kind: str, text: str, known: Iterable[str] = (), words: bool = True) -> list[str]:
    """The canonical values of one of the `FINDABLE` types in a reply, from left to right.

    `known` are canonical values to prefer for ambiguous spellings. With `words`, number words count, except `one`
    unless 1 is known. If no amount has a currency, plain numbers count as amounts: as the known amount with that
    number, otherwise as bare numbers.
    """
    meant = set(known)
    if kind == "email":
        return [item.value for item in find(kind, text)]
    if kind != "money":
        text = _normalize_dates(text, meant)
    if kind == "date":
        return [item.value for item in find(kind, text)]
    if kind == "phone":
        phones = []
        for item in find(kind, text):
            # The known number with these digits, with or without country code.
            bare = item.value.lstrip("0")
            same = [one for one in meant if one.endswith(bare) and len(bare) >= 9 and len(one) - len(bare) <= 3]
            phones.append(same[0] if len(same) == 1 else item.value)
        return phones
    text = _numerals(kind, text, meant, words)
    if kind == "money" and (items := find(kind, text)):
        return [item.value for item in items]
    amounts = {amount_of(value): value for value in meant} if kind == "money" else {}
    return [amounts.get(item.value, item.value) for item in find("number", text)]


def bare_amounts(text: str) -> set[str]:
    """The numbers of a reply that have no currency and may be amounts, as canonical numbers."""
    text = _numerals("money", text, set(), words=False)
    return {item.value for item in find("number", _blanked("money", text))}


def amount_of(money: str) -> str:
    """The number of a canonical amount of money; other text unchanged."""
    match = re.fullmatch(r"[A-Z]{3} (\d+)(\.\d+)?", money)
    if not match:
        return money
    cents = (match[2] or "").rstrip("0").rstrip(".")
    return f"{match[1]}{cents}"


def _numerals(kind: str, text: str, known: set[str], words: bool) -> str:
    """The text with number words as digits, without thousands separators, and with ranges as two numbers."""
    if words:
        text = _WORDED.sub(lambda match: _from_words(match.group(), known), text)
    text = _blanked("date", _normalize_dates(text, set()))
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    if kind == "money":
        text = _DOTTED.sub(lambda match: match.group().replace(".", "").replace(",", "."), text)
        text = _COMMA.sub(lambda match: match.group().replace(",", "."), text)
        return _THOUSANDS.sub(lambda match: f"{Decimal(match[1]) * 1000:f}", text)
    # 1.250 is 1250, if that is a known number.
    text = _DOTTED.sub(lambda m: whole if (whole := m[0].replace(".", "")) in known else m[0], text)
    return _RANGE.sub(" to ", _blanked("phone", text))


def _from_words(text: str, known: set[str]) -> str:
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


def _normalize_dates(text: str, known: set[str]) -> str:
    """The text with numeric dates as YYYY-MM-DD."""
    text = _YEAR_FIRST.sub(lambda m: _date(m.group(), known, (m[1], m[3], m[4])), text)
    text = _YEAR_LAST.sub(lambda m: _date(m.group(), known, (m[4], m[3], m[1]), (m[4], m[1], m[3])), text)
    return _SEPTEMBER.sub("Sep", text)


def _date(text: str, known: set[str], *readings: tuple[str, str, str]) -> str:
    """The first reading (year, month, day) that is known, otherwise the first valid date, otherwise the text."""
    dates = []
    for year, month, day in readings:
        century = "" if len(year) == 4 else "19" if int(year) > 69 else "20"
        try:
            dates.append(date(int(century + year), int(month), int(day)).isoformat())
        except ValueError:
            continue
    return next((one for one in dates if one in known), dates[0] if dates else text)


def _blanked(kind: str, text: str) -> str:
    """The text with values of a type replaced by spaces."""
    for item in reversed(find(kind, text)):
        text = f"{text[: item.start]}{' ' * (item.end - item.start)}{text[item.end :]}"
    return text
