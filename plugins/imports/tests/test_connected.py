"""Stages of one document connect: a model that one command saves is the model of the later command that reads it. The four
documents of the experiments are read whole, with a value for each placeholder."""

from pathlib import Path

import pytest
from plugins.imports.tests.test_documents import NUMBERS, VARIABLES, imported, text_of

from posttrain.cli.main import main
from posttrain_import.commands import import_commands

EXPERIMENTS = Path(__file__).parents[4] / "shared/experiments"
DOCUMENTS = {
    "memory": "memory-agent-gspo",
    "rationales": "rlhf-rationales",
    "ragen": "agent-environments",
    "helpsteer3": "helpsteer3-rloo",
}
PLACEHOLDERS = {"name": "qwen3-4B-sft-rm-rat2", "model": "sft", "metric": "efficiency"}
SFT, RM, UNIT = (f"runs/qwen3-4B-sft-{name}" for name in ("rat2", "rm-rat2", "denserm-rat2"))
RATIONALES = {
    "qwen3-4B-sft-rat2": {"model.path": "Qwen/Qwen3-4B"},
    "qwen3-4B-sft-dpo-rat2": {"model.path": f"{SFT}/model"},
    "qwen3-4B-sft-rm-rat2": {"model.path": f"{SFT}/model"},
    "qwen3-4B-sft-ppo-rat2": {"model.path": f"{SFT}/model", "reward.path": f"{RM}/model", "critic.path": f"{RM}/model"},
    "qwen3-4B-sft-drca-cf-rat2": {"model.path": f"{SFT}/model", "reward.path": f"{RM}/model"},
    "qwen3-4B-sft-denserm-rat2": {"model.path": f"{SFT}/model"},
    "ppo_segment_rm_training": {
        "model.path": f"{SFT}/model", "reward.path": f"{UNIT}/model", "unit_credit.normalizer": UNIT,
    },
    "ppo_segment_rm_training-2": {"model.path": f"{SFT}/model", "reward.path": f"{RM}/model"},
}  # fmt: skip


def check_rationales(found):
    recipes = {one.name: one.values for one in found if not one.replacement}
    assert recipes.keys() == RATIONALES.keys()
    for name, paths in RATIONALES.items():
        assert {key: recipes[name][key] for key in paths} == paths
    replaced = "\n".join(one.replacement for one in found if one.replacement)
    assert f"posttrain fit-normalizer {UNIT}\n" in replaced


def check_helpsteer3(found):
    recipes = {one.name: one.values for one in found if not one.replacement}
    for number in ("", "-2"):
        reward = f"runs/qwen3_8b_reward_model{number}/model"
        assert recipes[f"rloo_helpsteer3{number}"]["reward.path"] == reward
    assert len(recipes) == 4


def test_the_stages_of_the_commands_connect():
    check_rationales(imported("rationales"))
    check_helpsteer3(imported("helpsteer3"))


@pytest.mark.skipif(not EXPERIMENTS.is_dir(), reason="the documents of the experiments are not on this machine")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_is_read_whole(document, tmp_path, monkeypatch, capsys):
    file = EXPERIMENTS / f"{DOCUMENTS[document]}.md"
    found, _ = import_commands(str(file), VARIABLES | PLACEHOLDERS, 5000)
    placeholders = 5 if document == "rationales" else 0  # other values of theirs
    assert len(found) == NUMBERS[document] - placeholders
    if document == "rationales":
        check_rationales(found)
        replaced = "\n".join(one.replacement for one in found if one.replacement)
        assert f"posttrain generate model.path={RM}/model " in replaced
        assert f"--model {RM}/model " in replaced
    if document == "helpsteer3":
        check_helpsteer3(found)
    monkeypatch.chdir(tmp_path)
    words = [f"{name}={value}" for name, value in (VARIABLES | PLACEHOLDERS).items()]
    assert main(["import", str(file), *words, "--rows", "5000", "--out", "recipes"]) == 0
    recipes = [one for one in found if not one.replacement]
    assert sorted(file.stem for file in (tmp_path / "recipes").iterdir()) == sorted(one.name for one in recipes)
    assert capsys.readouterr().out.count("run it with: posttrain ") == len(found)


@pytest.mark.parametrize(
    ("first", "second", "paths"),
    [
        (
            "trl sft --model_name_or_path m --dataset_name d.jsonl --output_dir ./out/sft",
            "trl dpo --model_name_or_path out/sft/checkpoint-500 --dataset_name p.jsonl",
            {"model.path": "runs/sft/model"},
        ),
        (
            "trl reward --model_name_or_path m --dataset_name d.jsonl --output_dir out/rm/",
            "trl rloo --model_name_or_path org/sft --dataset_name p.jsonl --reward_model_name_or_path ./out/rm",
            {"model.path": "org/sft", "reward.path": "runs/rm/model"},
        ),
        (
            "deepspeed --module openrlhf.cli.train_rm --pretrain m --dataset d.jsonl --save_path /ckpt/rm/final",
            "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p.jsonl --reward_pretrain /ckpt/rm/final "
            "--rollout_batch_size 8 --train_batch_size 8",
            {"model.path": "m", "reward.path": "runs/rm/model", "critic.path": "runs/rm/model"},
        ),
        (
            "bash train.sh sokoban rl_or_sft=sft sft.output_dir=models/sft/sokoban sft.training.experiment_name=traces",
            "bash train.sh sokoban model.base_model=models/sft/sokoban model.experiment_name=rl",
            {"model.path": "runs/traces/model"},
        ),
        (
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=p.jsonl trainer.project_name=p "
            "trainer.experiment_name=one custom_reward_function.path=r.py trainer.total_training_steps=4",
            "python3 -m verl.trainer.main_ppo data.train_files=p.jsonl custom_reward_function.path=r.py "
            "actor_rollout_ref.model.path=checkpoints/p/one/global_step_4/actor/huggingface trainer.experiment_name=two "
            "trainer.total_training_steps=4",
            {"model.path": "runs/one/model"},
        ),
        (
            "trl sft --model_name_or_path m --dataset_name d.jsonl --output_dir out/sft",
            "trl dpo --model_name_or_path out/sft-other --dataset_name p.jsonl --run_name out/sft",
            {"model.path": "out/sft-other", "tracking.run_name": "out/sft"},
        ),
    ],
)
def test_a_later_command_reads_the_run_of_an_earlier_one(first, second, paths):
    for text in (f"{first}\n{second}", f"{first} && {second}"):
        found = import_commands(text, {}, 100)[0]
        assert {key: found[1].values[key] for key in paths} == paths
        found[1].recipe()
    alone = import_commands(second, {}, 100)[0][0]
    assert "runs/" not in str(alone.values)


@pytest.mark.parametrize(
    ("path", "model"),
    [("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("./checkpoint/a/final", "runs/a/model"), ("out/sft", "runs/sft/model")],
)
def test_a_model_to_evaluate_is_a_run_only_where_a_command_saved_one(path, model):
    train = "trl sft --model_name_or_path m --dataset_name d.jsonl --output_dir out/sft"
    evaluate = f"run_multigpu_inference.sh {path} d.parquet o.jsonl 8 '' 2048"
    score = f"python reward_metric.py --model_path {path} --data_path d.jsonl --output_path o.json"
    _, answers, scores = import_commands(f"{train}\n{evaluate}\n{score}", {}, 100)[0]
    assert f" model.path={model} " in answers.replacement
    assert f" --model {model} " in scores.replacement


def test_commands_that_save_to_one_folder_have_a_run_each():
    train = "trl sft --model_name_or_path m --dataset_name d.jsonl --output_dir out/sft"
    found = import_commands(f"{train}\n{train}\ntrl dpo --model_name_or_path out/sft --dataset_name p.jsonl", {})[0]
    assert [one.name for one in found] == ["sft", "sft-2", "trl-dpo"]
    assert found[2].values["model.path"] == "runs/sft-2/model"
    (row,) = (row for row in found[1].rows if row.flag == "--output_dir")
    assert (row.answer.keys, row.answer.note) == ({"name": "sft-2"}, "the model is in `runs/sft-2/model`")


def test_helpsteer3_starts_in_a_fresh_folder(tmp_path, monkeypatch, capsys):
    """Each of its commands names the conversion of the data that it needs, and its plan is shown before there are any."""
    monkeypatch.chdir(tmp_path)
    data = "posttrain pipeline helpsteer3/pipeline --only data"
    rl_only = "--from rl stages.rl.reward.path=models/rm stages.rl.reward.tokens_per_batch=3072"
    options = {
        "--reward_model_only": f"{data} && posttrain pipeline helpsteer3/pipeline --only reward",
        "--rloo_only --reward_model_dir models/rm --local_rollout_forward_batch_size 2": f"{data} && posttrain pipeline "
        f"helpsteer3/pipeline {rl_only}",
    }
    for option, line in options.items():
        assert main(["import", f"python train_pipeline.py {option}"]) == 0
        assert f"run it with: {line}\n" in capsys.readouterr().out
        for command in line.split(" && ")[1:]:
            assert main([*command.split()[1:], "--dry-run"]) == 0
        capsys.readouterr()
    script = "\n".join(text_of("helpsteer3").split("\n\n")[:2])
    (tmp_path / "run.sh").write_text(script)
    assert main(["import", "run.sh"]) == 0
    printed = capsys.readouterr().out
    assert f"run it with: {data} && posttrain reward qwen3_8b_reward_model.yaml\n" in printed
    assert f"run it with: {data} && posttrain rl rloo_helpsteer3.yaml\n" in printed
    (row,) = (row for row in imported("helpsteer3")[1].rows if row.flag == "--local_rollout_forward_batch_size")
    assert row.answer.keys == {"reward.tokens_per_batch": 1130}
