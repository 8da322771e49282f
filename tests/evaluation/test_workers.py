"""Metrics of models in several processes and in other precisions: the numbers of one process in float32."""

import json

import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.evaluation import workers
from posttrain.evaluation.model_metrics import LanguageModel
from posttrain.evaluation.workers import ModelOptions, ModelWorkers
from posttrain.models.reward import RewardModel
from tests.evaluation.made import predictions
from tests.training.small import fork_server


@pytest.fixture
def file(tmp_path):
    return str(predictions(tmp_path / "p.jsonl", 0.3, items=7, samples=2))


def metrics_of(tmp_path, name, words):
    assert main(["evaluate", *words, "--out", str(tmp_path / name)]) == 0
    return json.loads((tmp_path / name).read_text())


def test_bfloat16_is_close_and_reported(file, tiny_model, tmp_path):
    words = ["text", file, "--metrics", "perplexity", "--model", str(tiny_model), "--device", "cpu"]
    full = metrics_of(tmp_path, "full.json", words)["metrics"]
    half = metrics_of(tmp_path, "half.json", [*words, "--dtype", "bfloat16"])["metrics"]
    for name, metric in full.items():
        assert metric["about"]["dtype"] == "float32"
        assert half[name]["about"]["dtype"] == "bfloat16"
        assert half[name]["value"] == pytest.approx(metric["value"], rel=0.05)
        assert half[name]["value"] != metric["value"]


def test_a_missing_device(file, tiny_model, capsys):
    words = ["evaluate", "text", file, "--metrics", "perplexity", "--model", str(tiny_model), "--device", "cuda"]
    assert main(words) == 2
    assert "posttrain: --device: torch finds no GPU for cuda" in capsys.readouterr().err


def test_a_model_is_loaded_once_and_results_have_the_order_of_the_items(monkeypatch):
    loads = []
    here = ModelWorkers(lambda: loads.append(1) or 10)
    assert loads == []
    assert here.map(lambda model, items: [model + item for item in items], [1, 2]) == [11, 12]
    assert here.map(lambda model, items: [model for _ in items], []) == []
    assert loads == [1]
    monkeypatch.setattr(workers, "get_context", lambda method: fork_server())  # which has imported torch
    with ModelWorkers(int, 2) as two:
        assert two.map(_doubled, [1, 2, 3]) == [2, 4, 6]


def _doubled(_, items):
    return [2 * item for item in items]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(file, tiny_model, tmp_path):
    model = RewardModel(str(tiny_model), seed=3)
    model.set_statistics(0.1, 0.5)
    model.export(tmp_path / "rm")
    text = ["text", file, "--metrics", "bleu,perplexity", "--model", str(tiny_model)]
    for words in (text, ["reward", file, "--model", str(tmp_path / "rm")]):
        alone = metrics_of(tmp_path, "alone.json", words)
        both = metrics_of(tmp_path, "both.json", [*words, "--processes", "2"])
        assert list(alone["scores"]) == list(both["scores"])
        for name, scores in alone["scores"].items():
            assert list(both["scores"][name]) == list(scores)
            for item, summands in scores.items():
                assert both["scores"][name][item] == pytest.approx(summands, rel=1e-4)
    # An error in another process is the error of this one.
    with pytest.raises(InputError, match=r"^--model: .*/nonexistent"), ModelWorkers(missing_model, 2) as two:
        two.map(LanguageModel.score_answers, [([], text, False) for text in "abc"])


def missing_model():
    return LanguageModel("/nonexistent", ModelOptions())
