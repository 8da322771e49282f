"""Values in disguise: percent-encoded, in entities, split by Markdown, glued to letters. docs/how-to/memory_agent.md has the rates."""

import pytest

from posttrain_memory.privacy.filter import HIDDEN, PrivacyFilter
from posttrain_memory.privacy.redaction import readings
from tests.adversary.disguises import BY_VALUE, DISGUISES, UNCOVERED, VALUES, corpus, leaks, notes, rate

PHONE = "+41 79 555 01 01"


@pytest.mark.parametrize("name", DISGUISES)
def test_disguised_phone_numbers_are_hidden(name):
    said = [(value, DISGUISES[name](value)) for value in VALUES["phone"]]
    places = ("reply", "note") if name in BY_VALUE else ("reply", "stranger", "note")
    assert [one for value, one in said for place in places if leaks("phone", value, one, place)] == []


def test_disguised_values_of_every_kind_are_hidden():
    cases = [case for case in corpus() if case[2] == VALUES[case[1]][0]]
    lost = [one for leaked in rate(cases).values() for one in leaked]
    assert len(lost) <= 0.02 * len(cases), lost


@pytest.mark.parametrize("name", UNCOVERED)
def test_codes_are_not_undone_as_the_documentation_says(name):
    cases = [(kind, value, UNCOVERED[name](value)) for kind, values in VALUES.items() for value in values]
    assert any(leaks(kind, value, said, "reply") for kind, value, said in cases if said != value)


@pytest.mark.parametrize(
    "said",
    [
        "%2B41%2079%20555%2001%2001",
        "&#43;41&nbsp;79&nbsp;555 01 01",
        "**41** 79 **555** 01 01",
        "4 1 7 9 5 5 5 0 1 0 1",
    ],
)
def test_only_the_disguised_value_is_hidden(said):
    clean = PrivacyFilter(["hide: [{category: phone}]"], notes("phone", PHONE)).clean(f"Call {said} today, she waits.")
    assert clean.startswith("Call ")
    assert HIDDEN in clean
    assert clean.endswith(" today, she waits.")
    assert "555" not in clean


@pytest.mark.parametrize(
    "text", ["At 10:30, 11:45.", "In 2019, 2020, 2021.", "It has 1,250,000 rows.", "On 1990-05-03.", "3 of 20 (15 %)"]
)
def test_times_years_and_amounts_are_no_phone_numbers(text):
    assert PrivacyFilter(["hide: [{category: phone}]"], notes("phone", PHONE)).clean(text) == text


@pytest.mark.parametrize("text", ["a%20b &amp; **c** <b>d</b> e f g h i ４１", "%C3%A9\\u0041 x", "", "a"])
def test_every_character_of_a_reading_stands_for_characters_of_the_text(text):
    for reading, places in readings(text):
        assert len(places) == len(reading) + 1
        assert list(places) == sorted(places)
        assert (places[0], places[-1]) <= (len(text), len(text))


def test_phone_numbers_are_found_between_measurements_which_stay():
    table = "| 0.759 [0.718, 0.801] | 12.5% | 1.402 |"
    assert PrivacyFilter(["hide: [{category: phone}]"], {}).clean(table) == table
    row = "| 0.759 | 0.718 | +41 79 555 01 01 | 1.402 | 0.3 |"
    shown = PrivacyFilter(["hide: [{category: phone}]"], {}).clean(row)
    assert "555" not in shown
    assert "79 " not in shown
    assert "0.759" in shown
