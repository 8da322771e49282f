"""Whether a run fits into the memory of its GPUs, and the settings that make it fit."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from posttrain.errors import DoesNotFit, InputError
from posttrain.planning.memory import (
    R,
    at_a_time,
    dedicated_memory,
    engine_memory,
    memory_estimate,
    process_memory,
    sizes_at,
    with_dtypes,
)
from posttrain.planning.workers import placed_recipe, placement_of
from posttrain.recipe.model import LoraRecipe
from posttrain.recipe.plan import ACTIVATIONS, CACHE, Device, Items, ModelSizes, Plan
from posttrain.recipe.run import StageRecipe, TrainedRecipe


def fitted(recipe: R, device: Device) -> R:
    """The recipe with its `hardware.gradient_sync` for GPUs like `device`.

    Raises:
        InputError: the tensors of the run, without the rough estimate of activations, are larger than the memory.
    """
    sizes = None if recipe.remote is not None else sizes_at(recipe.model.path)
    if sizes is None:
        return recipe
    counted = with_dtypes(recipe, device)
    if sentences := too_large(counted, sizes, device, leave_out=(ACTIVATIONS,)):
        raise InputError(sentences[0])
    if (trained := divided(counted)) is None:
        return recipe
    chosen = with_gradient_sync(trained, sizes, device).hardware
    return recipe.model_copy(update={"hardware": chosen})


def with_gradient_sync(recipe: TrainedRecipe, sizes: ModelSizes, device: Device | None) -> TrainedRecipe:
    """The recipe with `per_update` or `per_forward` for `auto`: the former unless only the latter fits on `device`."""
    if recipe.hardware.gradient_sync != "auto":
        return recipe

    def having(choice: str) -> TrainedRecipe:
        return recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"gradient_sync": choice})})

    once = having("per_update")
    fits = device is None or sum(at_peak(once, sizes, device)[0].values()) <= device.memory
    return once if fits else having("per_forward")


def divided(recipe: StageRecipe) -> TrainedRecipe | None:
    """The recipe, if its state is divided among processes or offloaded."""
    hardware = getattr(recipe, "hardware", None)
    divides = hardware is not None and (hardware.learners > 1 or hardware.offload == "all")
    return recipe if divides else None  # type: ignore[return-value]


def memory_rows(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> Items:
    if (trained := divided(recipe)) is not None:
        rows = process_memory(with_gradient_sync(trained, sizes, device), sizes, device)
    else:
        rows = memory_estimate(recipe, sizes, placement_of(recipe), device)
    dedicated = dedicated_rows(recipe, sizes, device)
    return {what: row for what, row in rows.items() if what not in dedicated}


def dedicated_rows(recipe: StageRecipe, sizes: ModelSizes, device: Device | None) -> dict[str, int]:
    """Role -> bytes on one GPU, of the workers whose GPUs are not those of the learners."""
    hardware = getattr(recipe, "hardware", None)
    if hardware is None or hardware.ray is None:
        return {}
    return dedicated_memory(placed_recipe(recipe), sizes, device)


def at_peak(
    recipe: StageRecipe, sizes: ModelSizes, device: Device | None, leave_out: Collection[str] = ()
) -> tuple[Mapping[str, int], str]:
    """The items that are on the device at the same time when they need the most memory, and when that is. A CPU keeps the
    cache of the engine and the memory of activations. `leave_out`: items not to count."""
    rows, placement = memory_rows(recipe, sizes, device), placement_of(recipe)
    rows = {what: row for what, row in rows.items() if what not in leave_out}
    engine = engine_memory(recipe, sizes, placement, device)
    if device is None or not engine:
        return {what: count for what, (count, _) in rows.items()}, ""
    learning, sampling = at_a_time(recipe, rows, engine, placement)
    if learning == sampling:
        return learning, ""
    both = ((learning, "while learning"), (sampling, "while sampling"))
    return max(both, key=lambda moment: sum(moment[0].values()))


def require_memory(recipe: StageRecipe, sizes: ModelSizes, memory: int) -> list[str]:
    """DoesNotFit if the run needs more than `memory` bytes on the processors of this machine, in all its processes.

    The key/value cache and the memory of activations, whose estimates are upper limits there, are left out. Returns a
    sentence if the run may need more with them.
    """
    hardware = getattr(recipe, "hardware", None)
    count = 1 if hardware is None or hardware.ray is not None else hardware.learners
    items = at_peak(recipe, sizes, None)[0]
    needed = count * sum(number for what, number in items.items() if what not in (ACTIVATIONS, CACHE))
    has = f"this machine has {shown_bytes(memory)}"
    if needed > memory:
        needs = f"it needs {shown_bytes(needed)} besides activations and the key/value cache"
        raise DoesNotFit(f"the run does not fit: {needs}, and {has}; `--full` lists the parts")
    if (most := count * sum(items.values())) > memory:
        return [f"warning: the run may need up to {shown_bytes(most)}, and {has}; `--full` lists the parts"]
    return []


def too_large(
    recipe: StageRecipe, sizes: ModelSizes | None, device: Device | None, leave_out: Collection[str] = ()
) -> list[str]:
    """A sentence if the run needs more memory than the device has, or its engine more than its share; otherwise empty.
    `leave_out`: items not to count."""
    if recipe.remote is not None or sizes is None or device is None:
        return []
    known, gpu = sizes, device

    def needed(changed: StageRecipe) -> int:
        """Bytes on the GPU that needs the most."""
        dedicated = dedicated_rows(changed, known, gpu).values()
        return max(sum(at_peak(changed, known, gpu, leave_out)[0].values()), *dedicated, 0)

    if (total := needed(recipe)) <= device.memory:
        return [*filter(None, [recipe.engine_refusal(Plan(known, placement_of(recipe), gpu))])]
    remedy = "no setting makes it fit; divide it (hardware.processes)"
    for keys in _smaller(recipe, known.heads):
        changes: dict[str, Any] = {}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            changes[section] = changes.get(section, getattr(recipe, section)).model_copy(update={name: value})
        if needed(recipe.model_copy(update=changes)) <= device.memory:
            lora = {f"{key}.rank": one.rank for key, one in keys.items() if isinstance(one, LoraRecipe)}
            plain = {key: one for key, one in keys.items() if not isinstance(one, LoraRecipe)}
            remedy = f"it fits with {' '.join(f'{key}={str(one).lower()}' for key, one in (plain | lora).items())}"
            break
    has = f"{device.name} has {shown_bytes(int(device.memory))}"
    return [f"the run needs an estimated {shown_bytes(total)} and {has}; {remedy}"]


def _smaller(recipe: StageRecipe, heads: int) -> Iterator[dict[str, Any]]:
    """Values of keys that save memory, cheapest first. `heads`: attention heads of the model."""
    if not isinstance(recipe, TrainedRecipe):
        return
    if recipe.hardware.learners > 1 and recipe.hardware.gradient_sync == "per_update":
        yield {"hardware.gradient_sync": "per_forward"}
    checkpointed, eight = {"model.gradient_checkpointing": True}, {"optimizer.type": "adamw_8bit"}
    yield from ({"model.gradient_checkpointing": "selective"}, checkpointed)
    for count in range(recipe.hardware.sequence_parallel + 1, recipe.hardware.learners + 1):
        if recipe.hardware.learners % count == 0 and heads % count == 0:
            yield checkpointed | {"hardware.sequence_parallel": count}
    if recipe.hardware.offload == "none":
        yield from (eight, checkpointed | eight)
        if recipe.on_policy and recipe.optimizer.type == "adamw" and not recipe.ahead:
            yield {"hardware.offload": "rollouts"}
    yield from (checkpointed | {"hardware.offload": name} for name in ("optimizer", "all"))
    yield checkpointed | {"model.lora": recipe.model.lora or LoraRecipe()}


def shown_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
