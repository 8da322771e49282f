"""What each of several processes keeps in memory where they divide a model (FSDP).

Counted as `memory.py` counts, but for three things: shares of trained weights are float32 and are the masters, so there are
no others; whole gradients are kept until they are added up, where the recipe says so; and an engine in the process samples
with whole weights. Not covered: buffers of collectives, about as much again as what is gathered for a moment.
"""

from posttrain.recipe.cost_placement import Placement
from posttrain.recipe.memory import ModelSizes, memory_estimate, trained_parameters, weight_width
from posttrain.recipe.rollout import EngineRecipe
from posttrain.recipe.stages import DpoRecipe, RewardRecipe, RlRecipe, SftRecipe


def process_memory(
    recipe: RlRecipe | SftRecipe | DpoRecipe | RewardRecipe, sizes: ModelSizes
) -> dict[str, tuple[int, str]]:
    """What -> (bytes in one of `hardware.processes` processes, on its device, how it is counted)."""
    hardware, width = recipe.hardware, weight_width(recipe.model)
    count, trained = hardware.processes, trained_parameters(recipe.model, sizes)
    rows = memory_estimate(recipe, sizes, Placement(devices=count, shard=count))
    over = f", over {count} processes"
    for what in ("gradients", "float32 masters and their gradients"):
        rows.pop(what, None)
    frozen = sizes.parameters - trained if recipe.model.lora is None else sizes.parameters
    shares = (width * frozen + 4 * trained, f"float32 shares of what is trained, {width} bytes of what is not{over}")
    rows["weights"] = (-(-shares[0] // count), shares[1])
    rows["gradients"] = (-(-4 * trained // count), f"float32 shares of {trained:,} trained parameters{over}")
    if hardware.offload:
        for what in ("weights", "gradients", "AdamW state"):
            _, how = rows[what]
            rows[what] = (0, f"offloaded: {how}")
    if hardware.reduce == "once" and count > 1:
        rows["whole gradients"] = (
            4 * trained,
            "float32, of an update of several forward passes until its last; `hardware.reduce: each` needs none",
        )
    if not hardware.reshard_after_forward:
        whole = width * sizes.parameters
        rows["gathered for a moment"] = (whole, "all weights whole from the forward to the backward pass")
    elif "gathered for a moment" not in rows:
        layer = width * (3 * sizes.layer + 2 * sizes.head)
        rows["gathered for a moment"] = (
            layer,
            "two layers whole, gradients of one, the output projection with its own",
        )
    plays = not isinstance(recipe, DpoRecipe | RewardRecipe) and recipe.environment is not None
    if plays and isinstance(recipe.engine, EngineRecipe):  # type: ignore[union-attr]
        whole = width * sizes.parameters
        rows["weights whole while sampling"] = (whole, "the engine in the process; none of the activations then")
    return rows
