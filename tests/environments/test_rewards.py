"""Reward functions: the built-in ones, how they are called, and how they are found."""

import asyncio
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.environments.rewards import (
    BUILT_IN,
    RewardFailure,
    RewardFunction,
    WeightedRewards,
    contains,
    exact,
    final_number,
    last_number,
    load_reward,
    register_reward,
)
from posttrain.environments.text_task import TextTask, TextTaskRecipe
from posttrain.errors import InputError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("4 + 3 = 7\nA: 18", "18"),
        ("she makes $1,234.50.", "1234.5"),
        ("3.\n#### -$5", "-5"),
        ("it is $-5", "-5"),
        ("#### $80,000", "80000"),
        ("from 16-3", "3"),
        ("16 - 3", "3"),
        ("x = -3", "-3"),
        ("x = −3", "-3"),
        ("day-3", "3"),
        ("a half is .5", "0.5"),
        ("1, 2", "2"),
        ("1,2", "2"),
        ("2e3 metres", "2000"),
        ("18each", "18"),
        ("50%", "50"),
        ("€7.00", "7"),
        ("#### 1\n#### 2\n\nQ: how many are 9?", "2"),
        ("#### \n 12 \n13", "12"),
        ("Plan A: 5 then 6", "6"),
        ("7 apples #### none", None),
        ("####", None),
        ("no number", None),
        ("", None),
        ("٣", None),
    ],
)
def test_the_number_that_a_text_concludes_with(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.decimals(-(10**9), 10**9, places=2), st.sampled_from(["{:,}", "{}", "{:f}"]), st.sampled_from(["", "$", "€"]))
def test_a_number_is_read_back_however_it_is_written(value, form, currency):
    text = form.format(abs(value))
    written = f"5 - 2 is not\n#### {'-' if value < 0 else ''}{currency}{text}"
    assert last_number(written) == value


@given(st.text())
def test_any_text_is_read(text):
    found = last_number(text)
    assert found is None or found.is_finite()


def test_built_in_rewards_compare_with_the_row():
    assert final_number("so #### 1,000.0", row_answer="x = 10*100\n#### 1000", label="7") == 1.0
    assert final_number("so #### 7", row_answer="x = 10*100\n#### 1000", label="7") == 0.0
    assert final_number("it is 7", completion="A: 7") == 1.0
    assert final_number("it is 7", label=7) == 1.0
    assert final_number("no idea", label=7) == 0.0
    # A column that is called as a parameter is passed under another name.
    assert scored(final_number, "it is 1000", {"answer": "#### 1000"}) == {"score": 1.0}
    assert exact(" Paris\n", "Paris ") == 1.0
    assert exact("Paris.", "Paris") == 0.0
    assert exact("3", 3) == 1.0
    assert contains("It is Paris.", "Paris") == 1.0
    assert contains("It is Rome.", "Paris") == 0.0


@pytest.mark.parametrize("row", [{}, {"label": "none"}, {"completion": None}])
def test_final_number_refuses_a_row_without_a_number(row):
    with pytest.raises(ValueError, match="final_number"):
        final_number("7", **row)


@pytest.mark.parametrize("row", [{}, {"label": None}, {"label": " "}])
def test_a_missing_label_matches_nothing(row):
    for name in ("exact", "contains"):
        with pytest.raises(RewardFailure, match="label"):
            scored(BUILT_IN[name], "", row)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def scored(function, answer, row):
    return RewardFunction("it", function)(MESSAGES, answer, row, "rows.jsonl row 1")


def test_a_function_gets_the_parameters_that_it_takes():
    row = {"label": "4", "prompt": "raw", "deep": [1]}
    assert scored(lambda answer: len(answer), "four", row) == {"score": 4.0}
    assert scored(lambda prompt, answer, label: prompt == "2 + 2?" and answer == label, "4", row) == {"score": 1.0}

    def everything(prompt, answer, *, messages, **row):
        row["deep"].clear()
        return {"score": messages == MESSAGES, "columns": len(row), "raw": row["row_prompt"] == "raw"}

    for _ in range(2):
        assert scored(everything, "4", row) == {"score": 1.0, "columns": 3.0, "raw": 1.0}
    assert row["deep"] == [1]


def test_an_async_function_is_awaited_and_all_share_one_event_loop():
    loops = set()

    async def slow(answer):
        await asyncio.sleep(0.01)
        loops.add(asyncio.get_running_loop())
        return float(answer)

    class Client:
        async def __call__(self, answer):
            return await slow(answer)

    assert RewardFunction("slow", slow).blocking
    assert RewardFunction("client", Client()).blocking
    assert not RewardFunction("exact", exact).blocking
    assert scored(slow, "2", {}) == {"score": 2.0}
    assert scored(Client(), "3", {}) == {"score": 3.0}
    assert len(loops) == 1
    with pytest.raises(RewardFailure, match=r"it raised ValueError on rows\.jsonl row 1"):
        scored(slow, "two", {})


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), 1e300, 10**400, object(), np.array([1.0, 2.0]), "1", [1.0]),
        *({"length": 1.0}, {"score": 1.0, "other": "x"}),
    ],
)
def test_nonfinite_numbers_are_a_failure(value):
    with pytest.raises(RewardFailure, match="must return a finite number"):
        scored(lambda answer: value, "4", {})


def test_rewards_are_found_by_name_and_place(tmp_path):
    assert load_reward("exact").function is exact
    assert load_reward("posttrain.environments.rewards:exact").function is exact
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rule.py").write_text(f"def score(answer, **row):\n    return {value}\n")
    found = [load_reward(f"{tmp_path / name / 'rule.py'}:score").function("") for name in ("a", "b", "a")]
    assert found == [1, 2, 1]
    assert register_reward(exact) == "posttrain.environments.rewards:exact"
    first, second = (lambda answer: 1.0), (lambda answer: 2.0)
    names = [register_reward(function) for function in (first, second, first)]
    assert names[0] == names[2] != names[1]
    assert [load_reward(name).function("") for name in names] == [1.0, 2.0, 1.0]
    with pytest.raises(InputError, match=r"was registered in another process"):
        load_reward("module:<lambda>")


def test_an_unavailable_reward_is_an_input_error(tmp_path):
    (tmp_path / "broken.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "empty.py").write_text("value = 1\n\ndef short(text):\n    return 1\n")
    for where, what in [
        (f"{tmp_path}/absent.py:score", "absent.py"),
        (f"{tmp_path}/broken.py:score", "a_module_nobody_has"),
        (f"{tmp_path}/empty.py:score", "no function 'score'"),
        (f"{tmp_path}/empty.py:value", "no function 'value'"),
        (f"{tmp_path}/empty.py:short", "no parameter `answer`"),
        ("posttrain.environments.rewards:nothing", "no function 'nothing'"),
        ("a_module_nobody_has:score", "a_module_nobody_has"),
        ("exactly", "exact, contains, final_number"),
    ]:
        with pytest.raises(InputError, match=r"environment\.reward|the reward") as caught:
            load_reward(where)
        assert what in str(caught.value)


@pytest.mark.parametrize("word", ["completion", "completions", "reply", "response"])
@pytest.mark.parametrize("rest", ["", ", prompts", ", **row"])
def test_a_function_written_for_another_program_is_told_the_name_of_the_answer(word, rest, tmp_path):
    (tmp_path / "foreign.py").write_text(f"def score({word}{rest}):\n    return 1.0\n")
    with pytest.raises(InputError, match=rf"the model's reply is the parameter `answer`, .*rename `{word}`"):
        load_reward(f"{tmp_path}/foreign.py:score")
    (tmp_path / "both.py").write_text(f"def score(answer, {word}{rest}):\n    return 1.0\n")
    assert load_reward(f"{tmp_path}/both.py:score").columns >= {word}, "a column of the row"


def test_several_rewards_are_their_weighted_sum_and_each_is_reported(tmp_path):
    """Closed form: 2 x 3 + 0.5 x 4 - 1 x 1 = 7."""
    file = tmp_path / "rules.py"
    file.write_text(
        "def length(answer):\n    return len(answer)\n"
        "async def columns(answer, number, **row):\n    return {'score': number, 'half': number / 2}\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p", "label": "abc", "number": 4}\n')
    weights = {f"{file}:length": 2.0, f"{file}:columns": 0.5, "exact": -1.0}
    parts = [{"function": function, "weight": weight} for function, weight in weights.items()]
    recipe = TextTaskRecipe(prompts=[str(tmp_path / "prompts.jsonl")], reward=parts)
    task = TextTask(recipe)
    assert task.blocking
    task.reset(0)
    step = task.step("abc")
    assert step.reward == 7.0
    assert step.info["scores"] == {"score": 7.0, "length": 3.0, "columns": 4.0, "columns_half": 2.0, "exact": 1.0}
    assert TextTask.reports_scores(recipe)
    reward = WeightedRewards([(load_reward("exact"), 1.0), (load_reward("exact"), 1.0)])
    assert reward([], "a", {"label": "a"}, "row 1") == {"score": 2.0, "exact": 1.0, "exact_2": 1.0}
    recipe = TextTaskRecipe(prompts=["p.jsonl"], reward=["exact", "contains"])
    assert [(part.function, part.weight) for part in recipe.reward] == [("exact", 1.0), ("contains", 1.0)]
    with pytest.raises(ValueError, match="at least 1"):
        TextTaskRecipe(prompts=["p.jsonl"], reward=[])
    reward = WeightedRewards([(load_reward("exact"), 1.0), (load_reward("final_number"), 1.0)])
    with pytest.raises(RewardFailure):
        reward([], "a", {"label": "a"}, "row 1")
    rewards = weighted(("file.py:score", lambda answer: 1.0, 0.5), ("g", lambda answer: 1.0, 1.0))
    assert rewards([], "a", {}, "row 1") == {"score": 1.5, "score_2": 1.0, "g": 1.0}


def weighted(*functions):
    return WeightedRewards([(RewardFunction(name, function), weight) for name, function, weight in functions])


def test_none_means_that_a_function_or_a_name_does_not_apply():
    given = [], "ab", {}, "rows.jsonl row 1"
    assert RewardFunction("f", lambda answer: None)(*given) == {"score": None}
    named = RewardFunction("f", lambda answer: {"score": 0.5, "length": None, "form": 1})
    assert named(*given) == {"score": 0.5, "length": None, "form": 1.0}
    assert RewardFunction("f", lambda answer: {"score": None, "length": 2})(*given) == {"score": None, "length": 2.0}
    with pytest.raises(RewardFailure, match="the key 'score'"):
        RewardFunction("f", lambda answer: {"length": None})(*given)

    async def waits(answer):
        return None

    assert RewardFunction("f", waits)(*given) == {"score": None}
    one, other = ("one", lambda answer: 1.0, 1.0), ("other", lambda answer: None, 5.0)
    assert weighted(one, other)(*given) == {"score": 1.0, "one": 1.0, "other": None}
    assert weighted(other, one)(*given)["score"] == 1.0
    assert weighted(other, other)(*given) == {"score": None, "other": None, "other_2": None}
    both = weighted(other, ("f", lambda answer: {"score": 0.0, "a": None}, 2.0))
    assert both(*given) == {"score": 0.0, "other": None, "f": 0.0, "f_a": None}


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), ValueError("\ud800")])
def test_whatever_a_reward_raises_is_a_failure_that_names_the_row(error):
    def raises(answer):
        raise error

    async def raises_later(answer):
        raise error

    for function in (raises, raises_later):
        with pytest.raises(RewardFailure, match=rf"f raised {type(error).__name__} on row 1") as caught:
            RewardFunction("f", function)([], "a", {}, "row 1")
        assert str(caught.value).encode()


def test_a_generator_is_no_reward():
    def yields(answer):
        yield 1.0

    async def yields_later(answer):
        yield 1.0

    for function in (yields, yields_later):
        with pytest.raises(RewardFailure, match="must return a finite number"):
            RewardFunction("f", function)([], "a", {}, "row 1")
