"""The evaluate stage: a model in an environment, on held-out seeds, beside the reference players."""

from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.engines.local import LocalEngine
from posttrain.evaluation.evaluate import evaluate
from posttrain.models.policy import Policy
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.rollout.driver import Player
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import rows_table, write_report
from posttrain.training.table import EVALUATED, final_rows, reference_players, write_results


def run(recipe: EvaluateRecipe, directory: RunDirectory, console: Console) -> None:
    """Play `evaluation.final_seeds`, write episodes, metrics and report, and print the table."""
    policy = Policy(recipe.model, recipe.seed)
    player = Player(
        engine=LocalEngine(policy, recipe.engine),
        renderer=Renderer(policy.tokenizer, policy.end_tokens),
        environment=recipe.environment,
        rollout=recipe.rollout,
        sampling=recipe.evaluation.sampling,
        version=0,
    )
    seeds = recipe.evaluation.final_seeds
    with MetricsLog(directory, recipe.sinks) as log:
        for name, values in reference_players(recipe.environment, seeds).items():
            log.write(0, "baseline", {"player": name, **values})
        result, episodes = evaluate(player, recipe.evaluation.model_copy(update={"seeds": seeds}), recipe.seed)
        write_episodes(directory.episodes, 0, "final", episodes, None)
        log.write(0, "final", {"player": EVALUATED, **result.metrics()})
    rows = final_rows(directory)
    write_results(directory, rows)
    write_report(directory, rows)
    console.print(rows_table(rows, title=f"{recipe.name}: {recipe.environment.type}, held-out seeds"))
    console.print(f"report: {directory.report}", highlight=False)
