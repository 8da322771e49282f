"""Rows of plain text, and weights of rows."""

import json

import numpy as np
import pytest
import torch

from posttrain.data.examples import conversation
from posttrain.data.messages import ConversationExample, TextExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.data.tokens import load_rows, tokenize
from posttrain.errors import InputError
from posttrain.models.forward import TokenScores
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.data import ColumnsRecipe, DataRecipe
from posttrain.training.objectives import SupervisedObjective
from posttrain.training.rows import samples_of_row

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def renderer(tiny_policy):
    return Renderer(tiny_policy.tokenizer, tiny_policy.end_tokens)


@pytest.fixture
def file(tmp_path):
    rows = [
        {"text": "once upon a time", "w": 2},
        {"text": "the end", "w": 0.5},
        {"messages": TALK, "text": "x", "w": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def test_text_is_not_rendered_and_ends_with_the_end_token(renderer):
    example = conversation({"text": "once upon a time"}, "row 1", ColumnsRecipe())
    assert example == TextExample("once upon a time", "row 1")
    (row,) = tokenize([example], DataRecipe(train=["x"]), renderer, "assistant", Problems())
    (stream,) = row.streams
    assert stream.ids.tolist() == [*renderer.encode("once upon a time"), renderer.tokenizer.eos_token_id]
    assert stream.trained.tolist() == [False] + [True] * (len(stream.ids) - 1)


def test_messages_come_before_text_and_bad_text_is_a_counted_problem():
    assert isinstance(conversation({"text": "a", "messages": TALK}, "r", ColumnsRecipe()), ConversationExample)
    assert conversation({"body": "b"}, "r", ColumnsRecipe(text="body")) == TextExample("b", "r")
    assert "`text` is a value of type int, not a text" in conversation({"text": 3}, "r", ColumnsRecipe())
    assert "not a text" in conversation({"text": "  "}, "r", ColumnsRecipe())


def test_rows_that_begin_alike_are_different_texts(renderer):
    examples = [TextExample("a b", "1"), TextExample("a c", "2"), TextExample("a b", "3")]
    first, second, third = tokenize(examples, DataRecipe(train=["x"]), renderer, "assistant", Problems())
    assert first.prompt == third.prompt != second.prompt


@pytest.mark.parametrize("value", [0, -1, "x", True, float("inf")])
def test_a_weight_is_a_number_above_0(value):
    problem = conversation({"text": "a", "w": value}, "r", ColumnsRecipe(weight="w"))
    assert isinstance(problem, str)
    assert "weight is not a number above 0" in problem
    assert "missing column" in conversation({"text": "a"}, "r", ColumnsRecipe(weight="w"))


def test_weights_are_read_and_cached(renderer, file, tmp_path):
    recipe = DataRecipe(train=[str(file)], columns={"weight": "w"}, cache=str(tmp_path / "cache"))
    for _ in range(2):
        (rows,) = load_rows("conversation", recipe, recipe.train, None, renderer, "assistant", Problems())
        assert [row.weight for row in rows] == [2.0, 0.5, 1.0]


def test_the_loss_is_the_weighted_mean_over_tokens_for_any_split(renderer, file, tmp_path):
    """Closed form: sum of w x -log pi over all tokens / sum of w x tokens."""
    recipe = DataRecipe(train=[str(file)], columns={"weight": "w"}, cache=str(tmp_path / "cache"))
    (rows,) = load_rows("conversation", recipe, recipe.train, None, renderer, "assistant", Problems())
    samples = [sample for row in rows for sample in samples_of_row(row)]
    counts = [sample.sampled_tokens for sample in samples]
    generator = torch.Generator().manual_seed(0)
    logprobs = [-torch.rand(count, generator=generator) for count in counts]
    expected = -sum(w * float(lp.sum()) for w, lp in zip((2, 0.5, 1), logprobs, strict=True))
    tokens = sum(w * n for w, n in zip((2, 0.5, 1), counts, strict=True))
    objective = SupervisedObjective()
    weights, divisor = objective.weigh(samples)
    assert divisor == tokens
    for split in ([[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]]):
        loss, total, count = 0.0, 0.0, 0.0
        for part in split:
            flat = torch.cat([logprobs[i] for i in part])
            scores = TokenScores(flat, torch.ones_like(flat))
            of_part, metrics = objective(scores, [samples[i] for i in part], [weights[i] for i in part])
            loss += float(of_part) / divisor
            total, count = total + metrics["loss/nll"][0], count + metrics["loss/nll"][1]
            assert metrics["policy/entropy"][0] == pytest.approx(metrics["policy/entropy"][1])
        assert loss == pytest.approx(expected / tokens, rel=1e-6)
        assert total / count == pytest.approx(expected / tokens, rel=1e-6)
    assert np.isclose(count, tokens)


@pytest.mark.parametrize("stage", ["dpo", "reward", "rl", "ptx"])
def test_a_stage_that_weighs_no_rows_refuses_the_key(stage, file):
    words = {
        "rl": ["environment.type=text_task", f"environment.prompts={file}", "environment.columns.weight=w"],
        "ptx": [f"ptx.data.train={file}", "ptx.data.columns.weight=w"],
    }.get(stage, [f"data.train={file}", "data.columns.weight=w"])
    with pytest.raises(InputError, match=r"columns\.weight` would have no effect: only stage sft weighs rows"):
        load_recipe([], words, "rl" if stage == "ptx" else stage)
