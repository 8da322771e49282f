"""Tool calls in chat templates: what a conversation with tools becomes, and what answers are parsed into.

The templates are small ones in the published formats of their families; SmolLM2's is its own.
"""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.rendering import Renderer, render_conversation
from posttrain.data.tools import SYNTAXES, ParsedAnswer, ToolCall, call_id, hermes_text, schema
from posttrain.episode import StopReason
from posttrain.rollout.transcript import TokenTranscript

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
