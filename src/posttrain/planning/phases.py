"""Estimated time of a step, per phase, with the devices that are busy in each.

Unknown lengths are taken at their limits: episodes and rows have their maximum length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.planning.devices import GPU_LAUNCH_EAGER, GPU_LAUNCH_LOCAL, Device
from posttrain.planning.memory import ModelSizes, teacher_sizes, trained_parameters
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.times import (
    decoding_seconds,
    forward_seconds,
    optimizer_seconds,
    prefill_seconds,
    steady_seconds,
    training_seconds,
    transfer_seconds,
)
from posttrain.planning.work import Episodes, Tokens, rows_of
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.credit import TokenBaselineCredit
from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe, WeightTransfer
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.stages import (
    DistillRecipe,
    DpoRecipe,
    EvaluateRecipe,
    GenerateRecipe,
    HarnessRecipe,
    Recipe,
    RewardRecipe,
    RlRecipe,
    SftRecipe,
)
from posttrain.recipe.teacher import TeacherRecipe


@dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    what: str
    seconds: float
    devices: float
    """Mean number of busy devices."""
    how: str = ""
    """How the time was counted."""
    sampling: bool = False
    """Whether the phase runs on engines and can run ahead of learning."""
    tokens: float = 0.0
    """Tokens processed. 0 if the phase does not process tokens."""


def step_phases(
    recipe: Recipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement = ALONE,
    episodes: Episodes | None = None,
    rows: Tokens | None = None,
    reward: ModelSizes | None = None,
) -> list[Phase]:
    """The phases of one step, in order. For stages that train on rows, a step is one optimizer step.

    Args:
        episodes: Episodes of an RL step. Default: episodes of maximum length.
        rows: Tokens of an optimizer step on rows. Default: rows of maximum length.
        reward: Sizes of the reward model. Default: those of the policy.

    The `evaluate` stage counts as one step. `generate` and `harness` have no phases, because the number of rows is
    unknown until they are read.
    """
    if isinstance(recipe, RlRecipe):
        return _rl(recipe, sizes, device, placement, episodes or episodes_at_most(recipe), reward or sizes)
    if isinstance(recipe, DistillRecipe):
        return _distill(recipe, sizes, device, placement, episodes or episodes_at_most(recipe))
    if isinstance(recipe, EvaluateRecipe):
        return evaluation_phases(recipe, sizes, device, placement)
    if isinstance(recipe, GenerateRecipe | HarnessRecipe):
        return []
    return _rows(recipe, sizes, device, placement, rows or rows_at_most(recipe))


def evaluation_phases(
    recipe: RlRecipe | DistillRecipe | SftRecipe | EvaluateRecipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement = ALONE,
) -> list[Phase]:
    """Phases of one evaluation on held-out seeds, with episodes of maximum length. Empty without an environment."""
    if evaluated_environment(recipe) is None or recipe.remote is not None:
        return []
    sent = _weights(recipe.engine, recipe.model, sizes, device, placement)
    return sent + _sampling(recipe.engine, recipe.model, sizes, device, placement, evaluated_at_most(recipe))


def plain(sizes: ModelSizes) -> bool:
    """Whether the parameter count follows from the sizes, within 10%. Other architectures cannot be estimated."""
    counts = [replace(sizes, tied=tied).computed_parameters for tied in (True, False)]
    return any(abs(count / sizes.parameters - 1) < 0.1 for count in counts)


def total_seconds(phases: Sequence[Phase], placement: Placement = ALONE) -> float:
    """Seconds of a step. Phases are sequential; with `async_rollouts`, sampling overlaps with the other phases."""
    sampled = sum(phase.seconds for phase in phases if phase.sampling)
    rest = sum(phase.seconds for phase in phases if not phase.sampling)
    return max(sampled, rest) if placement.async_rollouts else sampled + rest


def idle_share(phases: Sequence[Phase], placement: Placement = ALONE) -> float:
    """Fraction of device time in a step that is idle."""
    busy = sum(phase.seconds * phase.devices for phase in phases)
    return max(0.0, 1 - busy / (placement.all_devices * total_seconds(phases, placement)))


def episodes_at_most(recipe: RlRecipe | DistillRecipe) -> Episodes:
    """Episodes of a step at their maximum length, `rollout.tokens_per_episode`."""
    return _episodes(recipe, recipe.environment, recipe.rollout.groups_per_step, recipe.rollout.episodes_per_group)


def evaluated_at_most(recipe: RlRecipe | DistillRecipe | SftRecipe | EvaluateRecipe) -> Episodes:
    """Episodes of one evaluation at their maximum length. The `evaluate` stage uses `final_seeds`."""
    evaluation = recipe.evaluation
    key = "evaluation.final_seeds" if isinstance(recipe, EvaluateRecipe) else "evaluation.seeds"
    # The default number if the rows of a file have not been counted.
    seeds, environment = evaluation.ranges[key].of_generated(key), evaluated_environment(recipe)
    assert environment is not None
    return _episodes(recipe, environment, len(seeds), evaluation.episodes_per_seed)


def _episodes(
    recipe: RlRecipe | DistillRecipe | SftRecipe | EvaluateRecipe,
    environment: EnvironmentRecipe,
    groups: int,
    size: int,
) -> Episodes:
    turns, whole = environment.max_turns, recipe.rollout.tokens_per_episode
    answer = min(turns * recipe.rollout.tokens_per_turn, whole - 1)
    rest = whole - answer
    # With several turns, the length of the shared prompt is unknown and counts as 0.
    prompt, observed = (rest, 0) if turns == 1 else (0, rest)
    return Episodes(groups, size, prompt, answer, answer, observed)


def rows_at_most(recipe: SftRecipe | DpoRecipe | RewardRecipe) -> Tokens:
    """Tokens of an optimizer step on rows (or both sides of pairs) of maximum length, all of them trained.

    The maximum is `data.max_tokens`, or `rollout.tokens_per_episode` for expert traces.
    """
    if recipe.data is None:
        assert isinstance(recipe, SftRecipe)
        length = recipe.rollout.tokens_per_episode
    else:
        length = recipe.data.max_tokens
    count = recipe.rows_per_update * (1 if isinstance(recipe, SftRecipe) else 2)
    return rows_of(count, length, 0 if isinstance(recipe, RewardRecipe) else length)


def _width(dtype: str | None, device: Device) -> int:
    """Bytes per number in matrix products. `auto` selects the faster dtype, and None bfloat16 on a GPU."""
    if dtype is None:
        return 2 if device.is_gpu else 4
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.bfloat16 > device.float32) else 4


def _sampling(
    engine: object, model: ModelRecipe, sizes: ModelSizes, device: Device, placement: Placement, episodes: Episodes
) -> list[Phase]:
    assert isinstance(engine, LocalEngineRecipe | VllmEngineRecipe), "a remote model has no local phases"
    width, engines, tensor = _width(model.dtype, device), max(1, placement.engines), placement.tensor
    device = _launching(engine, device)
    share, prompts = episodes.share(engines), episodes.prefilled
    read = prefill_seconds(sizes, device, share.prefilled, width, tensor, engine.tokens_per_forward)
    if placement.async_rollouts:
        sampled = steady_seconds(sizes, device, share, width, engine.slots, tensor, placement.async_rollouts)
    else:
        sampled = decoding_seconds(sizes, device, share, width, engine.slots, tensor)
    answers = f"{episodes.count:,} answers of {episodes.answer:,.0f} tokens, {engine.slots} at a time"
    answers += f" in each of {engines} engines" if engines > 1 else ""
    devices = engines * tensor
    return [
        Phase("reading prompts", read, devices, f"{prompts.count:,.0f} tokens", True, prompts.count),
        Phase("sampling", sampled, devices, answers, True, episodes.count * episodes.answer),
    ]


def _launching(engine: LocalEngineRecipe | VllmEngineRecipe, device: Device) -> Device:
    """The device with the seconds that `engine` takes to launch the kernels of a layer. `Device.launch` of a GPU is that of
    CUDA graphs."""
    if not device.is_gpu:
        return device
    if isinstance(engine, LocalEngineRecipe):
        return replace(device, launch=max(device.launch, GPU_LAUNCH_LOCAL))
    return replace(device, launch=max(device.launch, GPU_LAUNCH_EAGER)) if engine.enforce_eager else device


def _weights(
    engine: object, model: ModelRecipe, sizes: ModelSizes, device: Device, placement: Placement
) -> list[Phase]:
    """Sending new weights to engines; empty if the engine samples with the learner's."""
    if not placement.engines and not isinstance(engine, VllmEngineRecipe):
        return []
    how: WeightTransfer = "files"
    count = sizes.parameters
    if isinstance(engine, VllmEngineRecipe):
        how = engine.weight_transfer
        count = trained_parameters(model, sizes) if engine.adapters == "adapter_only" else count
    sent = transfer_seconds(replace(sizes, parameters=count), device, placement, _width(model.dtype, device), how)
    return [Phase("weights to the engines", sent, placement.all_devices, f"{count:,} parameters")]


def _rl(
    recipe: RlRecipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement,
    episodes: Episodes,
    reward: ModelSizes,
) -> list[Phase]:
    learner, width = recipe.learner, _width(recipe.model.dtype, device)
    tokens, devices = episodes.learned, placement.devices
    phases = _sampling(recipe.engine, recipe.model, sizes, device, placement, episodes)
    words = f"{tokens.count:,.0f} tokens, prompts once for each group"
    if recipe.reward is not None:
        read, reward_width = episodes.whole, _width(recipe.reward.dtype, device)
        scoring = forward_seconds(reward, device, placement, read, reward_width, recipe.reward.tokens_per_batch)
        phases.append(Phase("reward model", scoring, devices, f"{read.count:,.0f} tokens", tokens=read.count))
    if recipe.needs_reference:
        seconds = forward_seconds(sizes, device, placement, tokens, width, learner.tokens_per_batch)
        phases.append(Phase("reference log-probabilities", seconds, devices, words, tokens=tokens.count))
    if isinstance(recipe.credit, TokenBaselineCredit):
        seconds = forward_seconds(sizes, device, placement, tokens, width, learner.tokens_per_batch)
        phases.append(Phase("energies of tokens", seconds, devices, words, tokens=tokens.count))
    if recipe.teacher is not None:
        phases += _teacher(recipe.teacher, recipe.model, sizes, device, placement, tokens)
    updates = learner.updates_per_step * learner.epochs_per_step
    if recipe.has_critic and recipe.critic.backbone == "separate":
        phases += _critic(recipe, sizes, device, placement, tokens)
    phases += _learning(
        recipe.model, sizes, device, placement, tokens, learner.tokens_per_batch, updates, learner.epochs_per_step
    )
    return phases + _weights(recipe.engine, recipe.model, sizes, device, placement)


def _teacher(
    teacher: TeacherRecipe, model: ModelRecipe, sizes: ModelSizes, device: Device, placement: Placement, tokens: Tokens
) -> list[Phase]:
    """The teacher's forward passes; empty if the teacher is on servers."""
    if teacher.urls:
        return []
    teacher_model = (teacher_sizes(teacher.path) if teacher.path is not None else None) or sizes
    width = _width(teacher.dtype if teacher.path is not None else model.dtype, device)
    seconds = forward_seconds(teacher_model, device, placement, tokens, width, teacher.tokens_per_batch)
    return [Phase("teacher", seconds, placement.devices, f"{tokens.count:,.0f} tokens", tokens=tokens.count)]


def _distill(
    recipe: DistillRecipe, sizes: ModelSizes, device: Device, placement: Placement, episodes: Episodes
) -> list[Phase]:
    """Sampling, the teacher's forward passes, learning, and new weights for the engine."""
    learner, tokens = recipe.learner, episodes.learned
    phases = _sampling(recipe.engine, recipe.model, sizes, device, placement, episodes)
    phases += _teacher(recipe.teacher, recipe.model, sizes, device, placement, tokens)
    updates = learner.updates_per_step * learner.epochs_per_step
    phases += _learning(
        recipe.model, sizes, device, placement, tokens, learner.tokens_per_batch, updates, learner.epochs_per_step
    )
    return phases + _weights(recipe.engine, recipe.model, sizes, device, placement)


def _critic(recipe: RlRecipe, sizes: ModelSizes, device: Device, placement: Placement, tokens: Tokens) -> list[Phase]:
    """Value estimation and updates of a critic with the size of the policy and a scalar head."""
    learner = recipe.learner
    model, bare = recipe.critic.model(recipe.model), Tokens(tokens.count, tokens.pairs)
    width, updates = _width(model.dtype, device), learner.updates_per_step * learner.epochs_per_step
    values = forward_seconds(sizes, device, placement, bare, width, learner.tokens_per_batch)
    parts = _learning(model, sizes, device, placement, bare, learner.tokens_per_batch, updates, learner.epochs_per_step)
    return [
        Phase("values", values, placement.devices, f"{bare.count:,.0f} tokens", tokens=bare.count),
        Phase(
            "critic's updates",
            sum(part.seconds for part in parts),
            placement.devices,
            parts[0].how,
            False,
            parts[0].tokens,
        ),
    ]


def _rows(
    recipe: SftRecipe | DpoRecipe | RewardRecipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement,
    tokens: Tokens,
) -> list[Phase]:
    phases, budget, words = [], recipe.learner.tokens_per_batch, f"{tokens.count:,.0f} tokens"
    if isinstance(recipe, DpoRecipe) and recipe.loss.needs_reference:
        width = _width(recipe.model.dtype, device)
        seconds = forward_seconds(sizes, device, placement, tokens, width, budget)
        phases.append(Phase("reference log-probabilities", seconds, placement.devices, words, tokens=tokens.count))
    return phases + _learning(recipe.model, sizes, device, placement, tokens, budget, 1, 1)


def _learning(
    model: ModelRecipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement,
    tokens: Tokens,
    tokens_per_batch: int,
    updates: int,
    passes: int,
) -> list[Phase]:
    """`updates` optimizer steps over `passes` passes through `tokens`."""
    width, whole = _width(model.dtype, device), model.lora is None
    each = tokens * (passes / updates)
    learned = updates * training_seconds(
        sizes, device, placement, each, width, tokens_per_batch, whole, model.gradient_checkpointing
    )
    trained = trained_parameters(model, sizes)
    stepped = updates * optimizer_seconds(trained, device, placement, width)
    how = f"{passes * tokens.count:,.0f} tokens" + (f" in {updates} updates" if updates > 1 else "")
    return [
        Phase("forward and backward passes", learned, placement.devices, how, tokens=passes * tokens.count),
        Phase("optimizer", stepped, 0 if placement.offloaded else placement.devices, f"{trained:,} parameters"),
    ]
