"""The answer formats: rendered answers are parsed back, and all others are rejected with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.environments.game import TAGS, FormatRecipe, Rejected

NAMES = ("Left", "Down", "Right", "Up")
formats = st.builds(
    FormatRecipe,
    thinking=st.booleans(),
    prime=st.booleans(),
    separator=st.sampled_from(["||", "|", ",", ";"]),
    actions_per_turn=st.integers(1, 10),
)
thoughts = st.text().filter(lambda text: not any(tag in text for tag in TAGS))
pieces = st.one_of(st.sampled_from([*TAGS, *NAMES, "||", " ", "\n", "<|im_end|>"]), st.text(max_size=5))


@given(form=formats, thought=thoughts, data=st.data())
def test_rendered_facts_are_parsed_back(form, thought, data):
    actions = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=form.actions_per_turn))
    text = form.render(actions, thought)
    assert text.startswith(form.primer())
    assert form.parse(text, NAMES) == tuple(actions)
    assert form.parse(f" \n{text}\n", NAMES) == tuple(actions)


@given(form=formats, text=st.one_of(st.text(), st.lists(pieces, max_size=12).map("".join)))
def test_any_text_gives_actions_within_the_limits_or_a_reason(form, text):
    found = form.parse(text, NAMES)
    if isinstance(found, Rejected):
        assert found.reason
        assert len(found.reason) < 80
        assert "\n" not in found.reason
    else:
        assert 1 <= len(found) <= form.actions_per_turn
        assert set(found) <= set(NAMES)


@given(form=formats, outside=st.text(min_size=1).filter(str.strip), before=st.booleans())
def test_text_outside_the_tags_is_never_accepted(form, outside, before):
    text = form.render(["Up"])
    assert isinstance(form.parse(outside + text if before else text + outside, NAMES), Rejected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <answer>"),
        ("Up", "no <answer>"),
        ("Up</answer>", "no <answer>"),
        ("<answer>Up", "no </answer>"),
        ("I go <answer>Up</answer>", "text outside the tags"),
        ("<answer>Up</answer>.", "text outside the tags"),
        ("<answer><answer>Up</answer></answer>", "more than one <answer>"),
        ("<answer>Up</answer><answer>Up</answer>", "more than one <answer>"),
        ("</answer>Up<answer>", "tags in the wrong order"),
        ("<answer> </answer>", "empty answer"),
        ("<answer>North</answer>", "unknown action 'North'"),
        ("<answer>Up || </answer>", "too many actions: 2, allowed 1"),
        ("<think>hm</think><answer>Up</answer>", "<think> is not part of the format"),
    ],
)
def test_reasons_without_thinking(text, reason):
    assert FormatRecipe().parse(text, NAMES) == Rejected(reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>Up</answer>", "no <think>"),
        ("<think>because", "no <answer>"),
        ("<think>because<answer>Up</answer>", "no </think>"),
        ("<think>one</think>so<answer>Up</answer>", "text outside the tags"),
        ("<answer>Up</answer><think>late</think>", "tags in the wrong order"),
        ("<think><answer>Up</answer></think>", "tags in the wrong order"),
        ("<think>a</think><think>b</think><answer>Up</answer>", "more than one <think>"),
    ],
)
def test_reasons_with_thinking(text, reason):
    assert FormatRecipe(thinking=True).parse(text, NAMES) == Rejected(reason)


def test_spelling_is_restored_and_empty_actions_are_unknown():
    form = FormatRecipe(thinking=True, actions_per_turn=3)
    assert form.parse("<think>\nwhy\n</think>\n\n<answer>\n up||DOWN </answer>\n", NAMES) == ("Up", "Down")
    found = FormatRecipe(actions_per_turn=3).parse("<answer>Up || || Up</answer>", NAMES)
    assert found == Rejected("unknown action ''")
    assert FormatRecipe().primer() == ""
    assert FormatRecipe(prime=True).primer() == "<answer>"
    assert FormatRecipe(prime=True, thinking=True).primer() == "<think>"


@given(form=formats)
def test_every_form_named_in_the_instructions_is_accepted(form):
    text = form.instructions(NAMES)
    for name in NAMES:
        assert f"<answer>{name}</answer>" in text
    assert (f"up to {form.actions_per_turn} actions" in text) == (form.actions_per_turn > 1)
    if form.actions_per_turn > 1:
        several = text[text.rindex("<answer>") :].removesuffix(".")
        found = form.parse(f"<think></think>{several}" if form.thinking else several, NAMES)
        assert found == ("Left", "Down")
