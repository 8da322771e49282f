"""`hardware.processes` and `torchrun` from the command line: output, exit codes, signals, and a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.distributed import launch, world
from posttrain.errors import InputError
from posttrain.evaluation.workers import ModelWorkers
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.supervised import SftRecipe
from tests.training import small
from tests.training.preferences import recipe_values

MAIN = ["-m", "posttrain.cli.main"]


def environment():
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"CUDA_VISIBLE_DEVICES": ""}


def words(tiny, folder, epochs):
    folder.mkdir(exist_ok=True)
    data = recipe_values("sft", tiny, folder)["data"]["train"]
    keys = f"data.train={data} model.path={tiny} runs={folder} name=small data.max_tokens=200 rows_per_update=4"
    return ["sft", *keys.split(), f"epochs={epochs}"]


def until(log, text, process):
    """Wait until the process has printed `text`."""
    deadline = time.monotonic() + 200
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def begin(arguments, log):
    with open(log, "w") as file:
        command = [sys.executable, *MAIN, *arguments]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment())


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The current folder has a file with the name of a package and of a standard module; both leave `executed`."""
    monkeypatch.chdir(tmp_path)
    for name in ("posttrain", "multiprocessing"):
        Path(f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    return tmp_path / "executed"


def test_processes_of_a_run_import_nothing_from_the_current_folder(hostile, monkeypatch):
    def started(config, program):
        def start(*words):
            Path(words[-1], "stop").touch()
            subprocess.run([program, *words], env=environment() | {"RANK": "0"}, check=False)

        return start

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", started)
    recipe = load_recipe([], ["environment.type=bandit", "hardware.processes=2"], "rl")
    with pytest.raises(KeyboardInterrupt):
        launch.launch(recipe, False, False)
    assert not hostile.exists()


def test_workers_import_nothing_from_the_current_folder(hostile):
    before = dict(os.environ)
    with ModelWorkers(int, 2) as workers:
        assert workers.map(_doubled, [1]) == [2]  # a second process would start for a second item
    assert not hostile.exists()
    assert dict(os.environ) == before


def _doubled(_: int, items: list[int]) -> list[int]:
    return [2 * item for item in items]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_ends_all_processes_with_a_checkpoint_and_the_resume_command(tiny_model, tmp_path):
    log, run = tmp_path / "log.txt", tmp_path / "runs" / "small"
    process = begin([*words(tiny_model, tmp_path / "runs", 1000), "hardware.processes=2"], log)
    until(log, "step 2/", process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, log.read_text()
    *_, stopped, last = log.read_text().splitlines()
    assert stopped.startswith("stopped by SIGINT after step ")
    assert stopped.endswith(f"continue with `posttrain sft --resume {run}`")
    assert last == "posttrain: interrupted"
    step = int(stopped.split("after step ")[1].split(",")[0])
    assert (run / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()
    assert [line["step"] for line in small.metrics(run) if line["kind"] == "train"] == list(range(1, step + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_process_ends_the_run_with_one_sentence_and_torchrun_resumes(tiny_model, tmp_path):
    log, run = tmp_path / "log.txt", tmp_path / "runs" / "small"
    process = begin([*words(tiny_model, tmp_path / "runs", 3), "hardware.processes=2", "checkpoint.every=1"], log)
    until(log, "step 2/", process)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    assert process.wait() == 1, log.read_text()
    last = log.read_text().splitlines()[-1]
    assert last == f"posttrain: process 1 of the run was ended by SIGKILL; continue with `posttrain sft --resume {run}`"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *MAIN]
    resumed = subprocess.run(
        [*command, "sft", "--resume", str(run)], capture_output=True, text=True, env=environment(), check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("report: ") == 1
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_input_errors_are_reported_once(tiny_model, tmp_path):
    process = begin([*words("/nowhere", tmp_path / "runs", 1), "hardware.processes=2"], tmp_path / "log.txt")
    assert process.wait() == 2
    (said,) = (tmp_path / "log.txt").read_text().splitlines()
    assert said.startswith("posttrain: model.path: ")
    assert "/nowhere" in said


def test_mismatched_settings_are_refused(monkeypatch):
    with (
        pytest.raises(InputError, match=r"hardware.offload .* the device here is a CPU; remove it"),
        world.join_world(HardwareRecipe(offload="all"), "cpu"),
    ):
        pass
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with (
        pytest.raises(
            InputError, match=r"hardware.processes = 4, but torchrun started 2 processes; set it to 2, or start 4"
        ),
        world.join_world(HardwareRecipe(processes=4), "cpu"),
    ):
        pass


@pytest.mark.parametrize(
    ("ends", "failed", "error", "said"),
    [
        ({0: ("x: wrong", 2, False), 1: ("", 2, False)}, {0: 1, 1: 1}, "InputError", "x: wrong"),
        ({0: ("gone", 1, True), 1: ("the disk is full", 1, False)}, {0: 1, 1: 1}, "RunError", "the disk is full"),
        ({0: ("gone", 1, True)}, {0: 1, 1: -9}, "RunError", "process 1 of the run was ended by SIGKILL; continue with"),
        ({}, {1: 3}, "RunError", "process 1 of the run ended with exit code 3"),
        ({}, {0: 1, 1: -15}, "RunError", "process 0 of the run ended with exit code 1"),  # on a full disk
        ({0: ("", 130, False), 1: ("", 130, False)}, {}, "KeyboardInterrupt", ""),
    ],
)
def test_the_cause_is_reported_and_not_its_consequences(ends, failed, error, said, tmp_path):
    recipe = SftRecipe.model_validate({"data": {"train": "x.jsonl"}})
    for rank, (message, code, lost) in ends.items():
        launch.write_end(tmp_path, rank, world.RankLost("") if lost else None, message, code)
    with pytest.raises(BaseException, match=said or None) as caught:
        launch._raise_first_error(tmp_path, failed, recipe)
    assert type(caught.value).__name__ == error


def test_the_message_is_printed_where_it_cannot_be_recorded(tmp_path, capsys):
    launch.write_end(tmp_path / "gone", 0, None, "the disk is full", 1)
    assert capsys.readouterr().err == "the disk is full\n"
