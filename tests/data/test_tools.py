"""Tool calls in chat templates: what a conversation with tools becomes, and what answers are parsed into.

The templates are small ones in the published formats of their families; SmolLM2's is its own.
"""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.examples import load_dataset
from posttrain.data.rendering import Renderer, render_conversation
from posttrain.data.tools import SYNTAXES, ParsedAnswer, ToolCall, call_id, hermes_text, schema
from posttrain.episode import StopReason
from posttrain.recipe.compose import section
from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.transcript import TokenTranscript
from posttrain.training.experts import expert_episodes, expert_rows
from tests.evaluation.made import write

from ..conftest import make_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {
    "smollm2": [],
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": [
        *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ],
}
"""Special tokens of each family, the end token first."""
TOOLS = [
    schema("price", "The price of an item.", {"type": "object", "properties": {"item": {"type": "string"}}}),
    schema("add", "Add numbers.", {"type": "object", "properties": {"numbers": {"type": "array"}}}),
]


@cache
def renderer(family: str) -> Renderer:
    if family == "smollm2":
        from posttrain.models.load import load_tokenizer
        from posttrain.recipe.model import ModelRecipe

        tokenizer = load_tokenizer(ModelRecipe(path="packaged:smollm2-135m"))
        return Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))
    from tokenizers import Regex, pre_tokenizers

    tokenizer = make_tokenizer()
    # Newlines are split from text on either side, as by the pre-tokenizers of Qwen and Llama 3.
    newlines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newlines, byte_level])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[family]})
    tokenizer.eos_token = SPECIAL[family][0]
    if family in ("llama3", "mistral"):
        tokenizer.bos_token = SPECIAL[family][1]
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text().removesuffix("\n")
    return Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))


WORDS = st.text("abcXYZ .,'ü{}\"é9", min_size=1, max_size=12).map(lambda text: f"a{text}z")
"""Texts that begin and end with a letter: templates strip white space."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    ToolCall,
    st.sampled_from(["price", "add"]),
    st.dictionaries(st.sampled_from(["item", "numbers"]), VALUES, max_size=2),
)


@st.composite
def turns(draw, several: bool):
    """Answers with the observations that follow them: calls and results, or text and a question."""
    played = []
    for _ in range(draw(st.integers(1, 4))):
        thought = f"<think>\n{draw(WORDS)}\n</think>\n\n" if draw(st.booleans()) else ""
        if draw(st.booleans()):
            calls = draw(st.lists(CALLS, min_size=1, max_size=3 if several else 1))
            played.append((ParsedAnswer(thought.strip(), calls), [draw(WORDS) for _ in calls]))
        else:
            played.append((ParsedAnswer(thought + draw(WORDS)), [draw(WORDS)]))
    return played


def observed(answer, results, turn):
    """The messages after an answer."""
    if not answer.calls:
        return [{"role": "user", "content": results[0]}]
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call_id(turn, index), "content": result}
        for index, (call, result) in enumerate(zip(answer.calls, results, strict=True))
    ]


@pytest.mark.parametrize("family", SPECIAL)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_conversation_with_tools_has_the_tokens_of_the_template(family, data):
    """After every observation, the tokens that the policy sees are those of the template for the whole conversation. A
    stream ends exactly where the template changes what it has written."""
    subject = renderer(family)
    messages = [{"role": "user", "content": data.draw(WORDS)}]
    transcript = TokenTranscript(subject, messages, tools=TOOLS)
    played = data.draw(turns(subject.several_calls))
    if family == "mistral":  # it refuses a question after the result of a tool
        played = [one for one in played if one[0].calls] or played[:1]
    for turn, (answer, results) in enumerate(played):
        if family in ("llama3", "mistral") and answer.calls:
            answer = ParsedAnswer("", answer.calls)  # these templates leave out text beside calls
        before = subject.text(messages, TOOLS)
        assert subject.encode(before) == transcript.context
        ids = transcript.written(hermes_text(answer))
        transcript.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
        parsed = [(call.name, call.arguments) for call in transcript.action.calls]
        assert parsed == [(call.name, call.arguments) for call in answer.calls]
        assert not transcript.action.errors
        messages = [
            *messages,
            subject.call_message(transcript.turns[-1].answer, transcript.action, turn),
            *observed(answer, results, turn),
        ]
        streams = len(transcript._streams)
        so_far = transcript.context.copy()
        transcript.observe(observed(answer, results, turn))
        whole = subject.encode(subject.text(messages, TOOLS))
        assert transcript.context == whole
        assert (len(transcript._streams) == streams) == (whole[: len(so_far)] == so_far)
    # The same conversation as a row: the same tokens, and the loss on the answers.
    end = {"role": "assistant", "content": "the end"}
    rows = render_conversation(subject, [*messages, end], "assistant", TOOLS)
    assert rows[-1].ids[: len(transcript.context)].tolist() == transcript.context
    streams = transcript.streams()
    if len(rows) == len(streams) == 1:
        assert rows[0].trained[: len(streams[0])].tolist() == streams[0].sampled.tolist()


CALL = ("price", {"item": "lamp"})
HERMES = '<tool_call>{"name": "price", "arguments": {"item": "lamp"}}</tool_call>'
XML = "<tool_call>\n<function=price>\n<parameter=item>\nlamp\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "price", "parameters": {"item": "lamp"}}'
MISTRAL = '{"name": "price", "arguments": {"item": "lamp"}, "id": "Ab3Ab3Ab3"}'


@pytest.mark.parametrize(
    ("syntax", "answer", "text", "calls"),
    [
        ("hermes", f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.", 2),
        ("hermes", '<tool_call>[{"name": "price", "arguments": {"item": "lamp"}}]</tool_call>', "", 1),
        ("hermes", XML, "", 1),
        ("hermes", "no call", "no call", 0),
        ("llama", f"{LLAMA}; {LLAMA}", "", 2),
        ("llama", f"<|python_tag|>{LLAMA}", "", 1),
        ("llama", '{"answer": 3}', '{"answer": 3}', 0),
        ("mistral", f"[TOOL_CALLS] [{MISTRAL}, {MISTRAL}]", "", 2),
        ("mistral", '[TOOL_CALLS]price[ARGS]{"item": "lamp"}[TOOL_CALLS]price{"item": "lamp"}', "", 2),
        ("mistral", '[TOOL_CALLS]price[CALL_ID]Ab3Ab3Ab3[ARGS]{"item": "lamp"}', "", 1),
    ],
)
def test_calls_of_each_syntax(syntax, answer, text, calls):
    parsed = SYNTAXES[syntax](answer)
    assert (parsed.text, [(one.name, one.arguments) for one in parsed.calls]) == (text, [CALL] * calls)
    assert parsed.errors == []


@pytest.mark.parametrize(
    ("syntax", "answer", "error"),
    [
        ("hermes", "<tool_call>{'name': 1}</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "price"', "has no </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "not an object with a `name`"),
        ("hermes", "<tool_call>null</tool_call>", "not an object with a `name`"),
        ("hermes", '<tool_call>{"name": "price", "arguments": [1]}</tool_call>', "arguments of price are not"),
        ("hermes", '<tool_call>{"name": "price", "arguments": "x"}</tool_call>', "not valid JSON"),
        ("hermes", f"{HERMES[:-12]} and more</tool_call>", "text after its JSON"),
        ("llama", '{"name": "price", "parameters": {', "not valid JSON"),
        ("mistral", "[TOOL_CALLS] [{]", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]price[ARGS]{", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_one_error(syntax, answer, error):
    parsed = SYNTAXES[syntax](answer)
    assert len(parsed.errors) == 1
    assert error in parsed.errors[0]
    assert parsed.calls == []
    assert parsed.text == answer


@pytest.mark.parametrize("syntax", SYNTAXES)
@settings(max_examples=100, deadline=None)
@given(text=st.text('<>tool_call/{}[]"name:argu,e\\ TOOLCALS;1', max_size=60))
def test_no_text_breaks_a_parser(syntax, text):
    for one in (text, HERMES[:20] + text, LLAMA[:20] + text, "[TOOL_CALLS]" + text):
        parsed = SYNTAXES[syntax](one)
        assert all(isinstance(call.arguments, dict) for call in parsed.calls)


def test_the_syntax_is_that_of_the_template_and_a_misfit_is_an_error():
    others = {"llama3": ("llama", False), "mistral": ("mistral", True)}
    for family in SPECIAL:
        expected = others.get(family, ("hermes", True))
        assert (renderer(family).tool_syntax, renderer(family).several_calls) == expected
    tokenizer = copy.copy(renderer("qwen2_5").tokenizer)
    fields = {"content": {}, "tool_calls": RESPONSES["json"][0]}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    parsed = Renderer(tokenizer, frozenset({tokenizer.eos_token_id})).parse("<call>{oops</call>", [PRICE])
    assert (parsed.text, parsed.calls, len(parsed.errors)) == ("<call>{oops</call>", [], 1)


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
RESPONSES = {
    "json": (
        {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}},
        '<call>{"name": "price", "arguments": {"item": "lamp", "count": 2}}</call>',
    ),
    "qwen3_coder": (
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": NAMED,
        },
        "<tool_call>\n<function=price>\n<parameter=item>\nlamp\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "glm": (
        {
            "open_pattern": r"\s*<tool_call>(?P<name>[^<\n]+)\n",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            },
            "transform": NAMED,
        },
        "<tool_call>price\n<arg_key>item</arg_key>\n<arg_value>lamp</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
    ),
    "deepseek": (
        {
            "open_pattern": r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            "close_pattern": r"\n```<｜tool▁call▁end｜>",
            "content": "json",
            "transform": NAMED,
        },
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>price\n```json\n{"item": "lamp", "count": 2}\n```<｜tool▁call▁end｜>',
    ),
    "gpt_oss": (
        {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|constrain\|>json<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "transform": NAMED,
        },
        '<|channel|>commentary to=functions.price <|constrain|>json<|message|>{"item": "lamp", "count": 2}<|call|>',
    ),
}
"""Family -> the field of calls in a response template of transformers, and a call."""
PRICE = schema(
    "price", "", {"type": "object", "properties": {"item": {"type": "string"}, "count": {"type": "integer"}}}
)


@pytest.mark.parametrize("family", RESPONSES)
def test_a_response_template_of_the_tokenizer_is_used(family):
    field, call = RESPONSES[family]
    tokenizer = copy.copy(renderer("qwen2_5").tokenizer)
    thinking = {"open": "<think>", "close": "</think>"}
    fields = {"content": {}, "reasoning_content": thinking, "tool_calls": field | {"repeats": True}}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    made = Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))
    expected = [("price", {"item": "lamp", "count": 2})]
    parsed = made.parse(f"So:{call}", [PRICE])
    assert [(one.name, one.arguments) for one in parsed.calls] == expected
    assert (parsed.text.strip(), parsed.errors) == ("So:", [])
    thought = made.parse(f"<think>Hm.</think>So:{call}{call}", [PRICE])
    assert [(one.name, one.arguments) for one in thought.calls] == expected * 2
    assert thought.text == "<think>Hm.</think>\n\nSo:"
    assert made.parse("No call.", [PRICE]) == ParsedAnswer("No call.")
    # A template may write the start of the thinking.
    start = "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    assert start in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(start, f"{start}<think>")
    opened = Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))
    assert [(one.name, one.arguments) for one in opened.parse(f"Hm.</think>{call}", [PRICE]).calls] == expected


@pytest.mark.parametrize("family", ["smollm2", "qwen2_5"])
def test_expert_rows_with_tools_have_the_tokens_of_expert_episodes(family, tmp_path):
    """Rows as `posttrain data experts` writes them: a `tools` column, and calls in `tool_calls`, here with their arguments
    as text, as OpenAI's files have them."""
    recipe = section(SftRecipe, environment={"type": "tool_use"}, experts={"random_share": 0.0})
    episodes = expert_episodes(recipe, range(6), renderer(family))
    rows = expert_rows(recipe.environment, range(6), "optimal", "episode", 0)
    for row in rows:
        for call in [call for message in row["messages"] for call in message.get("tool_calls", [])]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    examples = load_dataset(write(tmp_path / "rows.jsonl", rows), strict=True)
    assert len(examples) == 6
    for example, episode in zip(examples, episodes, strict=True):
        (stream,) = render_conversation(renderer(family), example.messages, "assistant", example.tools)
        (played,) = episode.streams
        assert stream.ids.tolist() == played.ids.tolist()
        assert stream.trained.tolist() == played.sampled.tolist()
        assert episode.success


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize(
    "content",
    [
        "[" * 900 + "]" * 900,
        f'{{"name": "look", "arguments": {{"x": {"[" * 900}{"]" * 900}}}}}',
        '{"name": "look", "arguments": {"x": "\\ud800"}}',
        '{"name": "look", "arguments": {"x": 1e999}}',
    ],
)
def test_a_call_that_cannot_be_written_again_is_an_error(syntax, content):
    texts = {"hermes": f"<tool_call>{content}</tool_call>", "mistral": f"[TOOL_CALLS]{content}"}
    parsed = SYNTAXES[syntax](texts.get(syntax, f'{{"name": "look", "parameters": {content}}}'))
    assert parsed.calls == []
    assert len(parsed.errors) == 1


@pytest.mark.timeout(20)
def test_parsing_takes_linear_time():
    repeated = "<parameter=a>" * 20_000
    assert SYNTAXES["hermes"](f"<tool_call><function=look>{repeated}</function></tool_call>").calls[0].arguments == {}
    assert SYNTAXES["mistral"](f"[TOOL_CALLS]look[CALL_ID]{' ' * 20_000}").calls == []
