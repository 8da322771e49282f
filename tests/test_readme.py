"""The commands of the README work."""

import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from posttrain.cli.main import main
from tests.journeys import dry

ROOT = Path(__file__).parent.parent
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    for line in block.splitlines()
]


@pytest.fixture(autouse=True)
def in_a_copy(tmp_path, monkeypatch, finished_run, reward_model, rationales):
    """Run outside of the checkout, with the runs and the data that the README names."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rationales").symlink_to(rationales)
    for name in ("demo/rl", "first", "credit", "memory/rl"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).symlink_to(finished_run)
    for name in ("sft", "rm", "rlhf"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "model").symlink_to(reward_model if name == "rm" else finished_run / "model")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def rationales(tmp_path_factory):
    """The data that the README's commands make and read."""
    from posttrain.data.rationales.dataset import write_dataset

    write_dataset(out := tmp_path_factory.mktemp("data") / "rationales", 0, {"train": 400, "val": 50, "test": 50})
    return out


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    from posttrain.models.reward import RewardModel
    from posttrain.recipe.model import ModelRecipe

    RewardModel(ModelRecipe(path=str(tiny_model)), seed=0).export(out := tmp_path_factory.mktemp("reward") / "model")
    return out


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
    if words[:2] == ["env", "list"]:
        words += ["--seeds", "5"]
    if words[:2] == ["env", "play"]:
        answers = iter(["right", "down", "left", "up", "right", "down"])
        monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    if words[:2] == ["memory", "chat"]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"/notes\n")))
    if words[0] == "chat":
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(words) == 0, capsys.readouterr()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_a_target_of_the_readme_exists(command):
    listed = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr


def test_every_command_is_tested():
    assert all(command.startswith(("posttrain", "make")) for command in COMMANDS)
    assert len(COMMANDS) > 10


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
