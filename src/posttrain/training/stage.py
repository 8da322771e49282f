"""Running one stage of any kind, fresh or resumed."""

from rich.console import Console

from posttrain.recipe.stages import DpoRecipe, GenerateRecipe, Recipe, RewardRecipe, RlRecipe, SftRecipe
from posttrain.runs.directory import RunDirectory


def run_stage(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> RunDirectory:
    """Run the recipe in `<recipe.runs>/<recipe.name>` and return that run.

    With `resume` the run exists and goes on from its newest checkpoint. The exported model is in `<run>/model`.
    Raises InputError for wrong input, RunError for a run that could not go on, KeyboardInterrupt when stopped.
    """
    console = console or Console()
    run = RunDirectory.open(f"{recipe.runs}/{recipe.name}") if resume else RunDirectory.create(recipe, overwrite)
    with run.lock():
        if isinstance(recipe, RlRecipe):
            from posttrain.training import rl

            rl.train(recipe, run, resume, console)
        elif isinstance(recipe, SftRecipe):
            from posttrain.training import sft

            sft.train(recipe, run, resume, console)
        elif isinstance(recipe, DpoRecipe):
            from posttrain.training import dpo

            dpo.train(recipe, run, resume, console)
        elif isinstance(recipe, RewardRecipe):
            from posttrain.training import reward

            reward.train(recipe, run, resume, console)
        elif isinstance(recipe, GenerateRecipe):
            from posttrain.training import generate

            generate.run(recipe, run, resume, overwrite, console)
        else:
            from posttrain.training import evaluate

            evaluate.run(recipe, run, console)
    return run
