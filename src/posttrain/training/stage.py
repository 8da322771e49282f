"""Running one stage in this process."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console

from posttrain.distributed.world import join_world
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.stages import DistillRecipe, DpoRecipe, GenerateRecipe, Recipe, RewardRecipe, RlRecipe, SftRecipe
from posttrain.runs.directory import RunDirectory

if TYPE_CHECKING:
    from posttrain.training.trainer import Callback


def run_in_process(
    recipe: Recipe,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence["Callback"] = (),
) -> RunDirectory:
    """Run the stage in this process, which is the only one of the run or one of several; returns the run.

    Arguments and errors are those of `posttrain.stages.run_stage`.
    """
    console = console or Console()
    hardware = getattr(recipe, "hardware", HardwareRecipe())

    def opened() -> RunDirectory:
        run = RunDirectory.open(f"{recipe.runs}/{recipe.name}") if resume else RunDirectory.create(recipe, overwrite)
        held.enter_context(run.lock())
        return run

    # Each stage is imported when it runs, to start quickly.
    with join_world(hardware, recipe.model.device) as world, ExitStack() as held:
        run = world.on_rank0(opened)
        if isinstance(recipe, RlRecipe):
            from posttrain.training import rl

            rl.train(recipe, run, resume, console, callbacks)
        elif isinstance(recipe, DistillRecipe):
            from posttrain.training import distill

            distill.train(recipe, run, resume, console, callbacks)
        elif isinstance(recipe, SftRecipe):
            from posttrain.training import sft

            sft.train(recipe, run, resume, console, callbacks)
        elif isinstance(recipe, DpoRecipe):
            from posttrain.training import dpo

            dpo.train(recipe, run, resume, console, callbacks)
        elif isinstance(recipe, RewardRecipe):
            from posttrain.training import reward

            reward.train(recipe, run, resume, console, callbacks)
        elif isinstance(recipe, GenerateRecipe):
            from posttrain.training import generate

            generate.run(recipe, run, resume, overwrite, console)
        else:
            from posttrain.training import evaluate

            evaluate.run(recipe, run, console)
    return run
