"""PPO with a critic, end to end on the tiny model: learning, updates before the policy, and resuming."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.model import LearnerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.critic import open_critic
from posttrain.training.objectives import ValueObjective
from posttrain.training.updater import pack
from tests.conftest import make_tokenizer
from tests.models.families import save_family

from . import small
from .preferences import write_jsonl
from .small import lines
from .test_batches import sample
from .test_rl import train

SHARED = {"backbone": "shared", "optimizer": {"learning_rate": 1e-2}}
PPO = {"credit": {"type": "gae"}, "critic": {"optimizer": {"learning_rate": 3e-3}}}

REWARD = '''def kind(answer, **row):
    """One point where the prompt says dragon, for any answer."""
    return 1.0 if row["word"] == "dragon" else 0.0
'''


def foretold(folder, **changes):
    """A task whose return is in the prompt: the policy cannot change it, and a critic can predict it."""
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"Say {word} {n}.", "word": word} for n in range(20) for word in ("dragon", "lake")]
    environment = {"type": "text_task", "prompts": write_jsonl(folder / "prompts.jsonl", rows)}
    environment |= {"reward": f"{folder / 'rewards.py'}:kind", "success_reward": None}
    task = {"environment": environment, "kl": {"coefficient": 0.0}, "entropy": {"coefficient": 0.0}}
    task["rollout"] = {"groups_per_step": 8, "episodes_per_group": 1, "tokens_per_turn": 8, "tokens_per_episode": 90}
    held_out = {"seeds": {"start": 30, "count": 4}, "final_seeds": {"start": 34, "count": 6}}
    return task | {"seeds": {"start": 0, "count": 30}, "evaluation": {"every": 0} | held_out} | changes


RATES = {"separate": ({"optimizer": {"learning_rate": 1e-2}}, 25, {})}
SHARED_RATES = SHARED | {"coefficient": 1.0, "optimizer": {"learning_rate": 3e-2}}
RATES["shared"] = (SHARED_RATES, 20, {"optimizer": {"learning_rate": 3e-3}})


@pytest.mark.slow
@pytest.mark.parametrize("backbone", RATES)
def test_the_critic_learns_to_explain_predictable_returns(backbone, tiny_model, tmp_path):
    critic, steps, changes = RATES[backbone]
    critic = critic | {"clip": None, "optimizer": critic["optimizer"] | {"max_gradient_norm": 10.0}}
    learner = {"epochs_per_step": 4, "tokens_per_batch": 4096}
    task = foretold(tmp_path, **changes)
    run, _ = train(tiny_model, tmp_path, credit={"type": "gae"}, critic=critic, learner=learner, steps=steps, **task)
    explained = [line["critic/explained_variance"] for line in lines(run, "train")]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # its head starts at zero
    assert min(explained[-5:]) > 0.8
    if backbone == "separate":
        losses = [line["critic/loss"] for line in lines(run, "train")]
        assert np.mean(losses[-5:]) < 0.2 * losses[0]


SEPARATE = [
    {},
    {"critic": {"lora": {"rank": 2}}},
    {"critic": {"dtype": "bfloat16", "clip": None}},
    {"credit": {"type": "gae", "gae_lambda": 1.0, "discount": 0.99, "whiten": False}},
    {"credit": {"type": "gae", "critic_lambda": 1.0, "length_alpha": 0.3}},
    {"kl": {"coefficient": 0.1, "estimator": "k1", "apply_to": "reward", "target": 0.01}},
    {"model": {"lora": {"rank": 2}}},
    {"learner": {"epochs_per_step": 2, "updates_per_step": 2, "tokens_per_batch": 1500}},
    {"credit": {"type": "rloo"}},
    {"credit": {"type": "grpo"}},
    {"credit": {"type": "reinforce_pp"}},
]
ON_THE_TRUNK = [
    {"critic": SHARED} | changes
    for changes in (
        {"model": {"lora": {"rank": 2}}},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"gradient_checkpointing": True}},
        {"credit": {"type": "bilevel_gae"}},
        {"loss": {"type": "gspo"}},
        {"loss": {"type": "ppo", "correction": {"weights": "token"}}},
        {"learner": {"epochs_per_step": 2, "updates_per_step": 2, "tokens_per_batch": 1500}},
    )
]
SLOW = [*SEPARATE[9:], ON_THE_TRUNK[1], ON_THE_TRUNK[5]]
VARIANTS = SEPARATE + ON_THE_TRUNK


@pytest.mark.parametrize("changes", small.cases(VARIANTS, [one for one in VARIANTS if one not in SLOW]), ids=str)
def test_the_variants_take_steps_and_others_run_by_one_key(changes, tiny_model, tmp_path):
    base = small.recipe_values(tiny_model, tmp_path)
    merged = small.merged(base, PPO | changes)
    run, _ = train(tiny_model, tmp_path, **merged | small.two_steps(base))
    names = {"critic/loss", "critic/value", "critic/return", "critic/gradient_norm", "critic/skipped"}
    names |= {"critic/clipped"} if merged["critic"].get("clip", True) else set()
    for line in lines(run, "train"):
        assert line["optimizer/skipped"] == 0
        assert line["optimizer/gradient_norm"] > 0
        assert names & set(line) == (names if merged["credit"]["type"].endswith("gae") else set())
        assert line.get("critic/gradient_norm", 1) > 0
        assert line.get("critic/skipped", 0) == 0
    if changes in ON_THE_TRUNK:
        first, second = lines(run, "train")
        assert first["critic/value"] == 0 != second["critic/value"]
        _, info = AutoModelForCausalLM.from_pretrained(run.path / "model", output_loading_info=True)
        assert not info["unexpected_keys"]
        assert not info["missing_keys"]


@pytest.mark.parametrize("critic", [{"optimizer": {"learning_rate": 1e-3}}, SHARED], ids=["separate", "shared"])
def test_the_policy_waits_for_the_critics_first_updates(critic, tiny_model, tmp_path):
    critic = critic | {"updates_before_policy": 3}
    checkpoint = {"every": 1, "keep": 9, "keep_state": "always"}
    run, _ = train(tiny_model, tmp_path, credit={"type": "gae"}, critic=critic, steps=3, checkpoint=checkpoint)
    first, second, third = lines(run, "train")
    assert "loss/policy" not in first  # its two updates, and the first of the next step's two, are the critic's alone
    assert {"critic/loss", "critic/gradient_norm", "critic/skipped"} <= set(first)
    assert second["critic/gradient_norm"] > 0
    assert second["loss/policy"] != 0
    assert third["loss/policy"] != 0 != third["critic/value"]
    kept = sorted(run.checkpoints.glob("*"))
    weights = [(path / "policy" / "model.safetensors").read_bytes() for path in kept]
    assert weights[0] == weights[1] != weights[2]
    state = [json.loads((path / "state.json").read_text()) for path in kept]
    assert [one["version"] for one in state] == [one["optimizer"]["updates"] for one in state] == [0, 0, 1, 3]
    assert [one["checkpointables"]["critic"]["optimizer"]["updates"] for one in state] == [0, 2, 4, 6]


def test_a_critic_starts_from_a_reward_model_with_its_head(tiny_model, reward_model, tmp_path):
    run, _ = train(tiny_model, tmp_path, credit={"type": "gae"}, critic={"path": str(reward_model)}, steps=1)
    assert abs(lines(run, "train")[0]["critic/value"]) > 1e-3


def test_another_tokenizer_is_refused(tiny_model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    other = save_family(tmp_path / "other", "llama", tokenizer)
    with pytest.raises(InputError, match=r"critic\.path: .*other does not have the tokenizer of "):
        train(tiny_model, tmp_path, credit={"type": "gae"}, critic={"path": str(other)})


def test_the_value_gradient_does_not_depend_on_the_split(tiny_model, reward_model, monkeypatch):
    def gradients(budget):
        keys = {"critic": {"path": str(reward_model)}, "model": {"path": str(tiny_model)}}
        recipe = RlRecipe(credit={"type": "gae"}, **keys)
        learner = LearnerRecipe(tokens_per_batch=budget)
        critic = open_critic(recipe.model_copy(update={"learner": learner}), Policy(recipe.model))
        draws, samples = np.random.default_rng(0), []
        for _ in range(5):
            one = sample(draws.integers(3, 250, 8), draws.integers(3, 250, draws.integers(2, 30)), "row")
            one.values, one.returns = draws.normal(size=(2, one.sampled_tokens)).astype(np.float32)
            samples.append(one)
        found = small.kept_gradients(monkeypatch)
        critic.learner.update(samples, ValueObjective(0.2))
        return found, len(pack(samples, budget))

    whole, one = gradients(4096)
    parts, several = gradients(45)
    assert one == 1 < several
    torch.testing.assert_close(parts, whole, atol=2e-6, rtol=1e-4)
