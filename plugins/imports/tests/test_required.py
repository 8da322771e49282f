"""What a command leaves to its program (an agent, an environment, a reward, tasks, a model) is a key that the recipe
requires: its dry run and its run name the key and the remedy, and never run another task."""

import pytest
from plugins.imports.tests.test_documents import COMMANDS, VARIABLES

from posttrain.cli.main import main
from posttrain.recipe.sources import read_file
from posttrain_import.commands import import_commands

PPO = "python -m openrlhf.cli.train_ppo_ray --pretrain m --rollout_batch_size 8 --train_batch_size 8 --num_episodes 1"
GRPO = "trl grpo --model_name_or_path m --max_steps 8"
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m trainer.total_training_steps=4"
UNIT_RM = "bash train_seg_rm.sh run"
UNIT_PPO = "bash train_ppo_segment.sh run"
CASES = {
    "an agent": (f"{PPO} --agent_func_path agents/own.py --prompt_data p.jsonl", {"environment.type": "write agents/own.py"}),
    "an agent of version 0.10.2": (
        f"{PPO} --train.agent_func_path own.py --data.prompt_dataset p.jsonl",
        {"environment.type": "that reads p.jsonl"},
    ),
    "an agent with a reward function": (
        f"{PPO} --agent_func_path own.py --prompt_data p.jsonl --remote_rm_url http://localhost:1/score --input_key q",
        {"environment.type": "`environment.type=FILE.py`"},
    ),
    "no reward": (f"{PPO} --prompt_data p.jsonl", {"environment.reward": "FILE.py:FUNCTION"}),
    "a reward server": (
        f"{PPO} --prompt_data p.jsonl --remote_rm_url http://localhost:1/score",
        {"environment.reward": "write a function that calls the server"},
    ),
    "no prompts": (f"{PPO} --reward_pretrain r", {"environment.prompts": "the files of the prompts"}),
    "a split of prompts": (
        f"{PPO} --reward_pretrain r --prompt_data org/data --prompt_split extra",
        {"environment.prompts": "path: DATA, split: NAME"},
    ),
    "a split of rows": (
        "python -m openrlhf.cli.train_sft --pretrain m --dataset org/data --dataset_split extra",
        {"data.train": "path: DATA, split: NAME"},
    ),
    "no model": ("python -m openrlhf.cli.train_sft --dataset a.jsonl", {"model.path": "set `model.path`"}),
    "no data": ("python -m openrlhf.cli.train_dpo --pretrain m", {"data.train": "set `data.train`"}),
    "no data in TRL": ("trl sft --model_name_or_path m", {"data.train": "set `data.train`"}),
    "no model in TRL": ("python examples/scripts/dpo.py --dataset_name d.jsonl", {"model.path": "set `model.path`"}),
    "a reward of TRL": (
        f"{GRPO} --dataset_name p.jsonl --reward_funcs think_format_reward",
        {"environment.reward": "write think_format_reward as"},
    ),
    "one reward of two": (
        f"{GRPO} --dataset_name p.jsonl --reward_funcs accuracy_reward think_format_reward --reward_weights 1 2",
        {"environment.reward": "write think_format_reward as"},
    ),
    "a reward in the script": (f"{GRPO} --dataset_name p.jsonl", {"environment.reward": "FILE.py:FUNCTION"}),
    "everything in the script": (
        "python grpo.py --max_steps 3",
        {"environment.reward": "FILE.py:FUNCTION", "environment.prompts": "the files", "model.path": "set"},
    ),
    "RLOO with everything in the script": (
        "python examples/scripts/rloo.py --total_episodes 100",
        {"environment.reward": "FILE.py:FUNCTION", "environment.prompts": "the files", "model.path": "set"},
    ),
    "a reward of the data": (f"{VERL} data.train_files=p.jsonl", {"environment.reward": "such as `final_number`"}),
    "an empty reward function": (
        f"{VERL} data.train_files=p.jsonl custom_reward_function.path=",
        {"environment.reward": "such as `final_number`"},
    ),
    "no prompts in verl": (
        f"{VERL} custom_reward_function.path=r.py",
        {"environment.prompts": "the files of the prompts"},
    ),
    "tools": (
        f"{VERL} data.train_files=p.jsonl data.prompt_key=q custom_reward_function.path=r.py "
        "actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 "
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
        {"environment.type": "write the tools as an environment with several turns that reads p.jsonl"},
    ),
    "a game of RAGEN": ("python train.py --config-name _7_webshop a=b", {"environment.type": "files of hydra are not read"}),
    "games of RAGEN": (
        "python train.py --config-name _2_sokoban 'es_manager.train.env_configs.tags=[SimpleSokoban,FrozenLake]'",
        {"environment.type": "one environment of"},
    ),
    "no game": ("python train.py model_path=m", {"environment.type": "set `environment.type`"}),
    "rows of another data set": (f"{UNIT_RM} qwen3 helpsteer 1 peak 1.5 avg 0", {"data.train": "rationales"}),
    "another model": (f"{UNIT_RM} llama rationales 1 peak 1.5 avg 0", {"model.path": "qwen3"}),
    "prompts of another data set": (
        f"{UNIT_PPO} qwen3 helpsteer 1 peak 1.5 avg segment_normalization 0.5 helpsteer",
        {"environment.prompts": "rationales", "unit_credit.normalizer": "fitted it"},
    ),
    "another reward of units": (
        f"{UNIT_PPO} qwen3 rationales 1 peak 1.5 avg segment_softmax 0.5 rationales",
        {"unit_credit.type": "use segment_normalization"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_converted_is_required(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, required = CASES[case]
    assert main(["import", command, "--ignore-unknown", "--out", "recipe.yaml"]) == 0
    printed = capsys.readouterr().out
    stage = printed.partition(" as posttrain ")[2].split()[0]
    for key in required:
        assert f"{key}=VALUE" in printed.partition("run it with: ")[2]
    for words in (["--dry-run"], []):
        assert main([stage, "recipe.yaml", *words]) == 2
        sentences = capsys.readouterr().err.splitlines()
        assert len(sentences) == len(required)
        for key, remedy in required.items():
            (sentence,) = (line for line in sentences if f": {key} is required and has no value; " in line)
            assert remedy in sentence
    assert not (tmp_path / "runs").exists()


def test_weights_of_reward_functions_and_a_split_of_a_hub_data_set_are_kept():
    text = f"{GRPO} --dataset_name p.jsonl --reward_funcs a.b accuracy_reward --reward_weights 1 0.5"
    (command,) = import_commands(text, {})[0]
    parts = command.recipe().environment.reward
    assert [(part.function, part.weight) for part in parts] == [("a:b", 1.0), ("final_number", 0.5)]
    assert command.required == []
    rows = "--dataset_config main --dataset_train_split test --dataset_name org/d"
    recipes = [
        import_commands(f"{words} {rows}", {})[0][0].recipe()
        for words in (f"{GRPO} --reward_funcs a.b", "trl sft --model_name_or_path m")
    ]
    for (source,) in (recipes[0].environment.prompts, recipes[1].data.train):
        assert (source.path, source.subset, source.split) == ("org/d", "main", "test")


def test_the_memory_agent_becomes_its_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["import", str(COMMANDS / "memory.sh"), *(f"{name}={value}" for name, value in VARIABLES.items())]
    assert main([*words, "--rows", "4772", "--out", "memory.yaml"]) == 0
    assert "run it with: posttrain rl memory.yaml environment.memories=VALUE" in capsys.readouterr().out
    written = read_file("memory.yaml").values["environment"]
    assert (written["type"], written["tasks"]) == ("memory", "data/openrlhf/mixed")
    assert main(["rl", "memory.yaml", "--dry-run"]) == 2
    assert "environment.memories is required" in capsys.readouterr().err
    folder = tmp_path / "data/openrlhf/mixed"
    folder.mkdir(parents=True)
    for split, rows in (("train", 64), ("valid", 4)):
        (folder / f"{split}.jsonl").write_text("{}\n" * rows)
    assert main([*words, "MEMORIES=data/instances", "--out", "memory.yaml", "--overwrite"]) == 0
    written = read_file("memory.yaml").values
    assert written["environment"]["tasks"] == "data/openrlhf/mixed/train.jsonl"
    assert written["environment"]["memories"] == "data/instances"
    assert written["steps"] == 16  # eight passes over 64 rows, 32 a step


def test_another_agent_is_not_the_memory_agent():
    text = (
        (COMMANDS / "memory.sh").read_text(encoding="utf-8").replace("training/agent_func.py", "examples/agent_func.py")
    )
    (command,) = import_commands(text, VARIABLES, 4772)[0]
    assert command.required == ["environment.type"]
