"""Memory estimate of a run: the sum of what the sections of its recipe declare.

Not covered: the overhead of torch and the operating system (about 0.5 GiB), and fragmentation.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from posttrain.errors import InputError
from posttrain.planning.model_sizes import model_sizes
from posttrain.planning.workers import CRITIC, ENGINE, REFERENCE, REWARD, placement_of, reward_count
from posttrain.recipe.model import IN_CPU_MEMORY
from posttrain.recipe.plan import (
    ACTIVATIONS,
    ALONE,
    BETWEEN,
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


def peak_memory(
    recipe: StageRecipe, sizes: ModelSizes, placement: Placement, device: Device | None = None
) -> tuple[int, int]:
    """Bytes on one learner device of `device` as (while learning, while sampling)."""
    engine = engine_memory(recipe, sizes, placement, device)
    rows = memory_estimate(recipe, sizes, placement, device)
    learning, sampling = at_a_time(recipe, rows, engine, placement)
    if not placement.colocated:
        sampling = {what: count for what, (count, _) in engine.items()}
    return sum(learning.values()), sum(sampling.values())


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
