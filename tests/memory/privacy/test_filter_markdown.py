"""Privacy rules over Markdown as people write it: nothing hidden is in the view or let through in a reply."""

import pytest

from posttrain_memory.privacy.filter import HIDDEN, Filter
from tests.memory.privacy.markdown_cases import CASES, notes


def test_there_are_cases_of_every_kind():
    assert len(CASES) >= 80
    assert len({name.partition(":")[0] for name in CASES}) == 5


@pytest.mark.parametrize("name", CASES)
def test_nothing_hidden_is_shown_and_the_rest_stays(name):
    files, (_, rule, hidden, kept) = notes(CASES[name]), CASES[name]
    everything = "\n".join([*files, *files.values()]).casefold()
    assert [text for text in hidden if text.casefold() not in everything and name != "block: width"] == []
    one = Filter([rule], files)
    assert one.problem is None
    shown = "\n".join([*one.view, *one.view.values()])
    assert [text for text in hidden if text.casefold() in shown.casefold()] == []
    assert [text for text in kept if text not in shown] == []
    assert len(one.view) == len(files)


@pytest.mark.parametrize("name", CASES)
def test_a_reply_that_recites_the_notes_says_nothing_hidden(name):
    files, (_, rule, hidden, _) = notes(CASES[name]), CASES[name]
    one = Filter([rule], files)
    said = one.clean("\n".join(files.values()))
    assert HIDDEN in said
    assert [text for text in hidden if text.casefold() in said.casefold()] == []


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("category", "allowed"))])
def test_a_hidden_value_alone_is_not_said_either(name):
    rule, hidden = CASES[name][1:3]
    one = Filter([rule], notes(CASES[name]))
    assert [text for text in hidden if one.clean(f"Well: {text}!") != f"Well: {HIDDEN}!"] == []
