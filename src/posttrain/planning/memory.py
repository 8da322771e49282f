"""Memory estimate of a run: the sum of what the sections of its recipe declare; whether it fits, and the settings that make it fit.

Not covered: the overhead of torch and the operating system (about 0.5 GiB), and fragmentation.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from posttrain.errors import DoesNotFit, InputError
from posttrain.planning.model_sizes import model_sizes
from posttrain.planning.workers import CRITIC, ENGINE, REFERENCE, REWARD, placed_recipe, placement_of, reward_count
from posttrain.recipe.model import IN_CPU_MEMORY, LoraRecipe
from posttrain.recipe.plan import (
    ACTIVATIONS,
    ALONE,
    BETWEEN,
    CACHE,
    MASTERS,
    PASSING,
    Device,
    Items,
    ModelSizes,
    Placement,
    Plan,
)
from posttrain.recipe.run import StageRecipe, TrainedRecipe

R = TypeVar("R", bound=StageRecipe)
_UNSHARDED = "unsharded weights while sampling"


def with_dtypes(recipe: R, device: Device | None) -> R:
    """The recipe with the precision that each of its models has on `device`. For an unknown device (None), it is
    unchanged."""
    if device is None:
        return recipe
    open_models = {name: section for name, section in recipe.models().items() if section.dtype in (None, "auto")}
    halves = {name: section.model_copy(update={"dtype": "bfloat16"}) for name, section in open_models.items()}
    return recipe.model_copy(update=halves)


def sizes_at(path: str) -> ModelSizes | None:
    """Sizes of the model at `path`; None if it is not on this machine, such as the model of a later stage."""
    try:
        return model_sizes(path)
    except InputError:
        return None


def memory_estimate(
    recipe: StageRecipe, sizes: ModelSizes, placement: Placement = ALONE, device: Device | None = None
) -> Items:
    """Item -> (bytes on one learner device, how they are counted).

    Activations are a rough estimate. The other items are sums of tensor sizes. Separate engines are not included; see
    `engine_memory`. A `dtype` that depends on the device counts as float32, the larger of its two possible values; see
    `with_dtypes`.
    """
    plan = Plan(sizes, placement, device, sizes_at)
    # Without Ray, vLLM servers may start on GPUs after those of the learner.
    further = not placement.engines and getattr(recipe.sampler, "first_device", 0) >= placement.devices
    here = placement.colocated and not further
    return recipe.memory_items(plan) | (recipe.engine_items(plan) if here else {})


def engine_memory(
    recipe: StageRecipe, sizes: ModelSizes, placement: Placement = ALONE, device: Device | None = None
) -> Items:
    """Item -> (bytes on one engine device, how they are counted): the engine's own weights, if any, and a full KV cache."""
    return recipe.engine_items(Plan(sizes, placement, device, sizes_at))


def at_a_time(
    recipe: StageRecipe, rows: Items, engine: Mapping[str, Any], placement: Placement
) -> tuple[dict[str, int], dict[str, int]]:
    """The items of `rows` on a GPU as (while learning, while sampling), in bytes.

    An engine in `rows` frees its weights and cache while the learner runs, and activations and gradients are freed before
    sampling. With `hardware.offload: rollouts` the optimizer's state then leaves as well, but sharded masters stay: they are
    the weights. Asynchronous rollouts in the learner's process run at the same time as learning.
    """
    counts = {what: count for what, (count, _) in rows.items()}
    if recipe.ahead and not placement.engines:
        return counts, counts
    freed = set(PASSING)
    if recipe.on_policy and recipe.hardware.offload == "rollouts":  # type: ignore[attr-defined]
        freed |= {"AdamW state"} if placement.shard > 1 else {MASTERS, "AdamW state"}
    learning = {what: count for what, count in counts.items() if what not in engine and what != _UNSHARDED}
    sampling = {what: count for what, count in counts.items() if what not in freed}
    if MASTERS in sampling:
        sampling[MASTERS] //= 3  # their gradients are freed
    return learning, sampling


def process_memory(recipe: TrainedRecipe, sizes: ModelSizes, device: Device | None = None) -> Items:
    """Item -> (bytes on the device of one of `hardware.processes` processes, how they are counted)."""
    hardware, width, placement = recipe.hardware, recipe.model.weight_bytes, placement_of(recipe)
    count, trained = placement.shard, recipe.model.trained_parameters(sizes, recipe.scores)
    parameters = sizes.scorer_parameters if recipe.scores else sizes.parameters
    rows = memory_estimate(recipe, sizes, placement, device)
    over = f", over {count} processes"
    for what in ("gradients", MASTERS):
        rows.pop(what, None)
    held = 4 * trained + (0 if recipe.model.lora is None else width * parameters)
    how = f"float32 shards of trained parameters, {width} bytes per frozen parameter{over}"
    rows["weights"] = (-(-held // count), how)
    rows["gradients"] = (-(-4 * trained // count), f"float32 shards of {trained:,} trained parameters{over}")
    if hardware.offload == "optimizer":
        rows["AdamW state"] = (0, IN_CPU_MEMORY)
    if hardware.offload == "all":
        state = recipe.state_items(Plan(sizes, placement, device, sizes_at))
        rows |= {what: (0, f"offloaded: {how}") for what, (_, how) in rows.items() if what in state}
    if not hardware.reduces_per_forward and hardware.learners > 1:
        how = "float32, accumulated over an update; not needed with `hardware.gradient_sync: per_forward`"
        rows["whole gradients"] = (4 * trained, how)
    elif hardware.replicas > 1:
        # FSDP keeps the buffers of a pass's reductions between replicas to its end, when its activations are free.
        free = sum(rows.get(what, (0, ""))[0] for what in (ACTIVATIONS, "logits"))
        how = "float32, of one pass, reduced between replicas; more than the activations that are free by then"
        rows[BETWEEN] = (max(0, rows["gradients"][0] - free), how)
    if not placement.engines and getattr(recipe.sampler, "type", None) == "local":
        rows[_UNSHARDED] = (width * sizes.parameters, "for the engine in this process; activations are freed")
    return rows


def dedicated_memory(recipe: TrainedRecipe, sizes: ModelSizes, device: Device | None = None) -> dict[str, int]:
    """Role -> bytes on one GPU of each kind of worker of a Ray cluster that has GPUs besides those of the learners."""
    placement, dedicated = placement_of(recipe), recipe.hardware.dedicated
    whole = {what: count for what, (count, _) in memory_estimate(recipe, sizes).items()}
    roles = {}
    if placement.engines and not placement.colocated:
        roles[ENGINE] = sum(count for count, _ in engine_memory(recipe, sizes, placement, device).values())
    if reward_count(recipe):
        roles[REWARD] = whole["reward model"]
    if dedicated.critic:
        roles[CRITIC] = whole.get("critic", 0) // dedicated.critic + whole["activations, roughly"]
    if dedicated.reference:
        roles[REFERENCE] = recipe.model.weight_bytes * sizes.parameters
    return roles


# -- whether it fits --------------------------------------------------------------------------------------------------


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
