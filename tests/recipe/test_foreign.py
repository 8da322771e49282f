"""Keys of TRL, OpenRLHF and verl, sections given as text and files of rows: the error has the words to type."""

import pytest

from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.reference import keys_of
from posttrain.recipe.stages import STAGES
from posttrain.recipe.validation import foreign_keys
from posttrain.verbs import read_recipe

KEYS = {stage: {key.path for key in keys_of(schema)} for stage, schema in STAGES.items()}


def test_every_key_that_is_named_exists():
    everywhere = set().union(*KEYS.values())
    assert {key for keys in foreign_keys()["keys"].values() for key in keys} <= everywhere


@pytest.mark.parametrize(
    ("stage", "name", "key"),
    [
        ("rl", "lr", "optimizer.learning_rate"),
        ("rl", "learning_rate", "optimizer.learning_rate"),
        ("sft", "per_device_train_batch_size", "rows_per_update "),
        ("rl", "per_device_train_batch_size", "rollout.groups_per_step "),
        ("sft", "max_length", "data.max_tokens "),
        ("rl", "rollout.max_completion_length", "rollout.tokens_per_turn "),
        ("rl", "reward_funcs", "environment.reward "),
        ("rl", "beta", "kl.coefficient"),
        ("dpo", "beta", "loss.beta"),
        ("rl", "num_train_epochs", "steps"),
        ("reward", "gradient_accumulation_steps", "learner.tokens_per_batch "),
        ("sft", "per-device-train-batch-size", "rows_per_update "),
        ("rl", "remote_rm_url", "environment.reward "),
        ("rl", "actor_rollout_ref.rollout.n", "rollout.episodes_per_group"),
        ("rl", "critic.model.path", "critic.path"),
        ("rl", "reward_model.model.path", "reward.path"),
        ("rl", "algorithm.adv_estimator", "credit.type"),
    ],
)
def test_a_key_of_another_package_names_the_one_here(stage, name, key):
    words = [] if stage == "rl" else ["data.train=x.jsonl"]
    with pytest.raises(InputError) as error:
        load_recipe([], [*words, f"{name}=1"], stage)
    said = str(error.value)
    assert said.startswith(f"override {name}=1: there is no key {name}; use {key}")
    assert key.strip() in KEYS[stage]


@pytest.mark.parametrize(
    ("stage", "name", "remedy"),
    [
        ("sft", "packing", "it has no counterpart: batches are always packed, without padding"),
        (
            "rl",
            "trainer.balance_batch",
            "`posttrain recipe --stage rl` shows the keys, and `posttrain import` converts",
        ),
    ],
)
def test_a_key_without_counterpart_does_not_name_a_wrong_one(stage, name, remedy):
    words = [] if stage == "rl" else ["data.train=x.jsonl"]
    with pytest.raises(InputError) as error:
        load_recipe([], [*words, f"{name}=1"], stage)
    assert str(error.value).startswith(f"override {name}=1: there is no key {name}; {remedy}")


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("credit=grpo", "credit.type=grpo"),
        ("loss=gspo", "loss.type=gspo"),
        ("environment=bandit", "environment.type=bandit"),
        ("model=models/small", "model.path=models/small"),
    ],
)
def test_a_section_given_as_text_names_the_words_to_type(word, right):
    with pytest.raises(InputError, match=rf"^override {word}: .*; write {right}$"):
        load_recipe([], [word], "rl")
    load_recipe([], [right], "rl")


@pytest.mark.parametrize(
    ("stage", "right"),
    [
        ("sft", "data.train=chat.jsonl"),
        ("dpo", "data.train=chat.jsonl"),
        ("generate", "data.test=chat.jsonl"),
        ("rl", "environment.type=text_task environment.prompts=chat.jsonl"),
    ],
)
def test_rows_where_a_recipe_is_expected_name_the_key_for_rows(stage, right):
    with pytest.raises(InputError, match=rf"^chat.jsonl contains rows and is not a recipe; write {right}$"):
        read_recipe(stage, "chat.jsonl")
    load_recipe([], right.split(), stage)
