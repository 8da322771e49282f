"""The evaluate stage: a model in an environment, on held-out seeds, beside the baseline policies."""

from rich.console import Console

from posttrain.recipe.stages import EvaluateRecipe
from posttrain.runs import events
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import write_report
from posttrain.training.evaluators import EVALUATED, EpisodeEvaluator
from posttrain.training.results import write_tables
from posttrain.training.rollouts import RemoteRolloutManager, RolloutManager, check_tasks, too_long


def run(recipe: EvaluateRecipe, directory: RunDirectory, console: Console) -> None:
    """Play `evaluation.final_seeds`, write episodes, metrics and report, and print the table."""
    evaluator, warnings = _open_evaluator(recipe, directory)
    for warning in warnings:
        console.print(warning, highlight=False)
    # Play before anything is recorded, so that a run that fails here, such as without its server, leaves its name free.
    final = evaluator.final(0)
    with MetricsLog(directory, recipe.sinks) as log:
        for name, values in evaluator.baselines().items():
            log.write(0, "baseline", {"policy": name, **values})
        log.write(0, "final", {"policy": EVALUATED, **final})
    tables = write_tables(directory, [evaluator])
    warnings = [*evaluator.warnings, *events.drain()]
    write_report(directory, tables, warnings=warnings)
    for table in tables:
        console.print(table.rich())
    for warning in warnings:
        console.print(warning, highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {directory.report}", highlight=False)


def _open_evaluator(recipe: EvaluateRecipe, directory: RunDirectory) -> tuple[EpisodeEvaluator, list[str]]:
    """The evaluator of the model at `model.path` or behind the server, and warnings about tasks and prompts."""
    evaluation = recipe.evaluation
    seeds = range(evaluation.final_seeds.start, evaluation.final_seeds.stop)
    warnings = check_tasks(recipe.environment, range(0), [seeds], recipe.reward is not None)
    left_out: frozenset[int] = frozenset()
    manager: RolloutManager | RemoteRolloutManager
    if recipe.remote is not None:
        # Only the server can count the tokens of its prompts.
        episodes = evaluation.final_seeds.count * evaluation.episodes_per_seed
        manager = RemoteRolloutManager(recipe.remote, recipe.environment, recipe.rollout, episodes)
    else:
        from posttrain.models.policy import Policy
        from posttrain.training.reward_scorer import open_scorer

        policy = Policy(recipe.model, recipe.seed)
        manager = RolloutManager(
            policy,
            recipe.engine,  # type: ignore[arg-type]
            recipe.environment,
            recipe.rollout,
            open_scorer(recipe.reward, policy),
            evaluation.sampling,
            directory.logs,
        )
        left_out, summary = too_long(recipe.environment, recipe.rollout, manager.renderer, range(0), [seeds])
        warnings = [*warnings, *summary]
    evaluator = EpisodeEvaluator(manager, evaluation, recipe.seed, directory.episodes, recipe.name, left_out)
    return evaluator, warnings
