"""The journey of docs/migrating/ragen.md: three games, traces and reinforcement learning, a search group, sizes of models, pictures."""

import json
from pathlib import Path

import pytest
import yaml

from posttrain.recipe.sources import read_file
from posttrain.runs.metrics import read_metrics
from tests.journeys import commands, dry, place_model, place_recipes, run, with_values

PAGE = "docs/migrating/ragen.md"
SMALL = "On a small machine"
HUB = [f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "3B", "7B")]
READ_RUNS = ("episodes", "report", "evaluate", "pipeline recipes/ragen/scaling.yaml")
"""Commands that read what others of the page have made."""


def test_the_commands_of_the_page_resolve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place_recipes(tmp_path)
    shown = [command for command in commands(PAGE) if command not in commands(PAGE, SMALL)]
    assert len([command for command in shown if command.startswith("posttrain rl") and " name=" in command]) == 14
    for game in ("bandit", "sokoban", "frozen_lake"):
        pipelines = [command for command in shown if f"{game}_pipeline.yaml" in command and "7B" not in command]
        assert [("thinking=false" in command) for command in pipelines] == [False, True]
    for command in shown:
        if not command.removeprefix("posttrain ").startswith((*READ_RUNS, "tune")):
            assert "learned another format" not in run(dry(command)), command


@pytest.mark.slow
def test_the_searches_of_the_page_have_no_impossible_trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place_recipes(tmp_path)
    for command in commands(PAGE, "Hyper-parameters searched"):
        assert "gives no valid recipe" not in run(dry(command)), command


def test_seven_billion_parameters_fit_the_devices_that_the_page_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place_recipes(tmp_path)
    large = [command for command in commands(PAGE) if "7B" in command]
    assert len(large) == 2
    for command in large:
        said = run(f"{dry(command)} --on h100")
        assert "per process" in said
        assert "h100 has" not in said, f"{command} does not fit"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.figures
def test_the_small_commands_write_the_files_of_the_author(tmp_path, monkeypatch):
    """A tiny random model in place of the packaged one, and fewer episodes; the keys are those of the page."""
    monkeypatch.chdir(tmp_path)
    place_recipes(tmp_path)
    place_model(tmp_path, "models/tiny", "qwen2")
    smaller = {"stages.sft.experts.seeds.count": 14, "stages.sft.experts.held_out": 4, "stages.rl.steps": 2}
    smaller |= {"common.evaluation.every": 1, "keys.rollout.groups_per_step": 2, "keys.rollout.episodes_per_group": 2}
    for prefix in ("", "common.", "keys."):
        smaller[f"{prefix}rollout.tokens_per_turn"] = 8
        smaller |= {f"{prefix}evaluation.seeds.count": 2, f"{prefix}evaluation.final_seeds.count": 4}
    shown = commands(PAGE, SMALL)
    assert len(shown) == 7
    for command in shown:
        run(with_values(command, smaller).replace("packaged:smollm2-135m", "models/tiny"))
    check_pipeline(Path("runs/small"), thinking=True)
    check_pipeline(Path("runs/small-no-think"), thinking=False)
    check_search(Path("runs/small-search"))
    check_sizes(Path("runs/small-scaling"))
    trained, checked = (policies(Path(path)) for path in ("runs/small/rl", "runs/small-check"))
    assert trained["trained model"]["mean_return"] == checked["model"]["mean_return"]
    assert "States of the episode" in Path("runs/small/rl/report.html").read_text()


def policies(directory: Path) -> dict[str, dict]:
    return {row["policy"]: row for row in json.loads((directory / "results.json").read_text())["policies"]}


def check_pipeline(directory: Path, thinking: bool) -> None:
    """Traces in the format of reinforcement learning, their held-out loss, both models, curves, checkpoints and pictures."""
    sft, rl = (directory / name for name in ("sft", "rl"))
    formats = [read_file(str(path / "recipe.yaml")).values["environment"]["format"] for path in (sft, rl)]
    assert formats[0] == formats[1]
    assert (formats[0]["thinking"], formats[0]["prime"]) == (thinking, True)
    losses = [line["validation/loss"] for line in read_metrics(sft / "metrics.jsonl") if "validation/loss" in line]
    assert losses[-1] < losses[0]
    assert read_file(str(rl / "recipe.yaml")).values["model"]["path"] == str(sft / "model")
    steps = [line["step"] for line in read_metrics(rl / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == [1, 2]
    for path in (sft, rl):
        assert (path / "model" / "model.safetensors").is_file()
        assert list((path / "checkpoints").glob("step_*/policy"))
        assert (path / "plots" / "learning_curve.png").is_file()
        assert (path / "plots" / "trajectories.png").stat().st_size > 5000
    report = (directory / "report.md").read_text()
    for name in ("random policy", "untrained model", "after sft", "after rl", "optimal policy"):
        assert f"| {name} |" in report
    assert "learned another format" not in (rl / "report.md").read_text()


def check_search(directory: Path) -> None:
    """Four trials of one group with all settings of the study, and its best rate as a recipe, which a run has used."""
    trials = [read_file(str(path)).values for path in sorted(directory.glob("trials/*/recipe.yaml"))]
    assert [trial["optimizer"]["learning_rate"] for trial in trials] == [5e-7, 1e-6, 5e-6, 1e-5]
    assert {trial["credit"]["type"] for trial in trials} == {"grpo"}
    assert {trial["evaluation"]["environment"]["max_turns"] for trial in trials} == {5}
    best = yaml.safe_load((directory / "best_group2.yaml").read_text())
    returns = {}
    for trial in trials:
        lines = read_metrics(directory / "trials" / trial["name"] / "metrics.jsonl")
        curve = [line["return"] for line in lines if line["kind"] == "evaluation" and line["step"] > 0]
        returns[trial["optimizer"]["learning_rate"]] = max(curve)
    assert returns[best["optimizer"]["learning_rate"]] == max(returns.values())
    used = read_file("runs/small-best/recipe.yaml").values
    assert used["optimizer"]["learning_rate"] == best["optimizer"]["learning_rate"]
    assert "| failed |" not in (directory / "report.md").read_text()


def check_sizes(directory: Path) -> None:
    """One table of four models, each with up to 25 turns on the same rooms."""
    report = (directory / "report.md").read_text()
    for name in ("0_5b", "1_5b", "3b", "7b"):
        assert f"| {name} |" in report
        values = read_file(str(directory / name / "recipe.yaml")).values
        assert (values["stage"], values["environment"]["max_turns"]) == ("evaluate", 25)
        assert policies(directory / name)["model"]["n"] == 4
    assert policies(directory / "3b")["model"]["mean_return"] == policies(directory / "7b")["model"]["mean_return"]
