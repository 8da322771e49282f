import math

import pytest

from posttrain.losses.surrogates import ReinforceLoss
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.stages import DpoRecipe, RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, read_metrics
from posttrain.runs.report import changed_keys, write_report
from posttrain.runs.tables import PolicyRow, Results, headline, policy_tables, write_results
from tests.rollout.episodes import played

ROWS = [
    PolicyRow("random policy", 0.125, None, 0.1, 200, "exact"),
    PolicyRow("trained model", 0.5, (0.4, 0.612), None, 200, "best on evaluation, step 40 | a"),
    PolicyRow("untrained model", None, None, None, 0),
]


def test_rows_come_from_metric_lines(run):
    with MetricsLog(run, []) as log:
        log.write(0, "baseline", {"policy": "random", "success": 0.5, "return": 1.0, "n": 10})
        limits = {"success_low": 0.2, "success_high": 0.8}
        log.write(3, "evaluation", {"success": 0.5, **limits, "return": math.nan, "n": 10})
    baseline, held_out = read_metrics(run.metrics)
    assert PolicyRow.from_values("random policy", baseline) == PolicyRow("random policy", 0.5, None, 1.0, 10)
    assert PolicyRow.from_values("model", held_out, "x") == PolicyRow("model", 0.5, (0.2, 0.8), None, 10, "x")


def test_the_report_shows_the_run_and_how_to_use_its_model(run):
    with MetricsLog(run, []) as log:
        log.write(1, "train", {"rollout/failed": 2, "optimizer/skipped": 1, "policy/kl": math.nan})
        assert "No result yet: 1 of 100 steps are done." in write_report(run).read_text()
        log.write(7, "train", {"rollout/failed": 1})
        log.write(7, "evaluation", {"success": 0.5, "n": 4, "failed": 1})
        log.write(7, "final", {"policy": "trained", "success": 0.5, "n": 4, "failed": 2})
        log.write(7, "warning", {"message": "entropy is low"})
        log.write(7, "warning", {"message": "entropy is low"})
    write_episodes(run.episodes, 7, "train", [played()])
    (run.plots / "kl.png").write_bytes(b"png")
    model = run.checkpoints / "best" / "model"
    model.mkdir(parents=True)
    write_results(run.path, Results(policy_tables(ROWS)))
    text = write_report(run, model, ["warmed up first"]).read_text()
    machine = run.load_environment()
    for expected in (
        f"# {run.path.name}",
        "| random policy | 12.5% exact | 0.100 | 200 | exact |",
        r"| trained model | 50.0% [40.0, 61.2] | – | 200 | best on evaluation, step 40 \| a |",
        "| untrained model | – | – | 0 |  |",
        "| stage | rl |",
        "| steps | 7 of 100 |",
        "| run seed | 0 |",
        "| held-out seeds of the table | 2000000 to 2000255 |",
        "| training seeds | 0 to 99999 |",
        machine["recipe_hash"],
        machine["processor"],
        "| `optimizer.learning_rate` | `3e-6` |",
        "| `environment.sides` | `3` |",
        "![Kullback-Leibler divergence](plots/kl.png)",
        f'AutoModelForCausalLM.from_pretrained("{model}")',
        f"posttrain episodes {run.path}",
        "- failed training episodes: 3",
        "- failed held-out episodes: 3",
        "- skipped updates: 1",
        "- lines with a value that is NaN or infinite: 1",
        "- warmed up first",
        "- step 7: entropy is low (2 times)",
    ):
        assert expected in text
    assert "plots/reward.png" not in text
    assert "adapter" not in text
    assert "its rewards in returns" not in text
    (model / "adapter_config.json").write_text("{}")
    assert "adapter" in write_report(run, model).read_text()


@pytest.mark.parametrize(
    ("keys", "unit"),
    [
        ({}, "normalized with the mean and standard deviation stored with it, clipped to [-10, 10]"),
        ({"clip": None}, "normalized with the mean and standard deviation stored with it"),
        (
            {"normalize": "running", "clip": 2.5},
            "raw; only credit normalizes them, with the running statistics of training, clipped to [-2.5, 2.5]",
        ),
        ({"normalize": "none"}, "raw, clipped to [-10, 10]"),
    ],
)
def test_the_report_names_the_unit_of_rewards(recipe, keys, unit):
    values = recipe.model_dump() | {"name": "paid", "reward": {"path": "judge/model", **keys}}
    text = write_report(RunDirectory.create(RlRecipe.model_validate(values))).read_text()
    assert "| reward model | `judge/model` |" in text
    assert f"| its rewards in returns | {unit} |" in text


def test_a_report_of_rows_names_its_files_and_no_episodes(tmp_path):
    values = {"stage": "dpo", "name": "pairs", "runs": str(tmp_path), "data": {"train": "a.jsonl", "held_out": 5}}
    run = RunDirectory.create(DpoRecipe.model_validate(values))
    with MetricsLog(run, []) as log:
        log.write(1, "train", {"loss/preference": 0.7, "optimizer/skipped": 1.0})
    text = write_report(run).read_text()
    assert "| train rows | `a.jsonl` |" in text
    assert "| validation and test rows | 5 held out of the training rows |" in text
    assert "| `data.train` | `[{'path': 'a.jsonl'}]` |" in text
    assert "- skipped updates: 1" in text
    assert "episodes" not in text


def test_changed_keys_are_those_that_differ(recipe):
    changed = changed_keys(recipe)
    assert changed.pop("environment.type").endswith("coin.py:Coin")
    assert changed.pop("runs")
    assert changed == {"name": "tossing", "environment.sides": 3, "optimizer.learning_rate": 3e-06}
    adapters = {"model": ModelRecipe(lora=LoraRecipe())}
    more = changed_keys(recipe.model_copy(update={"loss": ReinforceLoss(), **adapters}))
    assert (more["loss.type"], more["model.lora"]) == ("reinforce", "set, with its defaults")
    ranked = recipe.model_copy(update={"model": ModelRecipe(lora=LoraRecipe(rank=4))})
    assert changed_keys(ranked)["model.lora.rank"] == 4


BEFORE = {"kind": "baseline", "policy": "start of this run", "success": 0.17, "success_low": 0.12, "success_high": 0.23}
AFTER = {"kind": "final", "policy": "trained", "success": 0.805, "success_low": 0.745, "success_high": 0.854, "n": 200}
WORSE = AFTER | {"success": 0.1, "success_low": 0.05, "success_high": 0.14}
UNCHANGED = AFTER | {"chosen": "training did not improve on the starting model; `model/` is the starting model"}
LOSS = {"kind": "baseline", "policy": "start of this run", "test/loss": 2.5, "test/rows": 9}


@pytest.mark.parametrize(
    ("before", "after", "numbers"),
    [
        (BEFORE, AFTER, "200 held-out seeds improved from 17.0% [12.0, 23.0] to 80.5% [74.5, 85.4]"),
        (BEFORE, WORSE, "got worse from 17.0% [12.0, 23.0] to 10.0% [5.0, 14.0]; the 95% intervals overlap"),
        (None, AFTER, "200 held-out seeds is 80.5% [74.5, 85.4]"),
        (BEFORE, UNCHANGED, "did not improve on the starting model: success on 200 held-out seeds is 80.5% [74.5"),
        (LOSS, {"kind": "final", "policy": "trained", "test/loss": 1.25, "test/rows": 9}, "9 held-out rows improved"),
    ],
)
def test_the_result_is_one_sentence(before, after, numbers):
    assert numbers in headline([line for line in (before, after) if line])
