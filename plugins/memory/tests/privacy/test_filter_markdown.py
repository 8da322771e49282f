"""Privacy rules over Markdown as people write it: nothing hidden is in the view or let through in a reply."""

import pytest
from plugins.memory.tests.privacy.markdown_cases import CASES, IN_NOTES, UNCOVERED, notes

from posttrain_memory.privacy.filter import HIDDEN, PrivacyFilter


def test_cases_of_every_kind_exist():
    assert len(CASES) >= 80
    assert len({name.partition(":")[0] for name in CASES}) == 5


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNCOVERED])
def test_hidden_values_are_redacted_and_the_rest_is_unchanged(name):
    files, (_, rule, hidden, kept) = notes(CASES[name]), CASES[name]
    everything = "\n".join([*files, *files.values()]).casefold()
    assert [text for text in hidden if text.casefold() not in everything and name != "block: width"] == []
    one = PrivacyFilter([rule], files)
    assert one.problem is None
    shown = "\n".join([*one.view, *one.view.values()])
    assert [text for text in hidden if text.casefold() in shown.casefold()] == []
    assert [text for text in kept if text not in shown] == []
    assert len(one.view) == len(files)
    # A reply that recites the notes.
    said = one.clean("\n".join(files.values()))
    assert HIDDEN in said
    assert [text for text in hidden if text.casefold() in said.casefold()] == []
    # A reply that says a hidden value alone.
    if name.startswith(("category", "allowed")) or name in IN_NOTES:
        return
    assert [text for text in hidden if one.clean(f"Well: {text}!") != f"Well: {HIDDEN}!"] == []


@pytest.mark.parametrize("name", sorted(UNCOVERED))
def test_other_words_are_not_covered_as_the_documentation_says(name):
    shown = "\n".join(PrivacyFilter([CASES[name][1]], notes(CASES[name])).view.values())
    assert any(text.casefold() in shown.casefold() for text in CASES[name][2])
