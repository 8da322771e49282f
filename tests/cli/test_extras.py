"""A light installation: everything works without the packages of the extras, or names the extra in one sentence."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from posttrain.errors import InputError
from posttrain.plugins import require_module

ROOT = Path(__file__).parents[2]
PACKAGES = {
    **{name: name for name in ("gguf", "ray", "tensorboard", "trackio", "vllm", "wandb")},
    "games": "gymnasium",
    "hub": "datasets",
    "plots": "matplotlib",
    "remote": "openai",
    "tasks": "reasoning_gym",
    "text": "sacrebleu",
    "tune": "optuna",
}
"""Extra -> the module that it is for."""
BLOCKED = (*PACKAGES.values(), "mcp", "pydantic_monty", "pandas", "trl")


def light(folder, commands):
    """Exit code and stderr of each command of `posttrain`, run in `folder` without the packages of the extras."""
    script = Path(__file__).with_name("extras_blocked.py")
    done = subprocess.run(
        [sys.executable, str(script), ",".join(BLOCKED), json.dumps([list(map(str, words)) for words in commands])],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "300", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def working(tiny_model):
    """Commands that need no extra. The last one is a run."""
    run = ["rl", "environment.type=bandit", f"model.path={tiny_model}", "steps=1", "rollout.groups_per_step=2"]
    run += ["rollout.episodes_per_group=2", "rollout.tokens_per_turn=4", "evaluation.seeds.count=2"]
    run += ["evaluation.final_seeds.count=2", "learner.updates_per_step=1", "plots=true"]
    plans = [["rl", "environment.type=sokoban", "--dry-run"], ["sft", "environment.type=bandit", "--dry-run"]]
    return [["--help"], *plans, ["recipe", "loss.type"], ["env", "list", "--seeds", "2"], run]


def needing(tiny_model):
    """(package, command that needs it)."""
    bandit = ["environment.type=bandit", f"model.path={tiny_model}"]
    remote = "engine={type: openai, url: 'http://127.0.0.1:9/v1', model: m}"
    gym = ["environment.type=text_task", "environment.reasoning_gym.dataset=chain_sum"]
    study = ROOT / "recipes" / "rlhf" / "tune_sft.yaml"
    return [
        ("gymnasium", ["env", "validate", "frozen_lake"]),
        ("gguf", ["rl", "model.path=x.gguf", "--dry-run"]),
        ("datasets", ["sft", "data.train=owner/rows", "data.held_out=1", f"model.path={tiny_model}", "name=hub"]),
        ("matplotlib", ["plot", "x"]),
        ("matplotlib", ["report", "x"]),
        ("optuna", ["tune", study, "--dry-run"]),
        ("ray", ["rl", *bandit, "hardware.ray=auto", "name=ray"]),
        ("openai", ["evaluate", "environment.type=bandit", "environment.format.prime=false", remote, "name=remote"]),
        ("reasoning-gym", ["evaluate", *gym, f"model.path={tiny_model}", "name=gym"]),
        ("wandb", ["rl", *bandit, "sinks=[wandb]", "name=wandb"]),
        ("tensorboard", ["rl", *bandit, "sinks=[tensorboard]", "name=tensorboard"]),
        ("sacrebleu", ["evaluate", "text", "rows.jsonl", "--metrics", "bleu"]),
        ("pydantic-monty", ["env", "validate", "memory", "--seeds", "1"]),
        ("mcp", ["memory", "mcp", "vault"]),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("light")


@pytest.fixture(scope="module")
def outcomes(folder, tiny_model):
    """The outcomes of all these commands, run by one process, since each process imports torch."""
    (folder / "x.gguf").write_bytes(b"GGUF")
    (folder / "rows.jsonl").write_text('{"prompt": "p", "prediction": "a b", "reference": "a c"}\n')
    (folder / "vault").mkdir()
    (folder / "vault" / "user.md").write_text("# Me\n")
    return light(folder, [*working(tiny_model), *(words for _, words in needing(tiny_model))])


def test_commands_without_optional_packages_run_without_them(folder, outcomes, tiny_model):
    commands = working(tiny_model)
    for words, (code, said) in zip(commands, outcomes[: len(commands)], strict=True):
        assert code == 0, (words, said)
    kept = folder / "runs" / "run"
    assert (kept / "report.md").is_file()
    assert not list(kept.glob("plots/*"))
    assert (kept / "metrics.jsonl").read_text().count("no figures are drawn without matplotlib") == 1


def test_a_missing_package_is_one_sentence_with_the_pip_command(outcomes, tiny_model):
    wanted = needing(tiny_model)
    for (package, words), (code, said) in zip(wanted, outcomes[-len(wanted) :], strict=True):
        last = (said.strip().splitlines() or [""])[-1]
        assert code in (1, 2), (words, said)
        assert package.replace("-", "_") in last.replace("-", "_"), (words, said)
        assert "run `pip install " in last, (words, said)


def test_every_optional_package_has_an_extra_and_is_not_a_core_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = re.compile(r"[\w-]+")
    core = {name.match(one)[0].replace("-", "_") for one in project["dependencies"]}
    assert not core & set(BLOCKED)
    for extra, package in PACKAGES.items():
        wanted = {name.match(one)[0].replace("-", "_") for one in project["optional-dependencies"][extra]}
        assert package in wanted, extra
    collected = re.search(r"\[(.*)\]", project["optional-dependencies"]["all"][0])[1].split(",")
    assert set(collected) <= set(project["optional-dependencies"])


def test_the_error_names_the_feature_that_needs_the_module():
    with pytest.raises(InputError, match=r"some.key needs the package no-such-module, .* `pip install no-such-module`"):
        require_module("no_such_module.part", "some.key")
