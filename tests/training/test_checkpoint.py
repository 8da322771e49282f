"""Checkpoints: verified when read, rotated, and never incomplete."""

import errno
import json
import math
import re
import shutil
import threading
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from posttrain.cli.main import main
from posttrain.distributed.tensors import read_all
from posttrain.errors import InputError, RunError
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.run import CheckpointRecipe
from posttrain.training.checkpoint import Checkpoints
from posttrain.training.evaluators import EpisodeEvaluator
from posttrain.training.trainer import Best
from tests.conftest import save_tiny_model
from tests.distributed import together
from tests.distributed.test_parity import merged
from tests.training import preferences, small


@pytest.fixture(scope="module")
def policy(tiny_model):
    return Policy(ModelRecipe(path=str(tiny_model)))


@pytest.fixture(scope="module")
def first_four(policy, tmp_path_factory):
    """Checkpoints of steps 1..4 of run `mine`, of which 3 and 4 are the newest and 1 the best."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("four"), "mine", CheckpointRecipe(keep=2))
    for step in (1, 2, 3, 4):
        checkpoints.save(step, policy, {"m/exp_avg": torch.full((3,), float(step))}, {"step": step}, best=1)
    return checkpoints.directory


@pytest.fixture
def saved(first_four, tmp_path):
    folder = shutil.copytree(first_four, tmp_path / "checkpoints")
    return Checkpoints(folder, "mine", CheckpointRecipe(keep=2))


def _damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def full_disk(*arguments, **keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_newest_and_the_best_checkpoints_are_kept_and_a_step_can_be_saved_again(saved, policy):
    assert saved.steps() == [1, 3, 4]
    directory, tensors, state = saved.load(4)
    assert state == {"step": 4}
    assert {name: tensor.tolist() for name, tensor in read_all(tensors).items()} == {"m/exp_avg": [4.0] * 3}
    assert (directory / "model.safetensors").is_file()
    manifest = json.loads((saved.path(4) / "manifest.json").read_text())
    assert {"tensors/.metadata", "state.json", "policy/model.safetensors"} < set(manifest["files"])
    assert all(path.name.startswith("step_") for path in saved.directory.iterdir())
    saved.save(4, policy, {"m": torch.tensor(44)}, {"step": 4}, best=4)
    assert read_all(saved.load(4)[1]) == {"m": torch.tensor(44)}
    assert saved.steps() == [3, 4]


@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "state.json", "policy/model.safetensors"])
def test_a_changed_or_missing_file_is_detected(saved, name):
    _damage(saved.path(4) / name)
    with pytest.raises(InputError, match=rf"{name} is damaged: .*--fall-back to resume from step 3"):
        saved.load(4)
    (saved.path(4) / name).unlink()
    with pytest.raises(InputError, match=rf"{name} is damaged"):
        saved.load(4)


def test_a_file_of_someone_else_is_refused(saved):
    for harmless in ("notes.txt", "policy/.DS_Store"):
        (saved.path(4) / harmless).write_text("x")
    assert saved.load(4)[2] == {"step": 4}
    for name in ("policy/model-2.safetensors", "policy/inner/pytorch_model.bin", "tensors/__9_0.distcp"):
        file = saved.path(4) / name
        file.parent.mkdir(exist_ok=True)
        file.symlink_to("/etc/passwd")
        with pytest.raises(InputError, match=rf"{name} is not a file that posttrain wrote to this checkpoint"):
            saved.load(4)
        if name.startswith("policy"):
            with pytest.raises(InputError, match="is not a file that posttrain wrote"):
                saved.policy(4)
        else:
            assert saved.policy(4) == saved.path(4) / "policy"
        file.unlink()


def test_damaged_manifests_and_other_runs_and_models_are_refused(saved, tmp_path):
    other = Checkpoints(saved.directory, "other", CheckpointRecipe(keep=2))
    with pytest.raises(InputError, match=r"is a checkpoint of another run \(mine, this one is other\)"):
        other.load(4)
    with pytest.raises(InputError, match=r"does not have the model of"):
        Policy(str(save_tiny_model(tmp_path / "qwen", "qwen2"))).restore(saved.path(4) / "policy")
    for content in ("", "{", "[]", '{"files": {}}'):
        (saved.path(4) / "manifest.json").write_text(content)
        with pytest.raises(InputError, match=r"manifest.json is missing or damaged"):
            saved.load(4)


def test_a_full_disk_keeps_earlier_checkpoints(saved, policy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.training.checkpoint.os.fsync", full_disk)
        with pytest.raises(RunError, match=r"step_000005: the disk is full; free some space.*`--resume`"):
            saved.save(5, policy, {}, {}, best=1)
    with monkeypatch.context() as patch:  # in the thread: the run stops at its next checkpoint
        patch.setattr("posttrain.training.checkpoint.write_tensors", full_disk)
        saved.save(5, policy, {}, {}, 1, later=True)
        with pytest.raises(RunError, match=r"step_000005"):
            saved.wait()
    assert saved.steps() == [1, 3, 4]
    assert sorted(path.name for path in saved.directory.iterdir()) == ["step_000001", "step_000003", "step_000004"]
    saved.load(4)


@pytest.fixture
def saving(policy, tmp_path):
    """Saves the steps 1..6 by the rules of a recipe; the best is 1."""

    def save(**rules):
        checkpoints = Checkpoints(tmp_path, "mine", CheckpointRecipe(every=1, **rules))
        for step in range(1, 7):
            checkpoints.save(step, policy, {"m": torch.tensor(step)}, {"step": step}, best=1)
        return checkpoints

    return save


@pytest.mark.parametrize(("rules", "kept"), [({"keep": "all"}, [1, 2, 3, 4, 5, 6]), ({"keep": 2}, [1, 5, 6])])
def test_rules_keep_policies_and_the_newest_whole(saving, rules, kept):
    checkpoints = saving(**rules)
    assert checkpoints.steps() == kept
    for step in kept:
        assert (checkpoints.policy(step) / "model.safetensors").is_file()
        files = {file.name for file in checkpoints.path(step).iterdir()}
        assert files == {"policy", "manifest.json", *(["tensors", "state.json"] if step in kept[-2:] else [])}
    assert checkpoints.load(kept[-2])[2] == {"step": kept[-2]}
    with pytest.raises(InputError, match=rf"contains only the policy.*to resume from step {kept[-1]}, or start a run"):
        checkpoints.load(1)


def test_a_reduction_that_was_interrupted_is_repeated(saving, policy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("posttrain.training.checkpoint.delete_state", lambda path: None)
        checkpoints = saving(keep="all")
    shutil.rmtree(checkpoints.path(3) / "tensors")
    checkpoints.save(7, policy, {"m": torch.tensor(7)}, {}, best=1)
    assert [step for step in checkpoints.steps() if (checkpoints.path(step) / "state.json").exists()] == [6, 7]
    assert all(checkpoints.policy(step) for step in checkpoints.steps())


# -- the best checkpoint ---------------------------------------------------------------------------------------------------


def finished(tiny_model, runs, export):
    """A run of two steps, and its output."""
    values = small.recipe_values(tiny_model, runs, optimizer={"learning_rate": 1e-30}, export=export)
    values |= small.two_steps(values) | {"checkpoint": {"every": 1, "keep": "all"}}
    values["evaluation"]["every"] = 2
    return small.train(values)


@pytest.fixture(scope="module")
def last(tiny_model, tmp_path_factory):
    """A run that exported its last checkpoint."""
    return finished(tiny_model, tmp_path_factory.mktemp("last"), "last")


def scripted_curve(monkeypatch, values):
    """Make the evaluations of the learning curve return `values[step]`."""
    monkeypatch.setattr(EpisodeEvaluator, "curve", lambda self, step, played: {"n": 3, **values[step]})


TIED = {"success": 0.0, "return": -1.0}


def test_equal_returns_are_decided_by_the_validation_loss_then_by_the_last_step(tiny_model, tmp_path, monkeypatch):
    for before, after, is_replaced in [
        ((-1.0, None), (-1.0, None), True),
        ((-1.0, 2.0), (-1.0, 1.0), True),
        ((-1.0, 1.0), (-1.0, 2.0), False),
        ((-1.0, 1.0), (-1.0, 1.0), True),
        ((-1.0, math.nan), (-1.0, 2.0), True),
        ((-1.0, None), (-1.0, 2.0), True),
        ((0.5, 2.0), (0.4, 1.0), False),  # the metric counts more
        ((0.5, 1.0), (0.6, 2.0), True),
        ((0.5, 1.0), (math.nan, 0.5), False),
    ]:
        assert Best(0, *before).replaced_by(Best(1, *after)) == is_replaced, (before, after)
    assert Best(**json.loads('{"step": 0, "value": 0.5}')).replaced_by(Best(1, 0.5, 3.0)), "of an earlier version"
    scripted_curve(monkeypatch, {0: TIED | {"validation/loss": 1.0}, 2: TIED | {"validation/loss": 2.0}})
    (final,) = small.lines(finished(tiny_model, tmp_path, "best")[0], "final")
    assert final["best_step"] == 0


@pytest.mark.parametrize("export", ["best", "last"])
def test_the_exported_step_is_reported(export, last, tiny_model, tmp_path, monkeypatch):
    scripted_curve(monkeypatch, {0: TIED, 2: TIED | {"return": -2.0}})
    run, printed = last if export == "last" else finished(tiny_model, tmp_path, export)
    step = 2 if export == "last" else 0
    (final,) = small.lines(run, "final")
    assert final["best_step"] == step
    weights = run.checkpoints / f"step_{step:06d}" / "policy" / "model.safetensors"
    assert (run.path / "model" / "model.safetensors").read_bytes() == weights.read_bytes()
    sentence = "training did not improve on the starting model; `model/` is the starting model"
    table, summary = (" ".join(part.split()) for part in printed.split("report: "))
    assert ("step 0, the starting model" in table) == (sentence in summary) == (step == 0)
    assert run.report.read_text().lower().count(sentence) == (1 if step == 0 else 0)


def test_all_checkpoints_are_evaluated_once_and_make_one_table(last, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("posttrain.pipelines.find_spec", lambda name: None)
    run, _ = last
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000000", "step_000001", "step_000002"]
    letters, folder = run.load_recipe().environment.type, str(run.path)
    words = ["evaluate", f"environment.type={letters}", "environment.max_turns=3", "evaluation.final_seeds.count=2"]
    words += [f"runs={tmp_path}", "name=scores", "rollout.tokens_per_turn=6", "rollout.tokens_per_episode=700", "--all"]
    assert main([*words, f"model.path={folder}", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would run (not run yet)") == 3
    assert main([*words, f"model.path={folder}"]) == 0
    table = (tmp_path / "scores" / "report.md").read_text().split("## Scores by checkpoint: small")[1]
    first = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert first[:5] == ["step", "---:", "0", "1", "2"]
    assert all(f"| {line['rollout/return']:.3f} |" in table for line in small.lines(run, "train"))
    capsys.readouterr()
    assert main([*words, f"model.path={folder}/checkpoints/step_00000[12]"]) == 0
    assert capsys.readouterr().out.count("finished, nothing has changed") == 2
    assert main([*words, f"model.path={folder}/nothing*"]) == 2
    assert "--all found no checkpoints" in capsys.readouterr().err


# -- damaged runs ----------------------------------------------------------------------------------------------------------


def test_falling_back_sets_damaged_checkpoints_aside(saved):
    assert saved.fall_back() == []
    _damage(saved.path(4) / "policy" / "model.safetensors")
    (message,) = saved.fall_back()
    assert "model.safetensors is damaged" in message
    assert message.endswith("it is now damaged_step_000004, and the run continues from step 3")
    assert saved.steps() == [1, 3]
    assert (saved.directory / "damaged_step_000004" / "state.json").is_file()
    _damage(saved.path(3) / "state.json")
    _damage(saved.path(1) / "policy" / "model.safetensors")
    with pytest.raises(InputError, match=r"has no intact checkpoint to fall back to; start the run again"):
        saved.fall_back()
    assert saved.steps() == [1, 3]


@pytest.fixture(scope="module")
def four_steps(tiny_model, tmp_path_factory):
    """A run of four steps with a checkpoint after each of the last two."""
    runs = tmp_path_factory.mktemp("four_steps")
    words = ["environment.type=bandit", f"model.path={tiny_model}", "name=run", f"runs={runs}", "steps=4"]
    words += ["rollout.groups_per_step=1", "rollout.episodes_per_group=2", "checkpoint.every=1", "checkpoint.keep=2"]
    words += ["checkpoint.keep_state=always", "evaluation.every=0", "evaluation.seeds.count=1"]
    words += ["evaluation.final_seeds.count=1", "rollout.tokens_per_turn=4"]
    assert main(["rl", *words]) == 0
    return runs / "run"


@pytest.fixture
def trained(four_steps, tmp_path):
    return shutil.copytree(four_steps, tmp_path / "run")


def test_a_run_without_the_folder_of_its_checkpoints_is_not_started_again(trained, capsys):
    metrics = (trained / "metrics.jsonl").read_bytes()
    shutil.rmtree(trained / "checkpoints")
    assert main(["rl", "--resume", str(trained)]) == 2
    assert f"{trained}/checkpoints is missing, so the run cannot continue" in capsys.readouterr().err
    assert (trained / "metrics.jsonl").read_bytes() == metrics


def test_a_damaged_run_resumes_with_fall_back_and_says_what_was_lost(trained, capsys):
    _damage(trained / "checkpoints" / "step_000004" / "state.json")
    (trained / "metrics.jsonl").write_text("")
    assert main(["rl", "environment.type=bandit", "--fall-back"]) == 2
    assert "give `resume` as well" in capsys.readouterr().err
    assert main(["rl", "--resume", str(trained), "steps=5"]) == 2
    assert "add --fall-back to resume from step 3" in capsys.readouterr().err
    assert main(["rl", "--resume", str(trained), "--fall-back", "steps=5"]) == 0
    output = capsys.readouterr()
    assert "damaged_step_000004, and the run continues from step 3" in output.err
    assert "lacks 3 of the 3 steps before the checkpoint" in " ".join(output.out.split())
    assert [line["step"] for line in small.lines(trained, "train")] == [4, 5]
    assert any("lacks 3 of the 3 steps" in message for message in small.messages(trained))


# -- asynchronous ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_thread_writes_the_state_at_the_time_of_the_call(tiny_model, tmp_path, monkeypatch, lora):
    policy = Policy(str(tiny_model), lora=lora)
    state, files = {"m/exp_avg": torch.ones(3)}, {}
    held = threading.Event()
    for name, later in (("now", False), ("later", True)):
        checkpoints = Checkpoints(tmp_path / name, "mine", CheckpointRecipe(asynchronous=True))
        if later:
            seal = checkpoints._seal
            monkeypatch.setattr(checkpoints, "_seal", lambda *a, seal=seal: (held.wait(60), seal(*a)))
        checkpoints.save(1, policy, state, {"step": 1}, None, later=later)
        if later:
            assert not checkpoints.path(1).exists()
            with torch.no_grad():
                for tensor in (state["m/exp_avg"], *policy.model.parameters()):
                    tensor.zero_()
            held.set()
        directory, tensors, _ = checkpoints.load(1)
        assert read_all(tensors)["m/exp_avg"].tolist() == [1.0] * 3
        files[name] = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert files["now"] == files["later"]


# -- what is stored --------------------------------------------------------------------------------------------------------

MOMENTS = re.compile(r"/(exp_avg|exp_avg_sq|state[12]|absmax[12])(/\d of \d)?$")
BFLOAT16 = {"model": {"dtype": "bfloat16"}}
LORA = {"model": {"dtype": "bfloat16", "lora": {"rank": 4}}}
PPO = BFLOAT16 | {"credit": {"type": "gae"}, "critic": {"dtype": "bfloat16"}}
STORED = {
    "sft float32": (1, "sft", {}, 8),
    "sft bfloat16": (1, "sft", BFLOAT16, 8),
    "lora bfloat16": (1, "sft", LORA, 8),
    "8-bit bfloat16": (1, "sft", BFLOAT16 | {"optimizer": {"type": "adamw_8bit"}}, 5.7),
    "rl, critic in bfloat16": (1, "rl", PPO, 8),
    "two processes": (2, "sft", BFLOAT16, 8),
    "two processes, lora": (2, "sft", LORA, 8),
    "two processes, rl, critic": (2, "rl", PPO, 8),
    "two replicas of two": (4, "sft", BFLOAT16 | {"hardware": {"processes": [2, 2]}}, 8),
}


@pytest.mark.parametrize("case", small.cases(STORED, ("sft bfloat16", "two processes, rl, critic")))
def test_a_checkpoint_has_each_trained_weight_once_and_resumes_to_the_same_bits(case, tmp_path, tiny_model):
    """Bytes per trained weight: 4 for its float32 value, whether it computes in float32 or bfloat16, and the moments, of which
    8-bit ones are float32 in matrices of less than 4,096 numbers."""
    processes, stage, changes, of_moments = STORED[case]

    def job(name, steps, resume=False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        made = small.recipe_values if stage == "rl" else partial(preferences.recipe_values, stage)
        values = merged(made(tiny_model, folder), json.loads(json.dumps(changes)) | {"steps": steps})
        return {"values": values | {"checkpoint": {"every": 1, "keep_state": "always"}}, "resume": resume}

    jobs = [job("whole", 2), job("resumed", 1), job("resumed", 2, resume=True)]
    codes = together.run(processes, jobs, tmp_path)
    assert codes == [[0] * processes] * 3, (tmp_path / "log-0.txt").read_text()[-3000:]
    last, resumed = (tmp_path / name / "small" / "checkpoints" / "step_000002" for name in ("whole", "resumed"))
    tensors = read_all(last / "tensors")
    policies = [load_file(file) for file in (last / "policy").glob("*.safetensors")]
    trained = [tensor for policy in policies for tensor in policy.values()]
    critic = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("critic/weights/"))
    count = sum(tensor.numel() for tensor in trained) + critic
    moments = [tensor for name, tensor in tensors.items() if MOMENTS.search(name)]
    others = {name: tensor for name, tensor in tensors.items() if not MOMENTS.search(name)}
    weights = [tensor for name, tensor in others.items() if tensor.ndim and "random" not in name]
    assert sum(tensor.nbytes for tensor in [*trained, *weights]) == 4 * count
    assert sum(tensor.nbytes for tensor in moments) <= of_moments * count
    assert (critic > 0) == (stage == "rl")
    # Files have no second copy either, besides headers, names and the counts of steps.
    files = sum(file.stat().st_size for file in last.glob("tensors/*.distcp"))
    assert files < sum(tensor.nbytes for tensor in tensors.values()) + 3000 * len(tensors)
    again = read_all(resumed / "tensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    for file in (last / "policy").glob("*.safetensors"):
        assert file.read_bytes() == (resumed / "policy" / file.name).read_bytes()
