import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def test_a_run_stores_its_recipe_and_its_machine(recipe: RlRecipe, run: RunDirectory) -> None:
    assert run.path == Path(recipe.runs) / "tossing"
    assert run.load_recipe(to_run=True) == recipe
    assert RlRecipe.model_validate(yaml.safe_load(run.recipe_file.read_text())) == recipe
    machine = run.load_environment()
    assert machine["recipe_hash"] == recipe_hash(recipe)
    assert machine["packages"]["torch"]
    assert machine["packages"]["vllm"] is None or isinstance(machine["packages"]["vllm"], str)
    assert {"python", "platform", "cpu_count", "git", "command", "started", "id"} <= machine.keys()
    assert sorted(p.name for p in run.path.iterdir()) == sorted(
        ["recipe.yaml", "environment.json", "episodes", "checkpoints", "plots", "logs"]
    )


def test_the_hash_follows_the_recipe(recipe: RlRecipe) -> None:
    assert recipe_hash(recipe) == recipe_hash(recipe.model_copy())
    assert recipe_hash(recipe) != recipe_hash(recipe.model_copy(update={"seed": 1}))


def test_a_used_name_is_refused_with_both_remedies(recipe: RlRecipe, run: RunDirectory) -> None:
    run.metrics.write_text("kept")
    with pytest.raises(InputError, match=r"--resume .*tossing.*--overwrite"):
        RunDirectory.create(recipe)
    assert run.metrics.read_text() == "kept"


@pytest.mark.parametrize("begun", ["metrics.jsonl", "episodes/step_000000.train.jsonl.zst", "checkpoints/step_000000"])
def test_a_run_without_records_frees_its_name(recipe: RlRecipe, run: RunDirectory, begun: str) -> None:
    run.metrics.touch()
    corrected = recipe.model_copy(update={"seed": 1})
    assert RunDirectory.create(corrected).load_recipe(to_run=True) == corrected
    (run.path / begun).write_text("precious")
    with pytest.raises(InputError, match=r"--resume .*tossing.*--overwrite"):
        RunDirectory.create(recipe)
    assert (run.path / begun).read_text() == "precious"


def test_a_run_that_is_starting_keeps_its_name(recipe: RlRecipe, run: RunDirectory) -> None:
    with run.lock(), pytest.raises(InputError, match="is training in"):
        RunDirectory.create(recipe)
    assert run.load_recipe(to_run=True) == recipe


def test_overwrite_starts_a_new_run(recipe: RlRecipe, run: RunDirectory) -> None:
    run.metrics.write_text("old")
    again = RunDirectory.create(recipe, overwrite=True)
    assert again.path == run.path
    assert not again.metrics.exists()
    assert [p.name for p in run.path.parent.iterdir()] == ["tossing"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_directories_are_never_deleted(recipe: RlRecipe, overwrite: bool) -> None:
    path = Path(recipe.runs) / recipe.name
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("thesis: precious")
    with pytest.raises(InputError, match="not a posttrain run"):
        RunDirectory.create(recipe, overwrite=overwrite)
    assert (path / "recipe.yaml").read_text() == "thesis: precious"


def test_a_link_to_a_run_is_never_deleted(recipe: RlRecipe, run: RunDirectory) -> None:
    link = run.path.parent / "link"
    link.symlink_to(run.path)
    with pytest.raises(InputError, match="is not a posttrain run"):
        RunDirectory.create(recipe.model_copy(update={"name": "link"}), overwrite=True)
    assert run.recipe_file.exists()


def test_an_empty_directory_may_be_used(recipe: RlRecipe) -> None:
    (Path(recipe.runs) / recipe.name).mkdir(parents=True)
    assert RunDirectory.create(recipe).recipe_file.exists()


def test_open_refuses_a_directory_without_a_run(tmp_path: Path, run: RunDirectory) -> None:
    assert RunDirectory.open(str(run.path)) == run
    with pytest.raises(InputError, match="there is no run"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a posttrain run"):
        RunDirectory.open(tmp_path)
    run.environment_file.write_text("{}")
    with pytest.raises(InputError, match="not a posttrain run"):
        RunDirectory.open(run.path)


def test_the_error_of_an_invalid_recipe_names_the_key(run: RunDirectory) -> None:
    values = yaml.safe_load(run.recipe_file.read_text())
    values["stepps"] = 3
    run.recipe_file.write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"recipe\.yaml.*stepps"):
        run.load_recipe()
    run.recipe_file.write_bytes(b"a: [\xff")
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        run.load_recipe()


def test_two_processes_cannot_train_in_one_run(recipe: RlRecipe, run: RunDirectory) -> None:
    code = f"""
import sys
from posttrain.runs.directory import RunDirectory
with RunDirectory.open({str(run.path)!r}).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
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
    with run.lock(), pytest.raises(InputError, match=f"process {os.getpid()} "), run.lock():
        pass


def test_the_lock_removes_files_of_a_killed_process(run: RunDirectory) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    torn = run.checkpoints / f".step_4.{dead.pid}.partial"
    torn.mkdir()
    (torn / "weights").write_text("half")
    busy = run.plots / f".curve.png.{os.getppid()}.partial"
    busy.write_text("being drawn by a living process")
    with run.lock():
        assert not torn.exists()
        assert busy.exists()


def test_write_atomically_keeps_the_old_file_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory.os, "fsync", full)
    with pytest.raises(RunError, match=r"state.*disk is full.*--resume"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomically_writes_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    seen = []
    rename = os.replace
    monkeypatch.setattr(directory.os, "replace", lambda a, b: (seen.append((a, path.exists())), rename(a, b)))
    write_atomically(path, "größe")
    assert seen == [(partial_path(path), False)]
    assert path.read_bytes() == "größe".encode()


def test_a_run_that_cannot_be_created_leaves_no_directory(recipe: RlRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory.os, "fsync", full)
    with pytest.raises(RunError, match="disk is full"):
        RunDirectory.create(recipe)
    assert list(Path(recipe.runs).iterdir()) == []


def test_a_permission_error_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"/some/file.*permission denied"), storage_errors(Path("/some/file")):
        raise PermissionError(errno.EACCES, "Permission denied")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/inside"):
        write_atomically(tmp_path / "file" / "inside", "x")


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """Let the kernel refuse every write past `size` bytes of a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("writer", "reason"), [("safetensors", "limit of file sizes"), ("torch", "free some space")])
def test_disk_errors_of_libraries_are_reported(tmp_path: Path, writer: str, reason: str) -> None:
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "weights"
    save = save_file if writer == "safetensors" else torch.save
    with pytest.raises(RunError, match=f"cannot write .*weights: .*{reason}.*--resume"):  # noqa: SIM117
        with storage_errors(file), no_file_over(20_000):
            save({"weight": torch.zeros(10_000)}, file)


def test_a_full_disk_is_recognized_in_safetensors_errors() -> None:
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert storage_error(ValueError(said)) == "the disk is full; free some space"
    assert storage_error(ValueError("a bug of ours")) is None


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"

    def interrupted() -> None:
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


def test_of_runs_of_one_name_that_start_at_once_one_is_made(recipe: RlRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = RunDirectory._fill

    def fill_after_another(run: RunDirectory, recipe: RlRecipe) -> None:
        fill(run, recipe)
        shutil.copytree(run.path, Path(recipe.runs) / recipe.name)  # what the other process makes

    monkeypatch.setattr(RunDirectory, "_fill", fill_after_another)
    with pytest.raises(InputError, match="another process has just written"):
        RunDirectory.create(recipe)
    assert [path.name for path in Path(recipe.runs).iterdir()] == [recipe.name]


def test_the_lock_of_a_run_that_was_replaced_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process deletes the run between the opening and the locking of `.lock`."""
    lock = locks.fcntl.flock

    def replace_and_lock(descriptor: int, how: int) -> None:
        os.rename(run.path, run.path.with_name("deleted"))
        run.path.mkdir()
        (run.path / ".lock").touch()
        lock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", replace_and_lock)
    with pytest.raises(InputError, match="another process has just replaced"), run.lock():
        raise AssertionError("locked")
