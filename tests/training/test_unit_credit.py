"""Credit of units in training: values by every way of asking, and whole runs."""

import json

import numpy as np
import pytest
import torch

from posttrain.credit.units.mixing import UnitAdvantages
from posttrain.credit.units.spans import Spans, with_units
from posttrain.errors import InputError, RunError
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import StoredUnits, WholeUnits
from posttrain.rollout.store import episodes_file, read_episodes
from posttrain.training.rows import stream_of
from posttrain.training.unit_credit import JudgedAnswer, UnitValuer, unit_metrics
from tests.training import small
from tests.training.test_text_task_rl import run, values

TOKENS = {"type": "token"}


@pytest.fixture(scope="module")
def model(tiny_model) -> RewardModel:
    return RewardModel(ModelRecipe(path=str(tiny_model)), seed=5)


@pytest.fixture(scope="module")
def unit_reward_model(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("unit_reward") / "model"
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=6)
    model.set_statistics(0.1, 0.5)
    model.set_units(StoredUnits(segmenter=WholeUnits(type="token")))
    model.export(directory)
    return directory


def scale(raw: float) -> float:
    return 2 * raw - 1


def outcome(model, stream) -> float:
    with torch.no_grad():
        return scale(float(model.rewards([stream.ids], [stream.sampled])))


def answers(model) -> list[JudgedAnswer]:
    """An answer that ended, one that was cut off, and one of two turns."""
    rng = np.random.default_rng(0)
    found = []
    for number, (prompt, body) in enumerate([(6, 12), (4, 9), (5, 14)]):
        ids = rng.integers(3, 250, prompt + body)
        sampled = np.arange(prompt + body) >= prompt
        if number != 1:
            ids[-1] = model.end_token
        if number == 2:
            ids[10] = model.end_token
            sampled[11:14] = False  # what the environment said
        stream = stream_of(ids, sampled)
        units = Spans.from_cuts(int(sampled.sum()), np.array([3, 6, 8]))
        found.append(JudgedAnswer(stream, units, outcome(model, stream), f"answer {number}"))
    return found


def test_one_pass_equals_separate_passes(model):
    made = answers(model)
    valuer, other = UnitValuer(model, 30, scale), UnitValuer(model, 30, scale)
    for one, apart, answer in zip(valuer.prefixes(made, True), other.prefixes(made, False), made, strict=True):
        np.testing.assert_allclose(one, apart, atol=1e-4)
        assert len(one) == len(answer.units) + 1
        assert one[-1] == answer.outcome
        assert np.ptp(one) > 1e-3
    assert valuer.forwards == 3
    assert other.forwards == sum(len(answer.units) for answer in made)
    assert valuer.tokens < other.tokens


def test_the_whole_answer_rendered_is_the_answer(model):
    ids = UnitValuer(model, 30, scale).ids
    for answer in answers(model):
        every = np.ones(len(answer.units), dtype=bool)
        np.testing.assert_array_equal(with_units(answer.stream, answer.units, every, ids), answer.stream.ids)
        empty = with_units(answer.stream, answer.units, ~every, ids)
        assert empty[-1] == model.end_token  # also of the answer that was cut off
        kept = answer.stream.ids[~answer.stream.sampled]
        assert [token for token in empty.tolist() if token != model.end_token] == [
            token for token in kept.tolist() if token != model.end_token
        ]


def test_values_without_units_are_the_scores_of_their_texts(model):
    made = answers(model)
    valuer = UnitValuer(model, 64, scale)
    for answer, found in zip(made, valuer.without(made), strict=True):
        units = np.arange(len(answer.units))
        for kept, value in zip([*(units != unit for unit in units), units < 0], found, strict=True):
            ids = with_units(answer.stream, answer.units, kept, valuer.ids)
            with torch.no_grad():
                alone = scale(float(model.rewards([ids], [np.arange(len(ids)) > 1])))
            assert value == pytest.approx(alone, abs=1e-5)


def recipe(tiny_model, folder, reward_model, unit_credit, **changes):
    own = values(tiny_model, folder)
    own["environment"].pop("reward")
    own |= {"reward": {"path": str(reward_model)}, "credit": {"type": "gae", "gae_lambda": 0.9}}
    own |= {"critic": {"optimizer": {"learning_rate": 1e-3}}, "unit_credit": unit_credit}
    return own | {"rollout": own["rollout"] | {"tokens_per_turn": 12}} | changes


REWARDED = [
    {"type": "prefix", "segmenter": TOKENS},
    {"type": "prefix", "segmenter": {"type": "entropy", "threshold": 5.93}, "probe": "separate", "placement": "even"},
    {"type": "drca_published", "segmenter": TOKENS},
]
ADVANTAGES = [{"type": "loo", "segmenter": {"type": "entropy", "threshold": 5.93}}]


QUICK = (REWARDED[1], *ADVANTAGES)
"""Each segmenter, probe and placement, and each kind without a test of its own."""


@pytest.mark.parametrize("credit", small.cases(REWARDED + ADVANTAGES, QUICK), ids=lambda credit: credit["type"])
def test_every_credit_trains(credit, tiny_model, reward_model, tmp_path):
    _, lines = run(recipe(tiny_model, tmp_path, reward_model, credit, steps=1))
    (line,) = [line for line in lines if line["kind"] == "train"]
    assert line["units/per_answer"] > 1
    assert np.isfinite(line["units/spread"])
    assert line["optimizer/gradient_norm"] > 0
    if credit["type"] == "prefix":
        assert line["units/residual"] < 1e-5
    assert line["units/forwards"] > 0


def trained_bits(tiny_model, folder, judge, credit):
    directory, _ = run(recipe(tiny_model, folder, judge, credit, steps=1))
    # The state of torch's generator goes on from run to run.
    return {name: bits for name, bits in small.weights(directory.path).items() if not name.startswith("random")}


@pytest.fixture(scope="module")
def plain_bits(tiny_model, reward_model, tmp_path_factory):
    """What plain PPO learns from the score of the reward model."""
    return trained_bits(tiny_model, tmp_path_factory.mktemp("plain"), reward_model, None)


@pytest.mark.parametrize("kind", ["prefix", "loo", "drca_published", "unit_rewards"])
def test_beta_0_is_plain_ppo_to_the_bit(kind, tiny_model, reward_model, unit_reward_model, plain_bits, tmp_path):
    if kind == "unit_rewards":
        (tmp_path / "plain").mkdir()
        plain_bits = trained_bits(tiny_model, tmp_path / "plain", unit_reward_model, None)
        found = trained_bits(tiny_model, tmp_path, unit_reward_model, {"type": kind, "beta": 0})
    else:
        found = trained_bits(tiny_model, tmp_path, reward_model, {"type": kind, "beta": 0, "segmenter": TOKENS})
    assert found == plain_bits


def test_rewards_of_units_are_placed_in_their_units(tiny_model, unit_reward_model, tmp_path):
    (tmp_path / "params.json").write_text(json.dumps({"m": {"d": {"token": {"avg": {"0": [0.1, 0.05, 0.2, 0.6]}}}}}))
    credit = {"type": "unit_rewards", "normalizer": str(tmp_path / "params.json"), "placement": "end"}
    _, lines = run(recipe(tiny_model, tmp_path, unit_reward_model, credit))
    line = next(line for line in lines if line["kind"] == "train")
    assert line["units/tokens_per_unit"] == 1
    assert not [line for line in lines if line["kind"] == "warning" and "hardly explains" in line["message"]]
    (tmp_path / "d.json").write_text(json.dumps({"r2": {"mean": -0.2, "std": None}}))
    _, weak = run(recipe(tiny_model, tmp_path, unit_reward_model, credit, name="weak", steps=1))
    assert [line for line in weak if line["kind"] == "warning" and "hardly explains" in line["message"]]
    assert line["units/forwards"] == 0  # what was read when the episodes were scored is not read again


def test_a_reward_model_that_cannot_give_the_credit_is_named(tiny_model, reward_model, unit_reward_model, tmp_path):
    with pytest.raises(InputError, match="train a reward model with `units`"):
        run(recipe(tiny_model, tmp_path, reward_model, {"type": "unit_rewards"}, name="a"))
    with pytest.raises(InputError, match="rewards units, and removing some"):
        run(recipe(tiny_model, tmp_path, unit_reward_model, {"type": "prefix"}, name="b"))
    given = {"type": "unit_rewards", "normalizer": str(tmp_path / "params.json")}
    with pytest.raises(InputError, match=r"^unit_credit\.normalizer.* params\.json cannot be read|params\.json"):
        run(recipe(tiny_model, tmp_path, unit_reward_model, given, name="c"))
    other = {"m": {"d": {"peak": {"avg": {"1.5": [0.1, 0.05, 0.2, 0.6]}}}}}
    (tmp_path / "params.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"has the fit m > d > peak > avg > 1\.5, but .* rewards units of token"):
        run(recipe(tiny_model, tmp_path, unit_reward_model, given, name="d"))


def test_the_error_about_nonfinite_values_names_the_episode(tiny_model, reward_model, tmp_path, monkeypatch):
    monkeypatch.setattr(UnitValuer, "_scaled", lambda self, values: np.full(len(values), np.nan))
    with pytest.raises(RunError, match=r"step 1 group 0 episode 0: the reward model's values"):
        run(recipe(tiny_model, tmp_path, reward_model, {"type": "loo", "segmenter": TOKENS}))


def test_remax_compares_rewards_in_one_unit(tiny_model, reward_model, tmp_path):
    given = recipe(tiny_model, tmp_path, reward_model, None, credit={"type": "remax"}, steps=1)
    given["reward"] |= {"normalize": "running"}
    directory, _ = run(given)
    stored = read_episodes(episodes_file(directory.episodes, 1, "train"))
    raw = [episode.turns[-1].info["reward_model"] for episode in stored.episodes]
    mean, std = np.mean(raw), np.std(raw, ddof=1)
    by_group: dict[int, set[float]] = {}
    for episode, streams, value in zip(stored.episodes, stored.advantages.values, raw, strict=True):
        own = float(streams[0][episode.streams[0].sampled][0])
        by_group.setdefault(episode.group, set()).add(round(((value - mean) / std - own) * std + mean, 4))
    # What is subtracted is one number in a group, and, back in the model's own units, as its rewards are.
    assert all(len(found) == 1 for found in by_group.values())
    assert all(min(raw) - 2 < next(iter(found)) < max(raw) + 2 for found in by_group.values())


THINKING = Spans(np.array([0, 4, 7, 11, 13]), np.array([False, True, True, False]))
"""Four tokens of thinking, two units of three and four tokens, and a closing remark of two."""


def test_metrics_are_those_of_units():
    metrics = unit_metrics([UnitAdvantages(THINKING, np.array([9.0, 1.0, -2.0, 9.0]), 3.0, 0.0), None])
    assert metrics["units/per_answer"] == 2
    assert metrics["units/tokens_per_unit"] == 3.5
    assert metrics["units/credit"] == -0.5
    assert metrics["units/spread"] == 1.5
    assert metrics["units/negative"] == 0.5
