"""The evaluate stage: a model in an environment, on held-out seeds, beside the reference players."""

from rich.console import Console

from posttrain.recipe.stages import EvaluateRecipe
from posttrain.runs import events
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import write_report
from posttrain.training.evaluators import EVALUATED, EpisodeEvaluator
from posttrain.training.results import write_tables
from posttrain.training.rollouts import check_tasks, too_long


def run(recipe: EvaluateRecipe, directory: RunDirectory, console: Console) -> None:
    """Play `evaluation.final_seeds`, write episodes, metrics and report, and print the table."""
    messages = check_tasks(recipe)
    playing, about_prompts = _remote(recipe, directory) if recipe.remote is not None else _local(recipe, directory)
    for message in [*messages, *about_prompts]:
        console.print(message, highlight=False)
    # Before anything is recorded: a run that ends here, as without its server, leaves its name free.
    final = playing.final(0)
    with MetricsLog(directory, recipe.sinks) as log:
        for name, values in playing.baselines().items():
            log.write(0, "baseline", {"policy": name, **values})
        log.write(0, "final", {"policy": EVALUATED, **final})
    tables = write_tables(directory, [playing])
    remarks = [*playing.remarks, *events.drain()]
    write_report(directory, tables, warnings=remarks)
    for table in tables:
        console.print(table.rich())
    for message in remarks:
        console.print(message, highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {directory.report}", highlight=False)


def _local(recipe: EvaluateRecipe, directory: RunDirectory) -> tuple[EpisodeEvaluator, list[str]]:
    """The model of `model.path`, and what to know of the prompts that are too long for it."""
    from posttrain.models.policy import Policy
    from posttrain.training.reward_scorer import open_scorer
    from posttrain.training.rollout_manager import RolloutManager

    policy = Policy(recipe.model, recipe.seed)
    playing = RolloutManager(recipe, policy, directory, open_scorer(recipe.reward, policy))
    playing.left_out, about_prompts = too_long(recipe, playing.renderer)
    return playing, about_prompts


def _remote(recipe: EvaluateRecipe, directory: RunDirectory) -> tuple[EpisodeEvaluator, list[str]]:
    """The model behind the server. How many tokens its prompts have is the server's to know."""
    from posttrain.training.rollout_manager import RemoteRolloutManager

    return RemoteRolloutManager(recipe, directory), []
