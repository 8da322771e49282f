"""Unit-level reward models: where rewards are read, the loss on them, whole runs, and the exported file."""

import json
import shutil

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from posttrain.data.rendering import TokenStream
from posttrain.data.tokens import TokenRow
from posttrain.errors import InputError
from posttrain.losses.reward import unit_entropy_penalty
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.loss import RewardLossRecipe
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.units import StoredUnits, UnitRewardsRecipe, stored_units
from posttrain.training.objectives import RewardObjective, reward_forward
from posttrain.training.rows import samples_of_row
from posttrain.training.unit_rewards import UnitReader, UnitRewardObjective, unit_reward_forward, unit_rewards
from tests.training import small
from tests.training.preferences import recipe_values
from tests.training.test_preferences import pair_samples
from tests.training.test_reward_scorer import episode, other_tokenizer, scorer

TOKEN, OUTCOME, ENTROPY = {"type": "token"}, {"type": "outcome"}, {"type": "entropy", "threshold": 5.9355}


def recipe(segmenter, **keys) -> UnitRewardsRecipe:
    return UnitRewardsRecipe.model_validate({"segmenter": segmenter} | keys)


def made(path, segmenter, **keys):
    """A reward model of random weights at `path` with its reader."""
    model = RewardModel(ModelRecipe(path=str(path), **keys), seed=1)
    units = stored_units(recipe(segmenter), str(path))
    model.set_units(units)
    return model, UnitReader(model, units, 150)


@pytest.mark.parametrize("segmenter", [TOKEN, ENTROPY, {"type": "sentence"}])
def test_a_units_reward_is_that_of_the_answer_cut_after_it(segmenter, tiny_model):
    model, reader = made(tiny_model, segmenter)
    samples = pair_samples()
    with torch.no_grad():
        found = unit_rewards(model, reader, samples, 150, "budget")
        for sample, rewards, ends in zip(samples, found, reader.ends(samples), strict=True):
            stream = sample.stream
            assert len(rewards) == len(ends)
            assert ends[-1] == len(stream) - 1
            for reward, end in zip(rewards, ends, strict=True):
                alone = model.rewards([stream.ids[: end + 1]], [stream.sampled[: end + 1]])
                assert reward == pytest.approx(alone.item(), abs=1e-5)
    assert max(map(len, found)) > 1


def test_entropy_units_begin_where_the_initial_model_has_high_entropy(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    ids = np.array(
        policy.tokenizer.encode("You walk on a frozen lake. Reach the goal, row 1 column 2, and keep off it.")
    )
    sampled = np.arange(len(ids)) >= 6
    sample = samples_of_row(TokenRow([TokenStream(ids, sampled)], "row"))[0]
    with torch.no_grad():
        entropies = policy.score([ids], [sampled], 1.0, 64).entropies.numpy()
    threshold = float(np.median(entropies))
    _, reader = made(tiny_model, {"type": "entropy", "threshold": threshold})
    starts = np.flatnonzero(entropies > threshold) + 6
    wanted = [*(start - 1 for start in starts if start > 6), len(ids) - 1]
    assert reader.ends([sample])[0].tolist() == wanted
    assert 3 < len(wanted) < len(entropies)
    uncached = reader.ends(pair_samples())
    reader.remember(pair_samples())
    reader.reference = None  # would fail if asked again
    assert all(map(np.array_equal, uncached, reader.ends(pair_samples())))


@pytest.mark.parametrize("form", ["length_fair", "published"])
def test_no_split_changes_the_gradient(form, tiny_model, monkeypatch):
    model, reader = made(tiny_model, TOKEN)
    forward, loss = unit_reward_forward(model, reader), RewardLossRecipe(center_rewards_coefficient=0.01)
    objective = UnitRewardObjective(loss, recipe(TOKEN, entropy_coefficient=0.5, entropy_form=form))
    whole = small.assert_no_split_changes_gradients(model, forward, pair_samples, objective, monkeypatch)
    even = UnitRewardObjective(loss, recipe(TOKEN))
    plain, _ = small.gradients(model, forward, pair_samples(), even, monkeypatch)
    assert any(not torch.allclose(whole[name], plain[name], rtol=1e-2) for name in whole)


def test_coefficient_0_is_the_plain_loss_bit_for_bit(tiny_model, monkeypatch):
    """And a single unit per answer, with or without regulariser, is the plain reward model."""

    loss = RewardLossRecipe(center_rewards_coefficient=0.01)
    model, reader = made(tiny_model, OUTCOME)
    plain, _ = small.gradients(model, reward_forward(model), pair_samples(), RewardObjective(loss), monkeypatch, 150)
    for form in ("length_fair", "published"):
        objective = UnitRewardObjective(loss, recipe(OUTCOME, entropy_form=form))
        forward = unit_reward_forward(model, reader)
        found, _ = small.gradients(model, forward, pair_samples(), objective, monkeypatch, 150)
        assert plain.keys() == found.keys()
        assert all(torch.equal(plain[name], found[name]) for name in plain)
    model, reader = made(tiny_model, TOKEN)
    output = unit_reward_forward(model, reader)(pair_samples())
    objective = UnitRewardObjective(loss, recipe(TOKEN))
    total, _ = objective(output, pair_samples(), [])
    assert torch.equal(total, objective.compare(output, pair_samples()).losses.sum())
    uneven = UnitRewardObjective(loss, recipe(TOKEN, entropy_coefficient=0.3))(output, pair_samples(), [])[0]
    expected = total + 0.3 * unit_entropy_penalty(output.rewards, output.stream, output.streams, "length_fair").sum()
    assert torch.equal(uneven, expected)
    assert uneven != total


@pytest.mark.parametrize(
    "segmenter", [pytest.param(TOKEN, id="token", marks=pytest.mark.slow), pytest.param(ENTROPY, id="entropy")]
)
def test_a_run_learns_and_its_model_has_the_reported_scores(segmenter, tiny_model, tiny_policy, tmp_path):
    units = {"segmenter": segmenter, "entropy_coefficient": 0.02}
    directory, _ = small.train(recipe_values("reward", tiny_model, tmp_path, epochs=6, units=units))
    train = small.lines(directory, "train")
    assert all(1 <= line["units/effective"] <= line["units/per_answer"] + 1e-6 for line in train)
    assert all("loss/unevenness" in line for line in train)
    (final,) = small.lines(directory, "final")
    assert final["test/accuracy"] > 0.6
    path = directory.path / "model"
    kept = json.loads((path / "config.json").read_text())["posttrain_units"]
    assert kept["segmenter"]["type"] == segmenter["type"]
    assert kept["reference"] == (str(tiny_model) if segmenter is ENTROPY else None)
    model = RewardModel(ModelRecipe(path=str(path)), new_head=False)
    assert model.units == StoredUnits.model_validate(kept)
    assert model.statistics == pytest.approx((final["test/reward_mean"], final["test/reward_std"]), rel=0.1)
    # In RL, an episode's reward is the mean over its units, on the sampled tokens or on those of another tokenizer.
    made_scorer = scorer(path, tiny_policy, normalize="none")
    played = episode(tiny_policy, ["Goal Goal, row 1 column 2"])
    reader = UnitReader(model, model.units, 500)
    (rewards,) = unit_rewards(model, reader, [made_scorer._sample(played)], 500, "budget")
    assert len(rewards) > 1
    assert made_scorer.scores([played]) == pytest.approx([rewards.mean()], abs=1e-6)


def test_another_tokenizer_reads_all_answers(tiny_model, tiny_policy, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    (base / "generation_config.json").unlink(missing_ok=True)
    other_tokenizer("template").save_pretrained(base)
    model, _ = made(base, {"type": "turn"})
    model.export(tmp_path / "model")
    made_scorer = scorer(tmp_path / "model", tiny_policy, normalize="none")
    assert not made_scorer.same_tokens
    sample = made_scorer._sample(episode(tiny_policy, ["Up", "no, Down"]))
    assert len(made_scorer.reader.ends([sample])[0]) == 2


def test_the_units_of_a_model_survive_adapters_and_are_dropped_by_a_plain_run(tiny_model, tmp_path):
    model, _ = made(tiny_model, {"type": "steps", "closing": "^B", "max_units": 4}, lora=LoraRecipe(rank=2))
    wanted = model.units
    model.export(tmp_path / "merged")
    assert RewardModel(ModelRecipe(path=str(tmp_path / "merged")), new_head=False).units == wanted
    model, _ = made(tiny_model, {"type": "sentence"}, lora=LoraRecipe(rank=2, export="adapter"))
    model.export(tmp_path / "adapters")
    again = RewardModel(ModelRecipe(path=str(tmp_path / "adapters")), new_head=False)
    assert again.units.segmenter.type == "sentence"
    directory, _ = small.train(recipe_values("reward", tmp_path / "merged", tmp_path, epochs=1))
    assert RewardModel(ModelRecipe(path=str(directory.path / "model")), new_head=False).units is None


def test_wrong_units_are_refused_in_one_sentence(tiny_model, tmp_path):
    model, _ = made(tiny_model, TOKEN)
    model.export(tmp_path / "model")
    units = recipe(ENTROPY)
    with pytest.raises(InputError, match=r"needs the entropies of a language model, and .* is a reward model"):
        UnitReader(model, stored_units(units, str(tmp_path / "model")), 100)
    with pytest.raises(InputError, match=r"^units\.segmenter: the reference model .*gone.* cannot be loaded"):
        UnitReader(model, stored_units(units, str(tmp_path / "gone")), 100)
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace('"token"', '"tokens"'))
    with pytest.raises(InputError, match=r"config\.json: invalid `posttrain_units` at 'segmenter'"):
        assert RewardModel(ModelRecipe(path=str(tmp_path / "model")), new_head=False).units
    with pytest.raises(ValidationError):
        recipe(TOKEN, aggregate="sum")
    with pytest.raises(ValidationError):
        recipe(TOKEN, entropy_coefficient=-0.1)
