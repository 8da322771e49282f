"""Rows as tokens: the limit, dropped and truncated rows, and the cache by content."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import tokens
from posttrain.data.messages import ConversationExample, PairExample, UnpairedExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.data.tokens import load_rows, tokenize
from posttrain.recipe.data import DataRecipe
from posttrain.training.rows import EpochRows, samples_of_row
from tests.conftest import CHATML, make_tokenizer
from tests.data.test_chat import DROPS_THINKING
from tests.data.tokenizers import assistant as said
from tests.data.tokenizers import renderer as new_renderer
from tests.data.tokenizers import user
from tests.training.preferences import pair_rows, unpaired_rows, write_jsonl

WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML
END = 2
renderer = cache(new_renderer)


def made(examples, limit, overlong="truncate", loss_on="assistant", template=CHATML):
    recipe = DataRecipe(train="unread.jsonl", max_tokens=limit, overlong=overlong)
    problems = Problems()
    return list(tokenize(examples, recipe, renderer(template), loss_on, problems)), problems


def length(example, **more):
    (row,), _ = made([example], 100_000, **more)
    return [len(stream.ids) for stream in row.streams]


CHAT = ConversationExample([user("Say Goal."), said("Goal Goal Goal")], "a.jsonl row 1")


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_a_row_of_just_the_limit_is_whole(overlong):
    (whole,) = length(CHAT)
    (row,), problems = made([CHAT], whole, overlong)
    assert row.streams[0].ids[-1] == END
    assert row.streams[0].trained[-1]
    assert problems.summary() == []


def test_rows_without_room_or_loss_are_dropped_and_counted():
    (whole,) = length(CHAT)
    rows, problems = made([CHAT], whole - 1, "drop")
    assert rows == []
    (line,) = problems.summary()
    assert f"data.max_tokens (a.jsonl row 1; first: {whole} tokens, more than {whole - 1})" in line
    rows, problems = made([CHAT], 8)
    assert rows == []
    assert problems.total == 1
    assert problems.summary()[0].startswith("1 row dropped: prompt longer than data.max_tokens (a.jsonl row 1")
    # Chosen and rejected have histories of their own, and only one of them leaves room for its answer.
    long = [user("a"), said("x " * 60, train=False), user("b"), said("Goal")]
    pair = PairExample([], long, [user("a"), said("dragon")], "a.jsonl row 1")
    rows, problems = made([pair], 40)
    assert rows == []
    assert problems.total == 1
    chat = ConversationExample([user("a"), said("b", train=False)], "a.jsonl row 1")
    rows, problems = made([chat], 100)
    assert rows == []
    assert "nothing is trained" in problems.summary()[0]


def test_a_cut_answer_has_no_end_token_and_earlier_ones_keep_theirs():
    (whole,) = length(CHAT)
    for limit in range(whole - 3, whole):
        (row,), problems = made([CHAT], limit)
        stream = row.streams[0]
        assert len(stream.ids) == limit
        assert stream.trained.any()
        assert END not in stream.ids[stream.trained]
        assert problems.summary() == ["1 row cut to data.max_tokens (a.jsonl row 1)"]
        assert problems.total == 0
    chat = ConversationExample([user("a"), said("Goal"), user("b"), said("row column row column")], "a.jsonl row 1")
    (whole,) = length(chat)
    (row,), _ = made([chat], whole - 1)
    stream = row.streams[0]
    assert list(stream.ids[stream.trained]).count(END) == 1


def test_later_streams_without_room_are_left_out_of_a_cut_conversation():
    thought = "<think>\n" + "hmm " * 4 + "\n</think>\n\n"
    chat = [user("Say Goal."), said(thought + "Goal"), user("Say row. " * 12), said(thought + "row")]
    example = ConversationExample(chat, "a.jsonl row 1")
    first, second = length(example, template=DROPS_THINKING)
    assert first < second
    rows, problems = made([example], first, template=DROPS_THINKING)
    assert [len(stream.ids) for row in rows for stream in row.streams] == [first]
    assert rows[0].streams[0].ids[-1] == END
    assert problems.summary() == ["1 row cut to data.max_tokens (a.jsonl row 1)"]


def test_pairs_with_equal_tokens_are_dropped():
    pair = PairExample([user("Say Goal.")], [said("Goal Goal Goal Up")], [said("Goal Goal Goal Down")], "a.jsonl row 7")
    limit = length(pair)[0] - 4
    rows, problems = made([pair], limit)
    assert rows == []
    (line,) = problems.summary()
    assert line.startswith("1 row dropped: chosen and rejected have the same tokens (a.jsonl row 7")
    trimming = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    pair = PairExample([user("Say Goal.")], [said("Goal")], [said("Goal ")], "a.jsonl row 1")
    assert len(made([pair], 100)[0]) == 1
    rows, problems = made([pair], 100, template=trimming)
    assert rows == []
    assert problems.total == 1


def test_rows_that_the_template_refuses_are_counted():
    refusing = "{% if messages | length > 2 %}{{ raise_exception('two at most') }}{% endif %}" + CHATML
    refused = ConversationExample([user("a"), said("b"), user("c"), said("d")], "a.jsonl row 2")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = refusing
    with_room = Renderer.__new__(Renderer)
    with_room.tokenizer, with_room.end_tokens, with_room.thinking = tokenizer, frozenset({END}), None
    problems = Problems()
    recipe = DataRecipe(train="unread.jsonl", max_tokens=100)
    rows = list(tokenize([CHAT, refused], recipe, with_room, "assistant", problems))
    assert [row.origin for row in rows] == ["a.jsonl row 1"]
    assert "two at most" in problems.summary()[0]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=25).filter(str.strip)
SPOKEN = st.one_of(TEXT, st.builds("<think>\n{}\n</think>\n\n{}".format, TEXT, TEXT))


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXT)), said(draw(SPOKEN), train=draw(st.booleans()))]
    return ConversationExample(messages, "o row 1")


@st.composite
def pairs(draw):
    prompt = [user(draw(TEXT))]
    sides = [[said(draw(SPOKEN))] for _ in range(2)]
    if draw(st.booleans()):
        sides[0] = [said(draw(SPOKEN), train=False), user(draw(TEXT)), *sides[0]]
    return PairExample(prompt, *sides, "o row 1", margin=draw(st.none() | st.floats(0, 3)))


@st.composite
def verdicts(draw):
    return UnpairedExample([user(draw(TEXT))], [said(draw(SPOKEN))], draw(st.booleans()), "o row 1")


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(conversations(), pairs(), verdicts()),
    st.integers(8, 90),
    st.sampled_from(["drop", "truncate"]),
    st.sampled_from(["assistant", "last_assistant", "all"]),
    st.sampled_from([CHATML, DROPS_THINKING]),
)
def test_no_stream_is_over_the_limit_or_without_a_trained_token(example, limit, overlong, loss_on, template):
    rows, problems = made([example], limit, overlong, loss_on, template)
    whole, _ = made([example], 100_000, overlong, loss_on, template)
    assert len(rows) + problems.total == 1
    for row in rows:
        assert len(row.streams) == 2 if isinstance(example, PairExample) else len(row.streams) >= 1
        assert not (isinstance(example, PairExample) and np.array_equal(row.streams[0].ids, row.streams[1].ids))
        for cut, stream in zip(row.streams, whole[0].streams, strict=False):
            assert len(cut.ids) == len(cut.trained) <= limit
            assert cut.trained.any()
            assert not cut.trained[0]  # nothing predicts the first token
            # Cutting takes the beginning of the whole, so an end token is trained only where the answer ends.
            assert np.array_equal(cut.ids, stream.ids[: len(cut.ids)])
            assert np.array_equal(cut.trained, stream.trained[: len(cut.ids)])
            assert len(cut.ids) == min(limit, len(stream.ids))
        if overlong == "drop":
            assert [len(s.ids) for s in row.streams] == [len(s.ids) for s in whole[0].streams]
        for sample in samples_of_row(row, 0 if not isinstance(example, ConversationExample) else -1):
            assert sample.sampled_tokens == len(sample.advantages) > 0


ROWS = [{"messages": row["chosen"], "domain": row["domain"]} for row in pair_rows(6)]


class Loader:
    """Reads a file of rows through a cache, and counts how often rows are tokenised."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.tokenised = folder, 0
        self.recipe = DataRecipe(train=str(folder / "a.jsonl"), max_tokens=40, cache=str(folder / "cache" / "tokens"))
        original = tokens.tokenize

        def counted(*arguments):
            self.tokenised += 1
            return original(*arguments)

        monkeypatch.setattr(tokens, "tokenize", counted)

    def __call__(self, rows=None, kind="conversation", template=CHATML, loss_on="assistant", **changes):
        """The rows, their problems, and whether they came from the cache."""
        if rows is not None:
            write_jsonl(self.folder / "a.jsonl", rows)
        recipe, problems, before = self.recipe.model_copy(update=changes), Problems(), self.tokenised
        (found,) = load_rows(kind, recipe, recipe.train, None, renderer(template), loss_on, problems)
        return found, problems, self.tokenised == before

    @property
    def files(self):
        return sorted((self.folder / "cache" / "tokens").iterdir())


@pytest.fixture
def loader(tmp_path, monkeypatch):
    return Loader(tmp_path, monkeypatch)


def plain(rows):
    """Rows as values that can be compared, types of the arrays included."""

    def streams(row):
        return [(s.ids.dtype, s.trained.dtype, s.ids.tolist(), s.trained.tolist()) for s in row.streams]

    return [(row.origin, row.domain, row.margin, row.chosen, row.prompt_digest, streams(row)) for row in rows]


LONG = {"messages": [user("Say Goal."), said("Goal " * 40)]}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("conversation", [*ROWS, LONG, {"messages": []}]), ("pair", pair_rows(6)), ("unpaired", unpaired_rows(3))],
)
def test_the_same_rows_are_read_from_the_cache(loader, kind, rows):
    first, problems, cached = loader(rows, kind)
    assert not cached
    assert len(first) >= 6
    (file,) = loader.files
    again, told, cached = loader(None, kind)
    assert cached
    assert loader.files == [file]
    assert plain(again) == plain(first)
    assert told.state() == problems.state()
    if kind == "conversation":
        assert problems.total == 2


def test_rows_with_loss_on_everything_keep_their_prompts(loader):
    first, _, _ = loader(ROWS, loss_on="all")
    again, _, cached = loader(None, loss_on="all")
    assert cached
    assert len({row.prompt for row in first}) == len(ROWS)
    assert [row.prompt for row in again] == [row.prompt for row in first]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [*ROWS[:-1], {**ROWS[-1], "domain": "third"}]},
        {"rows": ROWS[::-1]},
        {"rows": ROWS[:-1]},
        {"rows": [{**ROWS[0], "messages": [*ROWS[0]["messages"][:1], said("Goal")]}, *ROWS[1:]]},
        {"rows": [{**ROWS[0], "messages": [ROWS[0]["messages"][0], {**ROWS[0]["messages"][1], "train": True}]}]},
        {"template": CHATML + "\n"},
        {"loss_on": "last_assistant"},
        {"loss_on": "all"},
        {"max_tokens": 41},
        {"overlong": "truncate"},
    ],
    ids=str,
)
def test_the_cache_key_includes_everything_the_tokens_depend_on(loader, change):
    loader(ROWS)
    _, _, cached = loader(**change)
    assert not cached
    assert len(loader.files) == 2


def test_the_order_of_keys_in_tools_and_special_tokens_are_content(loader):
    one = {"name": "add", "parameters": {}}
    rows = [{**ROWS[0], "tools": [one]}]
    first, _, _ = loader(rows, template=WITH_TOOLS, max_tokens=200)
    turned = [{**ROWS[0], "tools": [dict(reversed(one.items()))]}]
    second, _, cached = loader(turned, template=WITH_TOOLS, max_tokens=200)
    assert not cached
    assert plain(first) != plain(second)
    template = "{{ bos_token }}" + CHATML
    loader(ROWS, template=template)
    tokenizer = renderer(template).tokenizer
    before = tokenizer.bos_token
    try:
        tokenizer.bos_token = "<|endoftext|>"
        rows, _, cached = loader(None, template=template)
    finally:
        tokenizer.bos_token = before
    assert not cached
    assert all(row.streams[0].ids[0] == 0 for row in rows)


def damages(whole: bytes):
    draws = np.random.default_rng(0)
    yield from (b"", b"PK", b"not a zip file", whole[: len(whole) // 2], whole[:-1], whole + b"x", b"\0" * len(whole))
    for _ in range(60):
        damaged = bytearray(whole)
        for place in draws.integers(0, len(whole), draws.integers(1, 4)):
            damaged[place] ^= 1 << int(draws.integers(8))
        yield bytes(damaged)


def test_a_damaged_file_is_recomputed(loader):
    first, _, _ = loader(ROWS)
    (file,) = loader.files
    whole = file.read_bytes()
    anew = 0
    for damaged in damages(whole):
        file.write_bytes(damaged)
        rows, _, cached = loader()
        assert plain(rows) == plain(first)
        anew += not cached
        assert loader.files == [file]
        assert loader()[2], "the file is whole again"
    assert anew > 30
    first, _, _ = loader(ROWS)
    (file,) = loader.files
    with np.load(file) as stored:
        arrays = dict(stored)
    for name in arrays:
        np.savez(file, **{key: value for key, value in arrays.items() if key != name})
        assert not loader()[2]
        np.savez(file, **{**arrays, name: np.frombuffer(b"[[[1]], 2]", dtype=np.uint8)})
        rows, _, cached = loader()
        assert plain(rows) == plain(first)
        assert not cached


def test_an_unwritable_cache_does_not_stop_the_run(loader, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    first, _, _ = loader(ROWS)
    rows, _, cached = loader(cache=str(tmp_path / "file"))
    assert plain(rows) == plain(first)
    assert not cached
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    assert plain(loader(cache=str(sealed))[0]) == plain(first)
    assert plain(loader(cache=str(tmp_path / "file" / "below"))[0]) == plain(first)


def test_sources_have_separate_files(loader, tmp_path):
    loader(ROWS)
    other = write_jsonl(tmp_path / "b.jsonl", ROWS[:3])
    recipe = DataRecipe(train=[str(tmp_path / "a.jsonl"), other], max_tokens=40, cache=loader.recipe.cache)
    before = loader.tokenised
    found = load_rows("conversation", recipe, recipe.train, None, renderer(), "assistant", Problems())
    assert [len(rows) for rows in found] == [6, 3]
    assert loader.tokenised == before + 1
    assert EpochRows(found, [1, 1], 4, 0).updates_per_epoch == 3
