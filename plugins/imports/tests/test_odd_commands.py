"""Odd command lines: each word has its row, an error, or the meaning that the shell gives it. Secrets are not stored."""

import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain_import.commands import import_commands
from posttrain_import.shell import read_commands
from posttrain_import.tables import markdown_table

SFT = "trl sft --model_name_or_path m --dataset_name d.jsonl"


def one(text):
    (command,) = import_commands(text, {}, 100)[0]
    return command


def words(text):
    return [list(command.words) for command in read_commands(text, {})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl sft --model_name_or_path '' --dataset_name d.jsonl", "--model_name_or_path has no value"),
        (f"{SFT} --learning_rate=", "--learning_rate has no value"),
        (f"{SFT} --report_to", "--report_to has no value"),
        ("bash train.sh nethack training.max_turns=3", "the environment nethack has no importer"),
        (f"{SFT} --packing ${{ARGUMENTS[@]}}", "an expansion that the importer does not read"),
        (f'{SFT} --run_name "${{NAME%.*}}"', "an expansion that the importer does not read"),
        (f"{SFT} --config <(cat sft.yaml)", "is the output of another command"),
    ],
)
def test_a_word_that_cannot_be_read_is_an_error(text, message):
    with pytest.raises(InputError, match=message):
        one(text)


def test_the_words_of_subshells_and_missing_arguments():
    assert words("(cd x && python y.py --a b)") == [["cd", "x"], ["python", "y.py", "--a", "b"]]
    assert words('python y.py --a b "$@"; z "${@}" "$@c" ""') == [["python", "y.py", "--a", "b"], ["z", "c", ""]]


@pytest.mark.parametrize(
    ("launcher", "flag", "outcome"),
    [
        ("deepspeed --num_gpus 3", "--num_gpus", "equal"),
        ("deepspeed --include localhost:0,1", "--include", "not supported"),
        ("deepspeed --hostfile hosts", "--hostfile", "not supported"),
        ("deepspeed --num_nodes=4", "--num_nodes", "not supported"),
        ("deepspeed --num_nodes 1", "--num_nodes", "no effect"),
        ("deepspeed --master_port 1234", "--master_port", "no effect"),
    ],
)
def test_an_option_of_a_launcher_has_a_row(launcher, flag, outcome):
    command = one(f"{launcher} --module openrlhf.cli.train_sft --pretrain m --dataset d.jsonl")
    (row,) = [row for row in command.rows if row.flag == flag]
    assert row.answer.outcome == outcome
    assert command.recipe().hardware.processes == (3 if outcome == "equal" else 1)


def test_a_configuration_of_hydra_that_is_not_read_is_not_supported():
    for name, outcome in (("my", "not supported"), ("ppo_trainer", "no effect")):
        command = one(f"python3 -m verl.trainer.main_ppo --config-name={name} data.train_files=x.parquet")
        assert [row.answer.outcome for row in command.rows if row.flag == "--config-name"] == [outcome]


def test_exported_variables_have_a_row_unless_the_script_reads_them():
    command = one(f"export NCCL_DEBUG=INFO RATE=1e-5\n{SFT} --learning_rate $RATE")
    rows = {row.flag: row.value for row in command.rows}
    assert (rows["NCCL_DEBUG"], rows["--learning_rate"]) == ("INFO", "1e-5")
    assert "RATE" not in rows


def test_secrets_are_in_no_recipe_and_no_table():
    texts = [
        "export WANDB_API_KEY=secret-1\nHF_TOKEN=secret-2 deepspeed --module openrlhf.cli.train_sft --pretrain m "
        "--dataset d.jsonl --use_wandb secret-3",
        f"{SFT} --push_to_hub --hub_token secret-4",
    ]
    for command in map(one, texts):
        assert "secret-" not in command.recipe_text() + markdown_table(command)
        assert command.rows[0].flag != "--use_wandb"
    assert one(texts[0]).recipe().sinks == ["wandb"]


def test_names_that_are_too_long_for_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset {'d' * 300}.jsonl --input_key q --save_path ./{'s' * 300}"
    assert main(["import", words, "--out", "recipes"]) == 0
    assert len(list((tmp_path / "recipes").iterdir())) == 1
