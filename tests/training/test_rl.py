"""Whole RL runs on the tiny model: every algorithm runs, and failures are reported and lose no data."""

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from posttrain.errors import RunError
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.store import read_episodes

from . import small
from .small import lines, messages


def train(tiny, runs, resume=False, **changes):
    """Run the small recipe in this process; returns the run and its output."""
    return small.train(small.recipe_values(tiny, runs, **changes), resume=resume, overwrite=not resume)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The run of the small recipe, with figures, and its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_PLOTS", "1")
        return train(tiny_model, tmp_path_factory.mktemp("whole"))


def test_a_run_writes_all_its_files(whole):
    run, printed = whole
    for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "report.md", "results.json", "plots", "episodes"):
        assert (run.path / name).exists(), name
    assert "trained model" in printed
    assert AutoModelForCausalLM.from_pretrained(run.path / "model").config.model_type == "llama"
    train_lines = lines(run, "train")
    assert [line["step"] for line in train_lines] == [1, 2, 3, 4]
    assert all(line["policy/mismatch"] < 1e-4 for line in train_lines)
    assert {"policy/kl", "policy/entropy", "optimizer/gradient_norm", "tokens/reused"} <= set(train_lines[-1])
    stored = read_episodes(run.episodes / "step_000004.train.jsonl.zst")
    assert len(stored.episodes) == 6
    assert stored.advantages is not None
    evaluation = lines(run, "evaluation")
    assert [line["step"] for line in evaluation] == [0, 2, 4]
    assert all(line["n"] == 3 and line["success_low"] <= line["success"] <= line["success_high"] for line in evaluation)


def test_the_key_and_then_the_variable_decide_whether_figures_are_drawn(monkeypatch):
    for key, variable, drawn in ((None, "1", True), (None, "0", False), (True, "0", True), (False, "1", False)):
        monkeypatch.setenv("POSTTRAIN_PLOTS", variable)
        assert RlRecipe(plots=key).draws_plots == drawn
        notes = [recipe_warnings(kind(plots=key)) for kind in (EvaluateRecipe, RlRecipe)]
        assert [any(one.startswith("plots ") for one in said) for said in notes] == [key is not None, False]


TRAINED = [
    *({"credit": {"type": kind}} for kind in ("grpo", "remax", "pass_at_k", "optimal_token_baseline")),
    {"credit": {"type": "gdpo", "weights": {"return": 1.0}}},
    {"loss": {"type": "gspo"}},
    {"loss": {"type": "cispo"}},
    {"loss": {"type": "ppo", "clip_high": 0.28, "dual_clip": 3.0, "aggregation": "sequence_mean"}},
    {"loss": {"type": "gspo", "correction": {"weights": "sequence", "cap": 2.0, "reject": "geometric"}}},
    {"loss": {"type": "reinforce", "aggregation": "constant", "constant": 100}, "learner": {"updates_per_step": 1}},
    {"kl": {"coefficient": 0.1, "estimator": "k1", "apply_to": "reward"}},
    {"model": {"lora": {"rank": 2}}},
    {"model": {"dtype": "bfloat16"}},
    {"rollout": {"filter": {"type": "uncertainty", "keep": 0.5}}},
    {"rollout": {"overlong_penalty": {"limit": 18, "buffer": 6}}},
]
RELATED = ("dr_grpo", "opo", "reinforce_pp_baseline", "brpo", "arpo", "reinforce_pp", "maxrl")
OTHERS = [
    *({"credit": {"type": kind}} for kind in RELATED),
    {"loss": {"type": "gspo_token"}},
    {"loss": {"type": "ppo", "correction": {"weights": "token"}}},
    {"kl": {"coefficient": 0.1, "estimator": "k2"}},
]
"""The same code as one of the above, with another formula, which has a closed-form test."""


@pytest.mark.parametrize("changes", small.cases(TRAINED + OTHERS, TRAINED), ids=str)
def test_every_algorithm_takes_steps(changes, tiny_model, tmp_path):
    base = small.recipe_values(tiny_model, tmp_path)
    run, _ = train(tiny_model, tmp_path, **small.merged(base, changes) | small.two_steps(base))
    for line in lines(run, "train"):
        assert line["optimizer/skipped"] == 0
        assert line["optimizer/gradient_norm"] > 0
        assert 0 <= line["credit/zero_groups"] < 1


def test_a_run_can_be_extended(tiny_model, tmp_path):
    limited, _ = train(tiny_model, tmp_path, max_minutes=1e-6)
    assert lines(limited, "train") == []
    assert [line["step"] for line in lines(limited, "warning") if "max_minutes" in line["message"]] == [0]
    assert (limited.path / "model" / "model.safetensors").is_file()
    train(tiny_model, tmp_path, steps=2, optimizer={"learning_rate": 1e-3})
    longer, _ = train(tiny_model, tmp_path, resume=True, steps=4, optimizer={"learning_rate": 1e-3})
    assert [line["step"] for line in lines(longer, "train")] == [1, 2, 3, 4]
    assert len(lines(longer, "final")) == 1


@pytest.mark.parametrize(
    ("below", "reward", "message"),
    [
        (1000, None, r"6 of 6 .* group 0 \(environment seed \d\): .*ZeroDiv.*max_share = 0.5"),
        (10_000, None, r"4 of 4 evaluation episodes failed, the first on environment seed \d+: .*Zero"),
        (10_000, float("nan"), "gave the reward nan for seed"),
    ],
    ids=["training", "evaluation", "a reward of nan never becomes zero"],
)
def test_an_environment_that_always_fails_stops_the_run(
    below, reward, message, tiny_model, tmp_path, monkeypatch, module
):
    original = module.Letters.step

    def fails(self, action):
        if self.seed < below and reward is None:
            return 1 / 0
        step = original(self, action)
        return step if reward is None else replace(step, reward=reward)

    monkeypatch.setattr(module.Letters, "step", fails)
    with pytest.raises(RunError, match=message):
        train(tiny_model, tmp_path)


def test_a_failing_episode_is_counted_and_the_run_continues(tiny_model, tmp_path, monkeypatch, module):
    original, calls = module.Letters.step, [0]

    def sometimes(self, action):
        calls[0] += 1
        if calls[0] % 40 == 0:
            raise OSError("the pipe broke")
        return original(self, action)

    monkeypatch.setattr(module.Letters, "step", sometimes)
    run, _ = train(tiny_model, tmp_path)
    assert sum(line["rollout/failed"] for line in lines(run, "train")) > 0
    assert any("raised OSError: the pipe broke" in message for message in messages(run))
    assert "failed" in run.report.read_text()


@pytest.mark.parametrize("credit", ["grpo", "gae"])
def test_a_group_that_failures_reduce_to_one_episode_is_left_out(credit, tiny_model, tmp_path, monkeypatch, module):
    original, calls = module.Letters.reset, [0]

    def sometimes(self, seed):
        if seed < 1000:
            calls[0] += 1
            if calls[0] in (2, 3):  # two of the three episodes of a group, in the first step
                raise OSError("the pipe broke")
        return original(self, seed)

    monkeypatch.setattr(module.Letters, "reset", sometimes)
    values = small.recipe_values(tiny_model, tmp_path)
    changes = small.two_steps(values) | {"credit": {"type": credit}, "entropy": {"coefficient": 0.01}}
    failures = {"failures": {"max_share": 0.9}, "filter": {"type": "none"}}
    run, _ = train(tiny_model, tmp_path, **changes, rollout=values["rollout"] | failures)
    first, second = lines(run, "train")
    assert first["rollout/kept"] == 4
    assert [line.get("credit/without_baseline") for line in (first, second)] == (
        [1, 0] if credit == "grpo" else [None] * 2
    )


def test_failed_episodes_can_be_scored(tiny_model, tmp_path, monkeypatch, module):
    original = module.Letters.step

    def fails_late(self, action):
        if self.turn == 2 and self.seed == 3:
            raise ValueError("late")
        return original(self, action)

    monkeypatch.setattr(module.Letters, "step", fails_late)
    rollout = small.recipe_values(tiny_model, tmp_path)["rollout"] | {"filter": {"type": "none"}}
    rollout["failures"] = {"action": "score", "reward": -7.0, "max_share": 1.0}
    run, _ = train(tiny_model, tmp_path, rollout=rollout, steps=3)
    files = [run.episodes / f"step_{step:06d}.train.jsonl.zst" for step in (1, 2, 3)]
    stored = [episode for file in files for episode in read_episodes(file).episodes]
    failed = [e for e in stored if e.failure]
    assert failed
    assert {round(e.total_reward, 5) for e in failed} == {-7.0}


def test_a_guard_stops_the_run_and_keeps_the_best_checkpoint(tiny_model, tmp_path):
    run, _ = train(tiny_model, tmp_path, guards={"action": "stop", "patience": 2, "thresholds": {"max_ratio_kl": 0.0}})
    assert [line["step"] for line in lines(run, "train")] == [1, 2]
    assert any("stopped by a guard" in message for message in messages(run))
    assert (run.path / "model" / "model.safetensors").is_file()
    assert [line["step"] for line in lines(run, "evaluation")] == [0, 2]


def test_episodes_and_credit_can_be_read_back_with_the_groups_of_the_step(whole):
    run, _ = whole
    stored = read_episodes(run.episodes / "step_000002.train.jsonl.zst")
    totals = {}
    for episode, streams in zip(stored.episodes, stored.advantages.values, strict=True):
        (stream,) = episode.streams
        assert set(streams[0][~stream.sampled].tolist()) == {0.0}
        totals.setdefault(episode.group, []).append(float(streams[0][stream.sampled][0]))
    for advantages in totals.values():
        assert sum(advantages) == pytest.approx(0, abs=1e-5)
    assert json.loads((run.path / "results.json").read_text())["policies"][-1]["policy"] == "trained model"


def test_remax_drops_a_group_whose_greedy_episode_failed(tiny_model, tmp_path, monkeypatch, module):
    original, resets = module.Letters.step, [0]

    def fails_when_greedy(self, action):
        # The greedy episodes of a step are played after the two groups of three.
        resets[0] += self.turn == 0
        if resets[0] == 7 + 4 + 3:
            raise ValueError("the greedy one")
        return original(self, action)

    monkeypatch.setattr(module.Letters, "step", fails_when_greedy)
    rollout = small.recipe_values(tiny_model, tmp_path)["rollout"] | {"filter": {"type": "none"}}
    run, _ = train(tiny_model, tmp_path, credit={"type": "remax"}, rollout=rollout, steps=1)
    (message,) = [message for message in messages(run) if "remax" in message]
    assert message[:8] == "groups ["
    assert message.endswith("] are left out: the greedy episode that remax compares with failed or has no reward")
    assert lines(run, "train")[0]["rollout/kept"] == 3


@pytest.mark.slow
def test_ppo_raises_the_return(tiny_model, tmp_path):
    """More different letters after training, on held-out tasks, with one episode per task: the critic alone to compare with."""
    optimizer, learner = {"learning_rate": 3e-3}, {"tokens_per_batch": 8000, "updates_per_step": 2}
    changes = {"credit": {"type": "gae"}, "critic": {"optimizer": optimizer}, "steps": 30, "learner": learner}
    rollout = {"groups_per_step": 32, "episodes_per_group": 1, "tokens_per_turn": 8, "tokens_per_episode": 700}
    changes |= {"kl": {"coefficient": 0.0}, "entropy": {"coefficient": 0.0}, "seeds": {"start": 0, "count": 100}}
    held_out = {"every": 30, "seeds": {"start": 1000, "count": 64}, "final_seeds": {"start": 2000, "count": 30}}
    changes["evaluation"] = held_out | {"sampling": {"temperature": 1.0}, "metric": "return"}
    run, _ = train(tiny_model, tmp_path, optimizer=optimizer, rollout=rollout, **changes)
    before, after = lines(run, "evaluation")[0], lines(run, "evaluation")[-1]
    assert after["return_low"] > before["return_high"]
