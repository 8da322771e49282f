"""Memory estimate of a run, from the model sizes and the recipe.

Not covered: the overhead of torch and the operating system (about 0.5 GiB), and fragmentation.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from posttrain.errors import InputError
from posttrain.planning.devices import Device
from posttrain.planning.model_sizes import ModelSizes, model_sizes
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.workers import CRITIC, ENGINE, REFERENCE, REWARD, PlacedRecipe, placement_of, reward_count
from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.stages import (
    DistillRecipe,
    DpoRecipe,
    EvaluateRecipe,
    GenerateRecipe,
    Recipe,
    RewardRecipe,
    RlRecipe,
    SftRecipe,
)
from posttrain.recipe.units import EntropyUnits

R = TypeVar("R", bound=Recipe)

_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the matrices in the order of `ModelSizes.linear_sizes`."""


_FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight of a 4-bit matrix: the number, a byte of scale for 64 of them, and 4 bytes for 256 scales."""


def with_dtypes(recipe: R, device: Device | None) -> R:
    """The recipe with the precision that each of its models has on `device`. For an unknown device (None), it is
    unchanged.
    """
    if device is None:
        return recipe

    def chosen(section: Any) -> Any:
        if getattr(section, "dtype", "float32") not in (None, "auto"):
            return section
        return section.model_copy(update={"dtype": "bfloat16"})

    sections = [name for name in ("model", "reward", "critic", "teacher") if hasattr(recipe, name)]
    copy: Any = recipe.model_copy(update={name: chosen(getattr(recipe, name)) for name in sections})
    return copy


def memory_estimate(
    recipe: Recipe, sizes: ModelSizes, placement: Placement = ALONE, device: Device | None = None
) -> dict[str, tuple[int, str]]:
    """Item -> (bytes on one learner device, how they are counted).

    Activations are a rough estimate. The other items are sums of tensor sizes. Separate engines are not included; see
    `engine_memory`. A `dtype` that depends on the device counts as float32, the larger of its two possible values; see
    `with_dtypes`.
    """
    width = weight_width(recipe.model)
    count = sizes.scorer_parameters if isinstance(recipe, RewardRecipe) else sizes.parameters
    rows = {"weights": (width * count, f"{count:,} parameters of {width} bytes")}
    if recipe.model.load_in_4bit:
        packed = sizes.layers * sum(inputs * outputs for inputs, outputs in sizes.linear_sizes)
        size = round(_FOUR_BITS * packed) + width * (count - packed)
        rows["weights"] = (size, f"{packed:,} parameters of 4 bits, {count - packed:,} of {width} bytes")
    if not isinstance(recipe, EvaluateRecipe | GenerateRecipe):
        rows |= _training(recipe, sizes, width, placement)
    rows = _divided(rows, sizes, placement, width)
    if isinstance(recipe, RlRecipe) and recipe.rollout.async_rollouts:
        rows |= _ahead(recipe, sizes, width, placement)
    if placement.colocated and not _on_further_gpus(recipe, placement):
        rows |= engine_memory(recipe, sizes, placement, device)
    return rows


def _on_further_gpus(recipe: Recipe, placement: Placement) -> bool:
    """Whether the vLLM servers of a run without Ray start on GPUs after those of the learner."""
    engine = getattr(recipe, "engine", None)
    return not placement.engines and isinstance(engine, VllmEngineRecipe) and engine.first_device >= placement.devices


def engine_memory(
    recipe: Recipe, sizes: ModelSizes, placement: Placement = ALONE, device: Device | None = None
) -> dict[str, tuple[int, str]]:
    """Item -> (bytes on one engine device, how they are counted): the engine's own weights, if any, and a full KV cache.

    vLLM takes its share of the memory of `device` for both, and answers that do not fit are queued. Servers at
    `engine.urls` count as 0.
    """
    if isinstance(recipe, DpoRecipe | RewardRecipe):
        return {}
    if not isinstance(recipe, GenerateRecipe) and recipe.environment is None:
        return {}
    assert isinstance(recipe.engine, LocalEngineRecipe | VllmEngineRecipe), "a remote model needs no local memory"
    if getattr(recipe.engine, "urls", None):
        return {}
    width = weight_width(recipe.model)
    rows = {}
    if placement.engines or isinstance(recipe.engine, VllmEngineRecipe):
        count = -(-width * sizes.parameters // placement.tensor)
        rows["weights of the engine"] = (count, f"{width} bytes a parameter over {placement.tensor} devices")
    slots, tokens = recipe.engine.slots, recipe.rollout.tokens_per_episode
    cache = cache_bytes(sizes, width, placement.tensor)
    if isinstance(recipe.engine, VllmEngineRecipe) and recipe.engine.cache_gigabytes is not None:
        size = int(recipe.engine.cache_gigabytes * 2**30)
        return rows | {"key/value cache": (size, f"engine.cache_gigabytes {recipe.engine.cache_gigabytes:g}")}
    if isinstance(recipe.engine, VllmEngineRecipe) and device is not None:
        share = recipe.engine.gpu_memory_utilization
        size = max(0, round(share * device.memory) - rows["weights of the engine"][0])
        how = f"engine.gpu_memory_utilization {share:g} of {device.name}, less the weights of the engine"
        return rows | {"key/value cache": (size, how)}
    how = f"engine.slots {slots} x rollout.tokens_per_episode {tokens} x {cache:,} bytes"
    if isinstance(recipe.engine, VllmEngineRecipe):
        how = (
            how.replace("engine.slots", "answers in flight")
            + "; less where engine.gpu_memory_utilization, or 2 GiB, is less"
        )
    limit = getattr(recipe.engine, "cache_bytes", None)
    if limit is not None and limit < slots * tokens * cache:
        return rows | {"key/value cache, at most": (limit, f"engine.cache_bytes {limit:,}")}
    rows["key/value cache, at most"] = (slots * tokens * cache, how)
    return rows


def peak_memory(
    recipe: Recipe, sizes: ModelSizes, placement: Placement, device: Device | None = None
) -> tuple[int, int]:
    """Bytes on one learner device of `device` as (while learning, while sampling)."""
    engine = engine_memory(recipe, sizes, placement, device)
    rows = memory_estimate(recipe, sizes, placement, device)
    learning, sampling = at_a_time(recipe, rows, engine, placement)
    if not placement.colocated:
        sampling = {what: count for what, (count, _) in engine.items()}
    return sum(learning.values()), sum(sampling.values())


def at_a_time(
    recipe: Recipe, rows: Mapping[str, tuple[int, str]], engine: Mapping[str, Any], placement: Placement
) -> tuple[dict[str, int], dict[str, int]]:
    """The items of `rows` on a GPU as (while learning, while sampling), in bytes.

    An engine in `rows` frees its weights and cache while the learner runs, and activations and gradients are freed before
    sampling. With `hardware.offload: rollouts` the optimizer's state then leaves as well, but sharded masters stay: they are
    the weights. Asynchronous rollouts in the learner's process run at the same time as learning.
    """
    counts = {what: count for what, (count, _) in rows.items()}
    if isinstance(recipe, RlRecipe) and recipe.rollout.async_rollouts and not placement.engines:
        return counts, counts
    freed = set(_PASSING)
    if isinstance(recipe, RlRecipe | DistillRecipe) and recipe.hardware.offload == "rollouts":
        freed |= {"AdamW state"} if placement.shard > 1 else set(_OFFLOADED)
    learning = {what: count for what, count in counts.items() if what not in engine and what != _UNSHARDED}
    sampling = {what: count for what, count in counts.items() if what not in freed}
    if _MASTERS in sampling:
        sampling[_MASTERS] //= 2
    return learning, sampling


def weight_width(model: ModelRecipe) -> int:
    """Bytes per weight."""
    return 2 if model.dtype == "bfloat16" or model.load_in_4bit else 4


def cache_bytes(sizes: ModelSizes, width: int, tensor: int = 1) -> int:
    """Bytes of KV cache per token on one of `tensor` devices, at `width` bytes per number. Heads are not split."""
    heads = -(-sizes.key_value_heads // tensor)
    return 2 * sizes.layers * heads * sizes.head_size * width


_MASTERS = "float32 masters and their gradients"
_DIVIDED = (
    "weights",
    "gradients",
    _MASTERS,
    "AdamW state",
    "reference model",
    "reward model",
    "critic",
    "teacher",
    "language model for entropies",
)
"""Items that sharding divides. Activations and logits depend on the number of tokens on each device."""
_OFFLOADED = (_MASTERS, "AdamW state")
_PASSING = ("activations, roughly", "logits", "gathered temporarily", "gradients", "whole gradients")
"""Items that exist from the first pass of an update to its optimizer step."""
_UNSHARDED = "unsharded weights while sampling"


def _divided(
    rows: dict[str, tuple[int, str]], sizes: ModelSizes, placement: Placement, width: int
) -> dict[str, tuple[int, str]]:
    """The items on one learner device, after sharding."""
    if placement.shard == 1:
        return rows
    over = f", over {placement.shard} devices"
    shared = {
        what: (-(-count // placement.shard), how + over) if what in _DIVIDED else (count, how)
        for what, (count, how) in rows.items()
    }
    layer = sizes.shared_layer + sizes.experts * sizes.expert // placement.expert_parallel
    gathered = width * (3 * layer + 2 * sizes.head)
    how = "two unsharded layers, gradients of one, the output projection with its gradients"
    return {**shared, "gathered temporarily": (gathered, how)}


def _training(recipe: Recipe, sizes: ModelSizes, width: int, placement: Placement) -> dict[str, tuple[int, str]]:
    assert not isinstance(recipe, EvaluateRecipe | GenerateRecipe)
    trained = trained_parameters(recipe.model, sizes, scorer=isinstance(recipe, RewardRecipe))
    rows = {"gradients": (width * trained, f"{trained:,} trained parameters of {width} bytes")}
    if width == 2:
        rows[_MASTERS] = (8 * trained, "trained parameters x 8 bytes")
    offloads = recipe.hardware.offload == "optimizer"
    if offloads:
        rows[_MASTERS] = (0, "in CPU memory (hardware.offload)")
        rows["AdamW state"] = (0, "in CPU memory (hardware.offload)")
    elif recipe.optimizer.type == "adamw_8bit":
        rows["AdamW state"] = (_eight_bit(trained), "two 8-bit numbers for each trained parameter, and a scale for 256")
    else:
        rows["AdamW state"] = (8 * trained, "two float32 numbers for each trained parameter")
    of_pairs = isinstance(recipe, DpoRecipe) and recipe.keeps_reference
    if of_pairs or (isinstance(recipe, RlRecipe) and recipe.needs_reference):
        assert isinstance(recipe, DpoRecipe | RlRecipe)
        if recipe.model.lora is None:
            rows["reference model"] = _reference(recipe, sizes, width, trained)
            # Sharded models are moved by FSDP alone, with `all`; see `process_memory`.
            if recipe.hardware.offload in ("optimizer", "rollouts") and placement.shard == 1:
                rows["reference model"] = (0, "in CPU memory, and on the device when there are no gradients")
        else:
            rows["reference model"] = (0, "the policy with adapters disabled")
    if (
        isinstance(recipe, RewardRecipe)
        and recipe.units is not None
        and isinstance(recipe.units.segmenter, EntropyUnits)
    ):
        rows["language model for entropies"] = (
            width * sizes.parameters,
            "the model at model.path, used to segment answers",
        )
    if isinstance(recipe, RlRecipe) and recipe.reward is not None:
        size = (2 if recipe.reward.dtype == "bfloat16" else 4) * sizes.scorer_parameters
        rows["reward model"] = (size, "assuming the size of the policy")
    if isinstance(recipe, DistillRecipe) or (isinstance(recipe, RlRecipe) and recipe.teacher is not None):
        rows |= _teacher(recipe, sizes, width)
    if isinstance(recipe, RlRecipe) and recipe.has_critic:
        rows["critic"] = _critic(recipe, sizes)
    tokens, chunk = recipe.learner.tokens_per_batch, recipe.learner.logits_per_chunk
    if isinstance(recipe, RlRecipe) and recipe.has_critic and recipe.critic.backbone == "separate":
        # Activations of policy and critic do not exist at the same time.
        width = max(width, _critic_width(recipe))
    if recipe.model.gradient_checkpointing:
        per_token = width * (sizes.layers * sizes.hidden + kept_activations(sizes))
        how = "all of one layer, inputs of the others"
    else:
        per_token, how = width * sizes.layers * kept_activations(sizes), "every layer"
    rows["activations, roughly"] = (tokens * per_token, f"learner.tokens_per_batch {tokens}, {how}")
    if isinstance(recipe, RewardRecipe):
        return rows
    # A divergence over the vocabulary also keeps the log-probabilities, their exponentials and the gradients of both.
    each = 24 if isinstance(recipe, DistillRecipe) and recipe.loss.type == "jsd" else 12
    rows["logits"] = (
        each * chunk * sizes.vocabulary,
        f"learner.logits_per_chunk {chunk} x {sizes.vocabulary:,} x {each} bytes",
    )
    return rows


def _eight_bit(trained: int) -> int:
    """Bytes of the state of 8-bit AdamW: two numbers of a byte, and for every 256 of them a float32 scale."""
    return 2 * trained + 8 * trained // 256


def _reference(recipe: DpoRecipe | RlRecipe, sizes: ModelSizes, width: int, trained: int) -> tuple[int, str]:
    settings = recipe.kl.reference if isinstance(recipe, RlRecipe) else recipe.reference
    if not recipe.moves_reference:
        return width * sizes.parameters, "a copy of the initial model"
    if width == 2 and settings.mix < 1:
        return width * sizes.parameters + 4 * trained, "a copy of the model, and its moving average in float32"
    return width * sizes.parameters, "a copy of the model, updated during training"


def _teacher(recipe: RlRecipe | DistillRecipe, sizes: ModelSizes, width: int) -> dict[str, tuple[int, str]]:
    """The teacher's weights, and its scores of the tokens of a step."""
    teacher = recipe.teacher
    assert teacher is not None
    if teacher.path is not None:
        parameter_bytes = 2 if teacher.dtype == "bfloat16" else 4
        known = teacher_sizes(teacher.path)
        count = (known or sizes).parameters
        how = f"{count:,} parameters of {parameter_bytes} bytes" if known else "assuming the size of the policy"
        rows = {"teacher": (parameter_bytes * count, how)}
    elif teacher.policy == "initial" and recipe.model.lora is None:
        rows = {"teacher": (width * sizes.parameters, "a copy of the initial model")}
    else:
        where = "on its servers" if teacher.urls else "the policy itself"
        rows = {"teacher": (0, where)}
    if isinstance(recipe, DistillRecipe) and recipe.loss.type == "jsd":
        rollout = recipe.rollout
        answer = min(recipe.environment.max_turns * rollout.tokens_per_turn, rollout.tokens_per_episode)
        tokens = rollout.groups_per_step * rollout.episodes_per_group * answer
        size, what = (
            (8 * recipe.loss.top_k, f"loss.top_k {recipe.loss.top_k} x 8")
            if recipe.loss.top_k
            else (
                4 * sizes.vocabulary,
                f"{sizes.vocabulary:,} x 4",
            )
        )
        rows["teacher's distributions, at most"] = (
            tokens * size,
            f"{tokens:,} sampled tokens of a step x {what} bytes",
        )
    return rows


def teacher_sizes(path: str) -> ModelSizes | None:
    """Sizes of the teacher at `teacher.path`; None if it is not on this machine, such as the model of a later stage."""
    try:
        return model_sizes(path)
    except InputError:
        return None


def _ahead(recipe: RlRecipe, sizes: ModelSizes, width: int, placement: Placement) -> dict[str, tuple[int, str]]:
    """Memory of asynchronous rollouts in the first process: copies of the trained weights (in use and pending), and the KV
    cache of the separate engine."""
    rollout = recipe.rollout
    copies = 2 + (rollout.async_rollouts if rollout.on_new_weights == "finish" else 0)
    trained = trained_parameters(recipe.model, sizes)
    how = f"{copies} copies of the trained weights: in use and pending"
    count = copies * width * trained
    if placement.shard > 1 and recipe.model.lora is not None:
        count, how = count + width * sizes.parameters, f"{how}; frozen weights unsharded"
    rows = {"weights of asynchronous rollouts": (count, how)}
    if isinstance(recipe.engine, LocalEngineRecipe) and placement.colocated and not placement.engines:
        cache = engine_memory(recipe, sizes, placement)["key/value cache, at most"][0]
        rows["key/value cache of asynchronous rollouts, at most"] = (
            cache,
            "as large as the evaluation cache, in addition to it",
        )
    return rows


def _critic(recipe: RlRecipe, sizes: ModelSizes) -> tuple[int, str]:
    """Bytes of the critic without activations, and how they are counted."""
    if recipe.critic.backbone == "shared":
        return 16 * sizes.hidden, f"a head of {sizes.hidden:,} float32 weights, with gradients and AdamW state"
    width = _critic_width(recipe)
    trained = trained_parameters(recipe.critic.model(recipe.model), sizes, scorer=True)
    if recipe.hardware.offload == "optimizer":
        count = width * (sizes.scorer_parameters + trained)
        return count, "weights and gradients, assuming the size of the policy; the rest is in CPU memory"
    count = width * sizes.scorer_parameters + (width + 8 + (8 if width == 2 else 0)) * trained
    return count, "weights, gradients and AdamW state, assuming the size of the policy"


def _critic_width(recipe: RlRecipe) -> int:
    return 2 if recipe.critic.dtype == "bfloat16" else 4


def trained_parameters(model: ModelRecipe, sizes: ModelSizes, scorer: bool = False) -> int:
    """Number of trainable parameters: all, or those of the adapters. `scorer`: of a reward model or critic."""
    if model.lora is None:
        return sizes.scorer_parameters if scorer else sizes.parameters
    wanted = model.lora.targets
    adapted = [
        inputs + outputs
        for name, (inputs, outputs) in zip(_MATRICES, sizes.linear_sizes, strict=False)
        if wanted == "all-linear" or name in ([wanted] if isinstance(wanted, str) else wanted)
    ]
    # Of each expert, gate and up are one matrix with adapters of twice the rank.
    experts = sizes.experts * (3 * sizes.hidden + 5 * sizes.intermediate) if wanted == "all-linear" else 0
    return sizes.layers * model.lora.rank * (sum(adapted) + experts)


def kept_activations(sizes: ModelSizes) -> int:
    """Numbers kept per token for the backward pass of one layer, in the model's dtype: the inputs of both norms and of the
    matrices after them, queries, keys, values and outputs of attention, gate, its factor and their product.

    With experts, only the active experts of a token count, plus one copy of the token for each. Statistics of norms and
    softmax are left out. `tests/cuda_fake` compares this with what an update keeps.
    """
    queries, keys = sizes.heads * sizes.head_size, sizes.key_value_heads * sizes.head_size
    networks, copies = (sizes.experts_per_token, 2 * sizes.experts_per_token) if sizes.experts else (1, 0)
    normalized = queries + keys if sizes.head_norms else 0
    return (4 + copies) * sizes.hidden + 2 * (queries + keys) + normalized + 3 * networks * sizes.intermediate


def process_memory(
    recipe: RlRecipe | DistillRecipe | SftRecipe | DpoRecipe | RewardRecipe,
    sizes: ModelSizes,
    device: Device | None = None,
) -> dict[str, tuple[int, str]]:
    """Item -> (bytes on the device of one of `hardware.processes` processes, how they are counted)."""
    hardware, width = recipe.hardware, weight_width(recipe.model)
    scorer = isinstance(recipe, RewardRecipe)
    count, trained = hardware.processes, trained_parameters(recipe.model, sizes, scorer)
    parameters = sizes.scorer_parameters if scorer else sizes.parameters
    placement = placement_of(recipe)
    rows = memory_estimate(recipe, sizes, placement, device)
    over = f", over {count} processes"
    for what in ("gradients", _MASTERS):
        rows.pop(what, None)
    frozen = 0 if recipe.model.lora is None else parameters
    shares = (
        width * frozen + 4 * trained,
        f"float32 shards of trained parameters, {width} bytes per frozen parameter{over}",
    )
    rows["weights"] = (-(-shares[0] // count), shares[1])
    rows["gradients"] = (-(-4 * trained // count), f"float32 shards of {trained:,} trained parameters{over}")
    if hardware.offload == "optimizer":
        rows["AdamW state"] = (0, "in CPU memory (hardware.offload)")
    if hardware.offload == "all":
        for what in [what for what in _DIVIDED if what in rows]:
            _, how = rows[what]
            rows[what] = (0, f"offloaded: {how}")
    if not hardware.reduces_per_forward and count > 1:
        rows["whole gradients"] = (
            4 * trained,
            "float32, accumulated over the forward passes of an update; not needed with `hardware.gradient_sync: per_forward`",
        )
    if not hardware.reshard_after_forward:
        whole = width * parameters
        rows["gathered temporarily"] = (whole, "all weights, from the forward to the backward pass")
    elif "gathered temporarily" not in rows:
        layer = width * (3 * sizes.layer + 2 * sizes.head)
        rows["gathered temporarily"] = (
            layer,
            "two unsharded layers, gradients of one, the output projection with its gradients",
        )
    plays = not isinstance(recipe, DpoRecipe | RewardRecipe) and recipe.environment is not None
    if plays and not placement.engines and isinstance(recipe.engine, LocalEngineRecipe):  # type: ignore[union-attr]
        whole = width * sizes.parameters
        rows[_UNSHARDED] = (whole, "for the engine in this process; activations are freed")
    return rows


def dedicated_memory(recipe: PlacedRecipe, sizes: ModelSizes, device: Device | None = None) -> dict[str, int]:
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
        roles[REFERENCE] = weight_width(recipe.model) * sizes.parameters
    return roles
