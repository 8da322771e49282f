"""Recipes whose keys contradict each other, or have no effect, are refused with a sentence that names them."""

import pytest
from pydantic import TypeAdapter, ValidationError

from posttrain.recipe.stages import Recipe

MODEL = {"path": "m", "lora": {}}
PPO = {"credit": {"type": "gae"}}
GROUPS_OF_ONE = {"rollout": {"groups_per_step": 2, "episodes_per_group": 1, "tokens_per_episode": 1000}}
MOVING = {"coefficient": 1, "reference": {"update_every": 4}}
UNITS = {"reward": {"path": "r"}, "unit_credit": {"type": "loo", "segmenter": {"type": "entropy"}}}
PREFIX = PPO | {"reward": {"path": "r"}, "unit_credit": {"type": "prefix"}}
INITIAL = {"policy": "initial", "context": "hint", "tokens_per_batch": 1000}
WITH_ROWS = {"off_policy": {"data": {"train": "a"}}, "loss": {"type": "jsd"}}
BASES = {
    "rl": {},
    "dpo": {"data": {"train": "a.jsonl", "max_tokens": 200}},
    "distill": {"teacher": {"path": "a"}},
}


def shared(**keys):
    return PPO | {"critic": {"backbone": "shared"} | keys}


def sampling(temperature):
    return {"rollout": {"sampling": {"temperature": temperature}}}


def rows(**keys):
    return {"ptx": {"data": {"train": "rows.jsonl"} | keys}}


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        # Critics.
        ("rl", PPO | {"steps": 8, "critic": {"updates_before_policy": 8}}, r"_policy` \(8\) .* none of the run's 8"),
        ("rl", shared(path="a"), "`path` has no effect: backbone is shared"),
        ("rl", shared(dtype="bfloat16"), "`dtype` has no effect: backbone is shared"),
        ("rl", shared(lora={"rank": 2}), "`lora` has no effect: backbone is shared"),
        ("rl", shared(backbone="separate", coefficient=0.5), "`coefficient` has no effect: backbone is separate"),
        # Supervised rows in RL.
        ("rl", rows(held_out=2), "data.held_out\n"),
        ("rl", rows(validation="a.jsonl"), "data.validation\n"),
        ("rl", rows(streaming=True), "data.streaming\n"),
        ("rl", rows(max_tokens=5000), r"`ptx.data.max_tokens` = 5000 .* `learner.tokens_per_batch`"),
        # Credit of turns.
        *(
            ("rl", GROUPS_OF_ONE | {"credit": {"type": credit}}, "compares the episodes of a group")
            for credit in ("gigpo", "mt_grpo", "turn_returns")
        ),
        # Credit of units.
        ("rl", PREFIX | {"credit": {"type": "rloo"}}, "adds up the rewards of an episode"),
        ("rl", PREFIX | {"credit": {"type": "mt_grpo"}}, "adds up the rewards of a turn"),
        ("rl", PREFIX | {"reward": None}, "set `reward.path`"),
        ("rl", PREFIX | {"loss": {"type": "gspo"}}, "the mean advantage of its stream"),
        (
            "rl",
            PREFIX | {"reward": {"path": "r", "tokens_per_batch": 64}},
            r"more than `reward\.tokens_per_batch` = 64",
        ),
        ("rl", PREFIX | {"unit_credit": {"type": "prefix", "beta": 1.5}}, "less than or equal to 1"),
        ("rl", PREFIX | {"unit_credit": {"type": "unit_rewards", "fit": "a>b>c>d>0"}}, "`fit` needs `normalizer`"),
        # Reference models that move.
        ("dpo", {"reference": {"mix": 0.5}}, "`mix` has no effect"),
        ("dpo", {"loss": {"type": "simpo"}, "reference": {"update_every": 4}}, "has no reference model"),
        ("dpo", {"loss": {"type": "bco"}, "reference": {"update_every": 4}}, "`loss.type: bco`"),
        ("dpo", {"model": MODEL, "reference": {"update_every": 4}}, "adapters off"),
        ("rl", {"model": MODEL, "kl": MOVING}, "`kl.reference.update_every`.* with `model.lora`"),
        ("rl", PPO | {"kl": MOVING, **UNITS}, "stays the initial model"),
        ("rl", {"kl": MOVING, "teacher": INITIAL}, "`teacher.policy: initial` needs a reference model"),
        # Distillation.
        ("distill", {"teacher": {}}, "there is no teacher"),
        ("distill", {"teacher": {"path": "a", "urls": ["http://b"]}}, "`path` and `urls` are set"),
        ("distill", {"teacher": {"policy": "current"}}, "has no effect"),
        ("distill", {"teacher": {"path": "a", "timeout": 3}}, "`timeout` has no effect"),
        ("distill", {"teacher": {"urls": ["http://a"]}, **sampling(0.7)}, "at temperature 1"),
        ("distill", sampling(0), "greedily"),
        ("distill", {"rollout": {"async_rollouts": 1}}, "async_rollouts"),
        ("distill", {"hardware": {"ray": "auto"}}, "hardware.ray"),
        ("distill", {"off_policy": {"data": {"train": "a.jsonl"}}}, "use jsd"),
        ("distill", WITH_ROWS | {"teacher": {"path": "a", "context": "b"}}, "rows of `off_policy` lack"),
        ("distill", {"loss": {"type": "reverse_kl", "top_k": 3}}, "top_k"),
    ],
)
def test_a_contradictory_recipe_is_refused(stage, changes, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Recipe).validate_python({"stage": stage} | BASES[stage] | changes)


def test_returns_of_turns_without_a_baseline_take_groups_of_one():
    credit = {"credit": {"type": "turn_returns", "baseline": "none"}}
    TypeAdapter(Recipe).validate_python({"stage": "rl"} | GROUPS_OF_ONE | credit)
