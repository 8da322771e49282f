"""Values are found in time linear in any text, with the same results as plain patterns."""

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain_memory.worlds.values import FINDABLE, canonical, find, plain

EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
BETWEEN = re.compile(r"\s*[,;]\s*(?:and\s+)?|\s+and\s+|\s+&\s+")


PIECES = ["a.", "1", "1,111", "a@", "a.b@c.d ", "(1", "1 ", "$1", "[[a#", "a  ", "@", "-"]
QUICK = {("a.", "x"), ("1,111", "x"), ("a@", ""), ("[[a#", "x"), ("a  ", ",")}
LONG = [
    pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
    for pair in itertools.product(PIECES, ["", "x", "@", ","])
]


@given(st.text("aé.-+@_ 1", max_size=24))
def test_addresses_are_those_of_the_pattern(text):
    assert [(found.start, found.end) for found in find("email", text)] == [m.span() for m in EMAIL.finditer(text)]


@given(st.lists(st.sampled_from([" ", "  ", ",", ";", "and", "&", "a", "b"]), max_size=10).map("".join))
def test_items_are_those_between_the_pattern(text):
    items = {plain(item) for item in BETWEEN.split(text.strip().strip("*_`").strip())} - {""}
    assert canonical("list", text) == ("; ".join(sorted(items)) or None)


@pytest.mark.parametrize(("piece", "end"), LONG)
def test_any_long_text_is_parsed_quickly(piece, end):
    text = piece * (60_000 // len(piece)) + end
    for kind in (*FINDABLE, "list"):
        begun = time.process_time()
        canonical(kind, text)
        if kind != "list":
            find(kind, text)
        # Half a second at most here; the patterns once took from ten seconds to hours.
        assert time.process_time() - begun < 5


def test_a_number_longer_than_python_writes_is_read():
    digits = "1" * 5_000
    assert canonical("number", digits) == digits
    assert [found.value for found in find("number", f"it is {digits}.")] == [digits]
