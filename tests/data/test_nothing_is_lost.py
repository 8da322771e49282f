"""Keys and texts of messages that no token shows are counted by name, and tools are read from JSON text."""

import json
import re

import numpy as np
import pytest

from posttrain.data.messages import ConversationExample, messages_of
from posttrain.data.problems import Problems
from posttrain.data.tokens import TokenRow, tokenize
from posttrain.recipe.data import DataRecipe

from ..conftest import CHATML
from .malformed import GOOD, TOOLS, USER
from .test_chat import DROPS_THINKING
from .test_examples import made as example_of
from .test_reasoning import TEMPLATES
from .test_tools import renderer
from .tokenizers import LLAMA2, byte_level, made, user

CALL = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def used(messages, template, tools=None, loss_on="assistant", number=1) -> tuple[list[TokenRow], list[str]]:
    """The tokens of rows with these messages, and the lines about them."""
    subject = made(byte_level(template)) if isinstance(template, str) else template
    problems = Problems()
    rows = [ConversationExample(messages_of(messages, "messages"), f"a row {n}", tools=tools) for n in range(number)]
    return list(tokenize(rows, DataRecipe(train="a.jsonl"), subject, loss_on, problems)), problems.summary()


def decoded(row: TokenRow, subject) -> list[str]:
    return [subject.tokenizer.decode(stream.ids[stream.trained]) for stream in row.streams]


DETAILS = [{"type": "reasoning.summary", "summary": "h"}, {"type": "reasoning.text", "text": "m", "signature": "s"}]
AS_TEXT = {
    "thought": {"thought": "hm"},
    "thinking_content": {"thinking_content": "hm"},
    "analysis": {"analysis": "hm"},
    "parts": {"reasoning_details": DETAILS},
    "one part": {"reasoning_details": {"text": "hm"}},
    "text and its parts": {"reasoning": "hm", "reasoning_details": DETAILS},
    "object": {"reasoning": {"content": "hm"}},
    "object of parts": {"reasoning": {"summary": [{"type": "summary_text", "text": "hm"}]}},
}


def test_keys_of_parts_of_a_content_are_counted():
    part = {"type": "text", "text": "Where?", "cache_control": {"type": "ephemeral"}, "annotations": []}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "Up", "logprobs": None}]}
    (row,), lines = used([{"role": "user", "content": [part]}, answer], CHATML)
    (plain,), none = used([user("Where?"), {"role": "assistant", "content": "Up"}], CHATML)
    assert [list(stream.ids) for stream in row.streams] == [list(stream.ids) for stream in plain.streams]
    assert len(lines) == 1
    assert "content.cache_control" in lines[0]
    assert none == []


@pytest.mark.parametrize("keys", AS_TEXT.values(), ids=AS_TEXT)
def test_reasoning_that_is_text_is_trained(keys):
    (row,), lines = used([user("Where?"), {"role": "assistant", "content": "Up", **keys}], TEMPLATES["thinking"])
    answer = decoded(row, made(byte_level(TEMPLATES["thinking"])))
    assert ["".join(text.split()) for text in answer] == ["<think>hm</think>Up<|im_end|>"]
    assert lines == []


NOT_SHOWN = {
    "reasoning": {"effort": "high"},
    "reasoning_details": [{"type": "reasoning.encrypted", "data": "xyz"}],
    "thinking": 3,
    "thought": True,
    "refusal": "no",
    "annotations": [{"url": "x"}],
    "timestamp": 1700000000,
    "audio": {"id": "a"},
}


@pytest.mark.parametrize("key", NOT_SHOWN)
@pytest.mark.parametrize("role", ["assistant", "user", "system"])
@pytest.mark.parametrize("template", ["thinking", "chatml"])
def test_keys_that_are_not_rendered_are_counted_by_name(key, role, template):
    template = TEMPLATES.get(template, CHATML)
    messages = [{"role": "system", "content": "Hi"}, user("Where?"), {"role": "assistant", "content": "Up"}]
    plain, _ = used(messages, template)
    messages = [message | ({key: NOT_SHOWN[key]} if message["role"] == role else {}) for message in messages]
    rows, lines = used(messages, template, number=3)
    shown = not np.array_equal(rows[0].streams[0].ids, plain[0].streams[0].ids)
    if shown:  # a template for reasoning prints what is no text too, where it is neither a list nor an object
        assert key == "thinking"
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("3 rows ")
        assert f"`{key}`" in line


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_empty_keys_and_keys_that_link_messages_are_not_counted(value):
    messages = [
        {**user("Where?"), "refusal": value},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "audio": value},
        {"role": "tool", "content": "y", "tool_call_id": CALL["id"], "name": "look"},
        {"role": "assistant", "content": "Up", "train": True, "primer": "U"},
    ]
    assert used(messages, CHATML)[1] == []


def test_a_key_that_the_template_shows_is_not_counted():
    named = CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ m.get('name', '') }}")
    messages = [{**user("Where?"), "name": "Ann"}, {"role": "assistant", "content": "Up"}]
    assert used(messages, named)[1] == []
    (line,) = used(messages, CHATML)[1]
    assert "`name`" in line
    spoken = {"role": "assistant", "content": "I look it up.", "tool_calls": [CALL]}
    messages = [user("a"), spoken, {"role": "tool", "tool_call_id": CALL["id"], "content": "y"}, GOOD]
    for family, lost in (("mistral", True), ("qwen2_5", False)):
        _, lines = used(messages, renderer(family), TOOLS)
        assert any(line.startswith("1 row without a text") for line in lines) is lost, family


STRIPS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1].strip() }}")
LAST_THREE = CHATML.replace("in messages", "in messages[-3:]")
THOUGHT = {"role": "assistant", "content": "<think>long\nthought</think>\n\nUp"}


@pytest.mark.parametrize(
    ("template", "messages", "loss_on", "lost"),
    [
        (STRIPS, [user("a"), THOUGHT], "assistant", True),
        (STRIPS, [user("a"), {"role": "assistant", "content": " Up \n"}], "assistant", False),
        (DROPS_THINKING, [user("a"), THOUGHT], "assistant", False),
        (DROPS_THINKING, [user("a"), THOUGHT, user("b"), GOOD], "assistant", False),
        (DROPS_THINKING, [user("a"), THOUGHT, user("b"), GOOD], "all", True),
        (CHATML, [user("a"), THOUGHT, user("b"), THOUGHT], "all", False),
        (LAST_THREE, [user("Which?"), GOOD, user("b"), GOOD], "all", True),
        (LAST_THREE, [user("Which?"), GOOD, user("b"), GOOD], "assistant", False),
        (CHATML.replace("m['content']", "m['content'][:20]"), [user("a"), THOUGHT], "assistant", True),
        (CHATML.replace("m['content']", "m['content'][:200]"), [user("a"), THOUGHT], "assistant", False),
    ],
)
def test_text_that_the_template_leaves_out_is_counted(template, messages, loss_on, lost):
    rows, lines = used(messages, template, loss_on=loss_on, number=2)
    assert len(rows) == 2
    assert [stream.incomplete for stream in rows[0].streams] == [lost] * len(rows[0].streams)
    assert sum(line.startswith("2 rows without a text") for line in lines) == lost


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_every_answer_is_trained_also_one_that_opens_the_conversation(system):
    subject = made(byte_level(CHATML))
    messages = [*system, {"role": "assistant", "content": "Hello!"}, user("Where?"), GOOD]
    (row,), lines = used(messages, CHATML)
    assert decoded(row, subject) == ["Hello!<|im_end|>4<|im_end|>"]
    assert lines == []
    whole = subject.text(messages, answering=False)
    assert subject.tokenizer.decode(row.streams[0].ids) == whole[: whole.rindex("<|im_end|>") + len("<|im_end|>")]
    (last,), _ = used(messages, CHATML, loss_on="last_assistant")
    assert decoded(last, subject) == ["4<|im_end|>"]


def test_openings_do_not_make_prompts_equal():
    """Rows with one prompt are held out together."""
    opening = {"role": "assistant", "content": "Hello!"}
    (one,), _ = used([opening, user("Where?"), GOOD], CHATML)
    (two,), _ = used([opening, user("When?"), GOOD], CHATML)
    (same,), _ = used([opening, user("Where?"), {**GOOD, "content": "5"}], CHATML)
    assert one.prompt == same.prompt != two.prompt
    refuses = "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}" + LLAMA2
    skips = "{% if messages[0]['role'] == 'assistant' %}{% set messages = messages[1:] %}{% endif %}" + CHATML
    for template in (refuses, skips):
        rows, lines = used([{"role": "assistant", "content": "Hello!"}, user("Where?"), GOOD], template)
        assert rows == []
        assert len(lines) == 1


@pytest.mark.parametrize("ids", [["call_0123456789abcdef", "x"], [17, 18], [None, None], ["abcdefghi", "call_2"]])
def test_ids_of_calls_take_the_form_that_the_template_needs(ids):
    calls = [{**CALL, "id": id} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": f"r{n}"} for n, id in enumerate(ids)]
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": calls}, *results, GOOD]
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    subject = renderer("mistral")
    rows, lines = used(messages, subject, TOOLS)
    assert (len(rows), lines) == (1, [])
    text = subject.text(messages_of(messages, "messages"), TOOLS)
    called = re.findall(r'"arguments": \{.*?\}, "id": "(\w+)"', text)
    assert all(len(id) == 9 and id.isalnum() for id in called)
    assert len({*called}) == 2
    assert called[0] == ids[0] or ids[0] != "abcdefghi"
    for id, result in zip(called, results, strict=True):
        at = text.index(result["content"])
        assert id in text[at - 60 : at + 60]


def texts(tool):
    return {**tool, "function": {**tool["function"], "parameters": json.dumps(tool["function"]["parameters"])}}


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps(TOOLS),
        [json.dumps(tool) for tool in TOOLS],
        json.dumps([json.dumps(tool) for tool in TOOLS]),
        [texts(tool) for tool in TOOLS],
        [json.dumps(texts(tool)) for tool in TOOLS],
        [{**tool, "function": json.dumps(tool["function"])} for tool in TOOLS],
    ],
)
def test_tools_are_read_from_json_text(tools):
    row = {"messages": [USER, GOOD], "tools": tools}
    before = json.dumps(row)
    assert example_of("conversation", row).tools == TOOLS
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    "tools", [["search"], '["search"]', ['{"name": '], "search", [1], {"name": "f"}, [json.dumps(1)]]
)
def test_tools_that_are_no_objects_are_named(tools):
    assert example_of("conversation", {"messages": [USER, GOOD], "tools": tools}).startswith("tools are not a list of")


@pytest.mark.parametrize(
    "calls", [json.dumps([CALL]), [json.dumps(CALL)], [{**CALL, "function": json.dumps(CALL["function"])}]]
)
def test_calls_and_messages_are_read_from_json_text(calls):
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    for given in (messages, json.dumps(messages), [json.dumps(message) for message in messages]):
        assert example_of("conversation", {"messages": given}).messages[1]["tool_calls"] == [CALL]
    legacy = {"role": "assistant", "content": "", "function_call": json.dumps(CALL["function"])}
    (call,) = example_of("conversation", {"messages": [USER, legacy]}).messages[1]["tool_calls"]
    assert call["function"] == CALL["function"]
