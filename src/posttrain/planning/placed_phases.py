"""Estimated time of a step on a cluster: the phases of the cost model, each on its devices.

A reference model and a critic with dedicated devices run at the same time as each other, and the critic's updates beside those of
the policy. All other phases are sequential.
"""

from dataclasses import replace

from posttrain.planning.devices import Device
from posttrain.planning.memory import ModelSizes, engine_memory, memory_estimate, peak_memory, weight_width, with_dtypes
from posttrain.planning.phases import Phase, episodes_at_most, rows_at_most, step_phases
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.times import forward_seconds
from posttrain.planning.work import Episodes, Tokens
from posttrain.planning.workers import (
    CRITIC,
    ENGINE,
    LEARNER,
    REFERENCE,
    REWARD,
    PlacedRecipe,
    engine_count,
    reward_count,
)
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.units import (
    CompatibleCredit,
    LeaveOneOutCredit,
    PrefixCredit,
    ShapleyCredit,
    TruncationCredit,
)

UNITS = 10
"""Assumed number of units per answer if the segmenter has no limit."""

DOERS = {
    "reading prompts": ENGINE,
    "sampling": ENGINE,
    "reward model": REWARD,
    "reference log-probabilities": REFERENCE,
    "values": CRITIC,
    "critic's updates": CRITIC,
    "forward and backward passes": LEARNER,
    "optimizer": LEARNER,
}
"""Phase -> role that runs it if that role has dedicated devices. Otherwise the learners run it."""


def placement_of(recipe: PlacedRecipe, devices: bool) -> Placement:
    """The recipe's hardware section as a `Placement`. `devices`: whether the cluster has GPUs."""
    hardware = recipe.hardware
    count = engine_count(recipe, devices)
    if not devices:
        return replace(ALONE, engines=count)
    learners = hardware.processes
    apart = count > 0 and not hardware.engines.colocated
    return Placement(
        learners,
        learners,
        engines=count,
        tensor=hardware.engines.devices if count else 1,
        colocated=hardware.engines.colocated or not count,
        offloaded=hardware.offload in ("optimizer", "all"),
        async_rollouts=recipe.rollout.async_rollouts if apart and isinstance(recipe, RlRecipe) else 0,
    )


def placed_phases(
    recipe: PlacedRecipe,
    sizes: ModelSizes,
    device: Device,
    devices: bool,
    episodes: Episodes | None = None,
    rows: Tokens | None = None,
) -> list[Phase]:
    """The phases of one step. Concurrent phases are merged into one with the duration of the longest."""
    recipe, placement = with_dtypes(recipe, device), placement_of(recipe, devices)
    if not isinstance(recipe, RlRecipe):
        return step_phases(recipe, sizes, device, placement, rows=rows or rows_at_most(recipe))
    played = episodes or episodes_at_most(recipe)
    phases = step_phases(recipe, sizes, device, placement, played)
    if recipe.reward is not None and recipe.unit_credit is not None:
        phases = [_with_units(phase, recipe) if phase.what == "reward model" else phase for phase in phases]
    if not devices:
        return phases
    moved, apart = _moved(recipe, sizes, device, placement, played, phases), recipe.hardware.dedicated
    if apart.critic or apart.reference:
        moved = _concurrent(moved, "scoring", ("reference log-probabilities", "values"))
    return _concurrent(moved, "updates", ("forward and backward passes", "critic's updates")) if apart.critic else moved


def _moved(
    recipe: RlRecipe,
    sizes: ModelSizes,
    device: Device,
    placement: Placement,
    played: Episodes,
    phases: list[Phase],
) -> list[Phase]:
    """The phases, recomputed for models with dedicated devices."""
    apart, copies, moved = recipe.hardware.dedicated, reward_count(recipe), []
    critic = Placement(apart.critic, apart.critic, offloaded=placement.offloaded) if apart.critic else None
    alone = {phase.what: phase for phase in step_phases(recipe, sizes, device, critic, played)} if critic else {}
    for phase in phases:
        if phase.what == "reward model" and copies:
            assert recipe.reward is not None
            width = 2 if recipe.reward.dtype == "bfloat16" else 4
            read, budget = played.whole, recipe.reward.tokens_per_batch
            seconds = forward_seconds(sizes, device, Placement(copies), read, width, budget)
            phase = replace(phase, seconds=seconds, devices=copies)
            phase = _with_units(phase, recipe) if recipe.unit_credit is not None else phase
        elif phase.what == "reference log-probabilities" and apart.reference:
            dedicated = Placement(apart.reference)
            width, budget = weight_width(recipe.model), recipe.learner.tokens_per_batch
            seconds = forward_seconds(sizes, device, dedicated, played.learned, width, budget)
            phase = replace(phase, seconds=seconds, devices=apart.reference)
        elif phase.what in ("values", "critic's updates") and critic:
            phase = alone[phase.what]
        moved.append(phase)
    return moved


def _concurrent(phases: list[Phase], name: str, together: tuple[str, ...]) -> list[Phase]:
    """The phases with those in `together`, which run at the same time, as one phase called `name`."""
    chosen = [phase for phase in phases if phase.what in together]
    if len(chosen) < 2:
        return phases
    longest = max(chosen, key=lambda phase: phase.seconds)
    busy = sum(phase.seconds * phase.devices for phase in chosen) / longest.seconds
    names = ", ".join(phase.what for phase in chosen)
    one = Phase(name, longest.seconds, busy, f"{names}, concurrently; {longest.what} takes longest")
    first = phases.index(chosen[0])
    return [*phases[:first], one, *(phase for phase in phases[first:] if phase not in chosen)]


def _with_units(phase: Phase, recipe: RlRecipe) -> Phase:
    """The reward-model phase, including the additional texts of unit credit."""
    texts = 1 + unit_texts(recipe)
    return replace(
        phase, seconds=texts * phase.seconds, tokens=texts * phase.tokens, how=f"{texts:g} texts an answer; {phase.how}"
    )


def unit_texts(recipe: RlRecipe) -> float:
    """Additional texts per answer that the reward model scores for unit credit."""
    credit = recipe.unit_credit
    units = float(getattr(getattr(credit, "segmenter", None), "max_units", None) or UNITS)
    if isinstance(credit, PrefixCredit | TruncationCredit):
        return 0.0 if credit.probe == "one_pass" else units
    if isinstance(credit, LeaveOneOutCredit):
        return units + 1
    if isinstance(credit, ShapleyCredit):
        return credit.permutations * (units - 1) + 1
    return units if isinstance(credit, CompatibleCredit) else 0.0


def memory_of(
    recipe: PlacedRecipe, sizes: ModelSizes, devices: bool, device: Device | None = None
) -> dict[str, tuple[int, int]]:
    """Role -> bytes on one of its devices as (while learning, while sampling).

    A colocated engine on GPUs counts toward the learner. On CPUs, an engine process has its own weights and cache.
    """
    recipe, placement = with_dtypes(recipe, device), placement_of(recipe, devices)
    apart, copies = recipe.hardware.dedicated, reward_count(recipe)
    moved = [
        what
        for what, gone in (
            ("reward model", copies),
            ("critic", apart.critic),
            ("reference model", apart.reference),
        )
        if gone
    ]
    rows = memory_estimate(recipe, sizes, placement, device)
    saved = sum(rows[what][0] for what in moved if what in rows)
    engine = sum(count for count, _ in engine_memory(recipe, sizes, placement, device).values())
    learning, sampling = peak_memory(recipe, sizes, placement, device)
    if not devices and placement.engines:
        sampling = learning
    of_roles = {LEARNER: (learning - saved, (sampling if placement.colocated else learning) - saved)}
    if placement.engines and not (devices and placement.colocated):
        of_roles[ENGINE] = (engine, engine)
    whole = memory_estimate(recipe, sizes)
    for role, what, over in (
        (REWARD, "reward model", 1),
        (CRITIC, "critic", apart.critic),
        (REFERENCE, "reference model", 1),
    ):
        if what == "reference model" and what in moved:
            size = weight_width(recipe.model) * sizes.parameters
            of_roles[role] = (size, size)
        elif what in moved and what in whole:
            passing = whole["activations, roughly"][0] if role == CRITIC else 0
            each = whole[what][0] // max(1, over) + passing
            of_roles[role] = (each, each)
    return of_roles
