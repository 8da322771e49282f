"""Disk usage of runs, and the space that is freed when they end."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from posttrain.cli.main import main
from posttrain.distributed.tensors import read_all
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.run import CheckpointRecipe
from posttrain.recipe.stages import Recipe
from posttrain.runs import storage
from posttrain.runs.directory import RunDirectory
from posttrain.runs.storage import has_state, share_equal_files, size_text, usage_of
from posttrain.runs.tables import IMPROVED, NOTHING, UNSHOWN, WORSE
from posttrain.stages import run_stage
from posttrain.training.checkpoint import Checkpoints
from tests.training import small

KEPT = {"every": 1, "keep_state": "always"}


@pytest.fixture(autouse=True, scope="module")
def small_files_are_shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_SHARED_FROM", 10_000)
        patch.setenv("COLUMNS", "200")
        yield


def typed(tiny_model, runs, **changes):
    values = small.recipe_values(tiny_model, runs, plots=False)
    return TypeAdapter(Recipe).validate_python(values | small.two_steps(values) | changes)


def finished(tiny_model, runs, **changes):
    return run_stage(typed(tiny_model, runs, **changes), console=Console(file=io.StringIO()))


def resumed(recipe):
    """What resuming a run prints."""
    printed = io.StringIO()
    run_stage(recipe, resume=True, console=Console(file=printed, width=200))
    return printed.getvalue()


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A run that kept its training state."""
    return finished(tiny_model, tmp_path_factory.mktemp("whole"), name="whole", checkpoint=KEPT, export="last")


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of that run, with its links."""
    subprocess.run(["cp", "-a", str(whole.path), str(tmp_path / "whole")], check=True)
    return RunDirectory(tmp_path / "whole")


def states(run):
    return [(path / "tensors").is_dir() for path in sorted(run.checkpoints.glob("step_*"))]


def test_a_run_that_has_ended_has_no_training_state_and_its_weights_once(tiny_model, tmp_path, whole):
    recipe = typed(tiny_model, tmp_path, checkpoint={"every": 1}, export="last")
    run = run_stage(recipe, console=Console(file=io.StringIO()))
    assert usage_of(run).ended
    assert not has_state(run)
    assert states(run) == [False]
    last = run.checkpoints / "step_000002" / "policy" / "model.safetensors"
    assert (run.path / "model" / "model.safetensors").samefile(last)
    assert usage_of(run).freed == 0
    assert usage_of(run).total < usage_of(whole).total / 2
    # Resuming it has nothing to do, unless more steps are requested.
    before = run.metrics.read_bytes()
    assert "has ended; its report is" in resumed(recipe)
    assert run.metrics.read_bytes() == before
    with pytest.raises(InputError, match=r"has ended at step 2 and its training state is deleted.*keep_state=always"):
        run_stage(recipe.model_copy(update={"steps": 3}), resume=True)
    first, *_ = sorted(whole.checkpoints.glob("step_*"))
    assert first.name != "step_000000"  # `keep` is 2
    assert any(name.startswith("optimizer/") for name in read_all(first / "tensors"))


def test_a_run_that_kept_its_state_makes_more_steps_without_changing_its_checkpoints(tiny_model, copied):
    recipe = typed(tiny_model, copied.path.parent, name="whole", checkpoint=KEPT, export="last")
    second = copied.checkpoints / "step_000002" / "policy" / "model.safetensors"
    weights = second.read_bytes()
    assert (copied.path / "model" / "model.safetensors").samefile(second)
    assert "has made all of its 2 steps; to train further, add steps=4" in resumed(recipe)
    resumed(recipe.model_copy(update={"steps": 3}))
    assert second.read_bytes() == weights != (copied.path / "model" / "model.safetensors").read_bytes()


def test_a_run_killed_after_step_0_resumes_to_the_same_bits(tiny_model, tmp_path):
    """Step 0 leaves out the optimizer's tensors, which every process makes again."""
    ends = []
    for name, die_at in (("whole", None), ("killed", ("posttrain.training.updater:Updater.update", 1))):
        (tmp_path / name).mkdir()
        log = tmp_path / name / "log.txt"
        values = small.recipe_values(tiny_model, tmp_path / name)
        values |= small.two_steps(values)
        values["evaluation"]["every"] = 2
        values |= {"credit": {"type": "gae"}, "critic": {"backbone": "separate"}, "kl": {"coefficient": 0.1}}
        values["kl"]["reference"] = {"mix": 0.5, "update_every": 1}
        assert small.run(values, die_at=die_at) == (0 if die_at is None else -9), log.read_text()
        if die_at is not None:
            step_0 = tmp_path / name / "small" / "checkpoints" / "step_000000"
            assert "optimizer" not in {key.partition("/")[0] for key in read_all(step_0 / "tensors")}
            assert small.run(values, resume=True) == 0, log.read_text()
        ends.append(small.weights(tmp_path / name / "small"))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("what", ["write_atomically", "shutil.rmtree"])
def test_a_deletion_that_a_kill_interrupted_is_completed(copied, monkeypatch, what):
    def killed(*words, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"posttrain.runs.storage.{what}", killed)
        with pytest.raises(KeyboardInterrupt):
            storage.free_space(copied)
    if has_state(copied):  # The oldest checkpoint is reduced first, so the run can still make more steps.
        assert states(copied)[-1]
    storage.free_space(copied)
    assert states(copied) == [False, False]
    assert not has_state(copied)


def test_a_file_system_without_links_keeps_copies(copied, monkeypatch):
    def refused(*paths):
        raise OSError

    model, copy = (copied.path / "model" / f"{name}.safetensors" for name in ("model", "copy"))
    copy.write_bytes(model.read_bytes())
    monkeypatch.setattr("os.link", refused)
    share_equal_files(copied)
    assert not copy.samefile(model)
    assert not list(copied.path.rglob("*.partial"))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_run_that_did_not_improve_shares_the_weights_of_its_start(
    tiny_model, copied, tmp_path, lora, capsys, monkeypatch
):
    monkeypatch.setattr("posttrain.training.trainer.Best.replaced_by", lambda *better: False)
    model = {**small.recipe_values(tiny_model, tmp_path)["model"], "path": str(copied.path / "model"), "lora": lora}
    changes = {"model": model, "export": "best", "checkpoint": {"every": 1, "keep": 1}}
    changes["evaluation"] = {"every": 1, "seeds": {"count": 4}, "final_seeds": {"count": 4}}
    run = finished(tiny_model, tmp_path, name="second", **changes)
    exported, start = (one.path / "model" / "model.safetensors" for one in (run, copied))
    assert exported.samefile(start)
    assert usage_of(run).shared >= exported.stat().st_size
    assert main(["runs", "list", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "are shared with the run or cache" in listed
    assert listed.splitlines()[-1] == f"rm -r {run.path}"
    # The link keeps its content when the start is replaced or deleted.
    weights = exported.read_bytes()
    shutil.rmtree(copied.path)
    assert exported.read_bytes() == weights
    Policy(ModelRecipe(path=str(run.path / "model")))
    assert usage_of(run).shared == 0


def test_a_folder_of_the_user_is_not_linked_to(copied, tmp_path):
    """Programs write a model in place, which would change the run."""
    shutil.copytree(copied.path / "model", tmp_path / "own")
    share_equal_files(copied, tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").stat().st_nlink == 1


def test_only_runs_that_nothing_needs_are_offered_for_deletion(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ended(name, outcome, *keys, runs="runs"):
        words = [f"name={name}", f"runs={runs}", "environment.type=bandit", *keys]
        run = RunDirectory.create(load_recipe([], words, "rl"))
        run.metrics.write_text(json.dumps({"step": 1, "kind": "final", "policy": "trained"}) + "\n")
        run.report.write_text("")
        verdict = {"outcome": outcome, "sentence": ".", "reasons": []}
        (run.path / "results.json").write_text(json.dumps({"verdict": verdict}))
        return run.path

    gone = {ended("still", NOTHING).name, ended("worse", WORSE).name}
    ended("improved", IMPROVED)
    ended("few", UNSHOWN)
    for name, key in (("policy", "model.path"), ("scorer", "reward.path")):
        start = ended(name, NOTHING)
        ended(f"after-{name}", IMPROVED, f"{key}={start}/model")
    ended("rm", NOTHING, runs="runs/chain")  # whose next stage has no run yet
    Path("runs/chain/started.json").write_text("{}")
    for folders in ([], ["runs"], [str(tmp_path / "runs")], ["runs/still", "runs/worse", "runs/policy", "runs/chain"]):
        assert main(["runs", "list", *folders]) == 0
        [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rm ")]
        assert {Path(path).name for path in command.split()[2:]} == gone


def test_runs_are_listed_and_cleaned_after_a_question(copied, tmp_path, capsys, monkeypatch):
    def runs(*words):
        assert main(["runs", *words]) == 0
        return capsys.readouterr().out

    freed, metrics = usage_of(copied).freed, copied.metrics.read_text()
    listed = runs("list", str(tmp_path))
    assert f"{copied.path}  rl     –            2" in listed
    assert f"1 run, {size_text(usage_of(copied).total)}; {size_text(freed)} to free" in listed
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert "nothing was deleted" in runs("clean", str(tmp_path))
    # A run that has not ended is not cleaned.
    lines = metrics.splitlines(keepends=True)
    copied.metrics.write_text("".join(line for line in lines if json.loads(line)["kind"] != "final"))
    assert "nothing to free" in runs("clean", str(copied.path), "--yes")
    assert states(copied) == [True, True]
    copied.metrics.write_text(metrics)
    assert usage_of(copied).freed == freed
    assert runs("clean", str(tmp_path), "--yes").splitlines()[-1] == "done"
    assert usage_of(copied).freed == 0
    assert (copied.path / "model" / "model.safetensors").is_file()
    assert "nothing to free" in runs("clean", str(tmp_path), "--yes")
    assert main(["runs", "list", str(tmp_path / "none")]) == 2
    assert "there is no run in" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["closed", "", "perhaps\n"])
def test_runs_are_not_cleaned_without_an_answer(copied, given):
    before = sorted(copied.path.rglob("*"))
    shell = 'exec "$@" <&-' if given == "closed" else 'exec "$@"'
    words = ["sh", "-c", shell, "sh", sys.executable, "-m", "posttrain.cli.main", "runs", "clean", str(copied.path)]
    typed = None if given == "closed" else given
    done = subprocess.run(words, input=typed, capture_output=True, text=True, check=False)
    assert sorted(copied.path.rglob("*")) == before
    assert done.returncode == 2
    assert "--yes" in done.stderr.splitlines()[-1]
    assert "unexpected" not in done.stderr


def test_the_start_of_a_run_asks_for_room_on_the_disk(tiny_model, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 2_000_000})
    monkeypatch.setattr("posttrain.training.checkpoint.shutil.disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"checkpoints needs [\d.]+ MB for .*, and the disk has 2 MB free"):
        finished(tiny_model, tmp_path, checkpoint={"every": 1, "keep": 50})
    finished(tiny_model, tmp_path, checkpoint={"every": 100, "keep": 1})  # The name is free again.


def test_the_room_that_checkpoints_need(tiny_model, tmp_path, monkeypatch):
    """Closed form: `keep` whole ones and one that is being written, policies of others, the best one and the model."""
    (tmp_path / "checkpoints").mkdir()
    usage = type("usage", (), {})
    monkeypatch.setattr("posttrain.training.checkpoint.shutil.disk_usage", lambda path: usage)
    for rules, needed in (
        ({"keep": 2}, 3 * 1100 + 2 * 100),
        ({"keep": 1, "every": 5}, 2 * 1100 + 2 * 100),
        ({"keep": "all", "every": 2}, 3 * 1100 + (2 + 10) * 100),
    ):
        checkpoints = Checkpoints(tmp_path / "checkpoints", "run", CheckpointRecipe(**rules))
        usage.free = needed
        checkpoints.require_room(20, 100, 1000)
        usage.free = needed - 1
        with pytest.raises(InputError, match=r"checkpoint\.keep"):
            checkpoints.require_room(20, 100, 1000)
    policy = Policy(ModelRecipe(path=str(tiny_model), dtype="float32"))
    policy.save(tmp_path / "policy")
    counted = sum(tensor.numel() * tensor.element_size() for tensor in policy.saved_tensors().values())
    written = (tmp_path / "policy" / "model.safetensors").stat().st_size
    assert written <= counted * 1.01 + 50_000  # Tied weights count twice.
