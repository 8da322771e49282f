"""PPO with a critic, end to end on the tiny model: learning, updates before the policy, and resuming."""

import json

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from posttrain.distributed.tensors import read_all
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import LearnerRecipe, ModelRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.critic import CriticLearner
from posttrain.training.objectives import ValueObjective
from posttrain.training.updater import pack
from tests.conftest import make_tokenizer
from tests.models.families import save_family

from . import small
from .preferences import write_jsonl
from .test_batches import sample
from .test_rl import lines, train

PPO = {"credit": {"type": "gae"}, "critic": {"optimizer": {"learning_rate": 3e-3}}}

REWARD = '''def kind(answer, **row):
    """One point where the prompt says dragon, for any answer."""
    return 1.0 if row["word"] == "dragon" else 0.0
'''


def foretold(tiny, folder, **changes):
    """A task whose return is in the prompt: the policy cannot change it, and a critic can predict it."""
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"Say {word} {n}.", "word": word} for n in range(20) for word in ("dragon", "lake")]
    return {
        "environment": {
            "type": "text_task",
            "prompts": write_jsonl(folder / "prompts.jsonl", rows),
            "reward": f"{folder / 'rewards.py'}:kind",
            "success_reward": None,
        },
        "seeds": {"start": 0, "count": 30},
        "rollout": {"groups_per_step": 8, "episodes_per_group": 1, "tokens_per_turn": 8, "tokens_per_episode": 90},
        "kl": {"coefficient": 0.0},
        "entropy": {"coefficient": 0.0},
        "evaluation": {"every": 0, "seeds": {"start": 30, "count": 4}, "final_seeds": {"start": 34, "count": 6}},
    } | changes


@pytest.mark.slow
def test_the_critic_learns_to_explain_predictable_returns(tiny_model, tmp_path):
    critic = {"clip": None, "optimizer": {"learning_rate": 1e-2, "max_gradient_norm": 10.0}}
    learner = {"epochs_per_step": 4, "tokens_per_batch": 4096}
    task = foretold(tiny_model, tmp_path)
    run, _ = train(tiny_model, tmp_path, credit={"type": "gae"}, critic=critic, learner=learner, steps=25, **task)
    explained = [line["critic/explained_variance"] for line in lines(run, "train")]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # its head starts at zero
    assert min(explained[-5:]) > 0.8
    losses = [line["critic/loss"] for line in lines(run, "train")]
    assert np.mean(losses[-5:]) < 0.2 * losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"critic": {"lora": {"rank": 2}}},
        {"critic": {"dtype": "bfloat16", "clip": None}},
        {"credit": {"type": "gae", "gae_lambda": 1.0, "discount": 0.99, "whiten": False}},
        {"credit": {"type": "gae", "critic_lambda": 1.0, "length_alpha": 0.3}},
        {"kl": {"coefficient": 0.1, "estimator": "k1", "apply_to": "reward", "target": 0.01}},
        {"model": {"lora": {"rank": 2}}},
        {"learner": {"epochs_per_step": 2, "updates_per_step": 2, "tokens_per_batch": 1500}},
        {"credit": {"type": "rloo"}},
        pytest.param({"credit": {"type": "grpo"}}, marks=pytest.mark.slow),
        pytest.param({"credit": {"type": "reinforce_pp"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_variants_take_steps_and_others_run_by_one_key(changes, tiny_model, tmp_path):
    base = small.recipe_values(tiny_model, tmp_path)
    merged = {key: base.get(key, {}) | value if key != "credit" else value for key, value in (PPO | changes).items()}
    run, _ = train(tiny_model, tmp_path, **merged | small.two_steps(base))
    for line in lines(run, "train"):
        assert line["optimizer/skipped"] == 0
        assert line["optimizer/gradient_norm"] > 0
        assert ("critic/loss" in line) == (merged["credit"]["type"] == "gae")
        if "critic/loss" in line:
            assert line["critic/gradient_norm"] > 0
            assert line["critic/skipped"] == 0


def test_the_policy_waits_for_the_critics_first_updates(tiny_model, tmp_path):
    critic = {"updates_before_policy": 3, "optimizer": {"learning_rate": 1e-3}}
    run, _ = train(
        tiny_model,
        tmp_path,
        credit={"type": "gae"},
        critic=critic,
        steps=3,
        checkpoint={"every": 1, "keep": 9, "keep_state": "always"},
    )
    first, second, third = lines(run, "train")
    assert "loss/policy" not in first  # its two updates, and the first of the next step's two, are the critic's alone
    assert second["critic/gradient_norm"] > 0
    assert third["loss/policy"] != 0
    versions = [json.loads((path / "state.json").read_text())["version"] for path in sorted(run.checkpoints.glob("*"))]
    assert versions == [0, 0, 1, 3]
    weights = [(path / "policy" / "model.safetensors").read_bytes() for path in sorted(run.checkpoints.glob("*"))]
    assert weights[0] == weights[1]
    assert weights[1] != weights[2]


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward") / "model"
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=5)
    model.export(directory)
    return directory


def test_a_critic_starts_from_a_reward_model_with_its_head(tiny_model, reward_model, tmp_path):
    run, _ = train(tiny_model, tmp_path, credit={"type": "gae"}, critic={"path": str(reward_model)}, steps=1)
    assert abs(lines(run, "train")[0]["critic/value"]) > 1e-3


def test_another_tokenizer_is_refused(tiny_model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    other = save_family(tmp_path / "other", "llama", tokenizer)
    with pytest.raises(InputError, match=r"critic\.path: .*other does not have the tokenizer of "):
        train(tiny_model, tmp_path, credit={"type": "gae"}, critic={"path": str(other)})


def test_a_warm_up_that_never_ends_is_refused():
    with pytest.raises(ValidationError, match=r"`critic.updates_before_policy` \(8\) .* none of the run's 8"):
        RlRecipe(steps=8, credit={"type": "gae"}, critic={"updates_before_policy": 8})


PLACES = {
    "critic": "posttrain.training.critic:CriticUpdater.update",
    "values": "posttrain.training.critic:CriticLearner.estimate_values",
    "optimizer": "posttrain.training.updater:Optimizer.step",
    "tensors": "torch:save",
    "rollout": "posttrain.engines.local.engine:LocalEngine._step",
}


def _ppo_values(tiny, runs):
    critic = {"updates_before_policy": 1, "clip": 0.1, "lora": {"rank": 2, "dropout": 0.1}}
    critic["optimizer"] = {"learning_rate": 1e-3, "schedule": "cosine"}
    return small.recipe_values(tiny, runs, credit={"type": "gae"}, critic=critic)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    assert small.run(_ppo_values(tiny_model, runs)) == 0, (runs / "log.txt").read_text()
    return runs / "small"


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("critic", 4),
        *(
            pytest.param(*death, marks=pytest.mark.slow)
            for death in (("values", 3), ("optimizer", 7), ("tensors", 3), ("rollout", 90))
        ),
    ],
)
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, count, tiny_model, tmp_path, uninterrupted):
    values = _ppo_values(tiny_model, tmp_path)
    assert small.run(values, die_at=(PLACES[place], count)) == -9
    assert small.run(values, resume=(tmp_path / "small").exists()) == 0, (tmp_path / "log.txt").read_text()
    small.assert_same(tmp_path / "small", uninterrupted)
    last = sorted((tmp_path / "small" / "checkpoints").glob("step_*"))[-1]
    assert any(name.startswith("critic/weights/") and "lora" in name for name in read_all(last / "tensors"))
    assert json.loads((last / "state.json").read_text())["checkpointables"]["critic"]["optimizer"]["updates"] == 8


def test_the_value_gradient_does_not_depend_on_the_split(tiny_model, reward_model, monkeypatch):
    def gradients(budget):
        recipe = TypeAdapter(RlRecipe).validate_python(
            {"credit": {"type": "gae"}, "critic": {"path": str(reward_model)}, "model": {"path": str(tiny_model)}}
        )
        batches = LearnerRecipe(tokens_per_batch=budget)
        critic = CriticLearner(recipe.critic, recipe.credit, Policy(recipe.model), batches, 1)
        draws, samples = np.random.default_rng(0), []
        for _ in range(5):
            one = sample(draws.integers(3, 250, 8), draws.integers(3, 250, draws.integers(2, 30)), "row")
            one.values, one.returns = draws.normal(size=(2, one.sampled_tokens)).astype(np.float32)
            samples.append(one)
        found = small.kept_gradients(monkeypatch)
        critic.updater.learner.update(samples, ValueObjective(0.2))
        return found, len(pack(samples, budget))

    whole, one = gradients(4096)
    parts, several = gradients(45)
    assert one == 1 < several
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=2e-6, rtol=1e-4)


@pytest.mark.slow
def test_ppo_raises_the_return(tiny_model, tmp_path):
    """As `test_training_raises_the_return`, with one episode per task: nothing to compare with but the critic."""
    run, _ = train(
        tiny_model,
        tmp_path,
        credit={"type": "gae"},
        critic={"optimizer": {"learning_rate": 3e-3}},
        steps=30,
        kl={"coefficient": 0.0},
        entropy={"coefficient": 0.0},
        seeds={"start": 0, "count": 100},
        rollout={"groups_per_step": 32, "episodes_per_group": 1, "tokens_per_turn": 8, "tokens_per_episode": 700},
        learner={"tokens_per_batch": 8000, "updates_per_step": 2},
        optimizer={"learning_rate": 3e-3},
        evaluation={
            "every": 30,
            "seeds": {"start": 1000, "count": 64},
            "final_seeds": {"start": 2000, "count": 30},
            "sampling": {"temperature": 1.0},
            "metric": "return",
        },
    )
    before, after = lines(run, "evaluation")[0], lines(run, "evaluation")[-1]
    assert after["return_low"] > before["return_high"]
