"""Keys and values of earlier versions are errors that name the present ones."""

import json

import pytest

from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.reference import keys_of
from posttrain.recipe.stages import STAGES
from posttrain.recipe.study_file import load_study
from posttrain.recipe.validation import RENAMED_KEYS, RENAMED_VALUES

KEYS = {stage: {key.path for key in keys_of(schema)} for stage, schema in STAGES.items()}
TYPES = {
    "credit.divide": ["credit.type=gigpo"],
    "credit.trace_decay": ["credit.type=gae"],
    "credit.turn_trace_decay": ["credit.type=bilevel_gae"],
    "engine.seconds": ["engine.type=openai", "engine.url=http://x", "engine.model=m"],
    "engine.token_limit": ["engine.type=openai", "engine.url=http://x", "engine.model=m"],
    "engine.workers": ["engine.type=openai", "engine.url=http://x", "engine.model=m"],
    "environment.judge.seconds": ["environment.type=text_task", "environment.prompts=x"],
    "unit_credit.normaliser": ["reward.path=x", "credit.type=gae", "unit_credit.type=unit_rewards"],
}
ROWS = ["data.train=x.jsonl"]


def words_of(key):
    """What a recipe needs beside `key`."""
    section = key.partition(".")[0]
    if key in TYPES:
        return TYPES[key]
    if section == "engine":
        return ["engine.type=vllm"]
    if section == "environment":
        return ["environment.type=memory"]
    return []


def stage_of(new):
    return next(stage for stage in (*STAGES,) if any(key == new or key.startswith(f"{new}.") for key in KEYS[stage]))


@pytest.mark.parametrize("old", [old for old in RENAMED_KEYS if not old.startswith("objective")])
def test_a_renamed_key_names_the_new_one(old):
    new = RENAMED_KEYS[old]
    old = old.replace("*", "")
    stage = stage_of(new)
    words = words_of(old) + (
        ["data.test=x.jsonl"] if stage == "generate" else ROWS if stage not in ("rl", "evaluate") else []
    )
    with pytest.raises(InputError, match=rf"there is no key {old}; the nearest is {new}"):
        load_recipe([], [*words, f"{old}=1"], stage)
    assert old not in KEYS[stage]


@pytest.mark.parametrize(("key", "old"), list(RENAMED_VALUES))
def test_a_renamed_value_names_the_new_one(key, old):
    new, key = RENAMED_VALUES[key, old], key.replace("*", "")
    stage = "sft" if key.startswith("data") else "rl"
    words = ROWS if stage == "sft" else ["reward.path=x"] if key.startswith("unit_credit") else []
    with pytest.raises(InputError, match=rf"{key} is {json.dumps(old)} \(did you mean {new}\?\); it must be .*{new}"):
        load_recipe([], [*words, f"{key}={old}"], stage)


@pytest.mark.parametrize(("old", "new"), [("most", "max"), ("least", "min")])
def test_a_limit_of_a_study_names_the_new_key(old, new, tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(
        "keys: {stage: rl}\nsearch: {optimizer.learning_rate: {low: 1.0e-6, high: 1.0e-5}}\n"
        f"objective: {{metric: return, direction: maximize, within: {{policy/kl: {{{old}: 1}}}}}}\n"
    )
    with pytest.raises(
        InputError, match=f"objective.within.policy/kl.{old}; the nearest is objective.within.METRIC.{new}"
    ):
        load_study(str(file), [])
