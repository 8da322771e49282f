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


@pytest.fixture(autouse=True)
def small_files_are_shared(monkeypatch):
    monkeypatch.setattr(storage, "_SHARED_FROM", 10_000)


def typed(tiny_model, runs, **changes):
    values = small.recipe_values(tiny_model, runs, plots=False)
    return TypeAdapter(Recipe).validate_python(values | small.two_steps(values) | changes)


def finished(tiny_model, runs, **changes):
    return run_stage(typed(tiny_model, runs, **changes), console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A run that kept its training state."""
    checkpoint = {"every": 1, "keep_state": "always"}
    return finished(tiny_model, tmp_path_factory.mktemp("whole"), name="whole", checkpoint=checkpoint)


def states(run):
    return [(path / "tensors").is_dir() for path in sorted(run.checkpoints.glob("step_*"))]


def test_a_run_that_has_ended_has_no_training_state_and_its_weights_once(tiny_model, tmp_path, whole):
    said = io.StringIO()
    recipe = typed(tiny_model, tmp_path, checkpoint={"every": 1}, export="last")
    run = run_stage(recipe, console=Console(file=said, width=200))
    assert usage_of(run).ended
    assert not has_state(run)
    assert states(run) == [False]
    last = run.checkpoints / "step_000002" / "policy" / "model.safetensors"
    assert (run.path / "model" / "model.safetensors").samefile(last)
    assert usage_of(run).freed == 0
    assert usage_of(run).total < usage_of(whole).total / 2
    # Resuming it has nothing to do, unless more steps are requested.
    again = io.StringIO()
    before = run.metrics.read_bytes()
    run_stage(recipe, resume=True, console=Console(file=again, width=200))
    assert "has ended; its report is" in again.getvalue()
    assert run.metrics.read_bytes() == before
    with pytest.raises(InputError, match=r"has ended at step 2 and its training state is deleted.*keep_state=always"):
        run_stage(recipe.model_copy(update={"steps": 3}), resume=True)


def test_a_run_that_kept_its_state_makes_more_steps_without_changing_its_checkpoints(tiny_model, tmp_path):
    recipe = typed(tiny_model, tmp_path, checkpoint={"every": 1, "keep": 9, "keep_state": "always"}, export="last")
    run = run_stage(recipe, console=Console(file=io.StringIO()))
    second = run.checkpoints / "step_000002" / "policy" / "model.safetensors"
    weights = second.read_bytes()
    assert (run.path / "model" / "model.safetensors").samefile(second)
    said = io.StringIO()
    run_stage(recipe, resume=True, console=Console(file=said, width=200))
    assert "has made all of its 2 steps; to train further, add steps=4" in said.getvalue()
    run_stage(recipe.model_copy(update={"steps": 3}), resume=True, console=Console(file=io.StringIO()))
    assert second.read_bytes() == weights != (run.path / "model" / "model.safetensors").read_bytes()


def test_step_0_has_the_policy_and_no_state_of_the_optimizer(whole):
    first, *_ = sorted(whole.checkpoints.glob("step_*"))
    assert first.name != "step_000000"  # `keep` is 2
    assert any(name.startswith("optimizer/") for name in read_all(first / "tensors"))


def test_a_run_killed_after_step_0_resumes_to_the_same_bits(tiny_model, tmp_path):
    """Step 0 leaves out the optimizer's tensors, which every process makes again."""
    ends = []
    for name, die_at in (("whole", None), ("killed", ("posttrain.training.updater:Updater.update", 1))):
        (tmp_path / name).mkdir()
        values = small.recipe_values(tiny_model, tmp_path / name)
        values |= small.two_steps(values)
        values["evaluation"]["every"] = 2
        values |= {"credit": {"type": "gae"}, "critic": {"backbone": "separate"}, "kl": {"coefficient": 0.1}}
        values["kl"]["reference"] = {"mix": 0.5, "update_every": 1}
        assert small.run(values, die_at=die_at) == (0 if die_at is None else -9), (
            tmp_path / name / "log.txt"
        ).read_text()
        if die_at is not None:
            step_0 = tmp_path / name / "small" / "checkpoints" / "step_000000"
            assert "optimizer" not in {key.partition("/")[0] for key in read_all(step_0 / "tensors")}
            assert small.run(values, resume=True) == 0, (tmp_path / name / "log.txt").read_text()
        ends.append(small.weights(tmp_path / name / "small"))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("what", ["write_atomically", "shutil.rmtree"])
def test_a_deletion_that_a_kill_interrupted_is_completed(tiny_model, tmp_path, monkeypatch, what):
    recipe = typed(tiny_model, tmp_path, checkpoint={"every": 1, "keep_state": "always"})
    run = run_stage(recipe, console=Console(file=io.StringIO()))

    def killed(*words, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"posttrain.runs.storage.{what}", killed)
        with pytest.raises(KeyboardInterrupt):
            storage.free_space(run)
    if has_state(run):  # The oldest checkpoint is reduced first, so the run can still make more steps.
        assert states(run)[-1]
    storage.free_space(run)
    assert states(run) == [False, False]
    assert not has_state(run)


def test_a_file_system_without_links_keeps_copies(whole, monkeypatch, tmp_path):
    def refused(*paths):
        raise OSError

    (whole.path / "model" / "copy.safetensors").write_bytes((whole.path / "model" / "model.safetensors").read_bytes())
    monkeypatch.setattr("os.link", refused)
    share_equal_files(whole)
    assert not (whole.path / "model" / "copy.safetensors").samefile(whole.path / "model" / "model.safetensors")
    assert not list(whole.path.rglob("*.partial"))
    (whole.path / "model" / "copy.safetensors").unlink()


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_run_that_did_not_improve_shares_the_weights_of_its_start(tiny_model, tmp_path, lora, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("posttrain.training.trainer.Best.replaced_by", lambda *better: False)
    first = finished(tiny_model, tmp_path, name="first", export="last")
    model = {**small.recipe_values(tiny_model, tmp_path)["model"], "path": str(first.path / "model"), "lora": lora}
    changes = {
        "model": model,
        "export": "best",
        "evaluation": {"every": 1, "seeds": {"count": 4}, "final_seeds": {"count": 4}},
    }
    run = finished(tiny_model, tmp_path, name="second", checkpoint={"every": 1, "keep": 1}, **changes)
    exported, start = (one.path / "model" / "model.safetensors" for one in (run, first))
    assert exported.samefile(start)
    assert usage_of(run).shared >= exported.stat().st_size
    assert main(["runs", "list", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "are shared with the run or cache" in listed
    assert listed.splitlines()[-1] == f"rm -r {run.path}"
    # The link keeps its content when the start is replaced or deleted.
    weights = exported.read_bytes()
    shutil.rmtree(first.path)
    assert exported.read_bytes() == weights
    Policy(ModelRecipe(path=str(run.path / "model")))
    assert usage_of(run).shared == 0


def test_a_folder_of_the_user_is_not_linked_to(tiny_model, tmp_path):
    """Programs write a model in place, which would change the run."""
    shutil.copytree(tiny_model, tmp_path / "own")
    run = finished(tmp_path / "own", tmp_path, optimizer={"learning_rate": 1e-30})
    share_equal_files(run, tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").stat().st_nlink == 1


def test_only_runs_that_nothing_needs_are_offered_for_deletion(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def ended(name, outcome, *keys, runs="runs"):
        run = RunDirectory.create(
            load_recipe([], [f"name={name}", f"runs={runs}", "environment.type=bandit", *keys], "rl")
        )
        run.metrics.write_text(json.dumps({"step": 1, "kind": "final", "policy": "trained"}) + "\n")
        run.report.write_text("")
        (run.path / "results.json").write_text(
            json.dumps({"verdict": {"outcome": outcome, "sentence": ".", "reasons": []}})
        )
        return run.path

    gone = [ended("still", NOTHING), ended("worse", WORSE)]
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
        assert {Path(path).name for path in command.split()[2:]} == {path.name for path in gone}


def test_runs_are_listed_and_cleaned_after_a_question(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = finished(tiny_model, tmp_path, checkpoint={"every": 1, "keep_state": "always"})
    freed = usage_of(run).freed
    assert main(["runs", "list", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert f"{run.path}  rl     –            2" in listed
    assert f"1 run, {size_text(usage_of(run).total)}; {size_text(freed)} to free" in listed
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert main(["runs", "clean", str(tmp_path)]) == 0
    assert "nothing was deleted" in capsys.readouterr().out
    assert usage_of(run).freed == freed
    assert main(["runs", "clean", str(tmp_path), "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "done"
    assert usage_of(run).freed == 0
    assert (run.path / "model" / "model.safetensors").is_file()
    assert main(["runs", "clean", str(tmp_path), "--yes"]) == 0
    assert "nothing to free" in capsys.readouterr().out
    assert main(["runs", "list", str(tmp_path / "none")]) == 2
    assert "there is no run in" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["closed", "", "n\n", "perhaps\n"])
def test_runs_are_not_cleaned_without_an_answer(tiny_model, tmp_path, given):
    run = finished(tiny_model, tmp_path, checkpoint={"every": 1, "keep_state": "always"})
    before = sorted(run.path.rglob("*"))
    shell = 'exec "$@" <&-' if given == "closed" else 'exec "$@"'
    words = ["sh", "-c", shell, "sh", sys.executable, "-m", "posttrain.cli.main", "runs", "clean", str(run.path)]
    done = subprocess.run(
        words, input=None if given == "closed" else given, capture_output=True, text=True, check=False
    )
    assert sorted(run.path.rglob("*")) == before
    if given == "n\n":
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 2
    assert "--yes" in done.stderr.splitlines()[-1]
    assert "unexpected" not in done.stderr


def test_a_run_that_has_not_ended_is_not_cleaned(tiny_model, tmp_path, capsys):
    run = finished(tiny_model, tmp_path, checkpoint={"every": 1, "keep_state": "always"})
    lines = [line for line in run.metrics.read_text().splitlines(keepends=True) if json.loads(line)["kind"] != "final"]
    run.metrics.write_text("".join(lines))
    assert main(["runs", "clean", str(run.path), "--yes"]) == 0
    assert states(run) == [True, True]
    assert "nothing to free" in capsys.readouterr().out


def test_the_start_of_a_run_asks_for_room_on_the_disk(tiny_model, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 2_000_000})
    monkeypatch.setattr("posttrain.training.checkpoint.shutil.disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"checkpoints needs [\d.]+ MB for .*, and the disk has 2 MB free"):
        finished(tiny_model, tmp_path, checkpoint={"every": 1, "keep": 50})
    finished(tiny_model, tmp_path, checkpoint={"every": 100, "keep": 1})  # The name is free again.


def test_the_room_that_checkpoints_need(tiny_model, tmp_path, monkeypatch):
    """Closed form: `keep` whole ones and one that is being written, policies of others, the best one and the model."""
    (tmp_path / "checkpoints").mkdir()
    free = [0]
    monkeypatch.setattr(
        "posttrain.training.checkpoint.shutil.disk_usage", lambda path: type("usage", (), {"free": free[0]})
    )
    for rules, needed in (
        ({"keep": 2}, 3 * 1100 + 2 * 100),
        ({"keep": 1, "every": 5}, 2 * 1100 + 2 * 100),
        ({"keep": "all", "every": 2}, 3 * 1100 + (2 + 10) * 100),
    ):
        checkpoints = Checkpoints(tmp_path / "checkpoints", "run", CheckpointRecipe(**rules))
        free[0] = needed
        checkpoints.require_room(20, 100, 1000)
        free[0] = needed - 1
        with pytest.raises(InputError, match=r"checkpoint\.keep"):
            checkpoints.require_room(20, 100, 1000)


def test_a_policy_counts_what_its_checkpoint_holds(tiny_model, tmp_path):
    policy = Policy(ModelRecipe(path=str(tiny_model), dtype="float32"))
    policy.save(tmp_path / "policy")
    counted = sum(tensor.numel() * tensor.element_size() for tensor in policy.saved_tensors().values())
    written = (tmp_path / "policy" / "model.safetensors").stat().st_size
    assert written <= counted * 1.01 + 50_000  # Tied weights count twice.
