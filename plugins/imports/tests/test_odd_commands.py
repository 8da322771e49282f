"""Odd command lines: each word has its row, an error, or the meaning that the shell gives it. Secrets are not stored. Scripts that
would take all memory or hours are refused with one sentence."""

import os

import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain_import.commands import import_commands
from posttrain_import.rows import count_rows
from posttrain_import.shell import LONGEST, read_commands
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


@pytest.mark.parametrize("word", ["./checkpoint/<name>/final", "<name>", "tune_<name>.py", "--path=<name>"])
def test_a_placeholder_is_asked_for_by_name(word):
    with pytest.raises(InputError) as error:
        read_commands(f"python evaluate.py {word} --n 3", {})
    assert str(error.value) == "<name> of the command stands for a value; add name=VALUE after the command"
    (command,) = read_commands(f"python evaluate.py {word} --n 3 <in.txt >out.txt", {"name": "two words"})
    assert list(command.words) == ["python", "evaluate.py", word.replace("<name>", "two words"), "--n", "3"]


def test_placeholders_of_several_words_and_quoted_signs():
    with pytest.raises(InputError, match="<path to-model> of the command stands for a value; add path_to_model=VALUE"):
        read_commands("python a.py <path to-model>", {})
    assert words("python a.py '<name>' \"<eos>\" <in >out 2>log") == [["python", "a.py", "<name>", "<eos>"]]
    assert words("python a.py --x 1 < in.txt > out.txt --y 2") == [["python", "a.py", "--x", "1", "--y", "2"]]


def test_an_empty_argument_stays_empty():
    """It is neither a default nor a flag without a value."""
    script = "evaluation/run_multigpu_inference.sh m data.parquet out.jsonl 1 {} 2048"
    empty, full = one(script.format('""')), one(script.format('"Be brief."'))
    assert "system=" not in empty.replacement
    assert "'system=Be brief.'" in full.replacement
    assert [row.value for row in empty.rows if row.flag == "system"] == [""]
    for text, message in (
        (f"{SFT} --bf16 ''", "--bf16 has no value"),
        (f"{SFT} --run_name=", "--run_name has no value"),
        (
            "bash train.sh sokoban training.train_batch_size=",
            "training.train_batch_size is missing; it must be a number",
        ),
        ("bash train.sh sokoban training.max_turns=''", "training.max_turns is missing; it must be a number"),
    ):
        with pytest.raises(InputError, match=message):
            one(text)
    verl = "python3 -m verl.trainer.main_ppo data.train_files=p.jsonl trainer.total_training_steps=4"
    command = one(f"{verl} data.trust_remote_code= actor_rollout_ref.actor.optim.lr=1e-6")
    assert command.recipe().model.trust_remote_code is False
    with pytest.raises(InputError, match=r"optimizer\.learning_rate is \"\""):
        one(f"{verl} actor_rollout_ref.actor.optim.lr=").recipe()
    all_seeds = one("bash train.sh sokoban training.val_data_num=").recipe()
    assert (all_seeds.evaluation.seeds.count, all_seeds.evaluation.final_seeds.count) == (50, 450)


def test_empty_variables_subshells_and_missing_arguments():
    assert words('A=\npython a.py ${A:-1} ${A-2} "${A-2}" ${B-3} ${B:-4}') == [["python", "a.py", "1", "", "3", "4"]]

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


TRAINING = "python -m openrlhf.cli.train_sft --pretrain m --dataset d.jsonl\n"


@pytest.mark.parametrize(
    "script",
    [
        "A=x\n" + "A=$A$A\n" * 60 + TRAINING,
        "A=" + "x" * 1_000 + "\necho " + "$A" * 10_000,
        'A="' + "x" * LONGEST + '"\n' + TRAINING,
        '"' + '\\"' * LONGEST,
        "read A <<EOF\n" * 5_000,
        "\n".join(f"export A{i}=1" for i in range(2_000)),
        "true\n" * 2_000,
    ],
)
def test_a_script_of_extreme_size_is_refused(script):
    with pytest.raises(InputError, match="larger than the command of a training run") as error:
        read_commands(script, {})
    assert len(str(error.value)) < 300


def test_a_script_within_the_limits_is_read():
    quotation = "x" * 60_000 + '\\"' * 30_000
    (command,) = read_commands(f'A={"y" * 100}\necho "{quotation}" $A', {})
    assert [len(word) for word in command.words] == [4, 90_000, 100]


def test_scripts_that_run_each_other_without_end_are_refused(tmp_path):
    for number in range(24):
        (tmp_path / f"{number}.sh").write_text(f"bash {tmp_path / str(number + 1)}.sh\n" * 2)
    (tmp_path / "24.sh").write_text(TRAINING)
    with pytest.raises(InputError, match="runs more than 100 scripts"):
        import_commands(str(tmp_path / "0.sh"), {})


def test_a_sparse_file_is_not_read_whole(tmp_path):
    for name in ("run.sh", "rows.json"):
        with (tmp_path / name).open("wb") as file:
            os.truncate(file.fileno(), 8 << 30)
    with pytest.raises(InputError):
        import_commands(str(tmp_path / "run.sh"), {})
    assert count_rows(str(tmp_path / "rows.json")) is None

    # Rows are counted however long their lines are.
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"{}\n\n  \n" + b"1" * (3 << 20) + b"\n" + b" " * (2 << 20) + b"\n{}")
    assert count_rows(str(file)) == 3
