import errno
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from posttrain import locks
from posttrain.errors import InputError, RunError
from posttrain.recipe.stages import RlRecipe
from posttrain.runs import directory
from posttrain.runs.directory import (
    RunDirectory,
    atomic_folder,
    partial_path,
    recipe_hash,
    storage_error,
    storage_errors,
    write_atomically,
)


def test_a_run_stores_its_recipe_and_its_machine(recipe, run):
    assert run.path == Path(recipe.runs) / "tossing"
    assert run.load_recipe(to_run=True) == recipe
    assert RlRecipe.model_validate(yaml.safe_load(run.recipe_file.read_text())) == recipe
    machine = run.load_environment()
    assert machine["recipe_hash"] == recipe_hash(recipe) == recipe_hash(recipe.model_copy())
    assert recipe_hash(recipe) != recipe_hash(recipe.model_copy(update={"seed": 1}))
    assert machine["packages"]["torch"]
    assert machine["packages"]["vllm"] is None or isinstance(machine["packages"]["vllm"], str)
    assert {"python", "platform", "cpu_count", "git", "command", "started", "id"} <= machine.keys()
    parts = {"recipe.yaml", "environment.json", "episodes", "checkpoints", "plots", "logs"}
    assert {path.name for path in run.path.iterdir()} == parts


@pytest.mark.parametrize("begun", ["metrics.jsonl", "episodes/step_000000.train.jsonl.zst", "checkpoints/step_000000"])
def test_a_run_without_records_frees_its_name(recipe, run, begun):
    with run.lock(), pytest.raises(InputError, match="is training in"):
        RunDirectory.create(recipe)
    assert run.load_recipe(to_run=True) == recipe
    run.metrics.touch()
    corrected = recipe.model_copy(update={"seed": 1})
    assert RunDirectory.create(corrected).load_recipe(to_run=True) == corrected
    (run.path / begun).write_text("precious")
    with pytest.raises(InputError, match=r"--resume .*tossing.*--overwrite"):
        RunDirectory.create(recipe)
    assert (run.path / begun).read_text() == "precious"
    again = RunDirectory.create(recipe, overwrite=True)
    assert again.path == run.path
    assert not (again.path / begun).exists()
    assert [p.name for p in run.path.parent.iterdir()] == ["tossing"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_directories_are_never_deleted(recipe, overwrite):
    path = Path(recipe.runs) / recipe.name
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("thesis: precious")
    with pytest.raises(InputError, match="not a posttrain run"):
        RunDirectory.create(recipe, overwrite=overwrite)
    assert (path / "recipe.yaml").read_text() == "thesis: precious"
    (path / "recipe.yaml").unlink()
    run = RunDirectory.create(recipe)  # an empty directory may be used
    link = run.path.parent / "link"
    link.symlink_to(run.path)
    with pytest.raises(InputError, match="is not a posttrain run"):
        RunDirectory.create(recipe.model_copy(update={"name": "link"}), overwrite=overwrite)
    assert run.recipe_file.exists()


def test_what_is_no_run_or_has_a_damaged_recipe_is_named(tmp_path, run):
    assert RunDirectory.open(str(run.path)) == run
    for folder, message in ((tmp_path / "nowhere", "there is no run"), (tmp_path, "not a posttrain run")):
        with pytest.raises(InputError, match=message):
            RunDirectory.open(folder)
    values = yaml.safe_load(run.recipe_file.read_text())
    for content, message in ((yaml.safe_dump(values | {"stepps": 3}).encode(), "stepps"), (b"a: [\xff", "")):
        run.recipe_file.write_bytes(content)
        with pytest.raises(InputError, match=rf"recipe\.yaml.*{message}"):
            run.load_recipe()
    run.environment_file.write_text("{}")
    with pytest.raises(InputError, match="not a posttrain run"):
        RunDirectory.open(run.path)


def test_two_processes_cannot_train_in_one_run(recipe, run):
    code = f"""
import sys
from posttrain.runs.directory import RunDirectory
with RunDirectory.open({str(run.path)!r}).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match=f"process {other.pid} is training"), run.lock():
            pass
        with pytest.raises(InputError, match=f"process {other.pid} is training"):
            RunDirectory.create(recipe, overwrite=True)
        assert run.recipe_file.exists()
    finally:
        other.kill()
        other.communicate()
    # The lock removes files of killed processes.
    torn = run.checkpoints / f".step_4.{other.pid}.partial"
    torn.mkdir()
    (torn / "weights").write_text("half")
    busy = run.plots / f".curve.png.{os.getppid()}.partial"
    busy.write_text("being drawn by a living process")
    with run.lock(), pytest.raises(InputError, match=f"process {os.getpid()} "), run.lock():
        pass
    assert not torn.exists()
    assert busy.exists()


def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_no_run(recipe, tmp_path, monkeypatch):
    path = tmp_path / "folder" / "state"
    write_atomically(path, "old")
    monkeypatch.setattr(directory.os, "fsync", full)
    with pytest.raises(RunError, match=r"state.*disk is full.*--resume"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(RunError, match="disk is full"):
        RunDirectory.create(recipe)
    assert list(Path(recipe.runs).iterdir()) == []


def test_write_atomically_writes_aside(tmp_path, monkeypatch):
    path, seen, rename = tmp_path / "state", [], os.replace
    monkeypatch.setattr(directory.os, "replace", lambda a, b: (seen.append((a, path.exists())), rename(a, b)))
    write_atomically(path, "größe")
    assert seen == [(partial_path(path), False)]
    assert path.read_bytes() == "größe".encode()


@contextmanager
def no_file_over(size):
    """Let the kernel refuse every write past `size` bytes of a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_storage_errors_have_their_path_and_a_remedy(tmp_path):
    import torch
    from safetensors.torch import save_file

    with pytest.raises(RunError, match=r"/some/file.*permission denied"), storage_errors(Path("/some/file")):
        raise PermissionError(errno.EACCES, "Permission denied")
    file = tmp_path / "weights"
    for save, reason in ((save_file, "limit of file sizes"), (torch.save, "free some space")):
        with pytest.raises(RunError, match=f"cannot write .*weights: .*{reason}.*--resume"):  # noqa: SIM117
            with storage_errors(file), no_file_over(20_000):
                save({"weight": torch.zeros(10_000)}, file)
    with pytest.raises(RunError, match="weights/inside"):
        write_atomically(file / "inside", "x")
    message = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert storage_error(ValueError(message)) == "the disk is full; free some space"
    assert storage_error(ValueError("a bug of ours")) is None


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out" / "model"

    def interrupted():
        with atomic_folder(target) as aside:
            (aside / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "out").iterdir()) == []
    partial_path(target).mkdir()
    (partial_path(target) / "of a killed process with this id").touch()
    with atomic_folder(target) as aside:
        (aside / "config.json").write_text("{}")
        assert not target.exists()
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["model", "config.json"]
    with pytest.raises(InputError, match="another process has just written"), atomic_folder(target) as aside:
        (aside / "config.json").write_text("[]")
    assert (target / "config.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_of_runs_of_one_name_that_start_at_once_one_is_made(recipe, monkeypatch):
    fill = RunDirectory._fill

    def fill_after_another(run, recipe):
        fill(run, recipe)
        shutil.copytree(run.path, Path(recipe.runs) / recipe.name)  # what the other process makes

    monkeypatch.setattr(RunDirectory, "_fill", fill_after_another)
    with pytest.raises(InputError, match="another process has just written"):
        RunDirectory.create(recipe)
    assert [path.name for path in Path(recipe.runs).iterdir()] == [recipe.name]


def test_the_lock_of_a_run_that_was_replaced_is_refused(run, monkeypatch):
    """Another process deletes the run between the opening and the locking of `.lock`."""
    lock = locks.fcntl.flock

    def replace_and_lock(descriptor, how):
        os.rename(run.path, run.path.with_name("deleted"))
        run.path.mkdir()
        (run.path / ".lock").touch()
        lock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", replace_and_lock)
    with pytest.raises(InputError, match="another process has just replaced"), run.lock():
        raise AssertionError("locked")
