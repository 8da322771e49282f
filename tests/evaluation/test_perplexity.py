"""Perplexities of a tiny model against transformers' own log-probabilities."""

import math

import pytest
import torch

from posttrain.errors import InputError
from posttrain.evaluation.model_metrics import LanguageModel, conditional
from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.statistics import estimate
from posttrain.evaluation.text_metrics import TextOptions, evaluate_text
from posttrain.evaluation.workers import ModelOptions, ModelWorkers
from tests.evaluation.made import write

ROWS = [
    {"id": 0, "prompt": "Reach the goal", "prediction": "go Up", "reference": "Up Up Down"},
    {"id": 0, "prompt": "Reach the goal", "prediction": "go", "reference": "Up Up Down"},
    {"id": 1, "prompt": "Where are the holes?", "prediction": "row 1 column 2", "reference": "row 3"}
    | {"stop_reason": "length"},
    {"id": 2, "prompt": "Anything", "prediction": "  "},
]


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return LanguageModel(str(tiny_model), ModelOptions(tokens_per_batch=24))


@pytest.fixture
def model(loaded):
    return ModelWorkers(lambda: loaded)


@pytest.fixture(scope="module")
def plain(tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval(), AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def rows(tmp_path):
    return read_predictions(str(write(tmp_path / "p.jsonl", ROWS))).rows


def nats(plain, prompt, text):
    """-log p of the tokens of `text` after those of `prompt`, by transformers, and their number."""
    model, tokenizer = plain
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text))
    with torch.no_grad():
        logits = model(torch.tensor([before + after])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)
    return -sum(float(logprobs[len(before) - 1 + i, token]) for i, token in enumerate(after)), len(after)


def asked(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_texts_given_their_prompts(model, plain, rows, tmp_path):
    found = conditional(rows, model, "reference")
    one = nats(plain, asked("Reach the goal"), "Up Up Down<|im_end|>")
    other = nats(plain, asked("Where are the holes?"), "row 3<|im_end|>")
    assert found.about["tokens"] == one[1] + other[1]
    assert estimate(found.scores).value == pytest.approx(math.exp((one[0] + other[0]) / (one[1] + other[1])), rel=1e-4)
    assert (found.texts, found.left_out, found.better) == (2, {"empty reference": 1}, "lower")
    found = conditional(rows, model, "prediction")
    known = [
        nats(plain, asked("Reach the goal"), "go Up<|im_end|>"),
        nats(plain, asked("Reach the goal"), "go<|im_end|>"),
        nats(plain, asked("Where are the holes?"), "row 1 column 2"),  # cut off, so without its end
    ]
    assert estimate(found.scores).value == pytest.approx(
        math.exp(sum(own for own, _ in known) / sum(count for _, count in known)), rel=1e-4
    )
    assert found.left_out == {"empty prediction": 1}
    with pytest.raises(InputError, match=r"--model: .* is not a model directory"):
        LanguageModel(str(tmp_path))


def test_long_texts_are_left_out_with_the_reason(model, loaded, rows, monkeypatch):
    monkeypatch.setattr(loaded, "limit", 5)
    with pytest.raises(InputError, match=r"perplexity_reference: no text could be scored .*too long for the model"):
        conditional(rows, model, "reference")


def test_perplexities_that_are_not_finite_are_omitted(model, loaded, rows, monkeypatch):
    monkeypatch.setattr(loaded, "nats", lambda texts: [(math.nan, 3), *[(3.0, 3)] * (len(texts) - 1)])
    found = conditional(rows, model, "prediction")
    assert found.left_out["not a finite number"] == 1
    assert estimate(found.scores).value == pytest.approx(math.e)


def failed_and_measured(path, rows, tiny_model):
    options = TextOptions(("exact", "perplexity"), model=str(tiny_model))
    found = evaluate_text(read_predictions(str(write(path, rows))), options)
    return found.failed, [one.name for one in found.metrics]


def test_an_unavailable_perplexity_does_not_affect_other_metrics(tmp_path, tiny_model):
    empty = [{**row, "prediction": ""} for row in ROWS[::2]]
    failed, measured = failed_and_measured(tmp_path / "empty.jsonl", empty, tiny_model)
    assert measured == ["exact", "perplexity_reference"]
    assert list(failed) == ["perplexity_prediction"]
    assert "2 empty prediction" in failed["perplexity_prediction"]
    alone = [{key: value for key, value in row.items() if key != "prompt"} for row in ROWS[:1]]
    failed, measured = failed_and_measured(tmp_path / "alone.jsonl", alone, tiny_model)
    assert measured == ["exact"]
    assert all("1 no prompt" in failed[f"perplexity_{of}"] for of in ("reference", "prediction"))
