"""The evaluate stage: a model in an environment, on held-out seeds, beside the reference players."""

from rich.console import Console

from posttrain.models.policy import Policy
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import write_report
from posttrain.training.measure import EVALUATED
from posttrain.training.playing import Playing
from posttrain.training.reward_scorer import open_scorer
from posttrain.training.table import write_tables
from posttrain.training.tasks import check_tasks, too_long


def run(recipe: EvaluateRecipe, directory: RunDirectory, console: Console) -> None:
    """Play `evaluation.final_seeds`, write episodes, metrics and report, and print the table."""
    messages = check_tasks(recipe)
    policy = Policy(recipe.model, recipe.seed)
    playing = Playing(recipe, policy, directory, open_scorer(recipe.reward, policy))
    playing.left_out, about_prompts = too_long(recipe, playing.renderer)
    for message in [*messages, *about_prompts]:
        console.print(message, highlight=False)
    with MetricsLog(directory, recipe.sinks) as log:
        for name, values in playing.references().items():
            log.write(0, "baseline", {"player": name, **values})
        log.write(0, "final", {"player": EVALUATED, **playing.final(0)})
    tables = write_tables(directory, [playing])
    write_report(directory, tables)
    for table in tables:
        console.print(table.rich())
    console.print(f"report: {directory.report}", highlight=False)
