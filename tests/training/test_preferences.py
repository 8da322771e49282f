"""Preference stages: losses that no micro-batch changes, references computed once, and whole runs."""

import json
import re

import numpy as np
import pytest
from pydantic import TypeAdapter

from posttrain.data.rendering import TokenStream
from posttrain.data.tokens import TokenRow
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.loss import PreferenceLossRecipe, RewardLossRecipe
from posttrain.recipe.model import LearnerRecipe, LoraRecipe, ModelRecipe, OptimizerRecipe
from posttrain.recipe.stages import DpoRecipe
from posttrain.training import dpo as references_module
from posttrain.training.dpo import ReferenceLogprobs
from posttrain.training.objectives import PairObjective, RewardObjective, logprobs, reward_forward, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rows import samples_of_row
from posttrain.training.updater import Updater, pack
from tests.training import small
from tests.training.preferences import pair_rows, recipe_values, unpaired_rows, write_jsonl

LOSSES = TypeAdapter(PreferenceLossRecipe)
PAIRWISE = ["dpo", "ipo", "cdpo", "simpo", "orpo", "apo_zero", "apo_down", "bco"]


def pair_samples(seed=0):
    """Nine pairs of many lengths; the margins differ."""
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(9):
        prompt = rng.integers(3, 250, rng.integers(3, 12))
        streams = []
        for _ in range(2):
            answer = rng.integers(3, 250, rng.integers(1, 25))
            ids = np.concatenate([prompt, answer]).astype(np.int64)
            streams.append(TokenStream(ids, np.arange(len(ids)) >= len(prompt)))
        samples += samples_of_row(TokenRow(streams, f"row {number}", margin=0.1 * number), number)
    for sample in samples:
        sample.ref_logprobs = rng.normal(-5, 0.2, sample.sampled_tokens).astype(np.float32)
    return samples


@pytest.mark.parametrize("loss", PAIRWISE)
def test_no_split_changes_the_gradient_of_a_preference_loss(loss, tiny_policy, monkeypatch):
    forward = token_forward(tiny_policy, LearnerRecipe())
    objective = PairObjective(LOSSES.validate_python({"type": loss}), 0.0 if loss == "orpo" else 0.3)
    small.assert_no_split_changes_gradients(tiny_policy, forward, pair_samples, objective, monkeypatch)


def test_no_split_changes_the_gradient_of_a_reward_model(tiny_model, monkeypatch):
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=1)
    objective = RewardObjective(RewardLossRecipe(center_rewards_coefficient=0.01))
    small.assert_no_split_changes_gradients(model, reward_forward(model), pair_samples, objective, monkeypatch)


def test_the_two_answers_of_a_pair_are_never_separated():
    samples = pair_samples()
    for budget in (70, 100, 300):
        for group in pack(samples, budget):
            rows = [samples[i].side.row for i in group]
            assert all(rows.count(row) == 2 for row in rows)


@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=4)])
def test_references_are_the_start_computed_once_and_kept_on_disk(lora, tiny_model, tmp_path, monkeypatch):
    recipe = DpoRecipe(data={"train": "unused.jsonl", "cache": str(tmp_path / "cache" / "tokens")})
    policy = Policy(ModelRecipe(path=str(tiny_model), lora=lora))
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(learning_rate=1e-2), 9)
    learner = Updater(policy, optimizer, LearnerRecipe(), token_forward(policy, LearnerRecipe()))
    samples = pair_samples()
    first = ReferenceLogprobs(recipe, policy, learner)
    start = logprobs(learner, samples)
    first.precompute(samples)
    for sample in samples:
        sample.ref_logprobs = None
    first.assign(samples)
    for sample, expected in zip(samples, start, strict=True):
        np.testing.assert_allclose(sample.ref_logprobs, expected, atol=2e-6)
    learner.update(samples, PairObjective(LOSSES.validate_python({"type": "dpo"}), 0.0))
    assert np.abs(np.concatenate(logprobs(learner, samples)) - np.concatenate(start)).max() > 1e-3

    def refuse(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(references_module, "logprobs", refuse)
    fresh = Policy(ModelRecipe(path=str(tiny_model), lora=lora))
    again = ReferenceLogprobs(recipe, fresh, learner)
    again.precompute(samples)
    kept = [sample.ref_logprobs for sample in samples]
    again.assign(samples)
    for sample, before in zip(samples, kept, strict=True):
        assert np.array_equal(sample.ref_logprobs, before)


def test_a_reward_model_learns_and_reports_its_accuracy(tiny_model, tmp_path):
    values = recipe_values("reward", tiny_model, tmp_path, epochs=6)
    directory, printed = small.train(values)
    assert "scored pairs" in printed
    assert re.search(r"calibration: expected error \d", printed)
    table = json.loads((directory.path / "results.json").read_text())["tables"][0]
    trained = [row for row in table["rows"] if row[0] == "trained model"]
    assert [row[1] for row in trained] == ["all", "even", "odd"]
    assert float(trained[0][2].rstrip("%")) > 60
    assert trained[0][6] == "8"
    model = RewardModel(ModelRecipe(path=str(directory.path / "model")), new_head=False)
    mean, std = model.statistics
    assert std > 0
    (final,) = small.lines(directory, "final")
    assert final["test/reward_mean"] == pytest.approx(mean, abs=1e-6)
    assert "AutoModelForSequenceClassification" in directory.report.read_text()


@pytest.mark.parametrize("loss", small.cases(PAIRWISE, ["dpo", "simpo"]))
def test_every_loss_of_pairs_learns_to_rank(loss, tiny_model, tmp_path):
    values = recipe_values("dpo", tiny_model, tmp_path, loss={"type": loss}, epochs=5)
    directory, _ = small.train(values)
    train = small.lines(directory, "train")
    assert train[-1]["loss/preference"] < train[0]["loss/preference"]
    assert max(line["validation/accuracy"] for line in small.lines(directory, "evaluation")) > 0.6
    if loss == "bco":
        assert train[0]["preference/shift"] == 0.0
        assert train[2]["preference/shift"] != 0.0
    if loss not in ("simpo", "orpo"):
        start = small.lines(directory, "baseline")[0]
        assert abs(start["test/margin"]) < 1e-4  # the policy starts as the reference


def judged_values(tiny, folder, rows, held_out, **changes):
    """A run of KTO on judged answers."""
    values = recipe_values("dpo", tiny, folder, **{"loss": {"type": "kto"}, "epochs": 1} | changes)
    values["data"]["train"] = write_jsonl(folder / "judged.jsonl", rows)
    values["data"]["validation"] = write_jsonl(folder / "judged_too.jsonl", held_out)
    return values


@pytest.mark.slow
def test_kto_learns_from_judged_answers(tiny_model, tmp_path):
    changes = {"loss": {"type": "kto", "beta": 0.5}, "epochs": 4}
    values = judged_values(tiny_model, tmp_path, unpaired_rows(26), unpaired_rows(8), **changes)
    directory, _ = small.train(values)
    assert all(line["preference/kl"] >= 0 for line in small.lines(directory, "train"))
    assert max(line["validation/accuracy"] for line in small.lines(directory, "evaluation")) > 0.6


def test_kto_takes_pairs_and_mismatches_their_answers(tiny_model, tmp_path, monkeypatch):
    """Six pairs in updates of 11 answers, so the second update of an epoch has one."""
    estimated = []
    plain = references_module.mismatched_samples

    def recorded(samples, *rest):
        estimated.append((samples, plain(samples, *rest)))
        return estimated[-1][1]

    monkeypatch.setattr(references_module, "mismatched_samples", recorded)
    values = recipe_values("dpo", tiny_model, tmp_path, loss={"type": "kto"}, epochs=1, rows_per_update=11)
    values["data"]["train"] = write_jsonl(tmp_path / "pairs.jsonl", pair_rows(6))
    directory, _ = small.train(values)
    train = small.lines(directory, "train")
    assert [line["preference/mismatched"] for line in train] == [11, 1]
    own = {answer_of(sample): prompt_of(sample) for samples, _ in estimated for sample in samples}
    for samples, mismatched in estimated:
        assert [prompt_of(sample) for sample in mismatched] == [prompt_of(sample) for sample in samples]
        assert all(own[answer_of(sample)] != prompt_of(sample) for sample in mismatched)


def answer_of(sample):
    return sample.stream.ids[sample.stream.sampled].tobytes()


def prompt_of(sample):
    return sample.stream.ids[: int(np.argmax(sample.stream.sampled))].tobytes()


def answers(*prompts):
    """One sample per prompt, whose answer is its place."""
    samples = []
    for place, prompt in enumerate(prompts):
        ids = np.array([1, prompt, 100 + place])
        samples += samples_of_row(TokenRow([TokenStream(ids, ids >= 100)], f"row {place}"), place)
    return samples


@pytest.mark.parametrize(
    ("prompts", "donors"), [([7, 8, 9], [1, 2, 0]), ([7, 7, 8, 8], [2, 3, 0, 1]), ([7, 8, 7, 7], [1, 0, 1, 1])]
)
def test_mismatched_answers_are_to_other_prompts(prompts, donors):
    samples = answers(*prompts)
    found = references_module.mismatched_samples(samples, [], 10)
    assert [sample.stream.ids.tolist() for sample in found] == [
        [1, prompt, 100 + donor] for prompt, donor in zip(prompts, donors, strict=True)
    ]


def test_an_update_of_one_prompt_takes_answers_of_the_data_set():
    pool = [
        TokenRow([TokenStream(ids, ids >= 100)], "pool")
        for ids in (np.array([1, prompt, 200 + prompt]) for prompt in (7, 8, 9))
    ]
    found = references_module.mismatched_samples(answers(7), pool, 10)
    assert found[0].stream.ids.tolist() in ([1, 7, 208], [1, 7, 209])
    both = references_module.mismatched_samples(answers(7, 7), pool, 10)
    assert sorted(sample.stream.ids[2] for sample in both) == [208, 209]
    assert references_module.mismatched_samples(answers(7, 7), pool[:1], 10) == []
    assert references_module.mismatched_samples(answers(7, 7), [], 10) == []


def test_kto_on_one_prompt_warns_about_the_missing_reference_point(tiny_model, tmp_path):
    rows = [row | {"prompt": unpaired_rows(1)[0]["prompt"]} for row in unpaired_rows(2)]
    directory, _ = small.train(judged_values(tiny_model, tmp_path, rows, pair_rows(8)))
    train = small.lines(directory, "train")
    assert [(line["preference/kl"], line["preference/mismatched"]) for line in train] == [(0, 0)]
    assert "all training rows have the same prompt" in directory.report.read_text()


def test_kto_with_verdicts_of_one_kind_in_a_domain_ends_with_a_table(tiny_model, tmp_path):
    rows = unpaired_rows(8)
    kept = [row for row in rows if row["domain"] == "even" or row["label"]]
    values = judged_values(tiny_model, tmp_path, rows, kept)
    # Rows of full length: a prompt with its neighbour's answer may not outgrow the forward pass.
    values["data"]["max_tokens"] = values["learner"]["tokens_per_batch"] = 40
    directory, _ = small.train(values)
    table = json.loads((directory.path / "results.json").read_text())["tables"][0]
    trained = {row[1]: row[2] for row in table["rows"] if row[0] == "trained model"}
    assert trained["odd"] == "–"
    assert trained["even"].endswith("%")


@pytest.mark.parametrize(
    "keys", [{"loss": {"type": "dpo"}}, {"loss": {"type": "ipo"}}, {"reference": {"update_every": 1}}]
)
def test_a_policy_that_is_its_reference_ranks_nothing(keys, tiny_model, tmp_path):
    """Rounding differs between batches, and must not decide which answer has the larger reward."""
    directory, _ = small.train(recipe_values("dpo", tiny_model, tmp_path, steps=2) | keys)
    first, *later = [line["preference/accuracy"] for line in small.lines(directory, "train")]
    assert small.lines(directory, "evaluation")[0]["validation/accuracy"] == 0.5
    assert first == 0.5
    assert "reference" not in keys or later == [0.5] * len(later)
