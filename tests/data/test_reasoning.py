"""Reasoning of answers, under any of its names, reaches the template, or the row is named."""

import pytest

from posttrain.data.messages import ConversationExample, UnusableRow, messages_of
from posttrain.data.problems import Problems
from posttrain.data.rendering import render_conversation
from posttrain.data.tokens import tokenize
from posttrain.recipe.data import DataRecipe
from posttrain.serving.formats import read_chat

from ..conftest import CHATML
from .test_chat import DROPS_THINKING
from .tokenizers import byte_level, made, user

TEXT = {"type": "text", "text": "Up"}
FORMS = {
    "reasoning_content": {"content": "Up", "reasoning_content": "hm"},
    "reasoning": {"content": "Up", "reasoning": "hm"},
    "thinking": {"content": "Up", "thinking": "hm"},
    "two keys": {"content": "Up", "reasoning": "hm", "reasoning_content": "hm", "thinking": None},
    "thinking part": {"content": [{"type": "thinking", "thinking": "hm"}, TEXT]},
    "list in a part": {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, TEXT]},
    "reasoning part": {"content": [{"type": "reasoning", "text": "hm"}, TEXT]},
}


def reads(shown):
    return CHATML.replace("{{ m['content'] }}", shown)


TEMPLATES = {
    key: reads(f"{{% if m.get('{key}') %}}<think>{{{{ m['{key}'] }}}}</think>{{% endif %}}{{{{ m['content'] }}}}")
    for key in ("reasoning_content", "reasoning", "thinking")
}
TEMPLATES["parts"] = reads(
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'thinking' %}<think>{{ p['thinking'] }}</think>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
)
TEMPLATES["tags"] = DROPS_THINKING


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("form", FORMS)
def test_reasoning_is_trained_in_the_form_that_the_template_reads(form, template):
    subject = made(byte_level(TEMPLATES[template]))
    # Recent versions of transformers give a template the key that it reads.
    assert subject.reasoning_form in (template, "reasoning_content")
    messages = messages_of([{"role": "user", "content": "Where?"}, {"role": "assistant", **FORMS[form]}], "messages")
    (row,) = render_conversation(subject, messages, "assistant")
    answer = subject.tokenizer.decode(row.ids[row.trained])
    assert "".join(answer.split()) == "<think>hm</think>Up<|im_end|>"
    assert subject.notes(messages, []) == []


@pytest.mark.parametrize("template", [CHATML, reads("{{ [m['content']] | tojson }}")])
def test_a_row_whose_reasoning_the_template_ignores_is_named(template):
    rows = [
        ConversationExample(messages_of([user("Where?"), {"role": "assistant", **one}], "messages"), f"a.jsonl row {n}")
        for n, one in enumerate([{"content": "Up"}, *FORMS.values()])
    ]
    problems = Problems()
    used = list(tokenize(rows, DataRecipe(train="a.jsonl"), made(byte_level(template)), "assistant", problems))
    assert len(used) == len(rows)
    (line,) = problems.summary()
    assert line.startswith(f"{len(FORMS)} rows ")
    assert "row 0" not in line


def test_reasoning_in_calls_and_beside_tools():
    subject = made(byte_level(TEMPLATES["thinking"]))
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [user("Where?"), {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}]
    assert "<think>hm</think><tool_call>" in subject.text(messages, [call], answering=False)
    (switch,) = messages_of([{"role": "assistant", "content": "Up", "thinking": True}], "messages")
    assert switch["thinking"] is True
    (asked,) = messages_of([{"role": "user", "content": "Up", "thinking": "hm"}], "messages")
    assert asked["thinking"] == "hm"
    assert "hm" not in made(byte_level(DROPS_THINKING)).text([asked])
    history = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Up", "reasoning": "hm"}]
    assert read_chat({"messages": history}).messages[1]["reasoning_content"] == "hm"
    history[1] = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, TEXT]}
    expected = {"role": "assistant", "content": "Up", "reasoning_content": "hm"}
    assert read_chat({"messages": history}).messages[1] == expected


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Up", "reasoning": "a", "thinking": "b"},
        {"content": [{"type": "thinking"}, TEXT]},
        {"content": [{"type": "redacted_thinking", "data": "x"}, TEXT]},
    ],
)
def test_reasoning_that_cannot_be_read_drops_the_row_by_name(message):
    with pytest.raises(UnusableRow, match="message 1"):
        messages_of([{"role": "assistant", **message}], "messages")


@pytest.mark.parametrize("template", ["reasoning_content", "tags"])
def test_reasoning_beside_the_same_text_in_tags_is_shown_once(template):
    subject = made(byte_level(TEMPLATES[template]))
    for content in ("<think>\nhm\n</think>\n\nUp", "<think>\n\n</think>\n\nUp", "Up"):
        answer = {"role": "assistant", "content": content, "reasoning_content": "hm"}
        messages = messages_of([user("Where?"), answer], "messages")
        (row,) = render_conversation(subject, messages, "assistant")
        shown = subject.tokenizer.decode(row.ids[row.trained])
        assert "".join(shown.split()) == "<think>hm</think>Up<|im_end|>"
    with pytest.raises(UnusableRow, match="several reasonings"):
        messages_of([user("Where?"), {**answer, "content": "<think>ah</think>Up"}], "messages")
