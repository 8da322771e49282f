"""Other readings of a text, in which disguised values have a form that patterns find.

A value may be percent-encoded, written in HTML entities, split by Markdown or glued to separators. `readings` undoes
each of these and remembers which characters of the text each character came from, so that what is found in a reading
can be hidden in the text.

Codes that need a key or a rule to undo (reversed text, base64, other alphabets by position) are not read.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

_ESCAPES = re.compile(
    r"(?:%[0-9A-Fa-f]{2})+|(?:=[0-9A-F]{2}){2,}|&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]\w{1,30});?"
    r"|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}"
)
_INVISIBLE = re.compile(
    r"<!--.{0,400}?-->|</?[A-Za-z][^<>]{0,200}>|\\(?=[^\w\s,;:!])|[\u0300-\u036f\u20d0-\u20f0]", re.DOTALL
)
_THIN = re.compile(r"\\[,;:! ]|~")
"""Spaces of LaTeX."""
_AT = re.compile(r"[^\S\n]*[(\[{<][^\S\n]*(?:at|ät|@)[^\S\n]*[)\]}>][^\S\n]*", re.IGNORECASE)
_DOT = re.compile(r"[^\S\n]*[(\[{<][^\S\n]*(?:dot|punkt|\.)[^\S\n]*[)\]}>][^\S\n]*", re.IGNORECASE)
_TARGETS = re.compile(r"\]\([^()\n]{0,400}\)")
_MARKS = re.compile(r"[*_~`\[\]{}()\"^]+")
_SEPARATORS = re.compile(r"[^\w@.+$€£¥%,/:#&'’-]+|\s[\W_]{0,12}\s")
_GLUED = re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|_+|(?<=[a-z])(?=[A-Z])")
_LOOSE = re.compile(r"\s+(?=[,.@]\w|,\s)|(?<=@)\s+(?=\w)")
"""White space before the signs inside a value."""
_SPACED = re.compile(r"(?<![^\W_])(?s:.)(?P<sep>[\W_]{1,6})(?:(?!(?P=sep))(?s:.)|\s)(?:(?P=sep)(?s:.)){2,}(?![^\W_])")
_DIGIT_WORD = re.compile(
    r"[^\S\n]{0,2}(?<![^\W\d_])(?:zero|oh|one|two|three|four|five|six|seven|eight|nine)(?![^\W\d_])[^\S\n]{0,2}",
    re.IGNORECASE,
)
_LOOKALIKES = re.compile(r"(?<![^\W_])(?=(?:[OolI .,/()+-]{0,8}\d))[\dOolI](?:[ .,/()-]{0,2}[\dOolI])+(?![^\W_])")
"""Runs of digits and of letters that look like 0 and 1."""
_DIGIT_OF = {"oh": "0"} | {
    word: str(digit)
    for digit, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
}
_ALIKE = str.maketrans(
    "асеіорхуѕјһԁԛԝАВСЕНІКМОРТХЅЈΑΒΕΗΙΚΜΝΟΡΤΧΥΖαορν",
    "aceiopxysjhdqwABCEHIKMOPTXSJABEHIKMNOPTXYZaopv",
)
"""Letters of other alphabets that look like Latin ones."""


@dataclass(frozen=True)
class Reading:
    """`text`, whose character i stands for characters `starts[i]` to `ends[i]` of the original."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The characters of the original that characters `start` to `end` stand for."""
        return self.starts[start], self.ends[end - 1]

    def replaced(self, pattern: re.Pattern[str], replacement: Callable[[str], str] | str) -> "Reading":
        """This reading with each match replaced. The new characters stand for all characters of the match."""
        pieces: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        at = 0
        for match in pattern.finditer(self.text):
            new = replacement if isinstance(replacement, str) else replacement(match.group())
            if new == match.group():
                continue
            first, last = match.span()
            pieces += [self.text[at:first], new]
            starts += self.starts[at:first]
            ends += self.ends[at:first]
            if new:
                start, end = self.span(first, last) if last > first else (self.starts[first], self.starts[first])
                starts += [start] * len(new)
                ends += [end] * len(new)
            at = last
        if not pieces:
            return self
        return Reading("".join([*pieces, self.text[at:]]), [*starts, *self.starts[at:]], [*ends, *self.ends[at:]])


def readings(text: str) -> Iterator[Reading]:
    """The text itself, and each reading of it that differs. Time is linear in the text."""
    seen = {text}
    plain = Reading(text, range(len(text)), range(1, len(text) + 1))
    yield plain
    decoded = plain
    for _ in range(3):
        decoded = decoded.replaced(_ESCAPES, _decoded)
    decoded = decoded.replaced(_THIN, " ").replaced(_INVISIBLE, "").replaced(_DOT, ".").replaced(_AT, "@")
    if not decoded.text.isascii():
        decoded = _folded(decoded)
    spaced = _unspaced(_unspaced(decoded))
    digits = spaced.replaced(_DIGIT_WORD, lambda word: _DIGIT_OF[word.strip().casefold()])
    digits = digits.replaced(_LOOKALIKES, lambda run: re.sub("[lI]", "1", re.sub("[Oo]", "0", run)))
    for reading in (
        decoded,
        spaced,
        spaced.replaced(_TARGETS, "").replaced(_MARKS, ""),
        spaced.replaced(_SEPARATORS, " ").replaced(_GLUED, " ").replaced(_LOOSE, ""),
        _unspaced(digits).replaced(_MARKS, ""),
    ):
        if reading.text not in seen:
            seen.add(reading.text)
            yield reading


def fold(text: str) -> str:
    """`text` without accents, in Latin letters where others look the same, with ordinary digits."""
    return "".join(map(_plain, text))


def _decoded(escape: str) -> str:
    if escape[0] == "&":
        return (
            html.unescape(escape if escape.endswith(";") else f"{escape};")
            if escape[1] == "#"
            else html.unescape(escape)
        )
    if escape[0] == "\\":
        return chr(int(escape[2:], 16))
    try:
        return unquote_to_bytes(escape.replace("=", "%")).decode()
    except UnicodeDecodeError:
        return escape


def _unspaced(reading: Reading) -> Reading:
    """`reading` without separators that stand between each two of several characters."""
    dropped: set[int] = set()
    for match in _SPACED.finditer(reading.text):
        step = 1 + len(match["sep"])
        dropped.update(at for at in range(*match.span()) if (at - match.start()) % step)
    if not dropped:
        return reading
    kept = [at for at in range(len(reading.text)) if at not in dropped]
    return Reading(
        "".join(reading.text[at] for at in kept), [reading.starts[at] for at in kept], [reading.ends[at] for at in kept]
    )


def _folded(reading: Reading) -> Reading:
    return reading.replaced(re.compile(r"[^\x00-\x7f]"), _plain)


def _plain(sign: str) -> str:
    if sign.isascii():
        return sign
    digit = unicodedata.digit(sign, None)
    if digit is not None:
        return str(digit)
    base = unicodedata.normalize("NFD", sign)[:1].translate(_ALIKE)
    return base if base.isascii() and base.isprintable() else sign
