"""Each segmenter by hand: what begins a unit and what does not, and the caps."""

import time
from itertools import pairwise

import numpy as np
import pytest

from posttrain.credit.units.segment import (
    Answer,
    entropy_cuts,
    ordinal_of,
    segment,
    sentence_starts,
    step_starts,
)
from posttrain.recipe.units import STEP_PATTERN, EntropyUnits
from tests.credit.units.tokenizers import byte_level


def cut(text, places):
    """The parts of a text between the last characters of its places."""
    edges = [0, *(last for _, last in places), len(text)]
    assert all(first <= last for first, last in places)
    return [text[start:stop] for start, stop in pairwise(edges) if stop > start]


def steps(text, pattern=STEP_PATTERN):
    return cut(text, step_starts(text, pattern))


@pytest.mark.parametrize(
    "label", ["{}. ", "{}) ", "{}: ", "**{}.** ", "**{}. ", "*{}. ", "  {}. ", "Step {}: ", "**step {}.** "]
)
@pytest.mark.parametrize("names", [("A", "B", "C"), ("1", "2", "3")])
def test_ways_to_write_a_label(label, names):
    parts = [f"{label.format(name)}do it\n\n" for name in names]
    assert [p.strip() for p in steps("".join(parts)) if p.strip()] == [p.strip() for p in parts]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A. a\nOK. fine\nB. b", ["A. a\nOK. fine\n", "B. b"]),
        ("OK. fine\nA. a\nB. b", ["OK. fine\n", "A. a\n", "B. b"]),
        ("A. a\nA. again\nC. c\nB. b", ["A. a\nA. again\nC. c\n", "B. b"]),
        ("A. a\n1. x\n2. y\nB. b\nC. c", ["A. a\n1. x\n2. y\n", "B. b\n", "C. c"]),
        ("1. x\nA. a\n2. y", ["1. x\nA. a\n", "2. y"]),
        ("B. b\nC. c", ["B. b\nC. c"]),
        ("A.a\n3.14 is pi\nEND. of it", ["A.a\n3.14 is pi\nEND. of it"]),
        ("Go to A. Then\n\n\nA. a", ["Go to A. Then\n\n\n", "A. a"]),
        ("", []),
    ],
)
def test_labels_must_count(text, found):
    assert steps(text) == found


def test_without_the_check_every_match_is_a_step():
    """The published parser, which fails on `OK. fine`."""
    pattern = r"^(\*?[A-Z]{1,2}\.)\s+"
    assert steps("A. a\nOK. fine\nC. c", pattern) == ["A. a\n", "OK. fine\n", "C. c"]
    assert steps("1. a\n2. b", pattern) == ["1. a\n2. b"]
    assert steps("x = 1\n\ny = 2\n#### 3", r"^(?=\S)") == ["x = 1\n\n", "y = 2\n", "#### 3"]
    assert steps("a\nb\n\nc", r"(?<=\n\n)(?=\S)") == ["a\nb\n\n", "c"]


def test_labels_continue_after_z():
    names = ["A", "B", "Y", "Z", "AA", "AB", "AZ", "BA", "ZZ"]
    assert [ordinal_of(name) for name in names] == [1, 2, 25, 26, 27, 28, 52, 53, 702]
    assert [ordinal_of(name) for name in ("1", "30", "", "A1", "é", "²")] == [1, 30, None, None, None, None]
    letters = [chr(ord("A") + i) for i in range(26)] + ["AA", "AB"]
    assert len(steps("\n".join(f"{name}. do" for name in letters))) == 28


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Is it so? It is! Good.", ["Is it so? ", "It is! ", "Good."]),
        ("A. Is it? If YES, go to Step B. If NO, DENY.\nB. x", ["A. Is it? ", "If YES, go to Step B. ", "If NO, DENY.\n", "B. x"]),
        ("It costs 3.50 e.g. here, says Dr. Who.", ["It costs 3.50 e.g. here, says Dr. Who."]),
        ("5 + 3 = 8. Then (\"Stop.\") It goes on... and on.", ["5 + 3 = 8. ", 'Then ("Stop.") ', "It goes on... and on."]),
        ("one line\n\n  another\n", ["one line\n\n  ", "another\n"]),
        ("好。「你好！」他说。 x", ["好。", "「你好！」", "他说。 ", "x"]),
        ("\n\n", ["\n\n"]),
        ("", []),
    ],
)  # fmt: skip
def test_sentences(text, found):
    assert cut(text, sentence_starts(text)) == found


@pytest.mark.parametrize("text", ["." * 200_000, "\n" * 200_000, " " * 200_000 + "x", "。" * 200_000, "A.\n" * 60_000])
def test_hostile_texts_take_linear_time(text):
    start = time.process_time()
    for read in (sentence_starts, lambda text: step_starts(text, STEP_PATTERN)):
        read(text)
    assert time.process_time() - start < 5


def test_entropy_cuts_are_strict_and_never_before_the_first_token():
    entropies = np.array([9.0, 1.5, 1.6, 0.0, 3.0])
    assert entropy_cuts(entropies, 1.5).tolist() == [2, 4]
    assert entropy_cuts(entropies, 0.0).tolist() == [1, 2, 4]
    assert entropy_cuts(entropies, 1000.0).tolist() == []
    assert entropy_cuts(np.zeros(0), 1.5).tolist() == []
    with pytest.raises(ValueError, match="not all finite"):
        entropy_cuts(np.array([1.0, np.nan]), 1.5)


@pytest.mark.parametrize(
    ("entropies", "threshold", "ended", "cuts"),
    [
        ([9, 0, 0, 0], 1.5, True, [0, 4]),  # no boundary
        ([9, 0, 0, 9], 1.5, True, [0, 4]),  # the boundary before the end token would leave it alone
        ([9, 0, 9, 0], 1.5, True, [0, 2, 4]),  # the boundary one token earlier
        ([9, 0, 0, 9], 1.5, False, [0, 3, 4]),  # cut off: the last token is a token like others
        ([9, 0, 0, 0], 1.5, False, [0, 4]),
        ([1, 1, 1, 1], 0, True, [0, 1, 2, 4]),  # a unit per token, the end token with the last
        ([1, 1, 1, 1], 0, False, [0, 1, 2, 3, 4]),
        ([9, 9, 9, 9], 1000, True, [0, 4]),  # the outcome
        ([9, 9, 9, 9, 9, 0], 1.5, True, [0, 1, 2, 3, 4, 6]),
        ([9], 0, False, [0, 1]),
        ([9], 0, True, [0, 1]),
    ],
)
def test_tail_of_an_answer_in_units_by_entropy(entropies, threshold, ended, cuts):
    answer = Answer(np.arange(len(entropies)) * 0, ended, entropies=np.array(entropies, dtype=np.float32))
    units = segment(EntropyUnits(type="entropy", threshold=threshold), [answer], byte_level)
    assert units.cuts.tolist() == cuts
