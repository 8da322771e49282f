"""Old log-probabilities: the ratio of the first update is 1 where engine and learner differ, unless the recipe sets it otherwise."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import posttrain
from posttrain.losses.surrogates import CispoLoss, DppoLoss, GspoLoss, PpoLoss, ReinforceLoss
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.loss import CorrectionRecipe, EntropyRecipe, KlRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.training import rl
from posttrain.training.objectives import PolicyObjective, logprobs, metrics_without_pass
from posttrain.training.rl import rollouts_may_differ
from posttrain.training.updater import samples_of_episodes

from . import small
from .letters import Letters

NOISE = 0.04
"""Nats per token by which a bfloat16 engine differs from its learner."""


@pytest.fixture(scope="module")
def policy(tiny_model):
    return posttrain.Policy(tiny_model)


def rolled_out(policy):
    """Groups of three."""
    env = posttrain.make_env(Letters, max_turns=2)
    engine = posttrain.LocalEngine(policy, slots=8)
    return posttrain.rollout(engine, env, seeds=range(3), episodes_per_group=3, max_tokens=8)


@pytest.fixture
def episodes(policy):
    """Groups of three, whose rollout log-probabilities are as far from the learner's as in bfloat16."""
    policy.version = 0
    played, rng = rolled_out(policy), np.random.default_rng(0)
    for stream in (stream for episode in played for stream in episode.streams):
        noise = NOISE * rng.normal(size=int(stream.sampled.sum()))
        stream.rollout_logprobs[stream.sampled] += noise.astype(np.float32)
    return played


def gradient(policy, episodes, **loss):
    """Metrics and gradient [P] of a first update with the weights in place."""
    learner = posttrain.Learner(policy, loss=loss, learning_rate=1e-12, max_gradient_norm=1e9)
    kept = {}
    step = learner.optimizer.step

    def keep():
        kept["gradient"] = torch.cat([p.grad.flatten().clone() for _, p in policy.trainable() if p.grad is not None])
        return step()

    learner.optimizer.step = keep
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = learner.update(episodes, posttrain.advantages(episodes, "rloo"))
    return metrics, kept["gradient"]


def test_gspo_keeps_its_gradient_with_the_learners_old_logprobs(policy, episodes):
    lost, of_rollout = gradient(policy, episodes, type="gspo", old="rollout")
    policy.version = 0
    kept, of_learner = gradient(policy, episodes, type="gspo", old="learner")
    policy.version = 0
    _, exact = gradient(policy, episodes, type="reinforce", aggregation="sequence_mean")
    assert lost["policy/clipped_before_update"] > 0.2
    assert kept["policy/clipped_before_update"] == 0.0
    torch.testing.assert_close(of_learner, exact, rtol=1e-4, atol=1e-7)
    assert torch.nn.functional.cosine_similarity(of_rollout, exact, dim=0) < 0.95


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo_token"])
def test_the_first_ratio_is_one_for_every_ratio_loss(policy, episodes, kind):
    metrics, _ = gradient(policy, episodes, type=kind, old="learner", clip_low=1e-4, clip_high=1e-4)
    assert metrics["policy/clipped_before_update"] == 0.0


def test_a_bfloat16_learner_computes_old_logprobs_by_default(tiny_model):
    policy = posttrain.Policy(tiny_model, dtype="bfloat16")
    played = rolled_out(policy)
    learner = posttrain.Learner(policy, loss="gspo", learning_rate=1e-3)
    credit = posttrain.advantages(played, "rloo")
    first = learner.update(played, credit)
    assert first["policy/mismatch"] > 0
    assert first["policy/clipped_before_update"] == 0.0
    second = learner.update(played, credit)  # a PPO epoch: the old policy is still that before the first update
    assert "policy/clipped_before_update" not in second
    assert second["policy/clip_low"] + second["policy/clip_high"] > 0


def test_an_engine_that_differs_gives_a_warning_and_a_correction_measures_it(policy, episodes):
    learner = posttrain.Learner(policy, loss="ppo", learning_rate=1e-9)
    with pytest.warns(UserWarning, match="`old: learner`"):
        learner.update(episodes, posttrain.advantages(episodes, "rloo"))
    policy.version = 0
    metrics, _ = gradient(policy, episodes, type="ppo", correction={"weights": "token"})
    assert metrics["correction/mismatch"] == pytest.approx(NOISE * np.sqrt(2 / np.pi), rel=0.2)
    assert metrics["policy/clipped_before_update"] == 0.0


def test_auto_recomputes_where_engine_and_learner_can_differ():
    for loss in (PpoLoss(), GspoLoss(type="gspo"), CispoLoss()):
        assert (loss.old_source(True), loss.old_source(False)) == ("learner", "rollout")
    assert ReinforceLoss().old_source(True) == DppoLoss().old_source(True) == "rollout"
    assert ReinforceLoss(correction=CorrectionRecipe()).old_source(False) == "learner"
    assert PpoLoss(old="rollout").old_source(True) == "rollout"
    with pytest.raises(ValueError, match="needs `old: learner`"):
        PpoLoss(old="rollout", correction=CorrectionRecipe())


def test_settings_under_which_engine_and_learner_differ(policy):
    differing = ("model.dtype=bfloat16", "engine.type=vllm", "rollout.async_rollouts=1", "model.lora.dropout=0.1")
    for words, differ in [([], False), (["model.lora.rank=4"], False), *(([word], True) for word in differing)]:
        assert rollouts_may_differ(load_recipe([], words, "rl"), policy) == differ


def test_warnings_name_the_denominator_of_the_ratio():
    def named(*words):
        notes = " ".join(recipe_warnings(load_recipe([], words, "rl")))
        texts = ("loss.clip_low has no effect", "loss.old rollout", "older weights as on-policy")
        return [text in notes for text in texts]

    gspo = ["loss.type=gspo", "loss.clip_low=0.01", "model.dtype=bfloat16"]
    assert named(*gspo) == [True, False, False]
    assert named(*gspo, "loss.old=rollout") == [False, True, False]
    assert named("rollout.async_rollouts=1") == [False, False, True]
    assert not named("rollout.async_rollouts=1", "loss.old=rollout")[2]


def test_truncated_sampling_gives_a_warning():
    for given, keys in [
        ([], []),
        (["top_p=0.9"], ["rollout.sampling.top_p truncate"]),
        (["top_k=20", "min_p=0.1"], ["rollout.sampling.top_k and rollout.sampling.min_p truncate"]),
    ]:
        recipe = load_recipe([], [f"rollout.sampling.{key}" for key in given], "rl")
        found = [note for note in recipe_warnings(recipe) if "of the full vocabulary" in note]
        assert [note.partition("truncate")[0] + "truncate" for note in found] == keys


def test_entropy_and_kl_are_over_all_samples(policy, episodes):
    """Samples without credit get no forward pass, so their part comes from the log-probabilities that are there."""
    credit = posttrain.advantages(episodes, "rloo")
    kept = [0, 4]
    for number, streams in enumerate(credit.values):
        for values in streams if number not in kept else []:
            values[:] = 0.0
    learner = posttrain.Learner(policy, loss="ppo", learning_rate=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        some = learner.update(episodes, credit)
        policy.version = 0
        alone = learner.update([episodes[i] for i in kept], posttrain.Advantages([credit.values[i] for i in kept]))
    idle = np.concatenate(
        [s.rollout_logprobs[s.sampled] for i, e in enumerate(episodes) if i not in kept for s in e.streams]
    )
    n, passed = len(idle), sum(episodes[i].sampled_tokens for i in kept)
    assert some["policy/entropy"] == pytest.approx(
        (passed * alone["policy/entropy"] - idle.sum()) / (n + passed), rel=1e-5
    )
    objective = PolicyObjective(PpoLoss(), KlRecipe(coefficient=0.1, apply_to="reward"))
    samples = samples_of_episodes(episodes, 1)
    for sample in samples:
        sample.ref_logprobs = sample.stream.rollout_logprobs[sample.stream.sampled] - 0.5
    totals = metrics_without_pass(objective, samples)
    count = sum(s.sampled_tokens for s in samples)
    assert totals["policy/kl"] == pytest.approx((count * (np.exp(-0.5) - 0.5), count), rel=1e-5)
    assert metrics_without_pass(PolicyObjective(PpoLoss(), entropy=EntropyRecipe(coefficient=0.1)), samples) == {}


@pytest.mark.parametrize("credit", ["grpo", "rloo", "turn_returns"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_group_of_one_does_not_change_the_gradient(policy, episodes, aggregation, credit):
    """Groups of 1 and 3: the gradient is that of the group of 3."""
    loss = {"type": "ppo", "aggregation": aggregation} | ({"constant": 50.0} if aggregation == "constant" else {})
    single, *others = [replace(one, group=int(i > 0), index=i) for i, one in enumerate(episodes[:4])]
    for number, one in enumerate(others):
        one.streams[-1].rewards[np.flatnonzero(one.streams[-1].sampled)[-1]] += number
    norms = []
    for chosen in ([single, *others], others, [*others, single]):
        learner = posttrain.Learner(policy, loss=loss, learning_rate=1e-12, max_gradient_norm=1e9)
        policy.version = 0
        norms.append(learner.update(chosen, posttrain.advantages(chosen, credit))["optimizer/gradient_norm"])
    assert norms == pytest.approx([norms[1]] * 3, rel=1e-5)
    learner = posttrain.Learner(policy, loss=loss, learning_rate=1e-12)
    assert learner.update([single], posttrain.advantages([single], credit))["optimizer/no_signal"] == 1


def test_streams_of_an_episode_share_its_weight(policy, episodes):
    one, other = episodes[0], episodes[1]
    joined = [posttrain.Episode(**{**vars(one), "streams": [*one.streams, *other.streams]}), episodes[2]]
    samples = samples_of_episodes(joined, 1)
    weights, divisor = PolicyObjective(GspoLoss(type="gspo")).weigh(samples)
    tokens = one.sampled_tokens + other.sampled_tokens
    assert divisor == 2.0
    assert weights == pytest.approx([1 / tokens] * (len(samples) - 1) + [1 / episodes[2].sampled_tokens])


def test_a_step_scores_before_its_updates_only_what_later_updates_learn_from(tiny_model, tmp_path, monkeypatch):
    """Two updates a step: the first takes its own pass, and old log-probabilities of the second are those before both."""
    values = small.recipe_values(tiny_model, tmp_path, loss={"type": "ppo", "old": "learner"}, credit={"type": "rloo"})
    values |= small.two_steps(values) | {"entropy": {}, "kl": {}}
    values["rollout"] |= {"groups_per_step": 6}
    values["seeds"] = {"start": 0, "count": 12}
    seen = []

    def update(self, batch, step, original=rl.Components.update):
        samples = batch.samples
        before = logprobs(self.learner.updater, samples)
        totals = original(self, batch, step)
        signal = [bool(np.any(sample.advantages != 0)) for sample in samples]
        seen.append((self.learner.policy.version, samples, before, signal))
        return totals

    monkeypatch.setattr(rl.Components, "update", update)
    small.train(values)
    assert [version for version, *_ in seen] == [2, 4]
    for _, samples, before, signal in seen:
        second = sorted({sample.group for sample in samples})[1::2]
        needed = [counts and sample.group in second for sample, counts in zip(samples, signal, strict=True)]
        assert any(needed)
        assert [sample.old_logprobs is not None for sample in samples] == needed
        for sample, logps in zip(samples, before, strict=True):
            if sample.old_logprobs is not None:
                np.testing.assert_allclose(sample.old_logprobs, logps, atol=1e-5)
