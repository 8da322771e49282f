"""`--dry-run`: print the full recipe, batch arithmetic, and an estimate of memory, without running anything."""

from contextlib import suppress
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from posttrain.environments.protocol import task_split
from posttrain.errors import InputError
from posttrain.planning.memory import at_peak, dedicated_rows, divided, memory_rows, shown_bytes, too_large, with_dtypes
from posttrain.recipe.compose import dump_recipe
from posttrain.recipe.plan import Device, ModelSizes, TaskSplit, named_tasks
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.run import StageRecipe, TrainedRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.tables import show_line


def tasks_of(recipe: StageRecipe) -> TaskSplit:
    """The tasks of a stage with an environment; reads the files whose rows are tasks. InputError as when it runs."""
    environment = getattr(recipe, "environment", None) or evaluated_environment(recipe)
    assert environment is not None
    seeds, key = recipe.training_seeds
    tasks = task_split(environment, recipe.evaluation, seeds, key)  # type: ignore[attr-defined]
    return tasks if seeds is not None else replace(tasks, validation=())


def show_plan(
    recipe: StageRecipe, sizes: ModelSizes | None, console: Console, device: Device | None = None, full: bool = True
) -> None:
    """Print the plan: environment, tasks, model, batches and memory.

    Args:
        full: Print the whole recipe and the parts of memory as well.
        sizes: Sizes of the model. None: memory is unknown.
        device: The GPU of each process. None: unknown, or a CPU.
    """
    counted = with_dtypes(recipe, device)
    tasks = None
    if evaluated_environment(recipe) is not None:
        with suppress(InputError):  # `posttrain.training.checks` reports it.
            tasks = tasks_of(recipe)
    for line in _subject(recipe, tasks, sizes):
        show_line(console, line)
    if full:
        console.print(f"\n[bold]recipe[/bold] ({recipe.stage})")
        console.print(dump_recipe(recipe), markup=False, highlight=False, soft_wrap=True, end="")
    else:
        console.print(f"\n[bold]{recipe.stage}[/bold] in {recipe.runs}/{recipe.name}", highlight=False)
    console.print("\n[bold]batches[/bold]")
    for line in batch_arithmetic(recipe, tasks):
        show_line(console, line, 2)
    console.print("\n[bold]memory[/bold]")
    if recipe.remote is not None:
        console.print("  none for the model: it runs on the server")
    elif sizes is None:
        unknown = "are not on this machine and its sizes are not known by name, so its memory is unknown"
        show_line(console, f"the files of {recipe.model.path} {unknown}", 2)
    elif not full:
        rows, _ = at_peak(counted, sizes, device)
        largest = sorted(rows, key=lambda what: -rows[what])[:2]
        parts = ", ".join(f"{what} {shown_bytes(rows[what])}" for what in largest)
        each = " per process" if divided(recipe) else ""
        show_line(console, f"about {shown_bytes(sum(rows.values()))}{each}, the most for {parts}", 2)
    else:
        console.print(_memory_table(counted, sizes, device))
    if sizes is not None and (dedicated := dedicated_rows(counted, sizes, device)):
        roles = ", ".join(f"{role} {shown_bytes(count)}" for role, count in dedicated.items())
        show_line(console, f"on each GPU of the other workers: {roles}", 2)
    few = [] if tasks is None else recipe.too_few(len(tasks.test))
    for warning in [*too_large(counted, sizes, device), *few, *recipe_warnings(recipe)]:
        show_line(console, f"warning: {warning}")


def _subject(recipe: StageRecipe, tasks: TaskSplit | None, sizes: ModelSizes | None) -> list[str]:
    """What is trained or measured, and on what: `environment` and `tasks`, where there are any, and `model`."""
    subject = []
    environment = getattr(recipe, "environment", None) or evaluated_environment(recipe)
    if environment is not None:
        key = (environment.rows_key or "").removeprefix("environment.")
        paths = ", ".join(str(getattr(source, "path", source)) for source in getattr(environment, key, ()) if key)
        played = "known when they are read" if tasks is None else named_tasks(tasks, 0 if len(tasks.training) else 2)
        subject = [f"environment: {environment.type}", f"tasks: {played}" + (f" ({paths})" if paths else "")]
    if (server := recipe.remote) is not None:
        return [*subject, f"model: {server.model} at {server.url}"]
    size = "" if sizes is None else f", {sizes.parameters:,} parameters"
    dtype = recipe.model.dtype or "float32 on a CPU, bfloat16 on a GPU"
    subject.append(f"model: {recipe.model.path}{size}, {dtype}{', LoRA' if recipe.model.lora else ''}")
    if isinstance(recipe, TrainedRecipe):
        subject.append(f"learning rate: {recipe.optimizer.learning_rate:g}")
    return subject


def batch_arithmetic(recipe: StageRecipe, tasks: TaskSplit | None = None) -> list[str]:
    """Batch arithmetic of the recipe, one line per part. Rows that are tasks are counted if `tasks` is given."""
    if (environment := evaluated_environment(recipe)) is not None:
        played = (getattr(recipe, "environment", None), environment)
        tasks = tasks if any(one.rows_key for one in played if one is not None) else tasks_of(recipe)
    return recipe.batch_lines(tasks)


def _memory_table(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> Table:
    table = Table("what", "memory", "counted as", box=None, show_header=False)
    for what, (count, how) in memory_rows(recipe, sizes, device).items():
        table.add_row(f"  {what}", shown_bytes(count), how)
    present, when = at_peak(recipe, sizes, device)
    total, note = sum(present.values()), "an estimate"
    if device is not None and total > device.memory:
        note += f"; {device.name} has {shown_bytes(int(device.memory))}"
    note += f"; the most at one time, {when}" if when else ""
    each = "per process" if divided(recipe) else "total"
    table.add_row(f"  [bold]{each}[/bold]", shown_bytes(total), note)
    table.columns[1].justify = "right"
    return table
