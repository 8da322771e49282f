"""Placement of a recipe's worker processes on the nodes and devices of a cluster."""

import math
from dataclasses import dataclass, replace
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.plan import ALONE, Placement
from posttrain.recipe.run import StageRecipe, TrainedRecipe


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    cpus: float
    """Processor cores."""
    devices: int
    """Number of GPUs. 0: the node computes on its CPU cores."""


def living(states: list[dict[str, Any]]) -> list[Node]:
    """Live nodes of a Ray cluster from `ray.nodes()`, head first."""
    return [
        Node(state["NodeManagerAddress"], state["Resources"].get("CPU", 0.0), int(state["Resources"].get("GPU", 0)))
        for state in sorted(states, key=lambda s: "node:__internal_head__" not in s["Resources"])
        if state["Alive"]
    ]


LEARNER, ENGINE, REWARD, ENVIRONMENTS = "learner", "engine", "reward model", "environments"
CRITIC, REFERENCE = "critic", "reference model"
CORES = {LEARNER: 1.0, ENGINE: 1.0, REWARD: 1.0, ENVIRONMENTS: 0.5, CRITIC: 1.0, REFERENCE: 1.0}
"""CPU cores that one worker requests. If a cluster has fewer in total, all requests are scaled down equally."""
MOST_ENVIRONMENTS = 16
"""Maximum number of environment processes if the recipe gives no count."""


@dataclass(frozen=True)
class Worker:
    """One process."""

    role: str
    number: int
    """Index within the role, from 0."""
    cpus: float
    gpus: int
    """Number of GPUs it needs. 0 for a colocated engine, which uses the learners' GPUs."""
    colocated: bool = False
    node: int = -1
    """Index of its node. -1 before placement."""
    devices: tuple[int, ...] = ()
    """Device indices on that node. Empty before placement."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.role} {self.number}"


def placed_recipe(recipe: StageRecipe) -> TrainedRecipe:
    """The recipe, if its stage can run on a cluster. Raises `InputError` if its stage cannot run on a cluster."""
    if not recipe.on_cluster:
        raise InputError(f"stage {recipe.stage} runs in one process; rl, sft, reward and dpo can run on a cluster")
    return recipe  # type: ignore[return-value]


def refuse_placement(recipe: TrainedRecipe) -> None:
    """Raise `InputError` for a placement without a model to place, and for engines that a cluster does not support."""
    transfer = getattr(getattr(recipe, "engine", None), "weight_transfer", "files")
    if transfer != "files":
        raise InputError(f"engine.weight_transfer: {transfer} does not work with hardware.ray; use files")
    for role, why, remedy in (
        ("critic", "critic with weights of its own", "credit.type=gae and critic.backbone=separate"),
        (
            "reference",
            "KL penalty with a fixed reference model",
            "kl.coefficient above 0 without kl.reference.update_every",
        ),
    ):
        if getattr(recipe.hardware.dedicated, role) and role not in recipe.separable:
            key = f"hardware.dedicated.{role}"
            raise InputError(f"{key}: there is no {why}; set {remedy}, or {key}=0")


def engine_count(recipe: TrainedRecipe, devices: bool) -> int:
    """Number of engine processes. `devices`: whether the cluster has GPUs."""
    if recipe.sampler is None:
        return 0
    wanted = recipe.hardware.engines
    if wanted.count is not None:
        return wanted.count
    return max(1, recipe.hardware.learners // wanted.devices) if devices and wanted.colocated else 1


def placement_of(recipe: StageRecipe) -> Placement:
    """Layout of a run on GPUs. Without Ray, the engine is in the learner's process."""
    hardware: HardwareRecipe | None = getattr(recipe, "hardware", None)
    if hardware is None:
        return ALONE
    learners, shards = hardware.learners, hardware.learners // hardware.replicas
    if hardware.ray is None or not recipe.on_cluster or not engine_count(placed_recipe(recipe), True):
        return Placement(learners, shards)
    engines = hardware.engines
    tensor = min(engines.devices, learners) if engines.colocated else engines.devices
    return Placement(learners, shards, engines=1, tensor=tensor, colocated=engines.colocated)


def reward_count(recipe: TrainedRecipe) -> int:
    """Number of reward-model processes."""
    return recipe.hardware.rewards.count if "reward" in recipe.models() else 0


def workers_of(recipe: TrainedRecipe, nodes: list[Node]) -> list[Worker]:
    """The worker processes of the recipe on these nodes, before placement."""
    hardware: HardwareRecipe = recipe.hardware
    gpus = any(node.devices for node in nodes)
    per_worker = 1 if gpus else 0
    workers = [Worker(LEARNER, i, CORES[LEARNER], per_worker) for i in range(hardware.learners)]
    for role, count in ((CRITIC, hardware.dedicated.critic), (REFERENCE, hardware.dedicated.reference)):
        workers += [Worker(role, i, CORES[role], per_worker) for i in range(count)]
    engines = hardware.engines
    colocated = gpus and engines.colocated
    needed = 0 if colocated else engines.devices * per_worker
    workers += [Worker(ENGINE, i, CORES[ENGINE], needed, colocated) for i in range(engine_count(recipe, gpus))]
    workers += [Worker(REWARD, i, CORES[REWARD], per_worker) for i in range(reward_count(recipe))]
    if recipe.sampler is None:
        return workers
    wanted = hardware.environments.count
    if wanted is None:
        spare = sum(node.cpus for node in nodes) - sum(worker.cpus for worker in workers)
        wanted = max(1, min(MOST_ENVIRONMENTS, int(spare // 4)))
    return workers + [Worker(ENVIRONMENTS, i, CORES[ENVIRONMENTS], 0) for i in range(wanted)]


def place(recipe: TrainedRecipe, nodes: list[Node]) -> tuple[list[Worker], float]:
    """Place each worker on the first node with room.

    Returns the placed workers and the fraction of the requested cores that every worker gets. Raises `InputError` if there
    are too few GPUs.
    """
    workers, engines = workers_of(recipe, nodes), recipe.hardware.engines
    needed, there = sum(worker.gpus for worker in workers), sum(node.devices for node in nodes)
    if needed > there:
        remedy = "lower hardware.processes or hardware.engines.count, or set hardware.engines.colocated: true"
        raise InputError(f"hardware: {counted(workers)} need {needed} GPUs, but the cluster has {there}; {remedy}")
    shared, learners = sum(worker.colocated for worker in workers) * engines.devices, recipe.hardware.learners
    if shared > learners:
        more = f"more than the GPUs of hardware.processes = {learners} learners"
        remedy = "lower the count, or set hardware.engines.colocated: false"
        raise InputError(f"hardware.engines: colocated engines need {shared} GPUs, {more}; {remedy}")
    share = min(1.0, sum(node.cpus for node in nodes) / sum(worker.cpus for worker in workers))
    while True:
        # Two decimals; Ray resolves cores to 1e-4.
        scaled = [replace(w, cpus=max(0.01, math.floor(w.cpus * share * 100) / 100)) for w in workers]
        placed = _packed(recipe, scaled, nodes)
        if placed is not None:
            return placed, share
        share *= 0.9
        if share < 0.01:
            raise InputError(
                f"cannot place {counted(workers)} on the devices of the cluster: all devices of an engine must be on one "
                "node; change hardware.engines.devices or hardware.processes"
            )


def counted(workers: list[Worker]) -> str:
    """Workers per role, for example `2 x learner, 1 x engine`."""
    counts = {role: sum(worker.role == role for worker in workers) for role in dict.fromkeys(w.role for w in workers)}
    return ", ".join(f"{count} x {role}" for role, count in counts.items())


def _packed(recipe: TrainedRecipe, workers: list[Worker], nodes: list[Node]) -> list[Worker] | None:
    """Place the workers on nodes. None if one does not fit."""
    cores, devices = [node.cpus for node in nodes], [list(range(node.devices)) for node in nodes]
    learners: list[Worker] = []
    placed = []
    for worker in workers:
        if worker.colocated:
            size = recipe.hardware.engines.devices
            hosts = learners[worker.number * size : (worker.number + 1) * size]
            if len({host.node for host in hosts}) != 1 or cores[hosts[0].node] < worker.cpus - 1e-9:
                return None
            node, assigned = hosts[0].node, tuple(device for host in hosts for device in host.devices)
        else:
            fits = [i for i in range(len(nodes)) if len(devices[i]) >= worker.gpus and cores[i] >= worker.cpus - 1e-9]
            if not fits:
                return None
            node, assigned = fits[0], tuple(devices[fits[0]][: worker.gpus])
            devices[node] = devices[node][worker.gpus :]
        cores[node] -= worker.cpus
        placed.append(replace(worker, node=node, devices=assigned))
        if worker.role == LEARNER:
            learners.append(placed[-1])
    return placed
