"""The commands of the README work."""

import io
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from posttrain.cli.main import main
from tests.docs.walk import blocks
from tests.journeys import dry

ROOT = Path(__file__).parent.parent
COMMANDS = [
    re.sub(r"\s+# .*", "", line.removeprefix("$ "))
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    for line in block.splitlines()
]


@pytest.fixture(autouse=True)
def in_a_copy(tmp_path, monkeypatch, finished_run):
    """Run outside of the checkout, with the runs, rows and files that the README names."""
    for name in ("bandit/rl", "mine"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).symlink_to(finished_run)
    rows = [{"prompt": f"Say {number}.", "completion": str(number), "word": "cat"} for number in range(30)]
    for name in ("rows", "prompts"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for language, file, text in blocks("README.md"):
        if file:
            assert language == "python"
            (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished_run(tiny_model, tmp_path_factory):
    """A whole small run, standing for the demo's."""
    from tests.training import small

    runs = tmp_path_factory.mktemp("readme")
    values = small.recipe_values(tiny_model, runs, steps=10, checkpoint={"every": 5})
    # A module and no file, which would lie outside the folder in which the commands run.
    values["environment"] |= {"type": "tests.training.letters:Letters", "max_turns": 1}
    values["evaluation"]["every"] = 5
    assert small.run(values) == 0, (runs / "log.txt").read_text()
    return runs / "small"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("posttrain")])
def test_a_command_of_the_readme_runs(command, monkeypatch, capsys):
    words = shlex.split(dry(command))[1:]
    if words[0] == "chat":
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    code, shown = main(words), capsys.readouterr()
    assert code == 0, shown
    assert "cannot show that anything was learned" not in shown.out + shown.err


def test_targets_and_extras_of_the_readme_exist():
    assert all(command.startswith(("posttrain", "make", "pip install")) for command in COMMANDS)
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        if command.startswith("make"):
            listed = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
            assert listed.returncode == 0, listed.stderr
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = [
        re.search(r"\.\[([\w,]+)\]", one) for one in COMMANDS if one.startswith("pip install") and " -e " in one
    ]
    assert set(named[1].split(",")) <= set(extras)
