"""Values of options that several scripts share. A wrong value ends a script with one sentence before it starts."""

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add `--out`, the folder of a benchmark's results, and `--table`, which shows stored ones; one of them is needed."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the results")
    where.add_argument("--table", type=Path, metavar="FILE", help="train nothing; print the tables of stored results")


def number(least: int) -> Callable[[str], int]:
    """The type of an option for argparse: a whole number, `least` or more."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return found

    return read


def numbers(least: int) -> Callable[[str], list[int]]:
    """The type of an option for argparse: whole numbers separated by commas, each `least` or more, without repetitions."""
    one = number(least)
    return lambda text: list(dict.fromkeys(one(word.strip()) for word in text.split(",")))


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option for argparse: some of the `known` names, separated by commas, without repetitions."""

    def read(text: str) -> list[str]:
        found = list(dict.fromkeys(word.strip() for word in text.split(",")))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")
        return found

    return read


def seconds(text: str) -> float:
    """The type of an option for argparse: a number of seconds above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def named_sides(given: str | None, sides: Sequence[str]) -> list[str]:
    """The `sides` whose name holds one of the words of --sides, separated by commas; all where none are given.

    SystemExit with a sentence if a word is in no name.
    """
    if given is None:
        return list(sides)
    words = [word.strip() for word in given.split(",")]
    unknown = [word for word in words if not word or not any(word in side for side in sides)]
    if unknown:
        raise SystemExit(
            f"--sides: no side has {' or '.join(map(repr, unknown))} in its name; the sides are {' | '.join(sides)}"
        )
    return [side for side in sides if any(word in side for word in words)]
