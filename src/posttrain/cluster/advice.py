"""What idles while others compute, and which setting answers it: changes of the recipe that the cost model finds faster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from posttrain.cluster.cost import DOERS, memory_of, placed_phases, placement_of, unit_texts
from posttrain.cluster.nodes import Node
from posttrain.cluster.workers import ENGINE, LEARNER, PlacedRecipe, Worker, place
from posttrain.errors import InputError
from posttrain.recipe.cost import Phase, total_seconds
from posttrain.recipe.cost_devices import Device
from posttrain.recipe.cost_work import Episodes, Tokens
from posttrain.recipe.memory import ModelSizes
from posttrain.recipe.stages import RlRecipe

WORTH_TELLING = 1.05
"""Times as fast as a change has to make a step."""
KEPT_FREE = 0.1
"""Share of a device's memory that is left for what is not counted: kernels' buffers, communication, fragmentation."""


@dataclass(frozen=True)
class Advice:
    """A change that makes a step faster."""

    overrides: dict[str, Any]
    seconds: float
    """Of a step with it."""
    note: str = ""
    """What it changes besides the time."""

    @property
    def words(self) -> str:
        """As the command line takes it."""
        return " ".join(f"{key}={_word(value)}" for key, value in self.overrides.items())


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def step_seconds(recipe: PlacedRecipe, phases: Sequence[Phase]) -> float:
    """Of a placed step."""
    return total_seconds(phases, placement_of(recipe, True))


def idle_words(phases: Sequence[Phase], workers: Sequence[Worker], devices: int) -> list[str]:
    """A sentence for each phase in which some of the GPUs wait, the longest wait first, with those who have GPUs that the
    phase leaves alone."""
    step = sum(phase.seconds for phase in phases)
    told = []
    for phase in phases:
        waiting = devices - phase.devices
        if waiting < 0.5 or phase.seconds < 0.01 * step:
            continue
        doer = DOERS.get(phase.what)
        # Where nobody has devices of the phase's own, the learners do it.
        busy = doer if doer in {w.role for w in workers} else LEARNER
        at_work = {(w.node, device) for w in workers if w.role == busy for device in w.devices}
        left = [w.role for w in workers if not at_work.issuperset((w.node, device) for device in w.devices)]
        names = ", ".join(dict.fromkeys(left))
        who = f" ({names})" if names and phase.devices else ""
        sentence = f"{_count(waiting)} of {devices} GPUs wait{who} during: {phase.what}, {phase.seconds:.3g} s"
        told.append((waiting * phase.seconds, f"{sentence}, {phase.seconds / step:.0%} of the step"))
    return [sentence for _, sentence in sorted(told, reverse=True)]


def ahead_words(phases: Sequence[Phase], workers: Sequence[Worker], devices: int) -> list[str]:
    """Of a step whose sampling runs beside everything else: the sentence that says which side waits for the other."""
    sampled = sum(phase.seconds for phase in phases if phase.sampling)
    learned = sum(phase.seconds for phase in phases if not phase.sampling)
    waiting, slower = (LEARNER, "sampling") if learned < sampled else (ENGINE, "learning")
    count = len({(w.node, device) for w in workers if w.role == waiting for device in w.devices})
    seconds, step = abs(sampled - learned), max(sampled, learned)
    if seconds < 0.01 * step:
        return []
    return [
        f"{count} of {devices} GPUs ({waiting}) wait {seconds:.3g} s, {seconds / step:.0%} of the step: {slower} takes longer"
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
    """Changes that make a step faster and fit into the memory, the fastest first."""
    now = step_seconds(recipe, placed_phases(recipe, sizes, device, True, episodes, rows))
    found = []
    for overrides, note in _candidates(recipe, sum(node.devices for node in nodes), sizes, device):
        changed = _changed(recipe, overrides)
        if changed is None or not _fits(changed, sizes, device, nodes):
            continue
        seconds = step_seconds(changed, placed_phases(changed, sizes, device, True, episodes, rows))
        if now / seconds >= WORTH_TELLING:
            found.append(Advice(overrides, seconds, note))
    best: dict[str, Advice] = {}
    for advice in sorted(found, key=lambda advice: advice.seconds):
        best.setdefault(advice.note, advice)
    return list(best.values())


def _candidates(
    recipe: PlacedRecipe, devices: int, sizes: ModelSizes, device: Device
) -> Iterator[tuple[dict[str, Any], str]]:
    hardware = recipe.hardware
    offloaded = getattr(hardware, "offload", False)
    if offloaded:
        yield {"hardware.offload": False}, "the optimizer's state is kept on the GPUs"
    if not isinstance(recipe, RlRecipe):
        if hardware.processes < devices:
            yield {"hardware.processes": devices}, ""
        return
    everything: dict[str, Any] = {} if hardware.ray is not None else {"hardware.ray": "auto"}
    everything |= {"hardware.processes": devices, "hardware.engines.colocated": True}
    if hardware.rewards.count:
        everything["hardware.rewards.count"] = 0
    for name in ("critic", "reference"):
        if getattr(hardware.apart, name):
            everything[f"hardware.apart.{name}"] = 0
    if offloaded:
        everything["hardware.offload"] = False
    for size in (1, 2, 4, 8):
        if devices % size == 0:
            chosen = {"hardware.engines.count": devices // size, "hardware.engines.devices": size}
            yield everything | chosen, "everything takes turns on all GPUs"
    if hardware.engines.colocated and hardware.engines.devices > 1:
        engines = {"hardware.engines.count": hardware.processes, "hardware.engines.devices": 1}
        yield engines, "engines of one GPU need not agree twice a layer"
    elif "ahead" in type(recipe.rollout).model_fields and not hardware.engines.colocated:
        yield {"rollout.ahead": 1}, "engines sample while the learners learn, with weights one step old"
    if unit_texts(recipe):
        other = {} if hasattr(recipe.unit_credit, "probe") else {"unit_credit.type": "prefix"}
        yield other | {"unit_credit.probe": "one_pass"}, "the reward after each unit, read in one pass; another credit"
    if recipe.learner.updates_per_step * recipe.learner.passes > 1:
        yield {"learner.updates_per_step": 1, "learner.passes": 1}, "fewer updates: another run, and often a better one"
    if getattr(recipe.engine, "enforce_eager", None):
        yield {"engine.enforce_eager": False}, "a decoding step is one graph and not a start for each kernel"
    slots = getattr(recipe.engine, "slots", 0)
    if slots and "slots" in type(recipe.engine).model_fields:
        yield {"engine.slots": 4 * slots}, "more answers at a time in each engine"


def _changed(recipe: PlacedRecipe, overrides: dict[str, Any]) -> PlacedRecipe | None:
    """The recipe with other values at dotted keys; None where it is no recipe then."""
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
