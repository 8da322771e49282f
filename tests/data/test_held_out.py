"""Tasks and rows are divided into training, validation and test parts that share nothing."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.held_out import TaskRow, divide, hash_order, listed_rows, split_tasks
from posttrain.errors import InputError
from posttrain.recipe.evaluate import FinalEvaluation
from posttrain.recipe.rollout import EvaluationRecipe, SeedRange

SIZES = st.integers(3, 800)
QUICK = settings(max_examples=60, deadline=None)
HELD_OUT = st.one_of(st.none(), st.floats(0.01, 0.6), st.integers(2, 400))


def rows(count, start=0, use="training"):
    return [TaskRow(f"prompt {number}", use) for number in range(start, start + count)]


def split(tasks, training=SeedRange(), **evaluation):
    return split_tasks(tasks, "environment.prompts", EvaluationRecipe.model_validate(evaluation), training)


def parts(tasks):
    return [set(tasks.training), set(tasks.validation), set(tasks.test)]


@QUICK
@given(SIZES, HELD_OUT)
def test_any_source_of_three_or_more_tasks_is_divided_whole_and_without_overlap(count, held_out):
    wanted = 2 if held_out is None else held_out if isinstance(held_out, int) else round(held_out * count)
    if wanted >= count - 1:
        return
    tasks = split(rows(count), held_out=held_out)
    training, validation, test = parts(tasks)
    assert min(map(len, (training, validation, test))) >= 1
    assert len(tasks.training) + len(tasks.validation) + len(tasks.test) == count
    assert training | validation | test == set(range(count))
    assert all(list(part) == sorted(part) for part in (tasks.training, *tasks.held_out))
    if held_out is None:
        assert (len(validation), len(test)) == (min(64, max(1, count // 10)), min(256, max(1, count // 10)))
    else:
        assert len(validation) <= 64
        assert len(validation) + len(test) == max(2, wanted)


@QUICK
@given(SIZES, st.integers(0, 2**32))
def test_the_split_of_a_task_depends_on_its_text_and_not_on_its_position(count, seed):
    tasks = rows(count)
    shuffled = tasks[:]
    Random(seed).shuffle(shuffled)
    for one, other in zip(parts(split(tasks)), parts(split(shuffled)), strict=True):
        assert {tasks[seed].key for seed in one} == {shuffled[seed].key for seed in other}


@QUICK
@given(SIZES, st.floats(0, 1))
def test_added_rows_never_move_tasks_between_the_held_out_splits(count, growth):
    before, after = parts(split(rows(count))), parts(split(rows(count + int(growth * count))))
    assert not before[1] & after[2]
    assert not before[2] & after[1]


@QUICK
@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(0, 20), st.integers(0, 20))
def test_equal_keys_stay_together_and_whole_groups_reach_the_wanted_sizes(keys, validation, test):
    training, curve, final = divide(keys, sorted(set(keys)), validation, test)
    assert sorted([*training, *curve, *final]) == list(range(len(keys)))
    one, two, three = ({keys[index] for index in part} for part in (training, curve, final))
    assert len(one) + len(two) + len(three) == len(one | two | three)
    assert len(curve) >= min(validation, len(keys))
    largest = max(keys.count(key) for key in keys)
    assert len(curve) < validation + largest
    assert len(final) < test + largest
    if training:
        assert len(final) >= test


@QUICK
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_sources_with_a_use_are_the_held_out_tasks(training, validation, test):
    tasks = [*rows(training), *rows(validation, 1000, "validation"), *rows(test, 2000, "test")]
    first, second = training, training + validation
    assert parts(split(tasks)) == [set(range(first)), set(range(first, second)), set(range(second, second + test))]


def test_ranges_and_counts_are_kept_and_others_avoid_them():
    tasks = split(rows(100), SeedRange(start=10, count=50))
    assert list(tasks.training) == list(range(10, 60))
    assert (set(tasks.validation) | set(tasks.test)) & set(tasks.training) == set()
    given_all = split(
        rows(100), SeedRange(start=0, count=80), seeds={"start": 80, "count": 5}, final_seeds={"start": 85}
    )
    assert [list(part) for part in (given_all.training, *given_all.held_out)] == [
        list(range(80)),
        list(range(80, 85)),
        list(range(85, 100)),
    ]
    rest = split(rows(100), seeds={"start": 0, "count": 10}, final_seeds={"start": 90})
    assert list(rest.training) == list(range(10, 90))
    tasks = split(rows(300), SeedRange(count=100), seeds={"count": 20}, final_seeds={"count": 50})
    assert [len(part) for part in (tasks.training, *tasks.held_out)] == [100, 20, 50]
    assert len(set().union(*parts(tasks))) == 170
    assert len(split(rows(300), SeedRange(count=4860)).training) == 240
    more = split(rows(300), held_out=100, seeds={"count": 20})
    assert [len(part) for part in (more.training, *more.held_out)] == [200, 20, 80]
    tasks = split([*rows(50), *rows(7, 100, "test")])
    assert list(tasks.test) == list(range(50, 57))
    assert (len(tasks.validation), len(tasks.training)) == (5, 45)


def test_an_evaluation_takes_all_tasks_or_those_that_training_held_out():
    trained = split(rows(200), held_out=0.2)
    for held_out, test in ((0.2, trained.test), ("all", range(200))):
        alone = split_tasks(rows(200), "environment.prompts", FinalEvaluation(held_out=held_out), None)
        assert list(alone.test) == list(test)
        assert not alone.training
    marked = split_tasks([*rows(9), *rows(4, 50, "test")], "environment.prompts", FinalEvaluation(), None)
    assert list(marked.test) == [9, 10, 11, 12]
    some = FinalEvaluation.model_validate({"final_seeds": {"count": 7}})
    assert len(split_tasks(rows(200), "environment.prompts", some, None).test) == 7


@pytest.mark.parametrize(
    ("count", "training", "evaluation", "message"),
    [
        (2, {}, {}, "environment.prompts has 2 tasks with 2 different texts, too few"),
        (10, {}, {"held_out": 10}, "too few to train on some and hold out 5 for the learning curve and 5"),
        (300, {"start": 0, "count": 4860}, {}, "seeds: the last seed is 4859, but environment.prompts has 300"),
        (300, {"start": 0}, {"final_seeds": {"start": 300}}, "evaluation.final_seeds: the last seed is 300"),
        (300, {}, {"final_seeds": {"count": 512}}, "hold out 30 for the learning curve and 512 for the final table"),
    ],
)
def test_an_impossible_division_is_one_sentence(count, training, evaluation, message):
    with pytest.raises(InputError) as error:
        split(rows(count), SeedRange.model_validate(training), **evaluation)
    assert message in str(error.value)


def test_generated_tasks_are_not_divided_and_rows_of_a_part_are_listed():
    tasks = split(None, SeedRange(count=10), seeds={"count": 4})
    assert (tasks.training, tasks.validation) == (range(10), range(1_000_000, 1_000_004))
    assert tasks.test == range(2_000_000, 2_000_256)
    with pytest.raises(InputError, match=r"evaluation\.held_out divides tasks that are rows of files"):
        split(None, held_out=0.1)
    tasks = [TaskRow(f"prompt {n}", origin=f"a.jsonl row {n + 3}") for n in range(60)]
    tasks += [TaskRow("prompt", origin="b.parquet row 1"), TaskRow("a task of a package")]
    assert listed_rows(tasks, [4, 0, 1, 2, 60]) == "4 of `a.jsonl` (rows 3-5, 7); 1 of `b.parquet` (rows 1)"
    assert listed_rows(tasks, [61]) == "1 tasks (numbers 61)"
    many = listed_rows(tasks, range(0, 60, 2))
    assert many.startswith("30 of `a.jsonl` (rows 3, 5, 7, ")
    assert many.endswith(", 41, ...)")
    assert hash_order(["b", "a", "c"]) == hash_order(["c", "b", "a", "a"]) == ["a", "c", "b"]
