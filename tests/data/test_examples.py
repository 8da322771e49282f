"""Rows as examples: the result of each format, and the problems of invalid rows."""

import copy
import json
import math
from typing import Any

import pytest

from posttrain.data.examples import ROW_FUNCTIONS, read_examples
from posttrain.data.messages import ConversationExample, PairExample, PromptExample, UnpairedExample, UnusableRow
from posttrain.data.problems import Problems
from posttrain.errors import InputError
from posttrain.recipe.data import ColumnsRecipe, SourceRecipe
from tests.data.malformed import BAD, BLANK, CALL, GOOD, SYSTEM, TOOL, TOOLS, USER, VALID, deep
from tests.data.valid import check
from tests.evaluation.made import write

KINDS = {"conversation": ConversationExample, "pair": PairExample, "unpaired": UnpairedExample, "prompt": PromptExample}
COLUMNS = ColumnsRecipe()


def made(kind: str, row: Any, **columns: str) -> Any:
    """The example of a row, or its problem as text."""
    try:
        return ROW_FUNCTIONS[kind](row, "rows row 1", ColumnsRecipe(**columns))
    except UnusableRow as problem:
        return str(problem)


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind, rows in VALID.items() for row in rows])
def test_valid_rows_are_examples(kind, row):
    before = copy.deepcopy(row)
    example = made(kind, row)
    assert type(example) is KINDS[kind], example
    check(example)
    assert row == before


def test_text_becomes_messages():
    user, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
    )
    assert made("conversation", {"prompt": "q", "completion": "a"}) == ConversationExample([user, good], "rows row 1")
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1, "domain": "d", "tools": json.dumps(TOOLS)}
    assert made("pair", row) == PairExample([user], [good], [bad], "rows row 1", 1.0, "d", TOOLS)
    assert made("unpaired", {"prompt": "q", "completion": "a", "label": 1}) == UnpairedExample(
        [user], [good], True, "rows row 1"
    )
    row = {"prompt": "q", "label": "42"}
    assert made("prompt", row) == PromptExample([user], "rows row 1", row)


def test_a_pair_is_one_good_and_one_bad_answer(tmp_path):
    user = {"role": "user", "content": "q"}
    answers = {name: {"role": "assistant", "content": name} for name in ("chosen", "rejected")}
    rows = [
        {"prompt": "q", "chosen": "chosen", "rejected": "rejected", "domain": "d"},
        {"chosen": [user, answers["chosen"]], "rejected": [user, answers["rejected"]], "completion": None},
        {"prompt": "q", "completion": "chosen", "label": False, "chosen": "x", "rejected": "y"},
        {"prompt": "q", "chosen": "chosen"},
    ]
    path, problems = write(tmp_path / "train.jsonl", rows), Problems()
    examples = list(read_examples("unpaired", [SourceRecipe(path=str(path))], COLUMNS, problems))
    expected = [*[(True, "chosen"), (False, "rejected")] * 2, (False, "chosen")]
    assert [(one.label, one.completion) for one in examples] == [(label, [answers[name]]) for label, name in expected]
    assert all(example.prompt == [user] for example in examples)
    assert [example.domain for example in examples[:2]] == ["d", "d"]
    assert (problems.used, problems.total) == (3, 1)
    first = list(read_examples("unpaired", [SourceRecipe(path=str(path))], COLUMNS, Problems(), max_rows=1))
    assert first == examples[:2]


def test_names_of_columns():
    row = {"question": "q", "answer": "a", "prompt": None}
    assert len(made("conversation", row, prompt="question", completion="answer").messages) == 2
    row = {"conversations": VALID["conversation"][1]["messages"]}
    roles = [message["role"] for message in made("conversation", row, messages="conversations").messages]
    assert roles == ["user", "assistant"]
    row = {"id": 1, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert "missing column: needs `messages` or `prompt`, has `id`, `conversations`" in made("conversation", row)
    assert made("conversation", row, messages="conversations").messages[1] == {"role": "assistant", "content": "a"}
    row = {"prompt": "q", "context_messages": [SYSTEM, USER]}
    assert made("prompt", row).messages == [{"role": "user", "content": "q"}]
    assert made("prompt", {**row, "prompt": None}).messages == [SYSTEM, USER]


def test_forms_of_messages():
    speakers = ["system", "human", "gpt", "user", "assistant", "tool"]
    row = {"messages": [{"from": speaker, "value": "x"} for speaker in speakers]}
    assert [message["role"] for message in made("conversation", row).messages] == [
        "system", "user", "assistant", "user", "assistant", "tool",
    ]  # fmt: skip
    assert made("conversation", row).messages[0] == {"role": "system", "content": "x"}
    parts = [{"type": "text", "text": "2 ", "image": None}, {"type": "text", "text": "+ 2?"}]
    row = {"messages": [{"role": "user", "content": parts, "train": None, "name": None}, GOOD]}
    assert made("conversation", row).messages == [{"role": "user", "content": "2 + 2?"}, GOOD]
    messages = made("conversation", {"messages": [USER, CALL, TOOL, GOOD]}).messages
    assert messages[1] == {**CALL, "content": ""}
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "add", "content": None}
    rows = [{"role": "developer", "content": "s"}, USER, legacy, result, GOOD]
    messages = made("conversation", {"messages": rows}).messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert "function_call" not in messages[2]
    assert messages[3] == {"role": "tool", "name": "add", "content": ""}
    pair = made("pair", {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]})
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], [GOOD], [BAD])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"weight": 0}, {"train": False}),
        ({"weight": 0.0, "train": False}, {"train": False}),
        ({"weight": 1}, {}),
        ({"weight": 1.0, "train": True}, {"train": True}),
        ({"weight": None}, {}),
    ],
)
def test_weights_of_messages_select_what_is_trained(given, kept):
    messages = made("conversation", {"messages": [USER, {**GOOD, **given}, USER, GOOD]}).messages
    assert messages == [USER, {**GOOD, **kept}, USER, GOOD]


@pytest.mark.parametrize("weight", [2, -1, 0.5, "0", True, math.nan, [0], 10**400])
def test_other_weights_are_a_problem_of_the_row(weight):
    text = made("conversation", {"messages": [USER, {**GOOD, "weight": weight}]})
    assert text.startswith("weight is neither 0 nor 1: message 2 of `messages` has ") or "bits" in text
    assert len(text) < 120
    assert made("conversation", {"messages": [USER, {**GOOD, "weight": 1, "train": False}]}).startswith(
        "weight and train disagree: message 2"
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        ([USER, GOOD], [USER, BAD], 1),
        ([SYSTEM, USER, GOOD, USER, GOOD], [SYSTEM, USER, GOOD, USER, BAD], 4),
        ([USER, GOOD, USER, GOOD], [USER, GOOD], 1),
        ([USER, GOOD], [USER, GOOD, USER, BAD], 1),
        ([SYSTEM, USER, GOOD], [USER, GOOD], 0),
        ([USER, GOOD, {**USER, "content": "x"}, GOOD], [USER, GOOD, {**USER, "content": "y"}, GOOD], 2),
    ],
)
def test_the_common_beginning_is_the_prompt(chosen, rejected, shared):
    pair = made("pair", {"chosen": chosen, "rejected": rejected})
    assert (pair.prompt, pair.chosen, pair.rejected) == (chosen[:shared], chosen[shared:], rejected[shared:])
    check(pair)


@pytest.mark.parametrize(
    ("label", "good"),
    [(True, True), (False, False), (1, True), (0, False), (1.0, True), ("true", True), ("False", False), ("0", False)],
)
def test_labels(label, good):
    assert made("unpaired", {"prompt": "q", "completion": "a", "label": label}).label is good


@pytest.mark.parametrize(("margin", "found"), [(None, None), ("", None), (0, 0.0), (2, 2.0), (0.5, 0.5), ("1.5", 1.5)])
def test_margins(margin, found):
    assert made("pair", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin}).margin == found


WRONG = [
    ("conversation", {"body": "x"}, "missing column: needs `messages` or `prompt`, has `body`"),
    ("conversation", {"completion": "a"}, "missing column: needs `prompt` or `context_messages`, has `completion`"),
    ("conversation", {"prompt": "q"}, "missing column: needs `completion`, has `prompt`"),
    ("conversation", {}, "missing column: needs `messages` or `prompt`, has none"),
    ("pair", {"prompt": "q", "chosen": "a"}, "missing column: needs `rejected`"),
    ("unpaired", {"prompt": "q", "completion": "a"}, "missing column: needs `label`"),
    ("unpaired", {"completion": "a", "label": 1}, "missing column: needs `prompt`"),
    ("prompt", {"question": "q"}, "missing column: needs `prompt` or `context_messages`, has `question`"),
    ("conversation", {"messages": None}, "null: in `messages`"),
    ("conversation", {"messages": [USER, {"role": "assistant", "content": None}]}, "null: message 2 of `messages`"),
    ("conversation", {"messages": [USER, None]}, "null: message 2 of `messages`"),
    ("conversation", {"prompt": None, "completion": "a"}, "null: in `prompt`"),
    ("pair", {"prompt": "q", "chosen": None, "rejected": "b"}, "null: in `chosen`"),
    ("unpaired", {"prompt": "q", "completion": "a", "label": None}, "null: in `label`"),
    ("prompt", {"prompt": None}, "null: in `prompt`"),
    ("conversation", [USER, GOOD], "wrong type: the row is a list"),
    ("conversation", {"messages": "hello"}, "wrong type: `messages` is text"),
    ("conversation", {"messages": [USER, "hello"]}, "wrong type: message 2 of `messages` is text"),
    ("conversation", {"prompt": "q", "completion": 4}, "wrong type: `completion` is a value of type int"),
    ("pair", {"prompt": 7, "chosen": "a", "rejected": "b"}, "wrong type: `prompt` is a value of type int"),
    ("pair", {"chosen": [USER, GOOD], "rejected": {"a": 1}}, "wrong type: `rejected` is an object"),
    ("prompt", {"prompt": "q", "domain": 3}, "wrong type: `domain` is a value of type int"),
    ("conversation", {"messages": [USER, {**GOOD, "train": "no"}]}, "wrong type: `train` of message 2"),
    ("conversation", {"messages": [USER, {**GOOD, "primer": 3}]}, "wrong type: `primer` of message 2"),
    ("conversation", {"messages": [USER, {**GOOD, "tool_calls": "x"}]}, "wrong type: `tool_calls` of message 2"),
    ("conversation", {"messages": [{"role": "elf", "content": "x"}, GOOD]}, "wrong role: message 1 of `messages` has 'elf'"),
    ("conversation", {"messages": [{"content": "x"}, GOOD]}, "wrong role: message 1 of `messages` has null"),
    ("conversation", {"messages": [{"role": ["user"], "content": "x"}, GOOD]}, "wrong role: message 1"),
    ("conversation", {"messages": [{"from": "elf", "value": "x"}, GOOD]}, "wrong role: message 1"),
    ("conversation", {"messages": [GOOD]}, "roles out of order: message 1, assistant, follows nothing"),
    ("conversation", {"messages": [USER, GOOD, BAD]}, "roles out of order: message 3, assistant, follows assistant"),
    ("conversation", {"messages": [USER, TOOL, GOOD]}, "roles out of order: message 2, tool, follows user"),
    ("pair", {"chosen": [GOOD], "rejected": [BAD]}, "roles out of order: message 1"),
    ("pair", {"prompt": "q", "chosen": [USER, GOOD], "rejected": [BAD]}, "roles out of order: `chosen` starts with user"),
    ("conversation", {"messages": [USER]}, "no assistant message"),
    ("conversation", {"messages": []}, "no assistant message"),
    ("conversation", {"prompt": "q", "completion": []}, "no assistant message: in `completion`"),
    ("pair", {"chosen": [USER], "rejected": [USER, BAD]}, "no assistant message: in `chosen`"),
    ("pair", {"chosen": [USER, GOOD], "rejected": [USER, BAD, USER]}, "answer ends with another role: `rejected` ends with user"),
    ("conversation", {"prompt": [USER, GOOD], "completion": "a"}, "prompt ends with assistant: in `prompt`"),
    ("prompt", {"context_messages": [USER, GOOD]}, "prompt ends with assistant: in `context_messages`"),
    ("conversation", {"prompt": "q", "completion": " \n"}, "empty answer"),
    ("conversation", {"messages": [USER, BLANK, USER, GOOD]}, "empty answer: message 2"),
    ("conversation", {"messages": [USER, {**BLANK, "tool_calls": []}]}, "empty answer"),
    ("pair", {"prompt": "q", "chosen": "", "rejected": "b"}, "empty answer"),
    ("pair", {"chosen": [USER, GOOD], "rejected": [USER, BLANK]}, "empty answer"),
    ("unpaired", {"prompt": "q", "completion": "\t", "label": True}, "empty answer"),
    ("prompt", {"prompt": " "}, "empty prompt"),
    ("prompt", {"prompt": []}, "empty prompt"),
    ("unpaired", {"prompt": "", "completion": "a", "label": True}, "empty prompt"),
    ("conversation", {"messages": [{"role": "user", "content": ["x"]}, GOOD]}, "content is not text: message 1"),
    ("conversation", {"messages": [{"role": "user", "content": {"a": 1}}, GOOD]}, "content is not text: message 1"),
    ("conversation", {"messages": [{"role": "user", "content": [{"type": "sound"}]}, GOOD]}, "content is not text: message 1"),
    ("conversation", {"messages": [{"role": "user", "content": []}, GOOD]}, "content is not text: message 1"),
    ("conversation", {"prompt": "q", "completion": "a\ud800"}, "text is not Unicode: `completion` holds the lone surrogate 0xd800"),
    ("conversation", {"messages": [{**USER, "name": "\udfff"}, GOOD]}, "text is not Unicode: message 1"),
    ("prompt", {"prompt": "q", "label": "\ud800"}, "text is not Unicode: the row"),
    ("conversation", {"messages": [{**USER, "x": deep(300)}, GOOD]}, "nested too deeply: message 1"),
    ("prompt", {"prompt": "q", "x": deep(300)}, "nested too deeply: the row"),
    ("conversation", {"messages": [{**USER, "x": b"x"}, GOOD]}, "wrong type: message 1 of `messages` holds a value of type bytes"),
    ("conversation", {"messages": [{**USER, 3: "x"}, GOOD]}, "wrong type: message 1 of `messages` has a key"),
    ("pair", {"chosen": "a", "rejected": "b"}, "answers as text without a prompt: needs the column `prompt`"),
    ("pair", {"prompt": None, "chosen": "a", "rejected": [USER, BAD]}, "answers as text without a prompt: needs"),
    ("pair", {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen equals rejected"),
    ("pair", {"chosen": [USER, GOOD], "rejected": [USER, {**GOOD, "train": True}]}, "chosen equals rejected"),
    ("pair", {"prompt": "q", "chosen": [{**GOOD, "train": False}], "rejected": "b"}, "nothing is trained"),
    *(
        ("pair", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin}, "margin is not a number of 0 or more")
        for margin in (-1, True, "much", math.nan, math.inf, 10**400, [1], "nan")
    ),
    *(
        ("unpaired", {"prompt": "q", "completion": "a", "label": label}, "label is neither true nor false: `label` is ")
        for label in (2, -1, 0.5, "yes", math.nan, [True], {})
    ),
    *(
        ("conversation", {"messages": [USER, GOOD], "tools": tools}, "tools are not a list of objects")
        for tools in ("[1", "{}", "[1]", {"a": 1}, [1], 3, True, "[" * 100_000)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "problem"), WRONG)
def test_a_problem_of_a_row_is_one_line_for_any_terminal(kind, row, problem):
    found = made(kind, row)
    assert isinstance(found, str), found
    assert found.startswith(problem)
    problems = Problems()
    problems.add_text(found, "rows row 1")
    [line] = problems.summary()
    assert line.startswith("1 row dropped: ")
    assert "\n" not in line.encode().decode()
    assert len(line) < 300


def test_max_rows_are_usable_rows_of_each_source(tmp_path):
    sources = []
    for name in ("a", "b"):
        path = write(tmp_path / f"{name}.jsonl", [{"prompt": text} for text in ("", "1", "2", "3")])
        sources.append(SourceRecipe(path=str(path)))
    problems = Problems()
    taken = [example.origin for example in read_examples("prompt", sources, COLUMNS, problems, max_rows=2)]
    assert taken == ["a.jsonl row 2", "a.jsonl row 3", "b.jsonl row 2", "b.jsonl row 3"]
    assert (problems.used, problems.total) == (4, 2)
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "q"}')
    with pytest.raises(InputError, match=r"missing\.jsonl"):
        read_examples("prompt", [SourceRecipe(path=str(path)), SourceRecipe(path="missing.jsonl")], COLUMNS, Problems())


def called(arguments: Any) -> dict[str, Any]:
    return calls({"function": {"name": "add", "arguments": arguments}})


def calls(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("arguments", [{"a": 1, "b": None}, '{"a": 1, "b": null}', '"{\\"a\\": 1, \\"b\\": null}"'])
def test_arguments_are_read_from_json_text_of_any_depth(arguments):
    messages = made("conversation", {"messages": [USER, called(arguments), TOOL, GOOD]}).messages
    assert messages[1]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": {"a": 1}, "type": "function", "function": None},
        {"name": "add", "parameters": {"a": 1}},
    ],
)
def test_calls_without_a_function_are_read(call):
    messages = made("conversation", {"messages": [USER, calls(call), TOOL, GOOD]}).messages
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    "arguments",
    [
        *('{"a": ', "[1]", '"Paris"', '{"a": NaN}', '{"a": Infinity}', '{"a": 1e999}', '{"a": 1, "a": 2}'),
        *([1], 3, {"a": math.nan}),
    ],
)
def test_other_arguments_are_a_problem_of_the_row(arguments):
    problem = made("conversation", {"messages": [USER, called(arguments), TOOL, GOOD]})
    assert problem.startswith("arguments of a tool call are not an object: those of 'add' in message 2 of `messages`")


def test_lone_surrogates_and_repeated_keys_are_problems_of_the_row(tmp_path):
    problem = made("conversation", {"messages": [USER, called('{"a": "\\ud83d"}'), TOOL, GOOD]})
    assert problem.startswith("text is not Unicode: ")
    nameless = made("conversation", {"messages": [USER, calls({"id": "x"}), TOOL, GOOD]})
    assert nameless.startswith("tool call without a name")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "q", "content": "OTHER"}]}\n')
    problems = Problems()
    assert list(read_examples("conversation", [SourceRecipe(path=str(file))], ColumnsRecipe(), problems)) == []
    assert "a key twice" in problems.summary()[0]


def test_an_answer_may_open_a_conversation():
    opening = {**GOOD, "content": "Hello!"}
    example = made("conversation", {"messages": [opening, USER, GOOD]})
    assert example.messages == [opening, USER, GOOD]
    pair = made("pair", {"prompt": [opening, USER], "chosen": [opening, USER, GOOD], "rejected": "5"})
    assert (pair.prompt, pair.chosen) == ([opening, USER], [GOOD])
    assert made("prompt", {"messages": [opening, USER, GOOD]}).messages == [opening, USER]
    assert made("conversation", {"messages": [opening, USER]}) == "no assistant message"
    check(example)
    check(pair)


def test_rows_of_alpaca_and_sharegpt_are_read_and_noted(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be brief."},
        {"instruction": "kept", "prompt": "p", "completion": "c"},
        {"instruction": "Next.", "input": "", "output": "2", "system": "Count.", "history": [["First.", "1"]]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "system": "Be kind."},
    ]
    write(file, rows)
    problems = Problems()
    read = list(read_examples("conversation", [SourceRecipe(path=str(file))], ColumnsRecipe(), problems))
    assert [[message["content"] for message in one.messages] for one in read] == [
        ["Add.\n1 2", "3"],
        ["Say hi.", "hi"],
        ["Be brief.", "a", "b"],
        ["p", "c"],
        ["Count.", "First.", "1", "Next.", "2"],
        ["Be kind.", "q", "a"],
    ]
    assert [line.partition(" row")[0] for line in problems.summary()] == ["3", "1", "1"]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"id": "1", "type": "function", "function": {"name": "f"}, "arguments": {"a": 1}}, {"a": 1}),
        ({"function": {"name": "f", "strict": True}}, None),
        ({"function": {"name": "f", "kwargs": '{"a": 1}'}}, "tool call without `arguments`"),
        ({"function": {"name": "f", "params": [{"name": "a", "value": 1}]}}, "tool call without `arguments`"),
        (
            {"function": {"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}},
            "tool call with several arguments",
        ),
    ],
)
def test_arguments_of_a_call_are_found_or_refused(call, arguments):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    read = made("conversation", {"messages": messages})
    if isinstance(arguments, str):
        assert read.startswith(arguments)
    else:
        assert read.messages[1]["tool_calls"][0]["function"].get("arguments") == arguments
