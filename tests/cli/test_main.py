"""The command line as a whole: light, complete help, one sentence and the right code for every error."""

import errno
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from posttrain import __version__
from posttrain.cli.main import main
from posttrain.cli.stages import split_words
from posttrain.errors import InputError, RunError
from posttrain.recipe.reference import keys_of
from posttrain.recipe.stages import STAGES

VERBS = ["rl", "sft", "evaluate", "generate", "pipeline", "plot", "episodes", "recipe", "env"]


@pytest.fixture
def stage(monkeypatch):
    """Replaces the running of a stage: calls are recorded, and `stage.error` is raised if set."""
    import posttrain.stages as module

    recorder = SimpleNamespace(calls=[], error=None)

    def run_stage(recipe, *, resume=False, overwrite=False, console=None, callbacks=()):
        recorder.calls.append((recipe, resume, overwrite))
        if recorder.error is not None:
            raise recorder.error
        return SimpleNamespace(path=None)

    monkeypatch.setattr(module, "run_stage", run_stage)
    monkeypatch.setattr("posttrain.verbs.Result", SimpleNamespace(open=lambda path: None))
    return recorder


def test_help_imports_little():
    code = (
        "import sys\nfrom posttrain.cli.main import main\nassert main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pydantic', 'gymnasium'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(sys.modules) < 550, len(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f" {verb} " in done.stdout for verb in VERBS)


def test_the_version_is_one_line(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"posttrain {__version__}\n"


def test_words_are_files_or_overrides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.yaml").write_text("steps: 1\n")
    words = ["r.yaml", "steps=3", "--entropy", "-1", "--kl.target=2", "a=b.yaml"]
    assert split_words(words) == (["r.yaml", "a=b.yaml"], ["steps=3", "--entropy", "-1", "--kl.target=2"])


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["train", "environment.type=bandit"], "`posttrain rl`"),
        (["sftt"], "`posttrain sft`"),
        (["runs", "prune"], "`posttrain runs clean`"),
        (["nonsense"], "`posttrain --help`"),
        (["sft", "--dry-rn", "data.train=chat.jsonl"], "--dry-run"),
        (["rl", "--resum=runs/run"], "--resume"),
        (["pipeline", "demo/pipeline", "--onyl", "sft"], "--only"),
        (["tune", "rlhf/tune_sft", "--gruop", "2"], "--group"),
        (["tune", "--trials", "3"], "rlhf/tune_sft"),
    ],
)
def test_a_misspelt_command_or_option_is_one_sentence_with_the_right_one(words, near, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("posttrain: ")
    assert near in line


def test_no_key_of_a_recipe_is_taken_for_a_misspelt_option():
    for stage in STAGES.values():
        for key in keys_of(stage):
            assert split_words([f"--{key.path}=1"], "--only", "--from", "--group")[1] == [f"--{key.path}=1"]


def test_overrides_reach_the_stage_in_any_spelling(stage):
    assert main(["rl", "environment.type=frozen_lake", "--steps", "3", "--kl.coefficient=0.5", "--overwrite"]) == 0
    [(recipe, resume, overwrite)] = stage.calls
    assert (recipe.environment.type, recipe.steps, recipe.kl.coefficient) == ("frozen_lake", 3, 0.5)
    assert (resume, overwrite, recipe.model.path) == (False, True, "packaged:smollm2-135m")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("no such model"), 2, "posttrain: no such model\n"),
        (RunError("the loss is not finite"), 1, "posttrain: the loss is not finite\n"),
        (KeyboardInterrupt("SIGTERM"), 130, "posttrain: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/run/metrics.jsonl"), 1, "the disk is full while"),
        (ValueError("I/O error: No space left on device (os error 28)"), 1, "a file could not be written: the disk"),
        (ValueError("two\nlines"), 1, "unexpected ValueError: two lines; run again with --debug for the traceback\n"),
    ],
)
def test_errors_are_one_sentence_and_a_code(stage, capsys, error, code, said):
    stage.error = error
    assert main(["rl"]) == code
    assert said in capsys.readouterr().err


def test_debug_shows_the_traceback_in_any_position(stage, capsys):
    stage.error = ValueError("broken")
    for words in (["--debug", "rl"], ["rl", "--debug"], ["rl", "steps=3", "--debug"]):
        assert main(words) == 1
        assert "Traceback" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory of a recipe of 5 steps."""
    from posttrain.recipe.compose import load_recipe
    from posttrain.runs.directory import RunDirectory

    monkeypatch.chdir(tmp_path)
    return RunDirectory.create(load_recipe([], ["steps=5", "seed=3"], "rl"))


def test_resuming_takes_the_run_s_own_recipe(stage, run):
    assert main(["rl", "--resume", str(run.path), "steps=9"]) == 0
    [(recipe, resume, _)] = stage.calls
    assert (recipe.seed, recipe.steps, recipe.runs, recipe.name, resume) == (3, 9, "runs", "run", True)


def test_fewer_steps_than_are_done_are_refused(stage, run, capsys):
    (run.checkpoints / "step_000004").mkdir()
    assert main(["rl", "--resume", str(run.path), "steps=3"]) == 2
    assert "posttrain: --resume runs/run: 4 steps are done and saved, more than steps = 3" in capsys.readouterr().err
    assert not stage.calls
    for words in ([], ["steps=4"], ["steps=5"]):
        assert main(["rl", "--resume", str(run.path), *words]) == 0
    assert [recipe.steps for recipe, _, _ in stage.calls] == [5, 4, 5]


def test_a_moved_run_resumes_where_it_is(stage, run, tmp_path):
    run.path.rename(tmp_path / "elsewhere")
    assert main(["rl", "--resume", "elsewhere"]) == 0
    recipe = stage.calls[0][0]
    assert (recipe.runs, recipe.name) == (str(tmp_path), "elsewhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=4"], "override seed=4: a resumed run keeps its recipe, except for steps and hardware; start a run"),
        (["r.yaml"], "--resume runs/run continues with the recipe of that run"),
        (["--overwrite"], "give only one of them"),
        (["sft"], "the recipe is for stage rl, not sft; run it with `posttrain rl`"),
    ],
)
def test_resume_refuses_other_options(stage, run, capsys, words, said):
    verb, *more = words if words == ["sft"] else ["rl", *words]
    assert main([verb, "--resume", str(run.path), *more]) == 2
    assert said in capsys.readouterr().err
    assert not stage.calls


def test_recipe_explains_keys(capsys):
    assert main(["recipe", "kl"]) == 0
    assert "kl.estimator" in capsys.readouterr().out
    assert main(["recipe", "kl.estimatr"]) == 2
    assert capsys.readouterr().err == "posttrain: stage rl has no key kl.estimatr; the nearest is kl.estimator\n"
    assert main(["recipe", "kl", "--stage", "ppo"]) == 2
    assert "posttrain: --stage ppo: there is no such stage; use rl, distill, sft, reward" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["rl", "environment.type=text_task", "environment.prompts={}.jsonl"],
        ["rl", "--resume", "{}"],
        ["report", "{}"],
    ],
    ids=" ".join,
)
def test_a_path_that_no_file_can_have_is_named(words, capsys):
    assert main([word.format("a" * 300) for word in words]) == 2
    error = capsys.readouterr().err
    assert "a" * 60 in error
    assert "--debug" not in error


@pytest.mark.parametrize("words", [[], ["sft"], ["evaluate"], ["env", "audit"]])
def test_a_help_text_has_examples_as_paragraphs_and_flags_without_values(words, capsys):
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--help" in text
    assert "<bool>" not in text
    assert words[:1] == ["env"] or re.search(r"\n +\n posttrain [^\n]+\n +\n posttrain ", text)
