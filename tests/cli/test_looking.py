"""Looking at the run directory of a stranger runs nothing that it names."""

import shutil

import pytest

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe.sources import read_file, read_overrides, read_text
from posttrain.runs.directory import RunDirectory
from tests.training import small

ENVIRONMENT = """
from pathlib import Path
import posttrain

Path({mark!r}).write_text("imported")


class Own(posttrain.Environment):
    class Recipe(posttrain.EnvironmentRecipe):
        letters: str = "ab"

    def reset(self, seed):
        return posttrain.Observation([{{"role": "user", "content": "say " + self.recipe.letters}}])

    def step(self, action):
        return posttrain.Step([], len(set(action)) / 10, terminated=True, truncated=False, info={{"success": True}})
"""


@pytest.fixture(scope="module")
def strangers(tiny_model, tmp_path_factory):
    """A finished run whose environment is a file that leaves a mark when it is imported; the mark is removed."""
    folder = tmp_path_factory.mktemp("stranger")
    mark = folder / "mark"
    file = folder / "own.py"
    file.write_text(ENVIRONMENT.format(mark=str(mark)))
    values = small.recipe_values(
        tiny_model, folder / "runs", name="own", environment={"type": str(file), "letters": "abc"}
    )
    values |= small.two_steps(values)
    values["evaluation"]["final_seeds"]["count"] = 3
    (folder / "runs").mkdir()
    assert small.run(values) == 0
    mark.unlink()
    return folder / "runs" / "own", mark


@pytest.mark.parametrize(
    "words",
    [["report"], ["plot"], ["episodes"], ["episodes", "--step", "1"], ["compare", "OTHER"], ["table"]],
    ids=lambda words: words[0],
)
def test_viewing_imports_nothing(strangers, words, tmp_path, monkeypatch, capsys):
    run, mark = strangers
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run, tmp_path / "other")
    command = [words[0], str(run), *(str(other) if word == "OTHER" else word for word in words[1:])]
    assert main(command) == 0, capsys.readouterr()
    assert not mark.exists()


def test_the_recipe_keeps_the_keys_of_an_environment_that_is_not_imported(strangers):
    run, mark = strangers
    recipe = RunDirectory.open(run).load_recipe()
    assert recipe.model_dump()["environment"]["letters"] == "abc"
    assert not mark.exists()


def bomb(levels, width):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(12, 9), "its aliases expand to more than 100,000 values"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deep"),
        ("a: " + "{b: " * 3000 + "}" * 3000, "nested too deep"),
        ("steps: " + "9" * 10_000, "a value cannot be read .Exceeds the limit"),
        ("seed: 0x" + "f" * 6_000, "a whole number of 24,000 bits"),
        ("name: !!timestamp soon", "a value cannot be read"),
        ("name: !!bool soon", "a value cannot be read"),
        ('name: "\\ud800"', "a lone surrogate"),
    ],
    ids=["aliases", "lists", "sections", "digits", "hexadecimal", "timestamp", "bool", "surrogate"],
)
def test_a_small_text_cannot_stand_for_a_huge_recipe(text, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_text(text, "recipe.yaml")
    with pytest.raises(InputError, match=message):
        read_overrides(
            [f"rollout={text.partition(': ')[2]}" if "&" not in text else f"x={{{text.replace(chr(10), ', ')}}}"]
        )


def test_a_huge_recipe_file_is_not_read(tmp_path):
    (tmp_path / "recipe.yaml").write_text("#" * 2**21)
    with pytest.raises(InputError, match="is larger than 1 MiB"):
        read_file(str(tmp_path / "recipe.yaml"))


def test_a_bomb_in_a_run_directory_is_one_sentence(strangers, tmp_path):
    run = shutil.copytree(strangers[0], tmp_path / "run")
    (run / "recipe.yaml").write_text(bomb(12, 9))
    with pytest.raises(InputError, match="100,000 values"):
        RunDirectory.open(run).load_recipe()
    assert main(["report", str(run)]) == 0  # without the recipe


RESUMED = ["rl", "--dry-run", "--resume"]


def test_a_resumed_run_executes_a_file_elsewhere_only_with_trust(strangers, tmp_path, monkeypatch, capsys):
    run, mark = strangers
    monkeypatch.chdir(tmp_path)
    own = shutil.move(run.parents[1] / "own.py", tmp_path.parent / "own-elsewhere.py")
    try:
        copy = shutil.copytree(run, tmp_path / "resumed")
        recipe = copy / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace(str(run.parents[1] / "own.py"), str(own)))
        assert main([*RESUMED, str(copy)]) == 2
        assert f"{own} is outside the current folder and no argument names it" in capsys.readouterr().err
        assert not mark.exists()
        assert main([*RESUMED, str(copy), "--trust"]) == 0, capsys.readouterr()
        assert mark.exists()
    finally:
        shutil.move(own, run.parents[1] / "own.py")
        mark.unlink(missing_ok=True)


def test_files_of_this_folder_and_of_the_command_need_no_trust(strangers, tiny_model, tmp_path, monkeypatch, capsys):
    run, mark = strangers
    elsewhere, here = tmp_path / "elsewhere.py", tmp_path / "here" / "own.py"
    here.parent.mkdir()
    for file in (elsewhere, here):
        file.write_text((run.parents[1] / "own.py").read_text())
    monkeypatch.chdir(here.parent)
    for file in ("own.py", str(elsewhere)):
        main(["env", "validate", file])
        assert "is outside" not in capsys.readouterr().err
        assert mark.exists()
        mark.unlink()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"environment: {{type: '{elsewhere}'}}\n")
    assert main(["rl", str(recipe), f"model.path={tiny_model}", "--dry-run"]) == 2
    assert "add --trust" in capsys.readouterr().err
