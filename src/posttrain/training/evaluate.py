"""The evaluate stage: a model in an environment, on held-out seeds, beside the reference players."""

from rich.console import Console

from posttrain.models.policy import Policy
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import write_report
from posttrain.training.measure import EVALUATED
from posttrain.training.playing import Playing, check_tasks
from posttrain.training.reward_scorer import open_scorer
from posttrain.training.table import write_tables


def run(recipe: EvaluateRecipe, directory: RunDirectory, console: Console) -> None:
    """Play `evaluation.final_seeds`, write episodes, metrics and report, and print the table."""
    for message in check_tasks(recipe):
        console.print(message, highlight=False)
    policy = Policy(recipe.model, recipe.seed)
    playing = Playing(recipe, policy, directory, open_scorer(recipe.reward, policy))
    with MetricsLog(directory, recipe.sinks) as log:
        for name, values in playing.references().items():
            log.write(0, "baseline", {"player": name, **values})
        log.write(0, "final", {"player": EVALUATED, **playing.final(0)})
    tables = write_tables(directory, [playing])
    write_report(directory, tables)
    for table in tables:
        console.print(table.rich())
    console.print(f"report: {directory.report}", highlight=False)
