"""Spellings that hide a value from a pattern but not from a reader, and the share of them that the privacy filter finds.

`python -m tests.adversary.disguises` prints the table of docs/how-to/memory_agent.md.
"""

import html
import random
import re
import sys
from collections.abc import Callable
from urllib.parse import quote

from posttrain_memory.privacy.filter import PrivacyFilter

VALUES = {
    "phone": ["+41 79 555 01 01", "+1 202 555 0143", "+44-20-7946-0958"],
    "email": ["mara@lindt.example", "jo.ek+home@post.example"],
    "date": ["3 May 1990", "1987-11-24", "March 14, 2001"],
    "money": ["$4,200", "84500 EUR", "£1,250.50"],
    "text": ["Tarvale", "peanut butter", "Quillmere"],
}
"""Kind -> values. `text` is a value without a typical form: the filter knows it only from the notes."""
RULES = {
    "phone": ("hide: [{category: phone}]", "phone"),
    "email": ("hide: [{category: email}]", "email"),
    "date": ("hide: [{category: date}]", "birthday"),
    "money": ("hide: [{category: money}]", "salary"),
    "text": ("hide: [{note: Mara Lindt, label: city}]", "city"),
}
MARA = "entities/mara_lindt.md"
_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_CYRILLIC = str.maketrans("aceiopxyABCEHKMOPTX", "асеіорхуАВСЕНКМОРТХ")


def _between(separator: str) -> Callable[[str], str]:
    return lambda value: separator.join(value)


def _groups(first: str, last: str, joint: str = "") -> Callable[[str], str]:
    """Each run of letters and digits between two marks."""
    return lambda value: joint.join(
        f"{first}{part}{last}" if part.isalnum() else part.strip() if joint else part
        for part in re.findall(r"[^\W_]+|[\W_]+", value)
    )


def _digits(zero: int) -> Callable[[str], str]:
    return lambda value: "".join(chr(zero + int(sign)) if sign.isdigit() else sign for sign in value)


def _each(form: Callable[[str], str]) -> Callable[[str], str]:
    return lambda value: "".join(map(form, value))


DISGUISES: dict[str, Callable[[str], str]] = {
    "as it is": lambda value: value,
    "percent-encoded signs": lambda value: quote(value, safe=""),
    "percent-encoded": _each(lambda sign: "".join(f"%{byte:02X}" for byte in sign.encode())),
    "percent-encoded twice": _each(lambda sign: "".join(f"%25{byte:02X}" for byte in sign.encode())),
    "quoted-printable": _each(lambda sign: "".join(f"={byte:02X}" for byte in sign.encode())),
    "HTML decimal entities": _each(lambda sign: f"&#{ord(sign)};"),
    "HTML hexadecimal entities": _each(lambda sign: f"&#x{ord(sign):x};"),
    "HTML entities twice": _each(lambda sign: html.escape(f"&#{ord(sign)};")),
    "&nbsp; for spaces": lambda value: value.replace(" ", "&nbsp;").replace("-", "&ndash;"),
    "&nbsp; between groups": _groups("", "&nbsp;", ""),
    "\\u escapes": _each(lambda sign: f"\\u{ord(sign):04x}"),
    "\\x escapes": _each(lambda sign: f"\\x{ord(sign):02x}"),
    "glued to underscores": lambda value: f"_{value}_",
    "inside snake_case": lambda value: f"my_{value.replace(' ', '_')}_here",
    "** in the middle": lambda value: f"{value[: len(value) // 2]}**{value[len(value) // 2 :]}",
    "** between signs": _between("**"),
    "bold groups": _groups("**", "**"),
    "italic groups": _groups("_", "_"),
    "code groups": _groups("`", "`"),
    "struck groups": _groups("~~", "~~"),
    "bracketed groups": _groups("[", "]"),
    "braced groups": _groups("{", "}"),
    "linked groups": _groups("[", "](x)"),
    "table cells": _groups("| ", " ", " "),
    "| between signs": _between("|"),
    "… between groups": _groups("", "…"),
    "a group on each line": _groups("", "\n"),
    "a sign on each line": _between("\n"),
    "a list item for each group": _groups("- ", "\n", ""),
    "spaces between signs": _between(" "),
    "dots between signs": _between("."),
    "dashes between signs": _between(" - "),
    "slashes between signs": _between("/"),
    "commas between signs": _between(", "),
    "colons between signs": _between(":"),
    "emoji between signs": _between("🙂"),
    "zero-width spaces": _between("\u200b"),
    "soft hyphens": _between("\u00ad"),
    "tags between signs": _between("<b></b>"),
    "line breaks of HTML": _groups("", "<br>"),
    "comments between signs": _between("<!-- x -->"),
    "full-width": _each(lambda sign: chr(ord(sign) + 0xFEE0) if "!" <= sign <= "~" else sign),
    "mathematical digits": _digits(0x1D7CE),
    "Arabic-Indic digits": _digits(0x660),
    "Devanagari digits": _digits(0x966),
    "circled digits": lambda value: "".join("⓪①②③④⑤⑥⑦⑧⑨"[int(s)] if s.isdigit() else s for s in value),
    "superscript digits": lambda value: "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(s)] if s.isdigit() else s for s in value),
    "keycaps": lambda value: "".join(f"{s}\ufe0f\u20e3" if s.isdigit() else s for s in value),
    "combining strokes": _each(lambda sign: f"{sign}\u0336"),
    "Cyrillic letters": lambda value: value.translate(_CYRILLIC),
    "a mailto or tel link": lambda value: f"[here](tel:{value.replace(' ', '')})",
    "LaTeX": lambda value: "$" + value.replace(" ", "\\,").replace("$", "\\$") + "$",
    "upper case": str.upper,
}
"""Name -> a spelling. Each is one that a reader, or a page that shows the text, turns back into the value."""
UNCOVERED: dict[str, Callable[[str], str]] = {
    "reversed": lambda value: value[::-1],
    "base64": lambda value: __import__("base64").b64encode(value.encode()).decode(),
    "hexadecimal": lambda value: value.encode().hex(),
    "rot13": lambda value: __import__("codecs").encode(value, "rot13"),
    "words between groups": _groups("", " and then "),
    "glued to letters": lambda value: f"call{value}now",
    "digits in words": lambda value: re.sub(r"\d", lambda m: f" {_DIGITS[int(m[0])]} ", value),
    "every second digit in words": lambda value: re.sub(
        r"(\d)(\D?)(\d)", lambda m: f"{m[1]}{m[2]} {_DIGITS[int(m[3])]} ", value
    ),
    "O and l for 0 and 1": lambda value: value.replace("0", "O").replace("1", "l"),
    "(at) and (dot)": lambda value: value.replace("@", " (at) ").replace(".", " (dot) "),
}
"""Spellings that the filter does not undo, as SECURITY.md says."""

BY_VALUE = frozenset(
    name
    for name in DISGUISES
    if name.endswith("between signs") or name in ("a group on each line", "a sign on each line", "table cells")
) | {"a list item for each group", "&nbsp; between groups", "inside snake_case", "line breaks of HTML", "LaTeX"}
"""Spellings that are found only of values that the notes state: nothing else in them has the form of a category."""


def applicable(value: str, disguise: Callable[[str], str]) -> bool:
    """Whether a disguise changes a value."""
    return disguise is DISGUISES["as it is"] or disguise(value) != value


def notes(kind: str, value: str) -> dict[str, str]:
    """A vault that states one value."""
    label = RULES[kind][1]
    return {
        "user.md": "# Me\n\n- friend: [[entities/mara_lindt.md|Mara Lindt]]\n",
        MARA: f"# Mara Lindt\n\n- {label}: {value}\n- hobby: chess\n",
    }


def remains(said: str, shown: str) -> bool:
    """Whether more than a third of the letters and digits of a disguised value are left in the text that is shown."""
    left = re.sub(r"\[hidden\]|call|now|my|here|tel:|&[a-z]+;|<br>|\(x\)", "", shown)
    return len(re.findall(r"[^\W_]", left)) > len(re.findall(r"[^\W_]", said)) / 3


def leaks(kind: str, value: str, said: str, where: str) -> bool:
    """Whether a disguised value stays in a reply (`where` is `reply` or `stranger`) or in the view of a note (`note`).

    In `reply` the notes state the value, in `stranger` they do not. In `note` a second line of the same note has the
    disguised spelling.
    """
    rule, text = RULES[kind][0], f"— {said} —"
    files = notes(kind, "" if where == "stranger" else value)
    if where == "note":
        files[MARA] += f"\n{text}\n"
        return remains(said, PrivacyFilter([rule], files).view[MARA].partition("chess\n")[2])
    return remains(said, PrivacyFilter([rule], files).clean(text))


def corpus() -> list[tuple[str, str, str, str, str]]:
    """(disguise, kind, value, spelling, where) of every case."""
    cases = []
    for name, disguise in DISGUISES.items():
        for kind, values in VALUES.items():
            for value in values:
                if applicable(value, disguise):
                    known_only = kind == "text" or name in BY_VALUE
                    for where in ("reply", "note") if known_only else ("reply", "stranger", "note"):
                        cases.append((name, kind, value, disguise(value), where))
    return cases


def attack(seed: int) -> None:
    """One random value under one or two random disguises, in a reply."""
    random_ = random.Random(seed)
    kind = random_.choice(list(VALUES))
    value = {
        "phone": f"+{random_.randint(1, 99)} {random_.randint(10, 99)} {random_.randint(100, 999)} {random_.randint(10, 99)} {random_.randint(10, 99)}",
        "email": f"{random_.choice(['jo', 'mara.l', 'k_ek'])}{random_.randint(1, 999)}@{random_.choice(['post', 'my-mail'])}.example",
        "date": f"{random_.randint(1, 28)} {random_.choice(['March', 'July', 'October'])} {random_.randint(1950, 2029)}",
        "money": f"${random_.randint(1, 99)},{random_.randint(100, 999)}",
        "text": random_.choice(["Tarvale", "Quillmere", "Ostrava", "Brindlewick"]),
    }[kind]
    name, disguise = random_.choice(list(DISGUISES.items()))
    said = disguise(value)
    where = random_.choice(["reply", "note"])
    assert not leaks(kind, value, said, where), f"{kind} {value!r} as {name} ({said!r}) stays in a {where}"


def rate(cases: list[tuple[str, str, str, str, str]]) -> dict[tuple[str, str], list[str]]:
    """(kind, where) -> 'name: spelling' of each leak."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, kind, value, said, where in cases:
        found.setdefault((kind, where), [])
        if leaks(kind, value, said, where):
            found[kind, where].append(f"{name}: {said!r}")
    return found


def main() -> None:
    cases = corpus()
    total = lost = 0
    for (kind, where), leaked in sorted(rate(cases).items()):
        n = sum((one[1], one[4]) == (kind, where) for one in cases)
        total, lost = total + n, lost + len(leaked)
        print(f"{kind:6} {where:9} {n - len(leaked):4} of {n:4} hidden")
        if "-v" in sys.argv:
            for one in leaked:
                print("   ", one)
    print(f"all {total - lost} of {total} hidden ({len(DISGUISES)} disguises)")


if __name__ == "__main__":
    main()
