"""Every command of the four experiments is imported: none of its words is dropped, and recipes are valid."""

import re
import shlex
from pathlib import Path

import pytest

from posttrain_import import foreign
from posttrain_import.commands import Imported, import_commands
from posttrain_import.rows import Answer, Row

COMMANDS = Path(__file__).parent / "commands"
VARIABLES = {
    "INIT_KL_COEF": "0.1",
    "KL_TARGET": "0.02",
    "KL_HORIZON": "256",
    "MAX_EPOCHS": "10",
    "ACTOR_LR": "1e-6",
    "CRITIC_LR": "2e-5",
    "NUM_EPISODES": "8",
    "ADVANTAGE_ESTIMATOR": "group_norm",
    "MODEL_NAME": "Qwen/Qwen3-4B-Thinking-2507",
    "SAVE_PATH": "./checkpoint/memory",
    "CKPT_PATH": "./checkpoint/memory/ckpt",
}
"""The numbers of the memory run's `config.json`, and places for its models."""
ROWS = {"memory": 4772, "rationales": 5000, "ragen": None, "helpsteer3": None}
NUMBERS = {"memory": 1, "rationales": 23, "ragen": 22, "helpsteer3": 8}
"""Document -> number of commands with something to import."""
OTHERS = {"memory": [], "rationales": ["ray", "python3"], "ragen": ["mkdir"], "helpsteer3": []}


def text_of(document: str) -> str:
    """The commands of a document, with each value of its placeholders."""
    text = (COMMANDS / f"{document}.sh").read_text(encoding="utf-8")
    parts = []
    for part in re.split(r"\n\n+", text):
        values = {
            "<name>": ["sft"],
            "<model>": ["sft", "dpo", "rm", "ppo"],
            "<metric>": ["factual_accuracy", "efficiency"],
        }
        texts = [part]
        for name, choices in values.items():
            texts = [one.replace(name, value) for one in texts for value in (choices if name in one else [""])]
        parts += texts
    return "\n\n".join(parts)


def imported(document: str) -> list[Imported]:
    return import_commands(text_of(document), VARIABLES, ROWS[document])[0]


@pytest.mark.parametrize("document", NUMBERS)
def test_every_command_of_a_document_is_imported(document):
    found = imported(document)
    assert len(found) == NUMBERS[document]
    for command in found:
        assert command.unknown == [], command.text
        if command.replacement:
            assert command.replacement.startswith("posttrain ")
        else:
            assert command.recipe().stage == command.stage


@pytest.mark.parametrize("document", NUMBERS)
def test_no_word_of_a_command_is_dropped(document):
    """Each flag and each `key=value` of the text is the flag of a row, with its value."""
    for command in imported(document):
        words = shlex.split(command.text)
        rows = {row.flag: row.value for row in command.rows if not row.implied}
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--") and word != "--module":
                flag, equals, value = word.partition("=")
                value = value if equals else "set" if following.startswith("--") else following
                assert rows[flag] == value or rows[flag].startswith(f"{value} "), command.text
            elif re.match(r"[\w.]+=", word) and not word.startswith("--"):
                key, _, value = word.partition("=")
                assert rows[key] == value, command.text


def test_every_position_of_a_script_is_in_the_table():
    scripts = [one for one in imported("rationales") if "train_seg_rm" in one.text or "_segment.sh" in one.text]
    assert len(scripts) == 3
    for command in scripts:
        words = shlex.split(command.text)[2:]
        assert [row.value for row in command.rows if not row.implied] == words


@pytest.mark.parametrize("document", NUMBERS)
def test_every_row_has_the_outcome_of_its_flag(document):
    """Keys where the value is kept, and a reason or a remedy where it is not."""
    for command in imported(document):
        for row in command.rows:
            assert bool(row.answer.keys) or row.answer.note, row
            if row.answer.outcome in ("equal", "converted"):
                assert row.answer.keys, row
            if row.answer.outcome in ("no effect", "not supported", "unknown"):
                assert row.answer.note, row


def row_of(command: Imported, flag: str) -> Row:
    return next(row for row in command.rows if row.flag == flag)


def test_the_arithmetic_of_the_ppo_command():
    command = next(one for one in imported("rationales") if "train_ppo_ray" in one.text)
    expected = {
        "--train_batch_size": ({"learner.updates_per_step": 1}, "256 x 2 answers / 512"),
        "--num_episodes": ({"steps": 19}, "1 x 5000 prompts / 256, incomplete batches dropped"),
        "--micro_train_batch_size": (
            {"learner.tokens_per_batch": 16 * 6144},
            "16 answers x 6144 tokens; no effect on the result",
        ),
        "--lr_warmup_ratio": (
            {"optimizer.warmup_updates": 2, "critic.optimizer.warmup_updates": 2},
            "38 updates x 0.03 = 1.14, rounded up",
        ),
    }
    for flag, (keys, note) in expected.items():
        assert row_of(command, flag).answer == Answer("converted", keys, note)
    assert row_of(command, "--vllm_sync_backend").answer.outcome == "no effect"
    assert row_of(command, "--actor_learning_rate").answer == Answer("equal", {"optimizer.learning_rate": 6.57e-6})


def test_flags_without_effect_in_the_original_have_a_note():
    (command,) = imported("memory")
    assert "does not use it" in row_of(command, "--ptx_coef").answer.note
    assert "sets it to 1" in row_of(command, "--gamma").answer.note
    assert "given twice" in row_of(command, "--packing_samples").answer.note
    assert "has no effect" in row_of(command, "--eps_clip").answer.note
    assert [row.flag for row in command.missing] == ["memories", "judge"]


def test_scripts_become_commands():
    by_text = {one.text: one.replacement for one in imported("rationales") if one.replacement}
    replaced = "\n".join(by_text.values())
    for command in (
        "posttrain generate out=./evaluation/generated_data/sft.jsonl",
        "posttrain evaluate judge evaluation/generated_data/sft.jsonl --out evaluation/results/sft/efficiency.jsonl --workers 50",
        "posttrain tune rlhf/tune_reward",
        "posttrain fit-normalizer runs/qwen3-4B-sft-denserm-rat2",
        "posttrain evaluate reward evaluation/generated_data/sft.jsonl --model runs/sft/model",
    ):
        words = command.split()
        assert any(set(words) <= set(line.split()) for line in replaced.splitlines()), command
    pipelines = [one.replacement for one in imported("helpsteer3") if one.stage == "pipeline"]
    assert pipelines[1] == (
        "posttrain pipeline helpsteer3/pipeline stages.reward.rows_per_update=16 stages.reward.epochs=3 "
        "stages.rl.rollout.groups_per_step=4 stages.rl.steps=3125"
    )
    assert pipelines[2:] == [
        "posttrain pipeline helpsteer3/pipeline --only reward",
        "posttrain pipeline helpsteer3/pipeline --from rl stages.rl.reward.path=runs/helpsteer3/reward/model",
    ]
    searches = [one.replacement for one in imported("ragen") if one.stage == "tune"]
    assert searches[1] == (
        "posttrain tune ragen/search recipe=bandit.yaml name=hyperparam_searching --group 2 "
        "keys.learner.tokens_per_batch=12800 workers=1"
    )


def test_the_hints_of_the_core_are_those_of_the_rules():
    assert foreign.PLACE.read_text(encoding="utf-8") == foreign.text(), "run `python -m posttrain_import.foreign`"
