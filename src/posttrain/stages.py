"""Running one stage of any kind: in this process, in several processes of this machine, or on a Ray cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from posttrain.distributed.launch import launch
from posttrain.distributed.world import is_launched
from posttrain.errors import InputError
from posttrain.planning.inputs import require_inputs, rows_are_here
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.stages import Recipe
from posttrain.recipe.trust import remember
from posttrain.runs.directory import RunDirectory
from posttrain.runs.storage import has_state
from posttrain.terminal import new_console
from posttrain.training.stage import finish_ended, run_in_process

if TYPE_CHECKING:
    from posttrain.training.trainer import Callback


def run_stage(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence["Callback"] = (),
) -> RunDirectory:
    """Run the recipe in `<recipe.runs>/<recipe.name>` and return that run. The exported model is in `<run>/model`.

    Args:
        resume: continue an existing run from its newest checkpoint.
        overwrite: replace an existing run.
        callbacks: called by the training stages after each step, evaluation and rollout. Only for runs in this process.

    Raises:
        InputError: wrong input, or `callbacks` with a recipe that starts other processes.
        RunError: the run could not continue.
        KeyboardInterrupt: the run was stopped.
    """
    console = console or new_console()
    require_inputs(recipe)
    if not is_launched():  # before torch is imported; one process of several creates the run
        path = Path(recipe.runs) / recipe.name
        if not resume:
            RunDirectory.require_free(path, overwrite)
            if evaluated_environment(recipe) is not None and rows_are_here(recipe):
                from posttrain.planning.dry_run import tasks_of  # imports numpy
                from posttrain.training.tasks import check_tasks

                check_tasks(recipe, tasks_of(recipe))  # again in the run, which prints its warnings
        elif not has_state(run := RunDirectory.open(path)):
            with run.lock():
                finish_ended(recipe, run, console)
            return run
    remember(recipe)
    hardware = getattr(recipe, "hardware", HardwareRecipe())
    elsewhere = hardware.ray is not None or (hardware.learners > 1 and not is_launched())
    if elsewhere and callbacks:
        raise InputError("callbacks run in this process; set hardware.processes to 1 and remove hardware.ray")
    if hardware.ray is not None:
        from posttrain.distributed.ray.launch import launch as launch_on_cluster

        launch_on_cluster(recipe, resume, overwrite, console)
    elif elsewhere:
        launch(recipe, resume, overwrite)
    else:
        return run_in_process(recipe, resume, overwrite, console, callbacks)
    return RunDirectory.open(f"{recipe.runs}/{recipe.name}")
