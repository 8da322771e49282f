"""Every character belongs to a token: multi-byte text, broken bytes, token id 0, blank lines, truncated answers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.credit.units.offsets import align
from tests.credit.units.tokenizers import EURO, VOCABULARY, Counting, byte_level, encode, sentence_piece

any_ids = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=24)
texts = st.text(st.sampled_from("€😀! .\nAa漢é\u200d👩") | st.characters(exclude_categories=["Cs"]), max_size=40)


def divides_nothing(ids, decode):
    """By definition: decodes all tokens again for every token."""
    full = decode(ids)
    return [decode(ids[:place]) + decode(ids[place:]) == full for place in range(len(ids) + 1)]


def check(ids, decode):
    answer = align(ids, decode)
    assert answer.text == decode(ids)
    assert answer.offsets[0] == 0
    assert answer.offsets[-1] == len(answer.text)
    assert (np.diff(answer.offsets) >= 0).all()
    if decode is not byte_level or VOCABULARY.index(b"") not in ids:  # else several cuts are at one place of the text
        assert answer.whole.tolist() == divides_nothing(ids, decode)
    edges = np.flatnonzero(answer.whole)
    for start, stop in pairwise(edges):
        assert answer.slice(start, stop) == decode(ids[start:stop])
    return answer


@settings(max_examples=400)
@given(ids=any_ids)
def test_any_bytes_are_aligned_by_the_definition(ids):
    check(ids, byte_level)


@given(text=texts)
def test_texts_of_a_real_tokenizer(smollm, text):
    ids = smollm.encode(text, add_special_tokens=False)
    check(ids, smollm.decode)
    check(ids[: len(ids) // 2], smollm.decode)  # cut off, inside a character too


@given(ids=st.lists(st.integers(0, 49151), max_size=12))
def test_random_tokens_of_a_real_tokenizer(smollm, ids):
    check(ids, smollm.decode)


def test_a_character_belongs_to_the_token_that_completes_it():
    ids = [VOCABULARY.index(token) for token in (b"!", EURO[:1], EURO[1:2], EURO[2:], b"A")]
    answer = check(ids, byte_level)
    assert answer.text == "!€A"
    assert answer.offsets.tolist() == [0, 1, 1, 1, 2, 3]
    assert answer.whole.tolist() == [True, True, False, False, True, True]
    assert answer.between_characters(np.array([1, 2, 3, 4])).tolist() == [1, 1, 1, 4]


@pytest.mark.parametrize("kept", [1, 2])
def test_a_truncated_character_is_one_replacement_character(kept):
    answer = check([VOCABULARY.index(b"A"), *(VOCABULARY.index(EURO[i : i + 1]) for i in range(kept))], byte_level)
    assert answer.text == "A\ufffd"
    assert answer.whole.tolist() == [True, True, *[False] * (kept - 1), True]


@given(words=st.lists(st.sampled_from([" B", " a", "A", "€", "\n\n", "!"]), min_size=1, max_size=12))
def test_decoders_that_drop_the_first_space_keep_the_others(words):
    ids = [i for word in words for i in (encode(word) if word != "€" else [VOCABULARY.index(bytes([b])) for b in EURO])]
    answer = align(ids, sentence_piece)
    assert answer.text == sentence_piece(ids) == "".join(words).removeprefix(" ")
    assert answer.whole.sum() == len(words) + 1


def test_cuts_are_at_the_first_token_of_the_range_or_at_the_token_with_its_end():
    answer = align([VOCABULARY.index(token) for token in (b"A.", b"\n", b" ", b" B", b"\nB. x", b"!")], byte_level)
    assert answer.text == "A.\n  B\nB. x!"
    assert answer.cuts([(3, 5)]).tolist() == [2]  # the line starts with a separate token
    assert answer.cuts([(5, 5)]).tolist() == [3]  # " B" holds the character
    assert answer.cuts([(7, 7)]).tolist() == [4]  # "\nB. x" holds the label and the end of the line before
    assert answer.cuts([]).tolist() == []


@pytest.mark.parametrize("piece", [b"A", EURO[:1], EURO[1:2], b"\xf0", EURO[1:] + EURO[:1], b"", EURO])
def test_the_work_is_linear_in_the_tokens(piece):
    def work(tokens):
        decode = Counting(byte_level)
        align([VOCABULARY.index(piece)] * tokens, decode)
        return decode.calls, decode.tokens

    (few, short), (many, long) = work(500), work(2000)
    assert many <= 12 * 2000
    assert many <= 4.1 * few + 50
    assert long <= 4.1 * short + 50
