"""One RL job on 8, 64 and 1,024 devices: memory and time of each phase, and the effect of each setting."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from posttrain.planning.devices import DEVICES, Device
from posttrain.planning.memory import ModelSizes, peak_memory
from posttrain.planning.model_sizes import PUBLISHED
from posttrain.planning.phases import Phase, idle_share, step_phases, total_seconds
from posttrain.planning.placement import Placement
from posttrain.planning.times import step_seconds, transfer_seconds
from posttrain.planning.work import Episodes, decoding_steps
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.stages import RlRecipe

DEVICE = DEVICES["h200"]
JOB = Episodes(groups=256, size=16, prompt=512, answer=4096, longest=16_384)
"""4,096 answers per step, with lengths typical of reasoning models."""
COUNTS = (8, 64, 1024)
MODELS = {name: PUBLISHED[name] for name in ("Qwen3-4B", "Qwen3-32B", "Qwen3-235B-A22B")}
TENSOR = {"Qwen3-4B": 1, "Qwen3-32B": 2, "Qwen3-235B-A22B": 8}
"""Devices of an engine: the fewest whose memory holds the weights and a cache."""


@dataclass(frozen=True)
class Setting:
    """A job and its placement."""

    what: str
    placement: Placement
    job: Episodes = JOB
    slots: int = 64
    tokens_per_batch: int = 32_768
    lora: bool = False


@dataclass(frozen=True)
class Plan:
    """Estimates for a setting."""

    setting: Setting
    phases: list[Phase]
    learning: int
    """Bytes on a device while the learner learns."""
    sampling: int
    """Bytes on a device while engines sample."""
    fits: bool

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return total_seconds(self.phases, self.setting.placement)

    @property
    def speed(self) -> float:
        """Sampled tokens per second and device over the whole step."""
        job = self.setting.job
        return job.count * job.answer / self.seconds / self.setting.placement.all_devices

    @property
    def idle(self) -> float:
        """Fraction of device time that is idle."""
        return idle_share(self.phases, self.setting.placement)

    def of(self, *names: str) -> float:
        """Seconds of the phases with these names."""
        return sum(phase.seconds for phase in self.phases if phase.what in names)


@cache
def recipe_of(job: Episodes, slots: int, tokens_per_batch: int, lora: bool) -> RlRecipe:
    """The job as a recipe: bfloat16, gradient checkpointing, GRPO without a reference model, one update per step.

    `rollout.tokens_per_episode` is the mean length here, so the cache estimate is for full slots of mean length.
    """
    keys: dict[str, Any] = {
        "model.dtype": "bfloat16",
        "model.gradient_checkpointing": "true",
        "rollout.groups_per_step": job.groups,
        "rollout.episodes_per_group": job.size,
        "rollout.tokens_per_turn": int(job.answer),
        "rollout.tokens_per_episode": int(job.prompt + job.answer),
        "engine.type": "vllm",  # engines with CUDA graphs
        "engine.max_num_seqs": slots,
        "engine.tokens_per_forward": 16_384,
        "learner.tokens_per_batch": tokens_per_batch,
        "credit.type": "grpo",
    }
    if lora:
        keys["model.lora.rank"] = 32
    recipe = load_recipe([], [f"{key}={value}" for key, value in keys.items()], "rl")
    assert isinstance(recipe, RlRecipe)
    return recipe


def plan(setting: Setting, sizes: ModelSizes, device: Device = DEVICE) -> Plan:
    """Time and memory of a setting."""
    recipe = recipe_of(setting.job, setting.slots, setting.tokens_per_batch, setting.lora)
    learning, sampling = peak_memory(recipe, sizes, setting.placement)
    assert device.memory is not None
    # A tenth is reserved for what is not counted: kernel buffers, communication, fragmentation.
    fits = max(learning, sampling) < 0.9 * device.memory
    phases = [
        # As the published systems send them.
        replace(phase, seconds=transfer_seconds(sizes, device, setting.placement, 2, "nccl"))
        if phase.what == "weights to the engines"
        else phase
        for phase in step_phases(recipe, sizes, device, setting.placement, setting.job)
    ]
    return Plan(setting, phases, learning, sampling, fits)


def colocated(count: int, tensor: int, **changes: Any) -> Placement:
    """Learner and engines on the same `count` devices, all state sharded over all of them."""
    return Placement(count, count, engines=count // tensor, tensor=tensor, **changes)


def apart(learner: int, engines: int, tensor: int, **changes: Any) -> Placement:
    """Engines on separate devices."""
    return Placement(learner, learner, engines=engines, tensor=tensor, colocated=False, **changes)


def baseline(name: str, count: int) -> Setting:
    """Colocated, the smallest engines that hold the weights, 64 slots each, all other state sharded over all devices."""
    return Setting("baseline", colocated(count, TENSOR[name]))


def changes(name: str, count: int) -> list[Setting]:
    """One change of the baseline at a time."""
    base, tensor = baseline(name, count), TENSOR[name]
    tried = [replace(base, what=f"engine.slots {slots}", slots=slots) for slots in (128, 256)]
    wider = [wide for wide in (2 * tensor, 4 * tensor) if wide <= 8]
    tried += [replace(base, what=f"engines of {wide}", placement=colocated(count, wide)) for wide in wider]
    if name == "Qwen3-235B-A22B":
        experts = colocated(count, tensor, expert_parallel=8)
        tried.append(replace(base, what="expert parallel 8", placement=experts))
    if count > 8:
        shard = max(8, count // 8)
        copies = replace(base.placement, shard=shard)
        tried.append(replace(base, what=f"sharded over {shard}, replicated", placement=copies))
    tried.append(replace(base, what="tokens_per_batch 65,536", tokens_per_batch=65_536))
    tried.append(replace(base, what="optimizer offloaded", placement=replace(base.placement, offloaded=True)))
    tried.append(replace(base, what="LoRA rank 32", lora=True))
    tried.append(replace(base, what="4 x groups_per_step", job=replace(JOB, groups=4 * JOB.groups)))
    return [*tried, replace(base, what="answers of at most 8,192", job=replace(JOB, answer=3800, longest=8192))]


def best(name: str, count: int, async_rollouts: int, lora: bool = False) -> Plan | None:
    """The fastest setting that fits, out of those a recipe can choose; `async_rollouts` is `rollout.async_rollouts`, and 0 is
    colocated."""
    sizes = MODELS[name]
    found: list[Plan] = []
    experts = (1, 8) if sizes.experts else (1,)
    for tensor in (1, 2, 4, 8):
        for slots in (16, 32, 64, 128, 256):
            for parallel in experts:
                for placement in _placements(count, tensor, async_rollouts, expert_parallel=parallel):
                    found += [plan(Setting(_name(placement, slots, lora), placement, slots=slots, lora=lora), sizes)]
    fitting = [each for each in found if each.fits]
    return min(fitting, key=lambda each: each.seconds, default=None)


def _placements(count: int, tensor: int, async_rollouts: int, **more: Any) -> list[Placement]:
    offloads = (False, True)
    if not async_rollouts:
        return [colocated(count, tensor, offloaded=offloaded, **more) for offloaded in offloads]
    learners = [count * eighths // 8 for eighths in range(1, 8)]
    return [
        apart(learner, (count - learner) // tensor, tensor, async_rollouts=async_rollouts, offloaded=offloaded, **more)
        for learner in learners
        for offloaded in offloads
        if (count - learner) % tensor == 0 and learner % more["expert_parallel"] == 0
    ]


def _name(placement: Placement, slots: int, lora: bool) -> str:
    parts = [f"engines of {placement.tensor}, slots {slots}"]
    if placement.async_rollouts:
        parts.append(f"{placement.all_devices - placement.devices} GPUs for engines")
    parts += ["expert parallel 8"] if placement.expert_parallel > 1 else []
    parts += ["optimizer offloaded"] if placement.offloaded else []
    parts += ["LoRA"] if lora else []
    return "; ".join(parts)


def baseline_table() -> list[dict[str, Any]]:
    """A row for each model and cluster in the baseline setting."""
    return [_row(name, count, plan(baseline(name, count), sizes)) for name, sizes in MODELS.items() for count in COUNTS]


def best_table() -> list[dict[str, Any]]:
    """The fastest setting that fits, for each `rollout.async_rollouts` of 0, 1 and 4."""
    rows = []
    for name, sizes in MODELS.items():
        for count in COUNTS:
            base = plan(baseline(name, count), sizes)
            for async_rollouts in (0, 1, 4):
                if (
                    found := best(name, count, async_rollouts) or best(name, count, async_rollouts, lora=True)
                ) is not None:
                    rows.append(_best_row(name, count, async_rollouts, found, base))
    return rows


def changes_table() -> list[dict[str, Any]]:
    """The effect of each change of the baseline."""
    rows = []
    for name, sizes in MODELS.items():
        for count in COUNTS:
            base = plan(baseline(name, count), sizes)
            rows += [_change_row(name, count, plan(setting, sizes), base) for setting in changes(name, count)]
    return rows


def _row(name: str, count: int, found: Plan) -> dict[str, Any]:
    return {
        "model": name,
        "GPUs": count,
        "GB learning": found.learning / 1e9,
        "GB sampling": found.sampling / 1e9,
        "fits": "yes" if found.fits else "no",
        "prefill s": found.of("reading prompts"),
        "sampling s": found.of("sampling"),
        "tail share": tail_share(found, MODELS[name]),
        "learning s": found.of("forward and backward passes"),
        "optimizer s": found.of("optimizer"),
        "weight sync s": found.of("weights to the engines"),
        "step s": found.seconds,
        "tokens/s/GPU": found.speed,
    }


def published_table() -> list[dict[str, Any]]:
    """Reported end-to-end speeds (performance page of NeMo RL v0.6, on policy, H100) and predictions for two jobs.

    The answer lengths of the reports are unknown here."""
    short = Episodes(groups=64, size=32, prompt=256, answer=1024, longest=4096)
    rows = []
    for name, count, tensor, reported in (("Qwen3-30B-A3B", 32, 2, 1102.0), ("Qwen3-235B-A22B", 128, 8, 58.9)):
        placement = colocated(count, tensor, expert_parallel=8)
        sizes, device = PUBLISHED[name], DEVICES["h100"]
        predicted = [plan(Setting("published", placement, job), sizes, device).speed for job in (short, JOB)]
        rows.append(
            {
                "model": name,
                "GPUs": count,
                "reported tokens/s/GPU": reported,
                "predicted, answers of 1,024": predicted[0],
                "predicted, answers of 4,096": predicted[1],
            }
        )
    return rows


def tail_share(found: Plan, sizes: ModelSizes, device: Device = DEVICE) -> float:
    """Share of the sampling time in which no answer waits for a slot and the engines drain."""
    setting = found.setting
    share = setting.job.share(setting.placement.engines)
    full, tail, rows = decoding_steps(share.count, setting.slots, share.answer, share.longest)
    context = share.prompt + share.answer / 2
    busy = full * step_seconds(sizes, device, min(share.count, setting.slots), context, 2, setting.placement.tensor)
    ending = tail * step_seconds(sizes, device, rows, context, 2, setting.placement.tensor)
    return ending / (busy + ending)


def _best_row(name: str, count: int, async_rollouts: int, found: Plan, base: Plan) -> dict[str, Any]:
    return {
        "model": name,
        "GPUs": count,
        "async_rollouts": async_rollouts,
        "fastest setting": found.setting.what,
        "GB": max(found.learning, found.sampling) / 1e9,
        "sampling s": found.of("reading prompts", "sampling"),
        "learning s": found.of("forward and backward passes", "optimizer", "weights to the engines"),
        "step s": found.seconds,
        "tokens/s/GPU": found.speed,
        "x baseline": found.speed / base.speed,
        "idle share": found.idle,
    }


def _change_row(name: str, count: int, found: Plan, base: Plan) -> dict[str, Any]:
    return {
        "model": name,
        "GPUs": count,
        "change": found.setting.what,
        "fits": "yes" if found.fits else "no",
        "GB": max(found.learning, found.sampling) / 1e9,
        "sampling s": found.of("sampling"),
        "learning s": found.of("forward and backward passes"),
        "step s": found.seconds,
        "tokens/s/GPU": found.speed,
        "x baseline": found.speed / base.speed,
    }
