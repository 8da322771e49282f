"""Categories of values that privacy rules can name: what they look like and what their labels are. Doubtful values
count as belonging to the category.
"""

import re
from functools import cache, lru_cache

from posttrain_memory.privacy.facts import Fact
from posttrain_memory.privacy.readings import Reading, readings
from posttrain_memory.privacy.redaction import NUMERALS, Span
from posttrain_memory.privacy.rules import CATEGORIES
from posttrain_memory.worlds.values import MONTHS, find

LABELS: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "phone": "phone phones telephone tel cell cellphone mobile mobil handy fax landline whatsapp telegram sms call "
        "dial hotline switchboard contact contacts telefon portable natel pager extension ext",
        "email": "email emails mail mails inbox mailbox gmail outlook contact contacts courriel",
        "address": "address addresses home house lives live living location residence resides residing street flat apartment "
        "postal postcode zip plz where adresse based place situated dwelling headquarters office lodging",
        "date": "date dates birthday birthdate birth born dob anniversary deadline due expires expiry expiration since until "
        "till wedding wed married engaged moved left started starts start ended ends end founded opened hired joined died death "
        "arrival arrives arrived departure departs departed when day days year years month months met retired graduated "
        "scheduled appointment renewed renewal begins began established",
        "money": "money amount amounts price prices cost costs sum sums salary salaries pay wage wages income earns earnings rent "
        "fee fees debt debts loan loans mortgage bonus budget deposit balance savings bill bills invoice invoices revenue tax "
        "taxes tip tips allowance pension turnover profit worth owes owed paid spends spent fines expense expenses "
        "charge charges premium net gross compensation payment payments stipend fortune assets",
        "number": "number numbers figure figures count counts quantity total",
    }.items()
}
"""Category -> words of labels whose value belongs to it, whatever it looks like."""
TITLES: dict[str, frozenset[str]] = {
    "phone": frozenset(re.findall(r"\S+", "phone phones telephone telephones contact contacts")),
    "email": frozenset(re.findall(r"\S+", "email emails mail contact contacts")),
    "address": frozenset(re.findall(r"\S+", "address addresses contact contacts")),
    "date": frozenset(
        re.findall(r"\S+", "date dates birthdays birthday anniversaries deadlines appointments calendar")
    ),
    "money": frozenset(
        re.findall(r"\S+", "money price prices cost costs salary finances budget debts income amounts expenses")
    ),
    "number": frozenset(re.findall(r"\S+", "number numbers figures")),
}
"""Category -> words of headings whose whole section belongs to it."""

_SIGNS = r"[$€£¥₹₽₩₺₴₫₪₱₦฿₿¢₡₲₵₸₭₮]"
_CODES = (
    "USD|EUR|GBP|CHF|JPY|CNY|RMB|INR|RUB|KRW|TRY|UAH|VND|ILS|PHP|NGN|THB|BTC|ETH|AUD|CAD|NZD|SEK|NOK|DKK|ISK|PLN|CZK|HUF|RON"
    "|BGN|BRL|MXN|ARS|CLP|COP|PEN|ZAR|EGP|KES|AED|SAR|QAR|SGD|HKD|TWD|MYR|IDR|PKR|BDT|LKR|GEL|KZT|MAD|TND|DM|Fr|SFr|sfr|Rs"
    r"|R\$|kr|zł|Kč|Ft|lei|Mk"
)
_COINS = (
    "dollars?|euros?|pounds?|francs?|franken|yens?|yuan|renminbi|rupees?|roubles?|rubles?|won|liras?|hryvnias?|shekels?|pesos?"
    "|krona|kronor|krone|kroner|kronur|zlotys?|złoty|forints?|koruna|leu|levs?|rand|reals?|reais|dirhams?|dinars?|riyals?"
    "|ringgit|rupiah|baht|dong|bitcoins?|ether|bucks?|quid|grand|cents?|pence|pennies|tenners?|fivers?"
)
_AMOUNT = r"\d[\d.,'’ \u00a0\u202f]{0,30}(?<=[\d.,])(?:\s?[–-]\s?\d[\d.,'’]*)?(?:[-–]{1,2})?"
_SCALE = r"(?:\s?(?:k|m|mn|bn|mio|mrd|tsd|thousand|million|billion|lakh|crore|hundred|dozen)\b\.?)?"
_NUMERAL = (
    rf"(?:(?:{'|'.join(sorted(NUMERALS, key=len, reverse=True))}|a|half|few|several|and|couple|of)[\s-]{{1,3}}){{1,12}}"
)
_MONEY = re.compile(
    rf"(?:{_SIGNS}|(?<![^\W\d_])(?i:{_CODES}|{_COINS})\.?)\s?-?{_AMOUNT}{_SCALE}"
    rf"|{_AMOUNT}{_SCALE}\s?(?:{_SIGNS}|(?i:{_CODES}|{_COINS})(?![^\W\d_]))"
    rf"|\b(?i:{_NUMERAL}(?:{_COINS}|{_CODES}))\b"
    r"|\b\d[\d.,'’]*\s?(?i:k|mio|grand)\b(?!\w)"
)
_NAMES = [*MONTHS, *(name[:3] for name in MONTHS), "Sept"]
_FOREIGN = re.findall(
    r"\S+",
    "Januar Februar März Maerz Mai Juni Juli Oktober Dezember janvier février fevrier mars avril mai juin juillet août aout "
    "septembre octobre novembre décembre decembre enero febrero marzo abril mayo junio julio agosto septiembre octubre "
    "noviembre diciembre gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre januari februari maart mei "
    "augustus",
)
_DAYS = re.findall(r"\S+", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTH = "|".join(sorted({*_NAMES, *_FOREIGN}, key=len, reverse=True))
_NTH = r"\d{1,2}(?:st|nd|rd|th|\.)?"
_DATE = re.compile(
    r"(?<![\d.])\d{1,4}(?P<sep>\s?[./–-]\s?)\d{1,2}(?P=sep)\d{1,4}(?!\d)"
    r"|(?<![\d./])\d{1,2}/\d{1,4}(?![\d/])|(?<![\d./-])\d{4}[-/.]\d{2}(?!\d)|(?<![\d.])\d{1,2}\.\d{1,2}\.(?!\d)"
    rf"|(?i:\b(?:{_NTH}\s*(?:of\s+|de\s+)?[-\s]?(?:{_MONTH})\b\.?|(?:{_MONTH})\b\.?[-\s]?{_NTH}(?!\d)))(?:,?\s*(?:of |in |de )?['’]?\d{{2,4}}\b)?"
    rf"|\b(?:{_MONTH}|{'|'.join(name.upper() for name in MONTHS)})\b\.?(?:,?\s*(?:of |in )?['’]?\d{{2,4}}\b)?"
    rf"|(?i:\b(?:{'|'.join(name for name in MONTHS if name not in ('May', 'March'))})\b)"
    r"|\b(?i:spring|summer|autumn|fall|winter|q[1-4]|easter|christmas|new year|halloween)[ ,-]*(?:of )?(?:\d{4}|'\d\d)\b"
    rf"|\b(?i:{'|'.join(_DAYS)})\b|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
    r"|(?<![\d.,])(?:1[5-9]|20|21)\d\d(?![\d,])(?:-W\d\d?)?s?|(?<!\d)(?:19|20)\d{6}(?!\d)|['’]\d\ds?\b"
    r"|\b\d{1,2}(?:st|nd|rd|th)\b|\b(?i:christmas(?: eve| day)?|new year(?:'s (?:eve|day))?|valentine(?:'s day)?|halloween)\b"
)
_DIGITS = re.compile(r"(?<![\d@])\+?\(?\d(?:[\W_]{0,12}\d){5,}(?:\s?(?:ext|x|extension|int|app)\.?\s?\d+)?")
_NOT_PHONE = re.compile(
    # Dates, times, years in a list, and amounts with separators for thousands.
    r"\d{4}-\d\d-\d\d|(?:\d?\d:\d\d(?::\d\d)?\W{1,3})*\d?\d:\d\d(?::\d\d)?"
    r"|(?:(?:19|20)\d\d[,;|/–-]\s?)+(?:19|20)\d\d|\d{1,3}(?:[,'’]\d{3})+(?:\.\d+)?"
)
"""Runs of digits that are no phone number."""
_FRACTION = re.compile(r"(?<![\d.])\d{1,4}\.\d{1,5}(?![\d.])")
_TABULAR = re.compile(r"[|\[\]%±]")
_CALL = re.compile(
    r"\b(?:call|ring|dial|tel|telephone|phone|ext|extension|fax|mobile|cell|whatsapp|sms|reach\w*|text)\b[^\n.\d]{0,40}?(?P<n>\+?\(?\d[\d ()/·–-]{1,20}\d)",
    re.IGNORECASE,
)
_DIGIT_WORDS = "zero|one|two|three|four|five|six|seven|eight|nine|oh|double|triple"
_SPOKEN = re.compile(rf"\b(?:{_DIGIT_WORDS})(?:[\s,-]+(?:{_DIGIT_WORDS})){{4,}}\b", re.IGNORECASE)
_EMAIL = re.compile(
    r"\"[^\"\n]{1,64}\"\s?\\?@\s?[^\s\"<>()\[\]]{1,255}|[^\s\"<>()\[\]|,;:]{1,64}\\?\s?(?:@|%40|&commat;|&#64;)\s?[^\s\"<>()\[\]|,;]{1,255}"
    r"|[^\s<>|]{1,64}\s?[(\[{<]\s?(?:at|@|ät)\s?[)\]}>]\s?[^\s<>|]{1,255}(?:\s?[(\[{]\s?(?:dot|punkt|\.)\s?[)\]}]\s?\w+)*"
    r"|\b[\w.+-]{1,64}\s+(?:at|AT)\s+[\w-]{1,63}(?:\.|\s+(?:dot|DOT)\s+)[\w.-]{2,63}(?:\s+(?:dot|DOT)\s+\w{1,63})*"
)
_KINDS = (
    "street|st|road|rd|lane|ln|avenue|ave|square|sq|way|drive|dr|court|ct|place|pl|row|quay|hill|terrace|ter|close|walk|alley"
    "|boulevard|blvd|highway|hwy|parkway|pkwy|crescent|cres|gardens|grove|mews|park|circle|cir|loop|trail|plaza|bridge|gate"
)
_FRONT = "rue|via|calle|avenida|avenue|place|plaza|piazza|boulevard|chemin|route|rua|ulica|ul|viale|corso|paseo|quai|am|an der|im"
_END = "strasse|straße|str|gasse|weg|platz|allee|ring|damm|ufer|straat|laan|plein|gracht|gatan|gata|vägen|vej|gade|veien|katu|tie"
_HOUSE = r"\d{1,5}\s?[a-zA-Z]?(?:[-/]\d{1,4}[a-z]?)?"
_ADDRESS = re.compile(
    rf"\b{_HOUSE},?\s+(?:[^\W\d_][\w.'’-]{{0,40}}\s+){{1,4}}(?i:{_KINDS})\b\.?"
    rf"|\b(?:[^\W\d_][\w.'’-]{{0,40}}\s{{1,3}}){{0,3}}(?i:[^\W\d_][\w-]{{0,40}}(?:{_END})|{_KINDS})\.?\s+{_HOUSE}\b"
    rf"|\b(?:{_HOUSE},?\s+)?(?i:{_FRONT})\.?\s+(?i:(?:de la|de l'|du|des|de|della|del|di)\s+)?[A-ZÀ-Ý][\w'’-]*(?:\s+[A-ZÀ-Ý][\w'’-]*){{0,3}}(?:,?\s+{_HOUSE})?\b"
    r"|\b(?:[A-Z]{1,2}-)?\d{4,5}\s+[A-ZÀ-Ý][\w'’-]+|\b[A-Z]{2}\s+\d{5}(?:-\d{4})?\b|\b[A-Z]{1,2}\d[A-Z\d]?\s?\d[A-Z]{2}\b"
    r"|\b(?i:p\.?\s?o\.?\s?box|postfach|apt|apartment|flat|suite)\.?\s?#?\d+\w?"
)
_NUMBER = re.compile(
    r"(?<![^\W_])[^\W_]*\d(?:[\d.,'’/:-]*[^\W_])*%?"
    rf"|\b(?i:{'|'.join(sorted(NUMERALS - {'oh'}, key=len, reverse=True))}|hundreds?|thousands?|millions?|billions?|dozens?|half"
    r"|quarter|twice|thrice|double|triple|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|couple|pair|both)\b"
    r"|\b(?=[MDCLXVI]{2,}\b)M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})\b"
)
_STREET = re.compile(
    r"\b\d{1,4}[a-z]? (?:[A-Z][\w'-]+ ){1,3}(?:Street|Road|Lane|Avenue|Square|Way|Drive|Court|Place|Row|Quay|Hill|Terrace"
    r"|Close|Walk|Alley)\b"
)
_WIDE = {"money": (_MONEY,), "date": (_DATE,), "email": (_EMAIL,), "address": (_ADDRESS, _STREET), "number": (_NUMBER,)}


def of_category(category: str, text: str, wide: bool = True) -> list[Span]:
    """Spans of `text` that look like values of a category, also in disguise (`readings`). Without `wide`, only the forms
    used in generated worlds.
    """
    spans = [reading.span(*span) for reading in _readings(text) for span in _forms(category, reading.text, wide)]
    return [part for span in spans for part in _without_measurements(text, span)] if category == "phone" else spans


@lru_cache(maxsize=1)
def _readings(text: str) -> tuple[Reading, ...]:
    """The readings of a text, computed once for all categories because they take half of the time."""
    return tuple(readings(text))


def _without_measurements(text: str, span: Span) -> list[Span]:
    """The parts of a run of digits that may be phone numbers: in a table of measurements, those between decimal fractions."""
    start, end = span
    fractions = [match.span() for match in _FRACTION.finditer(text, start, end)]
    if len(fractions) < 2 or not _TABULAR.search(text, start, end):
        return [span]
    edges = [start, *(edge for fraction in fractions for edge in fraction), end]
    parts = zip(edges[::2], edges[1::2], strict=True)
    return [(a, b) for a, b in parts if sum(map(str.isdigit, text[a:b])) >= 6]


def _forms(category: str, text: str, wide: bool) -> list[Span]:
    if category == "address" and not wide:
        return [match.span() for match in _STREET.finditer(text)]
    spans = [] if category == "address" else [(item.start, item.end) for item in find(category, text)]
    if not wide:
        return spans
    if category == "phone":
        spans += [match.span() for match in _DIGITS.finditer(text) if not _NOT_PHONE.fullmatch(match.group())]
        spans += [match.span("n") for match in _CALL.finditer(text)]
        return spans + [match.span() for match in _SPOKEN.finditer(text)]
    return spans + [match.span() for pattern in _WIDE[category] for match in pattern.finditer(text)]


def in_category(category: str, fact: Fact, exactly: bool, wide: bool) -> bool:
    """Whether the value of a fact belongs to a category: by its type, or, unless `exactly`, also by its label."""
    if fact.kind == "link":
        return False
    if wide and not exactly:
        looks = of_category(category, fact.value) if fact.kind == "text" else ()
        if fact.kind not in (category, "text", "number"):
            return False
        if looks or any(LABELS[category] & set(label.split()) for label in fact.labels):
            return True
    if category == "address":
        return any("address" in label.split() and not {"email", "e-mail"} & set(label.split()) for label in fact.labels)
    if exactly or category == "number":
        return fact.kind == category
    words = {word for name in CATEGORIES[category] for word in name.split()} - {"of", "to"}
    by_label = any(set(label.split()) & (words - {"number", "address", "value"}) for label in fact.labels)
    return fact.kind == category or by_label


@cache
def stem(word: str) -> str:
    """An approximate common stem of word forms: `allergies`, `allergy` and `allergic` share one."""
    word = word.casefold()
    for plural, single in (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("s", "")):
        if word.endswith(plural) and not word.endswith("ss") and len(word) - len(plural) >= 2:
            word = f"{word.removesuffix(plural)}{single}"
            break
    return word[: max(5, len(word) - 2)] if len(word) >= 7 else word[:-1] if len(word) >= 5 else word
