"""Published placements on 8 GPUs and alternative placements of the same work: duration and busy GPUs of each phase.

Lengths are those of this repository's data for the same tasks, in tokens; the original lengths are unknown. GPUs are H100.
Full logits, uneven lengths and start-up are not counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.planning.devices import DEVICES, GPU_LAUNCH_EAGER, Device
from posttrain.planning.memory import ModelSizes
from posttrain.planning.model_sizes import PUBLISHED
from posttrain.planning.phases import Phase, idle_share, total_seconds
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.times import (
    decoding_seconds,
    forward_seconds,
    optimizer_seconds,
    prefill_seconds,
    training_seconds,
    transfer_seconds,
)
from posttrain.planning.work import Episodes, Tokens, rows_of

QWEN3_4B, QWEN25_3B = PUBLISHED["Qwen3-4B"], PUBLISHED["Qwen2.5-3B"]
H100 = DEVICES["h100"]
EAGER = replace(H100, launch=GPU_LAUNCH_EAGER)
RATIONALES = Episodes(groups=256, size=2, prompt=208, answer=127, longest=227)
"""A step of PPO on procedures: docs/reference/rationales.md has the lengths."""
MEMORY = Episodes(groups=32, size=4, prompt=1500, answer=1500, longest=3500, observed=600)
"""A step of the memory agent: at most 5,120 tokens per episode, of which about 1,500 are instructions."""
UNITS = 10
"""Maximum number of units per answer in DRCA (`max_units_per_sequence`)."""


def beside(what: str, phases: Sequence[Phase], how: str = "") -> Phase:
    """Merge phases that run concurrently on different devices; the result takes as long as the longest."""
    seconds = max(phase.seconds for phase in phases)
    return Phase(what, seconds, sum(phase.seconds * phase.devices for phase in phases) / seconds, how)


def alone(phases: Sequence[Phase], what: str) -> Phase:
    """Merge phases that run one after the other on the same devices."""
    seconds = sum(phase.seconds for phase in phases)
    return Phase(what, seconds, sum(phase.seconds * phase.devices for phase in phases) / seconds)


def sampled(sizes: ModelSizes, device: Device, job: Episodes, engines: int, tensor: int, slots: int = 256) -> Phase:
    """Prefill and decoding."""
    share = job.share(engines)
    seconds = prefill_seconds(sizes, device, share.prefilled, 2, tensor, 16_384)
    seconds += decoding_seconds(sizes, device, share, 2, slots, tensor)
    return Phase("sampling", seconds, engines * tensor, f"{engines} engines of {tensor}")


def read(what: str, sizes: ModelSizes, tokens: Tokens, devices: int, shard: int = 1) -> Phase:
    """A forward pass on `devices` devices."""
    return Phase(what, forward_seconds(sizes, H100, Placement(devices, shard), tokens, 2, 16_384), devices)


def learned(
    what: str, sizes: ModelSizes, tokens: Tokens, placement: Placement, updates: int, budget: int
) -> list[Phase]:
    """`updates` optimizer steps on `tokens` each, with gradient checkpointing. Devices are idle during an offloaded optimizer
    step."""
    each = training_seconds(sizes, H100, placement, tokens, 2, budget, checkpointing=True)
    stepped = optimizer_seconds(sizes.parameters, H100, placement, 2)
    return [
        Phase(f"{what}: forward and backward", updates * each, placement.devices),
        Phase(f"{what}: AdamW", updates * stepped, 0 if placement.offloaded else placement.devices),
    ]


def separate(job: Episodes) -> Tokens:
    """Every episode separately, with logits of sampled tokens."""
    return replace(job.whole, scored=job.count * job.answer)


def ppo_as_published(epochs: int, counterfactual: bool) -> list[Phase]:
    """2 GPUs for engines, 1 for the reference model, 1 for the reward model, 2 for the critic, 2 for the policy. Critic and
    policy updates alternate."""
    job, whole = RATIONALES, separate(RATIONALES)
    two = Placement(2, 2, offloaded=True)
    rewarded = job.whole * (UNITS + 1 if counterfactual else 1)
    scored = [
        read("reward model", QWEN3_4B, rewarded, 1),
        read("reference", QWEN3_4B, whole, 1),
        read("values", QWEN3_4B, job.whole, 2, 2),
        read("log-probabilities", QWEN3_4B, whole, 2, 2),
    ]
    placed = Placement(2, 2, engines=2, colocated=False)
    return [
        sampled(QWEN3_4B, EAGER, job, 2, 1),
        beside("scoring", scored, "reward 1, reference 1, critic 2, policy 2"),
        alone(learned("critic", QWEN3_4B, job.whole, two, epochs, 16_384), "critic update"),
        alone(learned("policy", QWEN3_4B, whole, two, epochs, 16_384), "policy update"),
        Phase("weights to the engines", transfer_seconds(QWEN3_4B, H100, placed, 2, "nccl"), 4),
    ]


def ppo_colocated(epochs: int, counterfactual: bool) -> list[Phase]:
    """The same work with all roles on all 8 GPUs: optimizers on the GPUs, units probed in one pass, the prompt of a group
    computed once, and the engine's log-probabilities used instead of a second pass."""
    job = RATIONALES
    eight = Placement(8, 8, engines=8)
    bare = Tokens(job.learned.count, job.learned.pairs)
    # The rewards after each unit come from the pass that computes the reward (`unit_credit.probe: one_pass`).
    return [
        sampled(QWEN3_4B, H100, job, 8, 1),
        read("reward model", QWEN3_4B, job.whole, 8, 8),
        read("reference", QWEN3_4B, job.learned, 8, 8),
        read("values", QWEN3_4B, bare, 8, 8),
        alone(learned("critic", QWEN3_4B, bare, eight, epochs, 16_384), "critic update"),
        alone(learned("policy", QWEN3_4B, job.learned, eight, epochs, 16_384), "policy update"),
        Phase("weights to the engines", transfer_seconds(QWEN3_4B, H100, eight, 2, "nccl"), 8),
    ]


def memory_as_published() -> list[Phase]:
    """All roles take turns on all 8 GPUs: 2 engines of 4, 40 updates of 32 episodes."""
    job, whole = MEMORY, separate(MEMORY)
    eight = Placement(8, 8, engines=2, tensor=4)
    return [
        sampled(QWEN3_4B, EAGER, job, 2, 4),
        read("log-probabilities", QWEN3_4B, whole, 8, 8),
        read("reference", QWEN3_4B, whole, 8, 8),
        alone(learned("policy", QWEN3_4B, whole * 0.25, eight, 40, 2 * 3600), "policy update"),
        Phase("weights to the engines", transfer_seconds(QWEN3_4B, H100, eight, 2, "nccl"), 8),
    ]


def memory_colocated(updates: int) -> list[Phase]:
    """8 engines of 1, the prompt of a group computed once, forward passes of 10,240 tokens. Each of 40 `updates` trains on a
    quarter of the episodes, a single one on all of them."""
    job = MEMORY
    eight = Placement(8, 8, engines=8)
    each = job.learned * 0.25 if updates == 40 else job.learned
    return [
        sampled(QWEN3_4B, H100, job, 8, 1),
        read("reference", QWEN3_4B, job.learned, 8, 8),
        alone(learned("policy", QWEN3_4B, each, eight, updates, 10_240), "policy update"),
        Phase("weights to the engines", transfer_seconds(QWEN3_4B, H100, eight, 2, "nccl"), 8),
    ]


def sft_on_eight(offloaded: bool) -> list[Phase]:
    """An update on 64 rows; gradients and optimizer state sharded over 8 GPUs."""
    tokens = rows_of(64, RATIONALES.prompt + RATIONALES.answer, RATIONALES.answer)
    return learned("SFT", QWEN3_4B, tokens, Placement(8, 8, offloaded=offloaded), 1, 32_768)


def dpo_on_eight(offloaded: bool, reference: bool) -> list[Phase]:
    """An update on 240 pairs in micro-batches of 3, with the reference model's pass or with cached log-probabilities."""
    length = RATIONALES.prompt + RATIONALES.answer
    tokens = rows_of(480, length, RATIONALES.answer)
    first = [read("reference", QWEN3_4B, tokens, 8, 8)] if reference else []
    return first + learned("DPO", QWEN3_4B, tokens, Placement(8, 8, offloaded=offloaded), 1, round(6 * length))


def reward_on_eight() -> list[Phase]:
    """An update of the reward model on 512 pairs, ZeRO 1 with the optimizer on the GPUs."""
    whole = rows_of(1024, RATIONALES.prompt + RATIONALES.answer, 0)
    return learned("reward", QWEN3_4B, whole, Placement(8, 8), 1, 32 * 2 * 335)


def search_run(groups: int, size: int) -> float:
    """Seconds of a run of RAGEN's search on one GPU: Qwen2.5-3B, 500 prompts of a bandit, one epoch."""
    job = Episodes(groups, size, 200, 100, 400)
    tokens = separate(job)
    phases = [
        sampled(QWEN25_3B, H100, job, 1, 1),
        read("log-probabilities", QWEN25_3B, tokens, 1),
        read("reference", QWEN25_3B, tokens, 1),
        *learned("policy", QWEN25_3B, tokens, ALONE, 1, 4 * 600),
    ]
    return 500 / groups * total_seconds(phases)


def search_in_parallel(gpus: int = 8) -> tuple[float, float, float]:
    """(seconds until the last run ends, sum of the seconds of all runs, idle share of GPU time). Each run takes the first
    free GPU."""
    runs = [search_run(groups, size) for groups in (4, 8, 16) for size in (4, 8, 16)]
    free = [0.0] * gpus
    for seconds in runs:
        first = free.index(min(free))
        free[first] += seconds
    return max(free), sum(runs), 1 - sum(runs) / (gpus * max(free))


PLANS: dict[str, dict[str, list[Phase]]] = {
    "PPO": {"as published": ppo_as_published(2, False), "colocated": ppo_colocated(2, False)},
    "DRCA": {"as published": ppo_as_published(1, True), "colocated, one pass": ppo_colocated(1, True)},
    "memory agent": {
        "as published": memory_as_published(),
        "8 engines": memory_colocated(40),
        "8 engines, 1 update": memory_colocated(1),
    },
    "SFT": {"as published": sft_on_eight(True), "optimizer on the GPUs": sft_on_eight(False)},
    "DPO": {"as published": dpo_on_eight(True, True), "cached reference, no offload": dpo_on_eight(False, False)},
    "reward model": {"as published": reward_on_eight()},
}
"""Job -> placement -> the phases of a step."""


def busy(phases: Sequence[Phase]) -> float:
    """Mean number of busy GPUs over a step, of 8."""
    return 8 * (1 - idle_share(phases, Placement(8)))


def table(job: str) -> list[dict[str, Any]]:
    """A row for each phase of a job, and one for the step: seconds and busy GPUs for each placement."""
    placements = PLANS[job]
    names = dict.fromkeys(phase.what for phases in placements.values() for phase in phases)
    rows: list[dict[str, Any]] = []
    for name in names:
        row: dict[str, Any] = {"phase": name}
        for placement, phases in placements.items():
            found = [phase for phase in phases if phase.what == name]
            row[f"{placement}, s"] = found[0].seconds if found else None
            row[f"{placement}, busy GPUs"] = found[0].devices if found else None
        rows.append(row)
    last: dict[str, Any] = {"phase": "step"}
    for placement, phases in placements.items():
        last[f"{placement}, s"], last[f"{placement}, busy GPUs"] = total_seconds(phases), busy(phases)
    return [*rows, last]
