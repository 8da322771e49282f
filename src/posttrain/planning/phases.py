"""What a step of a recipe takes: seconds of each phase, by whom, and what waits meanwhile.

Everything that a recipe leaves open is taken at its limit: episodes and rows as long as they may be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.planning.devices import Device
from posttrain.planning.memory import ModelSizes, trained_parameters
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.times import (
    decoding_seconds,
    forward_seconds,
    optimizer_seconds,
    prefill_seconds,
    steady_seconds,
    sync_seconds,
    training_seconds,
)
from posttrain.planning.work import Episodes, Tokens, rows_of
from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.stages import DpoRecipe, EvaluateRecipe, GenerateRecipe, Recipe, RewardRecipe, RlRecipe, SftRecipe


@dataclass(frozen=True)
class Phase:
    """A stretch of a step."""

    what: str
    seconds: float
    devices: float
    """That are at work, on average."""
    how: str = ""
    """What was counted."""
    sampling: bool = False
    """Whether engines do it, and may do it ahead."""
    tokens: float = 0.0
    """That it goes through; 0 where it is no work on tokens."""


def step_phases(
    recipe: Recipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement = ALONE,
    episodes: Episodes | None = None,
    rows: Tokens | None = None,
    reward: ModelSizes | None = None,
) -> list[Phase]:
    """The phases of one step (of an optimizer step, for stages that learn from rows) in their order.

    `episodes`: what an RL step samples, and `rows`: what an optimizer step on rows goes through; as long as the recipe
    lets them be, if not given. `reward`: sizes of the reward model, those of the policy if not given. A stage that only
    samples has its whole work in one step; rows of `generate` have no number before they are read, and no phases.
    """
    if isinstance(recipe, RlRecipe):
        return _rl(recipe, sizes, device, placement, episodes or episodes_at_most(recipe), reward or sizes)
    if isinstance(recipe, EvaluateRecipe):
        return evaluation_phases(recipe, sizes, device, placement)
    if isinstance(recipe, GenerateRecipe):
        return []
    return _rows(recipe, sizes, device, placement, rows or rows_at_most(recipe))


def evaluation_phases(
    recipe: RlRecipe | SftRecipe | EvaluateRecipe, sizes: ModelSizes, device: Device, placement: Placement = ALONE
) -> list[Phase]:
    """Of one evaluation on held-out seeds, episodes as long as they may be; none where nothing is played."""
    if recipe.environment is None or recipe.remote is not None:
        return []
    return _sampling(recipe.engine, recipe.model, sizes, device, placement, evaluated_at_most(recipe))


def plain(sizes: ModelSizes) -> bool:
    """Whether the sizes add up to the parameters, within a tenth: a decoder of another kind cannot be timed by them."""
    found = [replace(sizes, tied=tied).computed_parameters for tied in (True, False)]
    return any(abs(count / sizes.parameters - 1) < 0.1 for count in found)


def total_seconds(phases: Sequence[Phase], placement: Placement = ALONE) -> float:
    """Of a step whose phases follow each other; ahead, sampling and everything else run side by side."""
    sampled = sum(phase.seconds for phase in phases if phase.sampling)
    rest = sum(phase.seconds for phase in phases if not phase.sampling)
    return max(sampled, rest) if placement.async_rollouts else sampled + rest


def idle_share(phases: Sequence[Phase], placement: Placement = ALONE) -> float:
    """Share of the devices' time in a step in which they wait for others."""
    busy = sum(phase.seconds * phase.devices for phase in phases)
    return max(0.0, 1 - busy / (placement.all_devices * total_seconds(phases, placement)))


def episodes_at_most(recipe: RlRecipe) -> Episodes:
    """Of an RL step: episodes of `rollout.tokens_per_episode` tokens, sampled as far as the turns may be."""
    return _episodes(recipe, recipe.rollout.groups_per_step, recipe.rollout.episodes_per_group)


def evaluated_at_most(recipe: RlRecipe | SftRecipe | EvaluateRecipe) -> Episodes:
    """Of one evaluation; for the stage `evaluate`, of its table."""
    evaluation = recipe.evaluation
    seeds = evaluation.final_seeds if isinstance(recipe, EvaluateRecipe) else evaluation.seeds
    return _episodes(recipe, seeds.count, evaluation.episodes_per_seed)


def _episodes(recipe: RlRecipe | SftRecipe | EvaluateRecipe, groups: int, size: int) -> Episodes:
    assert recipe.environment is not None
    turns, whole = recipe.environment.max_turns, recipe.rollout.tokens_per_episode
    answer = min(turns * recipe.rollout.tokens_per_turn, whole - 1)
    rest = whole - answer
    # Where an episode has turns, how much of the rest is the prompt that a group shares is not known: none of it.
    prompt, observed = (rest, 0) if turns == 1 else (0, rest)
    return Episodes(groups, size, prompt, answer, answer, observed)


def rows_at_most(recipe: SftRecipe | DpoRecipe | RewardRecipe) -> Tokens:
    """Of an optimizer step: rows, or both sides of pairs, of `data.max_tokens` tokens (traces: of
    `rollout.tokens_per_episode`), all of them trained."""
    if recipe.data is None:
        assert isinstance(recipe, SftRecipe)
        length = recipe.rollout.tokens_per_episode
    else:
        length = recipe.data.max_tokens
    count = recipe.rows_per_update * (1 if isinstance(recipe, SftRecipe) else 2)
    return rows_of(count, length, 0 if isinstance(recipe, RewardRecipe) else length)


def _width(dtype: str, device: Device) -> int:
    """Bytes of the numbers that are multiplied; `auto` takes the faster ones."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.bfloat16 > device.float32) else 4


def _sampling(
    engine: object, model: ModelRecipe, sizes: ModelSizes, device: Device, placement: Placement, episodes: Episodes
) -> list[Phase]:
    assert isinstance(engine, LocalEngineRecipe | VllmEngineRecipe), "a remote model takes no time here"
    width, engines, tensor = _width(model.dtype, device), max(1, placement.engines), placement.tensor
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
        read, own = episodes.whole, _width(recipe.reward.dtype, device)
        scoring = forward_seconds(reward, device, placement, read, own, recipe.reward.tokens_per_batch)
        phases.append(Phase("reward model", scoring, devices, f"{read.count:,.0f} tokens", tokens=read.count))
    if recipe.needs_reference:
        found = forward_seconds(sizes, device, placement, tokens, width, learner.tokens_per_batch)
        phases.append(Phase("reference log-probabilities", found, devices, words, tokens=tokens.count))
    updates = learner.updates_per_step * learner.epochs_per_step
    if recipe.has_critic and recipe.critic.backbone == "separate":
        phases += _critic(recipe, sizes, device, placement, tokens)
    phases += _learning(
        recipe.model, sizes, device, placement, tokens, learner.tokens_per_batch, updates, learner.epochs_per_step
    )
    if placement.engines:
        sent = sync_seconds(sizes, device, placement, width)
        phases.append(Phase("weights to the engines", sent, placement.all_devices, f"{sizes.parameters:,} parameters"))
    return phases


def _critic(recipe: RlRecipe, sizes: ModelSizes, device: Device, placement: Placement, tokens: Tokens) -> list[Phase]:
    """Values before the updates, and the updates, of a critic as large as the policy; its head is one number a token."""
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
        found = forward_seconds(sizes, device, placement, tokens, width, budget)
        phases.append(Phase("reference log-probabilities", found, placement.devices, words, tokens=tokens.count))
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
    """`updates` optimizer steps that go through `tokens` `passes` times."""
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
