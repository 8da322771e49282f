"""Running one stage of any kind, fresh or resumed."""

from contextlib import ExitStack

from rich.console import Console

from posttrain.distributed.launch import launch
from posttrain.distributed.world import is_launched, join_world
from posttrain.factory import in_learner
from posttrain.recipe.hardware import HardwareRecipe
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
    Where the recipe asks for several processes, they are started here, unless this is one of them already.
    Raises InputError for wrong input, RunError for a run that could not go on, KeyboardInterrupt when stopped.
    """
    console = console or Console()
    hardware = getattr(recipe, "hardware", HardwareRecipe())
    if hardware.ray is not None and not in_learner():
        from posttrain.distributed.ray.launch import launch as launch_on_cluster

        launch_on_cluster(recipe, resume, overwrite, console)
        return RunDirectory.open(f"{recipe.runs}/{recipe.name}")
    if hardware.processes > 1 and not is_launched():
        launch(recipe, resume, overwrite)
        return RunDirectory.open(f"{recipe.runs}/{recipe.name}")

    def opened() -> RunDirectory:
        run = RunDirectory.open(f"{recipe.runs}/{recipe.name}") if resume else RunDirectory.create(recipe, overwrite)
        held.enter_context(run.lock())
        return run

    with join_world(hardware, recipe.model.device) as world, ExitStack() as held:
        run = world.on_rank0(opened)
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
