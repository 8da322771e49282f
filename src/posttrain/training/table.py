"""The final table: reference players, the policy at its start, and the policy at its best, on the final seeds."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import SeedRange
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import write_atomically
from posttrain.runs.metrics import read_metrics
from posttrain.runs.plots import draw_plots
from posttrain.runs.report import ReportRow, rows_table, write_report
from posttrain.training.trainer import Trainer

START = "start of this run"
TRAINED = "trained"
EVALUATED = "evaluated"


def measure_start(trainer: Trainer) -> None:
    """Log what the run is compared with: reference players and the policy as it starts, on the final seeds."""
    recipe = trainer.recipe
    for player, values in reference_players(recipe.environment, recipe.evaluation.final_seeds).items():
        trainer.log.write(0, "baseline", {"player": player, **values})
    trainer.progress.message(
        f"playing {recipe.evaluation.final_seeds.count} held-out episodes with the policy as it is"
    )
    result = trainer.evaluate(recipe.evaluation.final_seeds)
    trainer.log.write(0, "baseline", {"player": START, **result.metrics()})


def reference_players(environment: EnvironmentRecipe, seeds: SeedRange) -> dict[str, dict[str, Any]]:
    """Values of the random and the optimal player on these seeds, as far as the environment can compute them."""
    found = environment_class(environment.type).baselines(environment, range(seeds.start, seeds.stop))
    return {
        player: {
            "success": baseline.success,
            "success_low": baseline.interval[0] if baseline.interval else None,
            "success_high": baseline.interval[1] if baseline.interval else None,
            "return": baseline.mean_return,
            "n": baseline.n,
        }
        for player, baseline in found.items()
    }


def finish(trainer: Trainer, console: Console) -> None:
    """Evaluate the best checkpoint on the final seeds, export it, and write table, plots and report."""
    step = trainer.restore_best()
    trainer.progress.message(
        f"playing {trainer.recipe.evaluation.final_seeds.count} held-out episodes with the best checkpoint, step {step}"
    )
    result = trainer.evaluate(trainer.recipe.evaluation.final_seeds)
    trainer.log.write(trainer.step, "final", {"player": TRAINED, "best_step": step, **result.metrics()})
    directory = trainer.run.path / "model"
    trainer.policy.export(directory)
    rows = final_rows(trainer.run)
    write_results(trainer.run, rows)
    draw_plots(trainer.run)
    write_report(trainer.run, rows, model_directory=directory)
    console.print(rows_table(rows, title=f"{trainer.recipe.name}: {trainer.recipe.environment.type}, held-out seeds"))
    console.print(f"report: {trainer.run.report}\nmodel: {directory}", highlight=False)


def final_rows(run: RunDirectory) -> list[ReportRow]:
    """Rows of the final table from the metrics: random, start, trained, optimal."""
    lines = {line["player"]: line for line in read_metrics(run.metrics) if line["kind"] in ("baseline", "final")}
    rows = []
    for player in ("random", START, TRAINED, EVALUATED, "optimal"):
        if player in lines:
            line = lines[player]
            note = f"step {line['best_step']}, best on the curve's seeds" if player == TRAINED else ""
            rows.append(ReportRow.from_values(_TITLES.get(player, player), line, note))
    return rows


_TITLES = {"random": "random policy", "optimal": "optimal policy", TRAINED: "trained model", EVALUATED: "model"}


def write_results(run: RunDirectory, rows: list[ReportRow]) -> None:
    """`results.json`: the final table for programs."""
    write_atomically(run.path / "results.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read_results(path: Path) -> list[ReportRow]:
    """The rows that `write_results` wrote."""
    rows = json.loads((path / "results.json").read_text(encoding="utf-8"))
    return [ReportRow(**{**row, "interval": tuple(row["interval"]) if row["interval"] else None}) for row in rows]
