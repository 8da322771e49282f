"""Rewards of predictions: those of transformers, scaled by the statistics stored with the reward model."""

import math

import pytest
import torch

from posttrain.errors import InputError
from posttrain.evaluation.model_metrics import _metric_names, evaluate_rewards
from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.statistics import estimate
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.training.reward_scorer import AnswerRewards
from tests.evaluation.made import write

ROWS = [
    {"id": 0, "prompt": "Reach the goal", "prediction": "Up"},
    {"id": 0, "prompt": "Reach the goal", "prediction": "Down Down"},
    {"id": 1, "prompt": "Where?", "prediction": "row 1", "stop_reason": "turn_budget"},
    {"id": 2, "prompt": "Who?", "prediction": ""},
    {"id": 3, "prediction": "no prompt"},
]


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """A reward model with statistics and one without."""
    found = []
    for seed, statistics in ((11, (0.05, 0.4)), (12, None)):
        model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=seed)
        if statistics is not None:
            model.set_statistics(*statistics)
        model.export(path := tmp_path_factory.mktemp("reward") / f"rm{seed}")
        found.append(str(path))
    return found


@pytest.fixture
def rows(tmp_path):
    return read_predictions(str(write(tmp_path / "p.jsonl", ROWS)))


def of_transformers(path, text):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits.item()


def test_rewards_are_scaled_by_the_statistics_of_the_model(models, rows):
    found = evaluate_rewards(rows, models[:1], AnswerRewards).metrics[0]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
    raw = [
        of_transformers(models[0], chat.format("Reach the goal", "Up<|im_end|>")),
        of_transformers(models[0], chat.format("Reach the goal", "Down Down<|im_end|>")),
        of_transformers(models[0], chat.format("Where?", "row 1")),  # cut off, so without its end
    ]
    scaled = [(own - 0.05) / 0.4 for own in raw]
    value = estimate(found.scores)
    assert value.value == pytest.approx(((scaled[0] + scaled[1]) / 2 + scaled[2]) / 2, abs=1e-4)
    assert "1 of 5 predictions are truncated" in rows.warnings()
    assert (found.name, value.n, found.texts) == ("reward", 2, 3)
    assert found.left_out == {"empty prediction": 1, "no prompt": 1}
    assert found.about["mean of raw rewards"] == pytest.approx(sum(raw) / 3, abs=1e-4)


def test_several_models_one_without_statistics_and_two_that_are_none(models, rows, tmp_path, tiny_model):
    found = evaluate_rewards(rows, [*models, str(tmp_path)], AnswerRewards)
    assert [one.name.split("/")[0] for one in found.metrics] == ["reward", "raw_reward"]
    assert "no stored reward statistics" in found.metrics[1].about["normalized"]
    assert list(found.failed) == [str(tmp_path)]
    assert "--model: " in found.failed[str(tmp_path)]
    found = evaluate_rewards(rows, [str(tiny_model)], AnswerRewards)
    assert "is not a reward model" in found.failed[str(tiny_model)]


def test_a_reward_that_is_not_a_number_is_omitted(rows):
    class Broken:
        statistics = (1.0, 2.0)

        def scores(self, conversations, cut_off):
            assert [messages[-1]["role"] for messages in conversations] == ["assistant"] * 3
            assert cut_off == [False, False, True]
            return [math.nan, 5.0, 3.0]

    found = evaluate_rewards(rows, ["x"], lambda _: Broken()).metrics[0]
    assert found.left_out["reward is not a finite number"] == 1
    assert found.scores.values(["0", "1"]).tolist() == [2.0, 1.0]


def test_names_say_what_differs():
    assert _metric_names(["runs/a/model"]) == ["reward"]
    assert _metric_names(["runs/a/model", "runs/b/model"]) == ["reward/a", "reward/b"]
    assert _metric_names(["m", "runs/b/m"]) == ["reward/m", "reward/runs/b/m"]
    with pytest.raises(InputError, match="a is given twice"):
        _metric_names(["a", "a"])
