"""`posttrain evaluate text`, `reward` and `model`, and `posttrain compare`, from the command line on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.cli.main import main
from posttrain.evaluation.results import read_results
from posttrain.models.reward import RewardModel
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import ModelRecipe
from posttrain.runs.directory import RunDirectory
from tests.evaluation.made import predictions


@pytest.fixture
def stage(monkeypatch):
    """Recipes that `posttrain evaluate` would run."""
    called = []

    def record(recipe, **_):
        called.append(recipe)
        return SimpleNamespace(path=Path("no run"))

    monkeypatch.setattr("posttrain.stages.run_stage", record)
    monkeypatch.setattr("posttrain.result.Result.open", lambda run: None)
    return called


@pytest.mark.parametrize(
    "words",
    [
        ["environment.type=frozen_lake", "name=x"],
        ["--environment.type", "frozen_lake", "--name=x"],
        ["model", "--overwrite", "--environment.type", "frozen_lake", "name=x"],
    ],
)
def test_evaluate_accepts_model_with_and_without_the_subcommand(stage, words):
    assert main(["evaluate", *words]) == 0
    [recipe] = stage
    assert (recipe.stage, recipe.environment.type, recipe.name) == ("evaluate", "frozen_lake", "x")


def test_recipe_files_and_dry_runs_are_unchanged(stage, tmp_path, capsys):
    file = tmp_path / "text.yaml"
    file.write_text("stage: evaluate\nenvironment: {type: sokoban}\n")
    assert main(["evaluate", str(file)]) == 0
    assert stage[0].environment.type == "sokoban"
    assert main(["evaluate", "--dry-run", "--full", "environment.type=bandit"]) == 0
    assert "recipe (evaluate)" in capsys.readouterr().out
    assert len(stage) == 1
    assert main(["evaluate", "nothing.yaml"]) == 2
    assert "no recipe file nothing.yaml" in capsys.readouterr().err


def test_evaluate_text_prints_and_writes_results(tmp_path, capsys):
    file = predictions(tmp_path / "p.jsonl", 0.3, samples=2)
    file.write_text(file.read_text() + '{"id": 40, "predic')
    out = tmp_path / "deep" / "results.json"
    rule = "posttrain.environments.rewards:exact"
    assert main(["evaluate", "text", str(file), "--verifier", rule, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("bleu", "chrf", "exact", "verifier", "tok:13a|smooth:exp"))
    assert "1 row dropped: broken JSON" in said
    values = json.loads(out.read_text())
    assert (values["rows"], values["items"]) == (60, 30)
    bleu = values["metrics"]["bleu"]
    assert bleu["low"] < bleu["value"] < bleu["high"]
    metrics, digests = read_results(out)
    assert len(metrics["exact"].scores) == len(digests) == 30
    assert metrics["bleu"].about["signature"] == bleu["about"]["signature"]


def test_evaluate_text_keeps_other_metrics_without_an_encoder(tmp_path, tiny_model, capsys):
    file, out = predictions(tmp_path / "p.jsonl", 0.3, items=3), tmp_path / "results.json"
    models = ["--encoder", str(tmp_path), "--model", str(tiny_model)]
    assert main(["evaluate", "text", str(file), *models, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert "no config.json (the other metrics are unaffected)" in printed.err
    assert "chrf" in printed.out
    assert list(read_results(out)[0]) == ["bleu", "chrf", "exact", "perplexity_reference", "perplexity_prediction"]
    assert "bertscore" in json.loads(out.read_text())["failed"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--metrics", "bleu,rouge"], "unknown metric 'rouge'; use some of bleu, chrf"),
        (["--metrics", "bertscore"], "--metrics bertscore needs --encoder"),
        (["--metrics", "bleu", "--model", "x"], "--model has no effect without perplexity in --metrics"),
        (["--metrics", ","], "--metrics is empty"),
        (["--layer", "3"], "--layer has no effect without --encoder"),
        (["columns.gold=x"], "'columns.gold=x' is not a column setting"),
        (["columns.prediction=x"], "no usable prediction"),
    ],
)
def test_evaluate_text_refuses_invalid_options(tmp_path, capsys, words, told):
    assert main(["evaluate", "text", str(predictions(tmp_path / "p.jsonl", 0.3, items=2)), *words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert told in said[-1]
    assert said[-1].startswith("posttrain: ")


def test_reward_names_the_model_that_cannot_be_loaded(tmp_path, tiny_model, capsys):
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=1)
    model.set_statistics(0.0, 0.5)
    model.export(tmp_path / "rm")
    file, out = predictions(tmp_path / "p.jsonl", 0.3, items=4), tmp_path / "rewards.json"
    words = ["evaluate", "reward", str(file), "--model", str(tmp_path / "rm"), "--out", str(out)]
    assert main(words) == 0
    assert "normalized (r - 0) / 0.5, stored with the model" in capsys.readouterr().out
    assert read_results(out)[0]["reward"].texts == 4
    assert main([*words, "--model", str(tmp_path / "gone")]) == 2
    said = capsys.readouterr()
    assert "/rm" in said.out
    assert f"there is no folder {tmp_path / 'gone'}" in said.err
    assert "(the other metrics are unaffected)" in said.err


def test_a_model_that_tries_several_times_gets_pass_at_k(tmp_path, tiny_model, capsys):
    seeds = ["evaluation.final_seeds.count=4", "evaluation.episodes_per_seed=3", "evaluation.sampling.temperature=1"]
    where = ["environment.type=bandit", f"model.path={tiny_model}", f"runs={tmp_path}", "name=tries"]
    assert main(["evaluate", *where, *seeds, "rollout.tokens_per_turn=4", "rollout.tokens_per_episode=400"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "tries" / "metrics.jsonl").read_text().splitlines()]
    [final] = [line for line in lines if line["kind"] == "final"]
    keys = [key for key in final if "@k/" in key and not key.endswith(("_low", "_high"))]
    assert keys == ["mean@k/3", "pass@k/1", "pass@k/2", "pass@k/3"]
    assert final["pass@k/1"] == final["mean@k/3"] == final["success"]
    assert final["pass@k/1_high"] > final["pass@k/1"]
    assert "pass@3" in (tmp_path / "tries" / "report.md").read_text()


def test_a_run_stands_for_its_tasks_and_its_model(stage, tmp_path):
    keys = ["environment.type=frozen_lake", "evaluation.final_seeds={start: 3000000, count: 5}"]
    keys.append("rollout.tokens_per_turn=9")
    run = RunDirectory.create(load_recipe([], [*keys, f"runs={tmp_path}", "name=lake", "model.lora=true"], "rl")).path
    assert main(["evaluate", str(run)]) == 2, "it has no model yet"
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert main(["evaluate", str(run), "--trust"]) == 0
    [recipe] = stage
    assert (recipe.name, recipe.model.path, recipe.model.lora) == ("lake-evaluation", str(run / "model"), None)
    seeds = recipe.evaluation.final_seeds
    assert (seeds.start, seeds.count) == (3000000, 5)
    assert (recipe.environment.type, recipe.rollout.tokens_per_turn) == ("frozen_lake", 9)
