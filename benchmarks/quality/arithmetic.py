"""Numbers and calculations in written solutions of GSM8K: where they stand, what they are worth, and how to write them."""

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d*\.\d+|\d+")
_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_RESULT = re.compile(r"[ \t]*\$?[ \t]*(" + NUMBER.pattern + ")")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_SPELLED = _WORDS.split()
_FACTORS = {"half": 2, "twice": 2, "double": 2, "triple": 3, "thrice": 3, "quarter": 4, "dozen": 12, "both": 2}


@dataclass(frozen=True)
class Calculation:
    """A calculator annotation `<<expression=result>>` and the number that stands right behind it."""

    start: int
    """Of the annotation in the text."""
    expression: tuple[int, int]
    """First character and the one after the last."""
    result: tuple[int, int]
    shown: tuple[int, int]
    """Of the number behind `>>`."""


@dataclass(frozen=True)
class Literal:
    """A number as it is written in a text."""

    start: int
    stop: int
    value: Fraction


def value_of(literal: str) -> Fraction:
    """What a number is worth, such as `1,200.50`."""
    return Fraction(literal.replace(",", ""))


@lru_cache(maxsize=256)
def literals(text: str) -> tuple[Literal, ...]:
    """The numbers of `text` in their order."""
    return tuple(Literal(match.start(), match.end(), value_of(match[0])) for match in NUMBER.finditer(text))


def spelled(text: str) -> set[Fraction]:
    """The numbers that stand in `text` as words: `three`, `half`, `dozen`."""
    words = set(re.findall(r"[a-z]+", text.lower()))
    values = {number for number, word in enumerate(_SPELLED) if word in words}
    return {Fraction(value) for value in values | {number for word, number in _FACTORS.items() if word in words}}


def calculations(text: str) -> list[Calculation]:
    """The annotated calculations of `text`. ValueError for one without its result behind it, or another number there."""
    found = []
    for match in _CALCULATION.finditer(text):
        shown = _RESULT.match(text, match.end())
        stated = NUMBER.fullmatch(match[2].strip())
        if shown is None or stated is None or value_of(stated[0]) != value_of(shown[1]):
            raise ValueError(f"{match[0]} is not followed by its result")
        found.append(Calculation(match.start(), match.span(1), match.span(2), shown.span(1)))
    return found


def worth(expression: str) -> Fraction:
    """The exact value of sums, products and quotients of numbers. ValueError for anything else, or a division by 0."""
    try:
        return _evaluated(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} is no calculation: {error}") from error


def wrong_calculations(text: str) -> int:
    """How many annotations of `text` state a wrong result, by a whole unit of the last place or more: a
    rounded result is right. What cannot be calculated is not counted."""
    count = 0
    for match in _CALCULATION.finditer(text):
        stated = match[2].strip()
        try:
            off = abs(worth(match[1]) - value_of(stated))
        except ValueError:
            continue
        count += off >= Fraction(1, 10 ** len(stated.partition(".")[2]))
    return count


def _evaluated(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(repr(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _evaluated(node.operand) * (1 if isinstance(node.op, ast.UAdd) else -1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found: Fraction = _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        return found
    raise ValueError(f"{ast.unparse(node)!r} is neither a number nor a sum, product or quotient of numbers")


def written(value: Fraction, like: str) -> str:
    """`value` in the manner of the literal `like`: as many decimals, commas where it has some.

    ValueError if it is not exact or not above 0.
    """
    whole, _, decimals = like.partition(".")
    scaled = value * 10 ** len(decimals)
    if value <= 0 or scaled.denominator != 1:
        raise ValueError(f"{value} cannot be written like {like}")
    digits = str(scaled.numerator).rjust(len(decimals) + 1, "0")
    left, right = (digits[: -len(decimals)], digits[-len(decimals) :]) if decimals else (digits, "")
    grouped = f"{int(left):,}" if "," in whole else left
    if not whole and grouped == "0":
        grouped = ""
    return grouped + ("." + right if right else "")
