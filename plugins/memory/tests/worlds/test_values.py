"""Values are parsed in every spelling, and other text is not parsed as values."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.seeds import random_stream
from posttrain_memory.worlds.graph import ValueSampler
from posttrain_memory.worlds.naming import Namer, fill, matcher, slug
from posttrain_memory.worlds.theme import Attribute, themes
from posttrain_memory.worlds.values import canonical, find, mentions, plain, spell

READ = {
    "number": {"1,250": "1250", "12 kg": "12", "3.0": "3", "many": None, "12 and 13": None},
    "money": {
        "€1,250.50": "EUR 1250.50", "1250.5 euros": "EUR 1250.50", "USD 7": "USD 7.00", "7 dollars": "USD 7.00",
        "£3": "GBP 3.00", "7": None,
    },
    "date": {
        "31 May 2024": "2024-05-31", "May 31st, 2024": "2024-05-31", "31.5.2024": "2024-05-31",
        "the 31st of May 2024": None, "2024-02-30": None,
    },
    "phone": {"+1 (201) 555-0123": "12015550123", "2024-05-31": None},
    "email": {"Ann.B@Post.Example": "ann.b@post.example"},
    "enum": {"Playful": "playful"},
    "list": {"nuts, eggs and beef": "beef; eggs; nuts", "eggs & nuts": "eggs; nuts"},
    "text": {"the Blue Door.": "blue door"},
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_values_are_read_in_every_spelling(kind):
    assert {text: canonical(kind, text) for text in READ[kind]} == READ[kind]


def test_digits_within_other_values_do_not_count_as_numbers():
    text = "On 2024-05-31 call +1 201 555 0123 or a1@b2.example in [[entities/room_12.md|the room]]; there are 17."
    assert [found.value for found in find("number", text)] == ["17"]
    assert [found.value for found in find("phone", text)] == ["12015550123"]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), theme=st.sampled_from(sorted(themes())))
def test_every_spelling_of_a_drawn_value_is_read_back(seed, theme):
    random = random_stream("test values", seed)
    sampler = ValueSampler(random)
    for attribute in themes()[theme].attributes.values():
        value = sampler.value(attribute)
        for _ in range(3):
            assert canonical(attribute.type, spell(attribute.type, value, random, attribute.unit)) == canonical(
                attribute.type, value
            )
        if attribute.type == "text" and matcher(attribute.values):
            assert matcher(attribute.values).fullmatch(value)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_name_contains_another(seed):
    names = Namer(random_stream("test names", seed))
    patterns = ("{person}", "{place} Clinic", "[Old/New] {place}")
    drawn = [names.new(patterns) for _ in range(40)]
    drawn += [name for name in (names.near(one, patterns) for one in drawn[:10]) if name]
    words = [plain(name) for name in drawn]
    assert not any(one is not other and mentions(one, other) for one in words for other in words)
    assert len({slug(name) for name in drawn}) == len(drawn)
    assert not any("Clinic" not in near and "Clinic" in one for near, one in zip(drawn[40:], drawn, strict=False))


def test_patterns_are_filled_and_found():
    text = fill("C-##@ [red/blue]", random_stream("test pattern"))
    assert matcher("C-##@ [red/blue]").search(f"it is {text}, I think")
    assert matcher("C-##@ [red/blue]").search("it is C-1@ red") is None
    assert matcher("{person}") is None


def test_all_types_are_used_and_themes_are_distinct():
    types = get_args(Attribute.model_fields["type"].annotation)
    assert {item.type for theme in themes().values() for item in theme.attributes.values()} == set(types)
    assert {kind.about for theme in themes().values() for kind in theme.kinds} == {
        "person", "place", "organisation", "thing", "event"
    }  # fmt: skip
    texts = [text for theme in themes().values() for text in (*theme.filler, *theme.intro, *theme.titles)]
    assert len(texts) == len(set(texts))
    for theme in themes().values():
        declared = [item for kind in theme.kinds for item in kind.facts] + list(theme.user_facts)
        assert all(theme.attributes[item.key].type == item.type for item in declared)
        labels = {text for item in theme.attributes.values() for text in (item.label, *item.aliases)}
        relations = [text for tie in theme.relations for text in {tie.label, tie.plural}]
        relations += [text for tie in theme.relations for text in {tie.inverse, tie.inverse_plural}]
        assert len(theme.labels) == len(labels) + len(relations), theme.name
        assert len(relations) == len(set(relations)), theme.name
