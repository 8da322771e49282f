"""The recipes of this package are what the importer makes of the documents' commands, except for keys that are listed here."""

import pytest
from plugins.imports.tests.test_documents import VARIABLES, imported, text_of

from posttrain.recipe.compose import load_recipe
from posttrain_import.commands import import_commands

PLACES = {"name", "model.path", "reward.path", "critic.path", "data.train", "data.validation", "data.test"}
"""Where files, models and runs are."""
PROMPTS = {"environment.prompts", "environment.reward", "environment.score_weight"}
CHOSEN = {"evaluation.every", "evaluation.metric", "evaluation.held_out", "evaluation.seeds.count"}
"""How the best checkpoint is chosen, where the original measures nothing."""
SIZES = {"learner.tokens_per_batch", "reward.tokens_per_batch"}
RLHF = {
    "train_sft": ("rlhf/sft", PLACES),
    "train_dpo": ("rlhf/dpo", PLACES),
    # 32 pairs of this data are shorter than 32 pairs of full length.
    "train_rm": ("rlhf/reward", PLACES | {"learner.tokens_per_batch"}),
    "train_ppo_ray": ("rlhf/ppo", PLACES | PROMPTS | CHOSEN | SIZES),
    "train_drca_ray": ("rlhf/drca", PLACES | PROMPTS | CHOSEN | SIZES),
    "train_seg_rm": ("rlhf/unit_reward", PLACES),
    "peak 1.5 avg segment_normalization": ("rlhf/unit_ppo", PLACES),
    "segment_last_avg": ("rlhf/unit_ppo_outcome", PLACES),
}
HELPSTEER = PLACES | CHOSEN | {"model.thinking", "engine.slots", "reward.dtype"}


def leaves(values, place=()):
    if not isinstance(values, dict) or not values:
        return {".".join(place): values}
    return {path: leaf for key, inner in values.items() for path, leaf in leaves(inner, (*place, key)).items()}


def differences(command, files):
    """Keys in which the imported recipe and the files differ; a section that only one of them has is its leaves."""
    ours = leaves(load_recipe(files, [], command.stage).model_dump(mode="json"))
    theirs = leaves(command.recipe().model_dump(mode="json"))
    return {key for key in ours | theirs if ours.get(key) != theirs.get(key)}


@pytest.mark.parametrize("part", RLHF)
def test_the_recipes_of_the_rationales(part):
    text = next(one for one in text_of("rationales").split("\n\n") if part in one)
    (command,) = import_commands(text, {}, 5000 if "_ray" in part else None)[0]
    recipe, listed = RLHF[part]
    assert differences(command, [recipe]) <= listed
    assert (
        command.recipe().optimizer.warmup_updates == load_recipe([recipe], [], command.stage).optimizer.warmup_updates
    )


def test_the_recipes_of_helpsteer3():
    reward, rl, short_reward, short_rl = (one for one in imported("helpsteer3") if not one.replacement)
    published = ["helpsteer3/rl", "helpsteer3/rl_published"]
    assert differences(reward, ["helpsteer3/reward"]) <= HELPSTEER
    assert differences(rl, published) <= HELPSTEER
    assert differences(short_reward, ["helpsteer3/reward"]) <= HELPSTEER
    # The document's shorter command leaves these to the defaults of TRL.
    left_out = {"learner.epochs_per_step", "rollout.missing_eos_penalty", "reward.tokens_per_batch"}
    assert left_out <= differences(short_rl, published) <= HELPSTEER | left_out
    assert short_rl.recipe().learner.epochs_per_step == 4


def test_the_recipes_of_the_games():
    commands = [one for one in imported("ragen") if not one.replacement]
    assert len(commands) == 18
    for command in commands:
        game = next(name for name in ("bandit", "sokoban", "frozen") if name in command.text.split("train.sh ")[1])
        recipe = f"ragen/{game.replace('frozen', 'frozen_lake')}{'_sft' if command.stage == 'sft' else ''}"
        listed = {"name"}
        listed |= {"model.path"} if "0.5B" not in command.text else set()
        listed |= {"environment.format.thinking"} if "no_think_rl=True" in command.text else set()
        listed |= {"hardware.processes"} if "n_gpus=2" in command.text else set()
        listed |= {"model.gradient_checkpointing"} if command.stage == "sft" else set()
        assert differences(command, [recipe]) == listed, command.text


def test_the_recipe_of_the_memory_run():
    """The shipped recipe with the records of the command. The folder of their memories is in no flag of it."""
    (command,) = imported("memory")
    found = differences(command, ["memory/gspo_published"])
    assert {key for key in found if not key.startswith("environment.tasks")} == {
        "name", "environment.memories", "sinks", "tracking.project",
    }  # fmt: skip
    recipe = command.recipe()
    assert (recipe.steps, recipe.environment.type) == (1192, "memory")
    assert [source.path for source in recipe.environment.tasks] == ["data/openrlhf/mixed"]
    assert command.required == ["environment.memories"]
    assert VARIABLES["NUM_EPISODES"] == "8"
