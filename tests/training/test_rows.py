"""Rows on their way to the learner: epochs, weights, held-out rows, and rows that are streamed."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.rendering import Renderer, TokenStream
from posttrain.data.tokens import TokenRow
from posttrain.errors import InputError
from posttrain.recipe.data import DataRecipe
from posttrain.recipe.stages import DpoRecipe, RewardRecipe
from posttrain.training.rows import EpochRows, StreamedRows, check_rows, hold_out, load_data, samples_of_row
from tests.conftest import make_tokenizer
from tests.training.preferences import pair_rows, write_jsonl


def row(name: str, prompt: int = 3) -> TokenRow:
    ids = np.array([prompt, prompt, 7, 2], dtype=np.int64)
    return TokenRow([TokenStream(ids, np.array([False, False, True, True]))], name)


def sources(*lengths: int) -> list[list[TokenRow]]:
    return [[row(f"{number}.{place}") for place in range(length)] for number, length in enumerate(lengths)]


def epochs(order: EpochRows, count: int) -> list[list[str]]:
    """The origins of each epoch, in order."""
    per = order.updates_per_epoch
    return [[r.origin for u in range(per) for r in order.batch(e * per + u)] for e in range(count)]


# -- epochs ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum), st.integers(1, 7), st.integers(0, 5))
def test_an_epoch_covers_each_row_once(lengths, rows_per_update, seed):
    order = EpochRows(sources(*lengths), [1.0] * len(lengths), rows_per_update, seed)
    names = sorted(r.origin for source in sources(*lengths) for r in source)
    for epoch in epochs(order, 3):
        assert sorted(epoch) == names
    assert order.updates_per_epoch == -(-sum(lengths) // rows_per_update)
    sizes = [len(order.batch(step)) for step in range(order.updates_per_epoch)]
    assert all(size == rows_per_update for size in sizes[:-1])


def test_weights_are_the_passes_over_a_source_per_epoch():
    order = EpochRows(sources(10, 5, 7), [0.5, 2, 1], 4, 0)
    halves = []
    for epoch in epochs(order, 20):
        counts = Counter(epoch)
        assert sum(counts.values()) == 5 + 10 + 7
        assert all(counts[f"1.{place}"] == 2 for place in range(5))
        assert all(counts[f"2.{place}"] == 1 for place in range(7))
        half = {name for name in counts if name.startswith("0.")}
        assert len(half) == 5
        assert all(counts[name] == 1 for name in half)
        halves.append(frozenset(half))
    # Each epoch takes its own half, and no row is left out.
    assert len(set(halves)) > 10
    assert len(frozenset.union(*halves)) == 10


def test_fractions_of_weights_empty_sources_and_no_rows():
    (epoch,) = epochs(EpochRows(sources(6), [2.5], 4, 0), 1)
    assert sorted(Counter(epoch).values()) == [2, 2, 2, 3, 3, 3]
    for epoch in epochs(EpochRows(sources(1, 3, 9), [0.5, 0.1, 1], 4, 0), 5):
        assert Counter(name[0] for name in epoch) == {"0": 1, "1": 1, "2": 9}
    (epoch,) = epochs(EpochRows(sources(0, 3), [1, 1], 2, 0), 1)
    assert len(epoch) == 3
    with pytest.raises(InputError, match=r"^data\.train: no rows"):
        EpochRows(sources(0), [1], 2, 0)


def test_order_depends_on_epoch_and_seed_and_not_on_earlier_batches():
    first, second, third = epochs(EpochRows(sources(20), [1], 4, 0), 3)
    assert first != second != third != first
    assert epochs(EpochRows(sources(20), [1], 4, 0), 3) == [first, second, third]
    assert epochs(EpochRows(sources(20), [1], 4, 1), 1)[0] != first
    order = EpochRows(sources(9, 4), [1, 0.5], 4, 3)
    for step in (12, 0, 5, 5, 3, 11, 0):
        alone = EpochRows(sources(9, 4), [1, 0.5], 4, 3).batch(step)
        assert [row.origin for row in order.batch(step)] == [row.origin for row in alone]


# -- held-out rows -----------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(3, 9), max_size=12), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(0, 4),
    st.booleans(),
)
def test_rows_of_one_prompt_stay_on_one_side(prompts, count, seed, test):
    given_rows = [
        [row(f"{number}.{place}", prompt) for place, prompt in enumerate(source)]
        for number, source in enumerate(prompts)
    ]
    everything = [r.origin for source in given_rows for r in source]
    sizes = Counter(prompt for source in prompts for prompt in source)
    try:
        kept, validation, final = hold_out(given_rows, count, seed, test)
    except InputError:
        # For each part, at most the rows of one prompt more than requested are taken.
        assert count + (1 + test) * max(sizes.values(), default=1) > len(everything)
        return
    held = [*validation, *final]
    assert not {r.prompt for r in validation} & {r.prompt for r in final}
    assert len(final) >= count // 2 * test
    assert len(validation) >= count - count // 2 * test
    assert test or not final
    left = [r for source in kept for r in source]
    assert len(kept) == len(prompts)
    assert left
    assert len(held) >= count
    assert sorted(r.origin for r in [*left, *held]) == sorted(everything)
    assert not {r.prompt for r in left} & {r.prompt for r in held}
    assert len(held) < count + (1 + test) * max(sizes.values())
    for number, source in enumerate(kept):
        assert all(r.origin.startswith(f"{number}.") for r in source)
    assert hold_out(given_rows, count, seed, test) == (kept, validation, final)


def renderer() -> Renderer:
    tokenizer = make_tokenizer()
    return Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))


@pytest.fixture
def recipe(tmp_path):
    rows = [{"messages": r["chosen"], "domain": r["domain"]} for r in pair_rows(23)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    return DataRecipe(train=path, max_tokens=60, cache=str(tmp_path / "tokens"))


def load(recipe, kind="conversation", loss_on="assistant", seed=0):
    return load_data(kind, recipe, renderer(), loss_on, 4, seed)


def test_rows_are_held_out(recipe):
    for loss_on in ("assistant", "last_assistant", "all"):
        for changes, sizes in [
            ({"held_out": 5}, (3, 2, 18)),
            ({"held_out": 0.2}, (3, 2, 18)),
            ({"held_out": 1}, (1, 0, 22)),  # too few for a test set: all are for validation
            ({"held_out": 5, "test": recipe.train}, (5, 23, 18)),
        ]:
            data = load(recipe.model_copy(update=changes), loss_on=loss_on)
            assert (len(data.validation), len(data.test), len(data.stored)) == sizes
    with pytest.raises(InputError, match=r"^data\.held_out: 23 rows would leave none of the 23 usable rows"):
        load(recipe.model_copy(update={"held_out": 23}))


def test_loss_on_everything_keeps_the_answers_of_a_prompt_together(tmp_path):
    ask = {"role": "user", "content": "Say Goal."}
    rows = [{"messages": [ask, {"role": "assistant", "content": f"Goal {n}"}]} for n in range(4)]
    rows += [{"messages": [{**ask, "content": "Say row."}, {"role": "assistant", "content": "row"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    recipe = DataRecipe(train=path, max_tokens=60, cache=str(tmp_path / "tokens"), held_out=1)
    for seed in range(6):
        data = load(recipe, loss_on="all", seed=seed)
        assert sorted([len(data.stored), len(data.validation)]) == [1, 4]


def test_errors_about_too_few_rows_name_dropped_rows_and_their_files(recipe, tmp_path):
    good = {"messages": pair_rows(1)[0]["chosen"]}
    path = write_jsonl(tmp_path / "few.jsonl", [good, {"messages": []}, {"x": 1}])
    with pytest.raises(InputError) as found:
        load(DataRecipe(train=path, held_out=2, max_tokens=60, cache=recipe.cache))
    first, second, third = str(found.value).splitlines()
    assert first.startswith("data.held_out: 2 rows would leave none of the 1 usable rows")
    assert ("few.jsonl row 2" in second, "few.jsonl row 3" in third) == (True, True)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": 3}, {"messages": []}, {"messages": []}])
    validation = write_jsonl(tmp_path / "good.jsonl", [good, {"other": 1}, {"other": 1}])
    with pytest.raises(InputError) as found:
        load(DataRecipe(train=bad, validation=validation, cache=recipe.cache))
    assert str(found.value).startswith(f"{bad}: no usable row; 3 problems")
    assert "bad.jsonl row 2, row 3" in str(found.value)
    with pytest.raises(InputError, match=f"{bad}: no usable row; 3 problems"):
        load(DataRecipe(train=validation, validation=bad, cache=recipe.cache))


# -- streams -----------------------------------------------------------------------------------------------------------


def streamed(recipe, seed=0) -> StreamedRows:
    return StreamedRows("conversation", recipe, renderer(), "assistant", 4, seed)


def names(rows: StreamedRows, *steps: int) -> list[list[str]]:
    return [[r.origin for r in rows.batch(step)] for step in steps]


@pytest.mark.parametrize("shuffle_buffer", [1, 5, 23, 1000])
def test_streamed_rows_cover_each_row_once_an_epoch(recipe, shuffle_buffer):
    changed = recipe.model_copy(update={"shuffle_buffer": shuffle_buffer})
    drawn = [name for batch in names(streamed(changed), *range(23)) for name in batch]
    assert len(drawn) == 4 * 23
    everything = sorted(f"a.jsonl row {number}" for number in range(1, 24))
    parts = [drawn[start : start + 23] for start in range(0, 4 * 23, 23)]
    assert all(sorted(part) == everything for part in parts)
    if shuffle_buffer == 1:
        assert parts[0] == [f"a.jsonl row {number}" for number in range(1, 24)]
    else:
        assert len({tuple(part) for part in parts}) == 4
        assert names(streamed(changed, seed=1), 0, 1) != names(streamed(changed), 0, 1)


def test_streamed_rows_are_those_that_are_stored_in_any_order_of_reading(recipe):
    changed = recipe.model_copy(update={"shuffle_buffer": 6})
    whole = names(streamed(changed), *range(14))
    for start in range(14):  # after a restart
        assert names(streamed(changed), *range(start, 14)) == whole[start:]
    rows = streamed(changed)
    for step in (3, 4, 0, 9, 9, 2, 3):
        assert names(rows, step) == [whole[step]]
    stored = {r.origin: r.streams[0].ids.tolist() for r in load(recipe).stored}
    for batch in range(6):
        assert all(r.streams[0].ids.tolist() == stored[r.origin] for r in streamed(recipe).batch(batch))


def with_bad_rows(tmp_path, **changes):
    rows = [{"messages": r["chosen"]} for r in pair_rows(10)]
    rows[6] = {"messages": []}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    return DataRecipe(train=path, max_tokens=60, cache=str(tmp_path / "tokens"), shuffle_buffer=2, **changes)


def test_problems_of_streamed_rows_are_counted_once_and_stop_a_strict_stream(tmp_path):
    rows = streamed(with_bad_rows(tmp_path))
    for step in [*range(8), 0, 1, 2, 3]:
        rows.batch(step)
    assert (rows.problems.total, rows.problems.used) == (1, 9)
    rows = streamed(with_bad_rows(tmp_path, strict=True))
    rows.batch(0)
    for strict in (rows, streamed(with_bad_rows(tmp_path, strict=True))):
        with pytest.raises(InputError, match=r"^a\.jsonl row 7: no assistant message"):
            strict.batch(1)


def test_streaming_without_a_usable_row_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}] * 3)
    with pytest.raises(InputError, match=r"a\.jsonl: no usable row; 3 problems"):
        streamed(DataRecipe(train=path)).batch(0)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(InputError, match="no rows"):
        streamed(DataRecipe(train=path)).batch(0)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_samples_carry_their_side_and_nothing_of_a_rollout():
    pair = TokenRow([row("a").streams[0], row("a", 4).streams[0]], "a", margin=1.5)
    good, bad = samples_of_row(pair, 7)
    assert (good.side.row, good.side.chosen, good.side.margin) == (7, True, 1.5)
    assert (bad.side.row, bad.side.chosen, bad.side.margin) == (7, False, 1.5)
    assert good.stream.turn.tolist() == [-1, -1, 0, 0]
    assert not good.stream.rewards.any()
    (sample,) = samples_of_row(TokenRow(row("a").streams, "a", chosen=False), 2)
    assert (sample.side.row, sample.side.chosen) == (2, False)
    (plain,) = samples_of_row(row("a"))
    assert plain.side is None


@pytest.mark.parametrize(("labels", "warned"), [([True] * 40, None), ([False] * 40, None), ([True] * 39 + [False], 1), ([1, 0] * 9, 0)])  # fmt: skip
def test_labels_of_one_kind_are_refused_and_rare_ones_warned_of(labels, warned, tmp_path):
    rows = [{"prompt": f"q{n}", "completion": "a", "label": label} for n, label in enumerate(labels)]
    data = {"train": write_jsonl(tmp_path / "k.jsonl", rows), "max_tokens": 64, "cache": str(tmp_path / "tokens")}
    recipe = DpoRecipe(data=data, loss={"type": "kto"})
    data = load(recipe.data, "unpaired")
    if warned is None:
        with pytest.raises(InputError, match="answers"):
            check_rows(recipe, data)
    else:
        assert len(check_rows(recipe, data)) == warned


def test_margins_missing_in_all_rows_are_reported(tmp_path):
    def told(rows, margin=True, column="margin"):
        path = write_jsonl(tmp_path / "m.jsonl", rows)
        data = {"train": path, "max_tokens": 60, "cache": str(tmp_path / "tokens"), "columns": {"margin": column}}
        recipe = RewardRecipe(data=data, loss={"margin": margin})
        return check_rows(recipe, load(recipe.data, "pair"))

    rows = pair_rows(6)
    bare = [{key: value for key, value in row.items() if key != "margin"} for row in rows]
    said = ["loss.margin has no effect: no training row has a number above 0 in the column `margin`"]
    assert told(rows) == []
    assert [line.partition(" (")[0] for line in told(bare)] == said
    assert [line.partition(" (")[0] for line in told([{**row, "margin": 0} for row in rows])] == said
    assert told(bare, margin=False) == []
    assert told([{**row, "lead": 1} for row in bare], column="lead") == []
    with pytest.raises(InputError, match=r"^data\.columns\.margin: no training row .* `laed`; correct the name"):
        told([{**row, "lead": 1} for row in bare], column="laed")
