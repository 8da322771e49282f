"""Over ten thousand malformed rows."""

import math

import pytest

from posttrain.data.examples import ROW_FUNCTIONS
from posttrain.data.messages import ConversationExample, PairExample, PromptExample, TextExample, UnpairedExample
from posttrain.data.problems import Problems
from posttrain.recipe.data import ColumnsRecipe
from posttrain.seeds import random_stream
from tests.data.malformed import BAD, BLANK, GOOD, TOOL, USER, malformed
from tests.data.valid import check

KINDS = {"conversation": ConversationExample, "pair": PairExample, "unpaired": UnpairedExample, "prompt": PromptExample}
COLUMNS = ColumnsRecipe()
TWO = ([USER], [GOOD], [BAD], "o")


@pytest.mark.parametrize(
    "example",
    [
        ConversationExample([USER], "o"),
        ConversationExample([GOOD], "o"),
        ConversationExample([USER, GOOD, GOOD], "o"),
        ConversationExample([USER, TOOL, GOOD], "o"),
        ConversationExample([USER, BLANK], "o"),
        ConversationExample([{**USER, "content": ""}, GOOD], "o"),
        ConversationExample([{**USER, "content": None}, GOOD], "o"),
        ConversationExample([USER, {**GOOD, "train": 1}], "o"),
        ConversationExample([USER, {**GOOD, "content": "\ud800"}], "o"),
        ConversationExample([USER, GOOD], "o", tools=[1]),
        ConversationExample([USER, GOOD], "o", domain=""),
        PromptExample([USER, GOOD], "o"),
        UnpairedExample([USER], [GOOD], 1, "o"),
        UnpairedExample([USER], [], True, "o"),
        PairExample([USER], [GOOD], [GOOD], "o"),
        PairExample([USER], [], [BAD], "o"),
        PairExample([USER], [{**GOOD, "train": False}], [BAD], "o"),
        PairExample(*TWO, margin=math.nan),
        PairExample(*TWO, margin=-1.0),
    ],
)
def test_the_check_refuses_invalid_examples(example):
    with pytest.raises((AssertionError, KeyError, AttributeError, UnicodeEncodeError)):
        check(example)
    check(PairExample(*TWO))


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_rows_never_raise_and_never_become_invalid_examples(kind):
    draws = random_stream("test", "malformed", kind)
    used, problems = 0, Problems()
    for number, row in enumerate(malformed(kind, 2_600, draws), 1):
        example = ROW_FUNCTIONS[kind](row, "rows row 1", COLUMNS)
        if isinstance(example, str):
            problems.add_text(example, f"rows row {number}")
            continue
        plain = kind == "conversation" and "text" in row and isinstance(example, TextExample)
        assert plain or type(example) is KINDS[kind]
        check(example)
        used += 1
    # Neither part of the test is empty, and the rows fail in many ways.
    assert used > 100
    assert problems.total > 1_000
    assert len(problems.summary()) >= {"prompt": 8}.get(kind, 12)
    assert used + problems.total == 2_600
