"""`posttrain cluster plan`: placement of workers, their memory, idle time, and settings that reduce it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from posttrain.errors import InputError
from posttrain.planning.devices import Device
from posttrain.planning.dry_run import duration
from posttrain.planning.memory import ModelSizes
from posttrain.planning.phases import Phase, plain, total_seconds
from posttrain.planning.placed_phases import DOERS, memory_of, placed_phases, placement_of, unit_texts
from posttrain.planning.work import Episodes, Tokens
from posttrain.planning.workers import ENGINE, LEARNER, Node, PlacedRecipe, Worker, place
from posttrain.recipe.stages import RlRecipe

MIN_SPEEDUP = 1.05
"""Minimum speedup of a step for a change to be suggested."""
KEPT_FREE = 0.1
"""Fraction of device memory reserved for uncounted use: kernel buffers, communication, fragmentation."""


@dataclass(frozen=True)
class Advice:
    """A recipe change that makes a step faster."""

    overrides: dict[str, Any]
    seconds: float
    """Duration of a step with the change."""
    note: str = ""
    """Effects of the change besides time."""

    @property
    def words(self) -> str:
        """The overrides as command-line arguments."""
        return " ".join(f"{key}={_word(value)}" for key, value in self.overrides.items())


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def step_seconds(recipe: PlacedRecipe, phases: Sequence[Phase]) -> float:
    """Duration of a placed step."""
    return total_seconds(phases, placement_of(recipe, True))


def idle_words(phases: Sequence[Phase], workers: Sequence[Worker], devices: int) -> list[str]:
    """One sentence per phase in which GPUs are idle, by descending idle time, with the roles of the idle GPUs."""
    step = sum(phase.seconds for phase in phases)
    sentences = []
    for phase in phases:
        waiting = devices - phase.devices
        if waiting < 0.5 or phase.seconds < 0.01 * step:
            continue
        doer = DOERS.get(phase.what)
        # Without dedicated devices, the learners run the phase.
        busy = doer if doer in {w.role for w in workers} else LEARNER
        at_work = {(w.node, device) for w in workers if w.role == busy for device in w.devices}
        left = [w.role for w in workers if not at_work.issuperset((w.node, device) for device in w.devices)]
        names = ", ".join(dict.fromkeys(left))
        who = f" ({names})" if names and phase.devices else ""
        sentence = f"{_count(waiting)} of {devices} GPUs are idle{who} during: {phase.what}, {phase.seconds:.3g} s"
        sentences.append((waiting * phase.seconds, f"{sentence}, {phase.seconds / step:.0%} of the step"))
    return [sentence for _, sentence in sorted(sentences, reverse=True)]


def overlap_words(phases: Sequence[Phase], workers: Sequence[Worker], devices: int) -> list[str]:
    """For a step with asynchronous rollouts: one sentence on which side, engines or learners, waits for the other."""
    sampled = sum(phase.seconds for phase in phases if phase.sampling)
    learned = sum(phase.seconds for phase in phases if not phase.sampling)
    waiting, slower = (LEARNER, "sampling") if learned < sampled else (ENGINE, "learning")
    count = len({(w.node, device) for w in workers if w.role == waiting for device in w.devices})
    seconds, step = abs(sampled - learned), max(sampled, learned)
    if seconds < 0.01 * step:
        return []
    return [
        f"{count} of {devices} GPUs ({waiting}) are idle for {seconds:.3g} s, {seconds / step:.0%} of the step: {slower} takes longer"
    ]


def _count(number: float) -> str:
    return f"{number:.0f}" if abs(number - round(number)) < 0.05 else f"{number:.1f}"


def advised(
    recipe: PlacedRecipe,
    sizes: ModelSizes,
    device: Device,
    nodes: list[Node],
    episodes: Episodes | None = None,
    rows: Tokens | None = None,
) -> list[Advice]:
    """Changes that make a step faster and fit into memory, fastest first."""
    now = step_seconds(recipe, placed_phases(recipe, sizes, device, True, episodes, rows))
    faster = []
    for overrides, note in _candidates(recipe, sum(node.devices for node in nodes), sizes, device):
        changed = _changed(recipe, overrides)
        if changed is None or not _fits(changed, sizes, device, nodes):
            continue
        seconds = step_seconds(changed, placed_phases(changed, sizes, device, True, episodes, rows))
        if now / seconds >= MIN_SPEEDUP:
            faster.append(Advice(overrides, seconds, note))
    best: dict[str, Advice] = {}
    for advice in sorted(faster, key=lambda advice: advice.seconds):
        best.setdefault(advice.note, advice)
    return list(best.values())


def _candidates(
    recipe: PlacedRecipe, devices: int, sizes: ModelSizes, device: Device
) -> Iterator[tuple[dict[str, Any], str]]:
    hardware = recipe.hardware
    offloaded = hardware.offload != "none"
    if offloaded:
        yield {"hardware.offload": "none"}, "optimizer state stays on the GPUs"
    if not isinstance(recipe, RlRecipe):
        if hardware.processes < devices:
            yield {"hardware.processes": devices}, ""
        return
    everything: dict[str, Any] = {} if hardware.ray is not None else {"hardware.ray": "auto"}
    everything |= {"hardware.processes": devices, "hardware.engines.colocated": True}
    if hardware.rewards.count:
        everything["hardware.rewards.count"] = 0
    for name in ("critic", "reference"):
        if getattr(hardware.dedicated, name):
            everything[f"hardware.dedicated.{name}"] = 0
    if offloaded:
        everything["hardware.offload"] = "none"
    for size in (1, 2, 4, 8):
        if devices % size == 0:
            chosen = {"hardware.engines.count": devices // size, "hardware.engines.devices": size}
            yield everything | chosen, "all roles share all GPUs"
    if hardware.engines.colocated and hardware.engines.devices > 1:
        engines = {"hardware.engines.count": hardware.processes, "hardware.engines.devices": 1}
        yield engines, "engines on one GPU need no all-reduces"
    elif not hardware.engines.colocated:
        yield {"rollout.async_rollouts": 1}, "sampling overlaps with learning, with weights one step old"
    if unit_texts(recipe):
        other = {} if hasattr(recipe.unit_credit, "probe") else {"unit_credit.type": "prefix"}
        yield (
            other | {"unit_credit.probe": "one_pass"},
            "rewards after each unit in one forward pass; changes the credit",
        )
    if recipe.learner.updates_per_step * recipe.learner.epochs_per_step > 1:
        yield (
            {"learner.updates_per_step": 1, "learner.epochs_per_step": 1},
            "fewer updates; changes the training result",
        )
    if getattr(recipe.engine, "enforce_eager", None):
        yield {"engine.enforce_eager": False}, "decoding steps run as CUDA graphs"
    slots = getattr(recipe.engine, "slots", 0)
    if slots and "slots" in type(recipe.engine).model_fields:
        yield {"engine.slots": 4 * slots}, "more concurrent answers per engine"


def _changed(recipe: PlacedRecipe, overrides: dict[str, Any]) -> PlacedRecipe | None:
    """The recipe with `overrides` applied to dotted keys. None if the result is invalid."""
    values = recipe.model_dump(mode="json")
    for key, value in overrides.items():
        *path, last = key.split(".")
        section = values
        for part in path:
            section = section[part]
        if last == "type" and section.get("type") != value:
            kept: dict[str, Any] = {name: section[name] for name in ("beta", "segmenter") if name in section}
            section.clear()
            section.update(kept)
        section[last] = value
    try:
        return type(recipe).model_validate(values)
    except ValidationError:
        return None


def _fits(recipe: PlacedRecipe, sizes: ModelSizes, device: Device, nodes: list[Node]) -> bool:
    try:
        place(recipe, nodes)
    except InputError:
        return False
    limit = None if device.memory is None else (1 - KEPT_FREE) * device.memory
    return limit is None or all(max(both) <= limit for both in memory_of(recipe, sizes, True, device).values())


def show_placement(
    recipe: PlacedRecipe,
    nodes: list[Node],
    device: Device | None,
    sizes: ModelSizes | None,
    console: Console,
    episodes: Episodes | None = None,
    rows: Tokens | None = None,
) -> None:
    """Print the plan.

    Without `device` there are no times; without `sizes` there is neither memory nor time. Raises `InputError` if the
    workers do not fit on the nodes.
    """
    workers, share = place(recipe, nodes)
    gpus = sum(node.devices for node in nodes)
    memory = memory_of(recipe, sizes, gpus > 0, device) if sizes is not None else {}
    console.print("[bold]placement[/bold]")
    console.print(_workers_table(workers, nodes, memory))
    for line in [
        *_placement_warnings(recipe, nodes, share, gpus),
        *_memory_warnings(recipe, sizes, memory, device, gpus),
    ]:
        _say(console, line)
    console.print("\n[bold]idle time[/bold]")
    if sizes is None or device is None or not plain(sizes):
        missing = "a device (--on)" if device is None else f"the sizes of {recipe.model.path} (--sizes)"
        _say(console, f"no estimate without {missing}")
        return
    phases = placed_phases(recipe, sizes, device, gpus > 0, episodes, rows)
    total = gpus or 1
    console.print(_phases_table(recipe, phases, total, gpus > 0))
    if not gpus:
        _say(console, "learners and engines share the same cores and alternate, so there is no idle time")
        return
    idle = _idle(recipe, phases, gpus)
    _say(console, f"GPUs are idle for {idle:.0%} of a step: {gpus * (1 - idle):.3g} of {gpus} are busy on average")
    ahead = placement_of(recipe, True).async_rollouts
    for line in (overlap_words if ahead else idle_words)(phases, workers, gpus):
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
    console.print("\n[bold]suggestions[/bold]")
    suggestions = advised(recipe, sizes, device, nodes, episodes, rows)
    for advice in suggestions[:4]:
        note = f": {advice.note}" if advice.note else ""
        _say(
            console, f"{advice.words}  {duration(advice.seconds)} per step, {now / advice.seconds:.2g} x as fast{note}"
        )
    if not suggestions:
        _say(console, "no tested change makes a step at least 5% faster")


def _idle(recipe: PlacedRecipe, phases: Sequence[Phase], devices: int) -> float:
    """Fraction of GPU time in a step that is idle."""
    busy = sum(phase.seconds * phase.devices for phase in phases)
    return max(0.0, 1 - busy / (devices * step_seconds(recipe, phases)))


def _workers_table(workers: Sequence[Worker], nodes: list[Node], memory: dict[str, tuple[int, int]]) -> Table:
    table = Table("worker", "node", "GPUs", "cores", "GiB learning", "GiB sampling", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for _, run in groupby(workers, key=lambda w: (w.role, w.node, len(w.devices), w.cpus)):
        alike = list(run)
        first, last = alike[0], alike[-1]
        name = first.name if len(alike) == 1 else f"{first.role} {first.number} to {last.number}"
        held = memory.get(first.role)
        cells = ["", ""] if held is None else [f"{count / 2**30:.3g}" for count in held]
        if first.colocated and first.role == ENGINE and first.devices:
            cells = ["", "in the learners'"] if memory else cells
        devices = sorted({device for worker in alike for device in worker.devices})
        cores = f"{first.cpus:g}" if len(alike) == 1 else f"{len(alike)} x {first.cpus:g}"
        table.add_row(name, nodes[first.node].name, _span(devices), cores, *cells)
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


def _placement_warnings(recipe: PlacedRecipe, nodes: list[Node], share: float, gpus: int) -> list[str]:
    lines = []
    if share < 1:
        there = sum(node.cpus for node in nodes)
        lines.append(f"the cluster has {there:g} cores, so every worker gets {share:.0%} of the requested cores")
    if gpus:
        workers, _ = place(recipe, nodes)
        free = gpus - len({(w.node, device) for w in workers for device in w.devices})
        if free:
            lines.append(f"{free} of {gpus} GPUs are unused; raise hardware.processes = {recipe.hardware.processes}")
    return lines


def _memory_warnings(
    recipe: PlacedRecipe,
    sizes: ModelSizes | None,
    memory: dict[str, tuple[int, int]],
    device: Device | None,
    gpus: int,
) -> list[str]:
    if sizes is None:
        return [f"the sizes of {recipe.model.path} are not known, so its memory is unknown; pass --sizes"]
    if device is None or device.memory is None or not gpus:
        return []
    limit = (1 - KEPT_FREE) * device.memory
    return [
        f"{role}: {max(both) / 2**30:.3g} GiB do not fit; {device.name} has {device.memory / 2**30:.3g} GiB, of which 10% is "
        "reserved"
        for role, both in memory.items()
        if max(both) > limit
    ]


def _phases_table(recipe: PlacedRecipe, phases: Sequence[Phase], total: int, gpus: bool) -> Table:
    table = Table("phase", "time", "share", *(["busy GPUs"] if gpus else []), "counted as", box=None, pad_edge=False)
    step = step_seconds(recipe, phases)
    for phase in phases:
        busy = [f"{phase.devices:.3g} of {total}"] if gpus else []
        table.add_row(phase.what, duration(phase.seconds), f"{phase.seconds / step:.0%}", *busy, phase.how)
    table.add_row(
        "[bold]step[/bold]", duration(step), "", *([""] if gpus else []), "an estimate; see docs/results/scaling.md"
    )
    for column in table.columns[1:3]:
        column.justify = "right"
    return table


def _say(console: Console, line: str) -> None:
    console.print(Padding(Text(line), (0, 0, 0, 2)))
