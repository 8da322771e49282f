"""`posttrain cluster plan`: who runs where, with which memory, what idles meanwhile, and which setting answers it."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.cluster.advice import KEPT_FREE, advised, ahead_words, idle_words, step_seconds
from posttrain.cluster.cost import memory_of, placed_phases, placement_of
from posttrain.cluster.nodes import Node
from posttrain.cluster.workers import ENGINE, PlacedRecipe, Worker, place
from posttrain.recipe.cost import Phase, plain
from posttrain.recipe.cost_devices import Device
from posttrain.recipe.cost_table import duration
from posttrain.recipe.cost_work import Episodes, Tokens
from posttrain.recipe.memory import ModelSizes
from posttrain.recipe.stages import RlRecipe


def show_placement(
    recipe: PlacedRecipe,
    nodes: list[Node],
    device: Device | None,
    sizes: ModelSizes | None,
    console: Console,
    episodes: Episodes | None = None,
    rows: Tokens | None = None,
) -> None:
    """Print the plan. `device` None: no times; `sizes` None: no memory and no times. `InputError` where it does not fit."""
    workers, share = place(recipe, nodes)
    gpus = sum(node.devices for node in nodes)
    memory = memory_of(recipe, sizes, gpus > 0, device) if sizes is not None else {}
    console.print("[bold]who runs where[/bold]")
    console.print(_workers_table(workers, nodes, memory))
    for line in [*_remarks(recipe, nodes, share, gpus), *_memory_remarks(recipe, sizes, memory, device, gpus)]:
        _say(console, line)
    console.print("\n[bold]what waits[/bold]")
    if sizes is None or device is None or not plain(sizes):
        missing = "a device (--on)" if device is None else f"the sizes of {recipe.model.path} (--sizes)"
        _say(console, f"no times without {missing}")
        return
    phases = placed_phases(recipe, sizes, device, gpus > 0, episodes, rows)
    total = gpus or 1
    console.print(_phases_table(recipe, phases, total, gpus > 0))
    if not gpus:
        _say(console, "learners and engines share the same cores and take turns on them: none waits by the schedule")
        return
    idle = _idle(recipe, phases, gpus)
    _say(console, f"{idle:.0%} of the GPUs' time in a step is waiting: {gpus * (1 - idle):.3g} of {gpus} are at work")
    ahead = placement_of(recipe, True).ahead
    for line in (ahead_words if ahead else idle_words)(phases, workers, gpus):
        _say(console, line)
    _advise(recipe, sizes, device, nodes, phases, console, episodes, rows)


def _advise(
    recipe: PlacedRecipe,
    sizes: ModelSizes,
    device: Device,
    nodes: list[Node],
    phases: Sequence[Phase],
    console: Console,
    episodes: Episodes | None,
    rows: Tokens | None,
) -> None:
    now = step_seconds(recipe, phases)
    console.print("\n[bold]what answers it[/bold]")
    found = advised(recipe, sizes, device, nodes, episodes, rows)
    for advice in found[:4]:
        note = f": {advice.note}" if advice.note else ""
        _say(console, f"{advice.words}  {duration(advice.seconds)} a step, {now / advice.seconds:.2g} x as fast{note}")
    if not found:
        _say(console, "nothing that was tried makes a step 5% faster")


def _idle(recipe: PlacedRecipe, phases: Sequence[Phase], devices: int) -> float:
    """Share of the time of the cluster's GPUs in a step in which they have nothing to do."""
    busy = sum(phase.seconds * phase.devices for phase in phases)
    return max(0.0, 1 - busy / (devices * step_seconds(recipe, phases)))


def _workers_table(workers: Sequence[Worker], nodes: list[Node], memory: dict[str, tuple[int, int]]) -> Table:
    table = Table("who", "where", "GPUs", "cores", "GiB learning", "GiB sampling", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for _, run in groupby(workers, key=lambda w: (w.role, w.node, len(w.devices), w.cpus)):
        alike = list(run)
        first, last = alike[0], alike[-1]
        name = first.name if len(alike) == 1 else f"{first.role} {first.number} to {last.number}"
        held = memory.get(first.role)
        told = ["", ""] if held is None else [f"{count / 2**30:.3g}" for count in held]
        if first.colocated and first.role == ENGINE and first.devices:
            told = ["", "in the learners'"] if memory else told
        devices = sorted({device for worker in alike for device in worker.devices})
        cores = f"{first.cpus:g}" if len(alike) == 1 else f"{len(alike)} x {first.cpus:g}"
        table.add_row(name, nodes[first.node].name, _span(devices), cores, *told)
    return table


def _span(devices: Sequence[int]) -> str:
    """0-3,6 for 0, 1, 2, 3 and 6."""
    spans: list[list[int]] = []
    for device in devices:
        if spans and device == spans[-1][-1] + 1:
            spans[-1].append(device)
        else:
            spans.append([device])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans) or "–"


def _remarks(recipe: PlacedRecipe, nodes: list[Node], share: float, gpus: int) -> list[str]:
    lines = []
    if share < 1:
        there = sum(node.cpus for node in nodes)
        lines.append(f"the cluster has {there:g} cores, so everybody gets {share:.0%} of what hardware asks for")
    if gpus:
        workers, _ = place(recipe, nodes)
        free = gpus - len({(w.node, device) for w in workers for device in w.devices})
        if free:
            lines.append(
                f"{free} of {gpus} GPUs have nothing to do; raise hardware.processes = {recipe.hardware.processes}"
            )
    if recipe.hardware.apart.critic or recipe.hardware.apart.reference:
        lines.append("hardware.apart is planned here and refused by a run: the learners' processes hold these models")
    if isinstance(recipe, RlRecipe) and recipe.unit_credit is not None and recipe.hardware.rewards.count:
        lines.append("unit_credit asks the reward model itself, so a run keeps it in the learner's process")
    return lines


def _memory_remarks(
    recipe: PlacedRecipe,
    sizes: ModelSizes | None,
    memory: dict[str, tuple[int, int]],
    device: Device | None,
    gpus: int,
) -> list[str]:
    if sizes is None:
        return [f"the files of {recipe.model.path} are not on this machine, so memory is unknown; see --sizes"]
    if device is None or device.memory is None or not gpus:
        return []
    limit = (1 - KEPT_FREE) * device.memory
    return [
        f"{role}: {max(both) / 2**30:.3g} GiB do not fit, as {device.name} has {device.memory / 2**30:.3g} and a tenth of it is "
        "kept free"
        for role, both in memory.items()
        if max(both) > limit
    ]


def _phases_table(recipe: PlacedRecipe, phases: Sequence[Phase], total: int, gpus: bool) -> Table:
    table = Table("phase", "time", "share", *(["GPUs at work"] if gpus else []), "counted as", box=None, pad_edge=False)
    step = step_seconds(recipe, phases)
    for phase in phases:
        busy = [f"{phase.devices:.3g} of {total}"] if gpus else []
        table.add_row(phase.what, duration(phase.seconds), f"{phase.seconds / step:.0%}", *busy, phase.how)
    table.add_row(
        "[bold]a step[/bold]", duration(step), "", *([""] if gpus else []), "an estimate; see docs/scaling.md"
    )
    for column in table.columns[1:3]:
        column.justify = "right"
    return table


def _say(console: Console, line: str) -> None:
    console.print(Padding(Text(line), (0, 0, 0, 2)))
