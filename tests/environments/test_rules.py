"""Built-in rules, and how a rule is found."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.environments.rules import contains, exact, final_number, last_number, load_rule
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


def test_final_number_compares_values_with_the_first_reference_of_the_row():
    assert final_number("so #### 1,000.0", {"answer": "x = 10*100\n#### 1000", "label": "7"}) == 1.0
    assert final_number("so #### 7", {"answer": "x = 10*100\n#### 1000", "label": "7"}) == 0.0
    assert final_number("it is 7", {"answer": None, "completion": "A: 7"}) == 1.0
    assert final_number("it is 7", {"label": 7}) == 1.0
    assert final_number("no idea", {"label": 7}) == 0.0


@pytest.mark.parametrize("row", [{}, {"label": "none"}, {"completion": None}])
def test_final_number_refuses_a_row_without_a_number(row):
    with pytest.raises(ValueError, match="final_number"):
        final_number("7", row)


def test_exact_and_contains():
    assert exact(" Paris\n", {"label": "Paris "}) == 1.0
    assert exact("Paris.", {"label": "Paris"}) == 0.0
    assert exact("3", {"label": 3}) == 1.0
    assert contains("It is Paris.", {"label": "Paris"}) == 1.0
    assert contains("It is Rome.", {"label": "Paris"}) == 0.0


@pytest.mark.parametrize("rule", [exact, contains])
@pytest.mark.parametrize("row", [{}, {"label": None}, {"label": " "}])
def test_nothing_equals_or_holds_a_label_that_is_not_there(rule, row):
    with pytest.raises(ValueError, match="label"):
        rule("", row)


def test_rules_are_found_in_modules_and_in_files_of_one_name(tmp_path):
    assert load_rule("posttrain.environments.rules:exact") is exact
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rule.py").write_text(f"def score(answer, row):\n    return {value}\n")
    assert [load_rule(f"{tmp_path / name / 'rule.py'}:score")("", {}) for name in ("a", "b", "a")] == [1, 2, 1]


def test_a_rule_that_cannot_be_had_is_an_input_error(tmp_path):
    (tmp_path / "broken.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "empty.py").write_text("value = 1\n")
    for where, what in [
        (f"{tmp_path}/absent.py:score", "absent.py"),
        (f"{tmp_path}/broken.py:score", "a_module_nobody_has"),
        (f"{tmp_path}/empty.py:score", "no function 'score'"),
        (f"{tmp_path}/empty.py:value", "no function 'value'"),
        ("posttrain.environments.rules:nothing", "no function 'nothing'"),
        ("a_module_nobody_has:score", "a_module_nobody_has"),
    ]:
        with pytest.raises(InputError, match=r"environment\.rule") as caught:
            load_rule(where)
        assert what in str(caught.value)
