"""The times of `--dry-run`."""

from rich.console import Console
from rich.table import Table

from posttrain.recipe.cost import Phase, evaluation_phases, plain, step_phases, total_seconds
from posttrain.recipe.cost_devices import DEVICES, Device
from posttrain.recipe.memory import ModelSizes
from posttrain.recipe.stages import DpoRecipe, EvaluateRecipe, GenerateRecipe, Recipe, RewardRecipe, RlRecipe


def show_times(recipe: Recipe, sizes: ModelSizes, device: Device | None, console: Console) -> None:
    """Print the seconds of each phase of a step on one `device`, or why none are said."""
    console.print("\n[bold]time[/bold]")
    if device is None:
        names = ", ".join(DEVICES)
        said = f"none is claimed without the limits of a device: --on takes a file of measured ones, or {names}"
    elif not plain(sizes):
        said = "none is claimed: the model's sizes are not those of a plain decoder"
    elif not (phases := step_phases(recipe, sizes, device)):
        said = "none is claimed before the rows are read"
    else:
        console.print(_table(recipe, sizes, device, phases))
        said = (
            "rows and episodes as long as they may be, which most are not: the speeds tell more. No environments, judges, "
            "files or start-up. docs/scaling.md says how it is counted, and how far measurements were from it"
        )
    console.print(f"  {said}", markup=False, highlight=False, soft_wrap=True)


def _table(recipe: Recipe, sizes: ModelSizes, device: Device, phases: list[Phase]) -> Table:
    table = Table("what", "time", "counted as", box=None, show_header=False)
    for phase in phases:
        rate = f", {phase.tokens / phase.seconds:,.0f} a second" if phase.tokens else ""
        table.add_row(f"  {phase.what}", duration(phase.seconds), phase.how + rate)
    step, said = total_seconds(phases), f"an estimate for one {device.name}"
    if isinstance(recipe, EvaluateRecipe | GenerateRecipe):
        table.add_row("  [bold]together[/bold]", duration(step), said)
    else:
        unit = "a step" if isinstance(recipe, RlRecipe) else "an update"
        steps = f", {recipe.steps:,} of them {duration(recipe.steps * step)}" if recipe.steps else ""
        table.add_row(f"  [bold]{unit}[/bold]", duration(step), said + steps)
        if not isinstance(recipe, DpoRecipe | RewardRecipe) and (played := evaluation_phases(recipe, sizes, device)):
            table.add_row("  an evaluation", duration(total_seconds(played)), played[-1].how)
    table.columns[1].justify = "right"
    return table


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits: 1.23 ms, 4.56 s, 7.89 min, 10.1 h."""
    for unit, size in (("ms", 1e-3), ("s", 1.0), ("min", 60.0)):
        if seconds < {"ms": 1.0, "s": 120.0, "min": 7200.0}[unit]:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:,.1f} h"
