"""Whatever the recipe and the tokens, units partition the sampled tokens and decode to their slices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from posttrain.credit.units.offsets import align
from posttrain.credit.units.segment import Answer, answer_tokens, segment, stream_answers
from posttrain.credit.units.spans import Spans
from posttrain.recipe.units import UnitsRecipe
from tests.credit.units.tokenizers import VOCABULARY, Counting, byte_level, encode
from tests.rollout.episodes import played

_RECIPE: TypeAdapter = TypeAdapter(UnitsRecipe)
SEED_PATTERN = r"^(\*?[A-Z]{1,2}\.)\s+"


def recipe(kind, **keys):
    return _RECIPE.validate_python({"type": kind} | keys)


limits = st.fixed_dictionaries(
    {"max_units": st.none() | st.integers(1, 4), "thinking": st.sampled_from(["whole", "split"])}
)
cutting = st.one_of(
    limits.map(lambda keys: recipe("steps", closing="^B", **keys)),
    limits.map(lambda keys: recipe("steps", pattern=SEED_PATTERN, **keys)),
    limits.map(lambda keys: recipe("sentence", **keys)),
    limits.map(lambda keys: recipe("entropy", **keys)),
)
whole = st.sampled_from(["turn", "token", "outcome"]).map(recipe)
entropies = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0])


def answers(ids, most=3):
    return st.lists(
        st.builds(
            lambda ids, ended, opened, values: Answer(
                np.array(ids, dtype=np.int64), ended, opened, np.resize(np.array([*values, 0.0]), len(ids))
            ),
            ids,
            st.booleans(),
            st.booleans(),
            st.lists(entropies, max_size=24),
        ),
        min_size=1,
        max_size=most,
    )


def check_partition(units: Spans, given_answers, decode, divides=False):
    """Sorted, disjoint, covering, within one answer each; and each decodes to its slice of the answer."""
    assert units.tokens == sum(len(a.ids) for a in given_answers)
    assert units.cuts[0] == 0
    assert (units.lengths >= 1).all()
    assert [t for start, stop in units for t in range(start, stop)] == list(range(units.tokens))
    assert units.unit_of_token.tolist() == [k for k, (start, stop) in enumerate(units) for _ in range(start, stop)]
    begin = 0
    for one in given_answers:
        end, aligned = begin + len(one.ids), align(one.ids, decode)
        assert end in units.cuts
        shown = ""
        for start, stop in units:
            if begin <= start < end:
                piece = aligned.slice(start - begin, stop - begin)
                shown += piece
                if not divides:
                    assert piece == decode(one.ids[start - begin : stop - begin].tolist())
        assert shown == decode(one.ids.tolist())
        begin = end


made_up = st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=24)


def assert_capped(recipe, answer, decode):
    """The first units are those without a limit, and the last one takes the rest."""
    units, free = (
        segment(recipe, [answer], decode),
        segment(recipe.model_copy(update={"max_units": None}), [answer], decode),
    )
    starts, all_starts = units.cuts[:-1][units.is_unit], free.cuts[:-1][free.is_unit]
    assert starts.tolist() == all_starts[: recipe.max_units].tolist()
    assert (units.cuts[1:][units.is_unit] == free.cuts[1:][free.is_unit].max(initial=0)).sum() == (len(starts) > 0)


@settings(max_examples=400)
@given(recipe=cutting, answers=answers(made_up))
def test_hostile_tokens(recipe, answers):
    check_partition(segment(recipe, answers, byte_level), answers, byte_level)
    for answer in answers:
        assert_capped(recipe, answer, byte_level)


@given(recipe=whole, answers=answers(made_up))
def test_units_that_do_not_depend_on_the_text(recipe, answers):
    units = segment(recipe, answers, byte_level)
    assert len(units) == {"turn": len(answers), "token": units.tokens, "outcome": 1}[recipe.type]
    assert units.is_unit.all()
    if recipe.type != "outcome":
        check_partition(units, answers, byte_level, divides=True)


pieces = st.sampled_from(
    ["A. ", "B. ", "\n", "\n\n", "1) ", "é漢😀", "No! ", "x y.", "<think>", "</think>", "Step 2: ", "\t "]
)


@given(recipe=cutting, text=st.lists(pieces, min_size=1, max_size=20).map("".join), ended=st.booleans(), data=st.data())
def test_texts_of_a_real_tokenizer(smollm, recipe, text, ended, data):
    ids = np.array(smollm.encode(text, add_special_tokens=False), dtype=np.int64)
    ids = np.append(ids, smollm.eos_token_id) if ended else ids[: data.draw(st.integers(1, len(ids)))]
    values = np.array(data.draw(st.lists(entropies, min_size=len(ids), max_size=len(ids))))
    answer = Answer(ids, ended, False, values)
    units = segment(recipe, [answer], smollm.decode)
    check_partition(units, [answer], smollm.decode)
    assert_capped(recipe, answer, smollm.decode)
    assert not ended or len(ids) == 1 or units.lengths[-1] > 1, "the end token is no unit of its own"


def of_text(recipe, text, ended=False):
    """Units of a text over the made-up vocabulary, as (slice, found)."""
    ids = np.array(encode(text) + ([VOCABULARY.index(b"A")] if ended else []), dtype=np.int64)
    units = segment(recipe, [Answer(ids, ended)], byte_level)
    aligned = align(ids, byte_level)
    return [(aligned.slice(*span), bool(found)) for span, found in zip(units, units.is_unit, strict=True)]


TEXT = "<think>A. A\n</think>\n\n! !\nA. A\nB. x!\nA. B\n\n"
BEFORE = [("<think>A. A\n</think>\n\n", False), ("! !\n", False), ("A. A", True)]


@pytest.mark.parametrize(
    ("recipe", "text", "ended", "units"),
    [
        # Text outside of steps is no unit. One token holds the end of the line and the label.
        (recipe("steps"), TEXT, False, [*BEFORE, ("\nB. x!\nA. B\n\n", True)]),
        # The closing is searched after the last label.
        *(
            (recipe("steps", closing=closing), TEXT, False, [*BEFORE, ("\nB. x!\nA. B\n\n", True)])
            for closing in ("^A. A", "^x")
        ),
        (recipe("steps", closing="^A. B"), TEXT, False, [*BEFORE, ("\nB. x!\n", True), ("A. B\n\n", False)]),
        (recipe("steps"), "! a a\n", False, [("! a a\n", False)]),
        (recipe("steps"), "! a a\n", True, [("! a a\nA", False)]),
        # White space before the first step belongs to it.
        (recipe("steps"), "\n\n\nA. a\nB. x", False, [("\n\n\nA. a", True), ("\nB. x", True)]),
        # An answer with an end token alone.
        *((recipe(kind), "", True, [("A", False)]) for kind in ("steps", "sentence")),
        # An answer that never stopped thinking.
        (recipe("sentence"), "<think>A. A! A! A", False, [("<think>A. A! A! A", False)]),
        (recipe("sentence", thinking="split"), "<think>A! A!", False, [("<think>A!", True), (" A!", True)]),
        # Thinking is as long as its tokens.
        *(
            (recipe("sentence"), f"{empty}A! A!", False, [(empty, False), ("A!", True), (" A!", True)])
            for empty in ("<think>\n\n</think>\n\n", "<think> a! a!\n</think>\n")
        ),
    ],
)
def test_units_of_a_text(recipe, text, ended, units):
    assert of_text(recipe, text, ended) == units


def test_an_answer_with_only_an_end_token_has_no_units_by_entropy():
    units = segment(recipe("entropy"), [Answer(np.array([0]), True, entropies=np.array([9.0]))], byte_level)
    assert (units.cuts.tolist(), units.is_unit.tolist()) == ([0, 1], [False])


@pytest.mark.parametrize(
    ("recipe", "tokens", "is_unit"),
    [
        # A token that ends the thinking is thinking.
        (recipe("steps"), (b"<think>", b"</think", b">A", b" a"), [False, False]),
        (recipe("sentence"), (b"<think>", b"</think", b">A", b" a"), [False, True]),
        # A token without text after thinking starts no step.
        (recipe("steps", pattern="^B"), (b"<think>", b"</think>", b"", b"\nB. x"), [False, True]),
    ],
)
def test_the_last_token_of_thinking(recipe, tokens, is_unit):
    units = segment(recipe, [Answer(np.array([VOCABULARY.index(token) for token in tokens]), False)], byte_level)
    assert (units.cuts.tolist(), units.is_unit.tolist()) == ([0, 3, 4], is_unit)


def test_thinking_that_the_prompt_opened():
    episode = played(tokens=4)
    episode.streams[0].ids = np.array(encode("!<think> a</think>A!"), dtype=np.int64)
    (answer,) = stream_answers(episode.streams[0], {VOCABULARY.index(b"!")}, byte_level)
    assert answer.opened
    assert answer.ended
    units = segment(recipe("sentence"), [answer], byte_level)
    assert (units.cuts.tolist(), units.is_unit.tolist()) == ([0, 2, 4], [False, True])


def test_answers_of_a_stream_are_those_that_were_sampled():
    scores = np.arange(6, dtype=np.float32)
    first, second = stream_answers(played(rewards=(1.0, 2.0), tokens=3).streams[0], {4}, byte_level, scores)
    assert (first.ids.tolist(), second.ids.tolist()) == ([2, 3, 4], [7, 8, 9])
    assert (first.entropies.tolist(), second.entropies.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert (first.ended, second.ended, first.opened) == (True, False, False)
    assert segment(recipe("turn"), [first, second], byte_level).cuts.tolist() == [0, 3, 6]


def test_the_end_token_belongs_to_the_last_unit_and_is_not_read():
    answer = Answer(np.array([*encode("A! A!"), VOCABULARY.index(b"\n\n")]), True)
    assert segment(recipe("sentence"), [answer], byte_level).cuts.tolist() == [0, 2, 6]


def test_entropies_are_needed():
    with pytest.raises(ValueError, match="one entropy of the reference model per sampled token"):
        segment(recipe("entropy"), [Answer(np.arange(3), False)], byte_level)


def test_spans_must_be_a_partition():
    for cuts in ([], [1, 2], [0, 2, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="increase strictly from 0"):
            Spans(np.array(cuts), np.ones(max(len(cuts) - 1, 0), dtype=bool))
    with pytest.raises(ValueError, match="flags"):
        Spans(np.array([0, 1]), np.ones(2, dtype=bool))


def test_without_sampled_tokens_there_are_no_units():
    nothing = segment(recipe("outcome"), [], byte_level)
    assert (len(nothing), nothing.tokens, list(nothing)) == (0, 0, [])
    assert Spans.concatenate([nothing, Spans.from_cuts(2, np.array([1])), nothing]).cuts.tolist() == [0, 1, 2]


@pytest.mark.parametrize("key", ["pattern", "closing"])
def test_an_invalid_pattern_is_named(key):
    with pytest.raises(ValidationError, match="invalid regular expression"):
        recipe("steps", **{key: "("})


@pytest.mark.parametrize("kind", ["steps", "sentence", "entropy"])
def test_the_work_is_linear_in_the_tokens(kind):
    def decoded(repeats):
        ids = np.array(encode("A. a €😀\n\n! a.\nB. x!\n") * repeats, dtype=np.int64)
        decode = Counting(byte_level)
        segment(recipe(kind), [Answer(ids, False, entropies=np.resize([0.0, 2.0], len(ids)))], decode)
        return decode.tokens

    assert decoded(400) <= 4.1 * decoded(100)


FORMS = [
    ("<think>up or down</think><answer>Up</answer>", "", "after_thinking", "<answer>Up</answer>"),
    ("up or down</think> Up", "<think>", "after_thinking", "Up"),
    ("<think>up or", "", "after_thinking", ""),
    ("Up", "", "after_thinking", "Up"),
    ("<think>up or <answer>Left</answer></think><answer>Up</answer>", "", "answer", "Up"),
    ("Up</answer>", "<answer>", "answer", "Up"),
    ("<answer>Up", "", "answer", "Up"),
    ("Up", "", "answer", ""),
]


@pytest.mark.parametrize(("text", "before", "part", "content"), FORMS)
def test_the_tokens_of_an_answers_content(text, before, part, content):
    decode = lambda ids: "".join(chr(i) for i in ids)  # noqa: E731
    ids = lambda characters: np.array([ord(c) for c in characters], dtype=np.int64)  # noqa: E731
    whole = np.append(ids(text), 0)
    marks = answer_tokens(part, ids("a prompt " + before), whole, True, decode)
    assert decode(whole[marks].tolist()) == content
    assert marks.shape == whole.shape


def test_a_token_with_part_of_a_tag_belongs_to_the_format():
    pieces = ["<answer", ">Up", " and", " on", "</", "answer>"]
    marks = answer_tokens(
        "answer", np.zeros(0, dtype=np.int64), np.arange(6), False, lambda t: "".join(pieces[i] for i in t)
    )
    assert marks.tolist() == [False, False, True, True, False, False]
