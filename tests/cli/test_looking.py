"""Commands that only read an untrusted run directory run no code that it names."""

import shutil
import time
from pathlib import Path

import pytest
import yaml

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.plugins import is_trusted, trusting
from posttrain.recipe.sources import Layer, merge, read_file, read_overrides, read_text
from posttrain.runs.directory import RunDirectory
from posttrain.view.episodes import token_decoder
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


def own_run(model, runs, **environment):
    """The recipe of a short run in an environment."""
    values = small.recipe_values(model, runs, name="own", environment=environment)
    values |= small.two_steps(values)
    values["evaluation"]["final_seeds"]["count"] = 3
    return values


@pytest.fixture(scope="module")
def strangers(tiny_model, tmp_path_factory):
    """A finished run whose environment is a file that leaves a mark when it is imported; the mark is removed."""
    folder = tmp_path_factory.mktemp("stranger")
    mark = folder / "mark"
    file = folder / "own.py"
    file.write_text(ENVIRONMENT.format(mark=str(mark)))
    values = own_run(tiny_model, folder / "runs", type=str(file), letters="abc")
    (folder / "runs").mkdir()
    assert small.run(values) == 0
    mark.unlink()
    return folder / "runs" / "own", mark


@pytest.mark.parametrize(
    "words",
    [["report"], ["plot"], ["episodes"], ["episodes", "--step", "1"], ["compare", "OTHER"], ["export", "--out", "out"]],
    ids=lambda words: words[0],
)
def test_viewing_imports_nothing(strangers, words, tmp_path, monkeypatch, capsys):
    run, mark = strangers
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run, tmp_path / "other")
    command = [words[0], str(run), *(str(other) if word == "OTHER" else word for word in words[1:])]
    assert main(command) == 0, capsys.readouterr()
    assert RunDirectory.open(run).load_recipe().model_dump()["environment"]["letters"] == "abc"
    assert not mark.exists()


def test_viewing_downloads_nothing(strangers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("posttrain.models.load.resolve_path", lambda path: pytest.fail(f"{path} is looked up"))
    run = shutil.copytree(strangers[0], tmp_path / "run", ignore=shutil.ignore_patterns("model", "checkpoints"))
    values = yaml.safe_load((run / "recipe.yaml").read_text())
    values["model"]["path"] = "stranger/tracked"
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))
    for words in (["episodes", str(run), "--step", "1"], ["report", str(run)]):
        assert main(words) == 0
    assert token_decoder(RunDirectory.open(run)) is None
    assert "stranger/tracked is not on this machine" in capsys.readouterr().err


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
        ("steps: " + "1:" * 300_000 + "1", "a whole number of 600,001 characters in line 1"),
        ("seed: 0x" + "f" * 6_000, "a whole number of 24,000 bits"),
        ("name: !!timestamp soon", "is not YAML"),
        ("name: !!bool soon", "a value cannot be read"),
        ('name: "\\ud800"', "not YAML"),  # a lone surrogate
    ],
    ids=["aliases", "lists", "sections", "digits", "base 60", "hexadecimal", "timestamp", "bool", "surrogate"],
)
def test_a_small_file_cannot_expand_to_a_huge_recipe(text, message):
    override = f"x={{{text.replace(chr(10), ', ')}}}" if "&" in text else f"rollout={text.partition(': ')[2]}"
    for read in (lambda: read_text(text, "recipe.yaml"), lambda: read_overrides([override])):
        with pytest.raises(InputError, match=message):
            read()


def test_a_huge_recipe_is_not_read_and_backslashes_are_merged_in_linear_time(tmp_path):
    (tmp_path / "recipe.yaml").write_text("#" * 2**21)
    with pytest.raises(InputError, match="is larger than 1 MiB"):
        read_file(str(tmp_path / "recipe.yaml"))
    started, text = time.process_time(), "\\" * 400_000
    assert merge([Layer({"name": text})]).values["name"] == text
    assert time.process_time() - started < 5


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
        assert f"environment.type: {own} (executes)" in capsys.readouterr().err
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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"agent": {"command": "sh -c 'touch x'", "reward": "report"}}, "agent.command: sh -c 'touch x'"),
        ({"environment": {"type": "text_task", "mcp": [{"command": "sh x"}]}}, "environment.mcp.0.command: sh x"),
        ({"environment": {"type": "text_task", "tools": ["os:system"]}}, "environment.tools.0: os:system"),
        ({"environment": {"type": "text_task", "reward": "os:system"}}, "environment.reward: os:system"),
        ({"environment": {"type": "gymnasium", "id": "x:Y-v0"}}, "environment.id: x:Y-v0"),
        ({"environment": {"type": "verifiers", "taskset": "x"}}, "environment.taskset: x"),
        ({"environment": {"type": "x.y:Own"}}, "environment.type: x.y:Own"),
        ({"environment": {"type": "resumed/inside.py"}}, "environment.type: resumed/inside.py"),
        ({"model": {"path": "x", "trust_remote_code": True}}, 'model.trust_remote_code: {"trust_remote_code": true'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.partition(":")[0],
)
def test_a_resumed_run_starts_nothing_that_it_names(strangers, changes, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(strangers[0], tmp_path / "resumed")
    (copy / "inside.py").write_text("open('ran', 'w')\n")
    recipe = copy / "recipe.yaml"
    values = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**values, "environment": {"type": "bandit"}, **changes}))
    for words in (["--dry-run"], []):
        assert main(["rl", "--resume", str(copy), *words]) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_the_user_s_own_run_resumes_without_trust_until_its_file_changes(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mark, own = tmp_path / "mark", tmp_path / "own.py"
    own.write_text(ENVIRONMENT.format(mark=str(mark)))
    values = own_run(tiny_model, tmp_path / "runs", type="own.py")
    values["checkpoint"] = {"keep_state": "always"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert main(["rl", "recipe.yaml"]) == 0, capsys.readouterr()
    for words in (["rl", "--resume", "runs/own", "steps=3"], ["rl", "runs/own/recipe.yaml", "name=again", "--dry-run"]):
        assert main(words) == 0, capsys.readouterr()
    own.write_text(own.read_text() + "# changed\n")
    assert main(["rl", "--resume", "runs/own", "steps=4"]) == 2
    assert "changed since your last run" in capsys.readouterr().err
    assert main(["rl", "runs/own/recipe.yaml", "name=again", "--dry-run"]) == 2
    assert main(["rl", "--resume", "runs/own", "environment.type=other.py"]) == 2
    assert "keeps its recipe" in capsys.readouterr().err
    assert main(["rl", "--resume", "runs/own", "steps=4", "environment.type=own.py"]) == 0, capsys.readouterr()
    assert main(["rl", "--resume", "runs/own", "steps=5", "--dry-run"]) == 0, capsys.readouterr()


@pytest.mark.parametrize("words", [["rl"], ["evaluate"], ["evaluate", "--all", "model.path=x"]], ids=" ".join)
def test_the_recipe_of_a_run_given_as_a_file_needs_trust_too(strangers, words, tmp_path, monkeypatch, capsys):
    run, mark = strangers
    monkeypatch.chdir(tmp_path)
    for changes in ({}, {"engine": {"type": "openai", "url": "http://x", "model": "y"}}):
        copy = shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
        recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
        (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
        assert main([words[0], "run/recipe.yaml", *words[1:], "name=other"]) == 2
        error = capsys.readouterr().err
        assert "add --trust" in error
        assert ("engine.url: http://x (connects)" in error) == (bool(changes) and words[0] == "evaluate")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["demo.pythia", "a.py", "b.py:c"])
def test_a_run_with_py_in_its_name_executes_no_file_of_its_own(strangers, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(strangers[0], tmp_path / "runs" / name)
    (copy / "inside.py").write_text("open('ran', 'w')\n")
    values = yaml.safe_load((copy / "recipe.yaml").read_text())
    for environment in (
        {"type": f"runs/{name}/inside.py"},
        {"type": f"runs/{name}/inside.py:/../../../own.py"},
        {"type": "text_task", "reward": f"runs/{name}/inside.py:f", "prompts": "rows.jsonl"},
    ):
        (copy / "recipe.yaml").write_text(yaml.safe_dump(values | {"environment": environment}))
        for words in (["--dry-run"], []):
            assert main(["rl", "--resume", str(copy), *words]) == 2
            assert f"runs/{name}/inside.py" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_file_whose_path_is_a_part_of_a_word_is_not_named_by_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("/elsewhere/own.py")
    for words, trusted in (
        (["rl", "--resume", "/elsewhere/own.py.run"], False),
        (["--resume", "/x/elsewhere/own.py"], False),
        (["environment.reward=/elsewhere/own.py:score"], True),
        (["environment.tools=[/x.py:a,/elsewhere/own.py:b]"], True),
        (["env", "validate", "/elsewhere/own.py"], True),
    ):
        with trusting(words):
            assert is_trusted(file) == trusted, words
