"""Parsing of the agent's messages: code, replies and rejected messages."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.environments.game import Rejected
from posttrain_memory.parser import Act, Reply, parse

ACCEPTED = {
    "code": ("<think>look</think><python>a = 1</python>", Act("look", "a = 1")),
    "reply": ("<think>say</think>\n<reply> It is 3. </reply>\n", Reply("say", "It is 3.")),
    "white space": (" \n<think>\n t \n</think>\n\n<python>\na = 1\n</python>\n ", Act("t", "a = 1")),
    "opened by the template": ("t</think><python>a = 1</python>", Act("t", "a = 1")),
    "thought that begins with a tag": ("<python>x</python> or so</think><reply>a</reply>", None),
    "no thought in it": ("<think></think><reply>a</reply>", Reply("", "a")),
    "code in the thought": (
        "<think>I could <python>delete_file('a.md')</python> and <reply>x</reply></think><python>a = 1</python>",
        Act("I could <python>delete_file('a.md')</python> and <reply>x</reply>", "a = 1"),
    ),
    "result in the thought": ("<think><result>a</result></think><reply>b</reply>", Reply("<result>a</result>", "b")),
    "end tag in a string": (
        """<think>t</think><python>a = "x </python> y"</python>""",
        Act("t", 'a = "x </python> y"'),
    ),
    "end tag in a long string": (
        "<think>t</think><python>a = '''\nit's \"</python>\"\n'''\nb = 2</python>",
        Act("t", "a = '''\nit's \"</python>\"\n'''\nb = 2"),
    ),
    "end tag after an escaped quote": (
        r"""<think>t</think><python>a = 'x \' </python>'</python>""",
        Act("t", r"a = 'x \' </python>'"),
    ),
    "end tag in a raw string": (
        r"""<think>t</think><python>a = r'\' </python>'</python>""",
        Act("t", r"a = r'\' </python>'"),
    ),
    "empty strings": ("""<think>t</think><python>a = "" + '' + ""\"""\"</python>""", None),
    "end tag in a comment": ("<think>t</think><python>a = 1  # it's one</python>", Act("t", "a = 1  # it's one")),
    "quotes in a comment": ("<think>t</think><python># don't\na = 1</python>", Act("t", "# don't\na = 1")),
    "end tag after a line that goes on": (
        "<think>t</think><python>a = 'x\\\r\ny </python>'\r\n</python>",
        Act("t", "a = 'x\\\r\ny </python>'"),
    ),
    "a mark of the encoding": ("\ufeff \ufeff<think>t</think><reply>a</reply>", Reply("t", "a")),
    "a stray apostrophe ends with its line": (
        "<think>t</think><python>print('it's')\n</python>",
        Act("t", "print('it's')"),
    ),
    "comparison": ("<think>t</think><python>a = 1 < 2 </ 3</python>", Act("t", "a = 1 < 2 </ 3")),
    "fence around": ("<think>t</think><python>\n```python\na = 1\n```\n</python>", Act("t", "a = 1")),
    "fence in a string": (
        "<think>t</think><python>a = '''x\n```python\ny\n```\nz'''</python>",
        Act("t", "a = '''x\n```python\ny\n```\nz'''"),
    ),
    "blank lines in a string": (
        "<think>t</think><python>a = '''x\n\n\n  y\n'''</python>",
        Act("t", "a = '''x\n\n\n  y\n'''"),
    ),
    "indented": ("<think>t</think><python>\n  a = 1\n  b = 2\n</python>", Act("t", "  a = 1\n  b = 2")),
    "code in the reply": (
        "<think>t</think><reply>Write <python>a</python>.</reply>",
        Reply("t", "Write <python>a</python>."),
    ),
}
REJECTED = {
    "a reply of signs without width": (
        "<think>t</think><reply>\u200b\u2060 </reply>",
        "the <reply> is empty; write your answer in it",
    ),
    "empty": ("", "message is empty"),
    "only space": (" \n ", "message is empty"),
    "plain text": ("Hello!", "no <think>…</think>"),
    "no thought": ("<python>a = 1</python>", "no <think>…</think>"),
    "begun": ("<thi", "no <think>…</think>"),
    "thought not closed": ("<think>t <python>a</python>", "no </think>"),
    "nothing after the thought": ("<think>t</think> \n", "no <python> or <reply> after </think>"),
    "half a tag": ("<think>t</think><pyth", "text outside the blocks"),
    "text after the thought": ("<think>t</think>So: <python>a</python>", "text outside the blocks"),
    "end of thought twice": ("<think>a</think> b </think><python>c</python>", "text outside the blocks"),
    "second thought": ("<think>a</think><think>b</think><python>c</python>", "a second <think>"),
    "unknown block": ("<think>a</think><answer>b</answer>", "<answer> is not a block"),
    "lone end": ("<think>a</think></python>", "</python> without <python>"),
    "code not closed": ("<think>a</think><python>b = 1", "no </python> after the code; end"),
    "string not closed": ("<think>a</think><python>b = '''1</python>", "a string in the code is not closed"),
    "code twice": ("<think>a</think><python>b</python><python>c</python>", "<python> after </python>; write one"),
    "code and reply": ("<think>a</think><python>b</python>\n<reply>c</reply>", "<reply> after </python>; write one"),
    "reply and code": ("<think>a</think><reply>b</reply><python>c</python>", "<python> after </reply>; write one"),
    "own result": ("<think>a</think><python>b</python><result>c</result>", "do not write <result>"),
    "text after": ("<think>a</think><reply>b</reply> Bye", "text after </reply>"),
    "no code": ("<think>a</think><python> \n</python>", "<python> block is empty"),
    "no code, reply": ("<think>a</think><python></python><reply>b</reply>", "one block only"),
    "no reply": ("<think>a</think><reply> </reply>", "<reply> is empty"),
    "reply not closed": ("<think>a</think><reply>b", "no </reply>"),
    "a long name": (f"<think>a</think><{'q' * 50_000}>", "text outside the blocks"),
    "reply in a reply": ("<think>a</think><reply>b<reply>c</reply>", "a second <reply>"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_messages(name):
    message, wanted = ACCEPTED[name]
    found = parse(message)
    assert not isinstance(found, Rejected), found
    assert wanted is None or found == wanted


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_messages_and_their_reasons(name):
    message, reason = REJECTED[name]
    found = parse(message)
    assert isinstance(found, Rejected)
    assert reason in found.reason
    assert len(found.reason) < 160


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("<python>a = 1</python>", Act("", "a = 1")),
        (" <reply>b</reply>", Reply("", "b")),
        ("<think>a</think><reply>b</reply>", "<think> is not used"),
        ("b", "text outside the blocks; write either"),
        ("", "no <python> or <reply> in the message"),
    ],
)
def test_without_thinking(message, wanted):
    found = parse(message, thinking=False)
    assert wanted in found.reason if isinstance(found, Rejected) else found == wanted


TAGS = ["<think>", "</think>", "<python>", "</python>", "<reply>", "</reply>", "<result>", "</pyt", "</think", "<th"]
PARTS = st.sampled_from([*TAGS, *"<'\"\\#`a=é \n\r\ufeff\u200b", "</", "'''", '"""', "f'", "</p'"])
MESSAGES = st.one_of(
    st.lists(PARTS, max_size=25).map("".join),
    st.lists(PARTS, max_size=20).map(lambda parts: f"<think>t</think><python>{''.join(parts)}</python>"),
    st.lists(PARTS, max_size=20).map(lambda parts: f"<think>t</think><reply>{''.join(parts)}</reply>"),
)


@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.booleans())
def test_any_message_is_read_or_rejected_with_a_reason(message, thinking):
    """What is read is part of the message."""
    parsed = parse(message, thinking)
    if isinstance(parsed, Rejected):
        assert 0 < len(parsed.reason) < 200
    else:
        assert parsed.thought in message
        assert (parsed.code if isinstance(parsed, Act) else parsed.text) in message


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab'\"\\\n#</python>é ", max_size=30))
def test_any_text_can_be_written_as_a_string_of_the_code(text):
    code = f"create_file('a.md', {text!r})"
    assert parse(f"<think>t</think><python>{code}</python>") == Act("t", code)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS.filter(lambda part: part != "</think>"), max_size=12))
def test_nothing_in_a_thought_is_run_or_sent(parts):
    thought = " ".join(parts) + " "
    assert parse(f"<think>{thought}</think><python>a = 1</python>") == Act(thought.strip(), "a = 1")


@pytest.mark.parametrize(
    "piece",
    [
        "<",
        "\\'",
        "</python",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ["a", "'", '"', "\\", "#", " ", "\n", "a = 'b'\n"]),
    ],
)
def test_a_long_message_is_parsed_quickly(piece):
    """In code, in a string of it and in a reply."""
    for before in ("<python>", "<python>a = '", "<reply>"):
        begun = time.process_time()
        parse(f"<think>t</think>{before}{piece * (400_000 // len(piece))}</python></reply>")
        # A quarter of a second at most here; it once took ten.
        assert time.process_time() - begun < 3
