"""`--dry-run`: print the full recipe, batch arithmetic, and an estimate of memory, without running anything."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.environments.protocol import task_split
from posttrain.errors import InputError
from posttrain.planning.memory import (
    at_a_time,
    dedicated_memory,
    engine_memory,
    memory_estimate,
    process_memory,
    with_dtypes,
)
from posttrain.planning.workers import placed_recipe, placement_of
from posttrain.recipe.compose import dump_recipe
from posttrain.recipe.model import LoraRecipe
from posttrain.recipe.plan import Device, Items, ModelSizes, TaskSplit, named_tasks
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
    for what, value in _subject(recipe, tasks, sizes).items():
        show_line(console, f"{what}: {value}")
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
        unknown = (
            f"  the files of {recipe.model.path} are not on this machine and its sizes are not known by name, so its memory "
            "is unknown"
        )
        console.print(unknown, markup=False, highlight=False, soft_wrap=True)
    elif not full:
        rows, _ = _at_peak(counted, sizes, device)
        largest = sorted(rows, key=lambda what: -rows[what])[:2]
        parts = ", ".join(f"{what} {_bytes(rows[what])}" for what in largest)
        each = " per process" if _divided(recipe) else ""
        show_line(console, f"about {_bytes(sum(rows.values()))}{each}, the most for {parts}", 2)
    else:
        console.print(_memory_table(counted, sizes, device))
    if sizes is not None and (dedicated := _dedicated(counted, sizes, device)):
        roles = ", ".join(f"{role} {_bytes(count)}" for role, count in dedicated.items())
        show_line(console, f"on each GPU of the other workers: {roles}", 2)
    for warning in [*_too_large(counted, sizes, device), *recipe_warnings(recipe)]:
        show_line(console, f"warning: {warning}")


def _subject(recipe: StageRecipe, tasks: TaskSplit | None, sizes: ModelSizes | None) -> dict[str, str]:
    """What is trained or measured, and on what: `environment` and `tasks`, where there are any, and `model`."""
    subject = {}
    environment = getattr(recipe, "environment", None) or evaluated_environment(recipe)
    if environment is not None:
        key = (environment.rows_key or "").removeprefix("environment.")
        paths = [str(getattr(source, "path", source)) for source in getattr(environment, key, ())] if key else []
        played = "known when they are read"
        if tasks is not None:
            played = named_tasks(tasks, 0 if len(tasks.training) else 2)
        subject = {"environment": environment.type, "tasks": played + (f" ({', '.join(paths)})" if paths else "")}
    if (server := recipe.remote) is not None:
        return subject | {"model": f"{server.model} at {server.url}"}
    size = "" if sizes is None else f", {sizes.parameters:,} parameters"
    dtype = recipe.model.dtype or "float32 on a CPU, bfloat16 on a GPU"
    return subject | {"model": f"{recipe.model.path}{size}, {dtype}{', LoRA' if recipe.model.lora else ''}"}


def batch_arithmetic(recipe: StageRecipe, tasks: TaskSplit | None = None) -> list[str]:
    """Batch arithmetic of the recipe, one line per part. Rows that are tasks are counted if `tasks` is given."""
    if (environment := evaluated_environment(recipe)) is not None:
        played = (getattr(recipe, "environment", None), environment)
        tasks = tasks if any(one.rows_key for one in played if one is not None) else tasks_of(recipe)
    return recipe.batch_lines(tasks)


def _divided(recipe: StageRecipe) -> TrainedRecipe | None:
    """The recipe, if its state is divided among processes or offloaded."""
    hardware = getattr(recipe, "hardware", None)
    divides = hardware is not None and (hardware.processes > 1 or hardware.offload == "all")
    return recipe if divides else None  # type: ignore[return-value]


def _memory_rows(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> Items:
    if (trained := _divided(recipe)) is not None:
        rows = process_memory(trained, sizes, device)
    else:
        rows = memory_estimate(recipe, sizes, placement_of(recipe), device)
    dedicated = _dedicated(recipe, sizes, device)
    return {what: row for what, row in rows.items() if what not in dedicated}


def _dedicated(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> dict[str, int]:
    """Role -> bytes on one GPU, of the workers whose GPUs are not those of the learners."""
    hardware = getattr(recipe, "hardware", None)
    if hardware is None or hardware.ray is None:
        return {}
    return dedicated_memory(placed_recipe(recipe), sizes, device)


def _at_peak(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> tuple[Mapping[str, int], str]:
    """The items that are on the device at the same time when they need the most memory, and when that is. A CPU keeps the
    cache of the engine and the memory of activations.
    """
    rows, placement = _memory_rows(recipe, sizes, device), placement_of(recipe)
    engine = engine_memory(recipe, sizes, placement, device)
    if device is None or not engine:
        return {what: count for what, (count, _) in rows.items()}, ""
    learning, sampling = at_a_time(recipe, rows, engine, placement)
    if learning == sampling:
        return learning, ""
    both = ((learning, "while learning"), (sampling, "while sampling"))
    return max(both, key=lambda moment: sum(moment[0].values()))


def _too_large(recipe: StageRecipe, sizes: ModelSizes | None, device: Device | None) -> list[str]:
    """A sentence if the run needs more memory than the device has; otherwise empty."""
    if recipe.remote is not None or sizes is None or device is None:
        return []
    known, gpu = sizes, device

    def needed(changed: StageRecipe) -> int:
        """Bytes on the GPU that needs the most."""
        dedicated = _dedicated(changed, known, gpu).values()
        return max(sum(_at_peak(changed, known, gpu)[0].values()), *dedicated, 0)

    if (total := needed(recipe)) <= device.memory:
        return []
    remedy = "no setting makes it fit; divide it (hardware.processes)"
    for keys in _smaller(recipe):
        changes: dict[str, Any] = {}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            changes[section] = changes.get(section, getattr(recipe, section)).model_copy(update={name: value})
        if needed(recipe.model_copy(update=changes)) <= device.memory:
            shown = [
                f"{key}.rank={value.rank}" if isinstance(value, LoraRecipe) else f"{key}={str(value).lower()}"
                for key, value in keys.items()
            ]
            remedy = f"it fits with {' '.join(shown)}"
            break
    return [f"the run needs an estimated {_bytes(total)} and {device.name} has {_bytes(int(device.memory))}; {remedy}"]


def _smaller(recipe: StageRecipe) -> Iterator[dict[str, Any]]:
    """Values of keys that save memory, cheapest first."""
    if not isinstance(recipe, TrainedRecipe):
        return
    checkpointed, eight = {"model.gradient_checkpointing": True}, {"optimizer.type": "adamw_8bit"}
    yield checkpointed
    if recipe.hardware.offload == "none":
        if recipe.hardware.processes == 1:
            yield from (eight, checkpointed | eight)
        if recipe.on_policy and recipe.optimizer.type == "adamw" and not recipe.ahead:
            yield {"hardware.offload": "rollouts"}
    yield from (checkpointed | {"hardware.offload": name} for name in ("optimizer", "all"))
    yield checkpointed | {"model.lora": recipe.model.lora or LoraRecipe()}


def _memory_table(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> Table:
    table = Table("what", "memory", "counted as", box=None, show_header=False)
    for what, (count, how) in _memory_rows(recipe, sizes, device).items():
        table.add_row(f"  {what}", _bytes(count), how)
    present, when = _at_peak(recipe, sizes, device)
    total, note = sum(present.values()), "an estimate"
    if device is not None and total > device.memory:
        note += f"; {device.name} has {_bytes(int(device.memory))}"
    note += f"; the most at one time, {when}" if when else ""
    each = "per process" if _divided(recipe) else "total"
    table.add_row(f"  [bold]{each}[/bold]", _bytes(total), note)
    table.columns[1].justify = "right"
    return table


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
