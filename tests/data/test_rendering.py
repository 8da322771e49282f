"""The renderer: the same tokens for supervised traces, rollouts and whole conversations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.rendering import Renderer
from posttrain.episode import StopReason
from posttrain.errors import InputError
from posttrain.rollout.transcript import TokenTranscript

from ..conftest import CHATML
from .tokenizers import renderer

DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1].lstrip() if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=30)


CHATML_RENDERER = renderer()
FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where to?"}]


@settings(max_examples=100, deadline=None)
@given(answers=st.lists(WORDS, min_size=1, max_size=4), observations=st.lists(WORDS, min_size=4, max_size=4))
def test_appended_turns_equal_the_template(answers, observations):
    """Turn-by-turn rendering of a conversation gives the tokens of rendering it whole."""
    conversation = TokenTranscript(CHATML_RENDERER, FIRST)
    for answer, observation in zip(answers, observations, strict=False):
        ids = CHATML_RENDERER.answer(answer)
        conversation.answer(ids, [-1.0] * len(ids), StopReason.END_TOKEN)
        conversation.reward(0.5, {})
        conversation.observe([{"role": "user", "content": observation}])
    assert CHATML_RENDERER.tokenizer.decode(conversation.context) == CHATML_RENDERER.tokenizer.decode(
        CHATML_RENDERER.prompt(conversation.messages)
    )
    (stream,) = conversation.streams()
    assert stream.sampled.sum() == sum(len(CHATML_RENDERER.answer(answer)) for answer in answers)
    assert stream.rewards.sum() == 0.5 * len(answers)
    for turn, answer in zip(conversation.turns, answers, strict=True):
        assert CHATML_RENDERER.answer_text(stream.ids[turn.start : turn.stop].tolist()) == answer
        assert stream.rewards[turn.stop - 1] == 0.5
        assert (stream.turn[turn.start : turn.stop] == conversation.turns.index(turn)).all()


def test_an_answer_that_did_not_end_gets_its_end_from_the_environment():
    conversation = TokenTranscript(CHATML_RENDERER, FIRST)
    ids = CHATML_RENDERER.answer("Up")[:-1]
    conversation.answer(ids, [0.0] * len(ids), StopReason.TURN_BUDGET)
    conversation.observe([{"role": "user", "content": "next"}])
    end = CHATML_RENDERER.tokenizer.eos_token_id
    position = conversation.turns[0].stop
    assert conversation.context[position] == end
    ids = CHATML_RENDERER.answer("Up")
    conversation.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
    (stream,) = conversation.streams()
    assert not stream.sampled[position]


def test_a_template_that_drops_thinking_splits_the_episode():
    dropping = renderer(DROPS_THINKING)
    assert dropping.rewrites_thoughts
    assert not dropping.rewrites_answers
    conversation = TokenTranscript(dropping, FIRST)
    for text in ("<think>hm</think>Up", "Down", "Left"):
        ids = dropping.answer(text)
        conversation.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
        conversation.reward(1.0, {})
        conversation.observe([{"role": "user", "content": "next"}])
    first, second = conversation.streams()
    decode = dropping.tokenizer.decode
    assert "<think>hm</think>Up" in decode(first.ids)
    assert "<think>" not in decode(second.ids)
    assert decode(second.ids[: conversation.turns[1].start]).count("Up") == 1
    assert [turn.stream for turn in conversation.turns] == [0, 1, 1]
    assert (first.rewards.sum(), second.rewards.sum()) == (1.0, 2.0)


def test_primers_and_refused_roles():
    conversation = TokenTranscript(CHATML_RENDERER, FIRST, primer="<answer>")
    ids = CHATML_RENDERER.answer("Up</answer>")
    assert conversation.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN) == "<answer>Up</answer>"
    (stream,) = conversation.streams()
    assert CHATML_RENDERER.tokenizer.decode(stream.ids[stream.sampled]) == "Up</answer><|im_end|>"
    refusing = renderer("{% for m in messages %}{% if m['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}{{ m['content'] }}{% endfor %}")  # fmt: skip
    with pytest.raises(InputError, match="roles system, user, critic"):
        refusing.prompt([*FIRST, {"role": "critic", "content": "x"}])


WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORES_SYSTEM = WITHOUT_SYSTEM.replace("{{ raise_exception('no system role') }}", "").replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"
)


@pytest.mark.parametrize("template", [WITHOUT_SYSTEM, IGNORES_SYSTEM])
def test_without_a_system_role_the_system_message_precedes_the_user_message(template):
    subject = renderer(template)
    folded = [{"role": "user", "content": "Be brief.\n\nWhere to?"}]
    assert subject.prompt(FIRST) == subject.prompt(folded)
    assert subject.text(FIRST).count("Be brief.") == 1
    assert len(subject.warnings()) == 1
    assert CHATML_RENDERER.warnings() == []
    assert CHATML_RENDERER.text(FIRST) != CHATML_RENDERER.text(folded)


def test_turns_of_a_folded_conversation_are_appended():
    subject = renderer(WITHOUT_SYSTEM)
    conversation = TokenTranscript(subject, FIRST)
    ids = subject.answer("North.")
    conversation.answer(ids, [-1.0] * len(ids), StopReason.END_TOKEN)
    conversation.observe([{"role": "user", "content": "And now?"}])
    assert subject.tokenizer.decode(conversation.context) == subject.text(conversation.messages)


def test_tokens_are_computed_once_for_equal_messages(monkeypatch):
    one, asked = renderer(), [{"role": "user", "content": "a question"}]
    expected = one.prompt(asked), one.continuation(asked, one.end)
    monkeypatch.setattr(Renderer, "text", None)
    one.prompt(asked).append(-1)
    assert (one.prompt(asked), one.continuation([dict(asked[0])], one.end)) == expected
    for change in (
        lambda: one.prompt([{**asked[0], "content": "another"}]),
        lambda: one.prompt([{**asked[0], "role": "system"}]),
        lambda: one.prompt(asked, primer="<answer>"),
        lambda: one.continuation(asked, None),
        lambda: one.prompt([{**asked[0], "name": "a key that a template may show"}]),
        lambda: one.prompt(asked, tools=[{"type": "function"}]),
    ):
        with pytest.raises(TypeError):
            change()
    monkeypatch.undo()
    monkeypatch.setattr("posttrain.data.templates._REMEMBERED", 1000)
    one = renderer()
    for number in range(100):
        one.prompt([{"role": "user", "content": f"question {number:3d}".ljust(100)}])
    assert 1 <= len(one._remembered._tokens) <= 10


def test_tokens_that_change_with_the_date_are_computed_each_time(monkeypatch):
    one, asked = renderer(CHATML + "{# {{ strftime_now('%d') }} #}"), [{"role": "user", "content": "a question"}]
    one.prompt(asked)
    monkeypatch.setattr(Renderer, "text", None)
    with pytest.raises(TypeError):
        one.prompt(asked)
