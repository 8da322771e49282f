"""Rows of plain text, and weights of rows."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from posttrain.data.messages import ConversationExample, TextExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer, TokenStream
from posttrain.data.tokens import TokenRow, load_rows, tokenize
from posttrain.errors import InputError
from posttrain.models.forward import TokenScores
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.data import DataRecipe
from posttrain.recipe.loss import KtoLoss, PreferenceLossRecipe, RewardLossRecipe
from posttrain.recipe.units import UnitRewardsRecipe
from posttrain.training.objectives import PairObjective, RewardObjective, SupervisedObjective, UnpairedObjective
from posttrain.training.rows import samples_of_row
from posttrain.training.unit_rewards import UnitRewardObjective, UnitValues
from tests.data.test_examples import made
from tests.evaluation.made import write

LOSSES = TypeAdapter(PreferenceLossRecipe)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def renderer(tiny_policy):
    return Renderer(tiny_policy.tokenizer, tiny_policy.end_tokens)


@pytest.fixture
def file(tmp_path):
    texts = [{"text": "once upon a time", "w": 2}, {"text": "the end", "w": 0.5}]
    return write(tmp_path / "rows.jsonl", [*texts, {"messages": TALK, "text": "x", "w": 1}])


def test_plain_text_is_not_rendered_and_rows_with_one_beginning_differ(renderer):
    example = made("conversation", {"text": "once upon a time"})
    assert example == TextExample("once upon a time", "rows row 1")
    (row,) = tokenize([example], DataRecipe(train=["x"]), renderer, "assistant", Problems())
    (stream,) = row.streams
    assert stream.ids.tolist() == [*renderer.encode("once upon a time"), renderer.tokenizer.eos_token_id]
    assert stream.trained.tolist() == [False] + [True] * (len(stream.ids) - 1)
    examples = [TextExample("a b", "1"), TextExample("a c", "2"), TextExample("a b", "3")]
    first, second, third = tokenize(examples, DataRecipe(train=["x"]), renderer, "assistant", Problems())
    assert first.prompt == third.prompt != second.prompt


def test_messages_come_before_text_and_bad_text_is_a_counted_problem():
    assert isinstance(made("conversation", {"text": "a", "messages": TALK}), ConversationExample)
    assert made("conversation", {"body": "b"}, text="body") == TextExample("b", "rows row 1")
    assert "`text` is a value of type int, not a text" in made("conversation", {"text": 3})
    assert "not a text" in made("conversation", {"text": "  "})


@pytest.mark.parametrize("value", [0, -1, "x", True, float("inf")])
def test_a_weight_is_a_number_above_0(value):
    problem = made("conversation", {"text": "a", "w": value}, weight="w")
    assert isinstance(problem, str)
    assert "weight is not a number above 0" in problem
    assert "missing column" in made("conversation", {"text": "a"}, weight="w")


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


PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "No", "w": 3}


def test_pairs_and_labeled_answers_have_weights(renderer, tmp_path):
    file = write(tmp_path / "pairs.jsonl", [PAIR])
    recipe = DataRecipe(train=[str(file)], columns={"weight": "w"}, cache=str(tmp_path / "cache"))
    for kind in ("pair", "unpaired"):
        (rows,) = load_rows(kind, recipe, recipe.train, None, renderer, "assistant", Problems())
        assert {sample.weight for row in rows for sample in samples_of_row(row)} == {3.0}
    labeled = {"prompt": "Hi", "completion": "Hello", "label": True, "w": 0.5}
    assert made("unpaired", labeled, weight="w").weight == 0.5
    assert "weight is not a number above 0" in made("pair", PAIR | {"w": -1}, weight="w")


@pytest.mark.parametrize("name", ["dpo", "reward", "kto", "units"])
def test_the_loss_of_preferences_is_the_weighted_mean_over_rows_for_any_split(name):
    """Closed form: sum of w x loss / sum of w, with each row's loss from an update on this row alone."""
    values, weights_of_rows = [0.3, -0.2, 0.9, 0.1], [2.0, 0.5]

    def samples_of(rows):
        stream = TokenStream(np.arange(4), np.arange(4) > 1)
        streams = [stream] if name == "kto" else [stream] * 2
        samples = [
            one for row in rows for one in samples_of_row(TokenRow(streams, "r", weight=weights_of_rows[row]), row)
        ]
        for sample in samples:
            sample.ref_logprobs = np.full(2, -0.7, dtype=np.float32)
        return samples

    def loss_of(rows, divisor=None):
        samples = samples_of(rows)
        width = 1 if name == "kto" else 2
        of_rows = [value for row in rows for value in values[width * row :][:width]]
        if name == "units":
            units = UnitRewardsRecipe(segmenter={"type": "token"}, entropy_coefficient=0.5)
            objective = UnitRewardObjective(RewardLossRecipe(), units)
            rewards = torch.tensor([value + shift for value in of_rows for shift in (0.0, 0.4)])
            stream = torch.arange(len(of_rows)).repeat_interleave(2)
            output = UnitValues(rewards, stream, len(of_rows))
        elif name == "reward":
            objective, output = RewardObjective(RewardLossRecipe()), torch.tensor(of_rows)
        else:
            flat = -torch.tensor(of_rows).abs().repeat_interleave(2)
            output = TokenScores(flat, torch.ones_like(flat))
            objective = (
                UnpairedObjective(KtoLoss(), torch.tensor(0.1), 1)
                if name == "kto"
                else PairObjective(LOSSES.validate_python({"type": "dpo"}), 0.3)
            )
        loss, metrics = objective(output, samples, [])
        assert metrics["loss/preference"][1] == sum(weights_of_rows[row] for row in rows)
        return float(loss) / (divisor or objective.weigh(samples)[1])

    first, second = loss_of([0]), loss_of([1])
    expected = (2.0 * first + 0.5 * second) / 2.5
    assert first != pytest.approx(second, rel=1e-3)
    assert loss_of([0, 1]) == pytest.approx(expected, rel=1e-6)
    assert loss_of([0], 2.5) + loss_of([1], 2.5) == pytest.approx(expected, rel=1e-6)


def test_a_stage_that_weighs_no_rows_refuses_the_key(file):
    words = ["environment.type=text_task", f"environment.prompts={file}", "environment.columns.weight=w"]
    with pytest.raises(InputError, match=r"columns\.weight` would have no effect"):
        load_recipe([], words, "rl")
