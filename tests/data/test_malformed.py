"""Over ten thousand malformed rows."""

import json

import pytest

from posttrain.data.examples import read_examples
from posttrain.data.messages import TextExample
from posttrain.data.problems import Problems
from posttrain.recipe.data import ColumnsRecipe, DataRecipe, SourceRecipe
from posttrain.seeds import random_stream
from tests.data.malformed import malformed
from tests.data.test_examples import KINDS, made
from tests.data.valid import check

COLUMNS = ColumnsRecipe()


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_rows_never_raise_and_never_become_invalid_examples(kind):
    draws = random_stream("test", "malformed", kind)
    used, problems = 0, Problems()
    for number, row in enumerate(malformed(kind, 2_600, draws), 1):
        example = made(kind, row)
        if isinstance(example, str):
            problems.add_text(example, f"rows row {number}")
            continue
        plain = kind == "conversation" and "text" in row and isinstance(example, TextExample)
        assert plain or type(example) is KINDS[kind]
        check(example)
        used += 1
    # Neither part of the test is empty, and the rows fail in many ways.
    assert used > 100
    assert problems.total > 1_000
    assert len(problems.summary()) >= {"prompt": 8}.get(kind, 12)
    assert used + problems.total == 2_600


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_rows_through_a_file(tmp_path, kind):
    draws = random_stream("test", "malformed file", kind)
    path = tmp_path / "train.jsonl"
    with path.open("wb") as file:
        for row in malformed(kind, 500, draws):
            try:
                line = bytearray(json.dumps(row, ensure_ascii=bool(draws.integers(2))).encode("utf-8", "surrogatepass"))
            except (TypeError, ValueError, RecursionError):
                line = bytearray(b"not JSON")
            if draws.random() < 0.1 and line:
                line[draws.integers(len(line))] = draws.integers(128, 256)
            file.write(line + b"\n")
    problems = Problems()
    examples = list(read_examples(kind, [SourceRecipe(path=str(path))], COLUMNS, problems))
    for example in examples:
        check(example)
    assert len(examples) == problems.used > 10
    assert problems.used + problems.total == 500
    assert any(line.startswith("broken UTF-8", line.index(": ") + 2) for line in problems.summary())


@pytest.mark.parametrize("kind", ["conversation", "pair", "unpaired"])
def test_rows_that_survive_validation_can_be_tokenized(tiny_model, kind):
    transformers = pytest.importorskip("transformers")
    from posttrain.data.rendering import Renderer
    from posttrain.data.tokens import tokenize

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    renderer = Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))
    recipe = DataRecipe.model_validate({"train": "unread.jsonl", "max_tokens": 512})
    draws = random_stream("test", "malformed tokens", kind)
    examples = [row for row in (made(kind, row) for row in malformed(kind, 1_000, draws)) if not isinstance(row, str)]
    problems = Problems()
    rows = list(tokenize(examples, recipe, renderer, "assistant", problems))
    assert len(rows) > 20
    assert len(rows) + problems.total == len(examples)
    for row in rows:
        assert all(stream.trained.any() for stream in row.streams)
