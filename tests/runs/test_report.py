import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.losses.surrogates import ReinforceLoss
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.stages import DpoRecipe, RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, read_metrics
from posttrain.runs.report import changed_keys, write_report
from posttrain.runs.tables import PolicyRow, headline, plain_numbers, policy_tables
from tests.rollout.episodes import played

ROWS = [
    PolicyRow("random policy", 0.125, None, 0.1, 200, "exact"),
    PolicyRow("trained model", 0.5, (0.4, 0.612), None, 200, "best on evaluation, step 40 | a"),
    PolicyRow("untrained model", None, None, None, 0),
]


def test_the_table_has_rates_with_one_decimal_and_intervals(run: RunDirectory) -> None:
    text = write_report(run, policy_tables(ROWS)).read_text()
    assert "| random policy | 12.5% exact | 0.100 | 200 | exact |" in text
    assert r"| trained model | 50.0% [40.0, 61.2] | – | 200 | best on evaluation, step 40 \| a |" in text
    assert "| untrained model | – | – | 0 |  |" in text


def test_a_report_says_how_mean_returns_get_an_interval(run: RunDirectory) -> None:
    exact = PolicyRow("random policy", 0.125, None, 0.1, 200)
    sampled = PolicyRow("trained model", None, None, 0.1, 6)
    for rows, explained in (
        ([exact], False),
        ([exact, sampled], True),
        ([replace(sampled, success=0.5, interval=(0.1, 0.9))], True),
        ([sampled, replace(sampled, return_interval=(0.0, 0.2))], False),
    ):
        assert ("`return_range`" in write_report(run, policy_tables(rows)).read_text()) is explained


def test_rows_come_from_metric_lines(run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        log.write(0, "baseline", {"policy": "random", "success": 0.5, "return": 1.0, "n": 10})
        log.write(
            3, "evaluation", {"success": 0.5, "success_low": 0.2, "success_high": 0.8, "return": math.nan, "n": 10}
        )
    baseline, held_out = read_metrics(run.metrics)
    assert PolicyRow.from_values("random policy", baseline) == PolicyRow("random policy", 0.5, None, 1.0, 10)
    assert PolicyRow.from_values("model", held_out, "x") == PolicyRow("model", 0.5, (0.2, 0.8), None, 10, "x")


def test_the_report_shows_the_run_and_how_to_use_its_model(recipe: RlRecipe, run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        log.write(1, "train", {"rollout/failed": 2, "optimizer/skipped": 1, "policy/kl": math.nan})
        log.write(7, "train", {"rollout/failed": 1})
        log.write(7, "evaluation", {"success": 0.5, "n": 4, "failed": 1})
        log.write(7, "final", {"policy": "trained", "success": 0.5, "n": 4, "failed": 2})
        log.write(7, "warning", {"message": "entropy is low"})
        log.write(7, "warning", {"message": "entropy is low"})
    write_episodes(run.episodes, 7, "train", [played()])
    (run.plots / "kl.png").write_bytes(b"png")
    model = run.checkpoints / "best" / "model"
    model.mkdir(parents=True)
    text = write_report(
        run, policy_tables(ROWS), title="Tossing", model_directory=model, warnings=["warmed up first"]
    ).read_text()
    machine = run.load_environment()
    for expected in (
        "# Tossing",
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
    (model / "adapter_config.json").write_text("{}")
    assert "adapter" in write_report(run, policy_tables(ROWS), model_directory=model).read_text()


@pytest.mark.parametrize(
    ("keys", "said"),
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
def test_the_report_names_the_unit_of_rewards(recipe: RlRecipe, keys: dict, said: str) -> None:
    assert "its rewards in returns" not in write_report(RunDirectory.create(recipe), []).read_text()
    values = recipe.model_dump() | {"name": "paid", "reward": {"path": "judge/model", **keys}}
    text = write_report(RunDirectory.create(RlRecipe.model_validate(values)), []).read_text()
    assert "| reward model | `judge/model` |" in text
    assert f"| its rewards in returns | {said} |" in text


def test_a_run_without_metrics_has_a_report(run: RunDirectory) -> None:
    text = write_report(run, []).read_text()
    assert "# tossing" in text
    assert "## Curves" not in text
    assert "from_pretrained" not in text


def test_a_report_of_rows_names_its_files_and_no_episodes(tmp_path: Path) -> None:
    values = {"stage": "dpo", "name": "pairs", "runs": str(tmp_path), "data": {"train": "a.jsonl", "held_out": 5}}
    run = RunDirectory.create(DpoRecipe.model_validate(values))
    with MetricsLog(run, []) as log:
        log.write(1, "train", {"loss/preference": 0.7, "optimizer/skipped": 1.0})
    text = write_report(run, []).read_text()
    assert "| train rows | `a.jsonl` |" in text
    assert "| validation and test rows | 5 held out of the training rows |" in text
    assert "| `data.train` | `[{'path': 'a.jsonl'}]` |" in text
    assert "- skipped updates: 1" in text
    assert "episodes" not in text


def test_changed_keys_are_those_that_differ(recipe: RlRecipe) -> None:
    found = changed_keys(recipe)
    assert found.pop("environment.type").endswith("coin.py:Coin")
    assert found.pop("runs")
    assert found == {"name": "tossing", "environment.sides": 3, "optimizer.learning_rate": 3e-06}
    other = recipe.model_copy(update={"loss": ReinforceLoss(), "model": ModelRecipe(lora=LoraRecipe())})
    more = changed_keys(other)
    assert more["loss.type"] == "reinforce"
    assert more["model.lora"] == "set, with its defaults"
    assert (
        changed_keys(recipe.model_copy(update={"model": ModelRecipe(lora=LoraRecipe(rank=4))}))["model.lora.rank"] == 4
    )


def test_the_terminal_table_shows_the_same_cells() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(policy_tables(ROWS, "Result")[0])
    text = console.export_text()
    for row in ROWS:
        for cell in row.cells:
            assert cell in text


def test_a_narrow_terminal_truncates_nothing() -> None:
    console = Console(width=50, record=True, file=io.StringIO())
    console.print(policy_tables(ROWS, "Result")[0])
    text = console.export_text()
    assert "…" not in text
    letters = [character for character in text if character.isalnum()]
    for character in "".join(cell for row in ROWS for cell in row.cells):
        if character.isalnum():
            letters.remove(character)  # ValueError if one is missing


BEFORE = {
    "kind": "baseline",
    "policy": "start of this run",
    "success": 0.17,
    "success_low": 0.12,
    "success_high": 0.23,
    "n": 200,
}
AFTER = {"kind": "final", "policy": "trained", "success": 0.805, "success_low": 0.745, "success_high": 0.854, "n": 200}


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            BEFORE,
            AFTER,
            "Success on 200 held-out seeds improved from 17.0% [12.0, 23.0] to 80.5% [74.5, 85.4], 95% intervals.",
        ),
        (
            BEFORE,
            AFTER | {"success": 0.1, "success_low": 0.05, "success_high": 0.14},
            "Success on 200 held-out seeds got worse from 17.0% [12.0, 23.0] to 10.0% [5.0, 14.0]; the 95% intervals overlap.",
        ),
        (None, AFTER, "Success on 200 held-out seeds is 80.5% [74.5, 85.4], 95% interval."),
        (
            BEFORE,
            AFTER | {"chosen": "training did not improve on the starting model; `model/` is the starting model"},
            "Training did not improve on the starting model: success on 200 held-out seeds is 80.5% [74.5, 85.4], 95% interval.",
        ),
        (
            {"kind": "baseline", "policy": "start of this run", "test/loss": 2.5, "test/rows": 9},
            {"kind": "final", "policy": "trained", "test/loss": 1.25, "test/rows": 9},
            "The loss on 9 held-out rows improved from 2.5000 to 1.2500.",
        ),
    ],
)
def test_the_result_is_one_sentence(before, after, sentence):
    assert headline([line for line in (before, after) if line]) == sentence


def test_without_a_result_there_is_no_headline():
    assert headline([]) == ""
    assert headline([{"kind": "final", "policy": "trained", "best_step": 3, "chosen": "the last one"}]) == ""


def test_the_report_opens_with_the_result_and_ends_with_the_machine(run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        for line in (BEFORE, AFTER):
            log.write(7, line["kind"], {key: value for key, value in line.items() if key != "kind"})
    (run.plots / "kl.png").write_bytes(b"png")
    text = write_report(run, policy_tables(ROWS), warnings=["one"]).read_text()
    assert text.splitlines()[2].startswith("Success on 200 held-out seeds improved from 17.0%")
    places = ("Success on 200", "| policy |", "## Curves", "## Warnings", "## Recipe keys", "## The run", "| machine |")
    order = [text.index(part) for part in places]
    assert order == sorted(order)
    assert "No result yet" not in text


def test_a_report_before_the_end_says_how_far_the_run_is(run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        log.write(3, "train", {"loss/policy": 1.0})
    assert "No result yet: 3 of 100 steps are done." in write_report(run, []).read_text()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1.4e-05", "1.4e-5"),
        ("[3e-06, 2e+09]", "[3e-6, 2e9]"),
        ("1e-05x", "1e-05x"),
        ("models/e-05", "models/e-05"),
        ("5", "5"),
    ],
)
def test_numbers_are_written_as_people_write_them(text, written):
    assert plain_numbers(text) == written
