"""Asynchronous rollouts: results, the bound on their staleness, and failures."""

import random
import time

import pytest

from posttrain.rollout.store import read_episodes

from . import async_runs, small
from .small import lines, messages

CONTINUE = {"async_rollouts": 2, "on_new_weights": "continue", "environment_timeout": 30.0}


@pytest.fixture
def noisy(module, monkeypatch):
    """The toy task takes a random time."""
    original, waits = module.Letters.step, random.SystemRandom()

    def step(self, action):
        if self.seed < 1000:  # not in the evaluations
            time.sleep(waits.uniform(0, 0.15))
        return original(self, action)

    monkeypatch.setattr(module.Letters, "step", step)


@pytest.mark.parametrize("n", small.cases([0, 1, 2], [2]))
def test_training_matches_one_thread_with_weights_of_n_steps_before(n, tiny_model, tmp_path):
    """0 compares the synchronous loop with an independent form of itself, which validates the comparison for 1 and 2."""
    threads, one = (async_runs.values(tiny_model, tmp_path, name, {"async_rollouts": n}) for name in ("threads", "one"))
    run, other = async_runs.train(threads), async_runs.train_with(async_runs.OneThread, one)
    assert async_runs.results(run) == async_runs.results(other)
    oldest = [line.get("policy/staleness_max", 0.0) for line in lines(run, "train")]
    assert oldest == [2.0 * min(n, step) for step in range(5)]


@pytest.mark.slow
def test_tokens_store_the_version_that_sampled_them(tiny_model, tmp_path, noisy):
    """In a run whose episodes continue with new weights."""
    continued, mixed = async_runs.train(async_runs.values(tiny_model, tmp_path, "live", CONTINUE)), 0
    for step in range(1, 6):
        for episode in read_episodes(continued.episodes / f"step_{step:06d}.train.jsonl.zst").episodes:
            own = episode.versions
            assert (own[1:] >= own[:-1]).all()
            assert episode.version == own[0] >= 2 * max(0, step - 3)
            assert own[-1] <= 2 * (step - 1)
            mixed += own[0] != own[-1]
            for stream in episode.streams:
                assert ((stream.versions >= 0) == stream.sampled).all()
    assert mixed


def test_a_guard_stops_both_sides(tiny_model, tmp_path):
    guards = {"action": "stop", "patience": 2, "thresholds": {"max_ratio_kl": 0.0}}
    run = async_runs.train(async_runs.values(tiny_model, tmp_path, "guarded", {"async_rollouts": 2}, guards=guards))
    assert [line["step"] for line in lines(run, "train")] == [1, 2]
    assert (run.path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_episodes_that_are_too_old_are_dropped_and_counted(tiny_model, tmp_path, noisy):
    rollout = {"async_rollouts": 1, "on_new_weights": "continue", "max_staleness": 0, "environment_timeout": 30.0}
    run = async_runs.train(async_runs.values(tiny_model, tmp_path, "drops", rollout | {"filter": {"type": "none"}}))
    trained = lines(run, "train")
    assert trained[0]["rollout/stale"] == 0
    assert sum(line["rollout/stale"] for line in trained) > 0
    assert all(line["rollout/kept"] == 6 - line["rollout/stale"] for line in trained)
    assert all(line.get("policy/staleness_max", 0) == 0 for line in trained)


@pytest.mark.parametrize("credit", ["rloo", "gae"])
def test_a_step_with_only_stale_episodes_makes_no_update_and_gives_a_warning(credit, tiny_model, tmp_path, monkeypatch):
    # Weights come too late for every second batch.
    monkeypatch.setattr("posttrain.rollout.weight_sync.WeightSync.poll", lambda self: None)
    rollout = {"async_rollouts": 1, "on_new_weights": "continue", "max_staleness": 0, "filter": {"type": "none"}}
    run = async_runs.train(async_runs.values(tiny_model, tmp_path, "drops", rollout, credit={"type": credit}))
    assert [line["rollout/stale"] for line in lines(run, "train")] == [0, 6, 0, 6, 0]
    assert ["optimizer/gradient_norm" in line for line in lines(run, "train")] == [True, False, True, False, True]
    assert sum("every episode is older than rollout.max_staleness = 0 updates" in line for line in messages(run)) == 2


AHEAD = [
    {"credit": {"type": "remax"}},
    {"model": {"lora": {"rank": 2}}},
    {"credit": {"type": "gae"}, "critic": {"backbone": "shared"}},
    {"rollout": {"filter": {"type": "uncertainty", "keep": 0.5}}},
    {"loss": {"type": "ppo", "correction": {"weights": "token"}}},
    {"kl": {"coefficient": 0.1, "estimator": "k1", "apply_to": "reward"}},
]
ALSO = [{"model": {"dtype": "bfloat16"}}, {"credit": {"type": "gae"}}]


@pytest.mark.parametrize("changes", small.cases(AHEAD + ALSO, AHEAD), ids=str)
def test_every_algorithm_takes_steps_ahead(changes, tiny_model, tmp_path, monkeypatch):
    # New weights never come during a batch, so the second batch is sampled with the weights of the first.
    monkeypatch.setattr("posttrain.rollout.weight_sync.WeightSync.poll", lambda self: None)
    base = async_runs.values(tiny_model, tmp_path, "small", {"async_rollouts": 1, "on_new_weights": "continue"})
    run = async_runs.train(base | small.merged(base, changes) | small.two_steps(base) | {"steps": 3})
    trained = lines(run, "train")
    assert all(line["optimizer/gradient_norm"] > 0 for line in trained)
    assert trained[0]["policy/staleness_max"] == 0 < trained[1]["policy/staleness_max"]
