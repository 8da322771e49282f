"""The hints of the core for names of other frameworks are those of the rules."""

from posttrain_import.foreign import PLACE, text


def test_the_hints_of_the_core_are_those_of_the_rules():
    assert PLACE.read_text(encoding="utf-8") == text(), "run `python -m posttrain_import.foreign`"
