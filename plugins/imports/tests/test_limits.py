"""Scripts that would take all memory or hours are refused with one sentence."""

import os

import pytest

from posttrain.errors import InputError
from posttrain_import.commands import import_commands
from posttrain_import.rows import count_rows
from posttrain_import.shell import LONGEST, read_commands

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
